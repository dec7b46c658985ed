"""Block casts of a value that a kernel makes itself: what such a kernel is told, and on which tiles it works.

The kernels are in ``activation/blocks.py`` and ``norm/blocks.py``. Each makes a tile of its value, rounds it as if it
were stored, and casts it by ``store_block_cast``: the codes are those of a cast of the value, which nobody writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifloat.formats import Format
from minifloat.ops.quantize import BlockCast
from minifloat.ops.quantize.blocks import whole_blocks
from minifloat.ops.quantize.job import aligned, input_max
from minifloat.ops.tiles import Tile, tile


def strides(out: BlockCast) -> tuple[int, int, int, int]:
    """Those of the rowwise and of the columnwise grid of scales; 0 of one that is not wanted."""
    row, column = (grid.stride() if grid.dim() == 2 else (0, 0) for grid in (out.row_scales, out.column_scales))
    return row[0], row[1], column[0], column[1]


def constants(x: Tensor, fmt: Format, rowwise: bool, columnwise: bool, k_major: bool) -> tuple[Any, ...]:
    """ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON and LARGEST of a value in the dtype of ``x``."""
    options = rowwise, columnwise, columnwise and k_major, fmt.block, fmt.tile
    return *options, fmt.encoding, fmt.max, fmt.scaling, fmt.amax_epsilon, input_max(x)


def block_tile(
    kernel: str, choice: Tile | None, fmt: Format, row: bool, column: bool, shape: tuple[int, int], device: torch.device
) -> Tile:
    """Whole blocks for each program of ``kernel`` on a matrix of ``shape``: of ``choice``, else of the pinned tile."""
    whole = "_columnwise" if column or fmt.tile else ""  # 128 rows at a time, where one row would do
    choice = choice or tile(f"{kernel}_block{whole}" if fmt.block > 32 else f"{kernel}_mx", device)
    rows, cols, warps = whole_blocks(choice, fmt, row, column)
    return Tile(rows, cols, warps if aligned(shape) else max(warps, 8))  # as in the cast of a tensor


def in_one_half(choice: Tile, columns: int) -> Tile:
    """``choice`` such that none of its tiles overlaps the end of ``columns``, a multiple of its block."""
    cols = choice.cols
    while columns % cols:
        cols //= 2
    return Tile(choice.rows, cols, max(choice.warps * cols // choice.cols, 1))
