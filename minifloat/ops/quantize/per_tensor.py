"""One scale a tensor, or a row, in Triton: the amax of several tensors in one launch, and their casts in another.

The amax is one reading of the tensor. The cast reads it again and writes the codes along the rows, along the columns
(transposed in memory, as the tensor cores of sm_90 want them), or both; under delayed scaling it finds the amax too.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel
from minifloat.ops.quantize.device import (
    FLT_MAX,
    corner,
    extent,
    first_program,
    load_tile,
    matrix_of,
    pick,
    pick_wide,
    record_max,
    skips,
    store_scaled,
)
from minifloat.ops.quantize.job import Aligned, CastJob, Programs, input_max
from minifloat.ops.tiles import Tile, tile


@triton.jit
def amax_kernel(xs, amaxes, starts, Ms, Ks, COUNT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what is read last, the cast finds in the cache: its beginning
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, WIDE)
    size = pick(Ms, starts, matrix, COUNT).to(tl.int64) * pick(Ks, starts, matrix, COUNT)
    first = (program - first_program(starts, matrix, COUNT)).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    if first + BLOCK <= size:  # nearly always: without a mask the loads are wide whatever the size
        values = tl.load(x + first + at)
    else:
        values = tl.load(x + first + at, mask=first + at < size, other=0.0)
    largest = tl.max(tl.abs(values.to(tl.float32)), axis=0)  # which drops NaN
    record_max(pick(amaxes, starts, matrix, COUNT), tl.maximum(largest, 0.0))  # of nothing but NaN 0


@triton.jit
def cast_tensor_kernel(
    xs, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes, noop,
    starts, Ms, Ks, Ps,
    COUNT: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, GIVEN: tl.constexpr,
    PER_ROW: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, CAN_SKIP: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if skips(noop, CAN_SKIP):
        return
    program = tl.program_id(0)
    matrix = matrix_of(starts, program, COUNT)
    x = pick_wide(xs, starts, matrix, COUNT, ALIGNED_K)
    M = extent(pick(Ms, starts, matrix, COUNT), ALIGNED_M)
    K = extent(pick(Ks, starts, matrix, COUNT), ALIGNED_K)
    place = program - first_program(starts, matrix, COUNT)
    first_m, first_k = corner(place, K, BLOCK_M, BLOCK_K)
    m, k = first_m + tl.arange(0, BLOCK_M), first_k + tl.arange(0, BLOCK_K)
    level = pick(levels, starts, matrix, COUNT)
    if PER_ROW:  # or column: one of ROW and COLUMN
        line = k if COLUMN else m
        inside = line < (K if COLUMN else M)
        scale, scale_inv = RULE.kernels.scale(tl.load(level + line, mask=inside, other=1.0), MAX, EPSILON, FLT_MAX)
        factor = tl.expand_dims(scale, 0 if COLUMN else 1)
    else:
        factor, scale_inv = RULE.kernels.scale(tl.load(level), MAX, EPSILON, FLT_MAX)
    values = load_tile(x, m, k, M, K)  # behind the factor, which would else be made with all of them in registers
    store_scaled(
        values, factor, pick_wide(row_codes, starts, matrix, COUNT, ALIGNED_K),
        pick_wide(column_codes, starts, matrix, COUNT, ALIGNED_P if K_MAJOR else ALIGNED_K),
        m, k, M, K, pick(Ps, starts, matrix, COUNT), 0 * K, K, ROW, COLUMN, K_MAJOR, ALIGNED_P, ELEMENT,
    )  # fmt: skip
    if GIVEN:
        amax = tl.maximum(tl.max(tl.max(tl.abs(values), axis=1), axis=0), 0.0)
        if ROW:
            record_max(pick(row_amaxes, starts, matrix, COUNT), amax)
        if COLUMN:
            record_max(pick(column_amaxes, starts, matrix, COUNT), amax)
    if PER_ROW:
        scales = pick(column_scales if COLUMN else row_scales, starts, matrix, COUNT)
        if (first_m if COLUMN else first_k) == 0:
            tl.store(scales + line, scale_inv, mask=inside)
    elif place == 0:
        if ROW:
            tl.store(pick(row_scales, starts, matrix, COUNT), scale_inv)
        if COLUMN:
            tl.store(pick(column_scales, starts, matrix, COUNT), scale_inv)


AMAX = Kernel(amax_kernel)
CAST = Kernel(cast_tensor_kernel)


def amax(xs: Sequence[Tensor], amaxes: Sequence[Tensor], choice: Tile | None = None) -> None:
    """Raises each of ``amaxes`` (fp32 [1]) to that of its tensor (contiguous, [M, K], all of one dtype)."""
    choice = choice or tile("amax", xs[0].device)
    block = choice.rows * choice.cols
    programs = Programs.of([triton.cdiv(x.numel(), block) for x in xs])
    tensors, integers = (programs.pad(xs), programs.pad(amaxes)), (programs.starts, *programs.sizes(xs))
    AMAX(programs.total, tensors, integers, (programs.variant, block, True), choice.warps)


def cast(jobs: Sequence[CastJob], noop: Tensor | None, choice: Tile | None = None) -> None:
    """Casts a group of jobs; measured amaxes are raised, so they must be 0 before."""
    fmt = jobs[0].targets[0].format
    if fmt.amax_per_row:
        for job in jobs:
            if not job.x.numel():
                scale_inv = job.targets[0].scale_inv  # which no program would write
                scale_inv.copy_(fmt.scaling.scale(_level(job), fmt, input_max(job.x))[1].view_as(scale_inv))
        jobs = [job for job in jobs if job.x.numel()]
        if not jobs:
            return
    first = jobs[0]
    choice = choice or tile("cast_tensor", first.x.device)
    # A tensor of no elements still has a scale: one program, which finds nothing to cast.
    xs = [job.x for job in jobs]
    programs = Programs.of([max(1, choice.count(x.shape)) for x in xs])
    outputs = programs.outputs(jobs, *map(attrgetter, ("codes", "scale_inv", "amax")))
    levels = programs.pad([_level(job) for job in jobs])
    m, k = programs.sizes(xs)
    CAST(
        programs.total,
        (programs.pad(xs), levels, *outputs, levels[0] if noop is None else noop),
        (programs.starts, m, k, m),
        constants(first, programs.variant, noop is not None, Aligned.of(m, k), choice),
        choice.warps,
    )


def constants(job: CastJob, variant: int, can_skip: bool, sizes: Aligned, choice: Tile) -> tuple[Any, ...]:
    """Returns those of ``cast_tensor_kernel`` for jobs like this one."""
    fmt, column = job.targets[0].format, job.column
    return (
        variant, job.row is not None, column is not None, column is not None and column.k_major,
        fmt.scale_rule == "given", fmt.amax_per_row, fmt.encoding, fmt.max, fmt.scaling, fmt.amax_epsilon, can_skip,
        *sizes, choice.rows, choice.cols,
    )  # fmt: skip


def _level(job: CastJob) -> Tensor:
    level = job.targets[0].level
    assert level is not None
    return level if level.dtype == torch.float32 else level.float()
