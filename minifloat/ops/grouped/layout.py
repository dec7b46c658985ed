"""How the rows of several groups lie in one matrix, and where the groups of a cast of it begin.

Rows [offsets[g], offsets[g + 1]) of a matrix [M, K] are those of group g: the tokens of an expert, or its weight. How
many those are is known on the device alone, so that every size below follows from M and the number of groups.

======================================  ======================  ======================================
tensor of a cast                        shape                   group g begins at row
======================================  ======================  ======================================
codes, rowwise                          [M, K]                  offsets[g]
codes, columnwise                       [P, K]                  start(offsets[g], g, unit)
scales of strips, rowwise               [M, K / block]          offsets[g]
scales of strips, columnwise            [P / block, K]          start(offsets[g], g, unit) / block
scales of square tiles                  [M / block + G, ...]    offsets[g] / block + g
one scale, or amax, a group             [G]                     g
one a row, rowwise; columnwise          [M]; [G, K]             offsets[g]; g
======================================  ======================  ======================================

Divisions round down; K / block is rounded up. P = unit * (M / unit + G), where a unit is a block of the format, 32 at
least. Packed codes have two elements a byte along their dim. So no block, byte or Hadamard group crosses a boundary,
and a GEMM that contracts rows reads 16 at a time. Rows that are no group's are zero in the reference and undefined on a
GPU; products do not read them.
"""

from __future__ import annotations

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.quantize import hadamard

UNIT = 32
"""Rows, at least, that columnwise codes of a group begin at a multiple of: a GPU's memory has sectors of 32 bytes."""


def unit(fmt: Format) -> int:
    """Rows at multiples of which the columnwise codes of groups begin."""
    return max(UNIT, fmt.block)


def start(offset: int, group: int, unit: int) -> int:
    """Where a group begins that has the rows from ``offset`` on, with room for every group before it."""
    return unit * (offset // unit + group)


def stored_rows(rows: int, groups: int, unit: int) -> int:
    """Rows of a matrix whose groups begin as :func:`start` says."""
    return unit * (rows // unit + groups)


def code_shape(fmt: Format, dim: int, rows: int, cols: int, groups: int) -> tuple[int, int]:
    """Shape of the codes of a cast of [rows, cols]."""
    if dim == ROWWISE:
        return rows, (cols + 1) // 2 if fmt.packed else cols
    stored = stored_rows(rows, groups, unit(fmt))
    return stored // 2 if fmt.packed else stored, cols


def scale_shape(fmt: Format, dim: int, rows: int, cols: int, groups: int) -> tuple[int, ...]:
    """Shape of its scales."""
    if not fmt.grid:
        return (groups,)
    if fmt.block == 0:
        return (rows,) if dim == ROWWISE else (groups, cols)
    if fmt.tile:
        return rows // fmt.block + groups, -(-cols // fmt.block)
    if dim == ROWWISE:
        return rows, -(-cols // fmt.block)
    return stored_rows(rows, groups, unit(fmt)) // fmt.block, cols


def amax_shape(fmt: Format, dim: int, rows: int, cols: int, groups: int) -> tuple[int, ...]:
    """Shape of the amaxes that the scales of groups come from."""
    if not fmt.amax_per_row:
        return (groups,)
    return (rows,) if dim == ROWWISE else (groups, cols)


def code_rows(fmt: Format, dim: int, offset: int, rows: int, group: int) -> slice:
    """Where the codes of ``rows`` rows from ``offset`` on are."""
    if dim == ROWWISE:
        return slice(offset, offset + rows)
    first = start(offset, group, unit(fmt))
    rows = hadamard.padded(rows) if fmt.transform == "hadamard16" else rows
    return slice(first // 2, first // 2 + (rows + 1) // 2) if fmt.packed else slice(first, first + rows)


def scale_rows(fmt: Format, dim: int, offset: int, rows: int, group: int) -> slice:
    """Where their scales are."""
    if not fmt.grid or (fmt.block == 0 and dim == COLUMNWISE):
        return slice(group, group + 1)
    if fmt.block == 0 or (dim == ROWWISE and not fmt.tile):
        return slice(offset, offset + rows)
    rows = hadamard.padded(rows) if fmt.transform == "hadamard16" else rows
    first = offset // fmt.block + group if fmt.tile else start(offset, group, unit(fmt)) // fmt.block
    return slice(first, first + -(-rows // fmt.block))


def amax_rows(fmt: Format, dim: int, offset: int, rows: int, group: int) -> slice:
    """Where their amaxes are."""
    if fmt.amax_per_row and dim == ROWWISE:
        return slice(offset, offset + rows)
    return slice(group, group + 1)
