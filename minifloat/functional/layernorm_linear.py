"""The autograd function of a norm and the linear that reads it: the norm hands over codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.functional.linear import (
    KEPT_TENSORS,
    Kept,
    LinearCall,
    Ready,
    column_sum,
    grad_operands,
    gradients,
    multiply,
    quantize_operands,
    quantize_output,
)
from minifloat.functional.plan import LinearPlan
from minifloat.functional.producers import Norm, Produced, norm_value
from minifloat.functional.quantize import delayed_scale, record
from minifloat.operand import Quantized


class LayerNormLinearFunction(torch.autograd.Function):
    """N = norm(X), Y = N W^T + b, and the gradients.

    ======  ========  =================  ======================
    tensor  shape     contracted over    quantized along
    ======  ========  =================  ======================
    X       [..., K]
    N       [..., K]  K (M in wgrad)     rowwise (columnwise)
    W       [N, K]    K (N in dgrad)     rowwise (columnwise)
    dY      [..., N]  N (M in wgrad)     rowwise (columnwise)
    ======  ========  =================  ======================

    fprop Y = N W^T + b; dgrad dN = dY W; wgrad dW = dY^T N; dX, dgamma and dbeta are the norm's gradients of dN, to
    which the gradient of a returned N is added first. N itself is not kept, only its columnwise operand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        norm: Norm,
        plan: LinearPlan,
        call: LinearCall,
        ready: Ready,
        return_norm: bool,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Any:
        rounded = return_norm or plan.backward_override == "high_precision"  # which backward reads, too
        quantizer, scale = call.input_quantizer(plan, None), input_scale(plan, call)
        produced = norm_value(x, gamma, beta, norm, quantizer, scale=scale, return_value=rounded)
        operands = quantize_produced(plan, call, ready, produced, weight)
        y, kept = multiply(plan, call, operands, produced.value, weight, bias)
        ctx.norm, ctx.plan, ctx.call, ctx.layouts = norm, plan, call, kept.layouts
        ctx.has_beta, ctx.weight = beta is not None, call.needs_parameter(weight)
        ctx.save_for_backward(*kept.tensors, *(x, gamma, *produced.saved) * call.needs_x)
        ctx.set_materialize_grads(False)
        if produced.value is not None and return_norm and not call.needs_x:
            ctx.mark_non_differentiable(produced.value)
        y = quantize_output(plan, call, y.reshape(*x.shape[:-1], weight.shape[0]))
        return (y, produced.value) if return_norm else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dn_returned: Tensor | None = None) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        call: LinearCall = ctx.call
        saved = ctx.saved_tensors  # read once: a checkpoint gives each tensor once
        tensors, of_norm = saved[:KEPT_TENSORS], saved[KEPT_TENSORS:]
        dn = dw = db = dx = dgamma = dbeta = None
        if dy is not None:
            db = column_sum(dy) if call.needs_b else None
            kept = Kept.of(ctx.layouts, tensors)
            dn, dw = gradients(plan, call, kept, grad_operands(plan, call, dy), ctx.weight)
            if call.use is not None:
                call.use.backward_finished()
        if call.needs_x:
            dx, dgamma, dbeta = norm_gradients(ctx.norm, dn, dn_returned, *of_norm)
        return None, None, None, None, None, dx, dgamma, dbeta if ctx.has_beta else None, dw, db


def input_scale(plan: LinearPlan, call: LinearCall) -> Tensor | None:
    """The delayed scale for the kernel that makes X and casts it at once; None where somebody reads X itself."""
    return None if call.reads_value(plan) else delayed_scale(call.use, "input")


def quantize_produced(
    plan: LinearPlan, call: LinearCall, ready: Ready, produced: Produced, weight: Tensor
) -> tuple[Quantized, Quantized]:
    """The operands of what a norm or an activation produced, which may be cast already, and of the weight."""
    if produced.quantized is not None:
        ready.x = produced.quantized
        if call.use is not None:
            record(call.use, "input", produced.quantized)
    x, w = quantize_operands(plan, call, ready, produced.value, weight, x_amaxes=produced.amaxes)
    return produced.label(x), w


def norm_gradients(
    norm: Norm, dn: Tensor | None, dn_returned: Tensor | None, x: Tensor, gamma: Tensor, *saved: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dgamma and dbeta from the gradients of N, of which either may be missing: dgrad's and a returned N's."""
    total = add(None if dn is None else dn.reshape(x.shape), dn_returned)
    return (None, None, None) if total is None else norm.gradients(total, x, gamma, saved)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, each of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
