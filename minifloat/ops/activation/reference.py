"""Activations and their gated forms in plain PyTorch: the definition that a kernel is held to, within fp32 rounding.

Formulas of ``docs/numerics.md`` 1.8; the gated family is that of "GLU Variants Improve Transformer" (Shazeer 2020).
Everything is computed in the dtype of ``x``, which the operations make fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pointwise(NamedTuple):
    """A function of one number and its derivative."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _gelu(x: Tensor) -> Tensor:
    """The tanh form of Hendrycks and Gimpel (2016): sqrt(2 / pi) (x + 0.044715 x^3) inside."""
    return x * (0.5 + 0.5 * torch.tanh(x * (0.79788456 + 0.03567741 * x * x)))


def _gelu_derivative(x: Tensor) -> Tensor:
    # Beyond 10 the derivative is 0 or 1 to the last bit, but x * x may overflow, and 0 * inf is not 0.
    x = x.clamp(-10, 10)
    t = torch.tanh(x * (0.79788456 + 0.03567741 * x * x))
    return 0.5 * x * (1 - t * t) * (0.79788456 + 3 * 0.03567741 * x * x) + 0.5 * (1 + t)


def swish(slope: float) -> Pointwise:
    """``x * sigmoid(slope * x)``: silu with 1, qgelu with 1.702."""

    def derivative(x: Tensor) -> Tensor:
        s = (slope * x).sigmoid_()
        return (x * s).mul_(1 - s).mul_(slope).add_(s)

    return Pointwise(lambda x: (slope * x).sigmoid_() * x, derivative)


def _sigmoid_derivative(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


POINTWISE: dict[str, Pointwise] = {
    "gelu": Pointwise(_gelu, _gelu_derivative),
    "qgelu": swish(1.702),
    "relu": Pointwise(torch.relu, lambda x: (x > 0).to(x.dtype)),
    "srelu": Pointwise(lambda x: torch.relu(x).square(), lambda x: 2 * torch.relu(x)),
    "silu": swish(1.0),
    "sigmoid": Pointwise(torch.sigmoid, _sigmoid_derivative),
}
GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}
"""Gated activations, ``function(first half) * second half`` of the last dim, by the function of their gate."""

CLAMPED = "clamped_swiglu"
"""The gate of gpt-oss: both halves are clamped, and the second is shifted."""

DEFAULTS: dict[str, dict[str, float]] = {CLAMPED: {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}}
"""Parameters of the activations that have any, in the order in which operations take them."""

NAMES = (*POINTWISE, *GATES, CLAMPED)


def gated(name: str) -> bool:
    """It multiplies two halves of its input, so that its output is half as wide."""
    return name not in POINTWISE


def forward(x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    """The activation of ``x`` [M, K]: [M, K], or [M, K / 2] if gated."""
    if name in POINTWISE:
        return POINTWISE[name].function(x)
    gate, a, b = _halves(x, name, parameters)
    return gate.function(a) * b


def backward(dy: Tensor, x: Tensor, name: str, parameters: Sequence[float]) -> Tensor:
    """The gradient with respect to ``x`` [M, K]; 0 where :data:`CLAMPED` clamps."""
    if name in POINTWISE:
        return dy * POINTWISE[name].derivative(x)
    gate, a, b = _halves(x, name, parameters)
    da, db = (dy * b).mul_(gate.derivative(a)), gate.function(a).mul_(dy)
    if name == CLAMPED:
        first, second = x.chunk(2, dim=-1)
        da = torch.where(first > parameters[0], 0.0, da)
        db = torch.where(second.abs() > parameters[0], 0.0, db)
    return torch.cat([da, db], dim=-1)


def _halves(x: Tensor, name: str, parameters: Sequence[float]) -> tuple[Pointwise, Tensor, Tensor]:
    """The gate's function, what it is applied to, and what its value multiplies."""
    a, b = x.chunk(2, dim=-1)
    if name != CLAMPED:
        return POINTWISE[GATES[name]], a, b
    limit, alpha, offset = parameters
    return swish(alpha), a.clamp(max=limit), b.clamp(-limit, limit) + offset
