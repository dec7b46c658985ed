"""Calls of a linear: recipe, dtype, gradients and delayed scaling of one; and whether a compiler can trace it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minifloat import recompute
from minifloat.arguments import check_value
from minifloat.autocast import DelayedCall, current, is_batch_invariant, surrounding_recipe, used
from minifloat.comm.collectives import other_recipes, other_recipes_in_trace
from minifloat.comm.dtensor_ddp import check_reduced
from minifloat.comm.group import Group
from minifloat.delayed import check_same_scale
from minifloat.functional.autograd import autocast_dtype, autocast_enabled, exporting
from minifloat.functional.exchange import LOCAL, Exchange
from minifloat.functional.gemm import check_rows_alone
from minifloat.functional.linear import LinearCall
from minifloat.functional.node import Traced, traced
from minifloat.functional.quantize import LinearConfig, Options
from minifloat.functional.spec import Given, make_spec
from minifloat.functional.weight_source import WeightSource, asks_in_backward
from minifloat.nn.linear_state import LinearState
from minifloat.nn.options import check_meta, check_tensor
from minifloat.ops import new
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.recipe import CustomRecipe, DelayedScaling, QuantizerRole, Recipe
from minifloat.tensor import QuantizedTensor


def _identity(role: QuantizerRole) -> Quantizer:
    return Quantizer.identity()


_graph_task, _top_hooks = torch._C._current_graph_task_id, torch._C._autograd._top_saved_tensors_default_hooks
UNQUANTIZED = CustomRecipe(_identity)
"""The recipe of a layer that has none and yet does what PyTorch's own linear cannot."""
_delaying: WeakSet[LinearState] = WeakSet()
"""Layers whose weight gradients may wait for ``backward_dw``."""
_hooks: list[Any] = []
_MOST_SPECS = 64  # of a layer; groups that are replaced again and again must not fill the memory


Prepared = tuple[Any, Tensor, Tensor | None]
"""A :class:`LinearCall` that is about to run, for its autograd function; its weight and bias."""


def prepare_call(
    layer: LinearState, recipe: Recipe, dtype: torch.dtype, needs_x: bool, is_first_microbatch: bool | None = None,
    fp8_output: bool = False, fp8_grad: bool = False, exchange: Exchange = LOCAL, recompute_x: bool = False,
    input_is_quantized: bool = False, node: bool = False,
) -> Prepared:  # fmt: skip
    """Prepares one call under ``recipe``, with activations in ``dtype``; ``needs_x``: X may need a gradient.

    ``exchange``: the layer's, with the rows of this call; the others as in :class:`Options`.
    """
    # Asked here, since Dynamo may compile this without its caller; ``is_compiling()`` itself takes two calls.
    compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{layer._label}: torch.func's grad, vjp, jvp and vmap do not see into quantized layers; use "
            "torch.autograd.grad and a batch dim of X, or recipe='none'"
        )
    latest = None if compiling else layer._configs.latest
    if latest is None or latest.recipe is not recipe:
        latest = layer._configs.under(recipe, layer._new_config)
    _, config, specs = latest
    replayed, grad = None, torch.is_grad_enabled()
    if compiling or not grad or recompute._inside or _graph_task() != -1 or _top_hooks(True) is not None:
        replayed = replayed_scale(layer, recipe, config, compiling)
    weight, bias = layer._weight_and_bias()
    needs_x = grad and needs_x
    needs_w = grad and weight.requires_grad
    needs_b = grad and bias is not None and bias.requires_grad
    source, etp = layer._weight_as_it_is, layer._etp
    past_autograd = layer.fuse_wgrad_accumulation or layer.delay_wgrad_compute or etp is not None
    if past_autograd or layer.wgrad_in_weight_dtype:
        source = layer._weight_source(weight)
    if past_autograd:
        begin_own_gradients(layer, source, needs_w, is_first_microbatch, compiling)
    wanted = (  # of Options, which takes a call to make
        weight.device.type, dtype, weight.dtype, needs_x, needs_w, needs_b, exchange.mode and exchange.ranks,
        input_is_quantized, recompute_x, fp8_output, fp8_grad, used.batch_invariant and is_batch_invariant(),
        etp is not None, layer.delay_wgrad_compute,
    )  # fmt: skip
    spec: Any = None if compiling else specs.get(wanted)
    if spec is None:
        options = Options(*wanted)
        if exchange.mode is not None and not weight.is_meta:
            check_same_recipe(layer, f"{type(recipe).__name__}({config.describe()})", exchange.group, weight)
        check_weight_dtype(layer, weight.dtype)
        if options.batch_invariant:
            check_rows_alone(layer, config, options)
        spec = traced(config, options, needs_w and source.main_grad) if node else make_spec(config, options)
        if not compiling:
            if len(specs) >= _MOST_SPECS:
                specs.clear()
            specs[options] = spec
    if not compiling and used.inspection is not None:
        spec = used.inspection.watch(layer, spec)
    given = Given()
    if config.delayed is not None:
        backward = needs_x or needs_w or needs_b
        given.delayed = start_delayed_call(layer, config.delayed, replayed, backward, exchange)
    plain = type(weight) is nn.Parameter or (type(weight) is Tensor and not compiling and etp is None)
    cast_now = plain and is_first_microbatch is None and (compiling or layer._weight_cache is None)
    if not (cast_now or isinstance(spec, Traced)):
        given.w = layer._weight_operands(spec, given.delayed, weight, is_first_microbatch)
        if spec.seen is not None and given.w is not None:
            spec.seen("weight", weight, given.w)
    return new(LinearCall, (spec, exchange, source, given)), weight, bias


def takes_node(layer: LinearState, is_first_microbatch: bool | None) -> bool:
    """Whether a pass in traced code is one operation; a program to be exported shows its casts, to freeze weights."""
    special = exporting() or layer._etp is not None or layer.delay_wgrad_compute or layer.wgrad_in_weight_dtype
    if special or layer._exchange.mode is not None or is_first_microbatch is not None:
        return False
    return not isinstance(layer._weight(layer._weight_names[0]), QuantizedTensor)


def recipe_in_force(layer: LinearState) -> Recipe | None:
    """Returns the layer's own recipe, else that of ``autocast``, else None."""
    own = layer._recipe
    return own if isinstance(own, Recipe) else surrounding_recipe() if own is None else None


def check_same_recipe(layer: LinearState, recipe: str, group: Group, weight: Tensor) -> None:
    """Raises on every rank if ``recipe`` is another on some rank of ``group``, which is asked once for each."""
    where, others = (group.name, weight.device.type), ""
    if torch.compiler.is_compiling():
        others = other_recipes_in_trace(recipe, *where)
    elif (asked := (recipe, *where)) not in layer._agreed:
        others = other_recipes(f"{layer._label}: {recipe}", *where)
        if not others:
            layer._agreed = (frozenset() if len(layer._agreed) >= _MOST_SPECS else layer._agreed) | {asked}
    if others:
        raise ValueError(f"{layer._label}: {others}")


def check_weight_dtype(layer: LinearState, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{layer._label}: cannot quantize a {dtype} weight; use bf16, fp16 or fp32")


def compute_dtype(layer: LinearState, x: Tensor) -> torch.dtype:
    """Returns the dtype of the activations: of X, or of ``torch.autocast`` where that is on.

    Raises:
        ValueError: X has a dtype that cannot be quantized.
    """
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{layer._label}: cannot quantize {x.dtype} input and {layer._weight_matrix().dtype} weight; "
            "use bf16, fp16 or fp32, as x.float()"
        )
    return autocast_dtype(x)


def returned_bias(layer: LinearState, exchange: Exchange) -> Tensor | None:
    """Returns the bias that the caller adds; to a rank's rows alone if Y is scattered, yet with the gradient of all."""
    bias = layer._bias_vector()
    return exchange.replicated(bias) if bias is not None and exchange.mode == "row" else bias


def replayed_scale(
    layer: LinearState, recipe: Recipe | None, config: LinearConfig | None, compiling: bool
) -> Tensor | None:
    """Finds the delayed scales that a recomputation reads in place of the layer's; called once in each forward."""
    scale = None if config is None or config.delayed is None else layer.forward_scaling.scale
    if not compiling:
        return recompute.replayed_scale(layer, None if recipe is UNQUANTIZED else recipe, scale)
    if scale is not None or (recipe is None and layer._recipe is None and "forward_scaling" in layer._modules):
        recompute.refuse_compiled(layer, scale is not None)
    return None


def check_on_meta(layer: LinearState) -> None:
    """Raises if delayed scaling's buffers have no memory and the weight has."""
    device = layer._weight(layer._weight_names[0]).device
    if layer.forward_scaling.scale.is_meta and device.type != "meta":
        raise ValueError(
            f"{layer._label}: the buffers of delayed scaling are on meta and the weight is on {device}; call "
            f"model.to_empty(device={str(device)!r}) before the weights are written, or load them with "
            "load_state_dict, which resets what a checkpoint lacks"
        )


def start_delayed_call(
    layer: LinearState, recipe: DelayedScaling, replayed: Tensor | None, backward: bool, exchange: Exchange
) -> DelayedCall:
    """Returns where delayed scaling keeps its state in this call; a recomputation records nothing."""
    modules: Any = layer._modules  # where nn.Module's __getattr__ finds them, after a while
    states, first = (modules["forward_scaling"], modules["backward_scaling"]), replayed is None
    if states[0]._buffers["scale"].is_meta:
        check_on_meta(layer)
    call = DelayedCall(states, recipe, first and torch.is_grad_enabled(), first and backward, current(), replayed)
    if exchange.sequence_parallel:
        check_same_scale(layer, "sequence_parallel=True gathers tensors", exchange.group, recipe, call.group)
    if layer._etp is not None:
        check_same_scale(layer, "the weight is sharded", layer._etp.sharding.group, recipe, call.group)
    return call


def check_dtype(layer: LinearState, x: Tensor) -> None:
    weight = layer._weight(layer._weight_names[0])
    if x.dtype != weight.dtype and not autocast_enabled(x):
        raise ValueError(
            f"{layer._label}: {x.dtype} input and {weight.dtype} weight, and no recipe that would compute with "
            "both; convert one to the dtype of the other, or use torch.autocast or a recipe"
        )


def calibration_of(layer: LinearState) -> DelayedCall | None:
    """Returns where to record amaxes of a call in high precision, if ``autocast`` calibrates delayed scaling."""
    context = current()
    if context is None or not context.calibrating or layer.recipe is not None or recompute.recomputes():
        return None
    config = layer._config(context.recipe)
    if config.delayed is None:
        return None
    check_on_meta(layer)
    return DelayedCall((layer.forward_scaling, layer.backward_scaling), config.delayed, True, False, context)


def check_input(layer: LinearState, x: Tensor, is_first_microbatch: bool | None) -> None:
    """Raises if X is no dense floating-point tensor [..., in_features], or the weight has no values for it."""
    if is_first_microbatch is not None and type(is_first_microbatch) is not bool:
        check_value(layer._label, "is_first_microbatch", is_first_microbatch, bool | None)
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested:
        check_tensor(x, layer)
    weight = layer._parameters.get("weight")
    if weight is None:
        name = layer._weight_names[0]
        weight = layer._parameters[name] if name in layer._parameters else layer._weight(name)
    if weight is not None and weight.is_meta:
        check_meta(x, layer, weight)
    if not x.is_floating_point():
        raise TypeError(f"{layer._label}: input is {x.dtype}; a floating-point tensor is needed, as x.bfloat16()")
    if x.dim() == 0 or x.shape[-1] != layer.in_features:
        raise ValueError(f"{layer._label}: input of shape {tuple(x.shape)} must end in in_features={layer.in_features}")


# ---- weight gradients that backward writes by itself, or leaves for ``backward_dw``: no optimizer steps then ----


def _watch(layer: LinearState) -> None:
    """Makes optimizers raise in a step while a weight gradient of ``layer`` waits that it would miss."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_waiting))
    _delaying.add(layer)


def waiting(optimizer: Optimizer) -> list[LinearState]:
    """Lists layers whose weight gradients wait, and whose weights ``optimizer`` steps."""
    layers = [layer for layer in list(_delaying) if layer._wgrad_tasks]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if layers else set()
    return [layer for layer in layers if any(id(layer._weight(name)) in stepped for name in layer._weight_names)]


def _refuse_waiting(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for layer in waiting(optimizer):
        count = len(layer._wgrad_tasks)
        raise ValueError(
            f"{layer._label}: an optimizer steps while weight gradients wait for backward_dw ({count}); call it once "
            "for each backward, or zero_grad of the layer to drop those of a step that was given up"
        )


def begin_own_gradients(
    layer: LinearState, source: WeightSource, needs_w: bool, first: bool | None, compiling: bool
) -> None:
    """Begins a call whose backward writes the gradient of the weight by itself."""
    main_grad = needs_w and layer.fuse_wgrad_accumulation
    if needs_w:
        check_own_gradients(layer, source.parameters, main_grad)
    for own in source.parameters if compiling and main_grad else ():  # backward sets no attribute there
        if own.requires_grad:
            own.grad_added_to_main_grad = True
    # Inside of backward a checkpoint's recomputation is no other microbatch.
    begins = first and (compiling or _graph_task() == -1)
    for own in source.parameters if layer.fuse_wgrad_accumulation else ():
        if begins:  # the next dW replaces what is in main_grad; None: once a recomputation says that there will be one
            own.main_grad_is_old = needs_w or None
        elif needs_w and not compiling and getattr(own, "main_grad_is_old", False) is None:
            own.main_grad_is_old = first is not None and _graph_task() != -1
    if begins and needs_w and layer.delay_wgrad_compute:
        layer._wgrad_tasks.clear()  # of a step that was given up
    if needs_w and layer.delay_wgrad_compute:
        _watch(layer)


def check_own_gradients(layer: LinearState, parameters: Sequence[Any], main_grad: bool) -> None:
    """Raises where backward is to write the gradient of the weight by itself and cannot."""
    for own in parameters:
        if not own.requires_grad:
            continue
        check_reduced(layer, own)
        if not main_grad:
            continue
        buffer = getattr(own, "main_grad", None)
        if buffer is None:
            raise ValueError(f"{layer._label}: fuse_wgrad_accumulation needs weight.main_grad; set it before forward")
        if buffer.is_meta and not own.is_meta:
            raise ValueError(
                f"{layer._label}: weight.main_grad is on the meta device, where gradients are lost; make it on "
                f"{own.device}"
            )
        if buffer.shape != own.shape or not buffer.dtype.is_floating_point or buffer.dtype.itemsize < 2:
            raise ValueError(
                f"{layer._label}: weight.main_grad is {buffer.dtype} {tuple(buffer.shape)}; gradients of the weight "
                f"are added to it: use torch.float32 (or 64, or bf16, fp16) and shape {tuple(own.shape)}"
            )


# ---- options that no graph can hold: an error under ``fullgraph=True``, else the layer runs uncompiled ----


def needs_eager(
    linear: LinearState, is_first_microbatch: bool | None, quantized: bool = False, fp8_grad: bool = False,
    checkpointed: bool = False, writes: bool = False,
) -> bool:  # fmt: skip
    """Whether some option of this call cannot be traced; :func:`run_eager` is the way out. Asked in traced code alone.

    ``quantized``: X or Y is. ``checkpointed``: the module is about to checkpoint itself. ``writes``: ``out`` or
    ``dgrad_out`` is given.

    Raises:
        RuntimeError: it is so, and the compiler was told ``fullgraph=True``.
    """
    special = quantized or fp8_grad or checkpointed or writes or is_first_microbatch is False or recompute._inside
    special = special or compiles_backward()
    if not (special or linear.delay_wgrad_compute or linear.fuse_wgrad_accumulation or linear._etp is not None):
        return False
    weights, grad = [linear._weight(name) for name in linear._weight_names], torch.is_grad_enabled()
    whole = not torch.compiler.is_dynamo_compiling() or _in_one_graph()  # an export without Dynamo has one graph
    own_gradient, why = grad and any(weight.requires_grad for weight in weights), ""
    reads_cache = is_first_microbatch is False and linear._keeps_weight and not isinstance(weights[0], QuantizedTensor)
    recipe = recipe_in_force(linear)
    delayed = recipe is not None and linear._config(recipe).delayed is not None
    if (checkpointed or recompute._inside) and not whole and delayed:  # ``prepare_call`` would raise
        return recompute.warns_of_compiled(True)
    if compiles_backward() and grad and (delayed or (own_gradient and linear.fuse_wgrad_accumulation)):
        why = (
            "compiled autograd does not know the histories of delayed scaling and main_grad, which backward writes to; "
            "use another recipe and fuse_wgrad_accumulation=False"
        )
    elif own_gradient and linear.delay_wgrad_compute:
        why = "delay_wgrad_compute=True leaves work for after backward, which no graph does; use False"
    elif linear._etp is not None:
        why = "etp_group gathers weights by a prediction that no graph makes; use None"
    elif writes:
        why = "out and dgrad_out are written to, which no graph does; use None"
    elif reads_cache and recipe is not None:
        why = "is_first_microbatch=False reads a cached weight, whose version no graph knows; use None"
    elif quantized:
        why = "fp8_output=True makes a quantized tensor, or X is one, which no graph holds; use False, X.dequantize()"
    elif grad and fp8_grad:
        why = "fp8_grad=True returns a quantized gradient, which no graph does; use False"
    elif (
        own_gradient
        and linear.fuse_wgrad_accumulation
        and any(asks_in_backward(each, is_first_microbatch is True) for each in weights)
    ):
        why = (
            "fuse_wgrad_accumulation=True with is_first_microbatch=True, weight.overwrite_main_grad or "
            "weight.zero_out_wgrad asks in backward what to do, which no graph does; zero main_grad instead"
        )
    if why and whole:
        raise RuntimeError(
            f"{linear._label}: {why}, or fullgraph=False, or leave the layer out with torch.compiler.disable"
        )
    return why != ""


def compiles_backward() -> bool:
    """Whether compiled autograd is on, which knows of a backward only what forward saved; compiled code guards this."""
    return torch._dynamo.compiled_autograd.compiled_autograd_enabled


def run_eager(forward: Callable[..., Any], *args: Any) -> Any:
    """Calls ``forward(*args)`` uncompiled, with all that it calls. A call of this function breaks the graph."""
    return torch.compiler.disable(forward)(*args)


def _in_one_graph() -> bool:
    """Whether the compiler was told ``fullgraph=True``; it calls this, and does not trace it."""
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import; loaded by now

    skip_code(run_eager.__code__)
    tracer: Any = InstructionTranslator.current_tx()
    return bool(tracer.one_graph or tracer.error_on_graph_break)


_in_one_graph._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does
run_eager._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable does
