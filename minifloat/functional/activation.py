"""Activations with gradients: the activation operations under autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.functional.outputs import as_output, guarded
from minifloat.functional.produced import Activation
from minifloat.ops.activation import activation_backward, activation_forward
from minifloat.quantizer import as_matrix


def activate(x: Tensor, of: Activation) -> Tensor:
    """The activation of ``x`` [..., K], [..., K / 2] if gated; computed in fp32, rounded once to the dtype of ``x``.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or of odd width and the activation is gated.
    """
    y: Tensor = ActivationFunction.apply(x, of)  # type: ignore[no-untyped-call]
    return y


class ActivationFunction(torch.autograd.Function):
    """Keeps ``x`` as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Activation) -> Tensor:
        y, _ = activation_forward(as_matrix(x), of.name, of.parameters, x.dtype, False)
        ctx.save_for_backward(guarded(x))
        ctx.of = of
        return as_output(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        of: Activation = ctx.of
        dx, _, _ = activation_backward(as_matrix(dy), as_matrix(x), of.name, of.parameters, x.dtype, False, False)
        return as_output(dx, x.shape), None
