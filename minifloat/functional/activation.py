"""Activations: under autograd, and as the outputs that a layer quantizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifloat.functional.autograd import apply, as_output, first_order, guarded
from minifloat.functional.fused_cast import FusedOutput, OutputCast
from minifloat.ops import activation
from minifloat.quantizer import Quantizer, as_matrix

_ACTIVATION = activation.activation_forward, activation.activation_cast
_ACTIVATION_RECOMPUTED = activation.activation_forward.for_recompute(), activation.activation_cast.for_recompute()


@dataclass(frozen=True)
class Activation:
    """Which activation, as a value of a call: one of ``kernels.activation.NAMES``, and its parameters if it has any."""

    name: str
    parameters: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parameters) != len(defaults := activation.parameters_of(self.name)):
            raise ValueError(
                f"{self.name} has {len(defaults)} parameters, got {len(self.parameters)}; use Activation.of"
            )

    @classmethod
    def of(cls, name: str, params: Mapping[str, float] | None = None) -> Activation:
        """With ``params`` by name, the rest by default: ``limit``, ``alpha``, ``glu_linear_offset`` of clamped_swiglu.

        Raises:
            ValueError: there is no such activation, or it has no such parameter.
        """
        return cls(name, activation.parameters_of(name, params))

    @property
    def gated(self) -> bool:
        """Its output is half as wide as its input."""
        return activation.gated(self.name)


def activate(x: Tensor, of: Activation) -> Tensor:
    """The activation of ``x`` [..., K], [..., K / 2] if gated; computed in fp32, rounded once to the dtype of ``x``.

    Raises:
        TypeError, ValueError: ``x`` is not bf16, fp16 or fp32, or of odd width and the activation is gated.
    """
    return apply(ActivationFunction, x, of)


class ActivationFunction(torch.autograd.Function):
    """Keeps ``x`` as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: Activation) -> Tensor:
        y, _ = activation.activation_forward(as_matrix(x), of.name, of.parameters, x.dtype, False)
        ctx.save_for_backward(guarded(x))
        ctx.of = of
        return as_output(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        of: Activation = ctx.of
        dx, _, _ = activation.activation_backward(
            as_matrix(dy), as_matrix(x), of.name, of.parameters, x.dtype, False, False
        )
        return as_output(dx, x.shape), None


# ---- to be quantized ----


def act_value(
    x: Tensor, of: Activation, quantizer: Quantizer, *, recompute: bool = False, **cast_options: Any
) -> FusedOutput:
    """An activation of ``x`` [..., K], to be cast with ``quantizer``: [..., K], or [..., K / 2] if gated.

    Other arguments and errors as in :func:`~minifloat.functional.norm.norm_value`.
    """
    cast = OutputCast(x, quantizer, **cast_options)
    forward, forward_cast = _ACTIVATION_RECOMPUTED if recompute else _ACTIVATION
    outputs = (forward_cast if cast.in_kernel else forward)(cast.matrix, of.name, of.parameters, *cast.arguments)
    return cast.output(outputs, (*x.shape[:-1], activation.out_columns(of.name, x.shape[-1])))


def dact_value(
    dy: Tensor, x: Tensor, of: Activation, quantizer: Quantizer, *, with_column_sum: bool = False, **cast_options: Any
) -> FusedOutput:
    """The gradient of an activation with respect to its input ``x`` [..., K], to be cast with ``quantizer``.

    Delayed scaling reads the fp32 result of plain activations only; that of a gated one is rounded first. The cast of
    blocks that straddle its two halves is not fused. ``with_column_sum``: give :attr:`FusedOutput.column_sum` too.
    Other arguments and errors as in :func:`~minifloat.functional.norm.norm_value`.
    """
    cast = OutputCast(x, quantizer, half=x.shape[-1] // 2 if of.gated else None, **cast_options)
    backward = activation.activation_backward_cast if cast.in_kernel else activation.activation_backward
    *outputs, total = backward(as_matrix(dy), cast.matrix, of.name, of.parameters, *cast.arguments, with_column_sum)
    return cast.output(outputs, x.shape, column_sum=total.to(cast.dtype) if with_column_sum else None)
