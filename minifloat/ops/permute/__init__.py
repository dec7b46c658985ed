"""Rows in the order of their experts and back, as ``torch.library`` operations: what surrounds grouped products.

``inverse``, int32 [T, k], has the row that each choice (slot) of each token has among all T k, which are sorted by
expert. ``offsets``, int32 [E + 1], has the first row of each expert, and then the number of rows of all of them: later
rows are those of dropped slots. Both stay on the device, where they were computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.ops.library import operation
from minifloat.ops.permute import reference

__all__ = ["permute_rows", "unpermute_rows", "unpermute_rows_backward"]


@operation("permute.kernels:permute")
def permute_rows(x: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """Rows [T k, H] sorted by expert, from ``x`` [T, H]: each is its token's, times its probability if there are any.

    A product is rounded once, from fp32. The rows of dropped slots are 0. ``probabilities`` are [T, k], fp32, and fp64
    for ``x`` of fp64.
    """
    return reference.permute(x, probabilities, inverse, offsets)


@permute_rows.fake
def _(x: Tensor, _probabilities: Tensor | None, inverse: Tensor, _offsets: Tensor) -> Tensor:
    return x.new_empty(inverse.numel(), x.shape[1])


@operation("permute.kernels:unpermute")
def unpermute_rows(y: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The tokens [T, H] of rows ``y`` [T k, H]: the sum of the k rows of each, times their probabilities if any.

    Computed in fp32, in the order of the slots, and rounded once. Dropped slots count as zero, whatever is in their
    rows. ``probabilities`` as in :data:`permute_rows`.
    """
    return reference.unpermute(y, probabilities, inverse, offsets)


@unpermute_rows.fake
def _(y: Tensor, _probabilities: Tensor | None, inverse: Tensor, _offsets: Tensor) -> Tensor:
    return y.new_empty(inverse.shape[0], y.shape[1])


@operation("permute.kernels:unpermute_backward")
def unpermute_rows_backward(
    grad: Tensor, y: Tensor, probabilities: Tensor, inverse: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of :data:`unpermute_rows`, from ``grad`` [T, H] of its result: of ``y``, and of the probabilities.

    The former is what :data:`permute_rows` makes of ``grad``. The latter, [T, k], fp32 or fp64, are dot products whose
    order of sums ``reference.py`` defines.
    """
    return reference.unpermute_backward(grad, y, probabilities, inverse, offsets)


@unpermute_rows_backward.fake
def _(grad: Tensor, y: Tensor, _probabilities: Tensor, inverse: Tensor, _offsets: Tensor) -> tuple[Tensor, Tensor]:
    dprobabilities = inverse.new_empty(inverse.shape, dtype=reference.precise(y.dtype))
    return torch.empty_like(y, memory_format=torch.contiguous_format), dprobabilities
