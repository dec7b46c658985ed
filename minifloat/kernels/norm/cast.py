"""The norm and its cast with a given scale in one Triton kernel: 2 bytes read an element, 1 or 2 written.

A program takes a block of rows. It finds their statistics, a few rows at a time as the forward kernel does and in the
same order, then reads the block again, now from the cache, and casts it tile by tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.kernels.launch import Kernel, ready
from minifloat.kernels.norm.device import normalize, row_statistics
from minifloat.kernels.norm.tile import NormTile, forward_tile
from minifloat.kernels.quantize import empty_cast
from minifloat.kernels.quantize.device import (
    cast_fp8,
    extent,
    load_tile,
    reciprocal,
    record_max,
    single_bytes,
    store_codes,
)

CAST_ELEMENTS = 4096
"""Elements of a tile that is cast at a time."""


def cast_rows(width: int, statistics_rows: int) -> int:
    """Rows of a program: a sector of the transposed codes is 32 bytes; of wide rows the cache holds fewer.

    They are more than those of a tile of the statistics: tiles of one shape share a layout, which changes sums.
    """
    return max(32 if width <= 2048 else 16, 2 * statistics_rows)


@triton.jit
def norm_cast_kernel(
    x, gamma, beta, scale, row_codes, column_codes, scale_inv, amax, mean, rsigma,
    M, K,
    EPS: tl.constexpr, CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ELEMENT: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    M = extent(M, ALIGNED_M)
    K = extent(K, ALIGNED_K)
    first = tl.program_id(0) * BLOCK_M
    for step in range(0, BLOCK_M, ROWS):
        m = first + step + tl.arange(0, ROWS)
        row_mean, row_rsigma = row_statistics(x, x, m, M, K, EPS, CENTERED, False, ONE_CHUNK, ROWS, BLOCK)
        if CENTERED:
            tl.store(mean + m, row_mean, mask=m < M)
        tl.store(rsigma + m, row_rsigma, mask=m < M)
    tl.debug_barrier()  # the rows' statistics go to other threads, by way of their outputs
    m = first + tl.arange(0, BLOCK_M)
    block_rsigma = tl.load(rsigma + m, mask=m < M, other=0.0)
    block_mean = tl.load(mean + m, mask=m < M, other=0.0) if CENTERED else block_rsigma
    level = tl.load(scale)
    largest = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        values = load_tile(x, m, k, M, K)
        y = normalize(values, block_mean, block_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
        codes = cast_fp8(y * level, ELEMENT)
        if COLUMN:
            codes = single_bytes(codes, M)
        if ROW:
            store_codes(row_codes, codes, m, k, M, K, False)
        if COLUMN:
            store_codes(column_codes, codes, m, k, M, K, True)
        inside = (m[:, None] < M) & (k[None, :] < K)
        largest = tl.maximum(largest, tl.where(inside, tl.abs(y), 0.0))
    record_max(amax, tl.max(tl.max(largest, axis=1), axis=0))
    if first == 0:
        tl.store(scale_inv, reciprocal(level))


_cast = Kernel(norm_cast_kernel)


class NormCast(NamedTuple):
    """Codes [M, K] rowwise and columnwise, scale_inv and amax [1], mean and rsigma [M]; what is not there is empty."""

    row_codes: Tensor
    column_codes: Tensor
    scale_inv: Tensor
    amax: Tensor
    mean: Tensor
    rsigma: Tensor


def norm_cast(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    choice: NormTile | None = None,
) -> NormCast:
    """The codes of the norm of ``x``; the arguments are those of the operation."""
    rows, width = x.shape
    x, gamma = ready(x), ready(gamma)
    centered = normalization == "LayerNorm"
    nothing = x.new_empty(0, dtype=torch.uint8)
    out = NormCast(
        empty_cast(x, fmt, ROWWISE, False)[0] if rowwise else nothing,
        empty_cast(x, fmt, COLUMNWISE, True)[0] if columnwise else nothing,
        x.new_empty(1, dtype=torch.float32),
        x.new_zeros(1, dtype=torch.float32),
        x.new_empty(rows if centered else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
    )
    choice = choice or forward_tile(width)
    block_rows = cast_rows(width, choice.rows)
    _cast(
        max(1, triton.cdiv(rows, block_rows)),  # without rows there is still a scale
        (
            x, gamma, gamma if beta is None else ready(beta), scale, out.row_codes, out.column_codes,
            out.scale_inv, out.amax, out.mean, out.rsigma,
        ),
        (rows, width),
        (
            eps, centered, beta is not None, zero_centered, rowwise, columnwise, fmt.element,
            rows % 16 == 0, width % 16 == 0, choice.one_chunk, choice.rows, choice.block,
            block_rows, CAST_ELEMENTS // block_rows,
        ),
        choice.warps,
    )  # fmt: skip
    return out
