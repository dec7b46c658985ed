"""Casts of rows that are read by index, in Triton: a token's row goes to each of its experts without a copy between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops.grouped import casts, gathered
from minifloat.ops.grouped.fused import as_declared, casts_to, launch, record_amaxes, store_tile, tile_of
from minifloat.ops.grouped.table import number, of_groups, of_rows
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import blocks, gpu
from minifloat.ops.quantize.device import extent, pick, pick_wide
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile, tile

_ROW = "e4m3/row/fp32"
"""A format whose amaxes are those of rows."""


@triton.jit
def gathered_cast_kernel(
    xs, rows, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    starts, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    AMAX: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(starts, Ms, N, BLOCK_M, BLOCK_N)
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    source = tl.load(pick(rows, starts, group, 0) + m, mask=m < M, other=0).to(tl.int64)
    inside = (m[:, None] < M) & (n[None, :] < N)
    x = pick_wide(xs, starts, group, 0, ALIGNED_N)
    values = tl.load(x + source[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if AMAX:
        record_amaxes(row_amaxes, column_amaxes, starts, group, tl.abs(values), ROW, COLUMN)
    store_tile(
        values, starts, group, place, first_m, first_n, M, N, P, 0 * N, N,
        levels, row_codes, row_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N,
    )  # fmt: skip


_cast = Kernel(gathered_cast_kernel)


def amax(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """``gathered_amax``: of each token, and then of each group's; tokens are read once, however many experts."""
    ends = torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
    (of_tokens,) = casts.amax(x, ends, [_ROW], [ROWWISE])
    (found,) = casts.amax(of_tokens[rows][:, None], offsets, [Format().spec], [ROWWISE])
    return found


def cast(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    level: Tensor | None,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """``gathered_cast``."""
    fmt, K = parse(formats[0]), x.shape[1]
    if not gpu.casts(fmt):
        return gathered.gathered_cast.reference(x, rows, offsets, level, formats, dims, k_major)
    x, rows = ready(x), ready(rows)
    matrix = x.new_empty(1, 1).expand(rows.shape[0], K)
    out, made = casts_to(matrix, offsets, formats, dims, k_major)
    choice = gather_tile(fmt, dims, K, x.device)
    unused = x, number(0)
    tensors = [unused, (rows, of_rows(1)), unused if level is None else (ready(level), of_groups(1))]
    constants = *out.constants, fmt.scale_rule == "given", K % out.unit == 0, choice.rows, choice.cols
    launch(_cast, out, tensors, offsets, rows.shape[0], K, constants, choice)
    return as_declared(made, formats, dims, k_major)


def gather_tile(fmt: Format, dims: Sequence[int], columns: int, device: torch.device) -> Tile:
    """That of the casts of matrices."""
    if not fmt.block:
        return tile("cast_tensor", device)
    return blocks.block_tile("cast", fmt, ROWWISE in dims, COLUMNWISE in dims, False, aligned([columns]), device)
