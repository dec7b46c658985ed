"""FP8 in strips of 128 by an MXFP4 operand, in Triton around the library's product: ``fold`` before, repair after.

Whether all tiles could be folded is known on the device alone. The library multiplies in either case; then a kernel
computes again the columns of the product that have a tile that could not be, as the reference defines them, in blocks
of 32 by bf16 tensor cores. Its programs return at once where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.formats.device import power_of_two
from minifloat.formats.elements import E4M3
from minifloat.ops import allocate
from minifloat.ops.launch import Kernel
from minifloat.ops.matmul import Steps, kernels, native
from minifloat.ops.matmul.reference import BLOCK, HIGHEST, LEAST, LOWEST, TILE, UNSCALED, contracted_length
from minifloat.ops.quantize.decode import at_16_bytes, consecutive, load_bytes, load_elements
from minifloat.ops.quantize.device import extent, single_bytes
from minifloat.ops.quantize.job import aligned

REPAIRED = 64
"""Rows of the product that a program of the repair computes at a time."""
PROGRAMS = 264
"""Programs of the repair: each looks at all scales, and then takes its share of what is to be computed again."""
STEP = 4096
"""Scales that it looks at in a turn."""


@triton.jit
def load_packed(codes, first, byte, rows, width, stride, TILE: tl.constexpr):
    """Bytes of TILE x TILE codes of [rows, 2 width], which are packed along the rows' consecutive dim."""
    o = first + tl.arange(0, TILE)
    return load_bytes(codes, o, byte + tl.arange(0, TILE // 2), rows, width, stride, False)


@triton.jit
def used_blocks(packed, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Marks the blocks of such bytes that have a code that is not zero."""
    found = tl.reshape((packed & 0x77).to(tl.int32), (TILE, TILE // BLOCK, BLOCK // 2))
    return tl.max(found, axis=2) > 0


@triton.jit
def unpacked(packed, ELEMENT: tl.constexpr):
    """Decodes packed codes to values, in pairs."""
    return ELEMENT.kernels.decode(tl.join(packed & 0xF, packed >> 4), ELEMENT)


@triton.jit
def common_scale(used, exponent, HIGHEST: tl.constexpr, LOWEST: tl.constexpr, LEAST: tl.constexpr):
    """The scale of a tile, and what the values of its blocks are multiplied by; NaN and 0 where there is none."""
    highest = tl.max(tl.max(tl.where(used, exponent, -1), axis=1), axis=0)
    base = tl.where(highest < 0, 127, tl.maximum(highest - HIGHEST, LEAST))
    shift = exponent - base
    bad = tl.max(tl.max(((used & (shift < LOWEST)) | (exponent == 255)).to(tl.int32), axis=1), axis=0)
    factor = tl.where(used & (bad == 0), power_of_two(shift + 127), 0.0)
    return tl.where(bad > 0, float("nan"), power_of_two(base)), factor


@triton.jit
def encoded(values, factor, OUT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The codes of a tile of values, times the factors of their blocks."""
    blocks = tl.reshape(values, (TILE, TILE // BLOCK, BLOCK)) * factor[:, :, None]
    return OUT.kernels.encode(tl.reshape(blocks, (TILE, TILE)), OUT)


@triton.jit
def fold_kernel(
    codes, scales, target, folded,
    outer, blocks, code_rows, code_cols, code_stride, outer_stride, block_stride, rows, cols, scale_cols,
    K_MAJOR: tl.constexpr, ALIGNED_CODES: tl.constexpr, ALIGNED_STRIDE: tl.constexpr,
    ELEMENT: tl.constexpr, OUT: tl.constexpr, PACKED_OUTER: tl.constexpr, OUTER_BLOCK: tl.constexpr,
    HIGHEST: tl.constexpr, LOWEST: tl.constexpr, LEAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``fold.fold``: a tile of codes [rows, cols], and its scale; zeros to those that fill a row of scales."""
    code_rows = extent(code_rows, ALIGNED_CODES and K_MAJOR)
    code_cols = extent(code_cols, ALIGNED_CODES and not K_MAJOR)
    code_stride = extent(code_stride, ALIGNED_STRIDE)
    cols = extent(cols, True)
    wide = cols // TILE
    high = tl.program_id(0) // wide
    column = tl.program_id(0) % wide
    o = high * TILE + tl.arange(0, TILE)
    block = column * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    at = scales + (o // OUTER_BLOCK)[:, None].to(tl.int64) * outer_stride + block[None, :].to(tl.int64) * block_stride
    exponent = tl.load(at, mask=(o[:, None] < outer) & (block[None, :] < blocks), other=0).to(tl.int32)
    if PACKED_OUTER:
        values = load_elements(
            codes, high * TILE, column * TILE, code_rows, code_cols, code_stride, K_MAJOR, ELEMENT, True, TILE, TILE
        )
        used = tl.max(tl.reshape(tl.abs(values), (TILE, TILE // BLOCK, BLOCK)), axis=2) > 0
        scale, factor = common_scale(used, exponent, HIGHEST, LOWEST, LEAST)
    else:
        packed = load_packed(codes, high * TILE, column * (TILE // 2), code_rows, code_cols, code_stride, TILE)
        scale, factor = common_scale(used_blocks(packed, TILE, BLOCK), exponent, HIGHEST, LOWEST, LEAST)
        values = unpacked(packed, ELEMENT)
    made = encoded(values, factor, OUT, TILE, BLOCK)
    if K_MAJOR:
        made = single_bytes(made, outer)
    k = column * TILE + tl.arange(0, TILE)
    tl.store(target + o[:, None].to(tl.int64) * cols + k[None, :], made, mask=(o < rows)[:, None])
    place = column + tl.arange(0, 4)
    kept = (place == column) | ((place >= wide) & (place < scale_cols))
    tl.store(folded + high * scale_cols + place, tl.where(place == column, scale, 0.0), mask=kept)


@triton.jit
def any_nan(values, size, STEP: tl.constexpr):
    """1 where one of ``size`` consecutive values is NaN."""
    found = 0
    for first in range(0, size, STEP):
        i = first + tl.arange(0, STEP)
        value = tl.load(values + i, mask=i < size, other=0.0)
        found = tl.maximum(found, tl.max((value != value).to(tl.int32), axis=0))
    return found


@triton.jit
def repair_kernel(
    a, a_scale, codes, scales, folded, out,
    M, N, blocks, high, a_stride, a_rows, code_rows, code_cols, code_stride, outer_stride, block_stride, scale_cols,
    out_stride, programs,
    K_MAJOR: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr, PACKED_OUTER: tl.constexpr,
    OUTER_BLOCK: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``reference.scaled_product`` to those TILE columns of ``out`` [M, N] that have a NaN among their scales."""
    down = tl.where(any_nan(folded, high * scale_cols, STEP) > 0, tl.cdiv(M, BLOCK_M), 0)
    for item in range(tl.program_id(0), high * down, programs):
        tile = item // down
        if any_nan(folded + tile * scale_cols, scale_cols, SCALES) > 0:
            m = item % down * BLOCK_M + tl.arange(0, BLOCK_M)
            n = tile * TILE + tl.arange(0, TILE)
            k = tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK_M, TILE), tl.float32)
            for i in range(0, blocks):
                x = tl.load(
                    a + m[:, None].to(tl.int64) * a_stride + (i * BLOCK + k)[None, :], mask=(m < M)[:, None], other=0.0
                )
                w = load_elements(
                    codes, tile * TILE, i * BLOCK, code_rows, code_cols, code_stride, K_MAJOR, ELEMENT, PACKED_OUTER,
                    TILE, BLOCK,
                )  # fmt: skip
                product = tl.dot(x.to(tl.float32).to(tl.bfloat16), tl.trans(w.to(tl.bfloat16)))
                left = tl.load(a_scale + i * BLOCK // TILE * a_rows + m, mask=m < M, other=0.0)
                at = scales + (n // OUTER_BLOCK).to(tl.int64) * outer_stride + i * block_stride
                right = RULE.kernels.value(tl.load(at, mask=n < N, other=0))
                total += product * (left[:, None] * right[None, :])
            where = out + m[:, None].to(tl.int64) * out_stride + n[None, :]
            tl.store(where, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


_fold = Kernel(fold_kernel)
_repair = Kernel(repair_kernel)


class FoldSource(NamedTuple):
    """An MXFP4 operand as kernels read it: [outer, contracted] codes, two a byte, and scales of any strides.

    Args:
        codes, scales: of the operand, seen with the contracted dim last; codes that are packed along it are consecutive
            along it too.
        outer: the size of the other dim; ``blocks``: of 32 along the contracted one.
        packed_outer: the two codes of a byte are neighbours in the other dim.
        outer_block: elements of that dim that share a scale.
    """

    codes: Tensor
    scales: Tensor
    outer: int
    blocks: int
    packed_outer: bool
    outer_block: int
    format: Format

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows and bytes a row of the codes, and the strides of codes and scales."""
        return (*self.codes.shape, self.codes.stride(1 if self.k_major else 0), *self.scales.stride())

    @property
    def k_major(self) -> bool:
        """Whether the other dim of the codes is consecutive in memory."""
        return self.codes.stride(1) != 1


def source(codes: Tensor, scale_inv: Tensor, fmt: Format, dim: int, along: int, outer: int) -> FoldSource:
    """Arguments as of ``fold.fold``."""
    blocks = triton.cdiv(contracted_length(codes, fmt, dim, along), fmt.block)
    outer_block = fmt.scale_block(dim)[0 if along == ROWWISE else 1]
    if along != ROWWISE:
        scale_inv = scale_inv.t()
        codes = kernels.k_major_copy(codes, True, (1, 1)) if dim == along else codes.t()
    return FoldSource(consecutive(codes), at_16_bytes(scale_inv), outer, blocks, dim != along, outer_block, fmt)


def fold(weight: FoldSource) -> tuple[Tensor, Tensor]:
    """``fold.fold``, of sizes that the library takes, with zero codes around: E4M3 codes and their scales."""
    wide = triton.cdiv(weight.blocks * BLOCK, TILE)
    rows, scale_cols, device = weight.outer + -weight.outer % 16, wide + -wide % 4, weight.codes.device
    high = triton.cdiv(rows, TILE)
    target = allocate((rows, wide * TILE), torch.uint8, device)
    scales = allocate((high, scale_cols), torch.float32, device)
    sizes, k_major = weight.sizes, weight.k_major
    _fold(
        high * wide,
        (weight.codes, weight.scales, target, scales),
        (weight.outer, weight.blocks, *sizes, rows, wide * TILE, scale_cols),
        (
            k_major, aligned([sizes[0 if k_major else 1]]), aligned([sizes[2]]), weight.format.encoding, E4M3,
            weight.packed_outer, weight.outer_block, HIGHEST, LOWEST, LEAST, TILE, BLOCK,
        ),
        8,
    )  # fmt: skip
    return target.view(torch.float8_e4m3fn), scales


class FoldRemainder(NamedTuple):
    """Tensors to read after the product: FP8 strips with some rows of padding, the MXFP4 operand, folded scales."""

    codes: Tensor
    scale: Tensor
    rows: int
    weight: FoldSource
    folded: Tensor


def prepare(a: Any, b: Any, direct: bool = True) -> tuple[Sequence[Tensor], FoldRemainder]:
    """The operands of the library's product, of FP8 strips and an MXFP4 operand."""
    codes, scale = native.block128_operand(a)
    weight = source(b.codes, b.scale_inv, b.format, b.dim, b.along, b.outer)
    folded, scales = fold(weight)
    high, wide = scales.shape
    return (codes, scale, folded, scales.as_strided((wide, high), (1, wide))), FoldRemainder(
        codes, scale, a.outer, weight, scales
    )


def multiply(operands: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    """The library's product."""
    return native.block128(False, True, operands, out_dtype)


def repair(product: Tensor, left: FoldRemainder) -> None:
    """Computes again those columns of the library's ``product`` that have a scale that could not be folded."""
    codes, scale, rows, weight, folded = left
    _repair(
        PROGRAMS,
        (codes, scale, weight.codes, weight.scales, folded, product),
        (
            rows, weight.outer, weight.blocks, triton.cdiv(weight.outer, TILE), codes.stride(0), scale.stride(1),
            *weight.sizes, folded.shape[1], product.stride(0), PROGRAMS,
        ),
        (
            weight.k_major, weight.format.encoding, weight.format.scaling, weight.packed_outer, weight.outer_block,
            STEP, triton.next_power_of_2(folded.shape[1]), REPAIRED, TILE, BLOCK,
        ),
        8,
    )  # fmt: skip


def finish(product: Tensor, left: FoldRemainder, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Bias and rounding."""
    return kernels.finish(product, UNSCALED, bias, out_dtype)


STEPS = Steps(prepare, multiply, native.block128_is_direct, finish, repair)
"""The product."""
