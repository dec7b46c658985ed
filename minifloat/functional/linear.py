"""The autograd function of a linear layer: Y = X W^T + b on quantized operands, its gradients likewise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.autocast import Use
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional import gemm
from minifloat.functional.plan import LinearPlan
from minifloat.functional.quantize import cast_with, delayed_scale, quantize, reuse
from minifloat.operand import Layout, Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix
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
        overwrite_main_grad: in the first microbatch of a step: it replaces what is there instead, once after each time
            that ``weight.main_grad_is_old`` was set.
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

    def needs_parameter(self, weight: Tensor) -> Tensor | None:
        """The weight if backward writes to it by itself, so that its Python attributes are kept; else None."""
        return weight if self.main_grad or self.wgrad_tasks is not None else None

    def keeps_input(self, plan: LinearPlan, x: Tensor | None) -> bool:
        """Backward reads X as it came, or casts it again; an input that came quantized is its own original."""
        return self.reads_value(plan) and not isinstance(x, QuantizedTensor)

    def reads_value(self, plan: LinearPlan) -> bool:
        """Backward reads X itself, not only its operands."""
        return self.needs_w and (plan.save_original_input or plan.backward_override == "high_precision")

    def input_quantizer(self, plan: LinearPlan, x: Tensor | None) -> Quantizer:
        """How X is quantized: columnwise too where that is what backward keeps."""
        kept_quantized = self.needs_w and plan.backward_override is None and not self.keeps_input(plan, x)
        return plan.input.with_usage(columnwise=kept_quantized)


@dataclass
class Ready:
    """Operands of X and W that exist before the call: a quantized tensor, a cached weight, a sibling's input.

    Outside of a compiled graph the forward puts the operand of X here that it made, for the siblings to come.
    """

    x: Quantized | None = None
    w: Quantized | None = None


class Kept(NamedTuple):
    """What the forward of one linear leaves for its backward.

    Args:
        x, w: the operands that wgrad and dgrad read; None where there is no such gradient.
        x_scale: the delayed scale to cast X with again, where X was kept as it came.
    """

    x: Operand | None
    w: Operand | None
    x_scale: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """For ``save_for_backward``, where autograd's hooks see them."""
        none: tuple[None, None, None] = (None, None, None)
        x, w = (none if operand is None else operand.tensors for operand in (self.x, self.w))
        return (*x, *w, self.x_scale)

    @property
    def layouts(self) -> tuple[Layout | None, Layout | None]:
        """All but the tensors."""
        return None if self.x is None else self.x.layout, None if self.w is None else self.w.layout

    @staticmethod
    def of(layouts: tuple[Layout | None, Layout | None], tensors: Sequence[Tensor | None]) -> Kept:
        """Puts :attr:`tensors` and :attr:`layouts` together again."""
        x, w = (
            None if layout is None or codes is None else layout.operand(codes, scale_inv, amax)
            for layout, (codes, scale_inv, amax) in zip(layouts, (tensors[0:3], tensors[3:6]), strict=True)
        )
        return Kept(x, w, tensors[6])


KEPT_TENSORS = 7
"""How many :attr:`Kept.tensors` are."""


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
        ctx: Any, plan: LinearPlan, call: LinearCall, ready: Ready, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        # Delayed scaling: a backward that casts X again needs this forward's scale, which the next update replaces.
        x_scale = delayed_scale(call.use, "input", keep=True) if call.keeps_input(plan, x) else None
        operands = quantize_operands(plan, call, ready, x, weight, x_scale)
        y, kept = multiply(plan, call, operands, x, weight, bias, x_scale)
        ctx.plan, ctx.call, ctx.layouts, ctx.x_shape = plan, call, kept.layouts, x.shape
        ctx.weight = call.needs_parameter(weight)
        ctx.save_for_backward(*kept.tensors)
        y = y.reshape(*x.shape[:-1], weight.shape[0])
        return quantize_output(plan, call, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: LinearPlan = ctx.plan
        call: LinearCall = ctx.call
        kept = Kept.of(ctx.layouts, ctx.saved_tensors)
        db = column_sum(dy) if call.needs_b else None
        dx, dw = gradients(plan, call, kept, grad_operands(plan, call, dy), ctx.weight)
        if dx is not None:
            dx = dx.reshape(ctx.x_shape)
            dx = _quantized(dx, plan.grad_input, "grad_input", call.use) if call.quantize_grad_input else dx
        if call.use is not None:
            call.use.backward_finished()
        return None, None, None, dx, dw, db


# ---- the parts of a linear, which fused modules put together in their own way ----


def quantize_operands(
    plan: LinearPlan,
    call: LinearCall,
    ready: Ready,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None = None,
    x_amaxes: Amaxes | None = None,
) -> tuple[Quantized, Quantized]:
    """X and W in the orientations that forward and backward read, those that are not ready in one launch a phase.

    ``x``: None if it is ready; ``x_amaxes``: what its cast needs to know of it, if that is known.
    """
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
        x_operands = made[0] if x_operands is None else x_operands
        w_operands = made[-1] if w_operands is None else w_operands
    assert x_operands is not None and w_operands is not None
    if not torch.compiler.is_compiling():
        ready.x = x_operands
    return x_operands, w_operands


def multiply(
    plan: LinearPlan,
    call: LinearCall,
    operands: tuple[Quantized, Quantized],
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Kept]:
    """fprop, Y [M, N], and what backward will need; ``x`` and ``weight`` are what the operands were cast from.

    ``x`` may be None where backward does not read it: see :meth:`LinearCall.reads_value`.
    """
    y = gemm.fprop(*operands, bias, out_dtype=call.dtype, fast_accum=plan.fast_fprop)
    return y, Kept(_kept_input(plan, call, x, operands[0]), _kept_weight(plan, call, weight, operands[1]), x_scale)


def gradients(
    plan: LinearPlan, call: LinearCall, kept: Kept, dy: Quantized, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dgrad dX [M, K] and wgrad dW [N, K], each None if not needed; ``weight`` is the parameter that has main_grad."""
    dx = dw = None
    if call.needs_x:
        w = _for_backward(plan, kept.w)
        dx = gemm.dgrad(dy, w, out_dtype=call.dtype, fast_accum=plan.fast_dgrad)
    if call.needs_w:
        dw = _weight_gradient(plan, call, dy, _input_for_wgrad(plan, kept.x, kept.x_scale), weight)
    return dx, dw


def quantize_output(plan: LinearPlan, call: LinearCall, y: Tensor) -> Tensor:
    """Y as the next layer takes it, if the call asks for that."""
    return _quantized(y, plan.output, "output", call.use) if call.quantize_output else y


def column_sum(dy: Tensor) -> Tensor:
    """The gradient of a bias, [N]: dY summed over its rows."""
    return as_matrix(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy).sum(0)


def weight_quantizer(plan: LinearPlan, needs_x: bool) -> Quantizer:
    """How the weight of a call is quantized: columnwise too where dgrad will read it."""
    return plan.weight.with_usage(columnwise=needs_x and plan.backward_override is None)


# ---- what backward keeps ----


def _kept_input(plan: LinearPlan, call: LinearCall, x: Tensor | None, operands: Quantized) -> Operand | None:
    if not call.needs_w:
        return None
    if plan.backward_override == "dequantized":
        return operands.along(ROWWISE)
    if plan.backward_override == "high_precision" or call.keeps_input(plan, x):
        assert x is not None
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


# ---- backward ----


def grad_quantizer(plan: LinearPlan, call: LinearCall) -> Quantizer:
    """How dY is quantized: in the orientations that the wanted gradients read."""
    if plan.backward_override is not None:
        return _UNQUANTIZED
    return plan.grad_output.with_usage(rowwise=call.needs_x, columnwise=call.needs_w)


def grad_operands(plan: LinearPlan, call: LinearCall, dy: Tensor, amaxes: Amaxes | None = None) -> Quantized:
    """dY as the GEMMs of the wanted gradients read it; ``amaxes`` as of :func:`quantize`."""
    if plan.backward_override is not None:
        return Quantized(_as_is(dy), None)
    quantizer = grad_quantizer(plan, call)
    ready = reuse(dy, quantizer)
    if ready is not None:
        return ready
    return quantize([dy], [quantizer], ["grad_output"], call.use, amaxes=[amaxes])[0]


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


def _weight_gradient(
    plan: LinearPlan, call: LinearCall, dy: Quantized, x: Quantized, weight: Tensor | None
) -> Tensor | None:
    """dW, or None where it goes into ``main_grad`` or is computed later."""

    def compute() -> Tensor | None:
        dtype = weight.main_grad.dtype if call.main_grad else call.dtype  # type: ignore[union-attr]
        dw = gemm.wgrad(dy, x, out_dtype=dtype, fast_accum=plan.fast_wgrad)
        return _into_main_grad(weight, dw, call.overwrite_main_grad) if call.main_grad else dw

    if call.wgrad_tasks is None:
        return compute()

    def later() -> None:
        dw = compute()
        if dw is not None and weight is not None:
            dw = dw.to(weight.dtype)
            weight.grad = dw if weight.grad is None else weight.grad + dw

    call.wgrad_tasks.append(later)
    return None


def _into_main_grad(weight: Tensor | None, dw: Tensor, overwrite: bool) -> Tensor | None:
    """Adds dW to ``weight.main_grad`` and says so on ``weight.grad_added_to_main_grad``.

    Returns:
        The gradient to hand to autograd: None, or zeros where ``weight.zero_out_wgrad`` asks for one so that hooks on
        the parameter run.
    """
    assert weight is not None
    # A weight may be used several times in a microbatch: what is there is the previous step's for the first dW only.
    old = overwrite and getattr(weight, "main_grad_is_old", True)
    if old or getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(dw)  # type: ignore[attr-defined]
        weight.main_grad_is_old = False  # type: ignore[attr-defined]
    else:
        weight.main_grad.add_(dw)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else None


def _quantized(x: Tensor, quantizer: Quantizer, kind: str, use: Use | None) -> Tensor:
    """``x`` as a tensor that the next layer takes as it is."""
    if not quantizer.quantized:
        return x
    operands = quantize([x], [quantizer], [kind], use, gemm_ready=False)[0]
    scale = delayed_scale(use, kind)
    return QuantizedTensor.from_operands(
        operands, quantizer, x.shape, x.dtype, scale=None if scale is None else scale.clone()
    )
