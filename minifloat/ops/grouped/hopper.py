"""Products of groups of FP8 on sm_90 whose sums leave the tensor cores every 128 elements, in Gluon.

The same tiles, sums and results to the bit as ``gemm.py``, faster: Triton's ``tl.dot`` waits for a product before it
adds it, and the tensor cores wait with it. Here each of two warpgroups owns 64 of a tile's 128 rows and adds its
products while the other's run; one more warp copies tiles to shared memory (TMA). Programs stay on their
multiprocessor and take tiles in turn, so that copies for the next tile begin while the last one is stored.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minifloat.formats import COLUMNWISE
from minifloat.ops import launch
from minifloat.ops.grouped.side import Side
from minifloat.ops.quantize.decode import at_16_bytes
from minifloat.ops.quantize.job import aligned

TILE = 128
"""Rows and columns of a tile of the result, and elements of the contracted dim in one step."""

STAGES = 6
"""Steps that shared memory holds: 32 KiB each."""

# Triton 3.7 to 3.9 named them anew.
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

_BM, _BN, _BK, _HALF = gl.constexpr(128), gl.constexpr(128), gl.constexpr(128), gl.constexpr(64)
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_FACTORS = gl.constexpr(gl.NVMMASharedLayout(0, 32, rank=1))
_CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8))


@gluon.jit
def swept(program, tiles_m, tiles_n, SWEEP: gl.constexpr):
    """``gemm.swept``."""
    band = program // (SWEEP * tiles_n)
    height = gl.minimum(tiles_m - band * SWEEP, SWEEP)
    within = program % (SWEEP * tiles_n)
    return band * SWEEP + within % height, within // height


@gluon.jit
def begin(offset, group, UNIT: gl.constexpr):
    """``device.begin``."""
    return offset if UNIT == 0 else (offset // UNIT + group) * UNIT


@gluon.jit
def grid_row(offset, group, UNIT: gl.constexpr, SQUARE: gl.constexpr):
    """``device.grid_row``."""
    if SQUARE:
        return offset // _BK + group
    return begin(offset, group, UNIT) // _BK if UNIT > 0 else offset


@gluon.jit
def group_of(offsets, tile, groups):
    """``device.group_of``, by bisection: the last group that begins at or before ``tile``."""
    low = tile * 0
    high = groups
    while low < high:
        middle = (low + high + 1) // 2
        begun = gl.load(offsets + middle).to(gl.int32) // _BM + middle <= tile
        low = gl.where(begun, middle, low)
        high = gl.where(begun, high, middle - 1)
    return low


@gluon.jit
def place_of(tile, a_offsets, groups, M, N, depth, DEPTH: gl.constexpr, SWEEP: gl.constexpr):
    """Of a tile of the result: its group, its first row and column in the group, rows of the group, what is contracted.

    Rows are those of the group's own matrix. No rows where the tile has nothing to do.
    """
    tiles_n = gl.cdiv(N, _BN)
    if DEPTH:
        tiles_m = gl.cdiv(M, _BM)
        group = tile // (tiles_m * tiles_n)
        row, column = swept(tile % (tiles_m * tiles_n), tiles_m, tiles_n, SWEEP)
        contracted = (gl.load(a_offsets + group + 1) - gl.load(a_offsets + group)).to(gl.int32)
        return group, row * _BM, column * _BN, M, contracted
    row, column = swept(tile, M // _BM + groups + 1, tiles_n, SWEEP)
    group = group_of(a_offsets, row, groups)
    first = gl.load(a_offsets + group).to(gl.int32)
    end = gl.load(a_offsets + gl.minimum(group + 1, groups)).to(gl.int32)
    rows = gl.where(group < groups, end, M) - first
    # The tail's rows are nobody's: nothing is contracted.
    return group, (row - first // _BM - group) * _BM, column * _BN, rows, gl.where(group < groups, depth, 0)


@gluon.jit
def tiles_of(groups, M, N, DEPTH: gl.constexpr):
    """How many tiles there are, those with nothing to do included."""
    tiles_n = gl.cdiv(N, _BN)
    return groups * gl.cdiv(M, _BM) * tiles_n if DEPTH else (M // _BM + groups + 1) * tiles_n


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the parity of its barriers' phase: no division between two products."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def copy_tiles(
    a, b, a_scale, b_scale, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_offsets, b_offsets,
    M, N, depth, groups, a_scale_row, b_scale_row,
    A_UNIT: gl.constexpr, B_UNIT: gl.constexpr, B_ROWS: gl.constexpr, DEPTH: gl.constexpr, STRIPS: gl.constexpr,
    SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills the stages in order, each when both warpgroups have read what it held."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), tiles_of(groups, M, N, DEPTH), gl.num_programs(0)):
        group, m, n, rows, contracted = place_of(tile, a_offsets, groups, M, N, depth, DEPTH, SWEEP)
        a_first = gl.load(a_offsets + group).to(gl.int32)
        b_first = gl.load(b_offsets + gl.maximum(gl.minimum(group, groups - 1), 0)).to(gl.int32)
        if DEPTH:
            a_row, a_column = m, begin(a_first, group, A_UNIT)
        else:
            a_row, a_column = begin(a_first, group, A_UNIT) + m, 0
        if B_ROWS:
            b_row, b_column = n, begin(b_first, group, B_UNIT)
        else:
            b_row, b_column = begin(b_first, group, B_UNIT) + n, 0
        steps = gl.where(m < rows, gl.cdiv(contracted, _BK), 0)
        for k in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (_BM + _BN) * _BK + (4 * (_BM + _BN) if STRIPS else 0))
            barrier = full.index(stage)
            if STRIPS:
                a_at = (a_column // _BK + k) * a_scale_row + m
                _copy(a_scale, [a_at], barrier, a_strips.index(2 * stage))
                _copy(a_scale, [a_at + _HALF], barrier, a_strips.index(2 * stage + 1))
                _copy(b_scale, [(b_column // _BK + k) * b_scale_row + n], barrier, b_strips.index(stage))
            _copy(a, [a_row, a_column + k * _BK], barrier, a_tiles.index(2 * stage))
            _copy(a, [a_row + _HALF, a_column + k * _BK], barrier, a_tiles.index(2 * stage + 1))
            _copy(b, [b_row, b_column + k * _BK], barrier, b_tiles.index(stage))
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def clear_columns(codes, rest, ROWS: gl.constexpr):
    """Zeros in the columns of a tile in shared memory from ``rest`` on, four codes at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    if _RENAMED:
        words = codes.reinterpret(gl.int32, [ROWS, _BK // 4], gl.NVMMASharedLayout(128, 32))
    else:
        words = codes._reinterpret(gl.int32, [ROWS, _BK // 4], gl.NVMMASharedLayout(128, 32))
    kept = rest - 4 * gl.arange(0, _BK // 4, layout=gl.SliceLayout(0, LAYOUT))
    part = (1 << (8 * gl.minimum(gl.maximum(kept, 0), 3))) - 1
    mask = gl.where(kept >= 4, -1, part)
    words.store(words.load(LAYOUT) & mask[None, :])


@gluon.jit
def clear_after(x, y, rest, DEPTH: gl.constexpr):
    """Zeros after a group's last ``rest`` codes, which the next group's follow, or nobody's, NaN among them.

    Both warpgroups clear all of ``y``, so that neither waits for the other.
    """
    clear_columns(y, rest, _BN)
    if DEPTH:
        clear_columns(x, rest, _HALF)
    hopper.fence_async_shared()
    _barrier()


@gluon.jit
def factors_of(a_scale, b_scale, group, a_row, m, n, rows, N, known, A_STEP: gl.constexpr, B_STEP: gl.constexpr):
    """What rows and columns of a result are multiplied by; one factor where all have the same.

    Loaded before the sums: after them it would be waited for. Those of a group without rows may be undefined.
    """
    if A_STEP == 1:
        a_factor = gl.load(a_scale + a_row + m, mask=(m < rows) & known, other=0.0)
    else:
        a_factor = gl.load(a_scale + group, mask=known, other=0.0)
    if B_STEP == 1:
        b_factor = gl.load(b_scale + group * N + n, mask=(n < N) & known, other=0.0)
    else:
        b_factor = gl.load(b_scale + group, mask=known, other=0.0)
    return a_factor, b_factor


@gluon.jit
def scaled_sums(total, a_factor, b_factor, A_STEP: gl.constexpr, B_STEP: gl.constexpr):
    """The sums times their factors, which are multiplied first."""
    if A_STEP == 1 and B_STEP == 1:
        factor = a_factor[:, None] * b_factor[None, :]
    elif A_STEP == 1:
        factor = (a_factor * b_factor)[:, None]
    elif B_STEP == 1:
        factor = (a_factor * b_factor)[None, :]
    else:
        factor = a_factor * b_factor
    return total * factor


@gluon.jit
def store_half(out, total, start, first_m, first_n, rows, N):
    """Writes a warpgroup's sums from row ``start + first_m`` on, 16 bytes at a time."""
    result = gl.convert_layout(total.to(out.dtype.element_ty), _STORED)
    m = first_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _STORED))
    n = first_n + gl.arange(0, _BN, layout=gl.SliceLayout(0, _STORED))
    at = out + start * N + m[:, None].to(gl.int64) * N + n[None, :]
    gl.store(at, result, mask=(m < rows)[:, None] & (n < N)[None, :])


@gluon.jit
def multiply_half(
    PART: gl.constexpr, a_tiles, b_tiles, a_strips, b_strips, full, empty,
    a_scale, b_scale, bias, out, a_offsets, b_offsets,
    M, N, depth, groups, a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
    ALIGNED_N: gl.constexpr, A_UNIT: gl.constexpr, B_UNIT: gl.constexpr, B_ROWS: gl.constexpr, DEPTH: gl.constexpr,
    SCALED: gl.constexpr, A_SQUARE: gl.constexpr, B_SQUARE: gl.constexpr,
    A_STEP: gl.constexpr, B_STEP: gl.constexpr, BIAS: gl.constexpr, CLEAR: gl.constexpr,
    STRIPS: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each tile."""
    stage = 0
    phase = 0
    of_rows: gl.constexpr = gl.SliceLayout(1, _SUMS)
    of_columns: gl.constexpr = gl.SliceLayout(0, _SUMS)
    for tile in range(gl.program_id(0), tiles_of(groups, M, N, DEPTH), gl.num_programs(0)):
        group, first_m, first_n, rows, contracted = place_of(tile, a_offsets, groups, M, N, depth, DEPTH, SWEEP)
        N = N // 16 * 16 if ALIGNED_N else N
        if first_m < rows:
            own = gl.maximum(gl.minimum(group, groups - 1), 0)  # the tail reads no factor
            a_first = gl.load(a_offsets + group).to(gl.int32)
            b_first = gl.load(b_offsets + own).to(gl.int32)
            m = first_m + PART * _HALF + gl.arange(0, _HALF, layout=of_rows)
            n = first_n + gl.arange(0, _BN, layout=of_columns)
            near_m, near_n = gl.minimum(m, rows - 1), gl.minimum(n, N - 1)
            steps = gl.cdiv(contracted, _BK)
            if SCALED and not STRIPS:
                a_grid = grid_row(a_first, group, A_UNIT, A_SQUARE).to(gl.int64) * a_scale_row
                b_grid = grid_row(b_first, group, B_UNIT, B_SQUARE).to(gl.int64) * b_scale_row
                a_at = a_scale + a_grid + (near_m // _BK if A_SQUARE else near_m).to(gl.int64) * a_scale_outer
                # A tile of the result has the columns of one square of scales.
                b_at = b_scale + b_grid + (first_n // _BK if B_SQUARE else near_n).to(gl.int64) * b_scale_outer
                if B_SQUARE:
                    a_next = gl.load(a_at, mask=(near_m >= 0) & (steps > 0), other=0.0)
                    b_next = gl.load(b_at, mask=steps > 0, other=0.0)
            elif not SCALED:
                known = (contracted > 0) & (group < groups)
                a_row = group * M if DEPTH else a_first
                a_factor, b_factor = factors_of(a_scale, b_scale, group, a_row, m, n, rows, N, known, A_STEP, B_STEP)
            total = gl.zeros([_HALF, _BN], gl.float32, _SUMS)
            for k in range(steps):
                if SCALED and B_SQUARE:  # a step ahead
                    scale = a_next * b_next
                    a_next = gl.load(a_at + (k + 1) * a_scale_segment, mask=(near_m >= 0) & (k + 1 < steps), other=0.0)
                    b_next = gl.load(b_at + (k + 1) * b_scale_segment, mask=k + 1 < steps, other=0.0)
                elif SCALED and not STRIPS:
                    a_factors = gl.load(a_at + k * a_scale_segment)
                    b_factors = gl.load(b_at + k * b_scale_segment)
                mbarrier.wait(full.index(stage), phase)
                x = a_tiles.index(2 * stage + PART)
                y = b_tiles.index(stage)
                if CLEAR and contracted - k * _BK < _BK:
                    clear_after(x, y, contracted - k * _BK, DEPTH)
                product = hopper.warpgroup_mma(
                    x, y.permute((1, 0)), gl.zeros([_HALF, _BN], gl.float32, _SUMS), use_acc=False, is_async=True
                )
                if STRIPS:
                    a_factors = a_strips.index(2 * stage + PART).load(of_rows)
                    b_factors = b_strips.index(stage).load(of_columns)
                product = hopper.warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = following(stage, phase, STAGES)
                if SCALED and B_SQUARE:
                    total = gl.fma(product, scale[:, None], total)
                elif SCALED:
                    total = gl.fma(product, a_factors[:, None] * b_factors[None, :], total)
                else:
                    total += product
            if not SCALED and group < groups:
                total = scaled_sums(total, a_factor, b_factor, A_STEP, B_STEP)
            if BIAS and group < groups:
                added = gl.load(bias + own * N + n, mask=n < N, other=0.0)
                total += added.to(out.dtype.element_ty).to(gl.float32)[None, :]
            start = group.to(gl.int64) * M + first_m if DEPTH else (a_first + first_m).to(gl.int64)
            store_half(out, total, start, PART * _HALF, first_n, rows - first_m, N)


_INTEGERS = (
    "M", "N", "depth", "groups", "a_scale_row", "a_scale_outer", "a_scale_segment", "b_scale_row", "b_scale_outer",
    "b_scale_segment",
)  # fmt: skip


@gluon.jit(do_not_specialize=_INTEGERS)
def grouped_hopper_kernel(
    a, b, a_grid, b_grid, a_scale, b_scale, bias, out, a_offsets, b_offsets, M, N, depth, groups,
    a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
    ALIGNED_N: gl.constexpr, A_UNIT: gl.constexpr, B_UNIT: gl.constexpr, B_ROWS: gl.constexpr, DEPTH: gl.constexpr,
    SCALED: gl.constexpr, A_SQUARE: gl.constexpr, B_SQUARE: gl.constexpr,
    A_STEP: gl.constexpr, B_STEP: gl.constexpr, BIAS: gl.constexpr, CLEAR: gl.constexpr,
    STRIPS: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``grouped_rows_kernel``, or with DEPTH ``grouped_depth_kernel``, of ``gemm.py``.

    ``a_grid`` and ``b_grid`` describe the scales of STRIPS; else they are not used.
    ``a`` and ``b`` describe matrices whose contracted dim is consecutive. B_ROWS: the right one's groups follow each
    other along it.
    """
    a_tiles = gl.allocate_shared_memory(a.dtype, [2 * STAGES, _HALF, _BK], _CODES)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, _BN, _BK], _CODES)
    KEPT: gl.constexpr = STAGES if STRIPS else 1
    a_strips = gl.allocate_shared_memory(gl.float32, [2 * KEPT, _HALF], _FACTORS)
    b_strips = gl.allocate_shared_memory(gl.float32, [KEPT, _BN], _FACTORS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_half, (
                0, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_scale, b_scale, bias, out, a_offsets, b_offsets,
                M, N, depth, groups,
                a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
                ALIGNED_N, A_UNIT, B_UNIT, B_ROWS, DEPTH, SCALED, A_SQUARE, B_SQUARE,
                A_STEP, B_STEP, BIAS, CLEAR, STRIPS, SWEEP, STAGES,
            )),
            (multiply_half, (
                1, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_scale, b_scale, bias, out, a_offsets, b_offsets,
                M, N, depth, groups,
                a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
                ALIGNED_N, A_UNIT, B_UNIT, B_ROWS, DEPTH, SCALED, A_SQUARE, B_SQUARE,
                A_STEP, B_STEP, BIAS, CLEAR, STRIPS, SWEEP, STAGES,
            )),
            (copy_tiles, (
                a, b, a_grid, b_grid, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_offsets, b_offsets,
                M, N, depth, groups, a_scale_row, b_scale_row,
                A_UNIT, B_UNIT, B_ROWS, DEPTH, STRIPS, SWEEP, STAGES,
            )),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )  # fmt: skip


@cache
def multiprocessors(device: torch.device) -> int:
    """Of an sm_90 GPU; 0 elsewhere, and with versions of Triton that Gluon was not tried with."""
    if device.type != "cuda" or not launch.KNOWN or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def takes(a: Side, b: Side) -> bool:
    """The kernel multiplies these: FP8 of which the contracted dim is consecutive and TMA can find every line."""
    return (
        multiprocessors(a.matrix.device) > 0
        and a.consecutive and b.consecutive
        and a.matrix.numel() > 0 and b.matrix.numel() > 0
        and aligned([a.stride, b.stride])
    )  # fmt: skip


def _described(side: Side, rows: int) -> TensorDescriptor:
    """A matrix with its contracted dim last, of which TMA copies ``rows`` times TILE codes."""
    matrix = side.matrix if side.matrix.stride(1) == 1 else side.matrix.t()
    return TensorDescriptor(matrix, list(matrix.shape), [side.stride, 1], [rows, TILE], _CODES.value)


def _strips(side: Side) -> bool:
    """TMA copies the scales: those of 128 neighbouring columns follow each other, and no copy leaves its row.

    Rows of other lengths ended with an illegal access in the only run they have had (37 columns), cause unknown.
    """
    scale = side.scale
    return not side.tile and side.strides[1] == 1 and scale.is_contiguous() and scale.shape[-1] % TILE == 0


def _grid(side: Side, columns: int) -> TensorDescriptor:
    """Such scales, of which TMA copies so many."""
    return TensorDescriptor(side.scale, [side.scale.numel()], [1], [columns], _FACTORS.value)


def multiply(
    a: Side, b: Side, rows: int, bias: Tensor | None, out: Tensor, depth: int, scaled: bool, sweep: int
) -> None:
    """Writes ``out``: [rows, N] of rows in groups, or with ``depth`` 0 [G rows, N], the groups' rows contracted.

    Args:
        depth: how much of the right operand each group contracts.
        scaled: partial sums of 128 are multiplied by scales, not the result.
    """
    groups, N = a.offsets.numel() - 1, out.shape[1]
    tiles = groups * triton.cdiv(rows, TILE) if depth == 0 else rows // TILE + groups + 1
    programs = min(tiles * triton.cdiv(N, TILE), multiprocessors(out.device))
    if programs == 0:
        return
    launch.count(grouped_hopper_kernel.__name__)
    along_rows = b.along == COLUMNWISE
    strips = scaled and depth == 0 and _strips(a) and _strips(b)
    grids = (_grid(a, TILE // 2), _grid(b, TILE)) if strips else (a.scale, b.scale)
    clear = along_rows and (depth == 0 or depth % TILE > 0)
    with torch.cuda.device(out.device):
        grouped_hopper_kernel[(programs,)](
            _described(a, TILE // 2), _described(b, TILE), *grids, a.scale, b.scale,
            out if bias is None else launch.ready(bias), out, at_16_bytes(a.offsets), at_16_bytes(b.offsets),
            rows, N, depth, groups, *a.strides, *b.strides,
            aligned([N]), a.unit, b.unit, along_rows, depth == 0, scaled, a.tile, b.tile, a.step, b.step,
            bias is not None, clear, strips, sweep, STAGES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
