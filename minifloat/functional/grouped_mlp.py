"""The autograd function of the MLPs of experts: grouped linear, activation, grouped linear, cast in between."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.delayed_call import DelayedCall
from minifloat.formats import COLUMNWISE
from minifloat.functional.activation import Activation
from minifloat.functional.autograd import first_order, guarded
from minifloat.functional.grouped import GroupedCasts, GroupLayout
from minifloat.functional.grouped_activation import act_operands, dact_operands
from minifloat.functional.grouped_plan import GroupedPlan
from minifloat.functional.linear import gradients, pack, unpack
from minifloat.functional.linear_steps import Call
from minifloat.functional.permutation import Routing
from minifloat.functional.quantize import delayed_scale
from minifloat.operand import Operand, Quantized
from minifloat.ops.permute import unpermute_rows


class GroupedMLPCall(NamedTuple):
    """The activation, both linears' plans, and where rows come from if X and Y are tokens: ``tokens``, int32 [T k]."""

    activation: Activation
    plan1: GroupedPlan
    plan2: GroupedPlan
    routing: Routing | None
    tokens: Tensor | None

    def cast(self, casts: GroupedCasts, x: Tensor, layout: GroupLayout, delayed_call: DelayedCall | None) -> Quantized:
        """The operands of the rows of ``x``, or of those that its tokens go to."""
        if self.routing is not None and self.tokens is not None:
            return casts.of_tokens(x, self.routing, self.tokens, delayed_call)
        return casts(x, layout.offsets, delayed_call)

    def collect(self, rows: Tensor) -> Tensor:
        """The rows, or for each token the sum of its own."""
        if self.routing is None:
            return rows
        return unpermute_rows(rows, None, self.routing.inverse, self.routing.offsets)


class GroupedMLPFunction(torch.autograd.Function):
    """H_g = X_g W1_g^T + b1_g, A = p act(H), Y_g = A_g W2_g^T + b2_g for the rows of each expert g, and the gradients.

    ======  ==========  ===================  ===============================
    tensor  shape       contracted over      quantized along, in each group
    ======  ==========  ===================  ===============================
    X       [M, K]      K (M_g in wgrad)     rowwise (columnwise)
    W1      [G, F', K]  K (F' in dgrad)      rowwise (columnwise)
    H       [M, F']     (F' = 2 F if the activation is gated, else F)
    p       [M]         (fp32; without it 1)
    A       [M, F]      F (M_g in wgrad)     rowwise (columnwise)
    W2      [G, K, F]   F (K in dgrad)       rowwise (columnwise)
    dY      [M, K]      K (M_g in wgrad)     rowwise (columnwise)
    dH      [M, F']     F' (M_g in wgrad)    rowwise (columnwise)
    ======  ==========  ===================  ===============================

    fprop H and Y as above; dgrad dA_g = dY_g W2_g, dX_g = dH_g W1_g; wgrad dW2_g = dY_g^T A_g, dW1_g = dH_g^T X_g.
    With a routing X, Y and their gradients are tokens [T, K]: each goes to k rows, read where they are cast, and gets
    the sum of k. dH = act'(H) p dA; dp = the sum of act(H) dA over a row. Saved are H, p, and the columnwise operands
    of X and A; under ``recompute_x`` of the second linear backward casts A again, from H. Each direction casts twice,
    weights apart.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mlp: GroupedMLPCall,
        call1: Call,
        call2: Call,
        x: Tensor,
        probabilities: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
    ) -> Tensor:
        (activation, plan1, plan2, *_), layout = mlp, call1.groups
        assert layout is not None
        call1.x = mlp.cast(plan1.x_casts, x, layout, call1.delayed_call)
        x_operands, w_operands, own = plan1.quantize_inputs(call1, None, w1)
        call1.x = None
        h = plan1.fprop(x_operands, w_operands, b1)
        saved1 = plan1.save_x(None, own), plan1.save_w(w1, w_operands)
        del x_operands, w_operands, own
        scales = delayed_scale(call2.delayed_call, "input", keep=True) if plan2.recompute_x else None
        call2.x = act_operands(plan2.x_casts, activation, h, probabilities, layout.offsets, call2.delayed_call, scales)
        a_operands, w_operands, own = plan2.quantize_inputs(call2, None, w2)
        call2.x = None
        y = mlp.collect(plan2.fprop(a_operands, w_operands, b2))
        saved2 = plan2.save_x(None, own), plan2.save_w(w2, w_operands)
        tensors, ctx.layouts = pack(*saved1, *saved2)
        ctx.mlp, ctx.groups, ctx.x_shape = mlp, layout, x.shape
        ctx.uses = call1.delayed_call, call2.delayed_call
        ctx.weights = w1 if plan1.writes_to_weight else None, w2 if plan2.writes_to_weight else None
        ctx.save_for_backward(
            *tensors, scales, h if plan2.options.needs_x else None,
            None if probabilities is None else guarded(probabilities),
        )  # fmt: skip
        return plan2.output(y, (*x.shape[:-1], y.shape[-1]), call2.delayed_call)  # type: ignore[arg-type]

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        mlp: GroupedMLPCall = ctx.mlp
        (activation, plan1, plan2, *_), layout, (use1, use2) = mlp, ctx.groups, ctx.uses
        *tensors, scales, h, probabilities = ctx.saved_tensors
        x, w1, a, w2 = unpack(ctx.layouts, tensors)
        db2 = plan2.bias_gradient(dy, layout)
        if plan2.recompute_x:
            a = _recompute(plan2, activation, h, probabilities, layout, scales)
        da, dw2 = gradients(plan2, mlp.cast(plan2.dy_casts, dy, layout, use2), a, w2, None, ctx.weights[1])
        del a, w2
        if use2 is not None:
            use2.backward_finished()
        dx = dw1 = db1 = dp = None
        if da is not None:
            operands, dp, value = dact_operands(
                plan1.dy_casts, activation, da, h, probabilities, layout.offsets, use1, plan1.options.needs_b
            )
            del da, h
            db1 = None if value is None else plan1.bias_gradient(value, layout)
            dx, dw1 = gradients(plan1, operands, x, w1, None, ctx.weights[0])
            if use1 is not None:
                use1.backward_finished()
        if dx is not None:
            dx = plan1.grad_input(mlp.collect(dx), ctx.x_shape, use1)
        dp = dp if probabilities is not None and ctx.needs_input_grad[4] else None
        return None, None, None, dx, dp, dw1, plan1.reduce_db(db1), dw2, plan2.reduce_db(db2)


def _recompute(
    plan: GroupedPlan,
    activation: Activation,
    h: Tensor,
    probabilities: Tensor | None,
    layout: GroupLayout,
    scales: Tensor | None,
) -> Operand:
    """What wgrad reads of A, from H again; nothing is recorded a second time."""
    casts = GroupedCasts(plan.config.input.with_usage(rowwise=False), "input", plan.options.device)
    return act_operands(casts, activation, h, probabilities, layout.offsets, None, scales, True).along(COLUMNWISE)
