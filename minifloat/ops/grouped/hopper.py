"""Products of groups of FP8 on sm_90 whose sums leave the tensor cores every 128 elements, in Gluon.

The same tiles, sums and results to the bit as ``gemm.py``, faster: Triton's ``tl.dot`` waits for a product before it
adds it, and the tensor cores wait with it. Here each of two warpgroups owns 64 of a tile's 128 rows and adds its
products while the other's run, and by squares of 128 while its own next one runs; one more warp copies tiles to shared
memory (TMA). Programs stay on their multiprocessor and take tiles in turn, so that copies for the next tile begin while
the last one is stored.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minifloat.formats import COLUMNWISE
from minifloat.ops import launch
from minifloat.ops.grouped.gemm import Side
from minifloat.ops.grouped.hopper_device import _BK, _BN, _CODES, _FACTORS, _HALF, copy_tiles, multiply_half
from minifloat.ops.quantize.decode import at_16_bytes
from minifloat.ops.quantize.job import aligned

TILE = 128
"""Rows and columns of a tile of the result, and elements of the contracted dim in one step."""

STAGES = 6
"""Steps that shared memory holds: 32 KiB each."""

SERIES = 8
"""Products that follow each other without a gap."""

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
    STRIPS: gl.constexpr, SERIES: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``grouped_mm_kernel`` of ``gemm.py``.

    ``a_grid`` and ``b_grid`` describe the scales of STRIPS; else they are not used.
    ``a`` and ``b`` describe matrices whose contracted dim is consecutive. B_ROWS: the right one's groups follow each
    other along it.
    """
    a_tiles = gl.allocate_shared_memory(a.dtype, [2 * STAGES, _HALF, _BK], _CODES)
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, _BN, _BK], _CODES)
    a_strips = gl.allocate_shared_memory(gl.float32, [STAGES if STRIPS else 1, 2 * _HALF], _FACTORS)
    b_strips = gl.allocate_shared_memory(gl.float32, [STAGES if STRIPS else 1, _BN], _FACTORS)
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
                A_STEP, B_STEP, BIAS, CLEAR, STRIPS, SERIES, SWEEP, STAGES,
            )),
            (multiply_half, (
                1, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_scale, b_scale, bias, out, a_offsets, b_offsets,
                M, N, depth, groups,
                a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
                ALIGNED_N, A_UNIT, B_UNIT, B_ROWS, DEPTH, SCALED, A_SQUARE, B_SQUARE,
                A_STEP, B_STEP, BIAS, CLEAR, STRIPS, SERIES, SWEEP, STAGES,
            )),
            (copy_tiles, (
                a, b, a_grid, b_grid, a_tiles, b_tiles, a_strips, b_strips, full, empty, a_offsets, b_offsets,
                M, N, depth, groups, a_scale_segment, b_scale_segment,
                A_UNIT, B_UNIT, B_ROWS, DEPTH, STRIPS, SWEEP, STAGES,
            )),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )  # fmt: skip


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of an sm_90 GPU; 0 elsewhere, and with versions of Triton not tried with Gluon."""
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

    Runs whose copies began at no multiple of 16 bytes ended with a CUDA error (rows of 37 columns; groups at any row).
    """
    scale = side.scale
    return not side.tile and side.strides[1] == 1 and scale.is_contiguous() and scale.shape[-1] % TILE == 0


def _grid(side: Side) -> TensorDescriptor:
    """Such scales, of which TMA copies those of a tile."""
    return TensorDescriptor(side.scale, [side.scale.numel()], [1], [TILE], _FACTORS.value)


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
    strips = scaled and depth == 0 and _strips(a) and _strips(b)
    grids = (_grid(a), _grid(b)) if strips else (a.scale, b.scale)
    along_rows = b.along == COLUMNWISE
    clear = along_rows and (depth == 0 or depth % TILE > 0)
    launch.by_jit(
        grouped_hopper_kernel, programs, out.device,
        _described(a, TILE // 2), _described(b, TILE), *grids, a.scale, b.scale,
        out if bias is None else launch.ready(bias), out, at_16_bytes(a.offsets), at_16_bytes(b.offsets),
        rows, N, depth, groups, *a.strides, *b.strides,
        aligned([N]), a.unit, b.unit, along_rows, depth == 0, scaled, a.tile, b.tile, a.step, b.step,
        bias is not None, clear, strips, SERIES, sweep, STAGES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
