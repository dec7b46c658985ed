"""Activations in float64: inputs, values, and the scale of the errors of an fp32 evaluation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat.functional.norm_activation import Activation
from minifloat.ops.activation import NAMES, out_columns

ACTIVATIONS = [*map(Activation.of, NAMES), Activation.of("clamped_swiglu", {"limit": 1.5, "alpha": 2.0})]
FOR_EACH_ACTIVATION = pytest.mark.parametrize("act", ACTIVATIONS, ids=lambda a: f"{a.name}{list(a.parameters) or ''}")


def activation_inputs(shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Numbers from deep in the tails to around 0, and 0 itself."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-8, 5, shape)
    x[:, 0] = 0.0
    return x.to(device, dtype)


def pointwise_float64(x: Tensor, name: str) -> Tensor:
    """The function in float64, from PyTorch where it has it. gelu's constants are those of numerics.md 1.8."""
    if name == "gelu":
        return x * (0.5 + 0.5 * torch.tanh(x * (0.79788456 + 0.03567741 * x * x)))
    functions = {
        "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
        "relu": F.relu,
        "srelu": lambda x: F.relu(x) ** 2,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
    }
    return functions[name](x)


def activation_float64(x: Tensor, act: Activation) -> Tensor:
    """The activation in float64, written out for each gated name."""
    x = x.double()
    if not act.gated:
        return pointwise_float64(x, act.name)
    a, b = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    if act.name == "clamped_swiglu":
        limit, alpha, offset = act.parameters
        a, b = at_most(a, limit), -at_most(-at_most(b, limit), limit) + offset
        return a * torch.sigmoid(alpha * a) * b
    gate = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}
    return pointwise_float64(a, gate[act.name]) * b


def at_most(x: Tensor, limit: float) -> Tensor:
    """``min(x, limit)``, with gradient 1 at the limit: of ``torch.clamp`` it is 1 there up to PyTorch 2.14, then 0."""
    return torch.where(x > limit, limit, x)


def error_scale(x: Tensor, act: Activation) -> Tensor:
    """Magnitudes that an fp32 evaluation's error is a few ulps of.

    tanh and the exponential in sigmoid turn the relative error of their argument z, about 4 u, into an absolute one of
    4 u |z| times their slope, and both z * slope(z) and z^2 * slope(z) stay below 1/2. So functions and derivatives err
    by a few u of 1 + |x|, a product by that times its other factor, and squares of x by u x^2.
    """
    x = x.double().abs()
    if not act.gated:
        return 1 + (x.square() if act.name == "srelu" else x)
    a, b = x.chunk(2, -1)
    gate = 1 + (a.square() if act.name == "sreglu" else a)
    return gate * (b + 1)


def backward_inputs(
    act: Activation, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """dy and x."""
    x = activation_inputs(shape, dtype, device)
    return torch.randn(shape[0], out_columns(act.name, shape[1])).to(device, dtype), x
