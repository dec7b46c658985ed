"""Casts of groups of rows by the kernel that makes their values: what such kernels share.

Their tile is of one group, which the table of ``table.py`` finds, so that each group has its own amax, scale and
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
from minifloat.ops.grouped import table
from minifloat.ops.grouped.table import Place, number, of_groups, of_rows
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize.blocks import block_tile, store_block_cast
from minifloat.ops.quantize.device import FLT_MAX, pick, pick_wide, places, record_max, store_scaled
from minifloat.ops.quantize.fused import VALUE, cast_constants
from minifloat.ops.quantize.job import Aligned, aligned
from minifloat.ops.quantize.layouts import Layouts, layouts, through_shared
from minifloat.ops.tiles import Tile, tile

Argument = tuple[Tensor, Place]
"""A tensor, and where in it a group begins."""


@triton.jit
def tile_of(order, Ms, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The group of this program, its rows, which of its tiles this is, and the tile's first row and column."""
    columns = tl.cdiv(N, BLOCK_N)
    place = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    group = tl.load(order + place)
    row = tl.load(order + tl.num_programs(0) // columns + place)
    return group, pick(Ms, order, group, 0), row * columns + column, row * BLOCK_M, column * BLOCK_N


@triton.jit
def scale_of(
    levels, order, group, BLOCK: tl.constexpr, ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr,
    EPSILON: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """What the values of a group are multiplied by before they are cast, and its inverse; 1 where blocks find theirs.

    To be called before the values are loaded: behind them it would take twice as many registers.
    """
    scale = 1.0
    scale_inv = 1.0
    if ELEMENT is not None and BLOCK == 0:
        level = tl.load(pick(levels, order, group, 0))
        scale, scale_inv = RULE.kernels.scale(level, MAX, EPSILON, LARGEST)
    return scale, scale_inv


@triton.jit
def store_tile(
    tile, scale, scale_inv, order, group, place, first_m, first_n, M, N, P, first, width,
    row_codes, row_scales, column_codes, column_scales,
    row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_N: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """Stores a ``tile`` that ``held`` returned, of the N columns from ``first`` on of a group [M, width], or its codes.

    ``scale``, ``scale_inv``: of :func:`scale_of`; ``place``: of the tile in its group; ``P``: see ``store_codes``.
    """
    row_codes = pick_wide(row_codes, order, group, 0, ALIGNED_N)
    column_codes = pick_wide(column_codes, order, group, 0, K_MAJOR or ALIGNED_N)
    row_scales, column_scales = pick(row_scales, order, group, 0), pick(column_scales, order, group, 0)
    if ELEMENT is None:
        m, n = places(tile, first_m, first_n, False)
        where = row_codes + first + m[:, None].to(tl.int64) * width + n[None, :]
        tl.store(where, tile.to(row_codes.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
    elif BLOCK == 0:
        m, n = places(tile, first_m, first_n, False)
        store_scaled(
            tile * scale, row_codes, column_codes, m, n, M, N, P, first, width, ROW, COLUMN, K_MAJOR, True, ELEMENT
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
            ROW, COLUMN, K_MAJOR, True, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS,
        )  # fmt: skip


@triton.jit
def record_amaxes(row_amaxes, column_amaxes, order, group, magnitudes, ROW: tl.constexpr, COLUMN: tl.constexpr):
    """Raises those of a group to the largest of a tile; of a number and NaN the maximum is the number."""
    amax = tl.maximum(tl.max(tl.max(magnitudes, axis=1), axis=0), 0.0)  # of nothing but NaN 0
    if ROW:
        record_max(pick(row_amaxes, order, group, 0), amax)
    if COLUMN:
        record_max(pick(column_amaxes, order, group, 0), amax)


class Outputs(NamedTuple):
    """Where a launch writes to: values, or casts of them.

    Args:
        tensors: codes (or values), scales and amaxes of the rowwise cast, then of the columnwise one.
        constants: ROW to LARGEST of the kernels.
        stored: rows of the memory of columnwise codes.
        strides: of both grids of scales.
        unit: columns at multiples of which all rows begin at 16 bytes.
        format: of the casts.
        dims: of the casts.
        shared: they go through shared memory, see ``quantize/layouts.py``.
        with_amax: amaxes are measured.
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

    def tile(self, kernel: str, columns: int, device: torch.device) -> Tile:
        """The tile of a kernel that casts as many ``columns``."""
        row, column = ROWWISE in self.dims, COLUMNWISE in self.dims
        if self.shared and kernel != "cast":  # their tiles hold more than those of matrices
            kernel = f"grouped_{kernel}"
        if self.format.block:
            return block_tile(kernel, self.format, row, column, self.shared, aligned([columns]), device)
        return tile("cast_tensor" if kernel == "cast" else f"{kernel}_columnwise" if column else kernel, device)

    def layouts(self, choice: Tile) -> Layouts | None:
        """Of that tile; ``None`` where Triton chooses them."""
        return layouts(choice, self.format.block, self.constants[2]) if self.shared else None


def launch(
    kernel: Kernel,
    out: Outputs,
    tensors: Sequence[Argument],
    offsets: Tensor,
    rows: int,
    columns: int,
    constants: tuple[Any, ...],
    choice: Tile,
) -> None:
    """Launches ``kernel`` on tiles of ``rows`` and ``columns``.

    Its arguments are ``tensors``, those of ``out``, the order of tiles, sizes of groups, columns, rows of the memory of
    columnwise codes, number of groups, strides of scales, ``constants``, AMAX, ALIGNED_N, BLOCK_M, BLOCK_N, LAYOUTS.
    """
    groups, offsets = offsets.numel() - 1, offsets.contiguous()
    same = columns, out.stored, groups, *out.strides
    programs = triton.cdiv(columns, choice.cols)
    arguments = [*tensors, *out.tensors]
    sizes = columns % out.unit == 0, choice.rows, choice.cols
    constants = *constants, out.with_amax, *sizes, out.layouts(choice)
    table.launch_on_tiles(
        kernel, offsets, rows, choice.rows, programs, arguments, same, constants, choice.warps, out.constants is VALUE
    )  # fmt: skip


# ---- arguments ----


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
    x: Tensor,
    offsets: Tensor,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
    *,
    can_share: bool = True,
) -> tuple[Outputs, list[Tensor]]:
    """Memory for casts of a matrix as large as ``x``, all of one format, at most one along each dim.

    ``can_share``: they may go through shared memory.
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
        where = table.codes(fmt, dim, width, transposed), table.scales(fmt, dim, width), of_groups(1)
        places[dim] = tuple(zip((codes, scale_inv, amax), where, strict=True))
    row, column = (places.get(dim) or places[dims[0]] for dim in (ROWWISE, COLUMNWISE))  # unwanted: an address
    strides = [stride for _, (scales, _), _ in (row, column) for stride in (scales.stride() if fmt.grid else (0, 0))]
    how = cast_constants(x, fmt, ROWWISE in dims, COLUMNWISE in dims, any(k_major) and not fmt.packed)
    if not fmt.block:
        how = *how[:-1], FLT_MAX.value  # of a whole matrix scales may be larger
    # Rows, and halves of them, begin at multiples of 16 bytes, and so do columns of whatever number of rows.
    sizes = Aligned(False, width % 32 == 0, True)
    shared = can_share and len(dims) == 2 and fmt.block == 128 and through_shared(x, fmt, True, any(k_major), sizes)
    stored, unit = column[0][0].shape[0], 32 if fmt.packed else 16
    with_amax = fmt.scale_rule == "given"
    return Outputs((*row, *column), how, stored, tuple(strides), unit, fmt, dims, shared, with_amax), made


def as_declared(
    made: list[Tensor], formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool]
) -> list[Tensor]:
    """Packed columnwise codes in the order of memory that was asked for, which no kernel writes."""
    for i, (spec, dim, transposed) in enumerate(zip(formats, dims, k_major, strict=True)):
        if transposed and dim == COLUMNWISE and parse(spec).packed:
            made[3 * i] = made[3 * i].t().contiguous().t()
    return made
