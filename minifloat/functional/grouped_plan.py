"""The plan of a grouped linear: that of a linear, with the steps that see operands made for groups."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor

from minifloat.delayed_call import DelayedCall
from minifloat.formats import COLUMNWISE
from minifloat.functional import batch_invariant
from minifloat.functional import linear_steps as steps
from minifloat.functional.autograd import guarded
from minifloat.functional.grouped import GroupedCasts, GroupedOperand, GroupLayout, bias_gradient, multiply, values
from minifloat.functional.grouped_weight import SeparateOperands, multiply_weight
from minifloat.functional.linear_config import LinearConfig, LinearOptions
from minifloat.functional.linear_plan import LinearPlan, make_plan
from minifloat.functional.linear_steps import Call
from minifloat.operand import Quantized
from minifloat.ops import new
from minifloat.tensor import QuantizedTensor


@dataclass(frozen=True, eq=False)
class GroupedPlan(LinearPlan):
    """The steps of a grouped linear.

    Args:
        x_casts, dy_casts: what X and dY go through; those of a fused module are not X and dY of a call.
    """

    x_casts: GroupedCasts
    dy_casts: GroupedCasts


def make_grouped_plan(config: LinearConfig, options: LinearOptions) -> GroupedPlan:
    """The steps of a grouped linear; X [M, K] has the rows of all groups, W is [G, N, K]."""
    plan = make_plan(config, options)
    override, device = config.backward_override, options.device
    load_x: Any = plan.load_x
    save_x: Any = plan.save_x
    if options.needs_w and (override == "high_precision" or (plan.saves_value and override is None)):
        save_x = save_value
    if plan.saves_value and override is None and config.input.format(COLUMNWISE).quantized:
        load_x = partial(cast_value, GroupedCasts(config.input.with_usage(rowwise=False), "input", device))
    x_casts = GroupedCasts(plan.x_quantizer, "input", device)
    dy_casts = GroupedCasts(plan.dy_quantizer, "grad_output", device)
    quantize_dy: Any = unquantized_dy if override is not None else partial(quantize_gradient, dy_casts)
    save_w: Any = plan.save_w
    if override == "high_precision" and options.needs_x and not options.gathers_weight:
        save_w = save_weight_value
    cast_inputs: Any = partial(quantize_inputs, x_casts, GroupedCasts(plan.w_quantizer, "weight", device))
    if options.gathers_weight:
        cast_inputs = partial(steps.with_gathered_w, cast_inputs)
    wgrad = partial(steps.wgrad, multiply, config.fast_wgrad)
    dgrad = partial(steps.dgrad, multiply_weight, options.dtype, config.fast_dgrad)
    if override == "dequantized":
        dgrad, wgrad = (partial(steps.of_values, dequantized, product) for product in (dgrad, wgrad))
    own = dict(
        shares_x=False,
        quantize_inputs=cast_inputs,
        fprop=partial(
            steps.fprop,
            batch_invariant.multiply_weight if options.batch_invariant else multiply_weight,
            options.dtype,
            config.fast_fprop,
        ),
        save_x=save_x,
        save_w=save_w,
        quantize_dy=quantize_dy,
        load_x=load_x,
        dgrad=dgrad,
        wgrad=wgrad,
        bias_gradient=bias_gradient if options.needs_b else steps.nothing,
        x_casts=x_casts,
        dy_casts=dy_casts,
    )
    return GroupedPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)} | own)


def quantize_inputs(
    x_casts: GroupedCasts, w_casts: GroupedCasts, call: Call, x: Tensor, weight: Tensor, x_scale: Tensor | None = None
) -> tuple[Quantized, Quantized, Quantized]:
    """X and W in the orientations that forward and backward read."""
    assert call.groups is not None
    x_operands: Any = call.x
    if x_operands is None:
        x_operands = x_casts(x, call.groups.offsets, call.delayed_call, x_scale)
    w_operands = call.w
    if w_operands is None:
        w_operands = quantize_weight(w_casts, weight, call.delayed_call)
    return x_operands, w_operands, x_operands


def quantize_weight(casts: GroupedCasts, weight: Tensor, delayed_call: DelayedCall | None) -> Quantized:
    """W [G, N, K], each group by itself; of one that is quantized already its values."""
    weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    layout = GroupLayout.uniform(weight.shape[0], weight.shape[1], weight.device)
    return casts(weight.flatten(0, 1), layout.offsets, delayed_call)


def _offsets(operands: Quantized) -> Tensor:
    held: Any = operands.any
    return held.offsets


def save_value(x: Tensor, operands: Quantized) -> GroupedOperand:
    """X as it came."""
    operand = values(x, _offsets(operands))
    return operand._replace(codes=guarded(operand.codes))


def save_weight_value(weight: Tensor, operands: Quantized) -> GroupedOperand:
    """For dgrad in high precision."""
    layout = GroupLayout.uniform(weight.shape[0], weight.shape[1], weight.device)
    weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    return values(weight.flatten(0, 1), layout.offsets)


def cast_value(casts: GroupedCasts, value: GroupedOperand, scale: Tensor | None) -> Any:
    """X was saved in high precision: cast now, and not recorded again."""
    return casts(value.codes, value.offsets, None, scale).along(COLUMNWISE)


def dequantized(operand: GroupedOperand | SeparateOperands) -> GroupedOperand:
    """The values that it stands for."""
    operand = operand.joined() if isinstance(operand, SeparateOperands) else operand
    return values(operand.dequantize(), operand.offsets)


def quantize_gradient(
    casts: GroupedCasts, dy: Tensor, delayed_call: DelayedCall | None, amaxes: None, layout: GroupLayout
) -> Quantized:
    """dY in the orientations that dgrad and wgrad read."""
    return casts(dy, layout.offsets, delayed_call)


def unquantized_dy(dy: Tensor, delayed_call: DelayedCall | None, amaxes: None, layout: GroupLayout) -> Quantized:
    """dY in high precision, under a ``backward_override``."""
    return new(Quantized, (values(dy, layout.offsets), None))
