"""``Linear``: an ``nn.Linear`` whose GEMMs run on quantized operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat import recompute
from minifloat.autocast import Use, current
from minifloat.functional import shared_cast
from minifloat.functional.amp import autocast_dtype, autocast_enabled
from minifloat.functional.linear import LinearCall, LinearFunction, Ready
from minifloat.functional.plan import LinearPlan
from minifloat.functional.quantize import calibrate, reuse
from minifloat.kernels import matmul
from minifloat.nn.linear_state import LinearState
from minifloat.nn.parameters import InitMethod
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import CustomRecipe, QuantizerRole, Recipe


def _identity(role: QuantizerRole) -> Quantizer:
    return Quantizer.identity()


_UNQUANTIZED = CustomRecipe(_identity)


class Started(NamedTuple):
    """One call of a linear that is about to run: what an autograd function takes."""

    plan: LinearPlan
    call: LinearCall
    ready: Ready
    weight: Tensor
    bias: Tensor | None

    def finish(self) -> None:
        """To be called after the forward."""
        if self.call.use is not None:
            self.call.use.forward_finished()


class Linear(LinearState):
    """Y = X W^T + b as ``nn.Linear`` computes it, through quantized operands where a recipe is in force.

    Args:
        in_features, out_features, bias, device, dtype: as of ``nn.Linear``; any sizes.
        recipe: the layer's own recipe or its short name, which wins over ``autocast``; ``"none"`` keeps the layer in
            high precision whatever surrounds it; None takes what ``autocast`` gives.
        name: what recipes and errors call the layer.
        fuse_wgrad_accumulation: add dW to ``weight.main_grad`` (a buffer that you provide, fp32 as a rule), set
            ``weight.grad_added_to_main_grad`` and return no gradient for it. After a forward with
            ``is_first_microbatch=True`` the first dW replaces what is there, and those that follow are added, of a
            weight that is used several times too; all its uses in the first microbatch must be forwarded before the
            first of their backwards.
        delay_wgrad_compute: backward leaves dW to :meth:`backward_dw`.
        save_original_input: backward keeps X as it came and quantizes it again: costs a cast, saves memory where X is
            kept alive by somebody else anyway.
        return_bias: forward gives (X W^T, b) and leaves the addition to the caller.
        parameters_split: names and numbers of rows: the weight is kept as that many parameters (``query_weight``,
            ``query_bias``, ...) and multiplied as one.
        init_method: fills the weight in place, and the bias starts as zeros; default: both as ``nn.Linear``.
        params_dtype: another name of ``dtype``.

    Activations are computed in the dtype of X, or of ``torch.autocast`` where that is on; weights are quantized
    straight from the parameter, whatever its dtype. State dict keys are those of ``nn.Linear``, and under delayed
    scaling also ``forward_scaling.*`` and ``backward_scaling.*``, which may be missing from a checkpoint or extra.
    ``quantized_model_init`` keeps the weight itself quantized.

    Raises:
        TypeError: ``recipe`` is not one, or X is not floating point.
        ValueError: an unknown recipe name; X's last dim is not ``in_features``; an unsupported dtype, or without
            recipe and ``torch.autocast`` one that is not the weight's; rows of ``parameters_split`` that do not add up
            to ``out_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        return_bias: bool = False,
        parameters_split: Mapping[str, int] | None = None,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        self.set_up(recipe, name or "")
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.return_bias = return_bias
        self.init_method = init_method
        dtype = params_dtype if params_dtype is not None else dtype
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if parameters_split is not None:
            self._split(parameters_split)
        self._quantize_weights()
        if isinstance(self.recipe, Recipe):
            self.plan(self.recipe)

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """X [..., in_features] to Y [..., out_features], and the bias if ``return_bias``.

        Args:
            is_first_microbatch: True quantizes the weight and keeps the result; False uses what was kept if the
                parameter has not changed since (see :meth:`invalidate`); None keeps nothing.
            fp8_output: return Y quantized, as the next layer would quantize it.
            fp8_grad: return the gradient of X quantized.
        """
        self.check_input(x)
        recipe, run = self.recipe_in_force(), None
        if recipe is None:
            run = self._calibrate(x)
            if not (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
                return self._high_precision(x)
            recipe = _UNQUANTIZED  # PyTorch's own linear cannot do what is asked
        dtype = self.compute_dtype(x)
        started = self.start(recipe, dtype, x.requires_grad, is_first_microbatch, fp8_output, fp8_grad, run)
        plan, call, ready, weight, bias = started
        source, x = x, x.to(dtype)
        quantizer = call.input_quantizer(plan, x)
        ready.x = reuse(x, quantizer)
        if ready.x is None:
            ready.x = shared_cast.find(source, dtype, quantizer, self)
        y: Tensor = LinearFunction.apply(plan, call, ready, x, weight, bias)  # type: ignore[no-untyped-call]
        if not call.keeps_input(plan, x):  # else X lives as long as the graph, and its operands would with it
            shared_cast.keep(source, dtype, quantizer, ready.x, self)
        started.finish()
        return (y, self.bias_vector()) if self.return_bias else y

    def start(
        self,
        recipe: Recipe,
        dtype: torch.dtype,
        needs_x: bool,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        run: recompute.Pass | None = None,
    ) -> Started:
        """What one call under ``recipe`` needs, with activations in ``dtype``; ``needs_x``: so may X's gradient be.

        ``run``: what the forward is to delayed scaling, where the caller has asked already.
        """
        plan = self.plan(recipe)
        run = self._run(plan) if run is None else run
        weight, bias = self.weight_matrix(), None if self.return_bias else self.bias_vector()
        if weight.dtype not in DTYPES:
            raise ValueError(f"{self.label}: cannot quantize a {weight.dtype} weight; use bf16, fp16 or fp32")
        call = self._call(plan, run, dtype, needs_x, weight, bias, is_first_microbatch, fp8_output, fp8_grad)
        return Started(plan, call, Ready(w=self.ready_weight(plan, call, weight, is_first_microbatch)), weight, bias)

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the activations: of X, or of ``torch.autocast`` where that is on.

        Raises:
            ValueError: X has a dtype that cannot be quantized.
        """
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{self.label}: cannot quantize {x.dtype} input and {self.weight_matrix().dtype} weight; "
                "use bf16, fp16 or fp32, as x.float()"
            )
        return autocast_dtype(x)

    def recipe_in_force(self) -> Recipe | None:
        """The layer's own recipe, else that of ``autocast``, else None."""
        if self.recipe is not None:
            return self.recipe if isinstance(self.recipe, Recipe) else None
        context = current()
        return context.recipe if context is not None and context.enabled else None

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient that backward left to do, then calls the registered hooks.

        Raises:
            ValueError: there is none, or the layer does not delay them.
        """
        if not self.delay_wgrad_compute:
            raise ValueError(f"{self.label}: backward_dw needs delay_wgrad_compute=True")
        if not self._wgrad_tasks:
            raise ValueError(f"{self.label}: no weight gradient is waiting; run backward before backward_dw")
        self._wgrad_tasks.pop(0)()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Calls ``hook`` after each :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
        split = "" if self.parameters_split is None else f", parameters_split={self.parameters_split}"
        recipe, own = self.recipe_in_force(), self.recipe is not None
        in_force = (
            "" if recipe is None and not own else f", recipe={'none' if recipe is None else type(recipe).__name__}"
        )
        return sizes + split + in_force + (" (autocast)" if recipe is not None and not own else "")

    # ---- one call ----

    def _call(
        self,
        plan: LinearPlan,
        run: recompute.Pass,
        dtype: torch.dtype,
        needs_x: bool,
        weight: Tensor,
        bias: Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> LinearCall:
        grad = torch.is_grad_enabled()
        needs_x = grad and needs_x
        needs_w = grad and weight.requires_grad
        needs_b = grad and bias is not None and bias.requires_grad
        main_grad = needs_w and self.fuse_wgrad_accumulation
        if main_grad and getattr(weight, "main_grad", None) is None:
            raise ValueError(f"{self.label}: fuse_wgrad_accumulation needs weight.main_grad; set it before forward")
        if self.fuse_wgrad_accumulation and is_first_microbatch and torch._C._current_graph_task_id() == -1:
            # Not inside of backward: a checkpoint's recomputation is no other microbatch.
            weight.main_grad_is_old = True  # type: ignore[attr-defined]
        return LinearCall(
            needs_x=needs_x,
            needs_w=needs_w,
            needs_b=needs_b,
            dtype=dtype,
            use=self._use(plan, run, needs_x or needs_w or needs_b),
            quantize_output=fp8_output,
            quantize_grad_input=fp8_grad,
            main_grad=main_grad,
            overwrite_main_grad=is_first_microbatch is True,
            wgrad_tasks=self._wgrad_tasks if self.delay_wgrad_compute else None,
        )

    def _run(self, plan: LinearPlan | None) -> recompute.Pass:
        """What a forward is to the delayed scaling of ``plan``; to be asked once in each."""
        scale = None if plan is None or plan.delayed is None else self.forward_scaling.scale
        return self._follow(self.recipe_in_force(), scale)

    def _use(self, plan: LinearPlan, run: recompute.Pass, backward: bool) -> Use | None:
        """Where delayed scaling keeps its state; in a recomputation, what it was in the forward."""
        if plan.delayed is None:
            return None
        states = self.forward_scaling, self.backward_scaling
        return Use(states, plan.delayed, run.forward, run.backward and backward, current(), run.scale)

    def _follow(self, recipe: Recipe | None, scale: Tensor | None) -> recompute.Pass:
        if torch.compiler.is_compiling():
            if scale is not None:
                recompute.refuse_compiled(self.label)
            grad = torch.is_grad_enabled()
            return recompute.Pass(None, grad, grad)
        run = recompute.follow(recipe, scale, self._ran_under, self.label)
        self._ran_under = recipe
        return run

    def _high_precision(self, x: Tensor) -> Any:
        weight, bias = self.weight_matrix(), self.bias_vector()
        if x.dtype != weight.dtype and not autocast_enabled(x):
            raise ValueError(
                f"{self.label}: {x.dtype} input and {weight.dtype} weight, and no recipe that would compute with both; "
                "convert one to the dtype of the other, or use torch.autocast or a recipe"
            )
        matmul.record("fprop", "identity", "identity", "torch")
        return (F.linear(x, weight), bias) if self.return_bias else F.linear(x, weight, bias)

    def _calibrate(self, x: Tensor) -> recompute.Pass:
        """Where ``autocast`` calibrates delayed scaling: records what is about to be computed in high precision."""
        context = current()
        calibrates = context is not None and context.calibrating and self.recipe is None
        plan = self.plan(context.recipe) if calibrates and context is not None else None
        run = self._run(plan)
        if plan is not None and plan.delayed is not None and run.scale is None:
            states = self.forward_scaling, self.backward_scaling
            use = Use(states, plan.delayed, True, False, context)
            calibrate([x.detach(), self.weight_matrix().detach()], ["input", "weight"], use)
        return run

    def check_input(self, x: Tensor) -> None:
        """Raises if X is not floating point, or does not end in ``in_features``."""
        if not x.is_floating_point():
            raise TypeError(f"{self.label}: input is {x.dtype}; a floating-point tensor is needed, as x.bfloat16()")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.label}: input of shape {tuple(x.shape)} must end in in_features={self.in_features}"
            )


__all__ = ["Linear"]
