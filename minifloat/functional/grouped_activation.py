"""Activations between the grouped linears of experts, times the probabilities of their rows.

Their codes are those of a cast of the value, whichever kernel casts it; under delayed scaling too it is rounded first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifloat.delayed_call import DelayedCall
from minifloat.functional.activation import Activation
from minifloat.functional.autograd import first_order, guarded
from minifloat.functional.grouped import GroupedCasts
from minifloat.functional.quantize import delayed_scale
from minifloat.operand import Quantized
from minifloat.ops.activation import out_columns
from minifloat.ops.grouped.activation import (
    grouped_activation,
    grouped_activation_backward,
    grouped_activation_backward_cast,
    grouped_activation_cast,
)

_ACTIVATION = grouped_activation, grouped_activation_cast
_ACTIVATION_RECOMPUTED = grouped_activation.for_recompute(), grouped_activation_cast.for_recompute()


class GroupedActivationFunction(torch.autograd.Function):
    """A = p act(H) and its gradients, dH = act'(H) p dA and dp = the sum of act(H) dA over a row; keeps H and p.

    H [M, N], or [M, 2 N] if the activation is gated; p fp32 [M] or None. Rows that are no group's are 0.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, probabilities: Tensor | None, offsets: Tensor, of: Activation) -> Tensor:
        y, _ = grouped_activation(h, probabilities, offsets, of.name, of.parameters, False)
        kept = () if probabilities is None else (guarded(probabilities),)
        ctx.save_for_backward(guarded(h), offsets, *kept)
        ctx.of = of
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
        h, offsets, *kept = ctx.saved_tensors
        probabilities = kept[0] if kept else None
        of: Activation = ctx.of
        dh, dp, _ = grouped_activation_backward(da, h, probabilities, offsets, of.name, of.parameters, False)
        return dh, dp if kept else None, None, None


def act_operands(
    casts: GroupedCasts,
    of: Activation,
    h: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    delayed_call: DelayedCall | None,
    scales: Tensor | None = None,
    recompute: bool = False,
) -> Quantized:
    """A = p act(H), cast group by group; arguments as of :class:`GroupedCasts`, which records amaxes likewise.

    ``recompute``: backward recomputes what its forward computed, see ``Operation.for_recompute``.
    """
    how = of.name, of.parameters
    forward, forward_cast = _ACTIVATION_RECOMPUTED if recompute else _ACTIVATION
    if not casts.in_kernel:
        y, amax = forward(h, probabilities, offsets, *how, casts.one_amax)
        return casts(y, offsets, delayed_call, scales, amax if casts.one_amax else None)
    if scales is None and delayed_call is not None:
        scales = delayed_scale(delayed_call, casts.kind)
    made = forward_cast(h, probabilities, offsets, scales, *how, *casts.specs)
    like = h[:, : out_columns(of.name, h.shape[1])]
    return casts.operands(like, offsets, made, [scales] * len(casts.formats), delayed_call)


def dact_operands(
    casts: GroupedCasts,
    of: Activation,
    da: Tensor,
    h: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    delayed_call: DelayedCall | None,
    with_value: bool,
) -> tuple[Quantized, Tensor, Tensor | None]:
    """dH = act'(H) p dA, cast group by group; dp, [0] without probabilities; and the value, if it is read too.

    The cast of blocks that straddle the halves of a gated activation's input is a kernel of its own.
    """
    how = of.name, of.parameters
    straddles = of.gated and casts.in_kernel and (h.shape[1] // 2) % max(casts.formats[0].block, 1) != 0
    if with_value or straddles or not casts.in_kernel:
        dh, dp, amax = grouped_activation_backward(da, h, probabilities, offsets, *how, casts.one_amax)
        operands = casts(dh, offsets, delayed_call, None, amax if casts.one_amax else None)
        return operands, dp, dh if with_value else None
    scales = None if delayed_call is None else delayed_scale(delayed_call, casts.kind)
    *made, dp = grouped_activation_backward_cast(da, h, probabilities, offsets, scales, *how, *casts.specs)
    return casts.operands(h, offsets, made, [scales] * len(casts.formats), delayed_call), dp, None
