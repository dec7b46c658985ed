"""Amax and cast of groups of rows on a GPU: the kernels of ``ops/quantize``, by a table that the device computes.

Casts of one format with one scale a group, or a tile, have a kernel of their own, of rows as they lie or read by index.
The number of launches depends on formats alone: one for the amaxes of all groups, or two where a format wants one a
row; for casts as many as lists of one matrix take; and one before each, which computes its table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, Format, parse
from minifloat.ops import grouped
from minifloat.ops.grouped import layout, table
from minifloat.ops.grouped.layout import Place, number, of_groups, of_rows
from minifloat.ops.grouped.table import (
    Argument,
    Outputs,
    as_declared,
    casts_to,
    record_amaxes,
    scale_of,
    store_tile,
    tile_of,
    wanted,
)
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import blocks, casts_blocks, gpu, nvfp4, per_tensor
from minifloat.ops.quantize.blocks import held
from minifloat.ops.quantize.decode import at_16_bytes
from minifloat.ops.quantize.device import extent, load_tile, pick, pick_wide, tile_places
from minifloat.ops.quantize.job import Aligned, CastJob, CastTarget, aligned, input_max
from minifloat.ops.tiles import Tile, tile


@triton.jit
def grouped_cast_kernel(
    xs, rows, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    GATHERED: tl.constexpr, CHAINED: tl.constexpr, AMAX: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N)
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST)
    x = pick_wide(xs, order, group, 0, ALIGNED_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    if GATHERED:
        source = tl.load(pick(rows, order, group, 0) + m, mask=m < M, other=0).to(tl.int64)
        inside = (m[:, None] < M) & (n[None, :] < N)
        values = tl.load(x + source[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        values = load_tile(x, m, n, M, N)
    if AMAX:
        record_amaxes(row_amaxes, column_amaxes, order, group, tl.abs(values), ROW, COLUMN)
    store_tile(
        held(values, LAYOUTS), scale, scale_inv, order, group, place, first_m, first_n, M, N, P, 0 * N, N,
        row_codes, row_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N, LAYOUTS, 0,
        x.dtype.element_ty if CHAINED else None,
    )  # fmt: skip


@triton.jit
def token_amax_kernel(x, amaxes, T, K, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The amax of each row of ``x`` [T, K]."""
    K = extent(K, ALIGNED)
    t, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    at = x + t[:, None].to(tl.int64) * K + k[None, :]
    for first in tl.range(0, K, COLS, num_stages=3):
        inside = (t[:, None] < T) & (first + k[None, :] < K)
        values = tl.load(at + first, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))  # which drops NaN
    tl.store(amaxes + t, tl.max(largest, axis=1), mask=t < T)


@triton.jit
def gathered_amax_kernel(amaxes, rows, offsets, found, BLOCK: tl.constexpr):
    """The largest amax of the tokens of each group."""
    group = tl.program_id(0)
    end = tl.load(offsets + group + 1)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(offsets + group), end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        token = tl.load(rows + row, mask=row < end, other=0)
        largest = tl.maximum(largest, tl.load(amaxes + token, mask=row < end, other=0.0))
    tl.store(found + group, tl.max(largest, axis=0))


KERNEL = Kernel(grouped_cast_kernel, layouts=True)
_of_tokens, _of_groups = Kernel(token_amax_kernel), Kernel(gathered_amax_kernel, wide=False)
_TOKENS = Tile(4, 512, 4)
_ROWS = 1024


def amax(x: Tensor, offsets: Tensor, formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """Implements the operation: one reading of ``x`` for all whole groups, rotated ones too, one for amaxes a row."""
    parsed, groups = [parse(spec) for spec in formats], offsets.numel() - 1
    if not all(map(gpu.casts, parsed)):
        return grouped.grouped_amax.reference(x, offsets, formats, dims)
    x, offsets = ready(x), offsets.contiguous()
    found = grouped.empty_amaxes(x, offsets, formats, dims)
    plain: list[Tensor] = []
    rotated: list[Tensor] = []
    lines: dict[int, list[Tensor]] = {}
    for amax_of, fmt, dim in zip(found, parsed, dims, strict=True):
        gpu.check(x, None, fmt, dim)
        amax_of.zero_()
        if fmt.amax_per_row:
            lines.setdefault(dim, []).append(amax_of)
        elif fmt.needs_amax:
            (rotated if fmt.transform == "hadamard16" else plain).append(amax_of)
    if not x.numel() or not groups:
        return found
    if rotated:
        _rotated_amax(x, offsets, plain[0] if plain else None, rotated[0])
    elif plain:
        _amax(x, offsets, plain[0])
    for dim, amaxes in lines.items():
        _line_amax(x, offsets, dim, amaxes[0])
    for first, *others in (each for each in (plain, rotated, *lines.values()) if each):
        for other in others:  # outputs of an operation must not share memory
            other.copy_(first)
    return found


def _amax(x: Tensor, offsets: Tensor, found: Tensor) -> None:
    """Raises ``found`` [G] to the amax of each group."""
    M, K = x.shape
    choice = tile("amax", x.device)
    block = choice.rows * choice.cols
    unit = max(1, block // K)  # rows of a program; or programs of a row
    programs = triton.cdiv(unit * K, block)
    table.launch(
        per_tensor.AMAX, offsets, M, unit, programs, [(x, of_rows(K)), (found, of_groups(1))], [number(K)],
        (0, block, aligned([K])), choice.warps,
    )  # fmt: skip


def _rotated_amax(x: Tensor, offsets: Tensor, plain: Tensor | None, rotated: Tensor) -> None:
    """Finds the amaxes of each group after its Hadamard transform and, if wanted, of the group as it is."""
    K = x.shape[1]
    choice = tile("amax_nvfp4", x.device)
    amaxes = [(each, of_groups(1)) for each in (rotated if plain is None else plain, rotated)]
    constants = 0, plain is not None, aligned([K]), choice.cols
    _launch(nvfp4.ROTATED_AMAX, x, offsets, amaxes, [number(K)], constants, choice)


def _line_amax(x: Tensor, offsets: Tensor, dim: int, found: Tensor) -> None:
    """Raises ``found``, [M] or [G, K], to the amax of each row, or of each column of each group."""
    K = x.shape[1]
    choice = tile("amax_nvfp4_lines", x.device)
    constants = 0, dim == COLUMNWISE, aligned([K]), choice.rows, choice.cols
    place = of_groups(K) if dim == COLUMNWISE else of_rows(1)
    _launch(nvfp4.LINE_AMAX, x, offsets, [(found, place)], [number(K)], constants, choice)


def cast(
    x: Tensor, offsets: Tensor, given: Sequence[Tensor | None], rng: Tensor | None, formats: Sequence[str],
    dims: Sequence[int], k_major: Sequence[bool], rows: Tensor | None = None, chained: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Implements the operation; a rowwise cast and the columnwise one after it are one pass where ``gpu.cast`` is."""
    parsed, groups = [parse(spec) for spec in formats], offsets.numel() - 1
    if not all(map(gpu.casts, parsed)):
        return grouped.grouped_cast.reference(x, offsets, given, rng, formats, dims, k_major, rows, chained)
    x, offsets = ready(x), offsets.contiguous()
    if rows is not None or chained or (groups and x.shape[1] and _is_one(given, parsed, dims, k_major)):
        gpu.check(x, given[0], parsed[0], dims[0])
        out, made = casts_to(grouped.gathered(x, rows), offsets, formats, dims, k_major, chained)
        level = None if given[0] is None else given[0].float()
        cast_to(out, x, rows, offsets, level)
        return as_declared(made, formats, dims, k_major)
    outputs: list[Tensor] = []
    jobs: list[CastJob] = []
    for level, fmt, dim, transposed in zip(given, parsed, dims, k_major, strict=True):
        gpu.check(x, level, fmt, dim)
        transposed = transposed and dim == COLUMNWISE and not fmt.packed
        codes, scales, own_amax = grouped.empty_cast(x, groups, fmt, dim, transposed)
        target = CastTarget(fmt, dim, level, codes, scales, own_amax.zero_(), transposed)
        gpu.add(jobs, x, rng if fmt.rounding == "stochastic" else None, target, bool(jobs))
        outputs += codes, scales, own_amax
    for job in jobs if groups else ():
        if x.shape[1]:
            _kernel(job.targets[0].format)(job, offsets)
        else:
            _scale_nothing(job)
    return as_declared(outputs, formats, dims, k_major)


def _is_one(
    given: Sequence[Tensor | None], formats: Sequence[Format], dims: Sequence[int], k_major: Sequence[bool]
) -> bool:
    """One launch of ``grouped_cast_kernel`` makes these casts."""
    fmt = formats[0] if formats else Format()
    if len(set(formats)) != 1 or len(set(dims)) < len(dims) or fmt.rounding == "stochastic":
        return False
    if any(level is not given[0] for level in given):
        return False
    written = all(order for order, dim in zip(k_major, dims, strict=True) if dim == COLUMNWISE)
    # Strips go through shared memory in the kernel of lists.
    return fmt.tile and casts_blocks(fmt) if fmt.block else written and not fmt.amax_per_row


def _kernel(fmt: Format) -> Callable[[CastJob, Tensor], None]:
    if fmt.scale_rule == "two_level":
        return _cast_nvfp4
    return _cast_blocks if fmt.block else _cast_tensor


def _scale_nothing(job: CastJob) -> None:
    """Scales of groups without columns, which no program would write: those of their amaxes, or the given ones."""
    for target in job.targets:
        fmt, level = target.format, target.level
        if level is not None and not fmt.block:
            found = (
                level.reciprocal() if fmt.scale_rule == "given" else fmt.scaling.scale(level, fmt, input_max(job.x))[1]
            )
            target.scale_inv.copy_(found)


def _cast_tensor(job: CastJob, offsets: Tensor) -> None:
    """Codes of one scale a group, a row or a column of a group."""
    choice = tile("cast_tensor", job.x.device)
    level = _level_of(job, job.targets[0])
    outputs: list[Argument] = []
    for target in job.both:
        outputs += *_outputs(job, target), (target.amax, of_groups(1))
    constants = per_tensor.constants(job, 0, False, _aligned(job), choice)
    integers = [number(job.x.shape[1]), _stored(job)]
    _launch(per_tensor.CAST, job.x, offsets, [level, *outputs, level[0]], integers, constants, choice)


def _cast_blocks(job: CastJob, offsets: Tensor) -> None:
    """Codes of one scale a block."""
    fmt, sizes = job.targets[0].format, _aligned(job)
    choice, spread = blocks.choose(job, sizes)
    tensors: list[Tensor | Argument] = []
    strides: list[Place] = []
    for target in job.both:
        tensors += (target.amax, number(0)), *_outputs(job, target)  # they find their amaxes
        strides += map(number, target.scale_inv.stride())
    integers = [number(job.x.shape[1]), _stored(job), *strides]
    constants = blocks.constants(job, 0, fmt.scaling, False, sizes, choice, spread)
    _launch(blocks.CAST, job.x, offsets, [*tensors, job.x], integers, constants, choice)


def _cast_nvfp4(job: CastJob, offsets: Tensor) -> None:
    """Codes of one scale a block of 16 below one a group, a row or a column of a group."""
    wide = _aligned(job).cols
    choice = nvfp4.choose(job, wide)
    level = _level_of(job, job.targets[0])
    seeds = level if job.rng is None else (ready(job.rng), of_groups(2))
    outputs: list[Argument] = []
    for target in job.both:
        outputs += _level_of(job, target), *_outputs(job, target)
    constants = nvfp4.constants(job, 0, False, wide, choice)
    integers = [number(job.x.shape[1])]
    _launch(nvfp4.CAST, job.x, offsets, [seeds, *outputs, level[0]], integers, constants, choice)


def _launch(
    kernel: Kernel, x: Tensor, offsets: Tensor, tensors: Sequence[Tensor | Argument], integers: Sequence[Place],
    constants: tuple[Any, ...], choice: Tile,
) -> None:  # fmt: skip
    """Launches a kernel whose programs work on tiles of ``x`` [M, K], with whatever else it takes."""
    M, K = x.shape
    arguments = [(x, of_rows(K)), *tensors]
    programs = triton.cdiv(K, choice.cols)
    table.launch(kernel, offsets, M, choice.rows, programs, arguments, integers, constants, choice.warps)


def _outputs(job: CastJob, target: CastTarget) -> tuple[Argument, Argument]:
    """Codes and scales."""
    fmt, dim, K = target.format, target.dim, job.x.shape[1]
    codes = layout.place("codes", fmt, dim) if target.k_major else layout.elements("codes", fmt, dim, K)
    return (target.codes, codes), (target.scale_inv, layout.elements("scale_inv", fmt, dim, K))


def _level_of(job: CastJob, target: CastTarget) -> Argument:
    """Amaxes or scales that are given."""
    assert target.level is not None
    return ready(target.level.float()), layout.elements("amax", target.format, target.dim, job.x.shape[1])


def _aligned(job: CastJob) -> Aligned:
    """Columns: all rows of ``x`` and of codes begin at multiples of 16 bytes; rows are any number."""
    unit = 32 if job.row is not None and job.row.format.packed else 16
    return Aligned(False, job.x.shape[1] % unit == 0, True)


def _stored(job: CastJob) -> Place:
    """Rows of the memory of columnwise codes."""
    return number(job.both[1].codes.shape[0])


# ---- one format: rows as they lie, or read by index ----


def cast_to(out: Outputs, x: Tensor, rows: Tensor | None, offsets: Tensor, level: Tensor | None) -> None:
    """Casts the groups of rows of ``x``, or those that ``rows`` name, to ``out``.

    ``level``: of each group amax or scale, fp32 [G]; None: blocks find their amaxes.
    """
    M, columns = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    choice, source = out.tile("cast", columns, x.device), (x, of_rows(columns) if rows is None else number(0))
    tensors = [source, wanted(rows, of_rows(1), x), wanted(level, of_groups(1), x)]
    table.launch_to(KERNEL, out, tensors, offsets, M, columns, (*out.constants, rows is not None), choice)


def gathered_amax(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The operation: amaxes of tokens, and then of groups. Tokens are read once, however many experts they have."""
    x, (T, K), groups = ready(x), x.shape, offsets.numel() - 1
    of_tokens = torch.empty(T, dtype=torch.float32, device=x.device)
    found = torch.empty(groups, dtype=torch.float32, device=x.device)
    count, cols, warps, _ = _TOKENS
    _of_tokens(triton.cdiv(T, count), (x, of_tokens), (T, K), (aligned([K]), count, cols), warps)
    _of_groups(groups, (of_tokens, ready(rows), at_16_bytes(offsets), found), (), (_ROWS,), 4)
    return found
