"""The autograd function of a norm and the linear that reads it: the norm hands over codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE
from minifloat.functional.autograd import first_order, guarded
from minifloat.functional.fused_cast import FusedOutput, reads_fp32
from minifloat.functional.linear import gradients, pack, unpack
from minifloat.functional.linear_config import LinearConfig
from minifloat.functional.linear_plan import LinearPlan
from minifloat.functional.linear_steps import Call
from minifloat.functional.norm import Norm, norm_quantize, norm_value
from minifloat.functional.quantize import delayed_scale, record
from minifloat.operand import Operand, Quantized
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
    Saved are S, rounded to the dtype of X, and the columnwise operand of N, not N itself; under ``recompute_x`` S
    alone, from which backward recomputes that operand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        norm: NormCall,
        plan: LinearPlan,
        call: Call,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Any:
        scale = input_scale(plan, call)
        n = norm_output(norm, plan, x, residual, gamma, beta, scale)
        operands, w, own = operands_of_output(plan, call, n, weight)
        y = plan.fprop(operands, w, bias)
        ctx.norm, ctx.plan, ctx.use = norm, plan, call.use
        ctx.has_residual, ctx.has_beta = residual is not None, beta is not None
        ctx.weight = weight if plan.writes_to_weight else None
        tensors, ctx.layouts = pack(plan.save_x(n.value, own), plan.save_w(weight, w))
        ctx.save_for_backward(*tensors, scale if plan.recompute_x else None, *saved_of_norm(plan, n, gamma, beta))
        ctx.set_materialize_grads(False)
        return plan.output(y, x.shape, call.use), *norm_outputs(ctx, norm, plan, n, x, residual)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, *beside: Tensor | None) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        saved = ctx.saved_tensors  # read once: a checkpoint gives each tensor once
        (x, w), (scale, beta, *of_norm) = unpack(ctx.layouts, saved[:6]), saved[6:]
        dn = dw = db = dx = dgamma = dbeta = None
        if dy is not None:
            db = plan.bias_gradient(dy)
            if plan.recompute_x:
                x = recompute_norm_operand(ctx.norm, plan.config, scale, beta, *of_norm[:2])
            dn, dw = gradients(plan, plan.quantize_dy(dy, ctx.use), x, w, scale, ctx.weight)
            db = plan.reduce_db(db)
            if ctx.use is not None:
                ctx.use.backward_finished()
        if plan.options.needs_x:
            dx, dgamma, dbeta = norm_gradients(ctx.norm.norm, plan, dn, *ctx.norm.beside(beside), *of_norm)
        dr = dx if ctx.has_residual else None
        return None, None, None, dx, dr, dgamma, dbeta if ctx.has_beta else None, dw, db


def norm_output(
    norm: NormCall,
    plan: LinearPlan,
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor,
    beta: Tensor | None,
    scale: Tensor | None,
) -> FusedOutput:
    """N for the linear of ``plan``; it is rounded if it is returned or backward reads it.

    ``scale``: of :func:`input_scale`.
    """
    rounded = norm.return_norm or plan.config.backward_override == "high_precision"
    return norm_value(
        x, gamma, beta, norm.norm, output_quantizer(plan),
        residual=residual, scale=scale, fused=fuses_blocks(plan), return_value=rounded,
    )  # fmt: skip


def norm_outputs(
    ctx: Any, norm: NormCall, plan: LinearPlan, n: FusedOutput, x: Tensor, residual: Tensor | None
) -> list[Tensor]:
    """What forward gives beside Y: N and S, each if it is wanted, and with a gradient if what it is made of has one."""
    value, stream = n.value if norm.return_norm else None, n.stream if norm.return_stream else None
    moving = x.requires_grad or (residual is not None and residual.requires_grad)
    fixed = (None if plan.options.needs_x else value), (None if moving else stream)
    ctx.mark_non_differentiable(*[output for output in fixed if output is not None])
    return [output for output in (value, stream) if output is not None]


def input_scale(plan: LinearPlan, call: Call) -> Tensor | None:
    """The delayed scale for the kernel that computes X and casts it; None where backward reads X itself.

    A backward that recomputes X needs this forward's, which the next update replaces.
    """
    return None if plan.saves_value else delayed_scale(call.use, "input", keep=plan.recompute_x)


def fuses_blocks(plan: LinearPlan) -> bool:
    """The kernel that computes X may cast it in blocks: nothing reads X itself, and no other rank has rows of them."""
    return not plan.saves_value and not plan.options.parallel.gathers_input


def output_quantizer(plan: LinearPlan) -> Quantizer:
    """How the result of a norm or an activation is quantized.

    What is gathered is cast once where one cast serves both orientations: memory orders for GEMMs come afterwards.
    """
    quantizer = plan.x_quantizer
    once = plan.options.parallel.gathers_input and len(quantizer.casts) == 1 and quantizer.rowwise
    return quantizer.with_usage(columnwise=False) if once else quantizer


def operands_of_output(
    plan: LinearPlan, call: Call, output: FusedOutput, weight: Tensor
) -> tuple[Any, Quantized, Quantized]:
    """The operands of what a norm or an activation computed, which may be cast already, and of the weight."""
    if output.quantized is not None:
        call.x = output.quantized
        if call.use is not None:
            record(call.use, "input", output.quantized)
    return plan.quantize_inputs(call, output.value, weight, None, output.amaxes, output.label)


def saved_of_norm(plan: LinearPlan, n: FusedOutput, gamma: Tensor, beta: Tensor | None) -> tuple[Tensor | None, ...]:
    """What backward reads of the norm: beta, to recompute N; and what :func:`norm_gradients` takes, if it runs."""
    assert n.stream is not None
    of_gradients = (guarded(n.stream), gamma, *n.saved) if plan.options.needs_x else ()
    return beta if plan.recompute_x else None, *of_gradients


def recompute_norm_operand(
    norm: NormCall, config: LinearConfig, scale: Tensor | None, beta: Tensor | None, stream: Tensor, gamma: Tensor
) -> Operand:
    """What wgrad reads of N; ``scale``: delayed scaling's in the forward. Nothing is recorded a second time."""
    how = wgrad_cast(config, scale)
    rounded = norm.return_norm  # as the forward rounded it
    recomputed = norm_quantize(stream, gamma, beta, norm.norm, *how, return_value=rounded, recompute=True)
    return recomputed.operands.along(COLUMNWISE)


def wgrad_cast(config: LinearConfig, scale: Tensor | None) -> tuple[Quantizer, Amaxes | None]:
    """How a norm or an activation casts X once more, for wgrad alone."""
    quantizer = config.input.with_usage(rowwise=False)
    return quantizer, (scale,) if scale is not None and reads_fp32(quantizer) else None


def norm_gradients(
    norm: Norm,
    plan: LinearPlan,
    dn: Tensor | None,
    dn_returned: Tensor | None,
    ds: Tensor | None,
    stream: Tensor,
    gamma: Tensor,
    *saved: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX, dgamma and dbeta from the gradients of N, dgrad's and a returned N's, and of S; any may be missing.

    ``plan``: of the linear that reads N. Where that gathers N, each rank has seen the gradients of its rows alone.
    """
    total = add(None if dn is None else dn.reshape(stream.shape), dn_returned)
    if total is None:
        return ds, None, None
    dx, dgamma, dbeta = norm.gradients(total, stream, gamma, saved, ds)
    sums = [plan.options.parallel.start_sum_of_rows(each) for each in (dgamma, dbeta)]
    return dx, sums[0].wait(), sums[1].wait()


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, each of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
