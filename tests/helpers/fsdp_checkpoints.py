"""Checkpoints of ``fully_shard``, saved and loaded by ranks, and what differs between two states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import minifloat
from minifloat.distributed import full_state_dict
from minifloat.optim import MasterWeights
from minifloat.tensor import QuantizedTensor
from tests.helpers.fsdp_cases import MODELS, Case, mesh_of, shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)

State = dict[str, Any]


def unsharded(recipe: str, quantized: bool = True) -> nn.Module:
    """Rows that are no whole blocks, fewer rows than ranks; some linears have a bias."""
    with minifloat.quantized_model_init(quantized, recipe=recipe):
        return MODELS["linears"](recipe)


def sharded(recipe: str, size: int, quantized: bool = True, device: str = "cpu") -> Any:
    with torch.device(device):
        return shard(unsharded(recipe, quantized), Case("linears", recipe), mesh_of(size, device))


def optimizer_of(model: nn.Module) -> Any:
    """MasterWeights where there is something to have a master."""
    if any(isinstance(p._local_tensor, QuantizedTensor) for p in model.parameters()):  # type: ignore[attr-defined]
        return MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    with minifloat.autocast(recipe=model[0].recipe):
        y = model(torch.randn(6, 24, generator=draws).to(model[0].weight.device))
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(model: nn.Module, optimizer: Any) -> State:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def whole(model: nn.Module, optimizer: Any) -> State:
    """All that is to come back, on rank 0."""
    return full_state_dict(model, only_rank0=True) | get_optimizer_state_dict(model, optimizer, options=FULL)


def saved(rank: int, size: int, folder: Path, recipe: str, quantized: bool, device: str = "cpu") -> State:
    model = sharded(recipe, size, quantized, device)
    optimizer = optimizer_of(model)
    for seed in range(2):
        step(model, optimizer, seed * size + rank)
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    return whole(model, optimizer)


def loaded(rank: int, size: int, folder: Path, recipe: str, quantized: bool, device: str = "cpu") -> State:
    torch.manual_seed(1)
    model = sharded(recipe, size, quantized, device)
    optimizer = optimizer_of(model)
    step(model, optimizer, rank)  # something else everywhere
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return whole(model, optimizer)


def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors in nested dicts, those inside of quantized ones too; numbers as tensors."""
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in tensors(each, f"{name}/{key}").items()}
    if isinstance(value, QuantizedTensor):
        held = value._buffers()
        held.pop("scale", None)  # the layer's
        return {f"{name}/{key}": buffer for key, buffer in held.items()}
    if isinstance(value, list | tuple):
        return tensors(dict(enumerate(value)), name)
    return {name: value} if isinstance(value, Tensor) else {name: torch.tensor(hash(value))}


def differences(mine: Any, theirs: Any) -> list[str]:
    a, b = tensors(mine), tensors(theirs)
    assert a and a.keys() == b.keys(), a.keys() ^ b.keys()
    return [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name].cpu(), b[name].cpu())]
