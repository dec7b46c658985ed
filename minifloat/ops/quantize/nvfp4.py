"""NVFP4 in Triton: casts along the rows and the columns in one launch, the amaxes that only NVFP4 needs, and rotation.

A program has 16 rows, one group of the columns. It reads them once for each cast, from the cache the second time: along
the rows so that a thread holds 16 neighbours, along the columns row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, Format
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize.device import (
    corner,
    extent,
    first_program,
    load_tile,
    matrix_of,
    pick,
    pick_wide,
    record_max,
    skips,
)
from minifloat.ops.quantize.job import CastJob, CastTarget, Programs, aligned
from minifloat.ops.quantize.nvfp4_device import (
    GROUP,
    cast_groups,
    cast_groups_four_over_six,
    largest,
    load_columns,
    load_rows,
    random_bits,
    rotate,
    stack_8,
    stack_16,
    tile_max,
)
from minifloat.ops.quantize.reference import rotated_rows
from minifloat.ops.tiles import Tile, tile


@triton.jit
def _cast_16_rows(
    x, rng, level, codes, scales, m, k, M, K,
    FORMAT: tl.constexpr, COLUMN: tl.constexpr, SHARDED: tl.constexpr, ALIGNED_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Casts 16 rows from ``m`` on and as many columns as there are ``LINES``, from ``k`` on."""
    GROUPS: tl.constexpr = LINES // GROUP
    AS_VALUES: tl.constexpr = codes.dtype.element_ty == tl.bfloat16
    line = tl.arange(0, LINES)
    columns = k + line
    if COLUMN:
        values = load_columns(x, m, columns, M, K)
    else:
        values = load_rows(x, m, columns, M, K)
    if FORMAT.transform == "hadamard16":
        values = rotate(values)
        M = tl.cdiv(M, GROUP) * GROUP  # rows of zeros are rotated, too
    if not FORMAT.amax_per_row:
        amax = tl.load(level)
    elif COLUMN:
        amax = tl.load(level + columns, mask=columns < K, other=0.0)
    else:
        amax = tl.load(level + m + line // GROUPS, mask=m + line // GROUPS < M, other=0.0)
    block_amax = largest(values, True)
    if FORMAT.tile:
        block_amax = tile_max(block_amax, COLUMN)
    if FORMAT.rounding == "four_over_six_mae" or FORMAT.rounding == "four_over_six_mse":
        packed, found = cast_groups_four_over_six(values, block_amax, amax, FORMAT, COLUMN)
    else:
        bits = ()
        if FORMAT.rounding == "stochastic":
            bits = random_bits(rng, m, k, K, COLUMN, SHARDED, ALIGNED_K, LINES)
        packed, found = cast_groups(values, bits, block_amax, amax, FORMAT, AS_VALUES)
    if AS_VALUES:
        _store_values(codes, packed, m, k, M, K, COLUMN)
    elif COLUMN:
        _store_columns(codes, packed, m, columns, M, K)
    else:
        _store_rows(codes, packed, m, k, M, K, ALIGNED_K)
    _store_scales(scales, found, m, k, M, K, FORMAT.tile, COLUMN)


@triton.jit
def _store_columns(codes, packed, m, k, M, K):
    for i in tl.static_range(GROUP // 2):
        byte_row = m // 2 + i
        end = tl.where(2 * byte_row < M, K, 0)
        tl.store(codes + byte_row.to(tl.int64) * K + k, packed[i], mask=k < end)


@triton.jit
def _store_rows(codes, packed, m, k, M, K, ALIGNED_K: tl.constexpr):
    BYTES: tl.constexpr = packed[0].shape[0] // 2  # in a row: LINES / 16 groups of 8
    width = K // GROUP * 8 if ALIGNED_K else (K + 1) // 2
    rows = m + tl.arange(0, GROUP)
    at = k // 2 + tl.arange(0, BYTES)
    inside = (rows[:, None] < M) & (at[None, :] < width)
    tl.store(codes + rows[:, None].to(tl.int64) * width + at[None, :], stack_8(packed).reshape(GROUP, BYTES), inside)


@triton.jit
def _store_values(target, values, m, k, M, K, COLUMN: tl.constexpr):
    """Stores the values of whole groups: M and K are multiples of 16."""
    LINES: tl.constexpr = values[0].shape[0]
    columns = k + tl.arange(0, LINES)
    if COLUMN:
        for i in tl.static_range(GROUP):
            tl.store(target + (m + i).to(tl.int64) * K + columns, values[i], mask=columns < tl.where(m < M, K, 0))
    else:
        rows = m + tl.arange(0, GROUP)
        inside = (rows[:, None] < M) & (columns[None, :] < K)
        tile = stack_16(values).reshape(GROUP, LINES)
        tl.store(target + rows[:, None].to(tl.int64) * K + columns[None, :], tile, mask=inside)


@triton.jit
def _store_scales(scales, found, m, k, M, K, TILE: tl.constexpr, COLUMN: tl.constexpr):
    # Of a group of rows there may be programs behind the last row, where `m` is outside.
    LINES: tl.constexpr = found.shape[0]
    GROUPS: tl.constexpr = LINES // GROUP
    line = tl.arange(0, LINES)
    if TILE:  # every line has the scale of its tile: the first of them stores it
        group = k // GROUP + (line // GROUP if COLUMN else line % GROUPS)
        inside = (line % GROUP == 0) if COLUMN else (line < GROUPS)
        row, width = m // GROUP, tl.cdiv(K, GROUP)
        tl.store(scales + row.to(tl.int64) * width + group, found, mask=inside & (group < tl.where(m < M, width, 0)))
    elif COLUMN:
        end = tl.where(m < M, K, 0)
        tl.store(scales + (m // GROUP).to(tl.int64) * K + k + line, found, mask=k + line < end)
    else:
        row, group = m + line // GROUPS, k // GROUP + line % GROUPS
        width = tl.cdiv(K, GROUP)
        tl.store(scales + row.to(tl.int64) * width + group, found, mask=(row < M) & (group < width))


@triton.jit
def cast_nvfp4_kernel(
    xs, rngs, row_levels, row_codes, row_scales, column_levels, column_codes, column_scales, noop,
    starts, Ms, Ks,
    COUNT: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, COLUMN_IS_COLUMNWISE: tl.constexpr,
    CAN_SKIP: tl.constexpr, SHARDED: tl.constexpr, ALIGNED_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    if skips(noop, CAN_SKIP):
        return
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, ALIGNED_K)
    rng = pick(rngs, starts, matrix, COUNT)
    M = pick(Ms, starts, matrix, COUNT)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    m, k = corner(program - first_program(starts, matrix, COUNT), K, GROUP, LINES)
    if ROW is not None:
        level = pick(row_levels, starts, matrix, COUNT)
        codes = pick_wide(row_codes, starts, matrix, COUNT, ALIGNED_K)
        scales = pick(row_scales, starts, matrix, COUNT)
        _cast_16_rows(x, rng, level, codes, scales, m, k, M, K, ROW, False, SHARDED, ALIGNED_K, LINES)
    if COLUMN is not None:
        level = pick(column_levels, starts, matrix, COUNT)
        codes = pick_wide(column_codes, starts, matrix, COUNT, ALIGNED_K)
        strips: tl.constexpr = COLUMN_IS_COLUMNWISE and not COLUMN.tile
        scales = pick_wide(column_scales, starts, matrix, COUNT, ALIGNED_K and strips)
        _cast_16_rows(x, rng, level, codes, scales, m, k, M, K, COLUMN, COLUMN_IS_COLUMNWISE, SHARDED, ALIGNED_K, LINES)


@triton.jit
def rotated_amax_kernel(
    xs, row_amaxes, column_amaxes, starts, Ms, Ks,
    COUNT: tl.constexpr, ROW: tl.constexpr, ALIGNED_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, ALIGNED_K)
    M = pick(Ms, starts, matrix, COUNT)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    m, k = corner(program - first_program(starts, matrix, COUNT), K, GROUP, LINES)
    values = load_columns(x, m, k + tl.arange(0, LINES), M, K)
    if ROW:
        record_max(pick(row_amaxes, starts, matrix, COUNT), tl.max(largest(values, False), axis=0))
    record_max(pick(column_amaxes, starts, matrix, COUNT), tl.max(largest(rotate(values), True), axis=0))


@triton.jit
def line_amax_kernel(
    xs, amaxes, starts, Ms, Ks,
    COUNT: tl.constexpr, COLUMN: tl.constexpr, ALIGNED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, ALIGNED_K)
    M = pick(Ms, starts, matrix, COUNT)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    first_m, first_k = corner(program - first_program(starts, matrix, COUNT), K, BLOCK_M, BLOCK_K)
    m, k = first_m + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_K)
    values = tl.abs(load_tile(x, m, k, M, K))
    line, lines = (k, K) if COLUMN else (m, M)
    found = tl.maximum(tl.max(values, axis=0 if COLUMN else 1), 0.0)  # of nothing but NaN it is NaN
    target = (pick(amaxes, starts, matrix, COUNT) + line).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(target, found.to(tl.int32, bitcast=True), mask=line < lines, sem="relaxed")


@triton.jit
def hadamard_kernel(
    xs, targets, starts, Ms, Ks,
    COUNT: tl.constexpr, ALIGNED_K: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    M = pick(Ms, starts, matrix, COUNT)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    m, k = corner(program - first_program(starts, matrix, COUNT), K, GROUP, LINES)
    values = load_columns(pick_wide(xs, starts, matrix, COUNT, ALIGNED_K), m, k + tl.arange(0, LINES), M, K)
    target = pick_wide(targets, starts, matrix, COUNT, ALIGNED_K)
    _store_values(target, rotate(values), m, k, tl.cdiv(M, GROUP) * GROUP, K, True)


CAST = Kernel(cast_nvfp4_kernel)
ROTATE = Kernel(hadamard_kernel)
ROTATED_AMAX = Kernel(rotated_amax_kernel)
LINE_AMAX = Kernel(line_amax_kernel)


def amax(
    xs: Sequence[Tensor], fmt: Format, dim: int, amaxes: Sequence[Tensor], choice: Tile | None = None,
    plain: Sequence[Tensor] | None = None,
) -> None:  # fmt: skip
    """Raises each of ``amaxes`` to those of the rows (or columns) of its tensor, or to that of the rotated tensor.

    Args:
        xs: contiguous, [M, K], all of one dtype.
        fmt: has ``amax_per_row``, or the Hadamard transform.
        amaxes: fp32, one a tensor: [M] or [K] with ``amax_per_row``, else [1].
        plain: fp32 [1] each, raised to the amaxes of the tensors that are not rotated, in the same reading.
    """
    choice = choice or tile("amax_nvfp4_lines" if fmt.amax_per_row else "amax_nvfp4", xs[0].device)
    programs = _programs(xs, choice)
    sources, found, integers = programs.pad(xs), programs.pad(amaxes), (programs.starts, *programs.sizes(xs))
    if fmt.amax_per_row:
        of_lines = programs.variant, dim == COLUMNWISE, _aligned(xs), choice.rows, choice.cols
        LINE_AMAX(programs.total, (sources, found), integers, of_lines, choice.warps)
    else:
        of_rotated = programs.variant, plain is not None, _aligned(xs), choice.cols
        rows = found if plain is None else programs.pad(plain)
        ROTATED_AMAX(programs.total, (sources, rows, found), integers, of_rotated, choice.warps)


def cast(jobs: Sequence[CastJob], noop: Tensor | None, choice: Tile | None = None) -> None:
    """Casts a group of jobs. A tile has 16 rows."""
    first = jobs[0]
    xs = [job.x for job in jobs]
    choice = choice or choose(first, _aligned(xs))
    programs = _programs(xs, choice)
    outputs = programs.outputs(jobs, _level, attrgetter("codes"), attrgetter("scale_inv"))
    rngs = programs.pad([_level(job.targets[0]) if job.rng is None else ready(job.rng) for job in jobs])
    CAST(
        programs.total,
        (programs.pad(xs), rngs, *outputs, outputs[0][0] if noop is None else noop),
        (programs.starts, *programs.sizes(xs)),
        constants(first, programs.variant, noop is not None, _aligned(xs), choice),
        choice.warps,
    )


def rotated(x: Tensor) -> Tensor:
    """Rotates groups of 16 rows of ``x``, contiguous [M, K], for casts to other formats; bf16, M rounded up to 16."""
    choice = tile("amax_nvfp4", x.device)
    programs = _programs([x], choice)
    result = x.new_empty(rotated_rows(x.shape[0]), x.shape[1], dtype=torch.bfloat16)
    of_rotated = programs.variant, _aligned([x]), choice.cols
    sources, targets = programs.pad([x]), programs.pad([result])
    ROTATE(programs.total, (sources, targets), (programs.starts, *programs.sizes([x])), of_rotated, choice.warps)
    return result


def gives_values(fmt: Format, x: Tensor) -> bool:
    """Whether ``x`` may be cast to bf16 values in lieu of codes: these times the scales of their blocks."""
    return not fmt.tile and fmt.rounding in ("nearest", "stochastic") and aligned(x.shape)


def constants(job: CastJob, variant: int, can_skip: bool, aligned_k: bool, choice: Tile) -> tuple[Any, ...]:
    """Returns those of ``cast_nvfp4_kernel`` for jobs like this one."""
    row, column = job.row, job.column
    return (
        variant, row and row.format, column and column.format, column is not None and column.dim == COLUMNWISE,
        can_skip, job.sharded, aligned_k, choice.cols,
    )  # fmt: skip


def choose(job: CastJob, aligned_k: bool) -> Tile:
    """The tile: the search of 4-over-6, and random bits one by one, take too many registers for the common one."""
    roundings = [target.format.rounding for target in job.targets]
    if any(rounding.startswith("four_over_six") for rounding in roundings):
        return tile("cast_nvfp4_search", job.x.device)
    alone = "stochastic" in roundings and not aligned_k
    return tile("cast_nvfp4_unaligned" if alone else "cast_nvfp4", job.x.device)


def _programs(xs: Sequence[Tensor], choice: Tile) -> Programs:
    return Programs.of([choice.count(x.shape) for x in xs])


def _aligned(xs: Sequence[Tensor]) -> bool:
    return aligned([x.shape[1] for x in xs])


def _level(target: CastTarget) -> Tensor:
    assert target.level is not None
    return ready(target.level.float())
