"""What ``block_scaled.py`` hands to the library, in Triton: scales in its order, E4M3 codes, NVFP4's factor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.device import e8m0_from_float
from minifloat.ops.launch import Kernel, allocate
from minifloat.ops.quantize.decode import Factors, at_16_bytes, decode
from minifloat.ops.tiles import Tile

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
