"""Norms and activations followed by a cast: what produces the quantized operands of a layer.

Each comes at once (:func:`norm_quantize`, :func:`act_quantize`, :func:`dact_quantize`) or in phases: :func:`norm_value`
and its like give a :class:`Produced`, whose amaxes ranks may agree on before its cast; under current scaling the kernel
that makes the value finds them. The codes are always those of a cast of the value. That is the fp32 result itself where
delayed scaling, which needs no amax first, lets one kernel do both; everything else rounds to the dtype of the input
first (``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.kernels import activation, norm
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Layouts, Quantizer, as_matrix, assemble


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
    """A norm's or activation's result before its cast, or after it where one kernel does both.

    Args:
        value: [..., K], what the cast reads: fp32, or the dtype of the input. None if it was cast at once.
        dtype: that of the input, in which its operands stand for values.
        saved: what the backward needs besides the inputs: mean and rsigma of a norm, fp32 [M] each.
        amaxes: those that the cast needs, where the kernel that made the value found them.
        quantized: its operands, if it was cast at once.
        column_sum: the sum of the value over its rows, [K], if it was asked for: the gradient of a bias.
    """

    value: Tensor | None
    dtype: torch.dtype
    saved: tuple[Tensor, ...] = ()
    amaxes: Amaxes | None = None
    quantized: Quantized | None = None
    column_sum: Tensor | None = None

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


def reads_fp32(quantizer: Quantizer) -> bool:
    """The cast of a producer reads its fp32 result: delayed scaling in each orientation that is wanted."""
    casts = quantizer.casts
    return len(casts) > 0 and not quantizer.chained and all(fmt.scale_rule == "given" for fmt, _ in casts)


# ---- the value, or the cast at once ----


def norm_value(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    of: Norm,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    return_value: bool = False,
) -> Produced:
    """LayerNorm or RMSNorm of ``x``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.
        quantizer: of the operand to come; it decides whether the value is rounded.
        scale: that of delayed scaling, fp32 [1]: with it the kernel that norms casts too, and gives no value.
        return_value: others see the value too, so it is rounded to the dtype of ``x`` whatever the quantizer.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized (see ``cast_all``), or the parameters do not fit it.
    """
    matrix = as_matrix(x)
    options = of.normalization, of.eps, of.zero_centered_gamma
    cast = None if return_value else _CastAtOnce.of(quantizer, scale, x)
    if cast is not None:
        *outputs, mean, rsigma = norm.norm_cast(matrix, gamma, beta, *options, *cast.arguments)
        quantized = cast.operands(outputs, (matrix.shape[0], matrix.shape[1]))
        return Produced(None, x.dtype, (mean, rsigma), quantized=quantized)
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value else x.dtype
    measures = _measures(quantizer)
    y, mean, rsigma, amax = norm.norm_forward(matrix, gamma, beta, *options, dtype, measures)
    return Produced(y.reshape(x.shape), x.dtype, (mean, rsigma), _amaxes(quantizer, amax) if measures else None)


def act_value(
    x: Tensor, of: Activation, quantizer: Quantizer, *, scale: Tensor | None = None, return_value: bool = False
) -> Produced:
    """An activation of ``x`` [..., K], to be cast with ``quantizer``: [..., K], or [..., K / 2] if gated.

    Arguments and errors as in :func:`norm_value`.
    """
    matrix = as_matrix(x)
    columns = activation.out_columns(of.name, matrix.shape[1])
    cast = None if return_value else _CastAtOnce.of(quantizer, scale, x)
    if cast is not None:
        outputs = activation.activation_cast(matrix, of.name, of.parameters, *cast.arguments)
        return Produced(None, x.dtype, quantized=cast.operands(outputs, (matrix.shape[0], columns)))
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value else x.dtype
    measures = _measures(quantizer)
    y, amax = activation.activation_forward(matrix, of.name, of.parameters, dtype, measures)
    amaxes = _amaxes(quantizer, amax) if measures else None
    return Produced(y.reshape(*x.shape[:-1], columns), x.dtype, amaxes=amaxes)


def dact_value(
    dy: Tensor,
    x: Tensor,
    of: Activation,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    return_value: bool = False,
    with_column_sum: bool = False,
) -> Produced:
    """The gradient of an activation with respect to its input ``x`` [..., K], to be cast with ``quantizer``.

    Delayed scaling reads the fp32 result of plain activations only; that of a gated one is rounded first.
    ``with_column_sum``: give :attr:`Produced.column_sum` too. Other arguments and errors as in :func:`norm_value`.
    """
    operands = as_matrix(dy), as_matrix(x), of.name, of.parameters
    cast = None if return_value else _CastAtOnce.of(quantizer, scale, x)
    if cast is not None:
        *outputs, total = activation.activation_backward_cast(*operands, *cast.arguments, with_column_sum)
        quantized = cast.operands(outputs, (operands[1].shape[0], operands[1].shape[1]))
        total = total.to(x.dtype) if of.gated else total
        return Produced(None, x.dtype, quantized=quantized, column_sum=total if with_column_sum else None)
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value and not of.gated else x.dtype
    measures = _measures(quantizer)
    dx, amax, total = activation.activation_backward(*operands, dtype, measures, with_column_sum)
    amaxes = _amaxes(quantizer, amax) if measures else None
    return Produced(
        dx.reshape(x.shape), x.dtype, amaxes=amaxes, column_sum=total.to(dtype) if with_column_sum else None
    )


class _CastAtOnce(NamedTuple):
    """A cast with a given scale, done by the kernel that makes the value."""

    quantizer: Quantizer
    layouts: Layouts
    scale: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, quantizer: Quantizer, scale: Tensor | None, x: Tensor) -> _CastAtOnce | None:
        """None where the value is needed first; ``x`` is the input of what is cast."""
        if scale is None or len(quantizer.casts) != 1 or not reads_fp32(quantizer):
            return None
        return cls(quantizer, quantizer.layouts(x.device.type), scale, x.dtype)

    @property
    def arguments(self) -> tuple[Tensor, str, bool, bool]:
        """The scale, the format, and whether codes are wanted along the rows, and transposed along the columns."""
        dims = [dim for _, dim in self.layouts]
        return self.scale, self.layouts[0][0].spec, ROWWISE in dims, COLUMNWISE in dims

    def operands(self, outputs: Sequence[Tensor], shape: tuple[int, int]) -> Quantized:
        """Of the outputs of the operation: codes along the rows and along the columns, their scale and their amax."""
        row, column, scale_inv, amax = outputs
        each = [(row if dim == ROWWISE else column, scale_inv, amax, self.scale) for _, dim in self.layouts]
        return assemble(self.quantizer, self.layouts, iter(each), shape, self.dtype)


def _measures(quantizer: Quantizer) -> bool:
    """All that its casts need to know of the value is one amax, which the kernel that makes it can find."""
    casts = quantizer.casts
    return len(casts) > 0 and all(fmt.needs_amax and fmt.block == 0 for fmt, _ in casts)


def _amaxes(quantizer: Quantizer, amax: Tensor) -> Amaxes:
    return (amax,) * len(quantizer.casts)


# ---- value and cast in one call ----


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
    scale = _scale(quantizer, amaxes)
    produced = norm_value(x, gamma, beta, of, quantizer, scale=scale, return_value=return_value)
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
    produced = act_value(x, of, quantizer, scale=_scale(quantizer, amaxes), return_value=return_value)
    return _cast(produced, quantizer, amaxes, rng, return_value)


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
    produced = dact_value(dy, x, of, quantizer, scale=_scale(quantizer, amaxes), return_value=return_value)
    return _cast(produced, quantizer, amaxes, rng, return_value)


def _scale(quantizer: Quantizer, amaxes: Amaxes | None) -> Tensor | None:
    """The scale that is among ``amaxes`` if the cast takes one."""
    return amaxes[0] if amaxes is not None and reads_fp32(quantizer) else None


def _cast(produced: Produced, quantizer: Quantizer, amaxes: Amaxes | None, rng: Tensor | None, keep: bool) -> Cast:
    return Cast(produced.cast(quantizer, amaxes, rng), produced.value if keep else None, produced.saved)
