"""Casts of groups of rows in Triton, of one scale a group or a block: rows as they lie, or read by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.grouped.fused import (
    Argument,
    Outputs,
    launch,
    record_amaxes,
    scale_of,
    store_tile,
    tile_of,
)
from minifloat.ops.grouped.table import number, of_groups, of_rows
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import blocks
from minifloat.ops.quantize.device import extent, load_tile, pick, pick_wide
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile, tile


@triton.jit
def grouped_cast_kernel(
    xs, rows, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    GATHERED: tl.constexpr, AMAX: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N)
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST)
    x = pick_wide(xs, order, group, 0, ALIGNED_N)
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if GATHERED:
        source = tl.load(pick(rows, order, group, 0) + m, mask=m < M, other=0).to(tl.int64)
        inside = (m[:, None] < M) & (n[None, :] < N)
        values = tl.load(x + source[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        values = load_tile(x, m, n, M, N)
    if AMAX:
        record_amaxes(row_amaxes, column_amaxes, order, group, tl.abs(values), ROW, COLUMN)
    store_tile(
        values, scale, scale_inv, order, group, place, first_m, first_n, M, N, P, 0 * N, N,
        row_codes, row_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N,
    )  # fmt: skip


_cast = Kernel(grouped_cast_kernel)


def cast(
    out: Outputs,
    x: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    level: Tensor | None,
    fmt: Format,
    dims: Sequence[int],
) -> None:
    """Casts the groups of rows of ``x``, or those that ``rows`` name, to ``out``.

    ``level``: of each group amax or scale, fp32 [G]; None: blocks find their amaxes.
    """
    M, columns = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    choice, unused = cast_tile(fmt, dims, columns, x.device), (x, number(0))
    tensors: list[Argument] = [
        (x, of_rows(columns)) if rows is None else unused, unused if rows is None else (ready(rows), of_rows(1)),
        unused if level is None else (ready(level), of_groups(1)),
    ]  # fmt: skip
    how = rows is not None, fmt.scale_rule == "given", columns % out.unit == 0, choice.rows, choice.cols
    launch(_cast, out, tensors, offsets, M, columns, (*out.constants, *how), choice)


def cast_tile(fmt: Format, dims: Sequence[int], columns: int, device: torch.device) -> Tile:
    """That of the casts of matrices."""
    if not fmt.block:
        return tile("cast_tensor", device)
    return blocks.block_tile("cast", fmt, ROWWISE in dims, COLUMNWISE in dims, False, aligned([columns]), device)
