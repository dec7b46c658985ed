"""CUDA graphs of modules and of whole steps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minifloat.arguments import Size, checked, label_of
from minifloat.autocast import autocast
from minifloat.comm.dtensor_ddp import is_dtensor
from minifloat.graphs import capture
from minifloat.graphs.callables import GraphedCallable, WeightCache
from minifloat.graphs.capture import Progress, Step, free_accumulators, steps_of, unchanged
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear_state import LinearState, prepare
from minifloat.recipe import RecipeLike

__all__ = ["GraphedCallable", "make_graphed_callables"]

M = TypeVar("M", bound=nn.Module)


@overload
def make_graphed_callables(modules: M, sample_args: Sequence[Any], *args: Any, **options: Any) -> M: ...


@overload
def make_graphed_callables(modules: Sequence[M], sample_args: Sequence[Any], *args: Any, **options: Any) -> Any: ...


@checked
def make_graphed_callables(
    modules: nn.Module | Sequence[nn.Module],
    sample_args: Sequence[Any],
    num_warmup_iters: Size = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    enabled: bool | None = None,
    calibrating: bool = False,
    recipe: RecipeLike | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    cache_quantized_params: bool = False,
    pool: tuple[int, int] | None = None,
    _order: Sequence[int] | None = None,
) -> Any:
    """Captures forward and backward of modules as CUDA graphs, whose replays give the bits of eager calls.

    Like ``torch.cuda.make_graphed_callables``, with recipes: see docs/layers.md, "CUDA graphs". Graphs replace the
    module's ``forward``; calls in another mode (``eval()``, ``torch.no_grad()``) than at the capture run eagerly. The
    next call overwrites the outputs and the gradients of inputs. Captures change no state.

    Args:
        modules: on a CUDA device; several in the order in which a step runs them.
        sample_args: the arguments of each module's forward, a tuple, or one tuple a module: tensors of the shapes,
            dtypes and needs of gradients of later calls, and constants. ``sample_kwargs``: the same by keyword.
        num_warmup_iters: steps of each module before its capture.
        allow_unused_input: inputs that require a gradient may get none.
        enabled, calibrating, recipe, amax_reduction_group: of the :class:`~minifloat.autocast` that modules are
            captured under; without a recipe none. Calls are inside of an ``autocast`` of the same recipe, or of none.
        cache_quantized_params: modules take ``is_first_microbatch``; calls with False skip the casts of the weights, by
            a flag on the device. Not for :class:`~minifloat.GroupedLinear`, nor for weights that ``etp_group`` shards.
        pool: of ``torch.cuda.graph_pool_handle()``, to share memory with other graphs: replays are in the order of the
            captures. Default: a pool of these graphs.
        _order: the forwards (1 for the first module) and backwards (-1) of the microbatches of a step, in their order,
            as ``[1, 1, -1, 1, -1, -1]``. Each microbatch then has graphs of its own, and modules stay as they are.

    Returns:
        The modules; with ``_order`` for each a tuple of callables, one for each microbatch.

    Raises:
        ValueError: something is on a CPU, ``_order`` is none, or a module cannot be captured: it has hooks on
            parameters, ``delay_wgrad_compute``, weights that FSDP2 shards.
        TypeError: ``cache_quantized_params``, and a module takes no ``is_first_microbatch``.
        RuntimeError: a result of an earlier step is held with its autograd graph.
    """
    several = not isinstance(modules, nn.Module)
    listed: list[nn.Module] = list(modules) if several else [modules]  # type: ignore[list-item, arg-type]
    all_args = list(sample_args) if several else [sample_args]
    all_kwargs = _one_each(sample_kwargs, several, len(listed))
    if len(all_args) != len(listed):
        raise ValueError(f"{len(listed)} modules and sample_args of {len(all_args)}; give one tuple for each module")
    if calibrating and enabled:
        raise ValueError("calibrating=True is for enabled=False: amaxes of what is computed in high precision")
    steps = steps_of(_order, len(listed))
    on = (recipe is not None and not calibrating) if enabled is None else enabled
    context = autocast(on, calibrating, recipe, amax_reduction_group)
    if not listed:
        return ()
    device = _checked_device(listed, all_args, all_kwargs)
    for module in listed:
        _check(module, cache_quantized_params)
    for module in listed if on or calibrating else ():
        prepare(module, context.recipe)
    free_accumulators(listed)
    progress, microbatches = Progress(), sum(step.module == 0 and step.forward for step in steps)
    caches = [WeightCache(module, device) if cache_quantized_params else None for module in listed]
    made = [
        [GraphedCallable(module, args, kwargs, context, cache, each, progress) for each in range(microbatches)]
        for module, args, kwargs, cache in zip(listed, all_args, all_kwargs, caches, strict=True)
    ]
    with unchanged(listed, device):
        _capture(made, steps, device, num_warmup_iters, allow_unused_input, pool)
    for graphed in made:
        for weight in graphed[0].shared.weights:
            weight.forget()  # no one else reads what was cast in the memory of a graph
    if _order is not None:
        return tuple(tuple(graphed) for graphed in made)
    for module, (graphed_once,) in zip(listed, made, strict=True):
        module.forward = graphed_once
    return tuple(listed) if several else listed[0]


def _capture(
    made: Sequence[Sequence[GraphedCallable]], steps: Sequence[Step], device: torch.device, warm_ups: int, unused: bool,
    pool: Any,
) -> None:  # fmt: skip
    """Warms up and captures ``steps``, in their order and into one pool; ``made``: by module and microbatch."""
    stream = capture.Graph.Stream(device)
    with stream.current():
        for graphed in made:
            for each in graphed[:2]:  # the second reads cached weights
                each.warm_up(warm_ups, unused)
    for place, (module, microbatch, forward) in enumerate(steps):
        each, own = made[module][microbatch], capture.Graph(stream, pool)
        pool = own.pool
        (each.capture_forward if forward else each.capture_backward)(own, place)


def _one_each(kwargs: Any, several: bool, count: int) -> list[Mapping[str, Any]]:
    """Lists the keyword arguments of each module."""
    if kwargs is None:
        return [{}] * count
    listed = list(kwargs) if several else [kwargs]
    if len(listed) != count:
        raise ValueError(f"{count} modules and sample_kwargs of {len(listed)}; give one dict for each module")
    return listed


def _checked_device(modules: Sequence[nn.Module], *arguments: Any) -> torch.device:
    """Returns the one device of all modules and arguments."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    tensors += [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != capture.Graph.device_type:
        raise ValueError(
            f"make_graphed_callables: parameters, buffers and sample_args are on {sorted(map(str, devices))}; a CUDA "
            "graph needs all of them on one CUDA device"
        )
    return devices.pop()


def _check(module: nn.Module, caches: bool) -> None:
    """Raises where a replay would not do what the module does."""
    label = label_of(module)
    if caches and "is_first_microbatch" not in inspect.signature(module.forward).parameters:
        raise TypeError(f"{label}: cache_quantized_params needs a forward with is_first_microbatch; add the argument")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks:
            raise ValueError(
                f"{label}: {name} has hooks, which would be captured and called again by autograd; register them with "
                "register_post_accumulate_grad_hook, or after the capture"
            )
        if is_dtensor(parameter):
            raise ValueError(f"{label}: {name} is a DTensor, whose gathers no graph of a module holds")
    for layer in module.modules():
        if not isinstance(layer, LinearState):
            continue
        if layer.delay_wgrad_compute:
            raise ValueError(
                f"{layer._label}: delay_wgrad_compute=True leaves work for backward_dw(), which no graph of a backward "
                "holds; set it to False"
            )
        if caches and layer._etp is not None:
            raise ValueError(
                f"{layer._label}: cache_quantized_params is not for weights that etp_group shards; leave it out"
            )
        if caches and isinstance(layer, GroupedLinear):
            raise ValueError(f"{layer._label}: cache_quantized_params is not for grouped linears; leave it out")
