"""Operands of the emulated product written out as bf16, and its epilogue, in Triton: one pass each.

The same values, bit for bit, as ``emulated.spread`` and the fp32 factors of ``reference.tensor_factor`` give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.ops.launch import Kernel, allocate, ready
from minifloat.ops.matmul.reference import Values, values_shape
from minifloat.ops.matmul.steps import Scales
from minifloat.ops.quantize.decode import Factors, at_16_bytes, decode
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

LARGEST = Tile(32, 64, 4)
"""Of the grid of scales: how much a program looks at in a turn."""
FINISH = Tile(16, 256, 4)
"""Of the product."""


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
