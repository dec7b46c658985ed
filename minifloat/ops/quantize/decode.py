"""Codes read back, in Triton: one pass that reads codes and scales and writes the values they stand for.

A program works on a tile of whole scale blocks or on a part of one: its [BLOCK_M, BLOCK_K] elements are viewed as
[BLOCK_M/r, r, BLOCK_K/c, c], as in ``reference.py``, and each block is multiplied by its factor. ``matmul/kernels.py``
uses the same kernel to write operands out for the emulated product, with factors that fit bf16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, ScaleRule, parse
from minifloat.ops.launch import Kernel
from minifloat.ops.quantize import reference
from minifloat.ops.quantize.device import corner, extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

TILE = Tile(64, 128, 4)
"""Elements of a program."""
BF16_MAX = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def load_bytes(source, m, k, M, K, stride, K_MAJOR: tl.constexpr):
    """A tile of [M, K] bytes, ``stride`` apart in the dim that is not consecutive in memory."""
    inside = (m[:, None] < M) & (k[None, :] < K)
    if K_MAJOR:
        return tl.load(source + k[None, :].to(tl.int64) * stride + m[:, None], mask=inside, other=0)
    return tl.load(source + m[:, None].to(tl.int64) * stride + k[None, :], mask=inside, other=0)


@triton.jit
def load_elements(
    codes, first_m, first_k, M, K, stride,
    K_MAJOR: tl.constexpr, ELEMENT: tl.constexpr, PACKED_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The fp32 values, not scaled, of a tile of [M, K] codes, unpacked along M or along K."""
    if not ELEMENT.packed:
        m = first_m + tl.arange(0, BLOCK_M)
        k = first_k + tl.arange(0, BLOCK_K)
        return ELEMENT.kernels.decode(load_bytes(codes, m, k, M, K, stride, K_MAJOR), ELEMENT)
    BYTES_M: tl.constexpr = BLOCK_M // 2 if PACKED_M else BLOCK_M
    BYTES_K: tl.constexpr = BLOCK_K if PACKED_M else BLOCK_K // 2
    m = (first_m // 2 if PACKED_M else first_m) + tl.arange(0, BYTES_M)
    k = (first_k if PACKED_M else first_k // 2) + tl.arange(0, BYTES_K)
    packed = load_bytes(codes, m, k, M, K, stride, K_MAJOR)
    halves = tl.join(packed & 0xF, packed >> 4)
    if PACKED_M:
        halves = tl.permute(halves, (0, 2, 1))
    return ELEMENT.kernels.decode(tl.reshape(halves, (BLOCK_M, BLOCK_K)), ELEMENT)


@triton.jit
def block_factor(
    scales, levels, row, col, M, K, scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
    RULE: tl.constexpr, LEVEL: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Loads the factor of the blocks that begin at ``row`` and ``col``, fp32; see :class:`Factors`."""
    inside = (row[:, None] < M) & (col[None, :] < K)
    row = (row // ROWS)[:, None].to(tl.int64)
    col = (col // COLS)[None, :].to(tl.int64)
    factor = RULE.kernels.value(tl.load(scales + row * scale_stride_m + col * scale_stride_k, mask=inside, other=0))
    if LEVEL == "amax" or LEVEL == "largest":
        level = tl.load(levels + row * level_stride_m + col * level_stride_k, mask=inside, other=1.0)
        if LEVEL == "amax":
            factor = factor * level * INVERSE
        else:
            factor = tl.div_rn(factor, level).to(tl.bfloat16).to(tl.float32)
    return factor


@triton.jit
def butterfly(x, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sums and differences of rows that are STRIDE apart."""
    pairs = tl.permute(tl.reshape(x, (ROWS // (2 * STRIDE), 2, STRIDE, COLS)), (0, 2, 3, 1))
    upper, lower = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(upper + lower, upper - lower), (0, 3, 1, 2)), (ROWS, COLS))


@triton.jit
def rotate_back(x, ROWS: tl.constexpr, COLS: tl.constexpr, NEGATIVE: tl.constexpr):
    """``reference.unrotated``: groups of 16 rows times H16, then signs; bit i of NEGATIVE: sign i is -1."""
    x = butterfly(x, 1, ROWS, COLS)
    x = butterfly(x, 2, ROWS, COLS)
    x = butterfly(x, 4, ROWS, COLS)
    x = butterfly(x, 8, ROWS, COLS) * 0.25
    negative = (NEGATIVE >> (tl.arange(0, ROWS) % 16)) & 1
    return x * (1 - 2 * negative)[:, None].to(tl.float32)


@triton.jit
def saturated(x):
    """fp32 ``x``, cut at bf16's largest number; NaN stays NaN."""
    return tl.clamp(x, -BF16_MAX, BF16_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def decode_tile(
    codes, scales, levels, out, first_m, first_k,
    M, K, code_rows, code_cols, code_stride, out_stride,
    scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
    K_MAJOR: tl.constexpr, OUT_K_MAJOR: tl.constexpr,
    ELEMENT: tl.constexpr, PACKED_M: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    RULE: tl.constexpr, LEVEL: tl.constexpr, INVERSE: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes the values of a tile of [M, K] codes; see :class:`Factors`."""
    values = load_elements(
        codes, first_m, first_k, code_rows, code_cols, code_stride, K_MAJOR, ELEMENT, PACKED_M, BLOCK_M, BLOCK_K
    )
    if RULE is not None:
        ROWS: tl.constexpr = min(SCALE_ROWS, BLOCK_M)
        COLS: tl.constexpr = min(SCALE_COLS, BLOCK_K)
        row = first_m + tl.arange(0, BLOCK_M // ROWS) * ROWS
        col = first_k + tl.arange(0, BLOCK_K // COLS) * COLS
        factor = block_factor(
            scales, levels, row, col, M, K, scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
            RULE, LEVEL, INVERSE, SCALE_ROWS, SCALE_COLS,
        )  # fmt: skip
        blocks = tl.reshape(values, (BLOCK_M // ROWS, ROWS, BLOCK_K // COLS, COLS)) * factor[:, None, :, None]
        if LEVEL == "saturated":
            blocks = saturated(blocks)
        values = tl.reshape(blocks, (BLOCK_M, BLOCK_K))
    if NEGATIVE != 0:
        values = rotate_back(values, BLOCK_M, BLOCK_K, NEGATIVE)
    m = (first_m + tl.arange(0, BLOCK_M))[:, None]
    k = (first_k + tl.arange(0, BLOCK_K))[None, :]
    where = k.to(tl.int64) * out_stride + m if OUT_K_MAJOR else m.to(tl.int64) * out_stride + k
    tl.store(out + where, values.to(out.dtype.element_ty), mask=(m < M) & (k < K))


@triton.jit
def decode_kernel(
    codes, scales, levels, out,
    M, K, code_rows, code_cols, code_stride, scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
    K_MAJOR: tl.constexpr, OUT_K_MAJOR: tl.constexpr, ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr,
    ELEMENT: tl.constexpr, PACKED_M: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    RULE: tl.constexpr, LEVEL: tl.constexpr, INVERSE: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    M = extent(M, ALIGNED_M)
    K = extent(K, ALIGNED_K)
    code_rows = extent(code_rows, ALIGNED_M)
    code_cols = extent(code_cols, ALIGNED_K)
    code_stride = extent(code_stride, ALIGNED_M if K_MAJOR else ALIGNED_K)
    first_m, first_k = corner(tl.program_id(0), K, BLOCK_M, BLOCK_K)
    decode_tile(
        codes, scales, levels, out, first_m, first_k,
        M, K, code_rows, code_cols, code_stride, M if OUT_K_MAJOR else K,
        scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
        K_MAJOR, OUT_K_MAJOR, ELEMENT, PACKED_M, SCALE_ROWS, SCALE_COLS, RULE, LEVEL, INVERSE, NEGATIVE,
        BLOCK_M, BLOCK_K,
    )  # fmt: skip


_decode = Kernel(decode_kernel)


class Factors(NamedTuple):
    """Factors of the codes of each block.

    Args:
        rule: that of ``scale_inv``; None to leave codes unscaled.
        scale_inv: [1], or the grid of blocks, of any strides.
        level: ``"amax"``: times ``levels`` times ``inverse``; ``"largest"``: over ``levels``, rounded to bf16;
            ``"saturated"``: the values are cut at bf16's largest number; ``"none"``.
        levels, level_strides: fp32, and the elements from one block to the next along M and along K.
        signs: of the Hadamard transform to undo, a bit each; 0 for none.
    """

    rule: ScaleRule | None
    scale_inv: Tensor
    level: str
    levels: Tensor
    level_strides: tuple[int, int]
    inverse: float
    signs: int


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, format: str, dim: int, rows: int, cols: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Implements the operation; codes and scales of any strides."""
    fmt, out = parse(format), torch.empty(rows, cols, dtype=dtype, device=codes.device)
    decode(codes, fmt, dim, restoring(scale_inv, amax, fmt, dim), out)
    return out


def restoring(scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int) -> Factors:
    """Factors that give the values that were cast, rotated back; levels are one for all, or of each row or column."""
    strides = int(fmt.amax_per_row and dim == ROWWISE), int(fmt.amax_per_row and dim == COLUMNWISE)
    signs = reference.NEGATIVE if fmt.transform == "hadamard16" else 0
    if fmt.scale_rule != "two_level":
        return Factors(fmt.scaling, scale_inv, "none", scale_inv, strides, 1.0, signs)
    assert amax is not None
    return Factors(fmt.scaling, scale_inv, "amax", amax.contiguous(), strides, 1.0 / (6 * fmt.block_scale_max), signs)


def decode(codes: Tensor, fmt: Format, dim: int, factors: Factors, out: Tensor) -> None:
    """Writes the [M, K] values of codes to ``out``, which is contiguous, or is when transposed."""
    codes, scale_inv = consecutive(codes), at_16_bytes(factors.scale_inv)
    M, K = out.shape
    k_major, out_k_major = codes.stride(1) != 1, not out.is_contiguous()
    aligned_m = (k_major or out_k_major) and aligned([M, codes.shape[0], codes.stride(1) if k_major else 0])
    aligned_k = aligned([K, codes.shape[1], 0 if k_major else codes.stride(0)])
    # One scale for everything is a grid of any blocks, with nothing between one and the next.
    rows, cols = fmt.scale_block(dim)
    block = rows or TILE.rows, cols or TILE.cols
    strides = scale_inv.stride() if fmt.grid else (0, 0)
    scale_strides = strides[0] if rows else 0, strides[1] if cols else 0
    _decode(
        TILE.count(out.shape),
        (codes, scale_inv, at_16_bytes(factors.levels), out),
        (M, K, *codes.shape, codes.stride(1 if k_major else 0), *scale_strides, *factors.level_strides),
        (
            k_major, out_k_major, aligned_m, aligned_k, fmt.encoding, fmt.packed and dim == COLUMNWISE, *block,
            factors.rule, factors.level, factors.inverse, factors.signs, TILE.rows, TILE.cols,
        ),
        TILE.warps,
    )  # fmt: skip


def consecutive(matrix: Tensor) -> Tensor:
    """``matrix``, or a copy, with one dim consecutive in memory, at a multiple of 16 bytes."""
    return at_16_bytes(matrix if 1 in matrix.stride() else matrix.contiguous())


def at_16_bytes(x: Tensor) -> Tensor:
    """``x``, or a copy, at a multiple of 16 bytes: kernels read as much at a time."""
    return x if x.numel() == 1 or x.data_ptr() % 16 == 0 else x.clone()
