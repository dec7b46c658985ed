"""LayerNorm and RMSNorm, forward and backward, as ``torch.library`` operations that compute in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops.library import register
from minifloat.ops.norm import reference
from minifloat.ops.norm.reference import NORMALIZATIONS
from minifloat.ops.quantize import empty_cast
from minifloat.ops.quantize import reference as quantize_reference

__all__ = ["NORMALIZATIONS", "check_name", "norm_backward", "norm_cast", "norm_forward"]

_WHOLE = Format("e4m3")  # any with one scale for the tensor, to measure its amax


def check_name(normalization: str) -> None:
    """Raises ValueError if there is no such norm."""
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization is {normalization!r}; {' or '.join(NORMALIZATIONS)}")


def _check(x: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, normalization: str) -> None:
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


def _forward(
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
    _check(x, residual, gamma, beta, normalization)
    source, total = _add(x, residual)
    wide, mean, rsigma = reference.forward(source.float(), gamma, beta, normalization, eps, zero_centered)
    y = wide.to(dtype).contiguous()
    amax = quantize_reference.amax(y, _WHOLE, ROWWISE) if with_amax else x.new_empty(0, dtype=torch.float32)
    return y, mean, rsigma, amax, total


def _add(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is normalized, and the operations' ``total``."""
    if residual is None:
        return x, x.new_empty(0)
    total = (x.float() + residual.float()).to(x.dtype).contiguous()
    return total, total


def _forward_on_gpu(
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
    from minifloat.ops.norm import forward

    _check(x, residual, gamma, beta, normalization)
    return forward.forward(x, residual, gamma, beta, normalization, eps, zero_centered, dtype, with_amax)


def _fake_forward(
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
    _check(x, residual, gamma, beta, normalization)
    amax = x.new_empty(1 if with_amax else 0, dtype=torch.float32)
    total = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape, dtype=dtype), *_fake_statistics(x, normalization), amax, total


def _fake_statistics(x: Tensor, normalization: str) -> tuple[Tensor, Tensor]:
    rsigma = x.new_empty(x.shape[0], dtype=torch.float32)
    return torch.empty_like(rsigma) if normalization == "LayerNorm" else x.new_empty(0, dtype=torch.float32), rsigma


def _norm_cast(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    spec: str,
    rowwise: bool,
    columnwise: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    fmt = parse(spec)
    assert fmt.scale_rule == "given", spec
    y, mean, rsigma, _, total = _forward(
        x, gamma, beta, normalization, eps, zero_centered, torch.float32, residual=residual
    )
    codes, scale_inv, amax = quantize_reference.cast(y, scale, None, fmt, ROWWISE)
    nothing = codes.new_empty(0)
    transposed = codes.t().clone(memory_format=torch.contiguous_format).t()  # outputs must not share memory
    row, column = codes if rowwise else nothing, transposed if columnwise else nothing
    return row, column, scale_inv, amax, mean, rsigma, total


def _norm_cast_on_gpu(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    spec: str,
    rowwise: bool,
    columnwise: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from minifloat.ops.norm import cast

    _check(x, residual, gamma, beta, normalization)
    fmt = parse(spec)
    assert fmt.scale_rule == "given", spec
    return cast.norm_cast(
        x, residual, gamma, beta, normalization, eps, zero_centered, scale, fmt, rowwise, columnwise
    )  # fmt: skip


def _fake_norm_cast(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    normalization: str,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    spec: str,
    rowwise: bool,
    columnwise: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, residual, gamma, beta, normalization)
    fmt = parse(spec)
    nothing = x.new_empty(0, dtype=torch.uint8)
    return (
        empty_cast(x, fmt, ROWWISE, False)[0] if rowwise else nothing,
        empty_cast(x, fmt, COLUMNWISE, True)[0] if columnwise else torch.empty_like(nothing),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(1, dtype=torch.float32),
        *_fake_statistics(x, normalization),
        x.new_empty(0 if residual is None else x.shape),
    )


def _backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    normalization: str,
    zero_centered: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert dy.shape == x.shape, (dy.shape, x.shape)
    other = None if dresidual is None else dresidual.float()
    dx, dgamma, dbeta = reference.backward(
        dy.float(), x.float(), gamma, mean, rsigma, normalization, zero_centered, other
    )
    return dx.to(x.dtype).contiguous(), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)


def _backward_on_gpu(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    normalization: str,
    zero_centered: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    from minifloat.ops.norm import backward

    assert dy.shape == x.shape, (dy.shape, x.shape)
    return backward.backward(dy, x, gamma, mean, rsigma, normalization, zero_centered, dresidual)


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    mean: Tensor,
    rsigma: Tensor,
    normalization: str,
    zero_centered: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = x.shape[-1] if normalization == "LayerNorm" else 0
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape), gamma.new_empty(columns)


norm_forward = register(
    "norm_forward(Tensor x, Tensor gamma, Tensor? beta, str normalization, float eps, bool zero_centered, "
    "ScalarType dtype, bool with_amax=False, Tensor? residual=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    cuda=_forward_on_gpu,
)
"""``y`` [M, K] in ``dtype``, fp32 mean and rsigma [M] for the backward (RMSNorm: an empty mean), amax of ``y``, total.

``x`` is [M, K] bf16, fp16 or fp32, gamma and beta [K]; see :func:`reference.forward`. The amax, fp32 [1], is that of
the rounded ``y`` without its NaNs; it is empty unless asked for. With a ``residual`` [M, K] it is the norm of
``total = x + residual`` [M, K], rounded to the dtype of ``x``; without one the total is empty.
"""

norm_cast = register(
    "norm_cast(Tensor x, Tensor gamma, Tensor? beta, str normalization, float eps, bool zero_centered, Tensor scale, "
    "str format, bool rowwise, bool columnwise, Tensor? residual=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_cast,
    _fake_norm_cast,
    cuda=_norm_cast_on_gpu,
)
"""Codes of the fp32 norm with a given scale: row_codes, column_codes, scale_inv, amax, mean, rsigma, total.

``scale`` is fp32 [1] and ``format`` one of rule "given". Both codes are uint8 [M, K], the columnwise ones with M
consecutive in memory (strides (1, M)); which is not wanted is empty. scale_inv and amax (of the norm before scaling,
without NaNs) are fp32 [1]; mean, rsigma and total are those of :data:`norm_forward`, whose fp32 ``y`` is cast.
"""

norm_backward = register(
    "norm_backward(Tensor dy, Tensor x, Tensor gamma, Tensor mean, Tensor rsigma, str normalization, "
    "bool zero_centered, Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    cuda=_backward_on_gpu,
)
"""``dx`` [M, K] in the dtype of ``x``; dgamma and dbeta [K] summed in fp32 and rounded to the dtype of gamma.

``dresidual`` [M, K], another gradient of ``x``, is added to ``dx`` before its one rounding. RMSNorm has no dbeta: it is
empty.
"""
