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
_TILES = 32
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
def store_order(offsets, order, first, groups, unit, tiles, BLOCK: tl.constexpr, SEARCH: tl.constexpr):
    """Writes of tiles from ``first`` on which group each is of, and which tile of it; those behind all: of the last."""
    tile = first + tl.arange(0, BLOCK)
    group = tl.arange(0, SEARCH)
    start = tl.load(offsets + group, mask=group < groups, other=0) // unit + group
    start = tl.where(group == 0, 0, start)
    begun = (start[None, :] <= tile[:, None]) & (group < groups)[None, :]
    own = tile - tl.max(tl.where(begun, start[None, :], 0), axis=1)
    tl.store(order + tile, tl.sum(begun.to(tl.int32), axis=1) - 1, mask=tile < tiles)
    tl.store(order + tiles + tile, own, mask=tile < tiles)


@triton.jit
def group_table_kernel(
    offsets, table, order, groups, stride, known, rows, unit, tiles, units, by_unit, by_group, constants,
    ROWS: tl.constexpr, STARTS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(groups, BLOCK)
    if tl.program_id(0) >= blocks:
        store_order(offsets, order, (tl.program_id(0) - blocks) * TILES, groups, unit, tiles, TILES, SEARCH)
    else:
        group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = group < groups
        offset = tl.load(offsets + group, mask=inside, other=0).to(tl.int64)
        end = tl.load(offsets + group + 1, mask=group < known, other=0).to(tl.int64)
        end = tl.where(group < known, end, rows)
        for row in tl.static_range(ROWS):
            value = offset // units[row] * by_unit[row] + group.to(tl.int64) * by_group[row] + constants[row]
            if row == 0:
                value = end - offset
            if STARTS and row == 1:  # that of the first group is 0, and the number of groups is in its place
                value = tl.where(group == 0, groups, value)
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
    own = [each[1] for each in tensors if isinstance(each, tuple)]
    places = [number(0), of_units(unit, programs), *dict.fromkeys([*own, *integers])]
    groups = offsets.numel() - 1
    sizes, starts, *rest = _computed(offsets, places, True, offsets, groups, rows, 1, 0)
    found = dict(zip(places[2:], rest, strict=True))
    of_groups = [(each[0], found[each[1]]) if isinstance(each, tuple) else each for each in tensors]
    arguments = [*of_groups, (starts,), (sizes,), *[(found[place],) for place in integers]]
    kernel((rows // unit + groups) * programs, arguments, same, constants, warps)


def launch_on_tiles(
    kernel: Kernel,
    offsets: Tensor,
    rows: int,
    unit: int,
    programs: int,
    tensors: Sequence[Tensor | tuple[Tensor, Place]],
    same: Sequence[int],
    constants: tuple[Any, ...],
    warps: int,
    rest_too: bool,
) -> None:
    """Launches a kernel on tiles of ``unit`` rows, with ``programs`` for each, whose first integers are the sizes.

    The tensor before them is the order of the tiles, int32 [2, tiles], where a program finds its own in one load
    (``fused.tile_of``). Other arguments as of :func:`launch`; ``rest_too``: the rows that are no group's are one more.
    """
    own = [each[1] for each in tensors if isinstance(each, tuple)]
    places = [number(0), *dict.fromkeys(own)]
    groups = offsets.numel() - 1 + rest_too
    tiles = rows // unit + groups
    order = torch.empty(2 * tiles, dtype=torch.int32, device=offsets.device)
    sizes, *rest = _computed(offsets, places, False, order, groups, rows, unit, tiles)
    found = dict(zip(places[1:], rest, strict=True))
    of_groups = [(each[0], found[each[1]]) if isinstance(each, tuple) else each for each in tensors]
    kernel(tiles * programs, [*of_groups, order, (sizes,)], same, constants, warps)


def _computed(
    offsets: Tensor, places: Sequence[Place], starts: bool, order: Tensor, groups: int, rows: int, unit: int, tiles: int
) -> Sequence[Tensor]:
    """What a kernel takes of each group, for each of ``places``; in lieu of the first one sizes.

    ``starts``: the second one is of first programs. ``groups``: one more than there are takes the rest of ``rows``.
    """
    table = torch.empty(len(places), groups + groups % 2, dtype=torch.int64, device=offsets.device)  # 16 bytes a step
    _fill(
        triton.cdiv(groups, _GROUPS) + triton.cdiv(tiles, _TILES),
        (offsets, table, order),
        (groups, table.stride(0), offsets.numel() - 1, rows, unit, tiles, *zip(*places, strict=True)),
        (len(places), starts, _GROUPS, _TILES, triton.next_power_of_2(groups)),
        4,
    )
    return table.unbind()
