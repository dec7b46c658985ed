"""Activations of groups of rows in Triton, forward and backward: times the rows' probabilities, and cast by group.

As in ``ops/activation/kernels.py`` a program computes a tile in fp32, rounds it to the dtype of its input, and stores
or casts it (``table.py``). The rows that are no group's are stored as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.activation import gated, out_columns
from minifloat.ops.activation.kernels import (
    SHOWN,
    formula,
    gated_gradients,
    gated_value,
    load_activated,
    pointwise,
    within_half,
)
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
from minifloat.ops.quantize.blocks import held
from minifloat.ops.quantize.device import append, extent, load_tile, pick, pick_wide, tile_places
from minifloat.ops.tiles import tile


@triton.jit
def grouped_activation_kernel(
    xs, probabilities, levels, row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    WEIGHTED: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N)
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST)
    x = pick_wide(xs, order, group, 0, ALIGNED_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    values = load_activated(x, m, n, M, N, NAME, SLOPE, LIMIT, OFFSET, GATED)
    if WEIGHTED:
        values *= tl.load(pick(probabilities, order, group, 0) + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    inside = (m[:, None] < M) & (n[None, :] < N)
    values = tl.where(inside & (group < GROUPS), values.to(xs[0].dtype.element_ty).to(tl.float32), 0.0)
    if AMAX and (ELEMENT is not None or group < GROUPS):
        record_amaxes(row_amaxes, column_amaxes, order, group, tl.abs(values), ROW or ELEMENT is None, COLUMN)
    store_tile(
        held(values, LAYOUTS), scale, scale_inv, order, group, place, first_m, first_n, M, N, P, 0 * N, N,
        row_codes, row_scales, column_codes, column_scales,
        row_stride_m, row_stride_n, column_stride_m, column_stride_n,
        ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N, LAYOUTS,
    )  # fmt: skip


@triton.jit
def grouped_activation_backward_kernel(
    dys, xs, probabilities, partials, levels,
    row_codes, row_scales, row_amaxes, column_codes, column_scales, column_amaxes,
    order, Ms, N, P, GROUPS, row_stride_m, row_stride_n, column_stride_m, column_stride_n,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    WEIGHTED: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LAYOUTS: tl.constexpr,
):  # fmt: skip
    N = extent(N, ALIGNED_N)
    group, M, place, first_m, first_n = tile_of(order, Ms, N, BLOCK_M, BLOCK_N)
    scale, scale_inv = scale_of(levels, order, group, BLOCK, ELEMENT, MAX, RULE, EPSILON, LARGEST)
    x = pick_wide(xs, order, group, 0, ALIGNED_N)
    m, n = tile_places(first_m, first_n, BLOCK_M, BLOCK_N, LAYOUTS)
    present = (m < M) & (group < GROUPS)
    HALVES: tl.constexpr = 2 if GATED else 1
    incoming = load_tile(pick_wide(dys, order, group, 0, ALIGNED_N), m, n, M, N)
    if GATED:
        a, b = load_tile(x, m, n, M, N, 2 * N), load_tile(x + N, m, n, M, N, 2 * N)
        if WEIGHTED:
            values = gated_value(a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        a = load_tile(x, m, n, M, N)
        values, derivative = pointwise(a, NAME, SLOPE)
    if WEIGHTED:
        products = tl.where(present[:, None] & (n[None, :] < N), incoming * values, 0.0)
        incoming *= tl.load(pick(probabilities, order, group, 0) + m, mask=m < M, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gradients = gated_gradients(incoming, a, b, NAME, SLOPE, LIMIT, OFFSET)
    else:
        gradients = (incoming * derivative,)
    inside = present[:, None] & (n[None, :] < N)
    tiles = ()
    for half in tl.static_range(HALVES):
        values = tl.where(inside, gradients[half].to(xs[0].dtype.element_ty).to(tl.float32), 0.0)
        if AMAX and (ELEMENT is not None or group < GROUPS):
            record_amaxes(row_amaxes, column_amaxes, order, group, tl.abs(values), ROW or ELEMENT is None, COLUMN)
        tiles = append(tiles, held(values, LAYOUTS))  # both halves leave the registers before either is cast
    if WEIGHTED:
        columns = tl.cdiv(N, BLOCK_N)
        partial = pick(partials, order, group, 0) + m.to(tl.int64) * columns + first_n // BLOCK_N
        tl.store(partial, tl.sum(products, axis=1), mask=m < M)
    for half in tl.static_range(HALVES):
        store_tile(
            tiles[half], scale, scale_inv, order, group, place, first_m, first_n, M, N, P, half * N, HALVES * N,
            row_codes, row_scales, column_codes, column_scales,
            row_stride_m, row_stride_n, column_stride_m, column_stride_n,
            ROW, COLUMN, K_MAJOR, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, ALIGNED_N, LAYOUTS,
        )  # fmt: skip


FORWARD = Kernel(grouped_activation_kernel, layouts=True)
BACKWARD = Kernel(grouped_activation_backward_kernel, layouts=True)


def forward(
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    scales: Tensor | None,
    name: str,
    parameters: Sequence[float],
    with_amax: bool,
    *how: Any,
) -> list[Tensor]:
    """``grouped_activation``."""
    x, columns = ready(x), out_columns(name, x.shape[1])
    out, made = _outputs(x[:, :columns], offsets, name, with_amax, *how)
    choice = out.tile("activation", columns, x.device) if how[0] else tile("activation", x.device)
    tensors = [(x, of_rows(x.shape[1])), wanted(probabilities, of_rows(1), x), wanted(scales, of_groups(1), x)]
    constants = *formula(name, parameters), *out.constants, probabilities is not None
    launch_to(FORWARD, out, tensors, offsets, x.shape[0], columns, constants, choice)
    return as_declared(made, *how)


def backward(
    dy: Tensor,
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    scales: Tensor | None,
    name: str,
    parameters: Sequence[float],
    with_amax: bool,
    *how: Any,
) -> list[Tensor]:
    """``grouped_activation_backward``."""
    x, dy, (M, columns) = ready(x), ready(dy), dy.shape
    out, made = _outputs(x, offsets, name, with_amax, *how)
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
    constants = *formula(name, parameters), *out.constants, probabilities is not None
    launch_to(BACKWARD, out, tensors, offsets, M, columns, constants, choice)
    return [*as_declared(made, *how), partial if probabilities is None else partial.sum(1)]


def _outputs(like: Tensor, offsets: Tensor, name: str, with_amax: bool, *how: Any) -> tuple[Outputs, list[Tensor]]:
    """Memory of the size of ``like`` for values and their amaxes, or for casts."""
    if how[0]:
        return casts_to(like, offsets, *how, can_share=name in SHOWN)
    y = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    out, amax = values_to(y, offsets, with_amax)
    return out, [y, amax]
