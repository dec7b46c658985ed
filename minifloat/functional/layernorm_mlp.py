"""The autograd function of norm, linear, activation, linear: what comes before a linear hands over codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.formats import COLUMNWISE
from minifloat.functional.call import KEPT_TENSORS, Kept, LinearCall, Ready
from minifloat.functional.layernorm_linear import (
    NormCall,
    casts_at_once,
    input_scale,
    kept_of_norm,
    norm_again,
    norm_gradients,
    norm_outputs,
    norm_produced,
    produced_quantizer,
    quantize_produced,
    wgrad_cast,
)
from minifloat.functional.linear import (
    bias_gradient,
    grad_operands,
    grad_quantizer,
    gradients,
    multiply,
    own_grad_operands,
)
from minifloat.functional.outputs import as_output
from minifloat.functional.plan import LinearPlan
from minifloat.functional.produced import Activation, Produced
from minifloat.functional.producers import act_quantize, act_value, dact_value
from minifloat.functional.quantize import delayed_scale, record
from minifloat.operand import Operand, Quantized


@dataclass(frozen=True)
class MLPCall:
    """One call: the norm, the activation, and both linears' plans and calls."""

    norm: NormCall
    activation: Activation
    plan1: LinearPlan
    call1: LinearCall
    plan2: LinearPlan
    call2: LinearCall


class LayerNormMLPFunction(torch.autograd.Function):
    """S = X + R, N = norm(S), H = N W1^T + b1, A = act(H), Y = A W2^T + b2, and the gradients.

    ======  =========  =================  ======================
    tensor  shape      contracted over    quantized along
    ======  =========  =================  ======================
    X, R    [..., K]   (without a residual R, S is X)
    S       [..., K]
    N       [..., K]   K (M in wgrad)     rowwise (columnwise)
    W1      [F', K]    K (F' in dgrad)    rowwise (columnwise)
    H       [..., F']  (F' = 2 F if the activation is gated, else F)
    A       [..., F]   F (M in wgrad)     rowwise (columnwise)
    W2      [K, F]     F (K in dgrad)     rowwise (columnwise)
    dY      [..., K]   K (M in wgrad)     rowwise (columnwise)
    dH      [..., F']  F' (M in wgrad)    rowwise (columnwise)
    ======  =========  =================  ======================

    fprop H and Y as above; dgrad dA = dY W2, dN = dH W1; wgrad dW2 = dY^T A, dW1 = dH^T N; dH = act'(H) dA; dX, dgamma
    and dbeta are the norm's gradients of dN, where the gradient of a returned S is added to dX, which is dR too. Kept
    are S, H and the columnwise operands of N and A; each of these is made again, of S and of H, where its linear's call
    says ``remakes_x``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mlp: MLPCall,
        ready1: Ready,
        ready2: Ready,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
    ) -> Any:
        plan1, call1, plan2, call2 = mlp.plan1, mlp.call1, mlp.plan2, mlp.call2
        scale1 = input_scale(plan1, call1)
        n = norm_produced(mlp.norm, plan1, call1, x, residual, gamma, beta, scale1)
        operands1 = quantize_produced(plan1, call1, ready1, n, w1)
        h, kept1 = multiply(plan1, call1, operands1, n.value, w1, b1, scale1)
        returned, of_norm = norm_outputs(ctx, mlp.norm, call1, n, x, residual), kept_of_norm(call1, n, gamma, beta)
        if not torch.compiler.is_compiling():
            ready1.x = ready1.w = None
        del n, operands1  # what is not kept must not lie beside the second half, which is the wider one
        quantizer, scale2 = produced_quantizer(plan2, call2), input_scale(plan2, call2)
        rounded = plan2.backward_override == "high_precision"  # backward reads A
        at_once = casts_at_once(plan2, call2)
        a = act_value(h, mlp.activation, quantizer, scale=scale2, at_once=at_once, return_value=rounded)
        operands2 = quantize_produced(plan2, call2, ready2, a, w2)
        a_value = a.value if call2.reads_value(plan2) else None
        del a
        y, kept2 = multiply(plan2, call2, operands2, a_value, w2, b2, scale2)
        ctx.mlp, ctx.layouts = mlp, (kept1.layouts, kept2.layouts)
        ctx.has_residual, ctx.has_beta = residual is not None, beta is not None
        ctx.weights = call1.needs_parameter(w1), call2.needs_parameter(w2)
        ctx.save_for_backward(*kept1.tensors, *kept2.tensors, h if call2.needs_x else None, *of_norm)
        ctx.set_materialize_grads(False)
        return as_output(y, (*x.shape[:-1], w2.shape[0])), *returned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *beside: Tensor | None) -> tuple[Any, ...]:
        mlp: MLPCall = ctx.mlp
        plan1, call1, plan2, call2 = mlp.plan1, mlp.call1, mlp.plan2, mlp.call2
        first, second, (h, beta, *of_norm) = _thirds(ctx.saved_tensors)
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless they are retained: what is used up must not lie there to the end
        dn = dw1 = db1 = dw2 = db2 = dx = dgamma = dbeta = None
        if dy is not None:
            summing = bias_gradient(call2, dy)
            kept2 = Kept.of(ctx.layouts[1], second)
            if call2.remakes_x:
                kept2 = kept2._replace(x=_activation_again(mlp, kept2.x_scale, h))
            da, dw2 = gradients(plan2, call2, kept2, grad_operands(plan2, call2, dy), ctx.weights[1])
            db2 = summing.wait()
            del second, kept2
            if call2.use is not None:
                call2.use.backward_finished()
            if da is not None:
                dh = _act_gradient(mlp, da, h)
                db1 = dh.column_sum
                del da, h  # wide as they are, they leave room for the codes of dH
                dh_operands = _grad_operands(mlp, dh)
                del dh
                kept1 = Kept.of(ctx.layouts[0], first)
                if call1.remakes_x:
                    kept1 = kept1._replace(x=norm_again(mlp.norm, plan1, kept1.x_scale, beta, *of_norm[:2]))
                dn, dw1 = gradients(plan1, call1, kept1, dh_operands, ctx.weights[0])
                if call1.use is not None:
                    call1.use.backward_finished()
        if call1.needs_x:
            dx, dgamma, dbeta = norm_gradients(mlp.norm.norm, call1, dn, *mlp.norm.beside(beside), *of_norm)
        dr = dx if ctx.has_residual else None
        return None, None, None, dx, dr, dgamma, dbeta if ctx.has_beta else None, dw1, db1, dw2, db2


def _activation_again(mlp: MLPCall, scale: Tensor | None, h: Tensor) -> Operand:
    """What wgrad reads of A; ``scale`` as in :func:`norm_again`."""
    made = act_quantize(h, mlp.activation, *wgrad_cast(mlp.plan2, scale), again=True)
    return made.quantized.along(COLUMNWISE)


def _act_gradient(mlp: MLPCall, da: Tensor, h: Tensor) -> Produced:
    """dH, with its sum over the rows, db1, if that is needed."""
    plan, call = mlp.plan1, mlp.call1
    rounded = plan.backward_override is not None  # its gradients read dH itself
    casts = call.needs_x or call.needs_w  # else only the bias is trained, whose gradient sums what a cast would read
    quantizer = grad_quantizer(plan, call) if casts else plan.grad_output
    scale = delayed_scale(call.use, "grad_output") if casts and not rounded else None
    return dact_value(
        da, h, mlp.activation, quantizer, scale=scale, at_once=casts, return_value=rounded,
        with_column_sum=call.needs_b,
    )  # fmt: skip


def _grad_operands(mlp: MLPCall, dh: Produced) -> Quantized:
    """The operands of dH for the first linear."""
    plan, call = mlp.plan1, mlp.call1
    if dh.quantized is None:
        assert dh.value is not None
        casts = call.needs_x or call.needs_w
        return dh.label(own_grad_operands(plan, call, dh.value, dh.amaxes if casts else None))
    if call.use is not None:
        record(call.use, "grad_output", dh.quantized)
    return dh.quantized


def _thirds(saved: tuple[Tensor | None, ...]) -> tuple[Any, Any, Any]:
    """What the first linear kept, what the second one kept, and the rest."""
    return saved[:KEPT_TENSORS], saved[KEPT_TENSORS : 2 * KEPT_TENSORS], saved[2 * KEPT_TENSORS :]
