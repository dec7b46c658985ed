"""One call of a linear: the recipe in force, the dtype, what needs gradients, and delayed scaling's part in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import finite, recompute
from minifloat.arguments import check_value, checked
from minifloat.autocast import autocast, checks_finite, current, is_batch_invariant
from minifloat.comm.checks import check_options, other_recipes, other_recipes_in_trace
from minifloat.comm.ddp import check_reduced
from minifloat.comm.group import Group
from minifloat.delayed import check_same_scale
from minifloat.delayed_call import DelayedCall
from minifloat.functional.autograd import as_output, autocast_enabled, exporting
from minifloat.functional.batch_invariant import check_rows_alone
from minifloat.functional.etp.weight import GatheredWeight
from minifloat.functional.exchange import LOCAL, Local
from minifloat.functional.linear import Given, LinearCall
from minifloat.functional.linear_config import LinearConfig, Options
from minifloat.functional.spec import Spec, make_spec
from minifloat.functional.weight_source import LOCAL_WEIGHT, LocalWeight
from minifloat.nn import delayed_wgrad
from minifloat.nn.inputs import check_meta, check_tensor
from minifloat.nn.linear_state import LinearState
from minifloat.ops import matmul, new
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import CustomRecipe, DelayedScaling, QuantizerRole, Recipe
from minifloat.tensor import QuantizedTensor

_VALUES = Quantizer.identity().with_usage(columnwise=False)


def _identity(role: QuantizerRole) -> Quantizer:
    return Quantizer.identity()


_graph_task, _top_hooks = torch._C._current_graph_task_id, torch._C._autograd._top_saved_tensors_default_hooks
UNQUANTIZED = CustomRecipe(_identity)
"""The recipe of a layer that has none and yet does what PyTorch's own linear cannot."""
_MOST_SPECS = 64  # of a layer; groups that are replaced again and again must not fill the memory


def _in_words(config: LinearConfig, needs_x: bool, needs_w: bool, needs_b: bool) -> str:
    """What ranks that share a linear must agree on in each call."""
    needed = [name for name, needs in (("dX", needs_x), ("dW", needs_w), ("db", needs_b)) if needs]
    return f"{config.describe()}, gradients {needed}"


Prepared = tuple[LinearCall, Tensor, Tensor | None]
"""A call of a linear that is about to run, for its autograd function; its weight and bias."""


class LinearCalls(LinearState):
    """How a call of a :class:`~minifloat.Linear` begins, whoever runs it: the layer itself or a fused module."""

    _weight_as_it_is: LocalWeight = LOCAL_WEIGHT

    def _prepare(
        self,
        recipe: Recipe,
        dtype: torch.dtype,
        needs_x: bool,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        exchange: Local = LOCAL,
        recompute_x: bool = False,
        input_is_quantized: bool = False,
    ) -> Prepared:
        """What one call under ``recipe`` needs, with activations in ``dtype``; ``needs_x``: so may X's gradient be.

        ``exchange``: the layer's, with the rows of this call; the others as of :class:`Options`.
        """
        # Asked here, since Dynamo may compile this without its caller; ``is_compiling()`` itself takes two calls.
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
        latest = self._latest_config
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                f"{self._label}: torch.func's grad, vjp, jvp and vmap do not see into quantized layers; use "
                "torch.autograd.grad and a batch dim of X, or recipe='none'"
            )
        known = not compiling and latest is not None and latest[0] is recipe
        _, config, specs = latest if known else self._configured(recipe)  # type: ignore[misc]
        replayed, grad = None, torch.is_grad_enabled()
        special = compiling or config.delayed is not None or not grad or recompute._inside
        if special or _graph_task() != -1 or _top_hooks(True) is not None:
            replayed = self._replayed_scale(recipe, config, compiling)
        weight, bias = self._weight_and_bias()
        needs_x = grad and needs_x
        needs_w = grad and weight.requires_grad
        needs_b = grad and bias is not None and bias.requires_grad
        if exchange.check:
            check_options(self._label, _in_words(config, needs_x, needs_w, needs_b), exchange.group)
        source, past_autograd = self._weight_as_it_is, self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if past_autograd or self._etp is not None or self.wgrad_in_weight_dtype:
            source = self._weight_source(weight, is_first_microbatch)
        if past_autograd or self._etp is not None:
            self._begin_own_gradients(source, needs_w, is_first_microbatch, compiling)
        options = Options(
            device=weight.device.type, dtype=dtype, weight_dtype=weight.dtype,
            needs_x=needs_x, needs_w=needs_w, needs_b=needs_b, ranks=exchange.mode and exchange.ranks,
            input_is_quantized=input_is_quantized, recompute_x=recompute_x,
            quantize_output=fp8_output, quantize_grad_input=fp8_grad,
            batch_invariant=autocast.batch_invariant_used and is_batch_invariant(),
            gathers_weight=self._etp is not None, delays_wgrad=self.delay_wgrad_compute,
        )  # fmt: skip
        spec = None if compiling else specs.get(options)
        if spec is None:
            if exchange.mode is not None and not weight.is_meta:
                self._check_same_recipe(f"{type(recipe).__name__}({config.describe()})", exchange.group, weight)
            spec = self._new_spec(config, options)
            if spec.eager:
                if len(specs) >= _MOST_SPECS:
                    specs.clear()
                specs[options] = spec
        given = Given()
        if config.delayed is not None:
            backward = needs_x or needs_w or needs_b
            given.delayed = self._delayed_call(config.delayed, replayed, backward, exchange)
        nothing_kept = compiling or self._weight_cache is None
        if not (type(weight) is nn.Parameter and is_first_microbatch is None and nothing_kept):  # else it is cast now
            given.w = self._weight_operands(spec, given.delayed, weight, is_first_microbatch)
        return new(LinearCall, (spec, exchange, source, given)), weight, bias

    def _weight_source(self, weight: Tensor, is_first_microbatch: bool | None) -> LocalWeight:
        """Where operands of ``weight`` come from in this call, and where its gradient goes, if that is special."""
        tasks = self._wgrad_tasks if self.delay_wgrad_compute else None
        dtype = weight.dtype if self.wgrad_in_weight_dtype else None
        of_gradient = tasks, dtype, self.fuse_wgrad_accumulation, is_first_microbatch is True
        if self._etp is not None:
            return GatheredWeight(self._etp, *of_gradient)
        return type(self._weight_as_it_is)(self._own_parameters(weight), *of_gradient)

    def _own_parameters(self, weight: Tensor) -> Sequence[Any]:
        """The parameters of ``weight``, if it is whole, that backward may write to by itself."""
        return (weight,)

    def _check_same_recipe(self, recipe: str, group: Group, weight: Tensor) -> None:
        """Raises on every rank if ``recipe`` is another on some rank of ``group``, which is asked once for each."""
        where, others = (group.name, weight.device.type), ""
        if torch.compiler.is_compiling():
            others = other_recipes_in_trace(recipe, *where)
        elif (asked := (recipe, *where)) not in self._agreed:
            others = other_recipes(f"{self._label}: {recipe}", *where)
            if not others:
                self._agreed = {asked} if len(self._agreed) >= _MOST_SPECS else self._agreed | {asked}
        if others:
            raise ValueError(f"{self._label}: {others}")

    def _new_spec(self, config: LinearConfig, options: Options) -> Spec:
        self._check_weight_dtype(options.weight_dtype)
        if options.batch_invariant:
            check_rows_alone(self, config, options)
        return make_spec(config, options)

    def _check_weight_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"{self._label}: cannot quantize a {dtype} weight; use bf16, fp16 or fp32")

    def _begin_own_gradients(self, source: LocalWeight, needs_w: bool, first: bool | None, compiling: bool) -> None:
        """A call whose backward is to write gradients of the weight by itself."""
        main_grad = needs_w and self.fuse_wgrad_accumulation
        if needs_w:
            self._check_own_gradients(source.parameters, main_grad)
        for own in source.parameters if compiling and main_grad else ():  # backward sets no attribute there
            if own.requires_grad:
                own.grad_added_to_main_grad = True
        if first and (compiling or _graph_task() == -1):
            # Not inside of backward: a checkpoint's recomputation is no other microbatch.
            for own in source.parameters if self.fuse_wgrad_accumulation else ():
                own.main_grad_is_old = True  # the next dW replaces what is in main_grad
            if needs_w and self.delay_wgrad_compute:
                self._wgrad_tasks.clear()  # of a step that was given up
        if needs_w and self.delay_wgrad_compute:
            delayed_wgrad.watch(self)

    def _check_own_gradients(self, parameters: Sequence[Any], main_grad: bool) -> None:
        """Raises where backward is to write the gradient of the weight by itself and cannot."""
        for own in parameters:
            if not own.requires_grad:
                continue
            check_reduced(self, own)
            if not main_grad:
                continue
            buffer = getattr(own, "main_grad", None)
            if buffer is None:
                raise ValueError(
                    f"{self._label}: fuse_wgrad_accumulation needs weight.main_grad; set it before forward"
                )
            if buffer.is_meta and not own.is_meta:
                raise ValueError(
                    f"{self._label}: weight.main_grad is on the meta device, where gradients are lost; make it on "
                    f"{own.device}"
                )
            if buffer.shape != own.shape or not buffer.dtype.is_floating_point or buffer.dtype.itemsize < 2:
                raise ValueError(
                    f"{self._label}: weight.main_grad is {buffer.dtype} {tuple(buffer.shape)}; gradients of the weight "
                    f"are added to it: use torch.float32 (or 64, or bf16, fp16) and shape {tuple(own.shape)}"
                )

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
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return x.dtype

    def _recipe_in_force(self) -> Recipe | None:
        """The layer's own recipe, else that of ``autocast``, else None."""
        if self._recipe is not None:
            return self._recipe if isinstance(self._recipe, Recipe) else None
        context = current()
        return context.recipe if context is not None and context.enabled else None

    def _returned_bias(self, exchange: Local) -> Tensor | None:
        """The bias that the caller adds; to a rank's rows alone if Y is scattered, yet with the gradient of all."""
        bias = self._bias_vector()
        return exchange.replicated(bias) if bias is not None and exchange.mode == "row" else bias

    def _replayed_scale(self, recipe: Recipe | None, config: LinearConfig | None, compiling: bool) -> Tensor | None:
        """Delayed scales that a recomputation reads in place of the layer's; to be asked once in each forward."""
        scale = None if config is None or config.delayed is None else self.forward_scaling.scale
        if scale is not None and scale.is_meta:
            self._check_on_meta()
        if not compiling:
            return recompute.replayed_scale(self, None if recipe is UNQUANTIZED else recipe, scale)
        if scale is not None or (recipe is None and self._recipe is None and "forward_scaling" in self._modules):
            recompute.refuse_compiled(self, scale is not None)
        return None

    def _check_on_meta(self) -> None:
        """Raises if delayed scaling's buffers have no memory and the weight has."""
        device = self._weight(self._weight_names[0]).device
        if self.forward_scaling.scale.is_meta and device.type != "meta":
            raise ValueError(
                f"{self._label}: the buffers of delayed scaling are on meta and the weight is on {device}; call "
                f"model.to_empty(device={str(device)!r}) before the weights are written, or load them with "
                "load_state_dict, which resets what a checkpoint lacks"
            )

    def _delayed_call(
        self, recipe: DelayedScaling, replayed: Tensor | None, backward: bool, exchange: Local
    ) -> DelayedCall:
        """Where delayed scaling keeps its state; a recomputation records nothing."""
        states, first = (self.forward_scaling, self.backward_scaling), replayed is None
        records = torch.is_grad_enabled() and first
        call = DelayedCall(states, recipe, records, backward and first, current(), replayed)
        if exchange.sequence_parallel:
            check_same_scale(self, "sequence_parallel=True gathers tensors", exchange.group, recipe, call.group)
        if self._etp is not None:
            check_same_scale(self, "the weight is sharded", self._etp.sharding.group, recipe, call.group)
        return call

    def _high_precision(self, x: Tensor) -> Any:
        self._check_dtype(x)
        self._replayed_scale(None, None, torch.compiler.is_compiling())
        weight, bias = self._weight_matrix(), self._bias_vector()
        if isinstance(weight, QuantizedTensor) and weight.gatherer is not None and not torch.compiler.is_compiling():
            weight.gatherer.fetch_for(_VALUES, self._label)
        if isinstance(weight, QuantizedTensor) and exporting():
            weight = weight.dequantize()  # a program holds plain tensors
        matmul.record("fprop", "identity", "identity", "torch")
        y = F.linear(x, weight, None if self.return_bias else bias)
        if y.dim() > 2:
            y = as_output(y, y.shape)  # PyTorch's is a view of a matrix
        if finite.active:
            self._check_finite(x, y)
        return (y, bias) if self.return_bias else y

    def _check_dtype(self, x: Tensor) -> None:
        weight = self._weight(self._weight_names[0])
        if x.dtype != weight.dtype and not autocast_enabled(x):
            raise ValueError(
                f"{self._label}: {x.dtype} input and {weight.dtype} weight, and no recipe that would compute with "
                "both; convert one to the dtype of the other, or use torch.autocast or a recipe"
            )

    def _calibration(self) -> DelayedCall | None:
        """Where ``autocast`` calibrates delayed scaling: what is about to be computed in high precision is recorded."""
        context = current()
        if context is None or not context.calibrating or self.recipe is not None or recompute.recomputes():
            return None
        config = self._config(context.recipe)
        if config.delayed is None:
            return None
        self._check_on_meta()
        return DelayedCall((self.forward_scaling, self.backward_scaling), config.delayed, True, False, context)

    def _own_values(self) -> Tensor:
        """What this rank has of W."""
        return self._weight_matrix().detach() if self._etp is None else torch.cat(self._etp.rows.matrices())

    def _check_finite(self, x: Tensor, y: Tensor | None = None) -> None:
        """Raises if X or W is not finite, or later, in backward, if the gradient of Y is not."""
        if not checks_finite():
            return
        if y is None:
            finite.check(self._label, "input", x)
            finite.check(self._label, "weight", self._own_values())
        else:
            finite.watch_gradient(self._label, y)

    def _check_input(self, x: Tensor, is_first_microbatch: bool | None) -> None:
        """Raises if X is no dense floating-point tensor [..., in_features], or the weight has no values for it."""
        if is_first_microbatch is not None and type(is_first_microbatch) is not bool:
            check_value(self._label, "is_first_microbatch", is_first_microbatch, bool | None)
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
            check_tensor(x, self)
        weight = self._parameters.get("weight")
        if weight is None or weight.is_meta:
            check_meta(x, self, self._weight(self._weight_names[0]))
        if not x.is_floating_point():
            raise TypeError(f"{self._label}: input is {x.dtype}; a floating-point tensor is needed, as x.bfloat16()")
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"{self._label}: input of shape {tuple(x.shape)} must end in in_features={self.in_features}"
            )
        if finite.active:
            self._check_finite(x)

    def backward_dw(self) -> None:
        """Computes the oldest weight gradient that backward left to do, then calls the registered hooks.

        Raises:
            ValueError: there is none, or the layer does not delay them.
        """
        if not self.delay_wgrad_compute:
            raise ValueError(f"{self._label}: backward_dw needs delay_wgrad_compute=True")
        if not self._wgrad_tasks:
            raise ValueError(f"{self._label}: no weight gradient is waiting; run backward before backward_dw")
        self._wgrad_tasks.pop(0)()
        for hook in self._wgrad_hooks:
            hook()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; weight gradients that wait for :meth:`backward_dw` are dropped."""
        self._wgrad_tasks.clear()
        super().zero_grad(set_to_none)

    @checked
    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Calls ``hook`` after each :meth:`backward_dw`."""
        self._wgrad_hooks.append(hook)
