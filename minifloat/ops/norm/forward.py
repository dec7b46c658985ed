"""The norm's forward in Triton: each row is read once and its norm written once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm.device import load_input, normalize, row_statistics
from minifloat.ops.norm.tile import NormTile, forward_tile
from minifloat.ops.quantize.device import extent, record_max


@triton.jit
def norm_forward_kernel(
    x, residual, gamma, beta, y, total, mean, rsigma, amax,
    M, K,
    EPS: tl.constexpr, CENTERED: tl.constexpr, HAS_BETA: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    RESIDUAL: tl.constexpr, AMAX: tl.constexpr,
    ALIGNED: tl.constexpr, ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    K = extent(K, ALIGNED)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mean, row_rsigma = row_statistics(x, residual, m, M, K, EPS, CENTERED, RESIDUAL, ONE_CHUNK, ROWS, BLOCK)
    largest = tl.zeros([ROWS, BLOCK], tl.float32)
    for chunk in range(1 if ONE_CHUNK else tl.cdiv(K, BLOCK)):
        k = chunk * BLOCK + tl.arange(0, BLOCK)
        inside = (m[:, None] < M) & (k[None, :] < K)
        where = m[:, None].to(tl.int64) * K + k[None, :]
        values = load_input(x, residual, m, k, M, K, RESIDUAL)
        result = normalize(values, row_mean, row_rsigma, gamma, beta, k, K, CENTERED, HAS_BETA, ZERO_CENTERED)
        rounded = result.to(y.dtype.element_ty)
        tl.store(y + where, rounded, mask=inside)
        if RESIDUAL:
            tl.store(total + where, values.to(total.dtype.element_ty), mask=inside)
        if AMAX:
            largest = tl.maximum(largest, tl.where(inside, tl.abs(rounded.to(tl.float32)), 0.0))
    if CENTERED:
        tl.store(mean + m, row_mean, mask=m < M)
    tl.store(rsigma + m, row_rsigma, mask=m < M)
    if AMAX:
        record_max(amax, tl.max(tl.max(largest, axis=1), axis=0))


_forward = Kernel(norm_forward_kernel)


class Forward(NamedTuple):
    """``y`` [M, K], mean and rsigma [M], amax [1], ``total`` [M, K]; what is not there is empty."""

    y: Tensor
    mean: Tensor
    rsigma: Tensor
    amax: Tensor
    total: Tensor


def forward(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
    with_amax: bool,
    choice: NormTile | None = None,
) -> Forward:
    """The norm of ``x``, or of ``total = x + residual``; the arguments are those of the operations."""
    rows, width = x.shape
    x, gamma = ready(x), ready(gamma)
    centered = normalization == "LayerNorm"
    out = Forward(
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(rows if centered else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
        x.new_zeros(1 if with_amax else 0, dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape),
    )
    choice = choice or forward_tile(width)
    _forward(
        triton.cdiv(rows, choice.rows),
        (
            x, x if residual is None else ready(residual), gamma, gamma if beta is None else ready(beta),
            out.y, out.total, out.mean, out.rsigma, out.amax,
        ),
        (rows, width),
        (
            eps, centered, beta is not None, zero_centered, residual is not None, with_amax,
            width % 16 == 0, choice.one_chunk, choice.rows, choice.block,
        ),
        choice.warps,
    )  # fmt: skip
    return out
