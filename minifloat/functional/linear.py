"""The autograd function of a linear layer: Y = X W^T + b on quantized operands, its gradients likewise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.autocast import Use
from minifloat.comm.collectives import Pending
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional import gemm, shared_cast
from minifloat.functional.call import Kept, LinearCall, Operands, Ready
from minifloat.functional.gathered import Gathered, only
from minifloat.functional.gemm import Product
from minifloat.functional.outputs import as_output
from minifloat.functional.plan import LinearPlan
from minifloat.functional.quantize import cast_with, delayed_scale, quantize, quantize_part, reuse
from minifloat.functional.weight_gradient import weight_gradient
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix
from minifloat.tensor import QuantizedTensor

_UNQUANTIZED = Quantizer.identity()


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
    :class:`~minifloat.functional.tensor_parallel.TensorParallel` has those of what comes and goes.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: LinearPlan, call: LinearCall, ready: Ready, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Delayed scaling: a backward that casts X again needs this forward's scale, which the next update replaces.
        x_scale = delayed_scale(call.use, "input", keep=True) if call.keeps_input(plan, x) else None
        operands = quantize_operands(plan, call, ready, x, weight, x_scale)
        y, kept = multiply(plan, call, operands, x, weight, bias, x_scale)
        ctx.plan, ctx.call, ctx.layouts, ctx.x_shape = plan, call, kept.layouts, x.shape
        ctx.weight = call.needs_parameter(weight)
        ctx.save_for_backward(*kept.tensors)
        return quantize_output(plan, call, as_output(y, call.parallel.output_shape(x.shape, weight.shape[0])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        call: LinearCall = ctx.call
        kept = Kept.of(ctx.layouts, ctx.saved_tensors)
        db = bias_gradient(call, dy)
        dx, dw = gradients(plan, call, kept, grad_operands(plan, call, dy), ctx.weight)
        if dx is not None:
            dx = as_output(dx, ctx.x_shape)
            dx = _quantized(dx, plan.grad_input, "grad_input", call.use) if call.quantize_grad_input else dx
        if call.use is not None:
            call.use.backward_finished()
        return None, None, None, dx, dw, db.wait()


# ---- the parts of a linear, which fused modules put together in their own way ----


def _as_cast(operands: Quantized) -> Quantized:
    return operands


def quantize_operands(
    plan: LinearPlan,
    call: LinearCall,
    ready: Ready,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None = None,
    x_amaxes: Amaxes | None = None,
    label: Callable[[Quantized], Quantized] = _as_cast,
) -> Operands:
    """X and W in the orientations that forward and backward read, those that are not ready in one launch a phase.

    ``x``: None if it is ready; ``x_amaxes``: what its cast needs to know of it, if that is known; ``label``: what is
    done to operands that were cast from it.
    """
    if call.parallel.gathers_input:
        return _quantize_and_gather(plan, call, ready, x, weight, x_scale, x_amaxes, label)
    x_operands, w_operands = ready.x, ready.w
    missing = []
    if x_operands is None:
        assert x is not None
        missing.append(("input", x, call.input_quantizer(plan, x), x_amaxes))
    if w_operands is None:
        missing.append(("weight", weight, weight_quantizer(plan, call.needs_x), None))
    if missing:
        kinds, tensors, quantizers, amaxes = zip(*missing, strict=True)
        made = quantize(tensors, quantizers, kinds, call.use, x_scale, amaxes=amaxes)
        x_operands = label(made[0]) if x_operands is None else x_operands
        w_operands = made[-1] if w_operands is None else w_operands
    assert x_operands is not None and w_operands is not None
    if not torch.compiler.is_compiling():
        ready.x = x_operands
    return Operands(x_operands, w_operands, x_operands)


def _quantize_and_gather(
    plan: LinearPlan,
    call: LinearCall,
    ready: Ready,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None,
    x_amaxes: Amaxes | None,
    label: Callable[[Quantized], Quantized],
) -> Operands:
    """The same where X is gathered, which goes on while the weight is cast."""
    part, w = ready.x, ready.w
    if part is None:
        assert x is not None
        quantizer = call.input_quantizer(plan, x)
        part = label(quantize_part(x, quantizer, "input", call.use, call.parallel, x_scale, x_amaxes))
    gathered = shared_cast.gathered(part) or call.parallel.gather(part, rowwise=True)
    if w is None:
        w = quantize([weight], [weight_quantizer(plan, call.needs_x)], ["weight"], call.use)[0]
    if not torch.compiler.is_compiling():
        ready.x = part
    return Operands(shared_cast.offer(part, gathered), w, part)


def multiply(
    plan: LinearPlan,
    call: LinearCall,
    operands: Operands,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Kept]:
    """fprop, Y [M, N], and what backward will need; ``x`` and ``weight`` are what the operands were cast from.

    ``x`` may be None where backward does not read it, see :meth:`LinearCall.reads_value`.
    """
    x_operands, w, x_part = operands
    y = call.parallel.output(Product("fprop", w, call.dtype, plan.fast_fprop), x_operands, bias)
    cast_later = call.remakes_x or call.keeps_input(plan, x)
    kept_x, kept_w = _kept_input(plan, call, x, x_part), _kept_weight(plan, call, weight, w)
    return y, Kept(kept_x, kept_w, x_scale if cast_later else None)


def gradients(
    plan: LinearPlan, call: LinearCall, kept: Kept, dy: Quantized | Gathered, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dgrad dX [M, K] and wgrad dW [N, K], each None if not needed; ``weight`` is the parameter that has main_grad.

    What is gathered for wgrad travels during dgrad, and dX is summed over the ranks during wgrad.
    """
    dx = dw = None
    x = _input_for_wgrad(plan, call, kept) if call.needs_w else None
    if call.needs_x:
        product = Product("dgrad", _for_backward(plan, kept.w), call.dtype, plan.fast_dgrad)
        wgrad_follows = call.needs_w and call.wgrad_tasks is None
        dx = call.parallel.start_grad_input(product, dy, wgrad_follows)
    if x is not None:
        dw = weight_gradient(call, weight, partial(_wgrad, plan, only(dy, COLUMNWISE), x))
    return None if dx is None else dx.wait(), dw


def _wgrad(plan: LinearPlan, dy: Quantized, x: Quantized | Gathered, dtype: torch.dtype) -> Tensor:
    operand = x.along(_kept_along(plan))
    return gemm.wgrad(dy, _for_backward(plan, operand), out_dtype=dtype, fast_accum=plan.fast_wgrad)


def quantize_output(plan: LinearPlan, call: LinearCall, y: Tensor) -> Tensor:
    """Y as the next layer takes it, if the call asks for that."""
    return _quantized(y, plan.output, "output", call.use) if call.quantize_output else y


def column_sum(dy: Tensor) -> Tensor:
    """The gradient of a bias, [N]: dY summed over its rows."""
    return as_matrix(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy).sum(0)


def bias_gradient(call: LinearCall, dy: Tensor) -> Pending[Tensor | None]:
    """db [N] if it is needed, on its way where it is a sum over ranks."""
    return call.parallel.start_reduce_bias_gradient(column_sum(dy) if call.needs_b else None)


def weight_quantizer(plan: LinearPlan, needs_x: bool) -> Quantizer:
    """How the weight of a call is quantized: columnwise too where dgrad will read it."""
    return plan.weight.with_usage(columnwise=needs_x and plan.backward_override is None)


# ---- what backward keeps ----


def _kept_input(plan: LinearPlan, call: LinearCall, x: Tensor | None, operands: Quantized) -> Operand | None:
    if not call.needs_w or call.remakes_x:
        return None
    if plan.backward_override == "dequantized":
        return operands.along(ROWWISE)
    if plan.backward_override == "high_precision" or call.keeps_input(plan, x):
        return None if x is None else _as_is(x)
    return operands.along(COLUMNWISE)


def _kept_weight(plan: LinearPlan, call: LinearCall, weight: Tensor, operands: Quantized) -> Operand | None:
    if not call.needs_x:
        return None
    if plan.backward_override == "high_precision":
        return _as_is(weight)
    return operands.along(_kept_along(plan))


def _as_is(x: Tensor) -> Operand:
    matrix = as_matrix(x.dequantize() if isinstance(x, QuantizedTensor) else x)
    return Operand(matrix, None, None, IDENTITY, ROWWISE, (matrix.shape[0], matrix.shape[1]), matrix.dtype)


# ---- backward ----


def grad_quantizer(plan: LinearPlan, call: LinearCall) -> Quantizer:
    """How dY is quantized: in the orientations that the wanted gradients read."""
    if plan.backward_override is not None:
        return _UNQUANTIZED
    return plan.grad_output.with_usage(rowwise=call.needs_x, columnwise=call.needs_w)


def grad_operands(plan: LinearPlan, call: LinearCall, dy: Tensor) -> Quantized | Gathered:
    """dY as the GEMMs of the wanted gradients read it, on its way where it is gathered."""
    if not call.parallel.gathers_grad_output:
        return own_grad_operands(plan, call, dy)
    if plan.backward_override is not None:
        part = Quantized(_as_is(dy), None)
    else:
        part = quantize_part(dy, grad_quantizer(plan, call), "grad_output", call.use, call.parallel)
    return call.parallel.gather(part, rowwise=call.needs_x, columnwise=call.needs_w)


def own_grad_operands(plan: LinearPlan, call: LinearCall, dy: Tensor, amaxes: Amaxes | None = None) -> Quantized:
    """The same where this rank has all of dY that it reads; ``amaxes`` as of :func:`quantize`."""
    if plan.backward_override is not None:
        return Quantized(_as_is(dy), None)
    quantizer = grad_quantizer(plan, call)
    ready = reuse(dy, quantizer)
    return ready or quantize([dy], [quantizer], ["grad_output"], call.use, amaxes=[amaxes])[0]


def _for_backward(plan: LinearPlan, kept: Operand | None) -> Quantized:
    assert kept is not None
    if plan.backward_override == "dequantized":
        return Quantized(_as_is(kept.dequantize()), None)
    return Quantized(kept, None) if kept.dim == ROWWISE else Quantized(None, kept)


def _input_for_wgrad(plan: LinearPlan, call: LinearCall, kept: Kept) -> Quantized | Gathered:
    """X as it was kept, on its way where it is gathered; cast now if that is the original, and not recorded again."""
    operand = kept.x
    assert operand is not None
    part = Quantized(operand, None) if operand.dim == ROWWISE else Quantized(None, operand)
    if plan.backward_override is None and plan.input.format(COLUMNWISE).quantized and not operand.format.quantized:
        cast = call.parallel.quantize_shard if call.parallel.gathers_input else cast_with
        part = cast(operand.codes, plan.input.with_usage(rowwise=False), kept.x_scale)
    if not call.parallel.gathers_input:
        return part
    by_rows = _kept_along(plan) == ROWWISE
    return call.parallel.gather(part, rowwise=by_rows, columnwise=not by_rows, multiplied=False)


def _kept_along(plan: LinearPlan) -> int:
    """The orientation of X and W that backward starts from."""
    return ROWWISE if plan.backward_override == "dequantized" else COLUMNWISE


def _quantized(x: Tensor, quantizer: Quantizer, kind: str, use: Use | None) -> Tensor:
    """``x`` as a tensor that the next layer takes as it is."""
    if not quantizer.quantized:
        return x
    operands = quantize([x], [quantizer], [kind], use, gemm_ready=False)[0]
    scale = delayed_scale(use, kind)
    return QuantizedTensor.from_operands(
        operands, quantizer, x.shape, x.dtype, scale=None if scale is None else scale.clone()
    )
