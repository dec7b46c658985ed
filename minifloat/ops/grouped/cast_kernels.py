"""Casts of groups of rows in Triton, of one scale a group or a block: rows as they lie, or read by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.grouped import gathered
from minifloat.ops.grouped.fused import (
    Outputs,
    as_declared,
    casts_to,
    launch,
    record_amaxes,
    scale_of,
    store_tile,
    tile_of,
    wanted,
)
from minifloat.ops.grouped.table import number, of_groups, of_rows
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import gpu
from minifloat.ops.quantize.blocks import held
from minifloat.ops.quantize.decode import at_16_bytes
from minifloat.ops.quantize.device import extent, load_tile, pick, pick_wide, tile_places
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile


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


@triton.jit
def token_amax_kernel(x, amaxes, T, K, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The amax of each row of ``x`` [T, K]."""
    K = extent(K, ALIGNED)
    t, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    at = x + t[:, None].to(tl.int64) * K + k[None, :]
    for first in tl.range(0, K, COLS, num_stages=3):
        inside = (t[:, None] < T) & (first + k[None, :] < K)
        values = tl.load(at + first, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))  # which drops NaN
    tl.store(amaxes + t, tl.max(largest, axis=1), mask=t < T)


@triton.jit
def gathered_amax_kernel(amaxes, rows, offsets, found, BLOCK: tl.constexpr):
    """The largest amax of the tokens of each group."""
    group = tl.program_id(0)
    end = tl.load(offsets + group + 1)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(offsets + group), end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        token = tl.load(rows + row, mask=row < end, other=0)
        largest = tl.maximum(largest, tl.load(amaxes + token, mask=row < end, other=0.0))
    tl.store(found + group, tl.max(largest, axis=0))


KERNEL = Kernel(grouped_cast_kernel, layouts=True)
_of_tokens, _of_groups = Kernel(token_amax_kernel), Kernel(gathered_amax_kernel, wide=False)
_TOKENS = Tile(4, 512, 4)
_ROWS = 1024


def cast(out: Outputs, x: Tensor, rows: Tensor | None, offsets: Tensor, level: Tensor | None) -> None:
    """Casts the groups of rows of ``x``, or those that ``rows`` name, to ``out``.

    ``level``: of each group amax or scale, fp32 [G]; None: blocks find their amaxes.
    """
    M, columns = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    choice, source = out.tile("cast", columns, x.device), (x, of_rows(columns) if rows is None else number(0))
    tensors = [source, wanted(rows, of_rows(1), x), wanted(level, of_groups(1), x)]
    launch(KERNEL, out, tensors, offsets, M, columns, (*out.constants, rows is not None), choice)


def gathered_amax(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The operation: amaxes of tokens, and then of groups. Tokens are read once, however many experts they have."""
    x, (T, K), groups = ready(x), x.shape, offsets.numel() - 1
    of_tokens = torch.empty(T, dtype=torch.float32, device=x.device)
    found = torch.empty(groups, dtype=torch.float32, device=x.device)
    count, cols, warps, _ = _TOKENS
    _of_tokens(triton.cdiv(T, count), (x, of_tokens), (T, K), (aligned([K]), count, cols), warps)
    _of_groups(groups, (of_tokens, ready(rows), at_16_bytes(offsets), found), (), (_ROWS,), 4)
    return found


def gathered_cast(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    level: Tensor | None,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """The operation: a token's row goes to each of its experts without a copy between."""
    if not gpu.casts(parse(formats[0])):
        return gathered.gathered_cast.reference(x, rows, offsets, level, formats, dims, k_major)
    x = ready(x)
    matrix = x.new_empty(1, 1).expand(rows.shape[0], x.shape[1])
    out, made = casts_to(matrix, offsets, formats, dims, k_major)
    cast(out, x, rows, offsets, level)
    return as_declared(made, formats, dims, k_major)
