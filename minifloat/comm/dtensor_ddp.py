"""PyTorch's ways to split a model, as layers know them: DTensors, the ``DistributedDataParallel`` around, pipelines.

DTensor and pipelines are slow to import, so that only their users pay for it. Private names are asked here alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from minifloat.arguments import label_of


def is_dtensor(t: Tensor) -> bool:
    """Whether ``t`` is a DTensor, as FSDP2 makes them of parameters and gradients."""
    return hasattr(t, "device_mesh")


def local_rows(t: Tensor) -> Tensor:
    """Returns this rank's rows of a DTensor, the very tensor; any other tensor is its own."""
    local: Tensor = getattr(t, "_local_tensor", t)
    return local


def local_part(values: Tensor, parameter: Tensor) -> Tensor:
    """Cuts this rank's part out of ``values`` in the whole shape of ``parameter``; all unless it is a DTensor."""
    if is_dtensor(parameter):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
            values = values.narrow(dim, min(start, values.shape[dim]), length)
    return values


def sharded_like(p: Any, own: Tensor) -> Tensor:
    """Returns this rank's part ``own`` of a tensor of the size of ``p`` as a DTensor, if ``p`` is one."""
    if not is_dtensor(p):
        return own
    from torch.distributed.tensor import DTensor

    stride = torch.empty(p.shape, device="meta").stride()
    made: Tensor = DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=stride)
    return made


MARK = "minifloat_data_parallel"
"""Attribute of the wrappers that ``data_parallel`` has made."""
_KEEPS = "minifloat_keeps_histories"


def running() -> DistributedDataParallel | None:
    """The wrapper whose forward this is."""
    return DistributedDataParallel._active_ddp_module


def history_names(module: nn.Module) -> set[str]:
    """Names the buffers below ``module`` that each rank fills, also of forwards to come: histories, routers' counts."""
    buffers = [f"{way}_scaling.{name}" for way in ("forward", "backward") for name in ("scale", "amax_history")]
    buffers.append("expert_counts")
    return {f"{layer}.{buffer}".lstrip(".") for layer, _ in module.named_modules() for buffer in buffers}


def keep_histories() -> None:
    """Lets the wrapper leave the buffers of :func:`history_names` alone from here on.

    It broadcasts buffers before each forward, and would put the first rank's amaxes or counts in the place of those
    that the others have measured and not agreed on yet.
    """
    wrapper = None if torch.compiler.is_compiling() else running()
    if wrapper is not None and not hasattr(wrapper, _KEEPS):
        wrapper.parameters_to_ignore.update(history_names(wrapper.module))
        wrapper._assign_modules_buffers()  # or it would broadcast an empty list once, which fails
        setattr(wrapper, _KEEPS, True)


def check_reduced(layer: object, weight: Tensor) -> None:
    """Raises a ValueError if DDP, which does not ignore the weight, would reduce zeros in place of its gradient."""
    if running() is not None and not getattr(weight, "_ddp_ignored", False):
        raise unreduced(label_of(layer))


def check_same_rows(
    layer: object, parameters: Iterable[Tensor], why: str = "etp_group has other rows of this weight"
) -> None:
    """Raises a ValueError if DDP, which does not ignore them, would average what is another tensor on each rank.

    ``why``: of which group, and what.
    """
    if not all(getattr(each, "_ddp_ignored", False) for each in parameters):
        raise ValueError(
            f"{label_of(layer)}: DistributedDataParallel broadcasts and all-reduces parameters that all ranks have, "
            f"and each rank of {why}; give minifloat.distributed.parallelize a mesh with a 'dp' dim, which reduces the "
            "gradients of all parameters"
        )


@functools.cache
def check_when_wrapping(check: Callable[[nn.Module], None]) -> None:
    """Calls ``check`` from now on with what a wrapper is made of, before it communicates."""

    def registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and submodule is not None:
            check(submodule)

    register_module_module_registration_hook(registered)


def unreduced(label: str) -> ValueError:
    """The error."""
    return ValueError(
        f"{label}: fuse_wgrad_accumulation and delay_wgrad_compute leave the weight's gradient where "
        "DistributedDataParallel does not reduce it; do without them, or let DDP ignore the weight "
        "(DistributedDataParallel._set_params_and_buffers_to_ignore_for_model) and all-reduce it after backward"
    )


def check_synchronized(layer: object) -> None:
    """Raises a ValueError if DDP runs a layer with a quantized parameter: it broadcasts values, and each rank casts."""
    wrapper = running()
    if wrapper is not None and not hasattr(wrapper, MARK):
        raise ValueError(
            f"{label_of(layer)}: DistributedDataParallel does not keep quantized parameters alike on all ranks; wrap "
            "the model with minifloat.distributed.data_parallel, which takes the same options"
        )


def check_no_join() -> None:
    """Raises a ValueError inside of DDP's ``join()``, where ranks without data take part in its collectives alone."""
    wrapper = running()
    if wrapper is not None and wrapper._join_config.enable:
        raise ValueError(
            "delayed scaling reduces amaxes over all ranks in every step, which those that have joined in "
            "DistributedDataParallel.join() do not take part in: give all ranks the same number of batches, or use "
            "DelayedScaling(reduce_amax=False)"
        )


pipelines = SimpleNamespace(learn_shapes=False)
"""State of PyTorch's, which compiled code guards; ``learn_shapes``: layers run on memory as it was found."""


def watch_pipelines() -> None:
    """Keeps ``pipelines.learn_shapes`` from here on, if pipelines are imported: their first step learns shapes."""
    stage: Any = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    learn = getattr(stage, "_forward_metadata_inference", None)  # PyTorch 2.11 has none, and learns without gradients
    if learn is None or hasattr(learn, "__wrapped__"):
        return

    @functools.wraps(learn)
    def watched(*args: Any, **kwargs: Any) -> Any:
        pipelines.learn_shapes = True
        try:
            return learn(*args, **kwargs)
        finally:
            pipelines.learn_shapes = False

    stage._forward_metadata_inference = watched
