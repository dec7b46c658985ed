"""Activations cast in blocks by the kernel that computes them, forward and backward: their value is never written.

As in ``fused.py`` a program works on a tile of the result, here of whole blocks. What it casts is the value rounded to
the dtype of ``x``, the very number that ``fused.py`` would store: the codes are those of a cast of that. The gradient
of a gated activation has two halves, which a block must not straddle.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.activation import out_columns
from minifloat.ops.activation.device import gated_gradients, gated_value, pointwise
from minifloat.ops.activation.fused import bias_gradient, formula, load, partial_sums, program_count, tile_constants
from minifloat.ops.activation.reference import gated
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import BlockCast, empty_block_cast
from minifloat.ops.quantize.blocks import store_block_cast
from minifloat.ops.quantize.device import corner, extent
from minifloat.ops.quantize.produced import block_tile, constants, in_one_half, strides
from minifloat.ops.tiles import Tile


@triton.jit
def activation_blocks_kernel(
    x, row_codes, row_scales, column_codes, column_scales,
    M, N, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    M, N = extent(M, ALIGNED_M), extent(N, ALIGNED_N)
    first_m, first_n = corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if GATED:
        a, b = load(x, m, n, M, N, 2 * N), load(x + N, m, n, M, N, 2 * N)
        values = gated_value(a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        values, _ = pointwise(load(x, m, n, M, N, N), NAME, SLOPE)
        if NAME == "sigmoid":  # which makes 0.5 of the 0 outside
            values = tl.where((m[:, None] < M) & (n[None, :] < N), values, 0.0)
    store_block_cast(
        values.to(x.dtype.element_ty).to(tl.float32), first_m, first_n, M, N,
        row_scales, row_codes, row_scales, column_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST,
    )  # fmt: skip


@triton.jit
def activation_backward_blocks_kernel(
    dy, x, row_codes, row_scales, column_codes, column_scales, partial,
    M, N, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    M, N = extent(M, ALIGNED_M), extent(N, ALIGNED_N)
    first_m, first_n = corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = 2 if GATED else 1
    incoming = load(dy, m, n, M, N, N)  # 0 outside, and so are all gradients
    if GATED:
        a, b = load(x, m, n, M, N, 2 * N), load(x + N, m, n, M, N, 2 * N)
        gradients = gated_gradients(incoming, a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        _, derivative = pointwise(load(x, m, n, M, N, N), NAME, SLOPE)
        gradients = (incoming * derivative,)
    for half in tl.static_range(HALVES):
        values = gradients[half].to(x.dtype.element_ty).to(tl.float32)
        if BIAS:
            sums = (first_m // BLOCK_M).to(tl.int64) * (HALVES * N) + half * N
            tl.store(partial + sums + n, tl.sum(values, axis=0), mask=n < N)
        # Of two halves a tile is whole in N, so that the end of the matrix is no matter to it.
        store_block_cast(
            values, first_m, half * N + first_n, M, HALVES * N,
            row_scales, row_codes, row_scales, column_scales, column_codes, column_scales,
            row_stride_m, row_stride_n, column_stride_m, column_stride_n,
            ROW, COLUMN, K_MAJOR, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST,
        )  # fmt: skip


_forward = Kernel(activation_blocks_kernel)
_backward = Kernel(activation_backward_blocks_kernel)


def cast(
    x: Tensor,
    name: str,
    parameters: Sequence[float],
    format: str,
    rowwise: bool,
    columnwise: bool,
    k_major: bool,
    choice: Tile | None = None,
) -> BlockCast:
    """The operation ``activation_cast_blocks``."""
    x, fmt = ready(x), parse(format)
    shape = x.shape[0], out_columns(name, x.shape[1])
    out = empty_block_cast(x, shape[1], fmt, rowwise, columnwise, k_major)
    choice = block_tile("activation", choice, fmt, rowwise, columnwise, shape, x.device)
    how = *formula(name, parameters), *constants(x, fmt, rowwise, columnwise, k_major), *tile_constants(shape, choice)
    _forward(program_count(shape, choice), (x, *out), (*shape, *strides(out)), how, choice.warps)
    return out


def backward_cast(
    dy: Tensor,
    x: Tensor,
    name: str,
    parameters: Sequence[float],
    format: str,
    rowwise: bool,
    columnwise: bool,
    k_major: bool,
    with_bias: bool,
    choice: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operation ``activation_backward_cast_blocks``."""
    shape, fmt = (x.shape[0], out_columns(name, x.shape[1])), parse(format)
    assert tuple(dy.shape) == shape, (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    out = empty_block_cast(x, x.shape[1], fmt, rowwise, columnwise, k_major)
    choice = block_tile("activation_backward", choice, fmt, rowwise, columnwise, shape, x.device)
    if gated(name):
        assert shape[1] % fmt.block == 0, (shape, format)
        choice = in_one_half(choice, shape[1])
    partial = partial_sums(x, with_bias, choice)
    how = (
        *formula(name, parameters), with_bias, *constants(x, fmt, rowwise, columnwise, k_major),
        *tile_constants(shape, choice),
    )  # fmt: skip
    _backward(program_count(shape, choice), (dy, x, *out, partial), (*shape, *strides(out)), how, choice.warps)
    return *out, bias_gradient(partial, with_bias)
