"""LayerNorm and RMSNorm, forward and backward, as ``torch.library`` operations that compute in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format, parse
from minifloat.ops.library import operation
from minifloat.ops.norm import reference
from minifloat.ops.norm.reference import NORMALIZATIONS
from minifloat.ops.quantize import empty_fused_cast, fused_cast
from minifloat.ops.quantize import reference as quantize_reference

__all__ = ["NORMALIZATIONS", "check", "check_name", "norm_backward", "norm_cast", "norm_forward"]

_WHOLE = Format("e4m3")  # any with one scale for the tensor, to measure its amax


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


def _forward_on_gpu() -> Callable[..., Any]:
    from minifloat.ops.norm import forward  # which needs Triton

    return forward.norm_forward


@operation(_forward_on_gpu)
def norm_forward(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    dtype: torch.dtype,
    with_amax: bool = False,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``y`` [M, K] in ``dtype``, fp32 mean and rsigma [M] for backward (RMSNorm: an empty mean), amax of ``y``, total.

    ``x`` is [M, K] bf16, fp16 or fp32, gamma and beta [K]; see :func:`reference.forward`. The amax, fp32 [1], is that
    of the rounded ``y`` without its NaNs; it is empty unless asked for. With a ``residual`` [M, K] it is the norm of
    ``total = x + residual`` [M, K], rounded to the dtype of ``x``; without one the total is empty.
    """
    check(x, residual, gamma, beta, normalization)
    source = x if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    wide, mean, rsigma = reference.forward(source.float(), gamma, beta, normalization, eps, zero_centered)
    y = wide.to(dtype).contiguous()
    amax = quantize_reference.amax(y, _WHOLE, ROWWISE) if with_amax else x.new_empty(0, dtype=torch.float32)
    return y, mean, rsigma, amax, x.new_empty(0) if residual is None else source


def _cast_on_gpu() -> Callable[..., Any]:
    from minifloat.ops.norm import cast  # which needs Triton

    return cast.norm_cast


@operation(_cast_on_gpu)
def norm_cast(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor | None,
    format: str,
    rowwise: bool,
    columnwise: bool,
    k_major: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
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


def _backward_on_gpu() -> Callable[..., Any]:
    from minifloat.ops.norm import backward  # which needs Triton

    return backward.norm_backward


@operation(_backward_on_gpu)
def norm_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    normalization: str,
    zero_centered: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dx`` [M, K] in the dtype of ``x``; dgamma and dbeta [K] summed in fp32 and rounded to the dtype of gamma.

    ``dresidual`` [M, K], another gradient of ``x``, is added to ``dx`` before its one rounding. RMSNorm has no dbeta:
    it is empty.
    """
    assert dy.shape == x.shape, (dy.shape, x.shape)
    other = None if dresidual is None else dresidual.float()
    dx, dgamma, dbeta = reference.backward(
        dy.float(), x.float(), gamma, mean, rsigma, normalization, zero_centered, other
    )
    return dx.to(x.dtype).contiguous(), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)
