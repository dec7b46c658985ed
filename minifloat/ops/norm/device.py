"""What the norm kernels share, in Triton: the statistics of rows, and the norm itself."""

from __future__ import annotations

import triton
import triton.language as tl

from minifloat.ops.quantize.device import load_tile


@triton.jit
def load_input(x, residual, m, k, M, K, RESIDUAL: tl.constexpr):
    """A tile of the norm's input in fp32: ``x``, or ``x + residual`` rounded to the dtype of ``x``."""
    values = load_tile(x, m, k, M, K)
    if RESIDUAL:
        values = (values + load_tile(residual, m, k, M, K)).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def row_statistics(
    x, residual, m, M, K,
    EPS: tl.constexpr, CENTERED: tl.constexpr, RESIDUAL: tl.constexpr,
    ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean (0 unless ``CENTERED``) and rsigma of the rows ``m``: the only place where rows are summed.

    A row of one chunk is read once: the compiler sees that later loads are the same.
    """
    chunks = 1 if ONE_CHUNK else tl.cdiv(K, BLOCK)
    size = tl.full([ROWS], 0, tl.float32) + K
    mean = tl.zeros([ROWS], tl.float32)
    if CENTERED:
        sums = tl.zeros([ROWS, BLOCK], tl.float32)
        for chunk in range(chunks):
            k = chunk * BLOCK + tl.arange(0, BLOCK)
            sums += load_input(x, residual, m, k, M, K, RESIDUAL)
        mean = tl.div_rn(tl.sum(sums, axis=1), size)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in range(chunks):
        k = chunk * BLOCK + tl.arange(0, BLOCK)
        values = load_input(x, residual, m, k, M, K, RESIDUAL)
        if CENTERED:
            values = tl.where(k[None, :] < K, values - mean[:, None], 0.0)
        squares += values * values
    deviation = tl.sqrt_rn(tl.div_rn(tl.sum(squares, axis=1), size) + EPS)
    return mean, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), deviation)


@triton.jit
def load_scale(gamma, k, K, ZERO_CENTERED: tl.constexpr):
    """What the columns ``k`` are multiplied by, in fp32: gamma or ``1 + gamma``."""
    scale = tl.load(gamma + k, mask=k < K, other=0.0).to(tl.float32)
    return scale + 1.0 if ZERO_CENTERED else scale


@triton.jit
def normalize(
    values, mean, rsigma, gamma, beta, k, K,
    CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """The norm of a tile in fp32, rounded after each operation."""
    if CENTERED:
        values = values - mean[:, None]
    y = values * rsigma[:, None] * load_scale(gamma, k, K, ZERO_CENTERED)[None, :]
    if HAS_BETA:
        y = y + tl.load(beta + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    return y
