"""Casts of a value by the kernel that computes it, a norm's or an activation's, whose tile is never written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import Format
from minifloat.ops.quantize import FusedCodes
from minifloat.ops.quantize.blocks import block_tile, store_block_cast
from minifloat.ops.quantize.device import record_max, store_scaled, tile_places
from minifloat.ops.quantize.job import Aligned, aligned, input_max
from minifloat.ops.quantize.layouts import layouts, through_shared
from minifloat.ops.tiles import Tile, tile


@triton.jit
def store_result(
    values, first_m, first_n, M, N, first, width, scale, row_codes, column_codes, row_scales, column_scales,
    row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Stores a tile of fp32 ``values``, or the codes of a cast of them; those of blocks as :func:`held` returns them.

    It is a tile of the N columns that begin at ``first`` of a matrix that is ``width`` wide. Without an ``ELEMENT`` the
    values are stored to ``row_codes``; with a ``BLOCK`` of 0 the scale is given. Else the tile holds whole
    blocks, and outside of the matrix what no amax counts: 0, -0 or NaN.
    """
    m, n = tile_places(first_m, first_n, values.shape[0], values.shape[1], LAYOUTS)
    if ELEMENT is None:
        where = row_codes + first + m[:, None].to(tl.int64) * width + n[None, :]
        tl.store(where, values.to(row_codes.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
    elif BLOCK == 0:
        multiplier, scale_inv = RULE.kernels.scale(tl.load(scale), MAX, EPSILON, LARGEST)
        store_scaled(
            values * multiplier, row_codes, column_codes, m, n, M, N, M, first, width,
            ROW, COLUMN, K_MAJOR, False, ELEMENT,
        )  # fmt: skip
        if tl.program_id(0) == 0:
            tl.store(row_scales, scale_inv)
    else:
        store_block_cast(
            values, first_m, first + first_n, M, width, M,
            row_scales, row_codes, row_scales, column_scales, column_codes, column_scales,
            row_stride_m, row_stride_n, column_stride_m, column_stride_n,
            ROW, COLUMN, K_MAJOR, False, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST,
            LAYOUTS,
        )  # fmt: skip


@triton.jit
def record_amax(target, magnitudes):
    """Raises ``target`` to the largest of a tile; of a number and NaN the maximum is the number."""
    record_max(target, tl.maximum(tl.max(tl.max(magnitudes, axis=1), axis=0), 0.0))  # of nothing but NaN 0


VALUE = False, False, False, 0, False, None, 0.0, None, 0.0, 0.0
"""ROW to LARGEST where the value is stored."""


def cast_constants(x: Tensor, fmt: Format, rowwise: bool, columnwise: bool, k_major: bool) -> tuple[Any, ...]:
    """ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON and LARGEST of a value in the dtype of ``x``."""
    options = rowwise, columnwise, columnwise and k_major, fmt.block, fmt.tile
    return *options, fmt.encoding, fmt.max, fmt.scaling, fmt.amax_epsilon, input_max(x)


def tile_constants(
    shape: Sequence[int], choice: Tile, fmt: Format | None = None, k_major: bool = False
) -> tuple[Any, ...]:
    """ALIGNED_M, ALIGNED_N, BLOCK_M, BLOCK_N and LAYOUTS of a value of ``shape``.

    With ``fmt`` it is cast through shared memory, see :func:`fused_tile`.
    """
    spread = None if fmt is None else layouts(choice, fmt.block, k_major)
    return aligned(shape[:1]), aligned(shape[1:]), choice.rows, choice.cols, spread


def scale_strides(out: FusedCodes) -> tuple[int, int, int, int]:
    """Strides of the rowwise and of the columnwise grid of scales; 0 of one that is not wanted."""
    row, column = (grid.stride() if grid.dim() == 2 else (0, 0) for grid in (out.row_scales, out.column_scales))
    return row[0], row[1], column[0], column[1]


def fused_tile(
    kernel: str,
    choice: Tile | None,
    x: Tensor,
    shape: tuple[int, int],
    fmt: Format,
    wanted: Sequence[bool],
    shown: bool = False,
) -> tuple[Tile, bool]:
    """The tile of ``kernel``, and whether it goes through shared memory, of a value of ``shape`` in the dtype of ``x``.

    Args:
        choice: a tile other than the pinned one; in blocks it is made one of whole blocks.
        wanted: rowwise, columnwise, k_major.
        shown: the kernel may cast through shared memory, see ``layouts.py``: in both orientations, so far.
    """
    rowwise, columnwise, k_major = wanted
    if not fmt.block:
        return choice or tile(f"{kernel}_columnwise" if columnwise else kernel, x.device), False
    rows, cols = (aligned([size]) for size in shape)
    shared = shown and rowwise and through_shared(x, fmt, columnwise, k_major, Aligned(rows, cols, rows))
    return block_tile(kernel, fmt, rowwise, columnwise, shared, rows and cols, x.device, choice), shared
