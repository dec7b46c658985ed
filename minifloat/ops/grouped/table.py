"""Where the groups of a matrix are, computed on the device: the table by which kernels on many matrices take groups.

Kernels on lists find the arguments of each matrix in a table (``launch.in_table``), which the host fills. Of groups the
host knows no sizes. But all that a kernel takes follows from the first row of a group and its number, in one of a few
ways (:class:`Place`), so that one small kernel writes the whole table. Nothing of it depends on how many groups there
are but the length of its rows.

Programs are numbered over all groups as rows are in ``layout.py``: a group begins at a program that leaves room for
every group before it. Those behind its last row find nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.grouped import layout
from minifloat.ops.launch import Kernel

_GROUPS = 256
"""Of a program."""


class Place(NamedTuple):
    """What a kernel takes of a group: offset // unit * by_unit + group * by_group + constant."""

    unit: int
    by_unit: int
    by_group: int
    constant: int = 0


def of_rows(width: int) -> Place:
    """Where ``width`` elements a row begin."""
    return Place(1, width, 0)


def of_groups(width: int) -> Place:
    """Where ``width`` elements a group begin."""
    return Place(1, 0, width)


def of_units(unit: int, width: int) -> Place:
    """Where ``width`` elements a unit begin, of units that no two groups share; see ``layout.start``."""
    return Place(unit, width, width)


def number(value: int) -> Place:
    """The same for all groups."""
    return Place(1, 0, 0, value)


def codes(fmt: Format, dim: int, cols: int, k_major: bool) -> Place:
    """Where the codes of a cast begin, whose shape is ``layout.code_shape``."""
    if dim == ROWWISE:
        return of_rows((cols + 1) // 2 if fmt.packed else cols)
    unit = layout.unit(fmt)
    rows = unit // 2 if fmt.packed else unit
    return of_units(unit, rows if k_major else rows * cols)


def scales(fmt: Format, dim: int, cols: int) -> Place:
    """Where its scales begin, whose shape is ``layout.scale_shape``."""
    if not fmt.grid or fmt.block == 0:
        return levels(fmt, dim, cols)
    if dim == ROWWISE and not fmt.tile:
        return of_rows(-(-cols // fmt.block))
    if fmt.tile:
        return of_units(fmt.block, -(-cols // fmt.block))
    unit = layout.unit(fmt)
    return of_units(unit, unit // fmt.block * cols)


def levels(fmt: Format, dim: int, cols: int) -> Place:
    """Where its amaxes begin, whose shape is ``layout.amax_shape``, or the scales that it is given."""
    if not fmt.amax_per_row:
        return of_groups(1)
    return of_groups(cols) if dim == COLUMNWISE else of_rows(1)


@triton.jit
def group_table_kernel(
    offsets, table, groups, stride, units, by_unit, by_group, constants, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    offset = tl.load(offsets + group, mask=inside, other=0).to(tl.int64)
    end = tl.load(offsets + group + 1, mask=inside, other=0).to(tl.int64)
    for row in tl.static_range(ROWS):
        value = offset // units[row] * by_unit[row] + group.to(tl.int64) * by_group[row] + constants[row]
        if row == 0:  # the first programs: that of the first group is 0, and the number of groups is in its place
            value = tl.where(group == 0, groups, value)
        if row == 1:
            value = end - offset
        tl.store(table + row * stride + group, value, mask=inside)


_fill = Kernel(group_table_kernel, wide=False, table=False)


def launch(
    kernel: Kernel,
    offsets: Tensor,
    rows: int,
    unit: int,
    programs: int,
    tensors: Sequence[Tensor | tuple[Tensor, Place]],
    integers: Sequence[Place],
    constants: tuple[Any, ...],
    warps: int,
    same: Sequence[int] = (),
) -> None:
    """Launches a kernel on many matrices, whose first two integers are ``starts`` and ``Ms``, on the groups.

    Args:
        offsets: [G + 1], see ``grouped_amax``; there is a group.
        rows: M, of all groups and what is no group's.
        unit, programs: how many programs work on as many rows.
        tensors: those of the groups, with where each begins; others as they are.
        integers: those that follow the first two.
        constants: of the kernel, for matrices in a table.
        same: integers behind all others that it takes once, not for each matrix.
    """
    groups = offsets.numel() - 1
    own = [each[1] for each in tensors if isinstance(each, tuple)]
    places = [of_units(unit, programs), number(0), *dict.fromkeys([*own, *integers])]
    table = torch.empty(len(places), groups + groups % 2, dtype=torch.int64, device=offsets.device)  # 16 bytes a step
    _fill(
        triton.cdiv(groups, _GROUPS),
        (offsets, table),
        (groups, table.stride(0), *zip(*places, strict=True)),
        (len(places), _GROUPS),
        4,
    )
    starts, sizes, *rest = table.unbind()
    found = dict(zip(places[2:], rest, strict=True))
    of_groups = [(each[0], found[each[1]]) if isinstance(each, tuple) else each for each in tensors]
    arguments = [*of_groups, (starts,), (sizes,), *[(found[place],) for place in integers]]
    kernel((rows // unit + groups) * programs, arguments, same, constants, warps)
