"""Casts of groups of rows in Triton, of one scale a group or a block: rows as they lie, or read by index."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.grouped.fused import (
    Outputs,
    launch,
    record_amaxes,
    scale_of,
    store_tile,
    tile_of,
    wanted,
)
from minifloat.ops.grouped.table import number, of_groups, of_rows
from minifloat.ops.launch import Kernel
from minifloat.ops.quantize.blocks import held
from minifloat.ops.quantize.device import extent, load_tile, pick, pick_wide, tile_places


@triton.jit
def grouped_cast_kernel(
    xs, rows, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    GATHERED: tl.constexpr, AMAX: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N)
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST)
    x = pick_wide(xs, order, group, 0, ALIGNED_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    if GATHERED:
        source = tl.load(pick(rows, order, group, 0) + m, mask=m < M, other=0).to(tl.int64)
        inside = (m[:, None] < M) & (n[None, :] < N)
        values = tl.load(x + source[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        values = load_tile(x, m, n, M, N)
    if AMAX:
        record_amaxes(row_amaxes, column_amaxes, order, group, tl.abs(values), ROW, COLUMN)
    store_tile(
        held(values, LAYOUTS), scale, scale_inv, order, group, place, first_m, first_n, M, N, P, 0 * N, N,
        row_codes, row_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N, LAYOUTS,
    )  # fmt: skip


KERNEL = Kernel(grouped_cast_kernel, layouts=True)


def cast(out: Outputs, x: Tensor, rows: Tensor | None, offsets: Tensor, level: Tensor | None) -> None:
    """Casts the groups of rows of ``x``, or those that ``rows`` name, to ``out``.

    ``level``: of each group amax or scale, fp32 [G]; None: blocks find their amaxes.
    """
    M, columns = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    choice, source = out.tile("cast", columns, x.device), (x, of_rows(columns) if rows is None else number(0))
    tensors = [source, wanted(rows, of_rows(1), x), wanted(level, of_groups(1), x)]
    constants = *out.constants, rows is not None, out.format.scale_rule == "given"
    launch(KERNEL, out, tensors, offsets, M, columns, constants, choice)
