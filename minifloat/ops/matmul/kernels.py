"""Operands as libraries multiply them, and the epilogue of emulated products, in Triton.

FP8 tensor cores of sm_90 take operands whose contracted dim is consecutive, in multiples of 16 codes; cuBLASLt's
block-scaled products take scales in an order of their own, E4M3 codes, and NVFP4's factor apart. Emulated products take
bf16: the values, bit for bit, that ``emulated.spread`` and the fp32 factors of ``reference.tensor_factor`` give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.device import e8m0_from_float
from minifloat.ops import allocate
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.matmul.reference import Scales, Values, values_shape
from minifloat.ops.quantize.decode import Factors, at_16_bytes, consecutive, decode, load_bytes
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

LARGEST = Tile(32, 64, 4)
"""Tile of the grid of scales that a program looks at in a turn."""
FINISH = Tile(16, 256, 4)
"""Tile of the product."""


@triton.jit
def largest_scale(
    scales, m, outer, blocks, outer_stride, block_stride,
    RULE: tl.constexpr, OUTER_BLOCK: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Finds the largest scale of each of the rows (or columns) ``m``; scales are not negative."""
    row = scales + (m // OUTER_BLOCK)[:, None].to(tl.int64) * outer_stride
    found = tl.zeros((m.shape[0], COLS), tl.int32)
    for first in range(0, blocks, COLS):
        k = first + tl.arange(0, COLS)
        inside = (m[:, None] < outer) & (k[None, :] < blocks)
        scale = RULE.kernels.value(tl.load(row + k[None, :].to(tl.int64) * block_stride, mask=inside, other=0))
        # Bits of floats of at least 0 are in the order of the floats, and NaN is above infinity.
        found = tl.maximum(found, tl.where(scale == scale, scale.to(tl.int32, bitcast=True), 0x7FC00000))
    return tl.max(found, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def largest_scale_kernel(
    scales, largest, outer, blocks, outer_stride, block_stride,
    RULE: tl.constexpr, OUTER_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The largest scale of each row (or column), for each of the elements that share it."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    found = largest_scale(scales, m, outer, blocks, outer_stride, block_stride, RULE, OUTER_BLOCK, COLS)
    tl.store(largest + m, found, mask=m < outer)


@triton.jit
def finish_kernel(
    product, left, right, bias, out,
    M, N,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, INVERSE: tl.constexpr, BIAS: tl.constexpr,
    ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The product times its factors plus a bias rounded to the dtype of the output, rounded once.

    LEFT, RIGHT: 1 for a factor of each row or column, 0 for one of all, -1 for none.
    """
    N = extent(N, ALIGNED_N)
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    m = program // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    where = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    value = tl.load(product + where, mask=inside, other=0.0)
    if LEFT >= 0 or RIGHT >= 0:
        a = tl.full((BLOCK_M,), 1.0, tl.float32)
        b = tl.full((BLOCK_N,), 1.0, tl.float32)
        if LEFT >= 0:
            a = tl.load(left + m * LEFT, mask=m < M, other=0.0)  # a factor of the whole tensor is read again and again
        if RIGHT >= 0:
            b = tl.load(right + n * RIGHT, mask=n < N, other=0.0)
        factor = a[:, None] * b[None, :]
        if INVERSE != 1:
            factor = factor * INVERSE
        value = value * factor
    if BIAS:
        value += tl.load(bias + n, mask=n < N, other=0.0).to(out.dtype.element_ty).to(tl.float32)[None, :]
    tl.store(out + where, value.to(out.dtype.element_ty), mask=inside)


_largest_scale = Kernel(largest_scale_kernel)
_finish = Kernel(finish_kernel)


def spread(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, along: int, outer: int
) -> Values:
    """``emulated.spread`` in one pass over the codes, after one over the scales where those are powers of two.

    ``codes`` of the result is transposed in memory where the operand's codes are, so that both are consecutive.
    """
    factor, divisor = scale_inv.reshape(-1), 1.0
    rule, level, strides = None, "none", (0, 0)
    if fmt.scale_rule == "two_level":
        assert amax is not None
        factor, divisor, rule = amax, 6.0 * fmt.block_scale_max, fmt.scaling
    elif fmt.block and codes.dtype != torch.bfloat16:
        rule, level = fmt.scaling, "largest"
        factor, strides = _largest(scale_inv, fmt, dim, along, outer)
    factors = Factors(rule, scale_inv, level, factor, strides, 1.0, 0)
    return Values(_written(codes, fmt, dim, along, outer, factors), None, factor, divisor)


def values(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, along: int, outer: int
) -> Tensor:
    """``emulated.values`` in one pass."""
    factors = Factors(fmt.scaling, scale_inv, "saturated", scale_inv, (0, 0), 1.0, 0)
    return _written(codes, fmt, dim, along, outer, factors)


def _written(codes: Tensor, fmt: Format, dim: int, along: int, outer: int, factors: Factors) -> Tensor:
    """bf16 [outer, contracted]."""
    if codes.dtype == torch.bfloat16:  # as they were cast, see ``casts.Casts``
        return codes if along == ROWWISE else codes.t()
    M, K = values_shape(codes, fmt, dim, along, outer)
    out = allocate((M, K), torch.bfloat16, codes.device, transposed=codes.stride(1) != 1 and not fmt.packed)
    decode(codes, fmt, dim, factors, out)
    return out if along == ROWWISE else out.t()


def _largest(scale_inv: Tensor, fmt: Format, dim: int, along: int, outer: int) -> tuple[Tensor, tuple[int, int]]:
    """fp32 [outer], the largest scale along the contracted dim, and the elements from one block's to the next's."""
    grid = at_16_bytes(scale_inv if along == ROWWISE else scale_inv.t())
    step = fmt.scale_block(dim)[0 if along == ROWWISE else 1]
    largest = allocate((1, outer), torch.float32, grid.device).view(-1)
    _largest_scale(
        triton.cdiv(outer, LARGEST.rows),
        (grid, largest),
        (outer, grid.shape[1], *grid.stride()),
        (fmt.scaling, step, LARGEST.rows, LARGEST.cols),
        LARGEST.warps,
    )
    return largest, (step, 0) if along == ROWWISE else (0, step)


def factors_of(scales: Scales, other: Tensor) -> tuple[list[Tensor], list[int]]:
    """The factors as kernels read them, ``other`` for none, and their steps: 1 for one each, 0 for one of all, -1."""
    sides = scales[0], scales[1]
    factors = [other if factor is None else at_16_bytes(factor.contiguous()) for factor in sides]
    return factors, [-1 if factor is None else int(factor.numel() > 1) for factor in sides]


def finish(product: Tensor, scales: Scales, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """fp32 ``product`` [m, n] times its scales, if any, plus ``bias`` [n] in the output's dtype, rounded once.

    The factor is that of ``reference.tensor_factor``.
    """
    M, N = product.shape
    product = ready(product)
    out = allocate((M, N), out_dtype, product.device)
    factors, steps = factors_of(scales, product)
    _finish(
        FINISH.count(out.shape),
        (product, *factors, product if bias is None else ready(bias), out),
        (M, N),
        (
            *steps, 1.0 / scales[2], bias is not None, aligned([N]), FINISH.rows, FINISH.cols,
        ),
        FINISH.warps,
    )  # fmt: skip
    return out


TILE = Tile(128, 128, 8)
"""Codes of a program."""
SCALES = Tile(32, 64, 4)
"""Scales of a program."""


@triton.jit
def copy_bytes_kernel(
    source, target,
    M, K, stride, rows, cols,
    K_MAJOR: tl.constexpr, ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_TARGET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``source`` [M, K] to the beginning of ``target`` [rows, cols], row-major, and zeros to the rest."""
    M = extent(M, ALIGNED_M)
    K = extent(K, ALIGNED_K)
    stride = extent(stride, ALIGNED_M if K_MAJOR else ALIGNED_K)
    cols = extent(cols, ALIGNED_TARGET)
    program = tl.program_id(0)
    columns = tl.cdiv(cols, BLOCK_K)
    m = program // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    k = program % columns * BLOCK_K + tl.arange(0, BLOCK_K)
    codes = load_bytes(source, m, k, M, K, stride, K_MAJOR)
    where = target + m[:, None].to(tl.int64) * cols + k[None, :]
    tl.store(where, codes, mask=(m[:, None] < rows) & (k[None, :] < cols))


@triton.jit
def copy_scales_kernel(
    source, target,
    M, K, stride_m, stride_k, rows, cols,
    FILL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``source`` [M, K] of any strides to the beginning of ``target`` [rows, cols], row-major, and FILL to the rest."""
    program = tl.program_id(0)
    columns = tl.cdiv(cols, BLOCK_K)
    m = program // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    k = program % columns * BLOCK_K + tl.arange(0, BLOCK_K)
    where = m[:, None].to(tl.int64) * stride_m + k[None, :].to(tl.int64) * stride_k
    scales = tl.load(source + where, mask=(m[:, None] < M) & (k[None, :] < K), other=FILL)
    inside = (m[:, None] < rows) & (k[None, :] < cols)
    tl.store(target + m[:, None].to(tl.int64) * cols + k[None, :], scales, mask=inside)


_copy_bytes = Kernel(copy_bytes_kernel)
_copy_scales = Kernel(copy_scales_kernel)


def k_major_copy(codes: Tensor, transposed: bool, align: tuple[int, int]) -> Tensor:
    """Codes, transposed or not, with both dims rounded up to multiples of ``align`` with zero codes; contiguous.

    Args:
        codes: uint8 [M, K], fastest where one of the two dims is consecutive in memory.
        align: of the rows and columns of the result.
    """
    source = consecutive(codes.t() if transposed else codes)
    M, K = source.shape
    rows, cols = M + -M % align[0], K + -K % align[1]
    target = allocate((rows, cols), torch.uint8, codes.device)
    k_major = source.stride(1) != 1
    stride = source.stride(1 if k_major else 0)
    _copy_bytes(
        TILE.count(target.shape),
        (source, target),
        (M, K, stride, rows, cols),
        (
            k_major, k_major and aligned([M, stride]), not k_major and aligned([K, stride]), aligned([cols]),
            TILE.rows, TILE.cols,
        ),
        TILE.warps,
    )  # fmt: skip
    return target


def copy_scales(scales: Tensor, rows: int, cols: int, fill: float) -> Tensor:
    """fp32 ``scales`` [M, K] of any strides as [rows, cols], contiguous, with ``fill`` where they have none."""
    source = at_16_bytes(scales)
    target = allocate((rows, cols), torch.float32, scales.device)
    _copy_scales(
        SCALES.count(target.shape),
        (source, target),
        (*source.shape, *source.stride(), rows, cols),
        (fill, SCALES.rows, SCALES.cols),
        SCALES.warps,
    )
    return target


ROWS, COLS = 128, 4
"""Scales of a tile, which is what a program writes."""
REPACK = Tile(64, 64, 4)
"""Bytes of a program."""


@triton.jit
def swizzle_kernel(
    source, target,
    outer, blocks, outer_stride, block_stride, across,
    OUTER_BLOCK: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``native.swizzle`` of one tile, each scale for ``OUTER_BLOCK`` rows and ``REPEAT`` blocks of the result."""
    program = tl.program_id(0)
    at = tl.arange(0, ROWS * COLS)
    row = program // across * ROWS + at % 16 // COLS * 32 + at // 16
    block = (program % across * COLS + at % COLS) // REPEAT
    where = (row // OUTER_BLOCK).to(tl.int64) * outer_stride + block.to(tl.int64) * block_stride
    scale = tl.load(source + where, mask=(row < outer) & (block < blocks), other=0)
    if source.dtype.element_ty == tl.float32:
        scale = e8m0_from_float(scale)
    tl.store(target + program.to(tl.int64) * (ROWS * COLS) + at, scale.to(tl.uint8))


@triton.jit
def alpha_kernel(left, right, out, INVERSE: tl.constexpr):
    """The product of two amaxes over their divisor, and one."""
    tl.store(out, tl.load(left) * tl.load(right) * INVERSE)
    tl.store(out + 1, 1.0)


@triton.jit
def repack_kernel(
    source, target,
    contracted, outer, contracted_stride, outer_stride, cols,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """4-bit codes [contracted, outer], packed along ``outer``, to [outer, contracted], packed along ``contracted``."""
    program = tl.program_id(0)
    across = tl.cdiv(cols, BLOCK_COLS)
    row = (program // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    col = (program % across * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    where = source + (row // 2).to(tl.int64) * outer_stride + (2 * col).to(tl.int64) * contracted_stride
    low = tl.load(where, mask=(row < outer) & (2 * col < contracted), other=0)
    high = tl.load(where + contracted_stride, mask=(row < outer) & (2 * col + 1 < contracted), other=0)
    shift = (row % 2 * 4).to(tl.uint8)
    byte = ((low >> shift) & 0xF) | (((high >> shift) & 0xF) << 4)
    tl.store(target + row.to(tl.int64) * cols + col, byte.to(tl.uint8), mask=(row < outer) & (col < cols))


_swizzle = Kernel(swizzle_kernel)
_repack = Kernel(repack_kernel)
_alpha = Kernel(alpha_kernel)


def swizzle(scale: Tensor, outer: int, outer_block: int, repeat: int) -> Tensor:
    """uint8: the scales of ``outer`` rows, [outer / outer_block, blocks], bytes or fp32 powers of two."""
    source = at_16_bytes(scale)
    blocks = source.shape[1]
    across = triton.cdiv(blocks * repeat, COLS)
    tiles = triton.cdiv(outer, ROWS) * across
    target = allocate((1, tiles * ROWS * COLS), torch.uint8, source.device).view(-1)
    _swizzle(tiles, (source, target), (outer, blocks, *source.stride(), across), (outer_block, repeat, ROWS, COLS), 4)
    return target


def as_e4m3(codes: Tensor, fmt: Format, dim: int, shape: torch.Size, along: int) -> Tensor:
    """uint8 [M, K], contiguous along the contracted dim: codes of E4M3 for the values of others."""
    out = allocate((shape[0], shape[1]), torch.float8_e4m3fn, codes.device, transposed=along != ROWWISE)
    decode(codes, fmt, dim, Factors(None, codes, "none", codes, (0, 0), 1.0, 0), out)
    return out.view(torch.uint8)


def repacked(codes: Tensor, dim: int, shape: torch.Size) -> Tensor:
    """4-bit codes of [M, K] values that are packed along ``dim``, packed along the other and consecutive in it."""
    source, other = (codes, 0) if dim == ROWWISE else (codes.t(), 1)
    contracted, outer = shape[other], shape[1 - other]
    cols = triton.cdiv(contracted, 2)
    target = allocate((outer, cols), torch.uint8, codes.device)
    _repack(
        REPACK.count(target.shape),
        (at_16_bytes(source), target),
        (contracted, outer, *source.stride(), cols),
        (REPACK.rows, REPACK.cols),
        REPACK.warps,
    )
    return target if dim == COLUMNWISE else target.t()


def alpha(left: Tensor, right: Tensor, divisor: float) -> Tensor:
    """fp32 [2]: the factor of NVFP4's product, and one."""
    out = allocate((1, 2), torch.float32, left.device).view(-1)
    _alpha(1, (at_16_bytes(left), at_16_bytes(right), out), (), (1.0 / divisor,), 1)
    return out
