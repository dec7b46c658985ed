"""Activations in Triton, forward and backward, each in one pass with what comes next.

A program works on a tile of the activation's result: it reads that tile of ``x``, or of both halves where two are
multiplied, and of ``dy``, and computes in fp32. The results it either stores, rounded, or casts with a scale that is
given (delayed scaling): along the rows, along the columns (transposed in memory), or both. The amax comes along; so do
the column sums of a gradient, the bias gradient of the linear before: partial sums of a tile in an order that the tile
fixes, added up by PyTorch, so that runs repeat to the bit.

The fp32 values are the reference's within rounding (``test_triton_activation.py`` derives the bound); those of the relu
family are equal. Value and cast share their functions and nothing is contracted, so a cast is that of the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import parse
from minifloat.formats.device import reciprocal
from minifloat.ops.activation import out_columns
from minifloat.ops.activation.device import gated_gradients, gated_value, pointwise
from minifloat.ops.activation.reference import CLAMPED, GATES, empty_codes, gated
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize.device import (
    corner,
    extent,
    record_max,
    single_bytes,
    store_codes,
)
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

TILES = {
    "activation": Tile(16, 256, 8),
    "activation_columnwise": Tile(64, 128, 8),
    "activation_backward": Tile(4, 512, 4),
    "activation_backward_bias": Tile(64, 64, 8),
    "activation_backward_columnwise": Tile(32, 64, 4),
}
"""Rows, columns of the result, and warps. A bias gradient's order of sums is that of its tile."""

SWISH_SLOPES = {"silu": 1.0, "qgelu": 1.702}


@triton.jit
def load(source, m, n, M, N, width):
    """A tile of N columns of a matrix that is ``width`` wide, in fp32, 0 outside."""
    inside = (m[:, None] < M) & (n[None, :] < N)
    return tl.load(source + m[:, None].to(tl.int64) * width + n[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store(target, values, m, n, M, N, width):
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(target + m[:, None].to(tl.int64) * width + n[None, :], values, mask=inside)


@triton.jit
def store_cast(
    row_codes, column_codes, values, scale, m, n, M, N, width, first,
    ROW: tl.constexpr, COLUMN: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Codes of a tile of the N columns that begin at ``first`` of a matrix that is ``width`` wide."""
    codes = ELEMENT.kernels.encode(values * scale, ELEMENT)
    if COLUMN:
        codes = single_bytes(codes, M)
    if ROW:
        store(row_codes + first, codes, m, n, M, N, width)
    if COLUMN:
        store_codes(column_codes + first.to(tl.int64) * M, codes, m, n, M, N, True)


@triton.jit
def record_amax(target, magnitudes):
    """Raises ``target`` to the largest of a tile; of a number and NaN the maximum is the number."""
    record_max(target, tl.maximum(tl.max(tl.max(magnitudes, axis=1), axis=0), 0.0))


@triton.jit
def activation_kernel(
    x, target, column_codes, scale, scale_inv, amax, M, N,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    VALUE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, ELEMENT: tl.constexpr, AMAX: tl.constexpr,
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
    if VALUE:
        rounded = values.to(target.dtype.element_ty)
        store(target, rounded, m, n, M, N, N)
        values = rounded.to(tl.float32)
    else:
        level = tl.load(scale)
        store_cast(target, column_codes, values, level, m, n, M, N, N, 0 * N, ROW, COLUMN, ELEMENT)
        if tl.program_id(0) == 0:
            tl.store(scale_inv, reciprocal(level))
    if AMAX:
        if NAME == "sigmoid" and not GATED:  # which makes 0.5 of the 0 outside
            values = tl.where((m[:, None] < M) & (n[None, :] < N), values, 0.0)
        record_amax(amax, tl.abs(values))


@triton.jit
def activation_backward_kernel(
    dy, x, target, column_codes, scale, scale_inv, amax, partial, M, N,
    NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, GATED: tl.constexpr,
    VALUE: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, ELEMENT: tl.constexpr, AMAX: tl.constexpr,
    BIAS: tl.constexpr,
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
    magnitudes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for half in tl.static_range(HALVES):
        values, first = gradients[half], half * N
        if VALUE:
            rounded = values.to(target.dtype.element_ty)
            store(target + first, rounded, m, n, M, N, HALVES * N)
            values = rounded.to(tl.float32)
        else:
            if GATED:  # the cast reads what the dtype of x holds of it
                values = values.to(x.dtype.element_ty).to(tl.float32)
            level = tl.load(scale)
            store_cast(target, column_codes, values, level, m, n, M, N, HALVES * N, first, ROW, COLUMN, ELEMENT)
        if AMAX:
            magnitudes = tl.maximum(magnitudes, tl.abs(values))  # of a number and NaN the number
        if BIAS:
            block = (tl.program_id(0) // tl.cdiv(N, BLOCK_N)).to(tl.int64)
            present = n < N * tl.minimum(M, 1)  # without rows there are no blocks of them
            tl.store(partial + block * (HALVES * N) + first + n, tl.sum(values, axis=0), mask=present)
    if AMAX:
        record_amax(amax, magnitudes)
    if not VALUE and tl.program_id(0) == 0:
        tl.store(scale_inv, reciprocal(tl.load(scale)))


_forward = Kernel(activation_kernel)
_backward = Kernel(activation_backward_kernel)


def forward(
    x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype, with_amax: bool, choice: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """The operation ``activation_forward``."""
    x = ready(x)
    y = x.new_empty((x.shape[0], out_columns(name, x.shape[1])), dtype=dtype)
    amax = _amax(x, with_amax)
    choice = choice or TILES["activation"]
    constants = (*formula(name, parameters), True, False, False, "", with_amax, *tile_constants(y.shape, choice))
    _forward(program_count(y.shape, choice), (x, y, y, x, x, amax), y.shape, constants, choice.warps)
    return y, amax


def cast(
    x: Tensor,
    name: str,
    parameters: Sequence[float],
    scale: Tensor,
    format: str,
    rowwise: bool,
    columnwise: bool,
    choice: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operation ``activation_cast``."""
    x = ready(x)
    shape = x.shape[0], out_columns(name, x.shape[1])
    row, column = empty_codes(x, *shape, rowwise, columnwise)
    scale_inv, amax = torch.empty_like(scale), _amax(x, True)
    choice = choice or TILES["activation_columnwise" if columnwise else "activation"]
    constants = (
        *formula(name, parameters), False, rowwise, columnwise, parse(format).encoding, True,
        *tile_constants(shape, choice),
    )  # fmt: skip
    # At least one program, even without elements: it stores the scale.
    programs = max(1, program_count(shape, choice))
    _forward(programs, (x, row, column, scale, scale_inv, amax), shape, constants, choice.warps)
    return row, column, scale_inv, amax


def backward(
    dy: Tensor,
    x: Tensor,
    name: str,
    parameters: Sequence[float],
    dtype: torch.dtype,
    with_amax: bool,
    with_bias: bool,
    choice: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operation ``activation_backward``."""
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    dx = torch.empty_like(x, dtype=dtype)
    choice = choice or TILES["activation_backward_bias" if with_bias else "activation_backward"]
    amax, partial = _amax(x, with_amax), partial_sums(x, with_bias, choice)
    constants = (
        *formula(name, parameters), True, False, False, "", with_amax, with_bias, *tile_constants(dy.shape, choice)
    )  # fmt: skip
    tensors = dy, x, dx, dx, x, x, amax, partial
    _backward(program_count(dy.shape, choice), tensors, dy.shape, constants, choice.warps)
    return dx, amax, bias_gradient(partial, with_bias)


def backward_cast(
    dy: Tensor,
    x: Tensor,
    name: str,
    parameters: Sequence[float],
    scale: Tensor,
    format: str,
    rowwise: bool,
    columnwise: bool,
    with_bias: bool,
    choice: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operation ``activation_backward_cast``."""
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    dy, x = ready(dy), ready(x)
    row, column = empty_codes(x, x.shape[0], x.shape[1], rowwise, columnwise)
    scale_inv, amax = torch.empty_like(scale), _amax(x, True)
    kind = "_bias" if with_bias else "_columnwise" if columnwise else ""
    choice = choice or TILES["activation_backward" + kind]
    partial = partial_sums(x, with_bias, choice)
    constants = (
        *formula(name, parameters), False, rowwise, columnwise, parse(format).encoding, True, with_bias,
        *tile_constants(dy.shape, choice),
    )  # fmt: skip
    tensors = dy, x, row, column, scale, scale_inv, amax, partial
    _backward(max(1, program_count(dy.shape, choice)), tensors, dy.shape, constants, choice.warps)
    return row, column, scale_inv, amax, bias_gradient(partial, with_bias)


def formula(name: str, parameters: Sequence[float]) -> tuple[str, float, float | None, float, bool]:
    """NAME, SLOPE, LIMIT, OFFSET and GATED of the kernels."""
    if name == CLAMPED:
        limit, slope, offset = parameters
        return "swish", slope, limit, offset, True
    gate = GATES.get(name, name)
    if gate in SWISH_SLOPES:
        return "swish", SWISH_SLOPES[gate], None, 0.0, gated(name)
    return gate, 0.0, None, 0.0, gated(name)


def tile_constants(shape: Sequence[int], choice: Tile) -> tuple[bool, bool, int, int]:
    """ALIGNED_M, ALIGNED_N, BLOCK_M and BLOCK_N of the kernels."""
    return aligned(shape[:1]), aligned(shape[1:]), choice.rows, choice.cols


def program_count(shape: Sequence[int], choice: Tile) -> int:
    return triton.cdiv(shape[0], choice.rows) * triton.cdiv(shape[1], choice.cols)


def _amax(like: Tensor, wanted: bool) -> Tensor:
    """Zero, for kernels to raise."""
    return like.new_zeros(1 if wanted else 0, dtype=torch.float32)


def partial_sums(x: Tensor, wanted: bool, choice: Tile) -> Tensor:
    """Sums of the columns of ``x`` over the rows of each tile."""
    return x.new_empty((triton.cdiv(x.shape[0], choice.rows) if wanted else 0, x.shape[1]), dtype=torch.float32)


def bias_gradient(partial: Tensor, wanted: bool) -> Tensor:
    return partial.sum(0) if wanted else partial.new_empty(0)
