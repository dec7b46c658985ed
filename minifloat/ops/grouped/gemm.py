"""The products and sums of groups in Triton: one launch for all groups, each program a tile of one group's result.

Programs find their group on the device: the grid depends on the sizes of the matrices alone. A result does not depend
on the other groups: tiles and the order of sums are those of a group alone. Sums are fp32, added in order of the
contracted dim; FP8 tensor cores keep fewer bits inside of 128 elements, and of all of them under ``fast_accum``.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops.grouped import layout
from minifloat.ops.launch import Kernel
from minifloat.ops.quantize.device import extent

BLOCK = tl.constexpr(128)
"""Elements of the contracted dim under one scale, of formats whose scales are applied to partial sums."""


def unit_of(fmt: Format, dim: int) -> int:
    """Unit of :func:`begin`."""
    return layout.unit(fmt) if fmt.quantized and dim == COLUMNWISE else 0


class Cast(NamedTuple):
    """An operand as ``grouped_mm`` is given it, and the dim that is contracted."""

    codes: Tensor
    scale_inv: Tensor | None
    amax: Tensor | None
    format: Format
    dim: int
    offsets: Tensor
    along: int

    @property
    def groups(self) -> int:
        return self.offsets.numel() - 1

    @property
    def unit(self) -> int:
        """Unit of :func:`begin`."""
        return unit_of(self.format, self.dim)


class Side(NamedTuple):
    """An operand as a kernel reads it.

    Args:
        matrix: of FP8, bf16, fp16 or fp32, one dim consecutive in memory.
        offsets, along, unit: of :class:`Cast`.
        scale: factors, or the grid of blocks.
        strides: of the grid: from one row to the next, outer block to the next and segment to the next.
        step: a factor for each row that is not contracted (1), or one for a group (0).
        divisor: of the factors.
        tile: blocks are squares.
    """

    matrix: Tensor
    offsets: Tensor
    along: int
    unit: int
    scale: Tensor
    strides: tuple[int, int, int] = (0, 0, 0)
    step: int = 0
    divisor: float = 1.0
    tile: bool = False

    @property
    def consecutive(self) -> bool:
        """The contracted dim is consecutive in memory."""
        return (self.matrix.stride(1) == 1) == (self.along == ROWWISE)

    @property
    def stride(self) -> int:
        """Elements between neighbours in the other dim."""
        return self.matrix.stride(0 if self.matrix.stride(1) == 1 else 1)


# ---- the group of a tile, and where a group begins (``layout.py``) ----


@triton.jit
def group_of(offsets, tile, groups, BLOCK: tl.constexpr, SEARCH: tl.constexpr):
    """The group of a tile of BLOCK rows, where group g's begin at tile offsets[g] / BLOCK + g; ``groups`` for the tail.

    SEARCH: a power of two above ``groups``. A group may have one tile more than its rows need.
    """
    group = tl.arange(0, SEARCH)
    first = tl.load(offsets + group, mask=group <= groups, other=0)
    begun = (group <= groups) & (first // BLOCK + group <= tile)
    return tl.sum(begun.to(tl.int32), axis=0) - 1


@triton.jit
def rows_of(offsets, group, groups, M):
    """First row and end of a group; of number ``groups``, the tail, up to M."""
    first = tl.load(offsets + group)
    end = tl.load(offsets + tl.minimum(group + 1, groups))
    return first, tl.where(group < groups, end, M)


@triton.jit
def begin(offset, group, UNIT: tl.constexpr):
    """``layout.start``; UNIT 0 where groups follow each other without a gap."""
    return offset if UNIT == 0 else (offset // UNIT + group) * UNIT


@triton.jit
def grid_row(offset, group, UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The row of the grid of scales at which a group begins: of squares, of blocks of rows, or of rows."""
    if TILE:
        return offset // BLOCK + group
    return begin(offset, group, UNIT) // BLOCK if UNIT > 0 else offset


# ---- products ----


@triton.jit
def swept(program, tiles_m, tiles_n, SWEEP: tl.constexpr):
    """Row and column of tile ``program``: SWEEP rows of tiles at a time, so that L2 holds what neighbours read."""
    band = program // (SWEEP * tiles_n)
    height = tl.minimum(tiles_m - band * SWEEP, SWEEP)
    within = program % (SWEEP * tiles_n)
    return band * SWEEP + within % height, within // height


@triton.jit
def load_a(at, near, m, M, REPEATS: tl.constexpr):
    """A [BLOCK_M, BLOCK_K] tile of the left operand; ``near``: which of its columns are there, None for all."""
    if REPEATS:  # rows beyond M are the last one
        return tl.load(at) if near is None else tl.load(at, mask=near[None, :], other=0.0)
    inside = (m < M)[:, None]
    return tl.load(at, mask=inside if near is None else inside & near[None, :], other=0.0)


@triton.jit
def load_b(at, near, n, N, B_K: tl.constexpr):
    """A [BLOCK_K, BLOCK_N] tile of the right one."""
    if B_K:
        return tl.load(at) if near is None else tl.load(at, mask=near[:, None], other=0.0)
    inside = (n < N)[None, :]
    return tl.load(at, mask=inside if near is None else inside & near[:, None], other=0.0)


@triton.jit
def add_product(
    total, x, y, a_scale, b_scale, PROMOTED: tl.constexpr, SCALED: tl.constexpr, B_TILE: tl.constexpr
):  # fmt: skip
    """``total`` plus the product of two tiles, with the scales of a segment as ``reference.scaled_product``.

    PROMOTED: the product is summed by itself, where tensor cores keep fewer bits than fp32.
    """
    if SCALED:
        a = tl.load(a_scale)
        b = tl.load(b_scale)
        scale = (a * b)[:, None] if B_TILE else a[:, None] * b[None, :]
        return tl.fma(tl.dot(x, y), scale, total)
    if (
        PROMOTED
    ):  # Triton's max_num_imprecise_acc reads a sum before it waits for it: ptxas then serializes the products
        return total + tl.dot(x, y)
    return tl.dot(x, y, total, input_precision="ieee")


@triton.jit
def multiply_tile(
    a, b, a_scale, b_scale, m, n, M, N, depth, a_stride, b_stride, a_outer, a_segment, b_outer, b_segment,
    A_K: tl.constexpr, B_K: tl.constexpr, A_ROOM: tl.constexpr, B_ROOM: tl.constexpr, PROMOTED: tl.constexpr,
    SCALED: tl.constexpr, A_TILE: tl.constexpr, B_TILE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N]: rows ``m`` of [M, depth] times rows ``n`` of [N, depth].

    *_K: the contracted dim is consecutive in memory. *_ROOM: it may be read, not used, up to a multiple of 16.
    """
    k = tl.arange(0, BLOCK_K)
    last_m, last_n = tl.minimum(m, M - 1), tl.minimum(n, N - 1)
    if A_K:
        a_at = a + last_m[:, None].to(tl.int64) * a_stride + k[None, :]
    else:
        a_at = a + k[None, :].to(tl.int64) * a_stride + m[:, None]
    if B_K:
        b_at = b + last_n[None, :].to(tl.int64) * b_stride + k[:, None]
    else:
        b_at = b + k[:, None].to(tl.int64) * b_stride + n[None, :]
    a_step = BLOCK_K if A_K else BLOCK_K * a_stride
    b_step = BLOCK_K if B_K else BLOCK_K * b_stride
    a_scale += (last_m // BLOCK if A_TILE else last_m).to(tl.int64) * a_outer
    # A tile of the result has the columns of one tile of scales.
    b_scale += ((tl.min(n) // BLOCK) if B_TILE else last_n).to(tl.int64) * b_outer
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # Of few rows all programs would wait for the memory of the last one.
    REPEATS: tl.constexpr = A_K and BLOCK_M > 64
    whole = depth // BLOCK_K
    for i in tl.range(0, whole, num_stages=STAGES):
        x = load_a(a_at, None, m, M, REPEATS)
        y = load_b(b_at, None, n, N, B_K)
        total = add_product(total, x, y, a_scale + i * a_segment, b_scale + i * b_segment, PROMOTED, SCALED, B_TILE)
        a_at += a_step
        b_at += b_step
    rest = depth - whole * BLOCK_K
    if rest > 0:
        x = load_a(a_at, k < ((rest + 15) // 16 * 16 if A_ROOM else rest), m, M, REPEATS)
        y = load_b(b_at, k < ((rest + 15) // 16 * 16 if B_ROOM else rest), n, N, B_K)
        if A_ROOM:
            x = tl.where((k < rest)[None, :], x, tl.zeros_like(x))
        if B_ROOM:
            y = tl.where((k < rest)[:, None], y, tl.zeros_like(y))
        a_scale += whole * a_segment
        b_scale += whole * b_segment
        total = add_product(total, x, y, a_scale, b_scale, PROMOTED, SCALED, B_TILE)
    return total


@triton.jit
def finished(
    total, a_factor, b_factor, bias, m, n, M, N, depth, DTYPE: tl.constexpr,
    FACTORS: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr, INVERSE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """``total`` times its factors plus a bias, as ``finish_kernel`` of ``matmul/kernels.py``, in DTYPE."""
    if FACTORS:
        # Those of a group without rows may be undefined.
        a = tl.load(a_factor + m * A_STEP, mask=m < tl.where(depth > 0, M, 0), other=0.0)
        b = tl.load(b_factor + n * B_STEP, mask=n < tl.where(depth > 0, N, 0), other=0.0)
        factor = a[:, None] * b[None, :]
        if INVERSE != 1:
            factor = factor * INVERSE
        total = total * factor
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(DTYPE).to(tl.float32)[None, :]
    return total.to(DTYPE)


@triton.jit
def grouped_mm_kernel(
    a, b, a_scale, b_scale, bias, out, a_offsets, b_offsets,
    M, N, depth, groups, a_stride, b_stride,
    a_scale_row, a_scale_outer, a_scale_segment, b_scale_row, b_scale_outer, b_scale_segment,
    ALIGNED_A: tl.constexpr, ALIGNED_B: tl.constexpr, ALIGNED_M: tl.constexpr, ALIGNED_N: tl.constexpr,
    ALIGNED_DEPTH: tl.constexpr, A_UNIT: tl.constexpr, B_UNIT: tl.constexpr, A_K: tl.constexpr, B_K: tl.constexpr,
    DEPTH: tl.constexpr, B_ROWS: tl.constexpr, ROTATED: tl.constexpr, PROMOTED: tl.constexpr,
    SCALED: tl.constexpr, A_TILE: tl.constexpr, B_TILE: tl.constexpr,
    FACTORS: tl.constexpr, A_STEP: tl.constexpr, B_STEP: tl.constexpr, INVERSE: tl.constexpr, BIAS: tl.constexpr,
    SEARCH: tl.constexpr, SWEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[M, N]: the rows of each group times the group's own matrix; zeros in rows that are no group's.

    With DEPTH [G, M, N]: of each group the sum over its rows of the products of columns; ROTATED: its codes go on to a
    multiple of 16 rows. B_ROWS: the rows of the right operand are contracted, as many of them as a group has if
    ``depth`` is more.
    """
    N = extent(N, ALIGNED_N)
    a_stride = extent(a_stride, ALIGNED_A)
    b_stride = extent(b_stride, ALIGNED_B)
    tiles_n = tl.cdiv(N, BLOCK_N)
    if DEPTH:
        rows = extent(M, ALIGNED_M)
        tiles_m = tl.cdiv(rows, BLOCK_M)
        group = tl.program_id(0) // (tiles_m * tiles_n)
        tile, column = swept(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, SWEEP)
        first = tl.load(a_offsets + group)
        depth = tl.load(a_offsets + group + 1) - first
        if ROTATED:
            depth = (depth + 15) // 16 * 16
        done = tile * BLOCK_M
        out += group.to(tl.int64) * rows * N
    else:
        depth = extent(depth, ALIGNED_DEPTH)
        tile, column = swept(tl.program_id(0), M // BLOCK_M + groups + 1, tiles_n, SWEEP)
        group = group_of(a_offsets, tile, groups, BLOCK_M, SEARCH)
        first, end = rows_of(a_offsets, group, groups, M)
        done = (tile - first // BLOCK_M - group) * BLOCK_M
        rows = end - first
        if done >= rows:
            return
        out += first.to(tl.int64) * N
    m = done + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    out_at = out + m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < rows)[:, None] & (n < N)[None, :]
    if not DEPTH:  # noqa: SIM102  (only what is left of a constant decides at compile time)
        if group == groups:
            tl.store(out_at, tl.zeros((BLOCK_M, BLOCK_N), out.dtype.element_ty), mask=inside)
            return
    b_first = tl.load(b_offsets + group)
    if B_ROWS and not (ALIGNED_DEPTH or DEPTH):
        depth = tl.minimum(depth, tl.load(b_offsets + group + 1) - b_first)
    A_ROOM: tl.constexpr = DEPTH and A_K and A_UNIT > 0
    B_ROOM: tl.constexpr = B_ROWS and B_K and B_UNIT > 0 and not ALIGNED_DEPTH
    a_row = begin(first, group, A_UNIT).to(tl.int64)
    b_row = begin(b_first, group, B_UNIT).to(tl.int64)
    total = multiply_tile(
        a + a_row * (1 if A_K == DEPTH else a_stride), b + b_row * (1 if B_K == B_ROWS else b_stride),
        a_scale + grid_row(first, group, A_UNIT, BLOCK, A_TILE).to(tl.int64) * a_scale_row,
        b_scale + grid_row(b_first, group, B_UNIT, BLOCK, B_TILE).to(tl.int64) * b_scale_row,
        m, n, rows, N, depth, a_stride, b_stride, a_scale_outer, a_scale_segment, b_scale_outer, b_scale_segment,
        A_K, B_K, A_ROOM, B_ROOM, PROMOTED, SCALED, A_TILE, B_TILE, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    a_factor = a_scale + ((group * rows if DEPTH else first) if A_STEP else group)
    b_factor = b_scale + group * (N if B_STEP else 1)
    result = finished(
        total, a_factor, b_factor, bias + group * N, m, n, rows, N, depth, out.dtype.element_ty,
        FACTORS, A_STEP, B_STEP, INVERSE, BIAS,
    )  # fmt: skip
    tl.store(out_at, result, mask=inside)


# ---- sums ----


@triton.jit
def grouped_sum_kernel(
    x, out, offsets, N, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Every BLOCK_M-th row in turn, then the BLOCK_M sums in pairs; rounded once."""
    N = extent(N, ALIGNED_N)
    tiles = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    first, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    at = x + (first + m)[:, None].to(tl.int64) * N + n[None, :]
    step = BLOCK_M * N.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(first, end, BLOCK_M, num_stages=3):
        total += tl.load(at, mask=(done + m < end)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        at += step
    found = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + group.to(tl.int64) * N + n, found, mask=n < N)


multiply = Kernel(grouped_mm_kernel)
sum_rows = Kernel(grouped_sum_kernel)
