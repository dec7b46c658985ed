"""LayerNorm and RMSNorm in plain PyTorch: the definition that a kernel is held to, within fp32 rounding.

Layer Normalization (Ba et al. 2016), Root Mean Square Layer Normalization (Zhang and Sennrich 2019), as
``docs/numerics.md`` 1.8 has them. Everything is computed in the dtype of ``x``, which the operations make fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class Normalized(NamedTuple):
    """``y`` [M, K], and of each row the mean [M] (LayerNorm; else empty) and the inverse deviation ``rsigma`` [M]."""

    y: Tensor
    mean: Tensor
    rsigma: Tensor


class Gradients(NamedTuple):
    """Of ``x`` [M, K], of gamma [K], and of beta [K] (LayerNorm; else empty)."""

    dx: Tensor
    dgamma: Tensor
    dbeta: Tensor


def forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool
) -> Normalized:
    """``y = (x - mean) * rsigma * g + beta`` with ``rsigma = 1 / sqrt(mean((x - mean)^2) + eps)`` over the last dim.

    RMSNorm takes 0 for the mean. ``g`` is gamma, or ``1 + gamma`` if zero-centered.

    Args:
        x: [M, K].
        gamma, beta: [K].
    """
    mean = x.mean(-1) if normalization == "LayerNorm" else x.new_zeros(0)
    centered = _centered(x, mean, normalization)
    rsigma = (centered.square().mean(-1) + eps).sqrt().reciprocal()
    y = centered * rsigma[:, None] * _scale(gamma, x.dtype, zero_centered)
    return Normalized(y if beta is None else y + beta.to(x.dtype), mean, rsigma)


def backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    normalization: str,
    zero_centered: bool,
    dresidual: Tensor | None = None,
) -> Gradients:
    """The gradients, from what :func:`forward` saved of each row.

    With ``n = (x - mean) * rsigma`` and ``d = dy * g``: ``dx = rsigma * (d - mean(d) - n * mean(d * n))``, where
    RMSNorm leaves out ``mean(d)``; ``dgamma = sum(dy * n)`` and ``dbeta = sum(dy)`` over the rows.

    Args:
        dy, x: [M, K].
        mean, rsigma: [M], or an empty mean for RMSNorm.
        dresidual: [M, K], another gradient of ``x``, added to ``dx``.
    """
    normal = _centered(x, mean, normalization) * rsigma[:, None]
    d = dy * _scale(gamma, x.dtype, zero_centered)
    inner = d - normal * (d * normal).mean(-1, keepdim=True)
    dgamma = (dy * normal).sum(0)
    if normalization == "LayerNorm":
        inner = inner - d.mean(-1, keepdim=True)
    dx = rsigma[:, None] * inner
    dbeta = dy.sum(0) if normalization == "LayerNorm" else dy.new_zeros(0)
    return Gradients(dx if dresidual is None else dx + dresidual, dgamma, dbeta)


def _centered(x: Tensor, mean: Tensor, normalization: str) -> Tensor:
    return x - mean[:, None] if normalization == "LayerNorm" else x


def _scale(gamma: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    # The 1 is added in fp32: near 1 a bf16 gamma of 0.001 would vanish.
    return gamma.to(dtype) + 1 if zero_centered else gamma.to(dtype)
