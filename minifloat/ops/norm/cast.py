"""The norm cast with a given scale without being written: one kernel reads rows for their statistics, a second casts.

A kernel that does both reads x once, but holds few rows at a time: transposed codes then go to memory in pieces of few
bytes, and what that costs is more than the second reading. The cast begins with the rows that were read last, of which
the cache still has some.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.device import reciprocal
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm.device import normalize
from minifloat.ops.norm.statistics import statistics
from minifloat.ops.norm.tile import NormTile
from minifloat.ops.quantize import empty_cast
from minifloat.ops.quantize.device import (
    corner,
    extent,
    load_tile,
    record_max,
    single_bytes,
    store_codes,
)
from minifloat.ops.tiles import Tile, tile


@triton.jit
def norm_cast_kernel(
    x, gamma, beta, mean, rsigma, scale, row_codes, column_codes, scale_inv, amax,
    M, K,
    CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ELEMENT: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    M, K = extent(M, ALIGNED_M), extent(K, ALIGNED_K)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    first_m, first_k = corner(program, K, BLOCK_M, BLOCK_K)
    m, k = first_m + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_K)
    row_rsigma = tl.load(rsigma + m, mask=m < M, other=0.0)
    row_mean = tl.load(mean + m, mask=m < M, other=0.0) if CENTERED else row_rsigma
    level = tl.load(scale)
    values = load_tile(x, m, k, M, K)
    y = normalize(values, row_mean, row_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
    codes = ELEMENT.kernels.encode(y * level, ELEMENT)
    if COLUMN:
        codes = single_bytes(codes, M)
    if ROW:
        store_codes(row_codes, codes, m, k, M, K, False)
    if COLUMN:
        store_codes(column_codes, codes, m, k, M, K, True)
    inside = (m[:, None] < M) & (k[None, :] < K)
    magnitudes = tl.where(inside, tl.abs(y), 0.0)
    record_max(amax, tl.maximum(tl.max(tl.max(magnitudes, axis=1), axis=0), 0.0))  # of nothing but NaN 0
    if program == 0:
        tl.store(scale_inv, reciprocal(level))


_cast = Kernel(norm_cast_kernel)


class NormCast(NamedTuple):
    """Codes [M, K] rowwise and columnwise, scale_inv and amax [1], mean and rsigma [M], total [M, K]; or empty."""

    row_codes: Tensor
    column_codes: Tensor
    scale_inv: Tensor
    amax: Tensor
    mean: Tensor
    rsigma: Tensor
    total: Tensor


def norm_cast(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    choice: Tile | None = None,
    sums: NormTile | None = None,
) -> NormCast:
    """The codes of the norm of ``x``, or of ``total = x + residual``; the arguments are those of the operation.

    ``choice`` and ``sums`` are tiles other than the pinned ones, of the cast and of the statistics.
    """
    rows, width = x.shape
    x, gamma = ready(x), ready(gamma)
    mean, rsigma, total = statistics(x, residual, normalization, eps, sums)
    nothing = x.new_empty(0, dtype=torch.uint8)
    out = NormCast(
        empty_cast(x, fmt, ROWWISE, False)[0] if rowwise else nothing,
        empty_cast(x, fmt, COLUMNWISE, True)[0] if columnwise else nothing,
        x.new_empty(1, dtype=torch.float32),
        x.new_zeros(1, dtype=torch.float32),
        mean,
        rsigma,
        total,
    )
    choice = choice or tile("norm_columnwise" if columnwise else "norm", x.device)
    _cast(
        max(1, triton.cdiv(rows, choice.rows) * triton.cdiv(width, choice.cols)),  # without rows there is still a scale
        (
            x if residual is None else total, gamma, gamma if beta is None else ready(beta), mean, rsigma, scale,
            out.row_codes, out.column_codes, out.scale_inv, out.amax,
        ),
        (rows, width),
        (
            normalization == "LayerNorm", beta is not None, zero_centered, rowwise, columnwise, fmt.encoding,
            rows % 16 == 0, width % 16 == 0, choice.rows, choice.cols,
        ),
        choice.warps,
    )  # fmt: skip
    return out
