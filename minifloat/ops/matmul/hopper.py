"""bf16 products on sm_90 whose factors and bias are applied before the sums leave registers, in Gluon.

cuBLASLt is a little faster, but PyTorch gives it no factor that is on the device: the emulated product would write fp32
sums and read them again. Here two warpgroups have half the rows of a tile each, and one more warp copies operands to
shared memory (TMA), also while a tile is stored. Programs stay on their multiprocessor. Tiles and the order of sums are
fixed: a row of the result does not depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minifloat.ops import allocate, launch
from minifloat.ops.grouped.hopper import multiprocessors
from minifloat.ops.grouped.hopper_device import following, swept
from minifloat.ops.launch import ready
from minifloat.ops.matmul import emulated, kernels
from minifloat.ops.matmul.kernels import factors_of
from minifloat.ops.matmul.reference import Scales, contracted_length
from minifloat.ops.quantize.job import aligned

ROWS, COLS = 128, 256
"""Size of a tile of the result."""
DEPTH = 64
"""Elements of the contracted dim in one step."""
STAGES = 4
"""Steps that shared memory holds: 48 KiB each."""
SWEEP = 8
"""Rows of tiles that consecutive programs work on."""
SMALLEST = 2**34
"""Multiplications from which the kernel is used: its launch costs the host more than a small product takes."""

_ROWS, _HALF, _COLS, _DEPTH = (gl.constexpr(size) for size in (ROWS, ROWS // 2, COLS, DEPTH))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16]))
_STORED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
# Triton 3.7 to 3.9 named it anew.
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def copy_tiles(
    a, b, a_tiles, b_tiles, full, empty, M, N, K,
    A_K: gl.constexpr, B_K: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills the stages in order, each when both warpgroups have read it. Beyond a matrix TMA copies zeros."""
    stage = 0
    phase = 0
    tiles_m, tiles_n, steps = gl.cdiv(M, _ROWS), gl.cdiv(N, _COLS), gl.cdiv(K, _DEPTH)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = swept(tile, tiles_m, tiles_n, SWEEP)
        m, n = row * _ROWS, column * _COLS
        for step in range(steps):
            k = step * _DEPTH
            mbarrier.wait(empty.index(stage), phase ^ 1)
            barrier = full.index(stage)
            mbarrier.expect(barrier, 2 * (_ROWS + _COLS) * _DEPTH)
            for half in gl.static_range(2):
                if A_K:
                    _copy(a, [m + half * _HALF, k], barrier, a_tiles.index(2 * stage + half))
                else:
                    _copy(a, [k, m + half * _HALF], barrier, a_tiles.index(2 * stage + half))
            if B_K:
                _copy(b, [n, k], barrier, b_tiles.index(stage))
            else:
                _copy(b, [k, n], barrier, b_tiles.index(stage))
            stage, phase = following(stage, phase, STAGES)


@gluon.jit
def operands(a_tiles, b_tiles, stage, PART: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr):
    """[HALF, DEPTH] and [DEPTH, COLS]: views of what a stage holds, which has the contracted dim last or first."""
    x = a_tiles.index(2 * stage + PART)
    y = b_tiles.index(stage)
    if not A_K:
        x = x.permute((1, 0))
    if B_K:
        y = y.permute((1, 0))
    return x, y


@gluon.jit
def store_half(
    total, a_factor, b_factor, bias, out, first_m, first_n, M, N, inverse,
    A_STEP: gl.constexpr, B_STEP: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Writes sums times their factors plus a bias, 16 bytes at a time: the arithmetic of ``kernels.finish_kernel``."""
    m = first_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _SUMS))
    n = first_n + gl.arange(0, _COLS, layout=gl.SliceLayout(0, _SUMS))
    rows = gl.load(a_factor + m * A_STEP, mask=m < M, other=0.0)
    columns = gl.load(b_factor + n * B_STEP, mask=n < N, other=0.0)
    total = total * (rows[:, None] * columns[None, :] * inverse)
    if BIAS:
        added = gl.load(bias + n, mask=n < N, other=0.0)
        total += added.to(out.dtype.element_ty).to(gl.float32)[None, :]
    result = gl.convert_layout(total.to(out.dtype.element_ty), _STORED)
    m = first_m + gl.arange(0, _HALF, layout=gl.SliceLayout(1, _STORED))
    n = first_n + gl.arange(0, _COLS, layout=gl.SliceLayout(0, _STORED))
    gl.store(out + m[:, None].to(gl.int64) * N + n[None, :], result, mask=(m < M)[:, None] & (n < N)[None, :])


@gluon.jit
def multiply_half(
    PART: gl.constexpr, a_tiles, b_tiles, full, empty, a_factor, b_factor, bias, out, M, N, K, inverse,
    ALIGNED_N: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr,
    A_STEP: gl.constexpr, B_STEP: gl.constexpr, BIAS: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 rows of each tile, a product in flight while the next step is waited for.

    The first step stands before the loop and is waited for: else ptxas serializes the products.
    """
    stage = 0
    phase = 0
    tiles_m, tiles_n, steps = gl.cdiv(M, _ROWS), gl.cdiv(N, _COLS), gl.cdiv(K, _DEPTH)
    N = N // 16 * 16 if ALIGNED_N else N
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = swept(tile, tiles_m, tiles_n, SWEEP)
        mbarrier.wait(full.index(stage), phase)
        x, y = operands(a_tiles, b_tiles, stage, PART, A_K, B_K)
        nothing = gl.zeros([_HALF, _COLS], gl.float32, _SUMS)
        total = hopper.warpgroup_mma(x, y, nothing, use_acc=False, is_async=True)
        total = hopper.warpgroup_mma_wait(1, deps=(total,))
        for _ in range(1, steps):
            previous = stage
            stage, phase = following(stage, phase, STAGES)
            mbarrier.wait(full.index(stage), phase)
            x, y = operands(a_tiles, b_tiles, stage, PART, A_K, B_K)
            total = hopper.warpgroup_mma(x, y, total, is_async=True)
            total = hopper.warpgroup_mma_wait(1, deps=(total,))
            mbarrier.arrive(empty.index(previous), count=1)
        total = hopper.warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = following(stage, phase, STAGES)
        store_half(
            total, a_factor, b_factor, bias, out, row * _ROWS + PART * _HALF, column * _COLS, M, N,
            inverse, A_STEP, B_STEP, BIAS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=("M", "N", "K", "inverse"))
def scaled_product_kernel(
    a, b, a_factor, b_factor, bias, out, M, N, K, inverse,
    ALIGNED_N: gl.constexpr, A_K: gl.constexpr, B_K: gl.constexpr,
    A_STEP: gl.constexpr, B_STEP: gl.constexpr, BIAS: gl.constexpr, SWEEP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """[M, N]: ``a`` times ``b``, described with the contracted dim K last (*_K) or first, scaled, plus a bias.

    STEP: 1 where each row or column has its own factor, 0 where one serves all.
    """
    a_tiles = gl.allocate_shared_memory(
        a.dtype, [2 * STAGES, _HALF, _DEPTH] if A_K else [2 * STAGES, _DEPTH, _HALF], _OPERAND
    )
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES, _COLS, _DEPTH] if B_K else [STAGES, _DEPTH, _COLS], _OPERAND)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_half, (
                0, a_tiles, b_tiles, full, empty, a_factor, b_factor, bias, out, M, N, K, inverse,
                ALIGNED_N, A_K, B_K, A_STEP, B_STEP, BIAS, SWEEP, STAGES,
            )),
            (multiply_half, (
                1, a_tiles, b_tiles, full, empty, a_factor, b_factor, bias, out, M, N, K, inverse,
                ALIGNED_N, A_K, B_K, A_STEP, B_STEP, BIAS, SWEEP, STAGES,
            )),
            (copy_tiles, (a, b, a_tiles, b_tiles, full, empty, M, N, K, A_K, B_K, SWEEP, STAGES)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[232, 40],
    )  # fmt: skip


def large_product(a: Any, b: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """The emulated product of two operands, each the arguments of ``kernels.spread``; None where it is not for this."""
    depths = [contracted_length(x.codes, x.format, x.dim, x.along) for x in (a, b)]
    if a.outer * b.outer * depths[0] < SMALLEST or not multiprocessors(a.codes.device):
        return None
    if any(size % 8 for size in (a.outer, b.outer, *depths)):  # TMA wants lines of whole 16 bytes
        return None
    return multiply(*emulated.prepare(kernels, a, b, False), bias, out_dtype)


def _described(x: Tensor, outer: int) -> tuple[TensorDescriptor, bool]:
    """``x`` [outer, contracted] as TMA reads ``outer`` rows of it, and whether the contracted dim is consecutive."""
    along = x.stride(1) == 1
    x, box = (x, [outer, DEPTH]) if along else (x.t(), [DEPTH, outer])
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], box, _OPERAND.value), along


def multiply(operands: Sequence[Tensor], scales: Scales, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """[m, n] in ``out_dtype``: [m, k] times [n, k] transposed, times ``scales``, plus ``bias`` [n], rounded once.

    The arguments are those of ``kernels.finish``, but for the bf16 operands in lieu of their product.
    """
    a, b = operands
    (M, depth), N = a.shape, b.shape[0]
    (left, a_k), (right, b_k) = _described(a, ROWS // 2), _described(b, COLS)
    out = allocate((M, N), out_dtype, a.device)
    factors, steps = factors_of(scales, out.new_ones(1, dtype=torch.float32))
    programs = min(triton.cdiv(M, ROWS) * triton.cdiv(N, COLS), multiprocessors(out.device))
    launch.by_jit(
        scaled_product_kernel, programs, out.device,
        left, right, *factors, out if bias is None else ready(bias), out,
        M, N, min(depth, b.shape[1]), 1.0 / scales.divisor,
        aligned([N]), a_k, b_k, *[max(step, 0) for step in steps], bias is not None, SWEEP, STAGES,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
