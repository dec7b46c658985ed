"""``Linear``: an ``nn.Linear`` whose GEMMs run on quantized operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat.autocast import Use, autocast, current
from minifloat.functional.linear import LinearCall, LinearFunction, weight_quantizer
from minifloat.functional.plan import BACKWARD_SLOTS, FORWARD_SLOTS, LinearPlan, linear_plan
from minifloat.functional.quantize import calibrate, quantize, reuse
from minifloat.kernels import matmul
from minifloat.nn.delayed import AmaxHistory
from minifloat.operand import Quantized
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import CustomRecipe, DelayedScaling, QuantizerRole, Recipe, as_recipe

_PLANS_KEPT = 8  # of custom recipes: a program that makes one for each step must not fill the memory
_HISTORIES = ("forward_scaling", "backward_scaling")


def _identity(role: QuantizerRole) -> Quantizer:
    return Quantizer.identity()


_UNQUANTIZED = CustomRecipe(_identity)


class CachedWeight(NamedTuple):
    """A quantized weight, and what it was cast from and with."""

    weight: Tensor
    version: int
    quantizer: Quantizer
    operands: Quantized

    def of(self, weight: Tensor, version: int, quantizer: Quantizer) -> bool:
        """It is what casting ``weight`` now would give."""
        return self.weight is weight and self.version == version and self.quantizer == quantizer


class Linear(nn.Linear):
    """Y = X W^T + b as ``nn.Linear`` computes it, through quantized operands where a recipe is in force.

    Args:
        in_features, out_features, bias, device, dtype: as of ``nn.Linear``; any sizes.
        recipe: the layer's own recipe or its short name, which wins over ``autocast``; ``"none"`` keeps the layer in
            high precision whatever surrounds it; None takes what ``autocast`` gives.
        name: what recipes and errors call the layer.
        fuse_wgrad_accumulation: add dW to ``weight.main_grad`` (a buffer that you provide, fp32 as a rule), set
            ``weight.grad_added_to_main_grad`` and return no gradient for it.
        delay_wgrad_compute: backward leaves dW to :meth:`backward_dw`.
        save_original_input: backward keeps X as it came and quantizes it again: costs a cast, saves memory where X is
            kept alive by somebody else anyway.

    Activations are computed in the dtype of X, or of ``torch.autocast`` where that is on; weights are quantized
    straight from the parameter, whatever its dtype. State dict keys are those of ``nn.Linear``, and under delayed
    scaling also ``forward_scaling.*`` and ``backward_scaling.*``, which may be missing from a checkpoint or extra.

    Raises:
        TypeError: ``recipe`` is not one, or X is not floating point.
        ValueError: an unknown recipe name; X's last dim is not ``in_features``; an unsupported dtype.
    """

    forward_scaling: AmaxHistory
    backward_scaling: AmaxHistory

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
    ) -> None:
        self.name = name or ""
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self._wgrad_tasks: list[Callable[[], None]] = []
        self._wgrad_hooks: list[Callable[[], None]] = []
        self._weight_cache: CachedWeight | None = None
        self._latest_plan: tuple[Recipe, LinearPlan] | None = None
        self._custom_plans: list[tuple[Recipe, LinearPlan]] = []
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe: Recipe | Literal["none"] | None = None
        if recipe is not None:
            self.recipe = "none" if recipe == "none" else as_recipe(recipe)
        if isinstance(self.recipe, Recipe):
            self.plan(self.recipe)

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor:
        """X [..., in_features] to Y [..., out_features].

        Args:
            is_first_microbatch: True quantizes the weight and keeps the result; False uses what was kept if the
                parameter has not changed since (see :meth:`invalidate`); None keeps nothing.
            fp8_output: return Y quantized, as the next layer would quantize it.
            fp8_grad: return the gradient of X quantized.
        """
        self._check_input(x)
        context = current()
        recipe = self.recipe_in_force()
        if recipe is None and (self.fuse_wgrad_accumulation or self.delay_wgrad_compute):
            recipe = _UNQUANTIZED  # what PyTorch's own linear cannot do
        if recipe is None:
            return self._high_precision(x, context)
        plan = self.plan(recipe)
        if x.dtype not in DTYPES or self.weight.dtype not in DTYPES:
            raise ValueError(
                f"{self._label()}: cannot quantize {x.dtype} input and {self.weight.dtype} weight; "
                "use bf16, fp16 or fp32, as x.float()"
            )
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        call = self._call(x, plan, is_first_microbatch, fp8_output, fp8_grad)
        ready = self._ready_input(x, plan, call), self._ready_weight(plan, call, is_first_microbatch)
        y: Tensor = LinearFunction.apply(plan, call, ready, x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        if call.use is not None:
            call.use.forward_finished()
        return y

    def recipe_in_force(self) -> Recipe | None:
        """The layer's own recipe, else that of ``autocast``, else None."""
        if self.recipe is not None:
            return self.recipe if isinstance(self.recipe, Recipe) else None
        context = current()
        return context.recipe if context is not None and context.enabled else None

    def plan(self, recipe: Recipe) -> LinearPlan:
        """What the layer does under ``recipe``: decided at its first use, and kept."""
        if self._latest_plan is None or self._latest_plan[0] is not recipe:
            make = self._custom_plan if isinstance(recipe, CustomRecipe) else self._new_plan
            self._latest_plan = recipe, make(recipe)
        return self._latest_plan[1]

    def _custom_plan(self, recipe: Recipe) -> LinearPlan:
        """Recipes may take turns, and a factory is asked once: the plans of the latest few are kept."""
        for known, plan in self._custom_plans:
            if known is recipe:
                return plan
        plan = self._new_plan(recipe)
        self._custom_plans = [*self._custom_plans[1 - _PLANS_KEPT :], (recipe, plan)]
        return plan

    def _new_plan(self, recipe: Recipe) -> LinearPlan:
        plan = linear_plan(recipe, self.name, self.save_original_input)
        if plan.delayed is not None:
            self._make_histories(plan.delayed)
        return plan

    def invalidate(self) -> None:
        """Forgets the quantized weight: call it after writing to the parameter in a way that PyTorch does not see."""
        self._weight_cache = None

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient that backward left to do, then calls the registered hooks.

        Raises:
            ValueError: there is none, or the layer does not delay them.
        """
        if not self.delay_wgrad_compute:
            raise ValueError(f"{self._label()}: backward_dw needs delay_wgrad_compute=True")
        if not self._wgrad_tasks:
            raise ValueError(f"{self._label()}: no weight gradient is waiting; run backward before backward_dw")
        self._wgrad_tasks.pop(0)()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Calls ``hook`` after each :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in _HISTORIES:
            if name in self._modules:
                getattr(self, name).reset_parameters()

    def extra_repr(self) -> str:
        recipe = self.recipe_in_force()
        own = "" if self.recipe is None else f", recipe={type(recipe).__name__ if recipe else 'none'}"
        return super().extra_repr() + own

    # ---- one call ----

    def _call(
        self, x: Tensor, plan: LinearPlan, is_first_microbatch: bool | None, fp8_output: bool, fp8_grad: bool
    ) -> LinearCall:
        grad = torch.is_grad_enabled()
        needs_x = grad and x.requires_grad
        needs_w = grad and self.weight.requires_grad
        needs_b = grad and self.bias is not None and self.bias.requires_grad
        main_grad = needs_w and self.fuse_wgrad_accumulation
        if main_grad and getattr(self.weight, "main_grad", None) is None:
            raise ValueError(f"{self._label()}: fuse_wgrad_accumulation needs weight.main_grad; set it before forward")
        return LinearCall(
            needs_x=needs_x,
            needs_w=needs_w,
            needs_b=needs_b,
            dtype=x.dtype,
            use=None if plan.delayed is None else self._use(plan.delayed, grad, needs_x or needs_w or needs_b),
            quantize_output=fp8_output,
            quantize_grad_input=fp8_grad,
            main_grad=main_grad,
            overwrite_main_grad=is_first_microbatch is True,
            wgrad_tasks=self._wgrad_tasks if self.delay_wgrad_compute else None,
        )

    def _use(self, recipe: DelayedScaling, records: bool, backward: bool) -> Use:
        return Use((self.forward_scaling, self.backward_scaling), recipe, records, backward, current())

    def _ready_input(self, x: Tensor, plan: LinearPlan, call: LinearCall) -> Quantized | None:
        return reuse(x, call.input_quantizer(plan, x))

    def _ready_weight(self, plan: LinearPlan, call: LinearCall, is_first_microbatch: bool | None) -> Quantized | None:
        quantizer = weight_quantizer(plan, call.needs_x)
        ready = reuse(self.weight, quantizer)
        if ready is not None or is_first_microbatch is None:
            return ready
        cached, version = self._weight_cache, _version(self.weight)
        if not is_first_microbatch and cached is not None and cached.of(self.weight, version, quantizer):
            return cached.operands
        operands = quantize([self.weight.detach()], [quantizer], ["weight"], call.use)[0]
        self._weight_cache = CachedWeight(self.weight, version, quantizer, operands)
        return operands

    def _high_precision(self, x: Tensor, context: autocast | None) -> Tensor:
        if context is not None and context.calibrating and self.recipe is None:
            delayed = self.plan(context.recipe).delayed
            if delayed is not None:
                use = self._use(delayed, records=True, backward=False)
                calibrate([x.detach(), self.weight.detach()], ["input", "weight"], use)
        matmul.record("fprop", "identity", "identity", "torch")
        return F.linear(x, self.weight, self.bias)

    def _check_input(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise TypeError(f"{self._label()}: input is {x.dtype}; a floating-point tensor is needed, as x.bfloat16()")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._label()}: input of shape {tuple(x.shape)} must end in in_features={self.in_features}"
            )

    def _label(self) -> str:
        return f"Linear {self.name!r}" if self.name else f"Linear({self.in_features}, {self.out_features})"

    # ---- state ----

    def _make_histories(self, recipe: DelayedScaling) -> None:
        if torch.compiler.is_compiling() and "forward_scaling" not in self._modules:
            raise RuntimeError(
                f"{self._label()}: delayed scaling keeps buffers, which a compiled graph cannot add to a module; "
                "call minifloat.prepare(model, recipe) before the first compiled step, or give the layer recipe="
            )
        for name, slots in zip(_HISTORIES, (FORWARD_SLOTS, BACKWARD_SLOTS), strict=True):
            if name not in self._modules:
                with torch.inference_mode(False):  # or training could not write to them later
                    self.add_module(name, AmaxHistory(len(slots), recipe.amax_history_len, self.weight.device))

    def __getstate__(self) -> dict[str, Any]:
        # A copy's parameter counts its versions anew, and what waits for backward_dw belongs to the original's graph.
        return self.__dict__ | {"_weight_cache": None, "_wgrad_tasks": []}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.invalidate()  # module.to() and the like write through .data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # A layer that gets its recipe from autocast has no histories before its first step: the checkpoint brings them.
        for name, slots in zip(_HISTORIES, (FORWARD_SLOTS, BACKWARD_SLOTS), strict=True):
            saved = state_dict.get(f"{prefix}{name}.amax_history")
            if saved is not None and name not in self._modules:
                self.add_module(name, AmaxHistory(len(slots), saved.shape[0], self.weight.device))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _version(weight: Tensor) -> int:
    """Counts the writes to ``weight`` that PyTorch sees; an inference tensor has no such count."""
    inference = not torch.compiler.is_compiling() and weight.is_inference()  # which no graph can ask
    return 0 if inference else weight._version


__all__ = ["Linear"]
