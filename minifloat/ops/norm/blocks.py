"""The norm cast in blocks without being written: one kernel reads rows for their statistics, a second one casts.

Blocks span rows, whole rows do not fit a program beside each other, and so x is read twice. What is cast is the norm
rounded to the dtype of ``x``, the very number that ``forward.py`` stores, whose statistics these are too.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import Format
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm.device import normalize
from minifloat.ops.norm.statistics import statistics
from minifloat.ops.quantize import empty_block_cast
from minifloat.ops.quantize.blocks import store_block_cast
from minifloat.ops.quantize.device import corner, extent, load_tile
from minifloat.ops.quantize.produced import block_tile, constants, strides
from minifloat.ops.tiles import Tile


@triton.jit
def norm_blocks_kernel(
    x, gamma, beta, mean, rsigma, row_codes, row_scales, column_codes, column_scales,
    M, K, row_stride_m, row_stride_k, column_stride_m, column_stride_k,
    CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    M, K = extent(M, ALIGNED_M), extent(K, ALIGNED_K)
    first_m, first_k = corner(tl.program_id(0), K, BLOCK_M, BLOCK_K)
    m, k = first_m + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_K)
    row_rsigma = tl.load(rsigma + m, mask=m < M, other=0.0)
    row_mean = tl.load(mean + m, mask=m < M, other=0.0) if CENTERED else row_rsigma
    values = load_tile(x, m, k, M, K)
    values = normalize(values, row_mean, row_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
    if CENTERED or HAS_BETA:  # outside lies minus the mean, times 1 + gamma where there is none, plus beta
        values = tl.where((m[:, None] < M) & (k[None, :] < K), values, 0.0)
    store_block_cast(
        values.to(x.dtype.element_ty).to(tl.float32), first_m, first_k, M, K,
        row_scales, row_codes, row_scales, column_scales, column_codes, column_scales,
        row_stride_m, row_stride_k, column_stride_m, column_stride_k,
        ROW, COLUMN, K_MAJOR, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST,
    )  # fmt: skip


_cast = Kernel(norm_blocks_kernel)


class NormBlockCast(NamedTuple):
    """Codes and scales of ``quantize.BlockCast``, mean and rsigma [M], total [M, K]; what is not there is empty."""

    row_codes: Tensor
    row_scales: Tensor
    column_codes: Tensor
    column_scales: Tensor
    mean: Tensor
    rsigma: Tensor
    total: Tensor


def cast(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    k_major: bool,
    choice: Tile | None = None,
) -> NormBlockCast:
    """The codes of the norm of ``x``, or of ``total = x + residual``; the arguments are those of the operation."""
    rows, width = x.shape
    x, gamma = ready(x), ready(gamma)
    centered = normalization == "LayerNorm"
    mean, rsigma, total = statistics(x, residual, normalization, eps)
    out = empty_block_cast(x, width, fmt, rowwise, columnwise, k_major)
    choice = block_tile("norm", choice, fmt, rowwise, columnwise, (rows, width), x.device)
    _cast(
        triton.cdiv(rows, choice.rows) * triton.cdiv(width, choice.cols),
        (x if residual is None else total, gamma, gamma if beta is None else ready(beta), mean, rsigma, *out),
        (rows, width, *strides(out)),
        (
            centered, beta is not None, zero_centered, *constants(x, fmt, rowwise, columnwise, k_major),
            rows % 16 == 0, width % 16 == 0, choice.rows, choice.cols,
        ),
        choice.warps,
    )  # fmt: skip
    return NormBlockCast(*out, mean, rsigma, total)
