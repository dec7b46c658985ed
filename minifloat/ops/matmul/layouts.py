"""Codes and scales brought into the orders and sizes that libraries multiply, in Triton.

FP8 tensor cores of sm_90 take operands whose contracted dim is consecutive, in multiples of 16 codes; cuBLASLt's
block-scaled products take scales in an order of their own, E4M3 codes, and NVFP4's factor apart."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.device import e8m0_from_float
from minifloat.ops.launch import Kernel, allocate
from minifloat.ops.quantize.decode import Factors, at_16_bytes, consecutive, decode, load_bytes
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

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
    """``block_scaled.swizzle`` of one tile, each scale for ``OUTER_BLOCK`` rows and ``REPEAT`` blocks of the result."""
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
