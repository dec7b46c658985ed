"""The norm's backward in Triton: one reading of dy and x gives dx, and sums for dgamma and dbeta.

A program takes a group of rows. The parameters' gradients of each group are written, and a second kernel adds the
groups: an order that shapes alone decide, so that runs repeat to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm.forward import NormTile, load_scale, norm_tile
from minifloat.ops.quantize.device import extent, load_tile

ELEMENTS = 4096  # half of the forward's: two tensors are held, and summed over the rows
MOST_GROUPS = 256
"""Of rows: enough for every multiprocessor, few enough that their sums are small beside the matrix."""
COLUMNS = 32
"""Of a program that adds the groups."""


def backward_tile(width: int) -> NormTile:
    """The tile for rows of ``width``; four warps up to 1024, where sums over eight take longer than their loads."""
    tile = norm_tile(width, ELEMENTS)
    return tile if tile.block > 1024 else tile._replace(warps=4)


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


def norm_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    normalization: str,
    zero_centered: bool,
    dresidual: Tensor | None = None,
    choice: NormTile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the operation."""
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
    dx, dgamma, dbeta = x.new_empty(x.shape), gamma.new_empty(width), gamma.new_empty(width if centered else 0)
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
