"""Norms and activations followed by a cast: what produces the quantized operands of a layer.

Each comes at once (:func:`norm_quantize`, :func:`act_quantize`, :func:`dact_quantize`) or in phases: :func:`norm_value`
and its like give a :class:`Produced`, whose amaxes ranks may agree on before its cast; under current scaling the kernel
that makes the value finds them. Delayed scaling, and blocks, whose amaxes are their own, let that kernel cast it too,
so that nobody writes it; NVFP4 needs an amax of all of it first. The codes are always those of a cast of the value.
That is the fp32 result itself under delayed scaling; everything else rounds to the dtype of the input first
(``docs/numerics.md`` 3.3 and 3.4).
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from minifloat.functional.at_once import CastAtOnce, reads_fp32
from minifloat.functional.outputs import as_output
from minifloat.functional.produced import Activation, Cast, Norm, Produced
from minifloat.ops import activation, norm
from minifloat.quantizer import Amaxes, Quantizer, as_matrix

_NORM = norm.norm_forward, norm.norm_cast
_ACTIVATION = activation.activation_forward, activation.activation_cast
_NORM_AGAIN = norm.norm_forward.for_recompute(), norm.norm_cast.for_recompute()
_ACTIVATION_AGAIN = activation.activation_forward.for_recompute(), activation.activation_cast.for_recompute()


# ---- the value, or the cast at once ----


def norm_value(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    of: Norm,
    quantizer: Quantizer,
    *,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    at_once: bool = False,
    return_value: bool = False,
    again: bool = False,
) -> Produced:
    """LayerNorm or RMSNorm of ``x``, or of ``x + residual``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.
        quantizer: of the operand to come; it decides whether the value is rounded.
        residual: [..., K] in the dtype of ``x``; the sum, rounded to it, is :attr:`Produced.stream`.
        scale: that of delayed scaling, fp32 [1]: with it the kernel that norms casts too, and gives no value.
        at_once: so it does for blocks that need no amax but their own. Not where ranks that share a block agree first.
        return_value: others see the value too, so it is rounded to the dtype of ``x`` whatever the quantizer.
        again: it is a backward that does what its forward did, see ``Operation.for_recompute``.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized (see ``cast_all``), or the parameters do not fit it.
    """
    matrix, added = as_matrix(x), None if residual is None else as_matrix(residual)
    options = of.normalization, of.eps, of.zero_centered_gamma
    forward, forward_cast = _NORM_AGAIN if again else _NORM
    cast = None if return_value else CastAtOnce.of(quantizer, scale, at_once, x)
    if cast is not None:
        *outputs, mean, rsigma, total = forward_cast(matrix, gamma, beta, *options, *cast.arguments, added)
        quantized = cast.operands(outputs, (matrix.shape[0], matrix.shape[1]))
        stream = x if residual is None else as_output(total, x.shape)
        return Produced(None, x.dtype, (mean, rsigma), quantized=quantized, stream=stream)
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value else x.dtype
    measures = _measures(quantizer)
    y, mean, rsigma, amax, total = forward(matrix, gamma, beta, *options, dtype, measures, added)
    stream = x if residual is None else as_output(total, x.shape)
    amaxes = _amaxes(quantizer, amax) if measures else None
    return Produced(as_output(y, x.shape), x.dtype, (mean, rsigma), amaxes, stream=stream)


def act_value(
    x: Tensor,
    of: Activation,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    at_once: bool = False,
    return_value: bool = False,
    again: bool = False,
) -> Produced:
    """An activation of ``x`` [..., K], to be cast with ``quantizer``: [..., K], or [..., K / 2] if gated.

    Arguments and errors as in :func:`norm_value`.
    """
    matrix = as_matrix(x)
    columns = activation.out_columns(of.name, matrix.shape[1])
    forward, forward_cast = _ACTIVATION_AGAIN if again else _ACTIVATION
    cast = None if return_value else CastAtOnce.of(quantizer, scale, at_once, x)
    if cast is not None:
        outputs = forward_cast(matrix, of.name, of.parameters, *cast.arguments)
        return Produced(None, x.dtype, quantized=cast.operands(outputs, (matrix.shape[0], columns)))
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value else x.dtype
    measures = _measures(quantizer)
    y, amax = forward(matrix, of.name, of.parameters, dtype, measures)
    amaxes = _amaxes(quantizer, amax) if measures else None
    return Produced(y.reshape(*x.shape[:-1], columns), x.dtype, amaxes=amaxes)


def dact_value(
    dy: Tensor,
    x: Tensor,
    of: Activation,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    at_once: bool = False,
    return_value: bool = False,
    with_column_sum: bool = False,
) -> Produced:
    """The gradient of an activation with respect to its input ``x`` [..., K], to be cast with ``quantizer``.

    Delayed scaling reads the fp32 result of plain activations only; that of a gated one is rounded first. Blocks that
    straddle its two halves are not cast at once. ``with_column_sum``: give :attr:`Produced.column_sum` too. Other
    arguments and errors as in :func:`norm_value`.
    """
    operands = as_matrix(dy), as_matrix(x), of.name, of.parameters
    cast = None if return_value else CastAtOnce.of(quantizer, scale, at_once, x)
    if cast is not None and (cast.given or not of.gated or cast.divides(x.shape[-1] // 2)):
        *outputs, total = activation.activation_backward_cast(*operands, *cast.arguments, with_column_sum)
        quantized = cast.operands(outputs, (operands[1].shape[0], operands[1].shape[1]))
        total = total if cast.given and not of.gated else total.to(x.dtype)
        return Produced(None, x.dtype, quantized=quantized, column_sum=total if with_column_sum else None)
    dtype = torch.float32 if reads_fp32(quantizer) and not return_value and not of.gated else x.dtype
    measures = _measures(quantizer)
    dx, amax, total = activation.activation_backward(*operands, dtype, measures, with_column_sum)
    amaxes = _amaxes(quantizer, amax) if measures else None
    return Produced(
        dx.reshape(x.shape), x.dtype, amaxes=amaxes, column_sum=total.to(dtype) if with_column_sum else None
    )


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
    again: bool = False,
) -> Cast:
    """:func:`norm_value` and its cast at once.

    Args:
        amaxes: ``(scale,)`` for delayed scaling; None otherwise, unless they were agreed on before.
        rng: seed and offset of stochastic rounding; None draws them.
    """
    known = _known(quantizer, amaxes)
    produced = norm_value(x, gamma, beta, of, quantizer, **known, return_value=return_value, again=again)
    return _cast(produced, quantizer, amaxes, rng, return_value)


def act_quantize(
    x: Tensor,
    of: Activation,
    quantizer: Quantizer,
    amaxes: Amaxes | None = None,
    rng: Tensor | None = None,
    *,
    return_value: bool = False,
    again: bool = False,
) -> Cast:
    """:func:`act_value` and its cast at once; ``amaxes`` and ``rng`` as in :func:`norm_quantize`."""
    produced = act_value(x, of, quantizer, **_known(quantizer, amaxes), return_value=return_value, again=again)
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
    produced = dact_value(dy, x, of, quantizer, **_known(quantizer, amaxes), return_value=return_value)
    return _cast(produced, quantizer, amaxes, rng, return_value)


class _Known(TypedDict):
    scale: Tensor | None
    at_once: bool


def _known(quantizer: Quantizer, amaxes: Amaxes | None) -> _Known:
    """The scale that is among ``amaxes`` if the cast takes one; without any nobody agreed on those of blocks."""
    nothing = amaxes is None or all(amax is None for amax in amaxes)
    scale = amaxes[0] if amaxes is not None and reads_fp32(quantizer) else None
    return _Known(scale=scale, at_once=nothing)


def _cast(produced: Produced, quantizer: Quantizer, amaxes: Amaxes | None, rng: Tensor | None, keep: bool) -> Cast:
    return Cast(produced.cast(quantizer, amaxes, rng), produced.value if keep else None, produced.saved)
