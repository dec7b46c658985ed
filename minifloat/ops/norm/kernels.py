"""The norm in Triton: forward, forward and cast, backward.

*Forward* reads each row once and writes its statistics and its norm. *Forward and cast* writes no norm: one kernel
reads rows for their statistics, a second one casts, since blocks span rows (with a given scale one kernel could, in
pieces of few bytes, which costs more than reading twice). A given scale casts the fp32 norm; blocks cast the number
that forward would store. *Backward* reads dy and x once for dx; a second kernel adds up dgamma and dbeta of groups of
rows in an order that shapes alone decide, so that runs repeat to the bit.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm import check
from minifloat.ops.quantize import empty_fused_cast
from minifloat.ops.quantize.blocks import (
    cast_constants,
    fused_tile,
    held,
    scale_strides,
    store_block_cast,
    tile_constants,
)
from minifloat.ops.quantize.device import corner, extent, load_tile, record_max, store_scaled, tile_places
from minifloat.ops.tiles import Tile

# ---- how a matrix is split: one configuration for each width, as the order of a row's sums depends on it ----


class NormTile(NamedTuple):
    """Tile that one program holds at a time.

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
    """Loads what the columns ``k`` are multiplied by, in fp32: gamma or ``1 + gamma``."""
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
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool,
    dtype: torch.dtype | None, with_amax: bool = False, residual: Tensor | None = None, choice: NormTile | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Implements the operation; with ``dtype`` None the statistics and the total alone."""
    check(x, residual, gamma, beta, normalization)
    rows, width = x.shape
    x, gamma = ready(x), ready(gamma)
    centered = normalization == "LayerNorm"
    y = x.new_empty(0 if dtype is None else x.shape, dtype=dtype)
    mean = x.new_empty(rows if centered else 0, dtype=torch.float32)
    rsigma = x.new_empty(rows, dtype=torch.float32)
    amax = torch.zeros((int(with_amax),), dtype=torch.float32, device=x.device)
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


@triton.jit
def norm_cast_kernel(
    x, gamma, beta, mean, rsigma, scale, row_codes, column_codes, row_scales, column_scales, amax,
    M, K, row_stride_m, row_stride_k, column_stride_m, column_stride_k,
    CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, K_MAJOR: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    ELEMENT: tl.constexpr, MAX: tl.constexpr, RULE: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr,
    ALIGNED_M: tl.constexpr, ALIGNED_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYOUTS: tl.constexpr,
):  # fmt: skip
    M, K = extent(M, ALIGNED_M), extent(K, ALIGNED_K)
    program = tl.program_id(0)
    if BLOCK == 0:  # begins with the rows that were read last, of which the cache still has some
        program = tl.num_programs(0) - 1 - program
    first_m, first_k = corner(program, K, BLOCK_M, BLOCK_K)
    m, k = tile_places(first_m, first_k, BLOCK_M, BLOCK_K, LAYOUTS)
    row_rsigma = tl.load(rsigma + m, mask=m < M, other=0.0)
    row_mean = tl.load(mean + m, mask=m < M, other=0.0) if CENTERED else row_rsigma
    values = load_tile(x, m, k, M, K)
    values = normalize(values, row_mean, row_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
    if CENTERED or HAS_BETA:  # outside lies minus the mean, times 1 + gamma where there is none, plus beta
        values = tl.where((m[:, None] < M) & (k[None, :] < K), values, 0.0)
    if BLOCK > 0:
        values = values.to(x.dtype.element_ty).to(tl.float32)
        store_block_cast(
            held(values, LAYOUTS), first_m, first_k, M, K, M,
            row_scales, row_codes, row_scales, column_scales, column_codes, column_scales,
            row_stride_m, row_stride_k, column_stride_m, column_stride_k,
            ROW, COLUMN, K_MAJOR, False, False, BLOCK, TILE, ELEMENT, MAX, RULE, EPSILON, LARGEST, LAYOUTS,
        )  # fmt: skip
    else:
        record_max(amax, tl.maximum(tl.max(tl.max(tl.abs(values), axis=1), axis=0), 0.0))  # of nothing but NaN 0
        multiplier, scale_inv = RULE.kernels.scale(tl.load(scale), MAX, EPSILON, LARGEST)
        store_scaled(
            values, multiplier, row_codes, column_codes, m, k, M, K, M, 0 * K, K, ROW, COLUMN, K_MAJOR, False, ELEMENT
        )  # fmt: skip
        if tl.program_id(0) == 0:
            tl.store(row_scales, scale_inv)


CAST = Kernel(norm_cast_kernel, layouts=True)


def norm_cast(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool,
    scale: Tensor | None, format: str, rowwise: bool, columnwise: bool, k_major: bool, residual: Tensor | None = None,
    choice: Tile | None = None, sums: NormTile | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Implements the operation; ``choice`` and ``sums``: tiles other than the pinned ones, of cast and statistics."""
    fmt, shape = parse(format), (x.shape[0], x.shape[1])
    x, gamma = ready(x), ready(gamma)
    _, mean, rsigma, _, total = norm_forward(
        x, gamma, beta, normalization, eps, zero_centered, None, False, residual, sums
    )
    out = empty_fused_cast(x, shape[1], fmt, rowwise, columnwise, k_major)
    # Other norms wait for a run on a GPU.
    shown = normalization == "RMSNorm" and residual is None and not zero_centered
    choice, shared = fused_tile("norm", choice, x, shape, fmt, (rowwise, columnwise, k_major), shown)
    programs = choice.count(shape)
    CAST(
        programs if scale is None else max(1, programs),  # without rows there is still a scale
        (
            x if residual is None else total, gamma, gamma if beta is None else ready(beta), mean, rsigma,
            x if scale is None else scale, *out,
        ),
        (*shape, *scale_strides(out)),
        (
            normalization == "LayerNorm", beta is not None, zero_centered,
            *cast_constants(x, fmt, rowwise, columnwise, k_major),
            *tile_constants(shape, choice, fmt if shared else None, k_major),
        ),
        choice.warps,
    )  # fmt: skip
    return *out, mean, rsigma, total


BACKWARD_ELEMENTS = ELEMENTS // 2  # two tensors are held, and summed over the rows
MOST_GROUPS = 256
"""Most groups of rows: enough for every multiprocessor, few enough that their sums are small beside the matrix."""
COLUMNS = 32
"""Columns of a program that adds the groups."""


@triton.jit
def load_terms(dy, x, gamma, m, k, M, K, row_mean, row_rsigma, CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr):
    """Tiles of dy, of the normalized n, and of d = dy * g; 0 outside the matrix."""
    gradient = load_tile(dy, m, k, M, K)
    values = load_tile(x, m, k, M, K)
    if CENTERED:
        values = tl.where(k[None, :] < K, values - row_mean[:, None], 0.0)
    normal = values * row_rsigma[:, None]
    return gradient, normal, gradient * load_scale(gamma, k, K, ZERO_CENTERED)[None, :]


@triton.jit
def norm_backward_kernel(
    dy, x, dresidual, gamma, mean, rsigma, dx, dgammas, dbetas,
    M, K, tiles,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr, ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    K = extent(K, ALIGNED)
    chunks = 1 if ONE_CHUNK else tl.cdiv(K, BLOCK)
    size = tl.full([ROWS], 0, tl.float32) + K
    group = tl.program_id(0)
    own = group.to(tl.int64) * K
    dgamma = tl.zeros([BLOCK], tl.float32)
    dbeta = tl.zeros([BLOCK], tl.float32)
    for tile in tl.range(tiles, num_stages=STAGES):  # the next tiles are on their way while this one is summed
        m = (group * tiles + tile) * ROWS + tl.arange(0, ROWS)
        row_rsigma = tl.load(rsigma + m, mask=m < M, other=0.0)
        row_mean = tl.load(mean + m, mask=m < M, other=0.0) if CENTERED else row_rsigma
        sum_d = tl.zeros([ROWS, BLOCK], tl.float32)
        sum_dn = tl.zeros([ROWS, BLOCK], tl.float32)
        for chunk in range(chunks):
            k = chunk * BLOCK + tl.arange(0, BLOCK)
            _, normal, d = load_terms(dy, x, gamma, m, k, M, K, row_mean, row_rsigma, CENTERED, ZERO_CENTERED)
            sum_d += d
            sum_dn += d * normal
        mean_d = tl.div_rn(tl.sum(sum_d, axis=1), size)
        mean_dn = tl.div_rn(tl.sum(sum_dn, axis=1), size)
        for chunk in range(chunks):
            k = chunk * BLOCK + tl.arange(0, BLOCK)
            gradient, normal, d = load_terms(
                dy, x, gamma, m, k, M, K, row_mean, row_rsigma, CENTERED, ZERO_CENTERED
            )  # fmt: skip
            inner = d - normal * mean_dn[:, None]
            if CENTERED:
                inner = inner - mean_d[:, None]
            result = inner * row_rsigma[:, None]
            if RESIDUAL:
                result = result + load_tile(dresidual, m, k, M, K)
            inside = (m[:, None] < M) & (k[None, :] < K)
            where = m[:, None].to(tl.int64) * K + k[None, :]
            tl.store(dx + where, result.to(dx.dtype.element_ty), mask=inside)
            dgamma += tl.sum(gradient * normal, axis=0)
            dbeta += tl.sum(gradient, axis=0)
            if not ONE_CHUNK:  # rows so wide that their sums live in memory
                tl.debug_barrier()
                tl.store(dgammas + own + k, tl.load(dgammas + own + k, mask=k < K, other=0.0) + dgamma, mask=k < K)
                if CENTERED:
                    tl.store(dbetas + own + k, tl.load(dbetas + own + k, mask=k < K, other=0.0) + dbeta, mask=k < K)
                dgamma = tl.zeros([BLOCK], tl.float32)
                dbeta = tl.zeros([BLOCK], tl.float32)
    if ONE_CHUNK:
        k = tl.arange(0, BLOCK)
        tl.store(dgammas + own + k, dgamma, mask=k < K)
        if CENTERED:
            tl.store(dbetas + own + k, dbeta, mask=k < K)


@triton.jit
def norm_parameters_kernel(
    dgammas, dbetas, dgamma, dbeta,
    groups, K,
    CENTERED: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, MOST)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.sum(load_tile(dgammas, group, k, groups, K), axis=0)
    tl.store(dgamma + k, sums.to(dgamma.dtype.element_ty), mask=k < K)
    if CENTERED:
        sums = tl.sum(load_tile(dbetas, group, k, groups, K), axis=0)
        tl.store(dbeta + k, sums.to(dbeta.dtype.element_ty), mask=k < K)


_backward = Kernel(norm_backward_kernel)
_parameters = Kernel(norm_parameters_kernel)


def backward_tile(width: int) -> NormTile:
    """The tile for rows of ``width``; four warps up to 1024, where sums over eight take longer than their loads."""
    tile = norm_tile(width, BACKWARD_ELEMENTS)
    return tile if tile.block > 1024 else tile._replace(warps=4)


def norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rsigma: Tensor, normalization: str, zero_centered: bool,
    dresidual: Tensor | None = None, choice: NormTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Implements the operation."""
    assert dy.shape == x.shape, (dy.shape, x.shape)
    rows, width = x.shape
    dy, x, gamma = ready(dy), ready(x), ready(gamma)
    mean, rsigma = ready(mean), ready(rsigma)
    centered = normalization == "LayerNorm"
    choice = choice or backward_tile(width)
    tiles = max(1, triton.cdiv(rows, choice.rows * MOST_GROUPS))
    groups = triton.cdiv(rows, choice.rows * tiles)
    # Zeros to add to, where a row is wider than a tile.
    make = torch.empty if choice.one_chunk else torch.zeros
    sums = [make(groups, width, dtype=torch.float32, device=x.device) for _ in range(1 + centered)]
    dx, dgamma = x.new_empty(x.shape), gamma.new_empty(width)
    dbeta = gamma.new_empty(width if centered else 0)
    _backward(
        groups,
        (dy, x, x if dresidual is None else ready(dresidual), gamma, mean, rsigma, dx, sums[0], sums[-1]),
        (rows, width, tiles),
        (
            centered, zero_centered, dresidual is not None,
            width % 16 == 0, choice.one_chunk, choice.rows, choice.block,
            3 if choice.rows * choice.block * (x.element_size() + dy.element_size()) <= 32768 else 1,
        ),
        choice.warps,
    )  # fmt: skip
    _parameters(
        triton.cdiv(width, COLUMNS),
        (sums[0], sums[-1], dgamma, dbeta),
        (groups, width),
        (centered, MOST_GROUPS, COLUMNS),
    )
    return dx, dgamma, dbeta
