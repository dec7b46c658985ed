"""Table of the groups of a matrix, computed on the device, by which kernels on many matrices take groups.

Kernels on lists find the arguments of each matrix in a table (``launch.in_table``), which the host fills. Of groups the
host knows no sizes. But all that a kernel takes follows from the first row of a group and its number, in one of a few
ways (``layout.Place``), so that one small kernel writes the whole table. Nothing of it depends on how many groups there
are but the length of its rows.

Programs are numbered over all groups as rows are in ``layout.py``: a group begins at a program that leaves room for
every group before it. Those behind its last row find nothing to do.

Kernels that make values and cast them work on tiles, each of one group, so that each group has its own amax, scale and
blocks. Where values are stored, not cast, one more group takes the rows that are no group's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, Format, parse
from minifloat.ops import grouped
from minifloat.ops.grouped import layout
from minifloat.ops.grouped.layout import Place, number, of_groups, of_rows, of_units
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize.blocks import VALUE, block_tile, cast_constants, store_block_cast
from minifloat.ops.quantize.device import FLT_MAX, pick, pick_wide, places, record_max, store_scaled
from minifloat.ops.quantize.job import Aligned, Layouts, aligned, layouts, through_shared
from minifloat.ops.tiles import Tile, tile

_GROUPS = 256
_TILES = 32
"""Tiles of a program."""


Argument = tuple[Tensor, Place]
"""A tensor, and where in it a group begins."""


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
    kernel: Kernel, offsets: Tensor, rows: int, unit: int, programs: int,
    tensors: Sequence[Tensor | tuple[Tensor, Place]], integers: Sequence[Place], constants: tuple[Any, ...], warps: int,
) -> None:  # fmt: skip
    """Launches a kernel on many matrices, whose first two integers are ``starts`` and ``Ms``, on the groups.

    Args:
        offsets: [G + 1], see ``grouped_amax``; there is a group.
        rows: M, of all groups and what is no group's.
        unit, programs: how many programs work on as many rows.
        tensors: those of the groups, with where each begins; others as they are.
        integers: those that follow the first two.
        constants: of the kernel, for matrices in a table.
    """
    own = [each[1] for each in tensors if isinstance(each, tuple)]
    places = [number(0), of_units(unit, programs), *dict.fromkeys([*own, *integers])]
    groups = offsets.numel() - 1
    sizes, starts, *rest = _computed(offsets, places, True, offsets, groups, rows, 1, 0)
    found = dict(zip(places[2:], rest, strict=True))
    of_groups = [(each[0], found[each[1]]) if isinstance(each, tuple) else each for each in tensors]
    arguments = [*of_groups, (starts,), (sizes,), *[(found[place],) for place in integers]]
    kernel((rows // unit + groups) * programs, arguments, (), constants, warps)


def _computed(
    offsets: Tensor, places: Sequence[Place], starts: bool, order: Tensor, groups: int, rows: int, unit: int, tiles: int
) -> Sequence[Tensor]:
    """Computes the numbers of each group for each of ``places``; instead of the first one, sizes.

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


# ---- kernels that cast what they make ----


@triton.jit
def tile_of(order, Ms, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COUNT: tl.constexpr = 0):
    """The group of this program, its rows, which of its tiles this is, and the tile's first row and column.

    COUNT: 1 for a matrix, which is one group, as of ``device.pick``.
    """
    columns = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    place = tl.program_id(0)
    group = place * 0
    if COUNT == 0:
        group = tl.load(order + row)
        row = tl.load(order + tl.num_programs(0) // columns + row)
        place = row * columns + column
    return group, pick(Ms, order, group, COUNT), place, row * BLOCK_M, column * BLOCK_N


@triton.jit
def scale_of(
    levels, order, group, BLOCK: tl.constexpr, ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr,
    EPSILON: tl.constexpr, LARGEST: tl.constexpr, COUNT: tl.constexpr = 0,
):  # fmt: skip
    """Computes the scale of a group's values before their cast, and its inverse; 1 where blocks find their own.

    To be called before the values are loaded: behind them it would take twice as many registers.
    """
    scale = 1.0
    scale_inv = 1.0
    if ELEMENT is not None and BLOCK == 0:
        level = tl.load(pick(levels, order, group, COUNT))
        scale, scale_inv = RULE.kernels.scale(level, MAX, EPSILON, LARGEST)
    return scale, scale_inv


@triton.jit
def store_tile(
    tile, scale, scale_inv, order, group, place, first_m, first_n, M, N, P, first, width,
    row_codes, row_scales, column_codes, column_scales,
    row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_N: tl.constexpr, LAYOUTS: tl.constexpr, COUNT: tl.constexpr = 0, CHAINED: tl.constexpr = None,
):  # fmt: skip
    """Stores a ``tile`` that ``held`` returned, of the N columns from ``first`` on of a group [M, width], or its codes.

    ``scale``, ``scale_inv``: of :func:`scale_of`; ``place``: of the tile in its group; ``P``: see ``store_codes``;
    ``CHAINED``: see ``store_block_cast``.
    """
    GROUPED: tl.constexpr = COUNT == 0
    row_codes = pick_wide(row_codes, order, group, COUNT, ALIGNED_N)
    column_codes = pick_wide(column_codes, order, group, COUNT, K_MAJOR or ALIGNED_N)
    row_scales, column_scales = pick(row_scales, order, group, COUNT), pick(column_scales, order, group, COUNT)
    if ELEMENT is None:
        m, n = places(tile, first_m, first_n, False)
        where = row_codes + first + m[:, None].to(tl.int64) * width + n[None, :]
        tl.store(where, tile.to(row_codes.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
    elif BLOCK == 0:
        m, n = places(tile, first_m, first_n, False)
        store_scaled(
            tile, scale, row_codes, column_codes, m, n, M, N, P, first, width, ROW, COLUMN, K_MAJOR, GROUPED, ELEMENT
        )  # fmt: skip
        if place == 0:
            if ROW:
                tl.store(row_scales, scale_inv)
            if COLUMN:
                tl.store(column_scales, scale_inv)
    else:
        store_block_cast(
            tile, first_m, first + first_n, M, width, P,
            row_scales, row_codes, row_scales, column_scales, column_codes, column_scales,
            row_stride_m, row_stride_n, column_stride_m, column_stride_n,
            ROW, COLUMN, K_MAJOR, GROUPED, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS, CHAINED,
        )  # fmt: skip


@triton.jit
def record_amaxes(
    row_amaxes, column_amaxes, order, group, magnitudes, ROW: tl.constexpr, COLUMN: tl.constexpr,
    COUNT: tl.constexpr = 0,
):  # fmt: skip
    """Raises those of a group to the largest of a tile; of a number and NaN the maximum is the number."""
    amax = tl.maximum(tl.max(tl.max(magnitudes, axis=1), axis=0), 0.0)  # of nothing but NaN 0
    if ROW or COUNT == 1:  # that of a matrix is one
        record_max(pick(row_amaxes, order, group, COUNT), amax)
    if COLUMN and COUNT == 0:
        record_max(pick(column_amaxes, order, group, COUNT), amax)


class Outputs(NamedTuple):
    """Outputs of a launch: values, or casts of them.

    Args:
        tensors: codes (or values), scales and amaxes of the rowwise cast, then of the columnwise one.
        constants: ROW to LARGEST of the kernels.
        stored: rows of the memory of columnwise codes.
        strides: of both grids of scales.
        unit: columns at multiples of which all rows begin at 16 bytes.
        format: of the casts.
        dims: of the casts.
        shared: they go through shared memory, see ``quantize/job.py``.
        with_amax: amaxes are measured.
        chained: the columnwise cast is of the values of the rowwise one.
    """

    tensors: tuple[Argument, ...]
    constants: tuple[Any, ...]
    stored: int = 0
    strides: tuple[int, ...] = (0, 0, 0, 0)
    unit: int = 16
    format: Format = IDENTITY
    dims: Sequence[int] = ()
    shared: bool = False
    with_amax: bool = False
    chained: bool = False

    def tile(self, kernel: str, columns: int, device: torch.device) -> Tile:
        """The tile of a kernel that casts as many ``columns``."""
        row, column = ROWWISE in self.dims, COLUMNWISE in self.dims
        if self.shared and kernel != "cast":  # their tiles hold more than those of matrices
            kernel = f"grouped_{kernel}"
        if self.format.block:
            return block_tile(kernel, self.format, row, column, self.shared, aligned([columns]), device)
        return tile("cast_tensor" if kernel == "cast" else f"{kernel}_columnwise" if column else kernel, device)

    def layouts(self, choice: Tile) -> Layouts | None:
        """Layouts of that tile; ``None`` where Triton chooses them."""
        return layouts(choice, self.format.block, self.constants[2]) if self.shared else None


def launch_to(
    kernel: Kernel, out: Outputs, tensors: Sequence[Argument], offsets: Tensor, rows: int, columns: int,
    constants: tuple[Any, ...], choice: Tile,
) -> None:  # fmt: skip
    """Launches ``kernel`` on tiles of ``rows`` and ``columns``.

    Its arguments are ``tensors``, those of ``out``, the order of tiles, int32 [2, tiles], where a program finds its own
    in one load (:func:`tile_of`), sizes of groups, columns, rows of the memory of columnwise codes, number of groups,
    strides of scales, ``constants``, CHAINED, AMAX, ALIGNED_N, BLOCK_M, BLOCK_N, LAYOUTS.
    """
    groups, offsets = offsets.numel() - 1, offsets.contiguous()
    same = columns, out.stored, groups, *out.strides
    sizes = columns % out.unit == 0, choice.rows, choice.cols
    constants = *constants, out.chained, out.with_amax, *sizes, out.layouts(choice)
    arguments = [*tensors, *out.tensors]
    places = [number(0), *dict.fromkeys(place for _, place in arguments)]
    groups += out.constants is VALUE  # the rows that are no group's are one more
    tiles = rows // choice.rows + groups
    order = torch.empty(2 * tiles, dtype=torch.int32, device=offsets.device)
    counts, *rest = _computed(offsets, places, False, order, groups, rows, choice.rows, tiles)
    found = dict(zip(places[1:], rest, strict=True))
    of_groups = [(each, found[place]) for each, place in arguments]
    kernel(tiles * triton.cdiv(columns, choice.cols), [*of_groups, order, (counts,)], same, constants, choice.warps)


def wanted(tensor: Tensor | None, place: Place, other: Tensor) -> Argument:
    """``tensor`` as kernels read it; if there is none, an address, that of ``other``."""
    return (other, number(0)) if tensor is None else (ready(tensor), place)


def values_to(y: Tensor, offsets: Tensor, with_amax: bool) -> tuple[Outputs, Tensor]:
    """Values go to ``y``, and their amaxes, if wanted, to the other."""
    amax = y.new_zeros(offsets.numel() - 1 if with_amax else 0, dtype=torch.float32)
    unused = y, number(0)
    amaxes = (amax, of_groups(1)) if with_amax else unused
    return Outputs(((y, of_rows(y.shape[1])), unused, amaxes, unused, unused, unused), VALUE, with_amax=with_amax), amax


def casts_to(
    x: Tensor, offsets: Tensor, formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool],
    chained: bool = False, *, can_share: bool = True,
) -> tuple[Outputs, list[Tensor]]:  # fmt: skip
    """Memory for casts of a matrix as large as ``x``, all of one format, at most one along each dim.

    ``chained``: as of ``grouped_cast``; ``can_share``: they may go through shared memory, others than such.
    """
    assert len(set(formats)) == 1 and len(set(dims)) == len(dims), (formats, dims)
    fmt, groups, width = parse(formats[0]), offsets.numel() - 1, x.shape[1]
    assert fmt.block or all(k_major[i] for i, dim in enumerate(dims) if dim == COLUMNWISE), "see store_scaled"
    made: list[Tensor] = []
    places: dict[int, tuple[Argument, ...]] = {}
    for dim, transposed in zip(dims, k_major, strict=True):
        transposed = transposed and dim == COLUMNWISE and not fmt.packed
        codes, scale_inv, amax = grouped.empty_cast(x, groups, fmt, dim, transposed)
        made += codes, scale_inv, amax.zero_()
        of_codes, of_scales = (layout.elements(name, fmt, dim, width) for name in ("codes", "scale_inv"))
        where = layout.place("codes", fmt, dim) if transposed else of_codes, of_scales, of_groups(1)
        places[dim] = tuple(zip((codes, scale_inv, amax), where, strict=True))
    row, column = (places.get(dim) or places[dims[0]] for dim in (ROWWISE, COLUMNWISE))  # unwanted: an address
    strides = [stride for _, (scales, _), _ in (row, column) for stride in (scales.stride() if fmt.grid else (0, 0))]
    how = cast_constants(x, fmt, ROWWISE in dims, COLUMNWISE in dims, any(k_major) and not fmt.packed)
    if not fmt.block:
        how = *how[:-1], FLT_MAX.value  # of a whole matrix scales may be larger
    # Rows, and halves of them, begin at multiples of 16 bytes, and so do columns of whatever number of rows.
    sizes = Aligned(False, width % 32 == 0, True)
    can_share = can_share and not chained and len(dims) == 2 and fmt.block == 128
    shared = can_share and through_shared(x, fmt, True, any(k_major), sizes)
    stored, unit = column[0][0].shape[0], 32 if fmt.packed else 16
    with_amax = fmt.scale_rule == "given"
    return Outputs((*row, *column), how, stored, tuple(strides), unit, fmt, dims, shared, with_amax, chained), made


def as_declared(
    made: list[Tensor], formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool]
) -> list[Tensor]:
    """Packed columnwise codes in the order of memory that was asked for, which no kernel writes."""
    for i, (spec, dim, transposed) in enumerate(zip(formats, dims, k_major, strict=True)):
        if transposed and dim == COLUMNWISE and parse(spec).packed:
            made[3 * i] = made[3 * i].t().contiguous().t()
    return made
