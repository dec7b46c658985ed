"""The state of sharded models and their optimizers as DTensors, for ``torch.distributed.checkpoint`` (DCP).

A checkpoint says of each tensor what the whole is, so it can be loaded on any number of ranks, and on one:

    state = sharded_state_dict(model)                  # on every rank
    dcp.save(state, checkpoint_id="...")

    state = sharded_state_dict(other)                  # the same model, sharded over other ranks or not at all
    dcp.load(state, checkpoint_id="...")
    load_sharded_state_dict(other, state)

Keys are those of ``state_dict()``. Only a parameter that is made of several, each of which is cut by itself (query, key
and value of ``fuse_qkv_params``; gate and up of a gated MLP), has an entry for each of these, as in
``qkv.weight.query``, since no DTensor could say how it is cut. Unsharded models have the same keys.

Nor could a DTensor say which rows of a weight a rank has under extended tensor parallelism (``etp_group``): these are
:class:`~minifloat.parallel.layout.SavedShard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from minifloat.arguments import checked
from minifloat.nn.linear import Linear
from minifloat.parallel.layout import Entry, Layout
from minifloat.tensor import QuantizedTensor


@checked
def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with DTensors: ``Shard`` for what ranks have pieces of, ``Replicate`` for the rest.

    A weight with ``etp_group`` is a ``SavedShard`` of this rank's rows. They are the memory of the model: what is
    loaded into them is loaded into it, but for delayed scaling's histories of another length and for quantized
    parameters, which :func:`load_sharded_state_dict` sees to. Of the latter an entry is a copy: the values that the
    codes stand for, in the parameter's dtype, cast again when they are loaded. Layers have histories from their first
    step or from ``prepare`` on, and a checkpoint's can be loaded from then on. Without a group, plain tensors.

    Raises:
        ValueError: layers are sharded over different groups; a parameter is a DTensor already; ranks do not share the
            amaxes of delayed scaling, so that there is no one history to save.
    """
    _check_histories(model)
    layout = Layout(model)
    state: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        values = (value.dequantize() if isinstance(value, QuantizedTensor) else value).detach()
        state |= {entry.key: layout.saved(entry, entry.of(values)) for entry in layout.of(key, value)}
    return state


def _check_histories(model: nn.Module) -> None:
    for name, module in model.named_modules():
        latest = module._configs.latest if isinstance(module, Linear) else None
        delayed = None if latest is None else latest.config.delayed
        if delayed is None or delayed.reduce_amax or module._exchange.group.size == 1:
            continue
        raise ValueError(
            f"sharded_state_dict: {name} has histories of its own on each rank (reduce_amax=False), which one "
            "checkpoint cannot hold; train with reduce_amax=True"
        )


@checked
def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """``model.load_state_dict`` of what :func:`sharded_state_dict` of this model gave, whatever is in it by now.

    An entry may also be the whole as a plain tensor, as an unsharded model's ``sharded_state_dict`` has it.

    Returns:
        What ``load_state_dict`` returns.

    Raises:
        RuntimeError: with ``strict``, keys that are missing or unknown; sizes that differ.
        ValueError: an entry has another size than that of the model.
    """
    layout, left, local = Layout(model), dict(state), {}
    for key, value in model.state_dict(keep_vars=True).items():
        entries = layout.of(key, value) if isinstance(value, Tensor) else []
        pieces = [layout.local(each, left.pop(each.key), value.shape) for each in entries if each.key in left]
        if pieces and len(pieces) == len(entries):
            local[key] = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    for key, value in left.items():  # what the model has no place for yet: all ranks have it in full
        local[key] = value.to_local() if isinstance(value, DTensor) else value
    return model.load_state_dict(local, strict)


@checked
def sharded_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The same of an optimizer of PyTorch's kind: ``state.<name>.<key of the parameter>`` and ``param_groups``.

    State of the size of its parameter is cut as that is; a number is the same on all ranks. An optimizer that has not
    stepped yet gets its state by a step with a learning rate and gradients of 0.

    Raises:
        ValueError: some state has neither the size of its parameter nor is a number; a parameter is quantized.
    """
    _init_optimizer_state(optimizer)
    layout = Layout(model)
    tensors = _optimizer_tensors(model, optimizer, layout)
    state: dict[str, Any] = {key: layout.saved(entry, value.detach()) for key, entry, value in tensors}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return state | {"param_groups": groups}


@checked
def load_sharded_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Gives the optimizer what :func:`sharded_optimizer_state_dict` of it gave, whatever is in it by now.

    Raises:
        KeyError: something is missing.
        ValueError: an entry has another size than that of the optimizer.
    """
    _init_optimizer_state(optimizer)
    layout = Layout(model)
    with torch.no_grad():
        for key, entry, value in _optimizer_tensors(model, optimizer, layout):
            value.copy_(layout.local(entry, state[key], value.shape))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(saved)


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer, layout: Layout) -> Iterator[tuple[str, Entry, Tensor]]:
    """Key in the state dict, which rows of what, and this rank's tensor of these, in the model's order."""
    for key, parameter in model.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape != parameter.shape and value.numel() != 1:
                raise ValueError(
                    f"sharded_optimizer_state_dict: {name} of {key} is {tuple(value.shape)} and the parameter "
                    f"{tuple(parameter.shape)}; there is no rule for how it is cut"
                )
            alike = value.shape == parameter.shape
            for entry in layout.of(key, parameter) if alike else [Entry(key)]:
                yield f"state.{name}.{entry.key}", entry, entry.of(value)


def _init_optimizer_state(optimizer: Optimizer) -> None:
    """State as of new parameters, whose values stay as they are.

    Raises:
        ValueError: a parameter is quantized: a step would cast it again, and the state is that of master weights.
    """
    if any(isinstance(p, QuantizedTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "sharded_optimizer_state_dict: the optimizer has quantized parameters; parameters in high precision are "
            "needed"
        )
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    grads, rates = [p.grad for p in parameters], [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
