"""LayerNorm and RMSNorm, forward and backward, as ``torch.library`` operations that compute in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.kernels.library import register
from minifloat.kernels.norm import reference
from minifloat.kernels.norm.reference import NORMALIZATIONS

__all__ = ["NORMALIZATIONS", "check_name", "norm_backward", "norm_forward"]


def check_name(normalization: str) -> None:
    """Raises ValueError if there is no such norm."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}; {' or '.join(NORMALIZATIONS)}")


def _check(x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str) -> None:
    check_name(normalization)
    for name, parameter in (("gamma", gamma), ("beta", beta)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(parameter.shape)} but x {tuple(x.shape)}; {name} needs one entry for each of "
                f"the {x.shape[-1]} columns"
            )
    if normalization == "RMSNorm" and beta is not None:
        raise ValueError("RMSNorm has no beta; pass beta=None, or normalization='LayerNorm'")


def _forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, gamma, beta, normalization)
    y, mean, rsigma = reference.forward(x.float(), gamma, beta, normalization, eps, zero_centered)
    return y.to(dtype).contiguous(), mean, rsigma


def _fake_forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, gamma, beta, normalization)
    rows = x.new_empty(x.shape[0], dtype=torch.float32)
    return (
        x.new_empty(x.shape, dtype=dtype),
        torch.empty_like(rows) if normalization == "LayerNorm" else x.new_empty(0, dtype=torch.float32),
        rows,
    )


def _backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rsigma: Tensor, normalization: str, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    assert dy.shape == x.shape, (dy.shape, x.shape)
    dx, dgamma, dbeta = reference.backward(dy.float(), x.float(), gamma, mean, rsigma, normalization, zero_centered)
    return dx.to(x.dtype).contiguous(), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def _fake_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, rsigma: Tensor, normalization: str, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    columns = x.shape[-1] if normalization == "LayerNorm" else 0
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape), gamma.new_empty(columns)


norm_forward = register(
    "norm_forward(Tensor x, Tensor gamma, Tensor? beta, str normalization, float eps, bool zero_centered, "
    "ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
)
"""``y`` [M, K] in ``dtype``, and fp32 mean and rsigma [M] for the backward (RMSNorm: an empty mean).

``x`` is [M, K] bf16, fp16 or fp32, gamma and beta [K]; see :func:`reference.forward`.
"""

norm_backward = register(
    "norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor mean, Tensor rsigma, str normalization, "
    "bool zero_centered) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
"""``dx`` [M, K] in the dtype of ``x``; dgamma and dbeta [K] summed in fp32 and rounded to the dtype of gamma.

RMSNorm has no dbeta: it is empty.
"""
