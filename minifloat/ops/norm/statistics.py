"""The statistics of rows in Triton, for kernels that cast their norm: each row is read once, and its sum written."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, ready
from minifloat.ops.norm.device import load_input, row_statistics
from minifloat.ops.norm.tile import NormTile, forward_tile
from minifloat.ops.quantize.device import extent


@triton.jit
def norm_statistics_kernel(
    x, residual, total, mean, rsigma,
    M, K,
    EPS: tl.constexpr, CENTERED: tl.constexpr, RESIDUAL: tl.constexpr,
    ALIGNED: tl.constexpr, ONE_CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    K = extent(K, ALIGNED)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mean, row_rsigma = row_statistics(x, residual, m, M, K, EPS, CENTERED, RESIDUAL, ONE_CHUNK, ROWS, BLOCK)
    if RESIDUAL:
        for chunk in range(1 if ONE_CHUNK else tl.cdiv(K, BLOCK)):
            k = chunk * BLOCK + tl.arange(0, BLOCK)
            values = load_input(x, residual, m, k, M, K, True)
            where = m[:, None].to(tl.int64) * K + k[None, :]
            tl.store(total + where, values.to(total.dtype.element_ty), mask=(m[:, None] < M) & (k[None, :] < K))
    if CENTERED:
        tl.store(mean + m, row_mean, mask=m < M)
    tl.store(rsigma + m, row_rsigma, mask=m < M)


_statistics = Kernel(norm_statistics_kernel)


class Statistics(NamedTuple):
    """Mean and rsigma [M] fp32, ``total`` [M, K]; what is not there is empty."""

    mean: Tensor
    rsigma: Tensor
    total: Tensor


def statistics(
    x: Tensor, residual: Tensor | None, normalization: str, eps: float, choice: NormTile | None = None
) -> Statistics:
    """Those of the rows of ``x`` [M, K], or of ``total = x + residual`` rounded to the dtype of ``x``."""
    rows, width = x.shape
    centered = normalization == "LayerNorm"
    out = Statistics(
        x.new_empty(rows if centered else 0, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(0 if residual is None else x.shape),
    )
    choice = choice or forward_tile(width)
    _statistics(
        triton.cdiv(rows, choice.rows),
        (x, x if residual is None else ready(residual), out.total, out.mean, out.rsigma),
        (rows, width),
        (eps, centered, residual is not None, width % 16 == 0, choice.one_chunk, choice.rows, choice.block),
        choice.warps,
    )
    return out
