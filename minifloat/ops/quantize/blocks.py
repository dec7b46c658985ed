"""One scale a block, in Triton: strips along the rows, along the columns, both in one reading, or square tiles.

A program holds a tile of the matrix that is made of whole blocks, finds the amax of each, and casts: nothing is read
twice. As in the reference, the tile is viewed as blocks of ROWS x COLS elements that share a scale: 1 x 128 for strips
along the rows, 128 x 1 along the columns, 128 x 128 for square tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import Format, ScaleRule
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize.device import (
    corner,
    extent,
    first_program,
    load_tile,
    matrix_of,
    pick,
    pick_wide,
    single_bytes,
    skips,
    store_codes,
    store_packed,
)
from minifloat.ops.quantize.job import Aligned, Job, Programs, Target, input_max
from minifloat.ops.tiles import Tile, tile

CANDIDATES = (Tile(32, 128, 1), Tile(32, 128, 2), Tile(32, 64, 1), Tile(64, 128, 4), Tile(128, 128, 8))
"""Tiles worth timing. One that does not hold whole blocks is enlarged to do, and its warps with it."""
MOST_WARPS = 32
"""Of a program: 1024 threads."""


@triton.jit
def block_amax(blocks):
    """fp32 [A, C] of blocks [A, ROWS, C, COLS]."""
    # One dim at a time: merged into one by permute and reshape, 32 x 32 blocks got wrong amaxes on an H200.
    along_k = tl.max(tl.abs(blocks), axis=3)
    return tl.maximum(tl.max(along_k, axis=1), 0.0)  # of a block of nothing but NaN 0


@triton.jit
def cast_blocks(
    values, levels, first_m, first_k, M, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, GIVEN: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of fp32 ``values``, and the grid of its scales; without a RULE that of its amaxes."""
    BLOCK_M: tl.constexpr = values.shape[0]
    BLOCK_K: tl.constexpr = values.shape[1]
    blocks = tl.reshape(values, (BLOCK_M // ROWS, ROWS, BLOCK_K // COLS, COLS))
    if GIVEN:
        where, inside = grid_places(first_m, first_k, M, K, tl.cdiv(K, COLS), 1, ROWS, COLS, BLOCK_M, BLOCK_K)
        amax = tl.load(levels + where, mask=inside, other=0.0)
    else:
        amax = block_amax(blocks)
    if RULE is None:
        codes = values
        scale = amax
    else:
        multiplier, scale = RULE.kernels.scale(amax, MAX, EPSILON, LARGEST)
        codes = ELEMENT.kernels.encode(blocks * multiplier[:, None, :, None], ELEMENT)
        codes = tl.reshape(codes, (BLOCK_M, BLOCK_K))
        codes = single_bytes(codes, M)
    return codes, scale


@triton.jit
def grid_places(
    first_m, first_k, M, K, stride_m, stride_k,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Offsets in the grid of blocks of [M, K] of those of a tile, and which of them exist."""
    m = first_m // ROWS + tl.arange(0, BLOCK_M // ROWS)
    k = first_k // COLS + tl.arange(0, BLOCK_K // COLS)
    inside = (m[:, None] < tl.cdiv(M, ROWS)) & (k[None, :] < tl.cdiv(K, COLS))
    return m[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k, inside


@triton.jit
def store_block_cast(
    values, first_m, first_k, M, K, P,
    row_levels, row_codes, row_scales, column_levels, column_codes, column_scales,
    row_stride_m, row_stride_k, column_stride_m, column_stride_k,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, ALIGNED_P: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Casts a tile of fp32 ``values`` that begins at whole blocks of the matrix [M, K].

    Whatever made the values: a load, or a norm or activation of what was loaded. Outside of the matrix they are 0, -0
    or NaN, which no amax counts. ``..._levels`` are read if ``GIVEN``. ``P``, ``ALIGNED_P``: see ``store_codes``.
    """
    SHORT: tl.constexpr = BLOCK if TILE else 1
    BLOCK_M: tl.constexpr = values.shape[0]
    BLOCK_K: tl.constexpr = values.shape[1]
    m = first_m + tl.arange(0, BLOCK_M)
    k = first_k + tl.arange(0, BLOCK_K)
    if ROW or TILE:  # square tiles are the same codes in both orientations
        codes, scale = cast_blocks(
            values, row_levels, first_m, first_k, M, K, SHORT, BLOCK, GIVEN, ELEMENT, MAX, RULE, EPSILON, LARGEST
        )
    if ROW:
        if RULE is not None:
            if ELEMENT.packed:
                store_packed(row_codes, codes, first_m, first_k, M, K, False)
            else:
                store_codes(row_codes, codes, m, k, M, K, P, False, ALIGNED_P)
        where, inside = grid_places(
            first_m, first_k, M, K, row_stride_m, row_stride_k, SHORT, BLOCK, BLOCK_M, BLOCK_K
        )  # fmt: skip
        tl.store(row_scales + where, scale, mask=inside)
    if COLUMN:
        if not TILE:
            codes, scale = cast_blocks(
                values, column_levels, first_m, first_k, M, K, BLOCK, SHORT, GIVEN, ELEMENT, MAX, RULE, EPSILON, LARGEST
            )
        if RULE is not None:
            if ELEMENT.packed:
                store_packed(column_codes, codes, first_m, first_k, M, K, True)
            else:
                store_codes(column_codes, codes, m, k, M, K, P, K_MAJOR, ALIGNED_P)
        where, inside = grid_places(
            first_m, first_k, M, K, column_stride_m, column_stride_k, BLOCK, SHORT, BLOCK_M, BLOCK_K
        )  # fmt: skip
        tl.store(column_scales + where, scale, mask=inside)


@triton.jit
def cast_block_kernel(
    xs, row_levels, row_codes, row_scales, column_levels, column_codes, column_scales, noop,
    starts, Ms, Ks, Ps, row_strides_m, row_strides_k, column_strides_m, column_strides_k,
    COUNT: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    CAN_SKIP: tl.constexpr, ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if skips(noop, CAN_SKIP):
        return
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, ALIGNED_K)
    M = extent(pick(Ms, starts, matrix, COUNT), ALIGNED_M)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    first_m, first_k = corner(program - first_program(starts, matrix, COUNT), K, BLOCK_M, BLOCK_K)
    values = load_tile(x, first_m + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_K), M, K)
    store_block_cast(
        values, first_m, first_k, M, K, pick(Ps, starts, matrix, COUNT),
        pick(row_levels, starts, matrix, COUNT), pick_wide(row_codes, starts, matrix, COUNT, ALIGNED_K),
        pick(row_scales, starts, matrix, COUNT), pick(column_levels, starts, matrix, COUNT),
        pick_wide(column_codes, starts, matrix, COUNT, ALIGNED_P if K_MAJOR else ALIGNED_K),
        pick(column_scales, starts, matrix, COUNT),
        pick(row_strides_m, starts, matrix, COUNT), pick(row_strides_k, starts, matrix, COUNT),
        pick(column_strides_m, starts, matrix, COUNT), pick(column_strides_k, starts, matrix, COUNT),
        ROW, COLUMN, K_MAJOR, ALIGNED_P, GIVEN, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST,
    )  # fmt: skip


CAST = Kernel(cast_block_kernel)


def cast(jobs: Sequence[Job], noop: Tensor | None, choice: Tile | None = None) -> None:
    """Casts a group of jobs, which are alike also in whether their block amaxes are given: one launch.

    Two launches where the orientations differ in format, or where only one has its amaxes given.

    Args:
        noop: one number on the device; where it is not 0 the outputs stay as they are.
        choice: a tile other than the pinned one; the results are the same.
    """
    for part in _of_one_kind(jobs):
        fmt = part[0].targets[0].format
        _launch(part, fmt.scaling, "scale_inv", noop, choice)


def amax(jobs: Sequence[Job], choice: Tile | None = None) -> None:
    """Fills ``amax`` of the targets, fp32 grids as ``reference.amax`` returns them; other outputs are not touched."""
    for part in _of_one_kind([_measured(job) for job in jobs]):
        _launch(part, None, "amax", None, choice)


def _measured(job: Job) -> Job:
    row, column = (target and target._replace(level=None) for target in (job.row, job.column))
    return job._replace(row=row, column=column)


def _of_one_kind(jobs: Sequence[Job]) -> list[Sequence[Job]]:
    """The jobs; each orientation by itself where the two take different kernels."""
    row, column = jobs[0].row, jobs[0].column
    if row is None or column is None or _kind(row) == _kind(column):
        return [jobs]
    return [[job._replace(column=None) for job in jobs], [job._replace(row=None) for job in jobs]]


def _kind(target: Target) -> tuple[Format, bool]:
    return target.format, target.level is not None


def _launch(jobs: Sequence[Job], rule: ScaleRule | None, scales: str, noop: Tensor | None, choice: Tile | None) -> None:
    """``scales`` names the output of a target that the grid of scales, or without a rule of amaxes, goes to."""
    first = jobs[0]
    kind = _kind(first.targets[0])
    assert all(_kind(target) == kind for job in jobs for target in job.targets), "not alike"
    rows, cols = ([job.x.shape[i] for job in jobs] for i in (0, 1))
    sizes = Aligned.of(rows, cols)
    choice = choose(first, sizes.rows and sizes.cols, choice)
    counts = [triton.cdiv(M, choice.rows) * triton.cdiv(K, choice.cols) for M, K in zip(rows, cols, strict=True)]
    programs = Programs.of(counts)
    outputs, strides = [], []
    # What is not wanted is not written to, but needs an address.
    for targets in ([job.row or job.targets[0] for job in jobs], [job.column or job.targets[0] for job in jobs]):
        grids = [getattr(target, scales) for target in targets]
        outputs += [
            programs.pad(t) for t in ([_level(target) for target in targets], [t.codes for t in targets], grids)
        ]
        strides += [programs.pad_integers([grid.stride(i) for grid in grids]) for i in (0, 1)]
    m, k = programs.pad_integers(rows), programs.pad_integers(cols)
    CAST(
        programs.total,
        (programs.pad([job.x for job in jobs]), *outputs, first.x if noop is None else noop),
        (programs.starts, m, k, m, *strides),
        constants(first, programs.variant, rule, noop is not None, sizes, choice),
        choice.warps,
    )


def choose(job: Job, wide: bool, choice: Tile | None = None) -> Tile:
    """The tile for jobs like this one; ``wide``: their sizes allow wide accesses."""
    fmt = job.targets[0].format
    choice = choice or tile("cast_block" if fmt.block > 32 else "cast_mx", job.x.device)
    rows, cols, warps = whole_blocks(choice, fmt, job.row is not None, job.column is not None)
    # Else every element has an address of its own, for which few threads have too few registers.
    return Tile(rows, cols, warps if wide else max(warps, 8))


def constants(
    job: Job, variant: int, rule: ScaleRule | None, can_skip: bool, sizes: Aligned, choice: Tile
) -> tuple[Any, ...]:
    """Those of ``cast_block_kernel`` for jobs like this one; without a rule it finds amaxes."""
    (fmt, given), column = _kind(job.targets[0]), job.column
    return (
        variant, job.row is not None, column is not None, column is not None and column.k_major, given, fmt.block,
        fmt.tile, fmt.encoding, fmt.max, rule, fmt.amax_epsilon, input_max(job.x), can_skip,
        *sizes, choice.rows, choice.cols,
    )  # fmt: skip


def whole_blocks(choice: Tile, fmt: Format, row: bool, column: bool) -> Tile:
    """``choice``, enlarged to hold whole blocks of the orientations that are cast, and its warps with it."""
    rows = max(choice.rows, fmt.block if fmt.tile or column else 1)
    cols = max(choice.cols, fmt.block if fmt.tile or row else 1)
    return Tile(rows, cols, min(choice.warps * (rows * cols) // (choice.rows * choice.cols), MOST_WARPS))


def _level(target: Target) -> Tensor:
    """The given amaxes; any tensor where there are none."""
    return target.amax if target.level is None else ready(target.level.float())
