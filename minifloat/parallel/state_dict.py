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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from minifloat.arguments import checked
from minifloat.comm.dtensor import placed
from minifloat.comm.group import Group
from minifloat.functional.tensor_parallel import TensorParallel
from minifloat.nn.layernorm_linear import LayerNormLinear
from minifloat.nn.layernorm_mlp import LayerNormMLP
from minifloat.nn.linear import Linear
from minifloat.nn.multihead_attention import MultiheadAttention
from minifloat.tensor import QuantizedTensor


class Entry(NamedTuple):
    """Rows of a tensor that are an entry of their own, or all of it.

    Args:
        key: in the state dict.
        begin, length: which rows of this rank's tensor; length -1: it is all one.
        dim: what ranks have pieces along; None: each has the whole.
        extent: of the whole along ``dim``.
    """

    key: str
    begin: int
    length: int
    dim: int | None
    extent: int

    def of(self, tensor: Tensor) -> Tensor:
        """This entry's part of a rank's tensor, in its memory."""
        return tensor if self.length < 0 else tensor.narrow(0, self.begin, self.length)


@checked
def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict()`` with DTensors: ``Shard`` for what ranks have pieces of, ``Replicate`` for the rest.

    They are the memory of the model: what is loaded into them is loaded into it, but for delayed scaling's histories of
    another length and for quantized parameters, which :func:`load_sharded_state_dict` sees to. Of the latter an entry
    is a copy: the values that the codes stand for, in the parameter's dtype, cast again when they are loaded. Layers
    have histories from their first step or from ``prepare`` on, and a checkpoint's can be loaded from then on. Without
    a group, plain tensors.

    Raises:
        ValueError: layers are sharded over different groups; a parameter is a DTensor already; ranks do not share the
            amaxes of delayed scaling, so that there is no one history to save.
    """
    _check_histories(model)
    layout = _Layout(model)
    state: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        values = (value.dequantize() if isinstance(value, QuantizedTensor) else value).detach()
        state |= {entry.key: layout.dtensor(entry, entry.of(values)) for entry in layout.of(key, value)}
    return state


def _check_histories(model: nn.Module) -> None:
    for name, module in model.named_modules():
        plan = module._latest_config[1] if isinstance(module, Linear) and module._latest_config is not None else None
        if plan is None or plan.delayed is None or plan.delayed.reduce_amax or module._parallel.group.size == 1:
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
    layout, left, local = _Layout(model), dict(state), {}
    for key, value in model.state_dict(keep_vars=True).items():
        entries = layout.of(key, value) if isinstance(value, Tensor) else []
        pieces = [layout.local(entry, left.pop(entry.key)) for entry in entries if entry.key in left]
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
    layout = _Layout(model)
    tensors = _optimizer_tensors(model, optimizer, layout)
    state: dict[str, Any] = {key: layout.dtensor(entry, value.detach()) for key, entry, value in tensors}
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
    layout = _Layout(model)
    with torch.no_grad():
        for key, entry, value in _optimizer_tensors(model, optimizer, layout):
            value.copy_(layout.local(entry, state[key]))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(saved)


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer, layout: _Layout) -> Iterator[tuple[str, Entry, Tensor]]:
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
            for entry in layout.of(key, parameter) if alike else [Entry(key, 0, -1, None, 0)]:
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


# ---- how the parameters of a model are cut ----


class _Layout:
    """How a model's tensors are cut, and their pieces as DTensors."""

    def __init__(self, model: nn.Module) -> None:
        self.group = _tensor_parallel_group(model)
        self.fused = _fused_parameters(model)
        self._meshes: dict[str, DeviceMesh] = {}

    def of(self, key: str, tensor: Tensor) -> list[Entry]:
        """The entries of a parameter or buffer, which says itself how it is cut."""
        if isinstance(tensor, DTensor):
            raise ValueError(f"sharded_state_dict: {key} is a DTensor; use it on a model without fully_shard")
        sharded = getattr(tensor, "tensor_model_parallel", False)
        dim: int | None = tensor.partition_dim if sharded else None  # type: ignore[attr-defined]
        size, lengths = (self.group.size, tensor.partition_parts) if sharded else (1, (0,))  # type: ignore[attr-defined]
        rows = self.fused.get(key)
        if rows is None and len(lengths) == 1:
            return [Entry(key, 0, -1, dim, lengths[0])]
        rows = rows or {str(i): length // size for i, length in enumerate(lengths)}
        begins = accumulate(rows.values(), initial=0)
        return [
            Entry(f"{key}.{name}", begin, length, dim, length * size)
            for begin, (name, length) in zip(begins, rows.items(), strict=False)
        ]

    def dtensor(self, entry: Entry, piece: Tensor) -> Tensor:
        """This rank's piece as what it is a piece of."""
        if self.group.size == 1:
            return piece
        device = "cpu" if piece.is_meta else piece.device.type
        if device not in self._meshes:
            self._meshes[device] = DeviceMesh.from_group(self.group.process_group, device)
        shape = [entry.extent if dim == entry.dim else extent for dim, extent in enumerate(piece.shape)]
        return placed(piece, self._meshes[device], [Replicate() if entry.dim is None else Shard(entry.dim)], shape)

    def local(self, entry: Entry, value: Tensor) -> Tensor:
        """This rank's piece of an entry: a DTensor over the same ranks, or the whole."""
        if not isinstance(value, DTensor):
            return value if entry.dim is None else value.chunk(self.group.size, entry.dim)[self.group.rank]
        if value.device_mesh.size() != self.group.size:
            raise ValueError(
                f"load_sharded_state_dict: {entry.key} is sharded over {value.device_mesh.size()} ranks and the model "
                f"over {self.group.size}; load the checkpoint into the model's own sharded_state_dict"
            )
        return value.to_local()


def _tensor_parallel_group(model: nn.Module) -> Group:
    """The one that the model's layers are sharded over; of one rank if they are not."""
    found: dict[Group, str] = {}
    for name, module in model.named_modules():
        parallel = getattr(module, "_parallel", None)
        if isinstance(parallel, TensorParallel) and parallel.group.size > 1:
            found.setdefault(parallel.group, name)
    if len(found) > 1:
        raise ValueError(f"sharded_state_dict: {' and '.join(found.values())} are sharded over different groups")
    return next(iter(found), Group())


def _fused_parameters(model: nn.Module) -> dict[str, dict[str, int]]:
    """Of parameters made of several, by their keys: the rows of each part on this rank."""
    return {
        f"{name}.{linear}.{kind}".lstrip("."): rows
        for name, module in model.named_modules()
        for linear, rows in _fused_linears(module)
        for kind in ("weight", "bias")
    }


def _fused_linears(module: nn.Module) -> Iterator[tuple[str, dict[str, int]]]:
    if isinstance(module, LayerNormMLP) and module.activation.gated:
        half = module.fc1.out_features // 2
        yield "fc1", {"gate": half, "up": half}
    elif isinstance(module, MultiheadAttention):
        both = {"key": module.groups * module.channels, "value": module.groups * module.channels}
        own = module.attention_type == "self"
        part = "qkv" if own else "key_value"
        linear = getattr(module, part)
        path, linear = (f"{part}.linear", linear.linear) if isinstance(linear, LayerNormLinear) else (part, linear)
        if isinstance(linear, Linear) and linear.parameters_split is None:
            yield path, {"query": module.heads * module.channels} | both if own else both
