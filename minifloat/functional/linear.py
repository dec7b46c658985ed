"""The autograd function of a linear layer, Y = X W^T + b, on quantized operands, and what it saves.

A layer's calls differ in recipe, parallelism, options and in which gradients are needed. All of that is decided once,
in ``linear_plan.py``: a plan names one callable for each step (``linear_steps.py``), and the function here calls them
in their order. Fused modules (``layernorm_linear.py``, ``layernorm_mlp.py``) put them together in their own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE
from minifloat.functional.autograd import first_order
from minifloat.functional.linear_plan import LinearPlan
from minifloat.functional.linear_steps import Call
from minifloat.functional.quantize import delayed_scale
from minifloat.operand import Operand
from minifloat.ops import new


class LinearFunction(torch.autograd.Function):
    """Y = X W^T + b and its gradients.

    ======  ========  =================  ======================
    tensor  shape     contracted over    quantized along
    ======  ========  =================  ======================
    X       [..., K]  K (M in wgrad)     rowwise (columnwise)
    W       [N, K]    K (N in dgrad)     rowwise (columnwise)
    dY      [..., N]  N (M in wgrad)     rowwise (columnwise)
    ======  ========  =================  ======================

    fprop Y = X W^T + b; dgrad dX = dY W; wgrad dW = dY^T X; db = the sum of dY over the M rows. Saved are the
    columnwise X and W, the very codes of the rowwise ones where a format is symmetric; nothing that no gradient needs
    is saved or computed. Of a linear that is split over ranks these are the shapes of what a rank multiplies;
    :class:`~minifloat.functional.tensor_parallel.TensorParallel` has those of its inputs and outputs.
    """

    @staticmethod
    def forward(ctx: Any, plan: LinearPlan, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Delayed scaling: a backward that casts X again needs this forward's scale, which the next update replaces.
        x_scale = delayed_scale(call.delayed_call, "input", keep=True) if plan.saves_value else None
        x_operands, w_operands, own_x = plan.quantize_inputs(call, x, weight, x_scale)
        if call.shares_x:
            call.x = own_x
        y = plan.fprop(x_operands, w_operands, bias, *call.out)
        ctx.dgrad_out = call.dgrad_out
        ctx.plan, ctx.delayed_call, ctx.x_shape, ctx.groups = plan, call.delayed_call, x.shape, call.groups
        ctx.weight = (call.owners or weight) if plan.writes_to_weight else None
        tensors, ctx.layouts = pack(plan.save_x(x, own_x), plan.save_w(weight, w_operands))
        ctx.save_for_backward(*tensors, x_scale)
        return plan.output(y, x.shape, call.delayed_call)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        *tensors, x_scale = ctx.saved_tensors
        x, w = unpack(ctx.layouts, tensors)
        db = plan.bias_gradient(dy, ctx.groups)
        dy = plan.quantize_dy(dy, ctx.delayed_call, None, ctx.groups)
        dx, dw = gradients(plan, dy, x, w, x_scale, ctx.weight, *ctx.dgrad_out)
        if dx is not None:
            dx = plan.grad_input(dx, ctx.x_shape, ctx.delayed_call)
        if ctx.delayed_call is not None:
            ctx.delayed_call.backward_finished()
        return None, None, dx, dw, plan.reduce_db(db)


def gradients(
    plan: LinearPlan, dy: Any, x: Operand | None, w: Operand | None, x_scale: Tensor | None, weight: Tensor | None,
    *dgrad_out: Tensor,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dgrad dX [M, K] and wgrad dW [N, K], each None if not needed; ``weight``: if the plan writes to it.

    What is gathered for wgrad is gathered during dgrad, and dX is summed over the ranks during wgrad.
    """
    dx = dw = None
    loaded = x if x is None or plan.load_x is None else plan.load_x(x, x_scale)
    if w is not None:
        dx = plan.dgrad(dy, w if plan.load_w is None else plan.load_w(w, weight), *dgrad_out)
    if loaded is not None:
        dw = plan.accumulate_dw(weight, partial(plan.wgrad, dy.along(COLUMNWISE), loaded))
    return dx if dx is None or plan.reduce_dx is None else plan.reduce_dx(dx), dw


# ---- what backward saves ----


def pack(*operands: Operand | None) -> tuple[list[Tensor | None], list[Any]]:
    """The tensors of operands, for ``save_for_backward``, where autograd's hooks see them, and how to put them back."""
    tensors: list[Tensor | None] = []
    layouts: list[Any] = []
    for operand in operands:
        if operand is None:
            tensors += None, None, None
            layouts.append((None, 3, ()))
        else:
            own = operand.tensors
            tensors += own
            layouts.append((type(operand), len(own), operand[len(own) :]))  # its layout, without a call
    return tensors, layouts


def unpack(layouts: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
    """The operands that :func:`pack` was given."""
    operands: list[Any] = []
    compiling, first = torch.compiler.is_dynamo_compiling(), 0
    for kind, count, layout in layouts:
        codes = tensors[first]
        if kind is None or codes is None:
            operands.append(None)
        else:
            if not compiling:  # a read of memory that FSDP2 has freed would end the process
                assert not codes.numel() or codes.untyped_storage().nbytes(), "saved codes were freed before backward"
            operands.append(new(kind, (*tensors[first : first + count], *layout)))
        first += count
    return operands
