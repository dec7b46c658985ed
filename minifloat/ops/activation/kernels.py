"""Activations in Triton, forward and backward, each in one pass with what comes next.

A program computes a tile of the result in fp32 and stores it, rounded, or casts it: with a given scale (delayed
scaling), or in blocks, from the value rounded to the dtype of ``x``. The amax comes along; so do a gradient's column
sums, the bias gradient of the linear before: partial sums of tiles, added up by PyTorch, so that runs repeat to the
bit. Values are the reference's within fp32 rounding, those of the relu family equal; nothing is contracted, so a cast
is that of the value.

The same kernels take groups of rows, each with its own amax, scale and blocks, by a table (``grouped/table.py``), times
the rows' probabilities. The rows that are no group's are stored as zeros.
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
from minifloat.ops.grouped.layout import of_groups, of_rows
from minifloat.ops.grouped.table import (
    Outputs,
    as_declared,
    casts_to,
    launch_to,
    record_amaxes,
    scale_of,
    store_tile,
    tile_of,
    values_to,
    wanted,
)
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import FusedCodes, empty_fused_cast
from minifloat.ops.quantize.blocks import (
    VALUE,
    cast_constants,
    fused_tile,
    held,
    held_values,
    scale_strides,
    tile_constants,
)
from minifloat.ops.quantize.device import append, extent, load_tile, pick, pick_wide, tile_places
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
"""Activations cast through shared memory on a GPU, to the same bits; others wait for such a run."""
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
def stored(values, x, target, inside, ELEMENT: tl.constexpr, ROUND: tl.constexpr, COUNT: tl.constexpr):
    """fp32 ``values`` :func:`rounded`; of groups (COUNT 0) 0 outside, as in rows that are no group's."""
    values = rounded(values, x, target, ELEMENT, ROUND)
    if COUNT == 0:
        values = tl.where(inside, values, 0.0)
    return values


@triton.jit
def activation_kernel(
    xs, probabilities, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    COUNT: tl.constexpr,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr, WEIGHTED: tl.constexpr, ALIGNED_M: tl.constexpr, CHAINED: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """COUNT: 0 for groups of rows, 1 for a matrix."""
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N, COUNT)
    M = extent(M, ALIGNED_M)
    if COUNT == 1:
        P = M
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST, COUNT)
    x = pick_wide(xs, order, group, COUNT, ALIGNED_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    values = load_activated(x, m, n, M, N, NAME, SLOPE, LIMIT, OFFSET, GATED)
    if WEIGHTED:
        values *= tl.load(pick(probabilities, order, group, COUNT) + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    inside = (m[:, None] < M) & (n[None, :] < N)
    # Of the 0 outside a sigmoid makes 0.5, and a limit below 0 that limit.
    if COUNT == 0 or (NAME == "sigmoid" and not GATED) or (LIMIT is not None and LIMIT < 0):
        values = tl.where(inside & (group < GROUPS), values, 0.0)
    values = rounded(values, x, row_codes[0], ELEMENT, ROUND)
    if AMAX and (COUNT == 1 or ELEMENT is not None or group < GROUPS):
        record_amaxes(
            row_amaxes, column_amaxes, order, group, tl.abs(values), ROW or ELEMENT is None, COLUMN, COUNT
        )  # fmt: skip
    store_tile(
        held(values, LAYOUTS), scale, scale_inv, order, group, place, first_m, first_n, M, N, P, 0 * N, N,
        row_codes, row_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N, LAYOUTS, COUNT,
        x.dtype.element_ty if CHAINED else None,
    )  # fmt: skip


@triton.jit
def activation_backward_kernel(
    dys, xs, probabilities, partials, levels,
    row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    COUNT: tl.constexpr,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ROUND: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ALIGNED_M: tl.constexpr, CHAINED: tl.constexpr,
    AMAX: tl.constexpr, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    """``partials``: WEIGHTED for each row of a tile, the gradient of its probability; BIAS for each of its columns."""
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N, COUNT)
    M = extent(M, ALIGNED_M)
    if COUNT == 1:
        P = M
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST, COUNT)
    x = pick_wide(xs, order, group, COUNT, ALIGNED_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    inside = ((m < M) & (group < GROUPS))[:, None] & (n[None, :] < N)
    HALVES: tl.constexpr = 2 if GATED else 1
    incoming = load_tile(pick_wide(dys, order, group, COUNT, ALIGNED_N), m, n, M, N)  # 0 outside, and so are gradients
    if GATED:
        a, b = load_tile(x, m, n, M, N, 2 * N), load_tile(x + N, m, n, M, N, 2 * N)
        if WEIGHTED:
            values = gated_value(a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        values, derivative = pointwise(load_tile(x, m, n, M, N), NAME, SLOPE)
    if WEIGHTED:
        products = tl.where(inside, incoming * values, 0.0)
        incoming *= tl.load(pick(probabilities, order, group, COUNT) + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gradients = gated_gradients(incoming, a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        gradients = (incoming * derivative,)
    tiles = ()
    for half in tl.static_range(HALVES if LAYOUTS is not None else 0):
        values = stored(gradients[half], x, row_codes[0], inside, ELEMENT, ROUND, COUNT)
        tiles = append(tiles, held(values, LAYOUTS))  # both halves leave the registers before either is cast
    if WEIGHTED:
        partial = pick(partials, order, group, COUNT) + m.to(tl.int64) * tl.cdiv(N, BLOCK_N) + first_n // BLOCK_N
        tl.store(partial, tl.sum(products, axis=1), mask=m < M)
    for half in tl.static_range(HALVES):
        if LAYOUTS is None:
            tile = stored(gradients[half], x, row_codes[0], inside, ELEMENT, ROUND, COUNT)
        else:
            tile = tiles[half]
        if AMAX or BIAS:
            values = held_values(tile, LAYOUTS)
        if AMAX:
            if half == 0:
                magnitudes = tl.abs(values)
            else:
                magnitudes = tl.maximum(magnitudes, tl.abs(values))  # of a number and NaN the number
        if BIAS:
            sums = (first_m // BLOCK_M).to(tl.int64) * (HALVES * N)
            some = n < N * tl.minimum(M, 1)  # without rows there are no blocks of them
            tl.store(partials[0] + sums + half * N + n, tl.sum(values, axis=0), mask=some)
        store_tile(
            tile, scale, scale_inv, order, group, place, first_m, first_n, M, N, P, half * N, HALVES * N,
            row_codes, row_scales, column_codes, column_scales,
            row_stride_m, row_stride_n, column_stride_m, column_stride_n,
            ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N, LAYOUTS, COUNT,
            x.dtype.element_ty if CHAINED else None,
        )  # fmt: skip
    if AMAX and (COUNT == 1 or ELEMENT is not None or group < GROUPS):
        record_amaxes(row_amaxes, column_amaxes, order, group, magnitudes, ROW or ELEMENT is None, COLUMN, COUNT)


FORWARD = Kernel(activation_kernel, layouts=True)
BACKWARD = Kernel(activation_backward_kernel, layouts=True)


def _launch(
    kernel: Kernel, reads: Sequence[Tensor], out: FusedCodes, shape: Sequence[int], how: tuple[Any, ...],
    with_amax: bool, choice: Tile, shared: Format | None = None, k_major: bool = False, least: int = 0,
) -> None:  # fmt: skip
    """Launches on one matrix; ``how``: NAME to BIAS; ``shared``: a format that is cast through shared memory."""
    row_codes, column_codes, row_scales, column_scales, amax = out
    column_scales = column_scales if column_scales.dim() == 2 else row_scales  # one scale is that of both
    tensors = [(each,) for each in (*reads, row_codes, row_scales, amax, column_codes, column_scales, amax)]
    aligned_m, *sizes = tile_constants(shape, choice, shared, k_major)
    integers = (shape[0],), shape[1], shape[0], 1, *scale_strides(out)
    kernel(
        max(least, choice.count(shape)), [*tensors, reads[0]], integers, (1, *how, aligned_m, False, with_amax, *sizes),
        choice.warps,
    )  # fmt: skip


def forward(
    x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype, with_amax: bool, choice: Tile | None = None
) -> tuple[Tensor, ...]:
    """The operation ``activation_forward``."""
    x = ready(x)
    y = x.new_empty((x.shape[0], out_columns(name, x.shape[1])), dtype=dtype)
    amax = torch.zeros((int(with_amax),), dtype=torch.float32, device=x.device)
    how = *formula(name, parameters), *VALUE, False, False
    choice = choice or tile("activation", x.device)
    _launch(FORWARD, (x, x, x), FusedCodes(y, y, amax, amax, amax), y.shape, how, with_amax, choice)
    return y, amax


def cast(
    x: Tensor, name: str, parameters: Sequence[float], *arguments: Any, choice: Tile | None = None
) -> tuple[Tensor, ...]:
    """The operation ``activation_cast``."""
    scale, format, *orders = arguments
    x, fmt, given = ready(x), parse(format), scale is not None
    shape = x.shape[0], out_columns(name, x.shape[1])
    out = empty_fused_cast(x, shape[1], fmt, *orders)
    choice, shared = fused_tile("activation", choice, x, shape, fmt, orders, name in SHOWN)
    how = *formula(name, parameters), *cast_constants(x, fmt, *orders), not given, False
    # At least one program, even without elements: it stores the scale.
    reads, spread = (x, x, scale if given else x), fmt if shared else None
    _launch(FORWARD, reads, out, shape, how, given, choice, spread, orders[2], int(given))
    return out


def backward(
    dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype, with_amax: bool,
    with_bias: bool, choice: Tile | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The operation ``activation_backward``."""
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    dx = torch.empty_like(x, dtype=dtype)
    amax = torch.zeros((int(with_amax),), dtype=torch.float32, device=x.device)
    choice = choice or tile("activation_backward_bias" if with_bias else "activation_backward", x.device)
    partial = partial_sums(x, with_bias, choice)
    how = *formula(name, parameters), *VALUE, False, False, with_bias
    reads = dy, x, x, partial, x
    _launch(BACKWARD, reads, FusedCodes(dx, dx, amax, amax, amax), dy.shape, how, with_amax, choice)
    return dx, amax, partial.sum(0) if with_bias else partial


def backward_cast(
    dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], *arguments: Any, choice: Tile | None = None
) -> tuple[Tensor, ...]:
    """The operation ``activation_backward_cast``."""
    scale, format, *orders, with_bias = arguments
    shape, fmt, given = (x.shape[0], out_columns(name, x.shape[1])), parse(format), scale is not None
    assert tuple(dy.shape) == shape, (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    out = empty_fused_cast(x, x.shape[1], fmt, *orders)
    if given and with_bias:
        choice = choice or tile("activation_backward_bias", x.device)
    choice, shared = fused_tile("activation_backward", choice, x, shape, fmt, orders, name in SHOWN)
    if gated(name) and not given:
        choice = within_half(choice, fmt, shape[1])
    partial = partial_sums(x, with_bias, choice)
    how = *formula(name, parameters), *cast_constants(x, fmt, *orders), not given or gated(name), False, with_bias
    reads, spread = (dy, x, x, partial, scale if given else x), fmt if shared else None
    _launch(BACKWARD, reads, out, shape, how, given, choice, spread, orders[2], int(given))
    return *out, partial.sum(0) if with_bias else partial


# ---- of groups of rows ----


def forward_groups(
    x: Tensor, probabilities: Tensor | None, offsets: Tensor, scales: Tensor | None,
    name: str, parameters: Sequence[float], with_amax: bool, *how: Any,
) -> list[Tensor]:  # fmt: skip
    """The operation ``grouped_activation``."""
    x, columns = ready(x), out_columns(name, x.shape[1])
    out, outputs = _outputs(x[:, :columns], offsets, name, with_amax, *how)
    choice = out.tile("activation", columns, x.device) if how[0] else tile("activation", x.device)
    tensors = [(x, of_rows(x.shape[1])), wanted(probabilities, of_rows(1), x), wanted(scales, of_groups(1), x)]
    constants = 0, *formula(name, parameters), *out.constants, True, probabilities is not None, False
    launch_to(FORWARD, out, tensors, offsets, x.shape[0], columns, constants, choice)
    return as_declared(outputs, *how[:3])


def backward_groups(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, scales: Tensor | None,
    name: str, parameters: Sequence[float], with_amax: bool, *how: Any,
) -> list[Tensor]:  # fmt: skip
    """The operation ``grouped_activation_backward``."""
    x, dy, (M, columns) = ready(x), ready(dy), dy.shape
    out, outputs = _outputs(x, offsets, name, with_amax, *how)
    if how[0]:
        choice = out.tile("activation_backward", columns, x.device)
        if gated(name) and scales is None:
            choice = within_half(choice, out.format, columns)
    else:
        choice = tile("grouped_activation_backward", x.device)
    # A sum for each tile of a row, added up in an order that the number of tiles fixes. No program has the rows that
    # are no group's.
    tiles = triton.cdiv(columns, choice.cols)
    partial = x.new_zeros((M, tiles) if probabilities is not None else (0,), dtype=torch.float32)
    tensors = [
        (dy, of_rows(columns)), (x, of_rows(x.shape[1])), wanted(probabilities, of_rows(1), x),
        wanted(None if probabilities is None else partial, of_rows(tiles), x), wanted(scales, of_groups(1), x),
    ]  # fmt: skip
    constants = 0, *formula(name, parameters), *out.constants, True, probabilities is not None, False, False
    launch_to(BACKWARD, out, tensors, offsets, M, columns, constants, choice)
    return [*as_declared(outputs, *how[:3]), partial if probabilities is None else partial.sum(1)]


def _outputs(like: Tensor, offsets: Tensor, name: str, with_amax: bool, *how: Any) -> tuple[Outputs, list[Tensor]]:
    """Memory of the size of ``like`` for values and their amaxes, or for casts."""
    if how[0]:
        return casts_to(like, offsets, *how, can_share=name in SHOWN)
    y = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    out, amax = values_to(y, offsets, with_amax)
    return out, [y, amax]


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
