"""Norms and activations followed by a cast: what produces the quantized operands of a layer.

Each comes at once (:func:`norm_quantize`, :func:`act_quantize`, :func:`dact_quantize`) or in phases: :func:`norm_value`
and its like give a :class:`Produced`, whose amaxes ranks may agree on before its cast. The codes are always those of
a cast of :attr:`Produced.value`. That is the fp32 result itself where delayed scaling, which needs no amax first, lets
one kernel do both; everything else rounds to the dtype of the input first (``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.kernels import activation, norm
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix


@dataclass(frozen=True)
class Norm:
    """Which norm, as a value for a plan.

    Args:
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        eps: added to the variance.
        zero_centered_gamma: scale by ``1 + gamma``.
    """

    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        norm.check_name(self.normalization)

    def gradients(
        self, dy: Tensor, x: Tensor, gamma: Tensor, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx like ``x``, dgamma and dbeta (None for RMSNorm) like gamma, all computed in fp32.

        Args:
            dy: [..., K], any float dtype.
            saved: :attr:`Produced.saved`.
        """
        mean, rsigma = saved
        dx, dgamma, dbeta = norm.norm_backward(
            as_matrix(dy), as_matrix(x), gamma, mean, rsigma, self.normalization, self.zero_centered_gamma
        )
        return dx.reshape(x.shape), dgamma, dbeta if self.normalization == "LayerNorm" else None


@dataclass(frozen=True)
class Activation:
    """Which activation, a value for a plan: one of ``kernels.activation.NAMES``, and its parameters if it has any."""

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
        """Makes operands of the value, wherever they were cast, stand for values in the dtype of the input."""
        row, column = quantized
        labelled = self._relabel(row)
        return Quantized(labelled, labelled if column is row else self._relabel(column))

    def _relabel(self, operand: Operand | None) -> Operand | None:
        if operand is None or operand.dtype == self.dtype:
            return operand
        o = operand  # spelled out: torch.compile of PyTorch 2.11 does not trace dataclasses.replace
        return Operand(o.codes, o.scale_inv, o.amax, o.format, o.dim, o.shape, self.dtype)


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
    return len(casts) > 0 and not quantizer.chained and all(fmt.scale_rule == "given" for fmt, _ in casts)


def norm_value(
    x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm, quantizer: Quantizer, *, return_value: bool = False
) -> Produced:
    """LayerNorm or RMSNorm of ``x``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.
        quantizer: of the operand to come; it decides whether the value is rounded.
        return_value: others see the value too, so it is rounded to the dtype of ``x`` whatever the quantizer.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized (see ``cast_all``), or the parameters do not fit it.
    """
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value else x.dtype
    y, *saved = norm.norm_forward(as_matrix(x), gamma, beta, of.normalization, of.eps, of.zero_centered_gamma, dtype)
    return Produced(y.reshape(x.shape), x.dtype, tuple(saved))


def act_value(x: Tensor, of: Activation, quantizer: Quantizer, *, return_value: bool = False) -> Produced:
    """An activation of ``x`` [..., K], to be cast with ``quantizer``: [..., K], or [..., K / 2] if gated.

    Arguments and errors as in :func:`norm_value`.
    """
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value else x.dtype
    y = activation.activation_forward(as_matrix(x), of.name, of.parameters, dtype)
    return Produced(y.reshape(*x.shape[:-1], y.shape[-1]), x.dtype)


def dact_value(dy: Tensor, x: Tensor, of: Activation, quantizer: Quantizer, *, return_value: bool = False) -> Produced:
    """The gradient of an activation with respect to its input ``x`` [..., K], to be cast with ``quantizer``.

    Delayed scaling reads the fp32 result of plain activations only; that of a gated one is rounded first.
    """
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value and not of.gated else x.dtype
    dx = activation.activation_backward(as_matrix(dy), as_matrix(x), of.name, of.parameters, dtype)
    return Produced(dx.reshape(x.shape), x.dtype)


def norm_quantize(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    of: Norm,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    return_value: bool = False,
) -> Cast:
    """:func:`norm_value` and its cast at once.

    Args:
        amaxes: ``(scale,)`` for delayed scaling; None otherwise, unless they were agreed on before.
        rng: seed and offset of stochastic rounding; None draws them.
    """
    produced = norm_value(x, gamma, beta, of, quantizer, return_value=return_value)
    return _cast(produced, quantizer, amaxes, rng, return_value)


def act_quantize(
    x: Tensor,
    of: Activation,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    return_value: bool = False,
) -> Cast:
    """:func:`act_value` and its cast at once; ``amaxes`` and ``rng`` as in :func:`norm_quantize`."""
    return _cast(act_value(x, of, quantizer, return_value=return_value), quantizer, amaxes, rng, return_value)


def dact_quantize(
    dy: Tensor,
    x: Tensor,
    of: Activation,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    return_value: bool = False,
) -> Cast:
    """:func:`dact_value` and its cast at once; ``amaxes`` and ``rng`` as in :func:`norm_quantize`."""
    return _cast(dact_value(dy, x, of, quantizer, return_value=return_value), quantizer, amaxes, rng, return_value)


def _cast(produced: Produced, quantizer: Quantizer, amaxes: Amaxes | None, rng: Tensor | None, keep: bool) -> Cast:
    return Cast(produced.cast(quantizer, amaxes, rng), produced.value if keep else None, produced.saved)
