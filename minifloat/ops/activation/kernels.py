"""Activations in Triton, forward and backward, each in one pass with what comes next.

A program computes a tile of the result in fp32 and stores it, rounded, or casts it: with a given scale (delayed
scaling), or in blocks, from the value rounded to the dtype of ``x``. The amax comes along; so do a gradient's column
sums, the bias gradient of the linear before: partial sums of tiles, added up by PyTorch, so that runs repeat to the
bit. Values are the reference's within fp32 rounding, those of the relu family equal; nothing is contracted, so a cast
is that of the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import Format, parse
from minifloat.ops.activation import CLAMPED, GATES, gated, out_columns
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import empty_fused_cast
from minifloat.ops.quantize.blocks import (
    VALUE,
    cast_constants,
    fused_tile,
    held,
    held_values,
    record_amax,
    scale_strides,
    store_result,
    tile_constants,
)
from minifloat.ops.quantize.device import append, corner, extent, load_tile, tile_places
from minifloat.ops.tiles import Tile, tile


@triton.jit
def logistic(x):
    """``sigmoid(x)`` and its derivative: with f = exp(-abs(x)) they are 1 / (1 + f) or f / (1 + f), and f / (1 + f)^2.

    ``exp2`` and ``rsqrt`` are one instruction each, good to 2 ulp; ``exp`` takes four and a division nine.
    """
    f = tl.exp2(-1.4426950408889634 * tl.abs(x))
    root = tl.rsqrt(1.0 + f)
    r = root * root
    return tl.where(x < 0, f * r, r), f * r * r


@triton.jit
def larger(x, bound):
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, bound):
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pointwise(x, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """A function of one number and its derivative; ``"swish"`` is ``x * sigmoid(SLOPE * x)``."""
    if NAME == "relu":
        return larger(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif NAME == "srelu":
        positive = larger(x, 0.0)
        return positive * positive, 2 * positive
    elif NAME == "sigmoid":
        return logistic(x)
    elif NAME == "gelu":
        s, slope = logistic(x * (2 * 0.79788456 + 2 * 0.03567741 * x * x))
        # Beyond 12 the slope is 0, but x * x may overflow, and 0 * inf is not 0.
        near = smaller(larger(x, -12.0), 12.0)
        return x * s, s + near * slope * (2 * 0.79788456 + 6 * 0.03567741 * near * near)
    else:
        tl.static_assert(NAME == "swish")
        s, slope = logistic(SLOPE * x)
        return x * s, s + x * slope * SLOPE  # in this order: SLOPE * x may overflow, and the slope is 0 there


@triton.jit
def halves(a, b, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """The gate's argument and what its value multiplies; ``LIMIT`` is None where nothing clamps."""
    if LIMIT is not None:
        a = smaller(a, LIMIT)
        b = smaller(larger(b, -LIMIT), LIMIT) + OFFSET
    return a, b


@triton.jit
def gated_value(a, b, NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """The product of two halves of a row, the first through the gate's function."""
    inner, factor = halves(a, b, LIMIT, OFFSET)
    value, _ = pointwise(inner, NAME, SLOPE)
    return value * factor


@triton.jit
def gated_gradients(dy, a, b, NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Gradients with respect to both halves; 0 where they were clamped."""
    inner, factor = halves(a, b, LIMIT, OFFSET)
    value, derivative = pointwise(inner, NAME, SLOPE)
    da, db = dy * factor * derivative, dy * value
    if LIMIT is not None:
        da = tl.where(a > LIMIT, 0.0, da)
        db = tl.where(tl.abs(b) > LIMIT, 0.0, db)
    return da, db


SHOWN = ("swiglu",)
"""What has been cast through shared memory on a GPU, to the same bits; others wait for such a run."""
SWISH_SLOPES = {"silu": 1.0, "qgelu": 1.702}


@triton.jit
def load_activated(
    x, m, n, M, N,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A tile of the activation's result, [M, N], in fp32; outside it is that of zeros."""
    if GATED:
        a, b = load_tile(x, m, n, M, N, 2 * N), load_tile(x + N, m, n, M, N, 2 * N)
        values = gated_value(a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        values, _ = pointwise(load_tile(x, m, n, M, N), NAME, SLOPE)
    return values


@triton.jit
def rounded(values, x, target, ELEMENT: tl.constexpr, ROUND: tl.constexpr):
    """fp32 ``values`` as they are stored, where no ``ELEMENT`` is cast to, or as a cast reads them."""
    if ELEMENT is None:
        values = values.to(target.dtype.element_ty).to(tl.float32)
    elif ROUND:
        values = values.to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def activation_kernel(
    x, scale, row_codes, column_codes, row_scales, column_scales, amax,
    M, N, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    M, N = extent(M, ALIGNED_M), extent(N, ALIGNED_N)
    first_m, first_n = corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    values = load_activated(x, m, n, M, N, NAME, SLOPE, LIMIT, OFFSET, GATED)
    # Of the 0 outside a sigmoid makes 0.5, and a limit below 0 that limit.
    if (NAME == "sigmoid" and not GATED) or (LIMIT is not None and LIMIT < 0):
        values = tl.where((m[:, None] < M) & (n[None, :] < N), values, 0.0)
    values = rounded(values, x, row_codes, ELEMENT, ROUND)
    if AMAX:
        record_amax(amax, tl.abs(values))
    store_result(
        held(values, LAYOUTS), first_m, first_n, M, N, 0 * N, N,
        scale, row_codes, column_codes, row_scales, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS,
    )  # fmt: skip


@triton.jit
def activation_backward_kernel(
    dy, x, scale, row_codes, column_codes, row_scales, column_scales, amax, partial,
    M, N, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr, AMAX: tl.constexpr, BIAS: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    M, N = extent(M, ALIGNED_M), extent(N, ALIGNED_N)
    first_m, first_n = corner(tl.program_id(0), N, BLOCK_M, BLOCK_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    HALVES: tl.constexpr = 2 if GATED else 1
    incoming = load_tile(dy, m, n, M, N)  # 0 outside, and so are all gradients
    if GATED:
        a, b = load_tile(x, m, n, M, N, 2 * N), load_tile(x + N, m, n, M, N, 2 * N)
        gradients = gated_gradients(incoming, a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        _, derivative = pointwise(load_tile(x, m, n, M, N), NAME, SLOPE)
        gradients = (incoming * derivative,)
    if LAYOUTS is not None:  # both halves leave the registers before either is cast
        tiles = ()
        for half in tl.static_range(HALVES):
            tiles = append(tiles, held(rounded(gradients[half], x, row_codes, ELEMENT, ROUND), LAYOUTS))
    for half in tl.static_range(HALVES):
        if LAYOUTS is None:
            tile = rounded(gradients[half], x, row_codes, ELEMENT, ROUND)
        else:
            tile = tiles[half]
        values = held_values(tile, LAYOUTS)
        if AMAX:
            if half == 0:
                magnitudes = tl.abs(values)
            else:
                magnitudes = tl.maximum(magnitudes, tl.abs(values))  # of a number and NaN the number
        if BIAS:
            sums = (first_m // BLOCK_M).to(tl.int64) * (HALVES * N)
            present = n < N * tl.minimum(M, 1)  # without rows there are no blocks of them
            tl.store(partial + sums + half * N + n, tl.sum(values, axis=0), mask=present)
        store_result(
            tile, first_m, first_n, M, N, half * N, HALVES * N,
            scale, row_codes, column_codes, row_scales, column_scales,
            row_stride_m, row_stride_n, column_stride_m, column_stride_n,
            ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS,
        )  # fmt: skip
    if AMAX:
        record_amax(amax, magnitudes)


FORWARD = Kernel(activation_kernel, layouts=True)
BACKWARD = Kernel(activation_backward_kernel, layouts=True)


def forward(
    x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype, with_amax: bool, choice: Tile | None = None
) -> tuple[Tensor, ...]:
    """The operation ``activation_forward``."""
    x = ready(x)
    y = x.new_empty((x.shape[0], out_columns(name, x.shape[1])), dtype=dtype)
    amax = x.new_zeros(1 if with_amax else 0, dtype=torch.float32)
    choice = choice or tile("activation", x.device)
    how = *formula(name, parameters), *VALUE, False, with_amax, *tile_constants(y.shape, choice)
    FORWARD(choice.count(y.shape), (x, x, y, y, x, x, amax), (*y.shape, 0, 0, 0, 0), how, choice.warps)
    return y, amax


def cast(
    x: Tensor, name: str, parameters: Sequence[float], *arguments: Any, choice: Tile | None = None
) -> tuple[Tensor, ...]:
    """The operation ``activation_cast``."""
    scale, format, *wanted = arguments
    x, fmt, given = ready(x), parse(format), scale is not None
    shape = x.shape[0], out_columns(name, x.shape[1])
    out = empty_fused_cast(x, shape[1], fmt, *wanted)
    choice, shared = fused_tile("activation", choice, x, shape, fmt, wanted, name in SHOWN)
    how = (
        *formula(name, parameters), *cast_constants(x, fmt, *wanted), not given, given,
        *tile_constants(shape, choice, fmt if shared else None, wanted[2]),
    )  # fmt: skip
    # At least one program, even without elements: it stores the scale.
    programs = max(int(given), choice.count(shape))
    FORWARD(programs, (x, x if scale is None else scale, *out), (*shape, *scale_strides(out)), how, choice.warps)
    return out


def backward(
    dy: Tensor,
    x: Tensor,
    name: str,
    parameters: Sequence[float],
    dtype: torch.dtype,
    with_amax: bool,
    with_bias: bool,
    choice: Tile | None = None,
) -> tuple[Tensor, ...]:
    """The operation ``activation_backward``."""
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    dx = torch.empty_like(x, dtype=dtype)
    amax = x.new_zeros(1 if with_amax else 0, dtype=torch.float32)
    choice = choice or tile("activation_backward_bias" if with_bias else "activation_backward", x.device)
    partial = partial_sums(x, with_bias, choice)
    how = (*formula(name, parameters), *VALUE, False, with_amax, with_bias, *tile_constants(dy.shape, choice))
    tensors = dy, x, x, dx, dx, x, x, amax, partial
    BACKWARD(choice.count(dy.shape), tensors, (*dy.shape, 0, 0, 0, 0), how, choice.warps)
    return dx, amax, partial.sum(0) if with_bias else partial


def backward_cast(
    dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], *arguments: Any, choice: Tile | None = None
) -> tuple[Tensor, ...]:
    """The operation ``activation_backward_cast``."""
    scale, format, *wanted, with_bias = arguments
    shape, fmt, given = (x.shape[0], out_columns(name, x.shape[1])), parse(format), scale is not None
    assert tuple(dy.shape) == shape, (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    out = empty_fused_cast(x, x.shape[1], fmt, *wanted)
    if given and with_bias:
        choice = choice or tile("activation_backward_bias", x.device)
    choice, shared = fused_tile("activation_backward", choice, x, shape, fmt, wanted, name in SHOWN)
    if gated(name) and not given:
        choice = within_half(choice, fmt, shape[1])
    partial = partial_sums(x, with_bias, choice)
    how = (
        *formula(name, parameters), *cast_constants(x, fmt, *wanted), not given or gated(name), given, with_bias,
        *tile_constants(shape, choice, fmt if shared else None, wanted[2]),
    )  # fmt: skip
    tensors = dy, x, x if scale is None else scale, *out, partial
    programs = max(int(given), choice.count(shape))
    BACKWARD(programs, tensors, (*shape, *scale_strides(out)), how, choice.warps)
    return *out, partial.sum(0) if with_bias else partial


def formula(name: str, parameters: Sequence[float]) -> tuple[str, float, float | None, float, bool]:
    """NAME, SLOPE, LIMIT, OFFSET and GATED of the kernels."""
    if name == CLAMPED:
        limit, slope, offset = parameters
        return "swish", slope, limit, offset, True
    gate = GATES.get(name, name)
    if gate in SWISH_SLOPES:
        return "swish", SWISH_SLOPES[gate], None, 0.0, gated(name)
    return gate, 0.0, None, 0.0, gated(name)


def within_half(choice: Tile, fmt: Format, columns: int) -> Tile:
    """``choice`` such that none of its tiles overlaps the end of a half of ``columns``, which must be whole blocks."""
    assert columns % fmt.block == 0, (columns, fmt)
    cols = choice.cols
    while columns % cols:
        cols //= 2
    return choice._replace(cols=cols, warps=max(choice.warps * cols // choice.cols, 1))


def partial_sums(x: Tensor, wanted: bool, choice: Tile) -> Tensor:
    """Sums of the columns of ``x`` over the rows of each tile; [0] if they are not wanted."""
    shape = (triton.cdiv(x.shape[0], choice.rows), x.shape[1]) if wanted else (0,)
    return x.new_empty(shape, dtype=torch.float32)
