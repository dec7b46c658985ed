"""Norms and activations as values, and what they produce: the value that a cast is to read, or its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.functional.outputs import as_output
from minifloat.operand import Operand, Quantized
from minifloat.ops import activation, norm
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
        self, dy: Tensor, x: Tensor, gamma: Tensor, saved: tuple[Tensor, ...], dresidual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx like ``x``, dgamma and dbeta (None for RMSNorm) like gamma, all computed in fp32.

        Args:
            dy: [..., K], any float dtype.
            saved: :attr:`Produced.saved`.
            dresidual: another gradient of ``x``, added to dx before its one rounding.
        """
        mean, rsigma = saved
        other = None if dresidual is None else as_matrix(dresidual)
        dx, dgamma, dbeta = norm.norm_backward(
            as_matrix(dy), as_matrix(x), gamma, mean, rsigma, self.normalization, self.zero_centered_gamma, other
        )
        return as_output(dx, x.shape), dgamma, dbeta if self.normalization == "LayerNorm" else None


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
    """A norm's or activation's result before its cast, or after it where one kernel does both.

    Args:
        value: [..., K], what the cast reads: fp32, or the dtype of the input. None if it was cast at once.
        dtype: that of the input, in which its operands stand for values.
        saved: what the backward needs besides the inputs: mean and rsigma of a norm, fp32 [M] each.
        amaxes: those that the cast needs, where the kernel that made the value found them.
        quantized: its operands, if it was cast at once.
        column_sum: the sum of the value over its rows, [K], if it was asked for: the gradient of a bias.
        stream: what a norm was of, [..., K]: its input, to which a residual may have been added.
    """

    value: Tensor | None
    dtype: torch.dtype
    saved: tuple[Tensor, ...] = ()
    amaxes: Amaxes | None = None
    quantized: Quantized | None = None
    column_sum: Tensor | None = None
    stream: Tensor | None = None

    def amax(self, quantizer: Quantizer) -> Amaxes:
        """What ranks that share the value agree on before its cast."""
        if self.amaxes is not None:
            return self.amaxes
        assert self.value is not None, "it has been cast already"
        return quantizer.amax(self.value)

    def cast(self, quantizer: Quantizer, amaxes: Amaxes | None = None, rng: Tensor | None = None) -> Quantized:
        """Quantizes the value for a GEMM; the arguments are those of :meth:`Quantizer.cast`."""
        if self.quantized is not None:
            return self.quantized
        assert self.value is not None
        amaxes = self.amaxes if amaxes is None else amaxes
        return self.label(quantizer.cast(self.value, amaxes, rng, gemm_ready=True))

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
