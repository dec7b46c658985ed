"""The autograd function of a norm and the linear that reads it: the norm hands over codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.formats import COLUMNWISE
from minifloat.functional.at_once import reads_fp32
from minifloat.functional.call import KEPT_TENSORS, Kept, LinearCall, Operands, Ready
from minifloat.functional.linear import (
    bias_gradient,
    grad_operands,
    gradients,
    multiply,
    quantize_operands,
    quantize_output,
)
from minifloat.functional.outputs import as_output, guarded
from minifloat.functional.plan import LinearPlan
from minifloat.functional.produced import Norm, Produced
from minifloat.functional.producers import norm_quantize, norm_value
from minifloat.functional.quantize import delayed_scale, record
from minifloat.operand import Operand
from minifloat.quantizer import Amaxes, Quantizer


@dataclass(frozen=True)
class NormCall:
    """The norm of one call, and what forward gives beside Y: N (``return_norm``), and S (``return_stream``).

    S goes on in the residual stream. Its gradient then comes here, to be added where dX is computed.
    """

    norm: Norm
    return_norm: bool = False
    return_stream: bool = False

    def beside(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """N and S, or their gradients, of what there is of them; None for what is not wanted.

        Functions return what is wanted alone: for an output that is None Dynamo may not trace their backward.
        """
        return given[0] if self.return_norm else None, given[-1] if self.return_stream else None


class LayerNormLinearFunction(torch.autograd.Function):
    """S = X + R, N = norm(S), Y = N W^T + b, and the gradients. Without a residual R, S is X.

    ======  ========  =================  ======================
    tensor  shape     contracted over    quantized along
    ======  ========  =================  ======================
    X, R    [..., K]
    S       [..., K]
    N       [..., K]  K (M in wgrad)     rowwise (columnwise)
    W       [N, K]    K (N in dgrad)     rowwise (columnwise)
    dY      [..., N]  N (M in wgrad)     rowwise (columnwise)
    ======  ========  =================  ======================

    fprop Y = N W^T + b; dgrad dN = dY W; wgrad dW = dY^T N; dX, dgamma and dbeta are the norm's gradients of dN, to
    which the gradient of a returned N is added first. The gradient of a returned S is added to dX, which is dR too.
    Kept are S, rounded to the dtype of X, and the columnwise operand of N, not N itself; where the call says
    ``remakes_x``, S alone, of which backward makes that operand again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        norm: NormCall,
        plan: LinearPlan,
        call: LinearCall,
        ready: Ready,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Any:
        scale = input_scale(plan, call)
        n = norm_produced(norm, plan, call, x, residual, gamma, beta, scale)
        operands = quantize_produced(plan, call, ready, n, weight)
        y, kept = multiply(plan, call, operands, n.value, weight, bias, scale)
        ctx.norm, ctx.plan, ctx.call, ctx.layouts = norm, plan, call, kept.layouts
        ctx.has_residual, ctx.has_beta = residual is not None, beta is not None
        ctx.weight = call.needs_parameter(weight)
        ctx.save_for_backward(*kept.tensors, *kept_of_norm(call, n, gamma, beta))
        ctx.set_materialize_grads(False)
        y = quantize_output(plan, call, as_output(y, call.parallel.output_shape(x.shape, weight.shape[0])))
        return y, *norm_outputs(ctx, norm, call, n, x, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *beside: Tensor | None) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        call: LinearCall = ctx.call
        saved = ctx.saved_tensors  # read once: a checkpoint gives each tensor once
        tensors, (beta, *of_norm) = saved[:KEPT_TENSORS], saved[KEPT_TENSORS:]
        dn = dw = db = dx = dgamma = dbeta = None
        if dy is not None:
            summing = bias_gradient(call, dy)
            kept = Kept.of(ctx.layouts, tensors)
            if call.remakes_x:
                kept = kept._replace(x=norm_again(ctx.norm, plan, kept.x_scale, beta, *of_norm[:2]))
            dn, dw = gradients(plan, call, kept, grad_operands(plan, call, dy), ctx.weight)
            db = summing.wait()
            if call.use is not None:
                call.use.backward_finished()
        if call.needs_x:
            dx, dgamma, dbeta = norm_gradients(ctx.norm.norm, call, dn, *ctx.norm.beside(beside), *of_norm)
        dr = dx if ctx.has_residual else None
        return None, None, None, None, dx, dr, dgamma, dbeta if ctx.has_beta else None, dw, db


def norm_produced(
    norm: NormCall,
    plan: LinearPlan,
    call: LinearCall,
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    scale: Tensor | None,
) -> Produced:
    """N for the linear of ``plan`` and ``call``; it is rounded if it is returned or backward reads it.

    ``scale``: of :func:`input_scale`.
    """
    quantizer = produced_quantizer(plan, call)
    rounded = norm.return_norm or plan.backward_override == "high_precision"
    return norm_value(
        x, gamma, beta, norm.norm, quantizer,
        residual=residual, scale=scale, at_once=casts_at_once(plan, call), return_value=rounded,
    )  # fmt: skip


def norm_outputs(
    ctx: Any, norm: NormCall, call: LinearCall, n: Produced, x: Tensor, residual: Tensor | None
) -> list[Tensor]:
    """What forward gives beside Y: N and S, each if it is wanted, and with a gradient if what it is made of has one."""
    value, stream = n.value if norm.return_norm else None, n.stream if norm.return_stream else None
    moving = x.requires_grad or (residual is not None and residual.requires_grad)
    fixed = (None if call.needs_x else value), (None if moving else stream)
    ctx.mark_non_differentiable(*[output for output in fixed if output is not None])
    return [output for output in (value, stream) if output is not None]


def input_scale(plan: LinearPlan, call: LinearCall) -> Tensor | None:
    """The delayed scale for the kernel that makes X and casts it at once; None where somebody reads X itself.

    A backward that makes X again needs this forward's, which the next update replaces.
    """
    return None if call.reads_value(plan) else delayed_scale(call.use, "input", keep=call.remakes_x)


def casts_at_once(plan: LinearPlan, call: LinearCall) -> bool:
    """What makes X may cast it in blocks, too: nobody reads X itself, and no other rank has rows of its blocks."""
    return not call.reads_value(plan) and not call.parallel.gathers_input


def produced_quantizer(plan: LinearPlan, call: LinearCall) -> Quantizer:
    """How what a norm or an activation produces is quantized.

    What is gathered is cast once where one cast serves both orientations: memory orders for GEMMs come afterwards.
    """
    quantizer = call.input_quantizer(plan, None)
    once = call.parallel.gathers_input and len(quantizer.casts) == 1 and quantizer.rowwise
    return quantizer.with_usage(columnwise=False) if once else quantizer


def quantize_produced(plan: LinearPlan, call: LinearCall, ready: Ready, produced: Produced, weight: Tensor) -> Operands:
    """The operands of what a norm or an activation produced, which may be cast already, and of the weight."""
    if produced.quantized is not None:
        ready.x = produced.quantized
        if call.use is not None:
            record(call.use, "input", produced.quantized)
    amaxes, label = produced.amaxes, produced.label
    return quantize_operands(plan, call, ready, produced.value, weight, x_amaxes=amaxes, label=label)


def kept_of_norm(call: LinearCall, n: Produced, gamma: Tensor, beta: Tensor | None) -> tuple[Tensor | None, ...]:
    """What backward reads of the norm: beta, if it norms again; and what :func:`norm_gradients` takes, if it runs."""
    assert n.stream is not None
    return beta if call.remakes_x else None, *((guarded(n.stream), gamma, *n.saved) if call.needs_x else ())


def norm_again(
    norm: NormCall, plan: LinearPlan, scale: Tensor | None, beta: Tensor | None, stream: Tensor, gamma: Tensor
) -> Operand:
    """What wgrad reads of N; ``scale``: delayed scaling's in the forward. Nothing is recorded a second time."""
    how = wgrad_cast(plan, scale)
    rounded = norm.return_norm  # as the forward rounded it
    made = norm_quantize(stream, gamma, beta, norm.norm, *how, return_value=rounded, again=True)
    return made.quantized.along(COLUMNWISE)


def wgrad_cast(plan: LinearPlan, scale: Tensor | None) -> tuple[Quantizer, Amaxes | None]:
    """How a norm or an activation casts X once more, for wgrad alone."""
    quantizer = plan.input.with_usage(rowwise=False)
    return quantizer, (scale,) if scale is not None and reads_fp32(quantizer) else None


def norm_gradients(
    norm: Norm,
    call: LinearCall,
    dn: Tensor | None,
    dn_returned: Tensor | None,
    ds: Tensor | None,
    stream: Tensor,
    gamma: Tensor,
    *saved: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dgamma and dbeta from the gradients of N, dgrad's and a returned N's, and of S; any may be missing.

    ``call``: of the linear that reads N. Where that gathers N, each rank has seen the gradients of its rows alone.
    """
    total = add(None if dn is None else dn.reshape(stream.shape), dn_returned)
    if total is None:
        return ds, None, None
    dx, dgamma, dbeta = norm.gradients(total, stream, gamma, saved, ds)
    sums = [call.parallel.start_sum_of_rows(each) for each in (dgamma, dbeta)]
    return dx, sums[0].wait(), sums[1].wait()


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, each of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
