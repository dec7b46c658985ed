"""LayerNorm and RMSNorm, forward and backward, as ``torch.library`` operations that compute in fp32 (fp64 for fp64).

Layer Normalization (Ba et al. 2016), Root Mean Square Layer Normalization (Zhang and Sennrich 2019), as
``docs/numerics.md`` 1.8 has them. A kernel is held to these references within fp32 rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, parse
from minifloat.ops.library import operation
from minifloat.ops.quantize import empty_fused_cast, fused_cast, reference

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def check_name(normalization: str) -> None:
    """Raises ValueError if there is no such norm."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}; {' or '.join(NORMALIZATIONS)}")


def check(x: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, normalization: str) -> None:
    """Raises ValueError where the arguments of a norm do not fit."""
    check_name(normalization)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)} but x {tuple(x.shape)}; they are added")
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)} but x {tuple(x.shape)}; {name} needs one entry for each of "
                f"the {x.shape[-1]} columns"
            )
    if normalization == "RMSNorm" and beta is not None:
        raise ValueError("RMSNorm has no beta; pass beta=None, or normalization='LayerNorm'")


@operation("norm.kernels:norm_forward")
def norm_forward(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool,
    dtype: torch.dtype, with_amax: bool = False, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``y`` [M, K] in ``dtype``, fp32 mean and rsigma [M] for backward (RMSNorm: an empty mean), amax of ``y``, total.

    ``y = (x - mean) * rsigma * g + beta`` with ``rsigma = 1 / sqrt(mean((x - mean)^2) + eps)``, where RMSNorm takes 0
    for the mean; ``g`` is gamma, or ``1 + gamma`` if zero-centered. ``x`` is [M, K], gamma and beta [K]. The amax, fp32
    [1], is that of the rounded ``y`` without its NaNs; it is empty unless asked for. With a ``residual`` [M, K] it is
    the norm of ``total = x + residual`` [M, K], rounded to the dtype of ``x``; without one the total is empty.
    """
    check(x, residual, gamma, beta, normalization)
    precise = torch.promote_types(x.dtype, torch.float32)
    total = x if residual is None else (x.to(precise) + residual.to(precise)).to(x.dtype).contiguous()
    wide = total.to(precise)
    mean = wide.mean(-1) if normalization == "LayerNorm" else wide.new_zeros(0)
    centered = _centered(wide, mean, normalization)
    rsigma = (centered.square().mean(-1) + eps).sqrt().reciprocal()
    y = centered * rsigma[:, None] * _scale(gamma, precise, zero_centered)
    y = (y if beta is None else y + beta.to(precise)).to(dtype).contiguous()
    amax = reference.amax(y, reference.WHOLE, ROWWISE) if with_amax else x.new_empty(0, dtype=torch.float32)
    return y, mean, rsigma, amax, x.new_empty(0) if residual is None else total


@operation("norm.kernels:norm_cast")
def norm_cast(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool,
    scale: Tensor | None, format: str, rowwise: bool, columnwise: bool, k_major: bool, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The norm's :class:`~minifloat.ops.quantize.FusedCodes`, then mean, rsigma and total.

    With a ``scale``, fp32 [1], and a format of rule "given" the fp32 norm is cast. Without one it is rounded to the
    dtype of ``x`` and cast in blocks, whose amaxes are their own: ``format`` is one of ``quantize.casts_blocks``.
    ``k_major`` is as in ``quantize.cast``; the other arguments and outputs are those of :func:`norm_forward`.
    """
    dtype = x.dtype if scale is None else torch.float32
    y, mean, rsigma, _, total = norm_forward.reference(
        x, gamma, beta, normalization, eps, zero_centered, dtype, False, residual
    )
    return *fused_cast(y, scale, parse(format), rowwise, columnwise, k_major), mean, rsigma, total


@norm_cast.fake
def _(x: Tensor, gamma: Tensor, beta: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    normalization, eps, zero_centered, _, format, *wanted = rest
    residual = wanted[3] if len(wanted) > 3 else None
    *_, mean, rsigma, _, total = norm_forward.shapes(
        x, gamma, beta, normalization, eps, zero_centered, x.dtype, False, residual
    )
    return *empty_fused_cast(x, x.shape[1], parse(format), *wanted[:3]), mean, rsigma, total


@operation("norm.kernels:norm_backward")
def norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rsigma: Tensor, normalization: str, zero_centered: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``dx`` [M, K] in the dtype of ``x``; dgamma and dbeta [K] summed in fp32 and rounded to the dtype of gamma.

    With ``n = (x - mean) * rsigma`` and ``d = dy * g``: ``dx = rsigma * (d - mean(d) - n * mean(d * n))``, where
    RMSNorm leaves out ``mean(d)``; ``dgamma = sum(dy * n)`` and ``dbeta = sum(dy)`` over the rows, which RMSNorm does
    not have: it is empty. ``dresidual`` [M, K], another gradient of ``x``, is added to ``dx`` before its one rounding.
    """
    assert dy.shape == x.shape, (dy.shape, x.shape)
    precise = torch.promote_types(x.dtype, torch.float32)
    dy = dy.to(precise)
    normal = _centered(x.to(precise), mean, normalization) * rsigma[:, None]
    d = dy * _scale(gamma, precise, zero_centered)
    inner = d - normal * (d * normal).mean(-1, keepdim=True)
    if normalization == "LayerNorm":
        inner = inner - d.mean(-1, keepdim=True)
    dx = rsigma[:, None] * inner
    dx = dx if dresidual is None else dx + dresidual.to(precise)
    dbeta = dy.sum(0) if normalization == "LayerNorm" else dy.new_zeros(0)
    return dx.to(x.dtype).contiguous(), (dy * normal).sum(0).to(gamma.dtype), dbeta.to(gamma.dtype)


def _centered(x: Tensor, mean: Tensor, normalization: str) -> Tensor:
    return x - mean[:, None] if normalization == "LayerNorm" else x


def _scale(gamma: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    # The 1 is added in fp32: near 1 a bf16 gamma of 0.001 would vanish.
    return gamma.to(dtype) + 1 if zero_centered else gamma.to(dtype)
