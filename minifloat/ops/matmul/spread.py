"""Operands of the emulated product written out as bf16, and its epilogue, in Triton: one pass each.

The same values, bit for bit, as ``emulated.spread`` and the fp32 factors of ``reference.tensor_factor`` give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.matmul.reference import Values, contracted_length
from minifloat.ops.quantize.decode import Factors, at_16_bytes, decode
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

LARGEST = Tile(32, 64, 4)
"""Of the grid of scales: how much a program looks at in a turn."""
FINISH = Tile(16, 256, 4)
"""Of the product."""


@triton.jit
def largest_scale_kernel(
    scales, largest, outer, blocks, outer_stride, block_stride,
    RULE: tl.constexpr, OUTER_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The largest scale of each row (or column), for each of the elements that share it; scales are not negative."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = scales + (m // OUTER_BLOCK)[:, None].to(tl.int64) * outer_stride
    found = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, blocks, COLS):
        k = first + tl.arange(0, COLS)
        inside = (m[:, None] < outer) & (k[None, :] < blocks)
        scale = RULE.kernels.value(tl.load(row + k[None, :].to(tl.int64) * block_stride, mask=inside, other=0))
        # Bits of floats of at least 0 are in the order of the floats, and NaN is above infinity.
        found = tl.maximum(found, tl.where(scale == scale, scale.to(tl.int32, bitcast=True), 0x7FC00000))
    tl.store(largest + m, tl.max(found, axis=1).to(tl.float32, bitcast=True), mask=m < outer)


@triton.jit
def finish_kernel(
    product, left, right, bias, out,
    M, N,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, INVERSE: tl.constexpr, BIAS: tl.constexpr, ALIGNED_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The product times its factors, plus a bias rounded to the dtype of the output, rounded once."""
    N = extent(N, ALIGNED_N)
    program = tl.program_id(0)
    columns = tl.cdiv(N, BLOCK_N)
    m = program // columns * BLOCK_M + tl.arange(0, BLOCK_M)
    n = program % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    a = tl.load(left + m * LEFT, mask=m < M, other=0.0)  # a factor of the whole tensor is read again and again
    b = tl.load(right + n * RIGHT, mask=n < N, other=0.0)
    factor = a[:, None] * b[None, :]
    if INVERSE != 1:
        factor = factor * INVERSE
    where = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    value = tl.load(product + where, mask=inside, other=0.0) * factor
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
    length = contracted_length(codes, fmt, dim, along)
    shape = (outer, length) if along == ROWWISE else (length, outer)
    factor, divisor = scale_inv.reshape(-1), 1.0
    rule, level, strides = None, "none", (0, 0)
    if fmt.scale_rule == "two_level":
        assert amax is not None
        factor, divisor, rule = amax, 6.0 * fmt.block_scale_max, fmt.scaling
    elif fmt.block:
        rule, level = fmt.scaling, "largest"
        factor, strides = _largest(scale_inv, fmt, dim, along, outer)
    if codes.stride(1) == 1 or fmt.packed:
        values = torch.empty(shape, dtype=torch.bfloat16, device=codes.device)
    else:
        values = torch.empty(shape[::-1], dtype=torch.bfloat16, device=codes.device).t()
    decode(codes, fmt, dim, Factors(rule, scale_inv, level, factor, strides, 1.0, 0), values)
    return Values(values if along == ROWWISE else values.t(), None, factor, divisor)


def _largest(scale_inv: Tensor, fmt: Format, dim: int, along: int, outer: int) -> tuple[Tensor, tuple[int, int]]:
    """fp32 [outer], the largest scale along the contracted dim, and the elements from one block's to the next's."""
    grid = at_16_bytes(scale_inv if along == ROWWISE else scale_inv.t())
    step = fmt.scale_block(dim)[0 if along == ROWWISE else 1]
    largest = torch.empty(outer, dtype=torch.float32, device=grid.device)
    _largest_scale(
        triton.cdiv(outer, LARGEST.rows),
        (grid, largest),
        (outer, grid.shape[1], *grid.stride()),
        (fmt.scaling, step, LARGEST.rows, LARGEST.cols),
        LARGEST.warps,
    )
    return largest, (step, 0) if along == ROWWISE else (0, step)


def finish(
    product: Tensor,
    factor_a: Tensor,
    divisor_a: float,
    factor_b: Tensor,
    divisor_b: float,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``product * reference.tensor_factor(a, b)``, plus ``bias`` in the output's dtype, rounded once.

    Args:
        product: fp32 [m, n].
        factor_a, divisor_a, factor_b, divisor_b: of the two ``Values``; factors are fp32, [1] or [m] and [n].
        bias: [n] or None.
    """
    M, N = product.shape
    out = torch.empty(M, N, dtype=out_dtype, device=product.device)
    product = ready(product)
    factors = [at_16_bytes(factor.contiguous()) for factor in (factor_a, factor_b)]
    _finish(
        triton.cdiv(M, FINISH.rows) * triton.cdiv(N, FINISH.cols),
        (product, *factors, product if bias is None else ready(bias), out),
        (M, N),
        (
            factor_a.numel() > 1, factor_b.numel() > 1, 1.0 / (divisor_a * divisor_b), bias is not None, aligned([N]),
            FINISH.rows, FINISH.cols,
        ),
        FINISH.warps,
    )  # fmt: skip
    return out
