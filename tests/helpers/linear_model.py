"""What operands stand for, in numpy, and the float64 products that a layer's results are held to.

Codes and scales are decoded by ``helpers.oracle``, not by the package, whose mistakes nothing here can repeat. A
rotated operand stays rotated: both operands of its GEMM are, and the contraction over the rotated rows is the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minifloat.formats import IDENTITY, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from tests.helpers import oracle
from tests.helpers.oracle import F32, F64

EPS32 = 2.0**-24
"""Largest relative error of one fp32 rounding."""


def numpy(x: Tensor) -> F32:
    """``x`` as fp32, exactly for the dtypes that are used here."""
    return np.asarray(x.detach().cpu().float().numpy())


def _bytes(x: Tensor) -> oracle.U8:
    return np.asarray(x.detach().cpu().numpy())


def stored_shape(operand: Operand) -> tuple[int, int]:
    """Logical (M, K), M rounded up to whole groups of 16 where the operand is rotated."""
    rows, cols = operand.shape
    return (rows + -rows % 16 if operand.format.transform == "hadamard16" else rows), cols


def code_values(operand: Operand) -> F32:
    """The unscaled values of the codes, [M, K]; the values themselves of an operand in high precision."""
    fmt, codes = operand.format, operand.codes
    if not fmt.quantized:
        return numpy(codes)
    if codes.numel() == 0:
        return np.zeros(stored_shape(operand), np.float32)
    dim: oracle.Dim = -1 if operand.dim == ROWWISE else 0
    found = oracle.unpack(_bytes(codes), dim, stored_shape(operand)[dim]) if fmt.packed else _bytes(codes)
    return (oracle.decode_fp8 if fmt.element in ("e4m3", "e5m2") else oracle.decode_small)(found, fmt.element)


def block_scales(operand: Operand) -> F32:
    """The scale that each element has from its block, [M, K]; ones where there is only one for the tensor."""
    fmt, shape = operand.format, stored_shape(operand)
    if not fmt.block or operand.scale_inv is None:
        return np.ones(shape, np.float32)
    if fmt.scale_rule == "two_level":
        scales = oracle.decode_fp8(_bytes(operand.scale_inv), "e4m3")
    elif fmt.scale_rule == "e8m0":
        scales = oracle.e8m0_value(_bytes(operand.scale_inv))
    else:
        scales = numpy(operand.scale_inv)
    return oracle.spread(scales, oracle.tile_of(-1 if operand.dim == ROWWISE else 0, fmt.block, fmt.tile), shape)


def whole_scale(operand: Operand) -> tuple[F32, float]:
    """The scale over the whole contraction, [1] or one for each index of the other dim, and what it is divided by."""
    fmt = operand.format
    if fmt.scale_rule == "two_level":
        assert operand.amax is not None
        return numpy(operand.amax), 6 * fmt.block_scale_max
    if fmt.block or operand.scale_inv is None:
        return np.ones(1, np.float32), 1.0
    return numpy(operand.scale_inv).reshape(-1), 1.0


def contracted(x: F32, along: int) -> F32:
    """[M, K] with the contracted dim last."""
    return x if along == ROWWISE else np.ascontiguousarray(x.T)


def values(operand: Operand, along: int = ROWWISE) -> F64:
    """What the operand stands for in float64, exact but for one division, contracted dim last."""
    scaled = code_values(operand).astype(np.float64) * block_scales(operand)
    factor, divisor = whole_scale(operand)
    return contracted(scaled, along) * (factor.astype(np.float64)[:, None] / divisor)


class Product(NamedTuple):
    """``exact``: A B^T. ``magnitude``: |A| |B|^T, which bounds rounding errors. ``depth``: elements contracted."""

    exact: F64
    magnitude: F64
    depth: int


def product(a: F64, b: F64, bias: F64 | None = None) -> Product:
    """[m, k] times [n, k] transposed."""
    depth = min(a.shape[1], b.shape[1])  # a packed operand may end with a zero code that the other lacks
    left, right = torch.from_numpy(a[:, :depth]), torch.from_numpy(b[:, :depth]).t()  # torch's threads, not BLAS's own
    exact, magnitude = (left @ right).numpy(), (left.abs() @ right.abs()).numpy()
    return Product(exact, magnitude, depth) if bias is None else Product(exact + bias, magnitude + np.abs(bias), depth)


def rounding(exact: F64, dtype: torch.dtype) -> F64:
    """Half a unit in the last place of ``dtype``, or half its smallest denormal number."""
    info = torch.finfo(dtype)
    return np.maximum(np.abs(exact) * info.eps, info.smallest_normal * info.eps) / 2


def bound(result: Product, dtype: torch.dtype, steps: int | None = None) -> F64:
    """Largest error of a product that is accumulated in fp32 and rounded to ``dtype``.

    ``steps`` roundings to fp32 on the way of a product to the result each lose up to 2^-24 of a partial sum, none of
    which is larger than ``magnitude``: one for each of the ``depth`` additions, in whatever order, and at most eight
    more for two scales, their product, the division of NVFP4's second level, its use, and the bias. (1 + eps)^steps is
    below 1 + 1.01 steps eps here. The last rounding is of the exact result within that error.
    """
    steps = result.depth + 8 if steps is None else steps
    accumulated = 1.01 * steps * EPS32 * result.magnitude
    return accumulated + 1.01 * rounding(np.abs(result.exact) + accumulated, dtype)


def assert_within(y: Tensor, result: Product, limit: F64, what: str) -> None:
    """Each element of ``y`` is at most ``limit`` from the exact result."""
    error = np.abs(y.detach().cpu().double().numpy() - result.exact)
    worst = (error / limit).max(initial=0.0)
    assert error.shape == y.shape and (error <= limit).all(), f"{what}: {worst:.3g} times the bound"


def operands_of(x: Tensor, quantizer: Quantizer, scale: Tensor | None) -> Quantized:
    """``x`` quantized along both dims, with a given scale where delayed scaling has one."""
    given = [fmt.scale_rule == "given" for fmt, _ in quantizer.casts]
    levels = [scale if wants else amax for wants, amax in zip(given, quantizer.amax(x), strict=True)]
    return quantizer.cast(x, tuple(levels))


def operand_values(operand: Operand, along: int, other: Operand, dtype: torch.dtype) -> F64:
    """What a GEMM multiplies: exact values, or, beside an operand in high precision, values rounded to ``dtype``."""
    if operand.format.quantized and other.format.quantized:
        return values(operand, along)
    return contracted(numpy(operand.dequantize(dtype)), along).astype(np.float64)


def gemm_model(a: Quantized, b: Quantized, dims: tuple[int, int], dtype: torch.dtype, bias: Any = None) -> Product:
    """The float64 product of two values along the dims that a GEMM contracts."""
    left, right = a.along(dims[0]), b.along(dims[1])
    x, y = operand_values(left, dims[0], right, dtype), operand_values(right, dims[1], left, dtype)
    return product(x, y, bias)


def as_is(x: Tensor) -> Quantized:
    """High precision."""
    return Quantized(*[Operand(x, None, None, IDENTITY, ROWWISE, (x.shape[0], x.shape[1]), x.dtype)] * 2)
