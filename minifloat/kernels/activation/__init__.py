"""Activations, forward and backward, as ``torch.library`` operations that compute in fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minifloat.kernels.activation import reference
from minifloat.kernels.activation.reference import DEFAULTS, NAMES, gated
from minifloat.kernels.library import register

__all__ = [
    "DEFAULTS", "NAMES", "activation_backward", "activation_forward", "check_name", "gated", "out_columns",
    "parameters_of",
]  # fmt: skip


def check_name(name: str) -> None:
    """Raises ValueError if there is no such activation."""
    if name not in NAMES:
        raise ValueError(f"no activation is called {name!r}; there are {', '.join(NAMES)}")


def parameters_of(name: str, given: Mapping[str, float] | None = None) -> tuple[float, ...]:
    """The parameters of an activation as its operations take them: ``given`` ones, the rest by default.

    Raises:
        ValueError: no such activation, or it has no such parameter.
    """
    check_name(name)
    known = DEFAULTS.get(name, {})
    if unknown := sorted(set(given or {}) - set(known)):
        raise ValueError(f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    return tuple((known | dict(given or {})).values())


def out_columns(name: str, columns: int) -> int:
    """Columns that come out of ``columns``.

    Raises:
        ValueError: no such activation, or the two halves that it multiplies differ.
    """
    check_name(name)
    if not gated(name):
        return columns
    if columns % 2:
        raise ValueError(f"{name} multiplies two halves of the last dim, which is {columns}; it must be even")
    return columns // 2


def _forward(x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype) -> Tensor:
    out_columns(name, x.shape[-1])
    return reference.forward(x.float(), name, parameters).to(dtype).contiguous()


def _fake_forward(x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], out_columns(name, x.shape[-1])), dtype=dtype)


def _backward(dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype) -> Tensor:
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[-1])), (dy.shape, name, x.shape)
    return reference.backward(dy.float(), x.float(), name, parameters).to(dtype).contiguous()


def _fake_backward(dy: Tensor, x: Tensor, name: str, parameters: Sequence[float], dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


activation_forward = register(
    "activation_forward(Tensor x, str name, float[] parameters, ScalarType dtype) -> Tensor", _forward, _fake_forward
)
"""The activation of ``x`` [M, K] in ``dtype``: [M, K], or [M, K / 2] if gated. Parameters: :func:`parameters_of`."""

activation_backward = register(
    "activation_backward(Tensor dy, Tensor x, str name, float[] parameters, ScalarType dtype) -> Tensor",
    _backward,
    _fake_backward,
)
"""The gradient with respect to ``x`` [M, K], in ``dtype``."""
