"""The permutation's kernels in Triton: one for each direction, and one for the gradients of the way back.

A program takes some tokens: it reads a token once for its k rows, or writes it once from them, in the order of
``inverse``. No two programs write to the same place, so that nothing is atomic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, ready
from minifloat.ops.permute import dot_width, precise
from minifloat.ops.quantize.device import corner, extent
from minifloat.ops.tiles import Tile

ELEMENTS = 2048
MOST_TOKENS = 32


@lru_cache(1024)
def rows_tile(columns: int) -> Tile:
    """The tile for rows of so many columns: results do not depend on it, but for the width of a dot product."""
    cols = dot_width(columns)
    rows = min(ELEMENTS // cols, MOST_TOKENS)
    return Tile(rows, cols, 4 if rows * cols > 512 else 1)


# ---- what the kernels share ----


@triton.jit
def places(row, H, h):
    """Addresses the elements of some rows and columns, of H columns."""
    return row[:, None].to(tl.int64) * H + h[None, :]


@triton.jit
def slot_of(t, j, T, k, experts, inverse, offsets, probabilities, SCALED: tl.constexpr):
    """Returns slot ``j`` of the tokens ``t``: its row, whether it is kept, its probability where there are any."""
    slot = t * k + j
    row = tl.load(inverse + slot, mask=t < T, other=0)
    kept = (t < T) & (row < tl.load(offsets + experts))
    probability = row
    if SCALED:
        probability = tl.load(probabilities + slot, mask=t < T, other=0.0)
    return row, kept, probability


# ---- the kernels ----


@triton.jit
def permute_kernel(
    x, probabilities, inverse, offsets, y,
    T, k, H, experts,
    SCALED: tl.constexpr, DOUBLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    H = extent(H, ALIGNED)
    first_t, first_h = corner(tl.program_id(0), H, ROWS, BLOCK)
    t, h = first_t + tl.arange(0, ROWS), first_h + tl.arange(0, BLOCK)
    inside = (t[:, None] < T) & (h[None, :] < H)
    values = tl.load(x + places(t, H, h), mask=inside, other=0.0)
    for j in range(k):
        row, kept, probability = slot_of(t, j, T, k, experts, inverse, offsets, probabilities, SCALED)
        result = values
        if SCALED:
            result = (values.to(PRECISE) * probability[:, None]).to(y.dtype.element_ty)
        tl.store(y + places(row, H, h), tl.where(kept[:, None], result, 0.0), mask=inside)


@triton.jit
def unpermute_kernel(
    y, probabilities, inverse, offsets, x,
    T, k, H, experts,
    SCALED: tl.constexpr, DOUBLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    H = extent(H, ALIGNED)
    first_t, first_h = corner(tl.program_id(0), H, ROWS, BLOCK)
    t, h = first_t + tl.arange(0, ROWS), first_h + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], PRECISE)
    for j in range(k):
        row, kept, probability = slot_of(t, j, T, k, experts, inverse, offsets, probabilities, SCALED)
        inside = kept[:, None] & (h[None, :] < H)
        term = tl.load(y + places(row, H, h), mask=inside, other=0.0).to(PRECISE)
        if SCALED:
            term = tl.where(inside, term * probability[:, None], 0.0)
        total = tl.where(j == 0, term, total + term)  # 0 + -0 would lose a sign
    inside = (t[:, None] < T) & (h[None, :] < H)
    tl.store(x + places(t, H, h), total.to(x.dtype.element_ty), mask=inside)


@triton.jit
def unpermute_backward_kernel(
    grad, y, probabilities, inverse, offsets, dy, dprobabilities,
    T, k, H, experts,
    DOUBLE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    PRECISE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    H = extent(H, ALIGNED)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for j in range(k):
        row, kept, probability = slot_of(t, j, T, k, experts, inverse, offsets, probabilities, True)
        dot = tl.zeros([ROWS, BLOCK], PRECISE)
        for chunk in range(tl.cdiv(H, BLOCK)):
            h = chunk * BLOCK + tl.arange(0, BLOCK)
            inside = (t[:, None] < T) & (h[None, :] < H)
            incoming = tl.load(grad + places(t, H, h), mask=inside, other=0.0).to(PRECISE)
            values = tl.load(y + places(row, H, h), mask=inside & kept[:, None], other=0.0).to(PRECISE)
            dot += incoming * values
            result = (incoming * probability[:, None]).to(dy.dtype.element_ty)
            tl.store(dy + places(row, H, h), tl.where(kept[:, None], result, 0.0), mask=inside)
        # Neighbours are added, level by level: of two numbers the order is no matter.
        for level in tl.static_range(LEVELS):
            dot = tl.sum(tl.reshape(dot, [ROWS, BLOCK >> (level + 1), 2]), axis=2)
        sums = tl.where(kept, tl.reshape(dot, [ROWS]), 0.0)
        tl.store(dprobabilities + t * k + j, sums, mask=t < T)


_permute = Kernel(permute_kernel)
_unpermute = Kernel(unpermute_kernel)
_unpermute_backward = Kernel(unpermute_backward_kernel)


# ---- launches ----


def permute(x: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The operation ``permute_rows``."""
    y = x.new_empty(inverse.numel(), x.shape[1])
    _launch(_permute, x, probabilities, inverse, offsets, y)
    return y


def unpermute(y: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """The operation ``unpermute_rows``."""
    x = y.new_empty(inverse.shape[0], y.shape[1])
    _launch(_unpermute, y, probabilities, inverse, offsets, x)
    return x


def _launch(
    kernel: Kernel, source: Tensor, probabilities: Tensor | None, inverse: Tensor, offsets: Tensor, target: Tensor
) -> None:
    tokens, columns = inverse.shape[0], source.shape[1]
    tile, inverse, source = rows_tile(columns), ready(inverse), ready(source)
    scaled = probabilities is not None
    tensors = source, ready(probabilities) if probabilities is not None else source, inverse, ready(offsets), target
    programs, constants = tile.count((tokens, columns)), (scaled, *_constants(source, tile))
    kernel(programs, tensors, _sizes(inverse, columns, offsets), constants, tile.warps)


def unpermute_backward(
    grad: Tensor, y: Tensor, probabilities: Tensor, inverse: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The operation ``unpermute_rows_backward``."""
    columns, tile = y.shape[1], rows_tile(y.shape[1])
    grad, y, inverse = ready(grad), ready(y), ready(inverse)
    dy = torch.empty_like(y)
    dprobabilities = inverse.new_empty(inverse.shape, dtype=precise(y.dtype))
    _unpermute_backward(
        triton.cdiv(inverse.shape[0], tile.rows),
        (grad, y, ready(probabilities), inverse, ready(offsets), dy, dprobabilities),
        _sizes(inverse, columns, offsets),
        (*_constants(y, tile), tile.cols.bit_length() - 1),
        tile.warps,
    )
    return dy, dprobabilities


def _sizes(inverse: Tensor, columns: int, offsets: Tensor) -> tuple[int, ...]:
    """T, k, H and the number of experts."""
    return *inverse.shape, columns, offsets.shape[0] - 1


def _constants(rows: Tensor, tile: Tile) -> tuple[Any, ...]:
    """DOUBLE, ALIGNED, ROWS and BLOCK."""
    return rows.dtype == torch.float64, rows.shape[1] % 16 == 0, tile.rows, tile.cols
