"""One scale a block, in Triton: strips along the rows, along the columns, both in one reading, or square tiles.

A program holds a tile of the matrix that is made of whole blocks, finds the amax of each, and casts: nothing is read
twice. As in the reference, the tile is viewed as blocks of ROWS x COLS elements that share a scale: 1 x 128 for strips
along the rows, 128 x 1 along the columns, 128 x 128 for square tiles. The kernels of norms and activations cast a tile
of their result so, which is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from minifloat.formats import Format, ScaleRule
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import FusedCodes
from minifloat.ops.quantize.decode import saturated
from minifloat.ops.quantize.device import (
    corner,
    extent,
    first_program,
    load_tile,
    matrix_of,
    pick,
    pick_wide,
    places,
    single_bytes,
    skips,
    store_codes,
    store_packed,
    tile_places,
)
from minifloat.ops.quantize.job import (
    Aligned,
    CastJob,
    CastTarget,
    Layouts,
    Programs,
    aligned,
    input_max,
    layouts,
    through_shared,
)
from minifloat.ops.tiles import Tile, tile

MOST_WARPS = 32
"""Most warps of a program: 1024 threads."""


@triton.jit
def block_amax(blocks, NAN: tl.constexpr):
    """fp32 [A, C] of blocks [A, ROWS, C, COLS]; NaNs are dropped if the element has a ``NAN``, else infinite."""
    # One dim at a time: merged into one by permute and reshape, 32 x 32 blocks got wrong amaxes on an H200.
    magnitudes = tl.abs(blocks)
    if not NAN:
        magnitudes = tl.where(magnitudes == magnitudes, magnitudes, float("inf"))
    along_k = tl.max(magnitudes, axis=3)
    return tl.maximum(tl.max(along_k, axis=1), 0.0)  # of a block of nothing but NaN 0


@triton.jit
def cast_blocks(
    values, levels, first_m, first_k, M, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, GIVEN: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    AS_VALUES: tl.constexpr, GLUON: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of fp32 ``values``, and the grid of its scales; without a RULE that of its amaxes.

    ``AS_VALUES``: in lieu of codes the bf16 numbers that they stand for.
    """
    BLOCK_M: tl.constexpr = values.shape[0]
    BLOCK_K: tl.constexpr = values.shape[1]
    blocks = tl.reshape(values, (BLOCK_M // ROWS, ROWS, BLOCK_K // COLS, COLS))
    amax = block_amax(blocks, ELEMENT.nan)
    if GIVEN:
        where, inside = grid_places(amax, first_m, first_k, M, K, tl.cdiv(K, COLS), 1, ROWS, COLS, GLUON)
        amax = tl.load(levels + where, mask=inside, other=0.0)
    if RULE is None:
        codes = values
        scale = amax
    else:
        multiplier, scale = RULE.kernels.scale(amax, MAX, EPSILON, LARGEST)
        codes = ELEMENT.kernels.encode(blocks * multiplier[:, None, :, None], ELEMENT)
        if AS_VALUES:
            codes = ELEMENT.kernels.decode(codes, ELEMENT) * RULE.kernels.value(scale)[:, None, :, None]
            codes = saturated(codes).to(tl.bfloat16)
        codes = tl.reshape(codes, (BLOCK_M, BLOCK_K))
        if not (GLUON or AS_VALUES):
            codes = single_bytes(codes, M)
    return codes, scale


@triton.jit
def grid_places(
    scale, first_m, first_k, M, K, stride_m, stride_k, ROWS: tl.constexpr, COLS: tl.constexpr, GLUON: tl.constexpr
):
    """Offsets in the grid of blocks of [M, K] of the ``scale`` of each block of a tile, and which of them exist."""
    m, k = places(scale, first_m // ROWS, first_k // COLS, GLUON)
    inside = (m[:, None] < tl.cdiv(M, ROWS)) & (k[None, :] < tl.cdiv(K, COLS))
    return m[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k, inside


@triton.jit
def restored(
    codes, scale, ROWS: tl.constexpr, COLS: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, TYPE: tl.constexpr
):
    """Decodes a tile of codes with the grid of its scales, rounded to TYPE, in fp32."""
    BLOCK_M: tl.constexpr = codes.shape[0]
    BLOCK_K: tl.constexpr = codes.shape[1]
    values = tl.reshape(ELEMENT.kernels.decode(codes, ELEMENT), (BLOCK_M // ROWS, ROWS, BLOCK_K // COLS, COLS))
    values *= RULE.kernels.value(scale)[:, None, :, None]
    return tl.reshape(values, (BLOCK_M, BLOCK_K)).to(TYPE).to(tl.float32)


@triton.jit
def held(values, LAYOUTS: tl.constexpr):
    """A tile of fp32 ``values`` as it is cast: with ``LAYOUTS``, in shared memory, in bf16, which they fit."""
    if LAYOUTS is None:
        tile = values
    else:
        tile = gl.allocate_shared_memory(gl.bfloat16, values.shape, LAYOUTS.shared, values.to(gl.bfloat16))
    return tile


@triton.jit
def held_values(tile, LAYOUTS: tl.constexpr):
    """The fp32 values that :func:`held` took."""
    if LAYOUTS is None:
        values = tile
    else:
        values = tile.load(LAYOUTS.loaded).to(tl.float32)
    return values


@triton.jit
def store_block_cast(
    tile, first_m, first_k, M, K, P,
    row_levels, row_codes, row_scales, column_levels, column_codes, column_scales,
    row_stride_m, row_stride_k, column_stride_m, column_stride_k,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, ALIGNED_P: tl.constexpr, GIVEN: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    LAYOUTS: tl.constexpr = None, CHAINED: tl.constexpr = None,
):  # fmt: skip
    """Casts a ``tile`` that :func:`held` returned and that begins at whole blocks of the matrix [M, K].

    Whatever made its values: a load, or a norm or activation of what was loaded. Outside of the matrix they are 0, -0
    or, in a block that has such inside, NaN. ``..._levels`` are read if ``GIVEN``. ``P``, ``ALIGNED_P``: see
    ``store_codes``. Codes of a pointer to bf16 are values. ``CHAINED``: the columnwise cast is of the values of the
    rowwise codes, rounded to this type; not with ``LAYOUTS``.
    """
    SHORT: tl.constexpr = BLOCK if TILE else 1
    GLUON: tl.constexpr = LAYOUTS is not None
    ROW_VALUES: tl.constexpr = row_codes.dtype.element_ty == tl.bfloat16
    COLUMN_VALUES: tl.constexpr = column_codes.dtype.element_ty == tl.bfloat16
    values = tile.load(LAYOUTS.row).to(tl.float32) if GLUON else tile
    if ROW or TILE:  # square tiles are the same codes in both orientations
        codes, scale = cast_blocks(
            values, row_levels, first_m, first_k, M, K, SHORT, BLOCK, GIVEN,
            ELEMENT, MAX, RULE, EPSILON, LARGEST, ROW_VALUES, GLUON,
        )  # fmt: skip
    if ROW:
        if RULE is not None:
            if ELEMENT.packed and not ROW_VALUES:
                store_packed(row_codes, codes, first_m, first_k, M, K, False)
            else:
                m, k = places(codes, first_m, first_k, GLUON)
                store_codes(row_codes, codes, m, k, M, K, P, False, ALIGNED_P)
        where, inside = grid_places(scale, first_m, first_k, M, K, row_stride_m, row_stride_k, SHORT, BLOCK, GLUON)
        tl.store(row_scales + where, scale, mask=inside)
    if COLUMN:
        if CHAINED is not None:
            values = restored(codes, scale, SHORT, BLOCK, ELEMENT, RULE, CHAINED)
        elif GLUON:
            values = tile.load(LAYOUTS.column).to(tl.float32)
        if not TILE:
            codes, scale = cast_blocks(
                values, column_levels, first_m, first_k, M, K, BLOCK, SHORT, GIVEN,
                ELEMENT, MAX, RULE, EPSILON, LARGEST, COLUMN_VALUES, GLUON,
            )  # fmt: skip
        if RULE is not None:
            if ELEMENT.packed and not COLUMN_VALUES:
                store_packed(column_codes, codes, first_m, first_k, M, K, True)
            else:
                if K_MAJOR:
                    k, m = places(tl.trans(codes), first_k, first_m, GLUON)
                else:
                    m, k = places(codes, first_m, first_k, GLUON)
                store_codes(column_codes, codes, m, k, M, K, P, K_MAJOR, ALIGNED_P)
        where, inside = grid_places(
            scale, first_m, first_k, M, K, column_stride_m, column_stride_k, BLOCK, SHORT, GLUON
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
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    if skips(noop, CAN_SKIP):
        return
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, ALIGNED_K)
    M = extent(pick(Ms, starts, matrix, COUNT), ALIGNED_M)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    first_m, first_k = corner(program - first_program(starts, matrix, COUNT), K, BLOCK_M, BLOCK_K)
    m, k = tile_places(first_m, first_k, BLOCK_M, BLOCK_K, LAYOUTS)
    store_block_cast(
        held(load_tile(x, m, k, M, K), LAYOUTS), first_m, first_k, M, K, pick(Ps, starts, matrix, COUNT),
        pick(row_levels, starts, matrix, COUNT), pick_wide(row_codes, starts, matrix, COUNT, ALIGNED_K),
        pick(row_scales, starts, matrix, COUNT), pick(column_levels, starts, matrix, COUNT),
        pick_wide(column_codes, starts, matrix, COUNT, ALIGNED_P if K_MAJOR else ALIGNED_K),
        pick(column_scales, starts, matrix, COUNT),
        pick(row_strides_m, starts, matrix, COUNT), pick(row_strides_k, starts, matrix, COUNT),
        pick(column_strides_m, starts, matrix, COUNT), pick(column_strides_k, starts, matrix, COUNT),
        ROW, COLUMN, K_MAJOR, ALIGNED_P, GIVEN, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS,
    )  # fmt: skip


CAST = Kernel(cast_block_kernel, layouts=True)


def cast(jobs: Sequence[CastJob], noop: Tensor | None, choice: Tile | None = None) -> None:
    """Casts a group of jobs, which are alike also in whether their block amaxes are given: one launch.

    Two launches where the orientations differ in format, or where only one has its amaxes given.

    Args:
        noop: one number on the device; where it is not 0 the outputs stay as they are.
        choice: a tile other than the pinned one; the results are the same.
    """
    for part in _of_one_kind(jobs):
        fmt = part[0].targets[0].format
        _launch(part, fmt.scaling, "scale_inv", noop, choice)


def amax(jobs: Sequence[CastJob], choice: Tile | None = None) -> None:
    """Fills ``amax`` of the targets, fp32 grids as ``reference.amax`` returns them; other outputs are not touched."""
    both = [[target and target._replace(level=None) for target in (job.row, job.column)] for job in jobs]
    for part in _of_one_kind([job._replace(row=one[0], column=one[1]) for job, one in zip(jobs, both, strict=True)]):
        _launch(part, None, "amax", None, choice)


def _of_one_kind(jobs: Sequence[CastJob]) -> list[Sequence[CastJob]]:
    """The jobs; each orientation by itself where the two take different kernels."""
    row, column = jobs[0].row, jobs[0].column
    if row is None or column is None or _kind(row) == _kind(column):
        return [jobs]
    return [[job._replace(column=None) for job in jobs], [job._replace(row=None) for job in jobs]]


def _kind(target: CastTarget) -> tuple[Format, bool]:
    return target.format, target.level is not None


def _launch(
    jobs: Sequence[CastJob], rule: ScaleRule | None, scales: str, noop: Tensor | None, choice: Tile | None
) -> None:
    """``scales`` names the output of a target that the grid of scales, or without a rule of amaxes, goes to."""
    first = jobs[0]
    kind = _kind(first.targets[0])
    assert all(_kind(target) == kind for job in jobs for target in job.targets), "not alike"
    xs = [job.x for job in jobs]
    sizes = Aligned.of(*([x.shape[i] for x in xs] for i in (0, 1)))
    # Launches of other kinds have not run through shared memory yet.
    shown = rule is not None and noop is None and not kind[1]
    choice, spread = choose(first, sizes, choice, shown)
    programs = Programs.of([choice.count(x.shape) for x in xs])
    outputs = programs.outputs(jobs, _level, attrgetter("codes"), attrgetter(scales))
    strides = [tuple([grid.stride(i) for grid in grids]) for grids in outputs[2::3] for i in (0, 1)]
    m, k = programs.sizes(xs)
    CAST(
        programs.total,
        (programs.pad(xs), *outputs, first.x if noop is None else noop),
        (programs.starts, m, k, m, *strides),
        constants(first, programs.variant, rule, noop is not None, sizes, choice, spread),
        choice.warps,
    )


def choose(
    job: CastJob, sizes: Aligned, choice: Tile | None = None, shared: bool = False
) -> tuple[Tile, Layouts | None]:
    """The tile for jobs like this one, and its layouts if it goes through shared memory: it may where ``shared``."""
    fmt, column = job.targets[0].format, job.column
    k_major = column is not None and column.k_major
    shared = shared and through_shared(job.x, fmt, column is not None, k_major, sizes)
    wide = sizes.stored and sizes.cols
    choice = block_tile("cast", fmt, job.row is not None, column is not None, shared, wide, job.x.device, choice)
    as_values = tuple(target is not None and target.codes.dtype == torch.bfloat16 for target in (job.row, column))
    return choice, layouts(choice, fmt.block, k_major, as_values) if shared else None


def gives_values(fmt: Format, x: Tensor) -> bool:
    """Whether ``x`` may be cast to values in lieu of codes: they are numbers of bf16 (``matmul/emulated.py``)."""
    return not fmt.tile and fmt.scaling.own and fmt.scaling.power_of_two and x.dtype != torch.float32


def block_tile(
    kernel: str, fmt: Format, row: bool, column: bool, shared: bool, wide: bool, device: torch.device,
    choice: Tile | None = None,
) -> Tile:  # fmt: skip
    """The pinned tile of a kernel that casts to ``fmt``, or ``choice``, of whole blocks.

    Args:
        shared: it goes through shared memory.
        wide: sizes allow wide accesses.
    """
    if choice is None:
        how = "_shared" if shared else "_columnwise" if column or fmt.tile else ""
        choice = tile(f"{kernel}_{'block' if fmt.block > 32 else 'mx'}{how}", device)
    whole = whole_blocks(choice, fmt, row, column)
    # Else every element has an address of its own, for which few threads have too few registers.
    return whole if shared or wide else whole._replace(warps=max(whole.warps, 8))


def constants(
    job: CastJob, variant: int, rule: ScaleRule | None, can_skip: bool, sizes: Aligned, choice: Tile,
    spread: Layouts | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns those of ``cast_block_kernel`` for jobs like this one; without a rule it finds amaxes."""
    (fmt, given), column = _kind(job.targets[0]), job.column
    return (
        variant, job.row is not None, column is not None, column is not None and column.k_major, given, fmt.block,
        fmt.tile, fmt.encoding, fmt.max, rule, fmt.amax_epsilon, input_max(job.x), can_skip,
        *sizes, choice.rows, choice.cols, spread,
    )  # fmt: skip


def whole_blocks(choice: Tile, fmt: Format, row: bool, column: bool) -> Tile:
    """``choice``, enlarged to hold whole blocks of the orientations that are cast, and its warps with it."""
    rows = max(choice.rows, fmt.block if fmt.tile or column else 1)
    cols = max(choice.cols, fmt.block if fmt.tile or row else 1)
    warps = min(choice.warps * (rows * cols) // (choice.rows * choice.cols), MOST_WARPS)
    return choice._replace(rows=rows, cols=cols, warps=warps)


def _level(target: CastTarget) -> Tensor:
    """The given amaxes; any tensor where there are none."""
    return target.amax if target.level is None else ready(target.level.float())


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
    kernel: str, choice: Tile | None, x: Tensor, shape: tuple[int, int], fmt: Format, wanted: Sequence[bool],
    shown: bool = False,
) -> tuple[Tile, bool]:  # fmt: skip
    """The tile of ``kernel``, and whether it goes through shared memory, of a value of ``shape`` in the dtype of ``x``.

    Args:
        choice: a tile other than the pinned one; in blocks it is made one of whole blocks.
        wanted: rowwise, columnwise, k_major.
        shown: the kernel may cast through shared memory, see ``job.py``: in both orientations, so far.
    """
    rowwise, columnwise, k_major = wanted
    if not fmt.block:
        return choice or tile(f"{kernel}_columnwise" if columnwise else kernel, x.device), False
    rows, cols = (aligned([size]) for size in shape)
    shared = shown and rowwise and through_shared(x, fmt, columnwise, k_major, Aligned(rows, cols, rows))
    return block_tile(kernel, fmt, rowwise, columnwise, shared, rows and cols, x.device, choice), shared
