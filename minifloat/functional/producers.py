"""Norms and activations followed by a cast: what produces the quantized operands of a layer.

Each comes at once (:func:`norm_quantize`, :func:`act_quantize`, :func:`dact_quantize`) or in phases: :func:`norm_value`
and its like give a :class:`Produced`, whose amaxes ranks may agree on before its cast. The codes are always those of
a cast of :attr:`Produced.value`. That is the fp32 result itself where delayed scaling, which needs no amax first, lets
one kernel do both; everything else rounds to the dtype of the input first (``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.kernels.activation import activation_backward, activation_forward, gated, parameters_of
from minifloat.kernels.norm import norm_backward, norm_forward
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix


class Produced(NamedTuple):
    """A norm's or activation's result before its cast.

    Args:
        value: [..., K], what the cast reads: fp32, or the dtype of the input.
        dtype: that of the input, in which its operands stand for values.
        saved: what the backward needs besides the inputs: mean and rsigma of a norm, fp32 [M] each.
    """

    value: Tensor
    dtype: torch.dtype
    saved: tuple[Tensor, ...] = ()

    def amax(self, quantizer: Quantizer) -> Amaxes:
        """What ranks that share the value agree on before its cast."""
        return quantizer.amax(self.value)

    def cast(self, quantizer: Quantizer, amaxes: Amaxes | None = None, rng: Tensor | None = None) -> Quantized:
        """Quantizes the value; the arguments are those of :meth:`Quantizer.cast`."""
        return self.label(quantizer.cast(self.value, amaxes, rng))

    def label(self, quantized: Quantized) -> Quantized:
        """For a value that was cast among others: its operands dequantize to the dtype of the input, also from fp32."""

        def relabel(operand: Operand | None) -> Operand | None:
            return operand if operand is None or operand.dtype == self.dtype else replace(operand, dtype=self.dtype)

        row, column = quantized
        labelled = relabel(row)
        return Quantized(labelled, labelled if column is row else relabel(column))


class Cast(NamedTuple):
    """A norm's or activation's result, quantized.

    Args:
        quantized: its operands.
        value: [..., K] in the dtype of the input, if it was asked for.
        saved: see :class:`Produced`.
    """

    quantized: Quantized
    value: Tensor | None
    saved: tuple[Tensor, ...]


def reads_fp32(quantizer: Quantizer) -> bool:
    """The cast of a producer reads its fp32 result: delayed scaling in each orientation that is wanted."""
    casts = quantizer.casts
    return bool(casts) and not quantizer.chained and all(fmt.scale_rule == "given" for fmt, _ in casts)


def norm_value(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    quantizer: Quantizer,
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    return_value: bool = False,
) -> Produced:
    """LayerNorm or RMSNorm of ``x``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K]; RMSNorm has no beta.
        quantizer: of the operand to come; it decides whether the value is rounded.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: scale by ``1 + gamma``.
        return_value: others see the value too, so it is rounded to the dtype of ``x`` whatever the quantizer.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized (see ``cast_all``), or the parameters do not fit it.
    """
    dtype = x.dtype if return_value or not reads_fp32(quantizer) else torch.float32
    y, mean, rsigma = norm_forward(as_matrix(x), gamma, beta, normalization, eps, zero_centered_gamma, dtype)
    return Produced(y.reshape(x.shape), x.dtype, (mean, rsigma))


def norm_quantize(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    normalization: str = "LayerNorm",
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    return_value: bool = False,
) -> Cast:
    """:func:`norm_value` and its cast at once.

    Args:
        amaxes: ``(scale,)`` for delayed scaling; None otherwise, unless they were agreed on before.
        rng: seed and offset of stochastic rounding; None draws them.
    """
    produced = norm_value(
        x, gamma, beta, quantizer, normalization=normalization, eps=eps, zero_centered_gamma=zero_centered_gamma,
        return_value=return_value,
    )  # fmt: skip
    return _cast(produced, quantizer, amaxes, rng, return_value)


def norm_gradients(
    dy: Tensor,
    x: Tensor,
    gamma: Tensor,
    saved: tuple[Tensor, ...],
    *,
    normalization: str = "LayerNorm",
    zero_centered_gamma: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward of a norm: dx like ``x``, dgamma and dbeta like gamma (None for RMSNorm), all computed in fp32.

    Args:
        dy: [..., K], any float dtype.
        saved: :attr:`Produced.saved`.
    """
    mean, rsigma = saved
    matrix, gradient = as_matrix(x), as_matrix(dy)
    dx, dgamma, dbeta = norm_backward(gradient, matrix, gamma, mean, rsigma, normalization, zero_centered_gamma)
    return dx.reshape(x.shape), dgamma, dbeta if normalization == "LayerNorm" else None


def act_value(
    x: Tensor,
    activation: str,
    quantizer: Quantizer,
    *,
    activation_params: Mapping[str, float] | None = None,
    return_value: bool = False,
) -> Produced:
    """An activation of ``x``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        activation: one of ``kernels.activation.NAMES``; a gated one gives [..., K / 2].
        activation_params: of ``"clamped_swiglu"``: ``limit``, ``alpha``, ``glu_linear_offset``.
        return_value: as in :func:`norm_value`.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized, or there is no such activation or parameter.
    """
    dtype = x.dtype if return_value or not reads_fp32(quantizer) else torch.float32
    y = activation_forward(as_matrix(x), activation, parameters_of(activation, activation_params), dtype)
    return Produced(y.reshape(*x.shape[:-1], y.shape[-1]), x.dtype)


def act_quantize(
    x: Tensor,
    activation: str,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    activation_params: Mapping[str, float] | None = None,
    return_value: bool = False,
) -> Cast:
    """:func:`act_value` and its cast at once; ``amaxes`` and ``rng`` as in :func:`norm_quantize`."""
    produced = act_value(x, activation, quantizer, activation_params=activation_params, return_value=return_value)
    return _cast(produced, quantizer, amaxes, rng, return_value)


def dact_value(
    dy: Tensor,
    x: Tensor,
    activation: str,
    quantizer: Quantizer,
    *,
    activation_params: Mapping[str, float] | None = None,
    return_value: bool = False,
) -> Produced:
    """The gradient of an activation, to be cast with ``quantizer``: [..., K] like the activation's input ``x``.

    Delayed scaling reads the fp32 result of the plain activations only; that of a gated one is rounded first.
    """
    fp32 = reads_fp32(quantizer) and not return_value and not gated(activation)
    parameters = parameters_of(activation, activation_params)
    dtype = torch.float32 if fp32 else x.dtype
    dx = activation_backward(as_matrix(dy), as_matrix(x), activation, parameters, dtype)
    return Produced(dx.reshape(x.shape), x.dtype)


def dact_quantize(
    dy: Tensor,
    x: Tensor,
    activation: str,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    activation_params: Mapping[str, float] | None = None,
    return_value: bool = False,
) -> Cast:
    """:func:`dact_value` and its cast at once; ``amaxes`` and ``rng`` as in :func:`norm_quantize`."""
    produced = dact_value(dy, x, activation, quantizer, activation_params=activation_params, return_value=return_value)
    return _cast(produced, quantizer, amaxes, rng, return_value)


def _cast(produced: Produced, quantizer: Quantizer, amaxes: Amaxes | None, rng: Tensor | None, keep: bool) -> Cast:
    return Cast(produced.cast(quantizer, amaxes, rng), produced.value if keep else None, produced.saved)
