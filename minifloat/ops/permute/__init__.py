"""Rows in the order of their experts and back, as ``torch.library`` operations: what surrounds grouped products.

``inverse``, int32 [T, k]: the row that each choice (slot) of each token has among all T k, sorted by expert.
``offsets``, int32 [E + 1]: the first row of each expert, then the number of rows of all; later rows are those of
dropped slots, which count as zero. Kernels equal these references bit by bit: fp32 (fp64 of fp64) in the order of a
token's slots, every product and sum rounded, and rounded once to the dtype of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifloat.ops.library import operation

WIDEST_DOT = 1024


def dot_width(columns: int) -> int:
    """Columns that a dot product adds side by side: a power of two."""
    return min(1 << max(columns - 1, 0).bit_length(), WIDEST_DOT)


def precise(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def check_indices(indices: Tensor, num_experts: int, label: str) -> None:
    """Raises a ValueError unless ``indices`` [T, k] are experts, or -1 for none; waits for the device."""
    wrong = (indices < -1) | (indices >= num_experts)
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"{label}: {int(wrong.sum())} of the indices {tuple(indices.shape)} are no expert's, the first "
            f"{int(indices[tuple(first)])} at {first}; give 0 to {num_experts - 1}, or -1 for none"
        )


@operation()
def checked_indices(indices: Tensor, num_experts: int, label: str) -> Tensor:
    """A copy of ``indices`` that :func:`check_indices` has looked at, in code compiled without their values."""
    check_indices(indices, num_experts, label)
    return indices.clone()


@checked_indices.fake
def _(indices: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(indices)


@operation("permute.kernels:permute")
def permute_rows(x: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """Rows [T k, H] sorted by expert, from ``x`` [T, H]: each is its token's, times its probability if there are any.

    A product is rounded once, from fp32. The rows of dropped slots are 0. ``probabilities`` are [T, k], fp32, and fp64
    for ``x`` of fp64.
    """
    y = x.new_empty(inverse.numel(), x.shape[1])
    for slot in range(inverse.shape[1]):
        values = x
        if probabilities is not None:
            values = (x.to(precise(x.dtype)) * probabilities[:, slot, None]).to(x.dtype)
        kept = inverse[:, slot] < offsets[-1]
        y.index_copy_(0, inverse[:, slot].long(), torch.where(kept[:, None], values, 0.0))
    return y


@permute_rows.fake
def _(x: Tensor, _probabilities: Tensor | None, inverse: Tensor, _offsets: Tensor) -> Tensor:
    return x.new_empty(inverse.numel(), x.shape[1])


@operation("permute.kernels:unpermute")
def unpermute_rows(y: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The tokens [T, H] of rows ``y`` [T k, H]: the sum of the k rows of each, times their probabilities if any.

    Computed in fp32, in the order of the slots, and rounded once. Dropped slots count as zero, whatever is in their
    rows. ``probabilities`` as in :data:`permute_rows`.
    """
    total = _term(y, probabilities, inverse, offsets, 0)
    for slot in range(1, inverse.shape[1]):
        total = total + _term(y, probabilities, inverse, offsets, slot)
    return total.to(y.dtype)


@unpermute_rows.fake
def _(y: Tensor, _probabilities: Tensor | None, inverse: Tensor, _offsets: Tensor) -> Tensor:
    return y.new_empty(inverse.shape[0], y.shape[1])


@operation("permute.kernels:unpermute_backward")
def unpermute_rows_backward(
    grad: Tensor, y: Tensor, probabilities: Tensor, inverse: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of :data:`unpermute_rows`, from ``grad`` [T, H] of its result: of ``y``, and of the probabilities.

    The former is what :data:`permute_rows` makes of ``grad``. The latter, [T, k], fp32 or fp64, are dot products whose
    order of sums :func:`_dot` defines.
    """
    exact = grad.to(precise(y.dtype))
    dots = [_dot(exact, _term(y, None, inverse, offsets, slot)) for slot in range(inverse.shape[1])]
    dprobabilities = torch.where(inverse < offsets[-1], torch.stack(dots, dim=1), 0.0)
    return permute_rows.reference(grad, probabilities, inverse, offsets), dprobabilities


@unpermute_rows_backward.fake
def _(grad: Tensor, y: Tensor, _probabilities: Tensor, inverse: Tensor, _offsets: Tensor) -> tuple[Tensor, Tensor]:
    dprobabilities = inverse.new_empty(inverse.shape, dtype=precise(y.dtype))
    return torch.empty_like(y, memory_format=torch.contiguous_format), dprobabilities


def _term(y: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor, slot: int) -> Tensor:
    """Returns what one slot of each token adds; rows of dropped ones, be they NaN, are not read."""
    values = y.index_select(0, inverse[:, slot]).to(precise(y.dtype))
    if probabilities is not None:
        values = values * probabilities[:, slot, None]
    return torch.where((inverse[:, slot] < offsets[-1])[:, None], values, 0.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The dot products of the rows of two [T, H]: [T].

    The columns are taken :func:`dot_width` at a time, each of which adds its products over the row; then neighbours are
    added until one number is left. A GPU can follow this order, whatever its threads hold.
    """
    width = dot_width(a.shape[1])
    total = a.new_zeros(a.shape[0], width)
    for first in range(0, a.shape[1], width):
        product = a[:, first : first + width] * b[:, first : first + width]
        total = total + torch.nn.functional.pad(product, (0, width - product.shape[1]))
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total[:, 0]
