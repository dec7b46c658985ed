"""The autograd function of a linear layer: Y = X W^T + b on quantized operands, its gradients likewise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.autocast import Use
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional import gemm
from minifloat.functional.plan import LinearPlan
from minifloat.functional.quantize import cast_with, delayed_scale, quantize, reuse
from minifloat.operand import Layout, Operand, Quantized
from minifloat.quantizer import Quantizer, as_matrix
from minifloat.tensor import QuantizedTensor

_UNQUANTIZED = Quantizer.identity()


@dataclass(frozen=True)
class LinearCall:
    """What differs between calls of a layer under the same plan.

    Args:
        needs_x, needs_w, needs_b: whether input, weight and bias need gradients.
        dtype: of the activations: what the output and both gradients are computed to.
        use: where delayed scaling reads its scales and records its amaxes.
        quantize_output, quantize_grad_input: return those as :class:`QuantizedTensor`.
        main_grad: dW is added to ``weight.main_grad``; no gradient is returned for it.
        overwrite_main_grad: it replaces what is there instead, in the first microbatch of a step.
        wgrad_tasks: dW is left for later: backward appends what computes it here.
    """

    needs_x: bool
    needs_w: bool
    needs_b: bool
    dtype: torch.dtype
    use: Use | None = None
    quantize_output: bool = False
    quantize_grad_input: bool = False
    main_grad: bool = False
    overwrite_main_grad: bool = False
    wgrad_tasks: list[Callable[[], None]] | None = None

    def keeps_input(self, plan: LinearPlan, x: Tensor) -> bool:
        """Backward casts X again; an input that came quantized is its own original."""
        return self.needs_w and plan.save_original_input and not isinstance(x, QuantizedTensor)

    def input_quantizer(self, plan: LinearPlan, x: Tensor) -> Quantizer:
        """How X is quantized: columnwise too where that is what backward keeps."""
        return plan.input.with_usage(
            columnwise=self.needs_w and plan.backward_override is None and not self.keeps_input(plan, x)
        )


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
    is saved or computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: LinearPlan,
        call: LinearCall,
        ready: tuple[Quantized | None, Quantized | None],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """``ready``: operands of X and W that exist already (a quantized tensor, a cached weight)."""
        # Delayed scaling: a backward that casts X again needs this forward's scale, which the next update replaces.
        x_scale = delayed_scale(call.use, "input", keep=True) if call.keeps_input(plan, x) else None
        x_operands, w_operands = _operands(plan, call, ready, x, weight, x_scale)
        y = gemm.fprop(x_operands, w_operands, bias, out_dtype=call.dtype, fast_accum=plan.fast_fprop)
        kept = _kept_input(plan, call, x, x_operands), _kept_weight(plan, call, weight, w_operands)
        _save(ctx, plan, call, kept, x_scale)
        ctx.x_shape, ctx.weight = x.shape, weight if call.main_grad or call.wgrad_tasks is not None else None
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return _quantized(y, plan.output, "output", call.use) if call.quantize_output else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        call: LinearCall = ctx.call
        x, w, x_scale = _restore(ctx)
        dx = dw = db = None
        if call.needs_b:
            db = as_matrix(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy).sum(0)
        dy_operands = _grad_operands(plan, call, dy)
        if call.needs_x:
            dx = gemm.dgrad(dy_operands, _for_backward(plan, w), out_dtype=call.dtype, fast_accum=plan.fast_dgrad)
            dx = dx.reshape(ctx.x_shape)
            dx = _quantized(dx, plan.grad_input, "grad_input", call.use) if call.quantize_grad_input else dx
        if call.needs_w:
            dw = _weight_gradient(ctx, dy_operands, _input_for_wgrad(plan, x, x_scale))
        if call.use is not None:
            call.use.backward_finished()
        return None, None, None, dx, dw, db


def _operands(
    plan: LinearPlan,
    call: LinearCall,
    ready: tuple[Quantized | None, Quantized | None],
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor | None,
) -> tuple[Quantized, Quantized]:
    """X and W in the orientations that forward and backward read, those that are not ready in one launch a phase."""
    x_operands, w_operands = ready
    x_quantizer = call.input_quantizer(plan, x)
    w_quantizer = weight_quantizer(plan, call.needs_x)
    if x_operands is not None and w_operands is not None:
        return x_operands, w_operands
    if x_operands is not None:
        return x_operands, quantize([weight], [w_quantizer], ["weight"], call.use)[0]
    if w_operands is not None:
        return quantize([x], [x_quantizer], ["input"], call.use, x_scale)[0], w_operands
    fresh = quantize([x, weight], [x_quantizer, w_quantizer], ["input", "weight"], call.use, x_scale)
    return fresh[0], fresh[1]


def weight_quantizer(plan: LinearPlan, needs_x: bool) -> Quantizer:
    """How the weight of a call is quantized: columnwise too where dgrad will read it."""
    return plan.weight.with_usage(columnwise=needs_x and plan.backward_override is None)


# ---- what backward keeps ----


def _kept_input(plan: LinearPlan, call: LinearCall, x: Tensor, operands: Quantized) -> Operand | None:
    if not call.needs_w:
        return None
    if plan.backward_override == "dequantized":
        return operands.along(ROWWISE)
    if plan.backward_override == "high_precision" or call.keeps_input(plan, x):
        return _as_is(x)
    return operands.along(COLUMNWISE)


def _kept_weight(plan: LinearPlan, call: LinearCall, weight: Tensor, operands: Quantized) -> Operand | None:
    if not call.needs_x:
        return None
    if plan.backward_override == "high_precision":
        return _as_is(weight)
    return operands.along(ROWWISE if plan.backward_override == "dequantized" else COLUMNWISE)


def _as_is(x: Tensor) -> Operand:
    matrix = as_matrix(x.dequantize() if isinstance(x, QuantizedTensor) else x)
    return Operand(matrix, None, None, IDENTITY, ROWWISE, (matrix.shape[0], matrix.shape[1]), matrix.dtype)


def _save(
    ctx: Any,
    plan: LinearPlan,
    call: LinearCall,
    kept: tuple[Operand | None, Operand | None],
    x_scale: Tensor | None,
) -> None:
    """Tensors where autograd's hooks see them, the rest on ``ctx``."""
    x, w = kept
    none: tuple[None, None, None] = (None, None, None)
    ctx.save_for_backward(*(none if x is None else x.tensors), *(none if w is None else w.tensors), x_scale)
    ctx.plan, ctx.call = plan, call
    ctx.layouts = None if x is None else x.layout, None if w is None else w.layout


def _restore(ctx: Any) -> tuple[Operand | None, Operand | None, Tensor | None]:
    saved = ctx.saved_tensors
    layouts: tuple[Layout | None, Layout | None] = ctx.layouts
    x = None if layouts[0] is None else layouts[0].operand(*saved[0:3])
    w = None if layouts[1] is None else layouts[1].operand(*saved[3:6])
    return x, w, saved[6]


# ---- backward ----


def _grad_operands(plan: LinearPlan, call: LinearCall, dy: Tensor) -> Quantized:
    if plan.backward_override is not None:
        return Quantized(_as_is(dy), None)
    quantizer = plan.grad_output.with_usage(rowwise=call.needs_x, columnwise=call.needs_w)
    ready = reuse(dy, quantizer)
    return ready if ready is not None else quantize([dy], [quantizer], ["grad_output"], call.use)[0]


def _for_backward(plan: LinearPlan, kept: Operand | None) -> Quantized:
    assert kept is not None
    if plan.backward_override == "dequantized":
        return Quantized(_as_is(kept.dequantize()), None)
    return Quantized(kept, None) if kept.dim == ROWWISE else Quantized(None, kept)


def _input_for_wgrad(plan: LinearPlan, kept: Operand | None, scale: Tensor | None) -> Quantized:
    """The columnwise X, cast now if the original was kept; what forward recorded is not recorded again."""
    assert kept is not None
    if plan.backward_override is not None or kept.format.quantized or not plan.input.format(COLUMNWISE).quantized:
        return _for_backward(plan, kept)
    return cast_with(kept.codes, plan.input.with_usage(rowwise=False), scale)


def _weight_gradient(ctx: Any, dy: Quantized, x: Quantized) -> Tensor | None:
    """dW, or None where it goes into ``main_grad`` or is computed later."""
    plan: LinearPlan = ctx.plan
    call: LinearCall = ctx.call
    weight = ctx.weight

    def compute() -> Tensor | None:
        dtype = weight.main_grad.dtype if call.main_grad else call.dtype
        dw = gemm.wgrad(dy, x, out_dtype=dtype, fast_accum=plan.fast_wgrad)
        return _into_main_grad(weight, dw, call.overwrite_main_grad) if call.main_grad else dw

    if call.wgrad_tasks is None:
        return compute()

    def later() -> None:
        dw = compute()
        if dw is not None:
            dw = dw.to(weight.dtype)
            weight.grad = dw if weight.grad is None else weight.grad + dw

    call.wgrad_tasks.append(later)
    return None


def _into_main_grad(weight: Tensor, dw: Tensor, overwrite: bool) -> Tensor | None:
    """Adds dW to ``weight.main_grad`` and says so on ``weight.grad_added_to_main_grad``.

    Returns:
        The gradient to hand to autograd: None, or zeros where ``weight.zero_out_wgrad`` asks for one so that hooks on
        the parameter run.
    """
    if overwrite or getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(dw)  # type: ignore[attr-defined]
    else:
        weight.main_grad.add_(dw)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else None


def _quantized(x: Tensor, quantizer: Quantizer, kind: str, use: Use | None) -> Tensor:
    """``x`` as a tensor that the next layer takes as it is."""
    if not quantizer.quantized:
        return x
    operands = quantize([x], [quantizer], [kind], use)[0]
    scale = delayed_scale(use, kind)
    return QuantizedTensor.from_operands(
        operands, quantizer, x.shape, x.dtype, scale=None if scale is None else scale.clone()
    )
