"""Rows in the order of their experts and back, in plain PyTorch: the definition that kernels equal bit by bit.

A slot is one choice of one token. ``inverse``, int32 [T, k], has the row of each slot, and slots whose row is beyond
the last expert's, ``offsets[-1]``, are dropped: they count as zero. Everything is computed in fp32 (fp64 of fp64), in
the order of a token's slots, every product and every sum rounded, and rounded once to the dtype of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDEST_DOT = 1024


def dot_width(columns: int) -> int:
    """Columns that a dot product adds side by side: a power of two."""
    return min(1 << max(columns - 1, 0).bit_length(), WIDEST_DOT)


def precise(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def permute(x: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """Writes each row of ``x`` [T, H], times the probability of each of its slots, to the rows [T k, H] of these."""
    y = x.new_empty(inverse.numel(), x.shape[1])
    for slot in range(inverse.shape[1]):
        values = x
        if probabilities is not None:
            values = (x.to(precise(x.dtype)) * probabilities[:, slot, None]).to(x.dtype)
        kept = inverse[:, slot] < offsets[-1]
        y.index_copy_(0, inverse[:, slot].long(), torch.where(kept[:, None], values, 0.0))
    return y


def unpermute(y: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """Adds for each token the rows of its slots, of ``y`` [T k, H], times their probabilities: [T, H]."""
    total = _term(y, probabilities, inverse, offsets, 0)
    for slot in range(1, inverse.shape[1]):
        total = total + _term(y, probabilities, inverse, offsets, slot)
    return total.to(y.dtype)


def unpermute_backward(
    grad: Tensor, y: Tensor, probabilities: Tensor, inverse: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`unpermute` with respect to ``y`` and to the probabilities, from that of its result."""
    exact = grad.to(precise(y.dtype))
    dots = [_dot(exact, _term(y, None, inverse, offsets, slot)) for slot in range(inverse.shape[1])]
    dprobabilities = torch.where(inverse < offsets[-1], torch.stack(dots, dim=1), 0.0)
    return permute(grad, probabilities, inverse, offsets), dprobabilities


def _term(y: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor, slot: int) -> Tensor:
    """What one slot of each token adds; what is in the rows of dropped ones, be it NaN, is not read."""
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
