"""Checkpoints of experts that ranks share out: what any number of ranks saves, any other loads, to the bit."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minifloat import GroupedMLP, MoE
from minifloat.comm.dtensor_ddp import local_rows
from minifloat.distributed import (
    full_state_dict,
    fully_shard,
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.expert_cases import own_part
from tests.helpers.fused_model import assert_same

E, H, F = 12, 16, 14
WAYS = {
    "none": (1, 1, 1),
    "ep 2": (1, 2, 1),
    "ep 3": (1, 3, 1),
    "ep 4": (1, 4, 1),
    "dp, ep": (2, 2, 1),
    "ep, eetp": (1, 2, 2),
    "ep, fsdp": (1, 2, 2),
}
"""Replicas, ranks that share out experts, and ranks that share rows of each way to split a model."""


def mesh_of(way: str) -> Any:
    device = torch.get_default_device().type
    return None if way == "none" else init_device_mesh(device, WAYS[way], mesh_dim_names=("replicas", "ep", "rows"))


def make(seed: int, way: str, mesh: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    ranks: dict[str, Any] = {} if mesh is None else {"ep_group": mesh["ep"]}
    rows = {"etp_group": mesh["rows"]} if "eetp" in way else {}
    mixture = {"expert_etp_group": mesh["rows"]} if rows else {}
    model = nn.Sequential(
        MoE(H, F, E, shared_ffn_hidden_size=F, bias=True, **ranks, **mixture),
        GroupedMLP(E, H, F, bias=True, single_grouped_weight=True, recipe="delayed", **ranks, **rows),
    )
    for name, buffer in model[1].named_buffers():  # of all experts the same numbers, whoever has them
        first, count = model[1].fc1.first_expert, model[1].fc1.num_gemms
        slots, length = buffer.shape[-1] // count, buffer.numel() // buffer.shape[-1]
        drawn = torch.rand(length, slots, E, generator=torch.Generator(torch.get_default_device()).manual_seed(seed))
        buffer.copy_(drawn[..., first : first + count].reshape(buffer.shape) + len(name))
    if "fsdp" in way:
        for layer in (model[0].experts, model[1]):
            fully_shard(layer, mesh=mesh["rows"])
        fully_shard(model, mesh=mesh["rows"])
    return model


def start(seed: int, way: str, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(seed, way, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * seed)


def trained(seed: int, way: str, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step, with gradients that are the parameters of another model: the same values on any ranks."""
    (model, optimizer), other = start(seed, way, mesh), make(seed + 1, way, mesh)
    for p, values in zip(model.parameters(), other.parameters(), strict=True):
        p.grad = values.detach().clone()
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's part of all tensors, and the learning rate."""
    state = {f"{n} of {key}": v for key, p in model.named_parameters() for n, v in optimizer.state[p].items()}
    rates = {"rate": torch.tensor([group["lr"] for group in optimizer.param_groups])}
    return {key: local_rows(value).detach() for key, value in (model.state_dict() | state | rates).items()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}


def load_and_save(rank: int, size: int, way: str, source: str, target: str) -> None:
    """Loads what is in ``source``, if anything is, compares it with the training that was saved, and saves it."""
    mesh = mesh_of(way)
    wanted = trained(1, way, mesh)
    model, optimizer = start(5, way, mesh) if source else wanted
    if source:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=source)
        load_sharded_state_dict(model, state["model"])
        load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same(everything(model, optimizer), everything(*wanted))
    dcp.save(state_of(model, optimizer), checkpoint_id=target)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in one process
def test_travels_from_ranks_to_others(worker_pool: Pools, tmp_path: Path) -> None:
    """Each way loads what the way before it has saved, from 2 ranks to the last way, one process, and 2 ranks again."""
    source, whole = "", sharded_state_dict(make(1, "none", None))
    for number, way in enumerate([*list(WAYS)[1:], "none", "ep 2"]):
        target = str(tmp_path / f"{number}")
        if way == "none":
            load_and_save(0, 1, way, source, target)
        else:
            worker_pool(prod(WAYS[way])).run(load_and_save, way, source, target)
        entries = dcp.FileSystemReader(target).read_metadata().state_dict_metadata
        found = {key: tuple(entries[f"model.{key}"].size) for key in whole}  # type: ignore[union-attr]
        assert found == {key: tuple(value.shape) for key, value in whole.items()}, way
        source = target


@on_ranks(2)
def test_loads_state_dicts_of_whole_models(rank: int, size: int) -> list[str]:
    """Of both kinds, into both; what differs."""
    mesh, wrong = init_device_mesh("cpu", (1, size, 1), mesh_dim_names=("replicas", "ep", "rows")), []
    for single in (False, True):
        torch.manual_seed(1)
        whole = nn.Sequential(GroupedMLP(E, H, F, bias=True, single_grouped_weight=single))
        own = nn.Sequential(GroupedMLP(E, H, F, bias=True, single_grouped_weight=single, ep_group=mesh["ep"]))
        load_sharded_state_dict(own, sharded_state_dict(whole))
        for name, parameter in own.named_parameters():
            if not torch.equal(parameter, own_part(own, name, whole.get_parameter(name))):
                wrong.append(f"{name} of {single}")
        other = nn.Sequential(GroupedMLP(E, H, F, bias=True, single_grouped_weight=not single, ep_group=mesh["ep"]))
        other.load_state_dict(whole.state_dict())
        for kept, theirs in zip((own[0].fc1, own[0].fc2), (other[0].fc1, other[0].fc2), strict=True):
            for kind in ("_weight_matrix", "_bias_vector"):
                wrong += [] if torch.equal(getattr(kept, kind)(), getattr(theirs, kind)()) else [f"{kind} of {single}"]
        assert all(hasattr(p, "ep_group") for p in other.parameters())
        other.load_state_dict(own.state_dict(), assign=True)
        assert all(hasattr(p, "ep_group") for p in other.parameters())
    with pytest.raises(ValueError, match=r"0\.fc1.* is of this rank's experts.*sharded_state_dict"):
        full_state_dict(own)
    return wrong
