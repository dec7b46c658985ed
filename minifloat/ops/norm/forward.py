"""The norm's forward in Triton: each row is read once, its statistics are written, and its norm unless it is cast."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm import check
from minifloat.ops.quantize.device import extent, load_tile, record_max

# ---- how a matrix is split: one configuration for each width, as the order of a row's sums depends on it ----


class NormTile(NamedTuple):
    """What one program holds at a time.

    Args:
        rows, block: of the tile; a row wider than ``block`` is read in chunks of it.
        one_chunk: no row is wider, so that the tile stays in registers.
        warps: of 32 threads.
    """

    rows: int
    block: int
    one_chunk: bool
    warps: int


WIDEST_BLOCK = 16384
CHUNK = 4096  # of a row wider than that
MOST_ROWS = 64
ELEMENTS = 8192


@lru_cache(1024)
def norm_tile(width: int, elements: int) -> NormTile:
    """The tile of so many ``elements`` for rows of ``width``, the same on every device and for every number of rows.

    It is part of the definition of a result: element ``i`` of a chunk is summed over the chunks first, then those sums
    over the chunk, in an order that only ``block``, ``warps`` and the dtypes decide.
    """
    block = max(1 << (width - 1).bit_length(), 16) if width <= WIDEST_BLOCK else CHUNK
    rows = min(max(elements // block, 1), MOST_ROWS)
    return NormTile(rows, block, width <= block, min(max(8 * rows * block // elements, 4), 16))


# ---- what the norm kernels share ----


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


# ---- the forward ----


@triton.jit
def norm_forward_kernel(
    x, residual, gamma, beta, y, total, mean, rsigma, amax,
    M, K,
    EPS: tl.constexpr, CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr, VALUE: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED: tl.constexpr, ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    K = extent(K, ALIGNED)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mean, row_rsigma = row_statistics(x, residual, m, M, K, EPS, CENTERED, RESIDUAL, ONE_CHUNK, ROWS, BLOCK)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    if VALUE or RESIDUAL:
        for chunk in range(1 if ONE_CHUNK else tl.cdiv(K, BLOCK)):
            k = chunk * BLOCK + tl.arange(0, BLOCK)
            inside = (m[:, None] < M) & (k[None, :] < K)
            where = m[:, None].to(tl.int64) * K + k[None, :]
            values = load_input(x, residual, m, k, M, K, RESIDUAL)
            if VALUE:
                result = normalize(values, row_mean, row_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
                rounded = result.to(y.dtype.element_ty)
                tl.store(y + where, rounded, mask=inside)
                if AMAX:
                    largest = tl.maximum(largest, tl.where(inside, tl.abs(rounded.to(tl.float32)), 0.0))
            if RESIDUAL:
                tl.store(total + where, values.to(total.dtype.element_ty), mask=inside)
    if CENTERED:
        tl.store(mean + m, row_mean, mask=m < M)
    tl.store(rsigma + m, row_rsigma, mask=m < M)
    if AMAX:
        record_max(amax, tl.max(tl.max(largest, axis=1), axis=0))


_forward = Kernel(norm_forward_kernel)


def norm_forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype | None,
    with_amax: bool = False,
    residual: Tensor | None = None,
    choice: NormTile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As the operation; with ``dtype`` None the statistics and the total alone."""
    check(x, residual, gamma, beta, normalization)
    rows, width = x.shape
    x, gamma = ready(x), ready(gamma)
    centered = normalization == "LayerNorm"
    y = x.new_empty(0 if dtype is None else x.shape, dtype=dtype)
    mean = x.new_empty(rows if centered else 0, dtype=torch.float32)
    rsigma = x.new_empty(rows, dtype=torch.float32)
    amax = x.new_zeros(1 if with_amax else 0, dtype=torch.float32)
    total = x.new_empty(0 if residual is None else x.shape)
    choice = choice or norm_tile(width, ELEMENTS)
    _forward(
        triton.cdiv(rows, choice.rows),
        (
            x, x if residual is None else ready(residual), gamma, gamma if beta is None else ready(beta),
            y, total, mean, rsigma, amax,
        ),
        (rows, width),
        (
            eps, centered, beta is not None, zero_centered, residual is not None, dtype is not None, with_amax,
            width % 16 == 0, choice.one_chunk, choice.rows, choice.block,
        ),
        choice.warps,
    )  # fmt: skip
    return y, mean, rsigma, amax, total
