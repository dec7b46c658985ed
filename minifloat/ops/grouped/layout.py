"""Layout of the rows of several groups in one matrix, and the beginnings of groups in a cast of it.

Rows [offsets[g], offsets[g + 1]) of a matrix [M, K] are those of group g: the tokens of an expert, or its weight. How
many those are is known on the device alone, so that every size below follows from M and the number of groups.

======================================  ======================  ======================================
tensor of a cast                        shape                   group g begins at row
======================================  ======================  ======================================
codes, rowwise                          [M, K]                  offsets[g]
codes, columnwise                       [P, K]                  unit * (offsets[g] / unit + g)
scales of strips, rowwise               [M, K / block]          offsets[g]
scales of strips, columnwise            [P / block, K]          unit * (offsets[g] / unit + g) / block
scales of square tiles                  [M / block + G, ...]    offsets[g] / block + g
one scale, or amax, a group             [G]                     g
one a row, rowwise; columnwise          [M]; [G, K]             offsets[g]; g
======================================  ======================  ======================================

Divisions round down; K / block is rounded up. P = unit * (M / unit + G), where a unit is a block of the format, 32 at
least. Packed codes have two elements a byte along their dim. So no block, byte or Hadamard group crosses a boundary,
and a GEMM that contracts rows reads 16 at a time. Rows that are no group's are zero in the reference and undefined on a
GPU; products do not read them. A :class:`Place` is a line of the last column; the end of all, M, G, has the first of
the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from minifloat.formats import ROWWISE, Format
from minifloat.ops.quantize import reference

UNIT = 32
"""Rows, at least, that columnwise codes of a group begin at a multiple of: a GPU's memory has sectors of 32 bytes."""

Name = Literal["codes", "scale_inv", "amax"]
"""A tensor of a cast; the scales that delayed scaling gives lie as amaxes do."""
NAMES: tuple[Name, ...] = "codes", "scale_inv", "amax"


class Place(NamedTuple):
    """Beginning of a group, or another number of it: offset // unit * by_unit + group * by_group."""

    unit: int
    by_unit: int
    by_group: int
    constant: int = 0

    def at(self, offset: int, group: int) -> int:
        """Computes the place of the group whose rows begin at ``offset``."""
        return offset // self.unit * self.by_unit + group * self.by_group + self.constant

    def times(self, width: int) -> Place:
        """Place of data that has ``width`` times as many elements."""
        return Place(self.unit, self.by_unit * width, self.by_group * width)


def of_rows(width: int) -> Place:
    """Place of data that has ``width`` elements a row."""
    return Place(1, width, 0)


def of_groups(width: int) -> Place:
    """Place of data that has ``width`` elements a group."""
    return Place(1, 0, width)


def of_units(unit: int, width: int) -> Place:
    """Place of data that has ``width`` elements a unit; no two groups share a unit."""
    return Place(unit, width, width)


def number(value: int) -> Place:
    """Place that is one number for all groups."""
    return Place(1, 0, 0, value)


_EACH_ROW, _EACH_GROUP = of_rows(1), of_groups(1)


def unit(fmt: Format) -> int:
    """Rows at multiples of which the columnwise codes of groups begin."""
    return max(UNIT, fmt.block)


def place(name: Name, fmt: Format, dim: int) -> Place:
    """The row of the tensor ``name`` of a cast at which a group begins."""
    if name == "amax" or (name == "scale_inv" and fmt.block == 0):
        per_row = fmt.amax_per_row if name == "amax" else fmt.grid
        return _EACH_ROW if per_row and dim == ROWWISE else _EACH_GROUP
    if name == "scale_inv" and fmt.tile:
        return of_units(fmt.block, 1)
    if dim == ROWWISE:
        return _EACH_ROW
    rows = unit(fmt)
    return of_units(rows, rows // fmt.block if name == "scale_inv" else rows // 2 if fmt.packed else rows)


def row_shape(name: Name, fmt: Format, dim: int, cols: int) -> tuple[int, ...]:
    """The shape of its rows, of a matrix of ``cols`` columns."""
    if name == "codes":
        return ((cols + 1) // 2 if fmt.packed and dim == ROWWISE else cols,)
    if name == "scale_inv" and fmt.block:
        return (-(-cols // fmt.block) if fmt.tile or dim == ROWWISE else cols,)
    per_row = fmt.amax_per_row if name == "amax" else fmt.grid
    return (cols,) if per_row and dim != ROWWISE else ()


def elements(name: Name, fmt: Format, dim: int, cols: int) -> Place:
    """The element of it at which a group begins, where rows are consecutive in memory."""
    return place(name, fmt, dim).times(prod(row_shape(name, fmt, dim, cols)))


def shape(name: Name, fmt: Format, dim: int, rows: int, cols: int, groups: int) -> tuple[int, ...]:
    """The shape of the tensor ``name`` of a cast of [rows, cols]."""
    return place(name, fmt, dim).at(rows, groups), *row_shape(name, fmt, dim, cols)


def own_rows(name: Name, fmt: Format, dim: int, offsets: Sequence[int]) -> list[slice]:
    """Slices of the tensor ``name`` for groups of the rows between neighbours of ``offsets``."""
    unit, by_unit, by_group, _ = place(name, fmt, dim)
    places = []
    for group, (offset, end) in enumerate(pairwise(offsets)):
        first, rows = offset // unit * by_unit + group * by_group, end - offset
        if unit > 1 and fmt.transform == "hadamard16":
            rows += -rows % reference.GROUP
        places.append(slice(first, first + (-(-rows * by_unit // unit) if by_unit else 1)))
    return places
