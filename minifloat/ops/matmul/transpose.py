"""Codes brought into the memory order and the sizes that a library multiplies, in Triton: one pass of bytes.

FP8 tensor cores of sm_90 take operands whose contracted dim is consecutive, in multiples of 16 codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, allocate
from minifloat.ops.quantize.decode import at_16_bytes, consecutive, load_bytes
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
