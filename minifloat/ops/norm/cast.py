"""The norm cast without being written: one kernel reads rows for their statistics, a second one casts.

Blocks span rows, and whole rows do not fit a program beside each other. With a given scale one kernel could do both,
but it holds few rows at a time: transposed codes then go to memory in pieces of few bytes, and what that costs is more
than the second reading. What is cast with a given scale is the fp32 norm; in blocks it is rounded to the dtype of ``x``
first, the very number that ``forward.py`` stores.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm.forward import NormTile, norm_forward, normalize
from minifloat.ops.quantize import empty_fused_cast
from minifloat.ops.quantize.blocks import held
from minifloat.ops.quantize.device import corner, extent, load_tile, tile_places
from minifloat.ops.quantize.fused import (
    cast_constants,
    fused_tile,
    record_amax,
    scale_strides,
    store_result,
    tile_constants,
)
from minifloat.ops.tiles import Tile


@triton.jit
def norm_cast_kernel(
    x, gamma, beta, mean, rsigma, scale, row_codes, column_codes, row_scales, column_scales, amax,
    M, K, row_stride_m, row_stride_k, column_stride_m, column_stride_k,
    CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    M, K = extent(M, ALIGNED_M), extent(K, ALIGNED_K)
    program = tl.program_id(0)
    if BLOCK == 0:  # begins with the rows that were read last, of which the cache still has some
        program = tl.num_programs(0) - 1 - program
    first_m, first_k = corner(program, K, BLOCK_M, BLOCK_K)
    m, k = tile_places(first_m, first_k, BLOCK_M, BLOCK_K, LAYOUTS)
    row_rsigma = tl.load(rsigma + m, mask=m < M, other=0.0)
    row_mean = tl.load(mean + m, mask=m < M, other=0.0) if CENTERED else row_rsigma
    values = load_tile(x, m, k, M, K)
    values = normalize(values, row_mean, row_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
    if CENTERED or HAS_BETA:  # outside lies minus the mean, times 1 + gamma where there is none, plus beta
        values = tl.where((m[:, None] < M) & (k[None, :] < K), values, 0.0)
    if BLOCK > 0:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    else:
        record_amax(amax, tl.abs(values))
    store_result(
        held(values, LAYOUTS), first_m, first_k, M, K, 0 * K, K,
        scale, row_codes, column_codes, row_scales, column_scales,
        row_stride_m, row_stride_k, column_stride_m, column_stride_k,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS,
    )  # fmt: skip


CAST = Kernel(norm_cast_kernel, layouts=True)


def norm_cast(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor | None,
    format: str,
    rowwise: bool,
    columnwise: bool,
    k_major: bool,
    residual: Tensor | None = None,
    choice: Tile | None = None,
    sums: NormTile | None = None,
) -> tuple[Tensor, ...]:
    """As the operation; ``choice`` and ``sums`` are tiles other than the pinned ones, of cast and statistics."""
    fmt, shape = parse(format), (x.shape[0], x.shape[1])
    x, gamma = ready(x), ready(gamma)
    _, mean, rsigma, _, total = norm_forward(
        x, gamma, beta, normalization, eps, zero_centered, None, False, residual, sums
    )
    out = empty_fused_cast(x, shape[1], fmt, rowwise, columnwise, k_major)
    # Other norms wait for a run on a GPU.
    shown = normalization == "RMSNorm" and residual is None and not zero_centered
    choice, shared = fused_tile("norm", choice, x, shape, fmt, (rowwise, columnwise, k_major), shown)
    programs = choice.count(shape)
    CAST(
        programs if scale is None else max(1, programs),  # without rows there is still a scale
        (
            x if residual is None else total, gamma, gamma if beta is None else ready(beta), mean, rsigma,
            x if scale is None else scale, *out,
        ),
        (*shape, *scale_strides(out)),
        (
            normalization == "LayerNorm", beta is not None, zero_centered,
            *cast_constants(x, fmt, rowwise, columnwise, k_major),
            *tile_constants(shape, choice, fmt if shared else None, k_major),
        ),
        choice.warps,
    )  # fmt: skip
    return *out, mean, rsigma, total
