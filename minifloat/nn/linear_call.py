"""One call of a linear: the recipe in force, the dtype, what needs gradients, and delayed scaling's part in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat import finite, recompute
from minifloat.autocast import Use, checks_finite, current
from minifloat.comm.ddp_forward import check_reduced
from minifloat.functional.amp import autocast_dtype, autocast_enabled
from minifloat.functional.call import LinearCall, Ready
from minifloat.functional.plan import LinearPlan
from minifloat.functional.quantize import calibrate
from minifloat.functional.tensor_parallel import UNSHARDED, TensorParallel
from minifloat.nn.inputs import check_meta
from minifloat.nn.linear_state import LinearState
from minifloat.nn.sharding import check_scales_agree
from minifloat.ops import matmul
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import Recipe
from minifloat.tensor import QuantizedTensor

_VALUES = Quantizer.identity().with_usage(columnwise=False)


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


class LinearCalls(LinearState):
    """How a call of a :class:`~minifloat.Linear` begins, whoever runs it: the layer itself or a fused module."""

    def _start(
        self,
        recipe: Recipe,
        dtype: torch.dtype,
        needs_x: bool,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        parallel: TensorParallel = UNSHARDED,
        recompute_x: bool = False,
    ) -> Started:
        """What one call under ``recipe`` needs, with activations in ``dtype``; ``needs_x``: so may X's gradient be.

        ``parallel``: the layer's, with the rows of this call; ``recompute_x``: :attr:`LinearCall.remakes_x`, where that
        may be.
        """
        plan = self._plan(recipe)
        weight, bias = self._weight_matrix(), None if self.return_bias else self._bias_vector()
        if weight.dtype not in DTYPES:
            raise ValueError(f"{self._label}: cannot quantize a {weight.dtype} weight; use bf16, fp16 or fp32")
        call = self._call(
            plan, dtype, needs_x, weight, bias, is_first_microbatch, fp8_output, fp8_grad, parallel, recompute_x
        )
        if plan.delayed is not None and call.use is not None and parallel.sequence_parallel:
            why = f"{self._label}: sequence_parallel=True gathers tensors"
            check_scales_agree(why, parallel.group, plan.delayed, call.use.group)
        return Started(plan, call, Ready(w=self._ready_weight(plan, call, weight, is_first_microbatch)), weight, bias)

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the activations: of X, or of ``torch.autocast`` where that is on.

        Raises:
            ValueError: X has a dtype that cannot be quantized.
        """
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{self._label}: cannot quantize {x.dtype} input and {self._weight_matrix().dtype} weight; "
                "use bf16, fp16 or fp32, as x.float()"
            )
        return autocast_dtype(x)

    def _recipe_in_force(self) -> Recipe | None:
        """The layer's own recipe, else that of ``autocast``, else None."""
        if self._recipe is not None:
            return self._recipe if isinstance(self._recipe, Recipe) else None
        context = current()
        return context.recipe if context is not None and context.enabled else None

    def _returned_bias(self, parallel: TensorParallel) -> Tensor | None:
        """The bias that the caller adds; to a rank's rows alone if Y is scattered, yet with the gradient of all."""
        bias = self._bias_vector()
        return parallel.replicated(bias) if bias is not None and parallel.mode == "row" else bias

    def _call(
        self,
        plan: LinearPlan,
        dtype: torch.dtype,
        needs_x: bool,
        weight: Tensor,
        bias: Tensor | None,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
        parallel: TensorParallel,
        recompute_x: bool,
    ) -> LinearCall:
        grad = torch.is_grad_enabled()
        needs_x = grad and needs_x
        needs_w = grad and weight.requires_grad
        needs_b = grad and bias is not None and bias.requires_grad
        main_grad = needs_w and self.fuse_wgrad_accumulation
        if main_grad or (needs_w and self.delay_wgrad_compute):
            check_reduced(self._label, weight)
        if main_grad and getattr(weight, "main_grad", None) is None:
            raise ValueError(f"{self._label}: fuse_wgrad_accumulation needs weight.main_grad; set it before forward")
        if main_grad and weight.main_grad.is_meta and not weight.is_meta:  # type: ignore[attr-defined]
            raise ValueError(
                f"{self._label}: weight.main_grad is on the meta device, where gradients are lost; make it on "
                f"{weight.device}"
            )
        if self.fuse_wgrad_accumulation and is_first_microbatch and torch._C._current_graph_task_id() == -1:
            # Not inside of backward: a checkpoint's recomputation is no other microbatch.
            weight.main_grad_is_old = True  # type: ignore[attr-defined]
        return LinearCall(
            needs_x=needs_x,
            needs_w=needs_w,
            needs_b=needs_b,
            dtype=dtype,
            parallel=parallel,
            use=self._use(plan, needs_x or needs_w or needs_b),
            remakes_x=recompute_x and needs_x and needs_w and not (plan.backward_override or parallel.gathers_input),
            quantize_output=fp8_output,
            quantize_grad_input=fp8_grad,
            main_grad=main_grad,
            overwrite_main_grad=is_first_microbatch is True,
            wgrad_tasks=self._wgrad_tasks if self.delay_wgrad_compute else None,
        )

    def _replayed_scale(self, plan: LinearPlan | None) -> Tensor | None:
        """Delayed scales that a recomputation reads in place of the layer's; to be asked once in each forward."""
        scale = None if plan is None or plan.delayed is None else self.forward_scaling.scale
        if scale is not None and scale.is_meta:
            self._check_on_meta()
        if not torch.compiler.is_compiling():
            return recompute.replayed_scale(self, self._recipe_in_force(), scale)
        if scale is not None:
            recompute.refuse_compiled(self._label)
        return None

    def _check_on_meta(self) -> None:
        """Raises if delayed scaling's buffers have no memory and the weight has."""
        device = getattr(self, self._weight_names[0]).device
        if self.forward_scaling.scale.is_meta and device.type != "meta":
            raise ValueError(
                f"{self._label}: the buffers of delayed scaling are on meta and the weight is on {device}; call "
                f"model.to_empty(device={str(device)!r}) before the weights are written, or load them with "
                "load_state_dict, which resets what a checkpoint lacks"
            )

    def _use(self, plan: LinearPlan, backward: bool) -> Use | None:
        """Where delayed scaling keeps its state; a recomputation records nothing."""
        replayed = self._replayed_scale(plan)
        if plan.delayed is None:
            return None
        states, first = (self.forward_scaling, self.backward_scaling), replayed is None
        records = torch.is_grad_enabled() and first
        return Use(states, plan.delayed, records, backward and first, current(), replayed)

    def _high_precision(self, x: Tensor) -> Any:
        self._check_dtype(x)
        self._replayed_scale(None)
        weight, bias = self._weight_matrix(), self._bias_vector()
        if isinstance(weight, QuantizedTensor) and weight.gatherer is not None and not torch.compiler.is_compiling():
            weight.gatherer.fetch_for(_VALUES, self._label)
        matmul.record("fprop", "identity", "identity", "torch")
        y = F.linear(x, weight, None if self.return_bias else bias)
        if finite.active:
            self._check_finite(x, y)
        return (y, bias) if self.return_bias else y

    def _check_dtype(self, x: Tensor) -> None:
        weight = getattr(self, self._weight_names[0])
        if x.dtype != weight.dtype and not autocast_enabled(x):
            raise ValueError(
                f"{self._label}: {x.dtype} input and {weight.dtype} weight, and no recipe that would compute with "
                "both; convert one to the dtype of the other, or use torch.autocast or a recipe"
            )

    def _calibrate(self, x: Tensor) -> None:
        """Where ``autocast`` calibrates delayed scaling: records what is about to be computed in high precision."""
        context = current()
        if context is None or not context.calibrating or self.recipe is not None or recompute.recomputes():
            return
        plan = self._plan(context.recipe)
        if plan.delayed is not None:
            self._check_on_meta()
            states = self.forward_scaling, self.backward_scaling
            use = Use(states, plan.delayed, True, False, context)
            calibrate([x.detach(), self._weight_matrix().detach()], ["input", "weight"], use)

    def _check_finite(self, x: Tensor, y: Tensor | None = None) -> None:
        """Raises if X or W is not finite, or later, in backward, if the gradient of Y is not."""
        if not checks_finite():
            return
        if y is None:
            finite.check(self._label, "input", x)
            finite.check(self._label, "weight", self._weight_matrix())
        else:
            finite.watch_gradient(self._label, y)

    def _check_input(self, x: Tensor) -> None:
        """Raises if X is not floating point, does not end in ``in_features``, or the weight has no values for it."""
        check_meta(x, self, next(iter(self._parameters.values()), None))
        if not x.is_floating_point():
            raise TypeError(f"{self._label}: input is {x.dtype}; a floating-point tensor is needed, as x.bfloat16()")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._label}: input of shape {tuple(x.shape)} must end in in_features={self.in_features}"
            )
        if finite.active:
            self._check_finite(x)
