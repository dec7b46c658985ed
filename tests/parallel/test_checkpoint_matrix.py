"""One form of a checkpoint: what one way to split a model saves, each of the others loads, to the bit."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from minifloat import (
    EtpEmbedding,
    GroupedLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    VocabParallelEmbedding,
    prepare,
    quantized_model_init,
)
from minifloat.comm.dtensor_ddp import local_rows
from minifloat.distributed import (
    fully_shard,
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor
from tests.helpers.distributed_pool import Pools
from tests.helpers.fused_model import assert_same

HIDDEN = 24
WAYS = {
    "none": (1, 1, 1),
    "tp": (1, 1, 2),
    "etp": (1, 4, 1),
    "etp tp": (1, 2, 2),
    "etp twice": (2, 2, 1),
    "fsdp": (1, 3, 1),
    "fsdp tp": (1, 2, 2),
}
"""Replicas, ranks that share rows, and tensor-parallel ones of each way to split a model; none divides all rows."""


def mesh_of(way: str) -> Any:
    """A task makes one for all of its models."""
    return None if way == "none" else init_device_mesh("cpu", WAYS[way], mesh_dim_names=("replicas", "rows", "tp"))


def make(seed: int, way: str, mesh: Any = None) -> nn.Sequential:
    """Fused and gated parts, tables, experts, fewer rows than ranks, a weight that is kept quantized, histories."""
    torch.manual_seed(seed)
    ranks: Any = {}
    if mesh is not None:
        ranks = {"tp_mesh": mesh["tp"]} | ({"etp_group": mesh["rows"]} if "etp" in way else {})
    fused: Any = ranks | {"set_parallel_mode": True} if ranks else {}
    own = {key: group for key, group in ranks.items() if key == "etp_group"}
    with quantized_model_init(recipe="mxfp8"):
        kept = Linear(32, 70, **own)
    model = nn.Sequential(
        MultiheadAttention(HIDDEN, 4, fuse_qkv_params=True, input_layernorm=True, **fused),
        LayerNormMLP(HIDDEN, 26, activation="swiglu", **fused),
        Linear(HIDDEN, 3, parallel_mode="row" if ranks else None, **ranks),
        GroupedLinear(2, 8, 7, **own),
        GroupedLinear(3, 8, 5, single_grouped_weight=True, **own),
        VocabParallelEmbedding(27, 8, **ranks),
        EtpEmbedding(9, 8, **own),
        kept,
    )
    prepare(model[2], DelayedScaling(amax_history_len=2))
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape))
    if "fsdp" in way:
        for layer in model:
            fully_shard(layer, mesh=mesh["rows"])
        fully_shard(model, mesh=mesh["rows"])
    return model


def start(seed: int, way: str, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(seed, way, mesh)
    trained = [p for p in model.parameters() if not isinstance(local_rows(p), QuantizedTensor)]
    return model, torch.optim.AdamW(trained, lr=0.01 * seed)


def trained(seed: int, way: str, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After a step, with gradients that are the parameters of another model: the same values on any ranks."""
    (model, optimizer), other = start(seed, way, mesh), make(seed + 1, way, mesh)
    for p, values in zip(model.parameters(), other.parameters(), strict=True):
        if p in optimizer.state or not isinstance(local_rows(p), QuantizedTensor):
            p.grad = values.detach().clone()
    optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This rank's part of all tensors, and the learning rate."""
    state = {
        f"{name} of {key}": value
        for key, p in model.named_parameters()
        for name, value in optimizer.state.get(p, {}).items()
    }  # fmt: skip
    rates = {"rate": torch.tensor([group["lr"] for group in optimizer.param_groups])}
    local = {key: local_rows(value) for key, value in (model.state_dict() | state | rates).items()}
    return {key: (v.dequantize() if isinstance(v, QuantizedTensor) else v).detach() for key, v in local.items()}


def save(rank: int, size: int, folder: str, way: str) -> None:
    model, optimizer = trained(1, way, mesh_of(way))
    state = {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def load(rank: int, size: int, folders: list[str], way: str) -> None:
    mesh = mesh_of(way)
    wanted = everything(*trained(1, way, mesh))
    for folder in folders:
        model, optimizer = start(5, way, mesh)
        state = {"model": sharded_state_dict(model), "optimizer": sharded_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        load_sharded_state_dict(model, state["model"])
        load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])
        assert_same(everything(model, optimizer), wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in one process
@pytest.mark.parametrize("pairs", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_saved_by_one_loaded_by_another(worker_pool: Pools, tmp_path: Path, pairs: str) -> None:
    """Some: of one process and each other way, both ways, and of each way and the one before it."""
    files, whole = [str(tmp_path / way) for way in WAYS], sharded_state_dict(make(1, "none"))
    for file, way in zip(files, WAYS, strict=True):
        save(0, 1, file, way) if way == "none" else worker_pool(prod(WAYS[way])).run(save, file, way)
        entries = dcp.FileSystemReader(file).read_metadata().state_dict_metadata
        for key, value in whole.items():  # what several ranks have is there once
            pieces = [chunk.sizes.numel() for chunk in entries[f"model.{key}"].chunks]  # type: ignore[union-attr]
            assert sum(pieces) == value.numel() and 0 not in pieces, (way, key)
    for i, way in enumerate(WAYS):
        chosen = files if pairs == "all" or way == "none" else [files[0], files[i - 1 or -1]]
        load(0, 1, chosen, way) if way == "none" else worker_pool(prod(WAYS[way])).run(load, chosen, way)


def save_own(rank: int, size: int, folder: str) -> None:
    dcp.save(make(1, "fsdp", mesh_of("fsdp")).state_dict(), checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_of_fsdp2_is_converted(worker_pool: Pools, tmp_path: Path) -> None:
    """Its state dict has a fused parameter under one key; an unsharded model loads it."""
    worker_pool(3).run(save_own, str(tmp_path))
    model, wanted = make(5, "none"), make(1, "none")
    with pytest.raises(dcp.api.CheckpointException, match=r"Missing key in checkpoint state_dict: 0\.qkv\..*\.key"):
        dcp.load(sharded_state_dict(model), checkpoint_id=tmp_path)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_state_dict(state)
    for (key, mine), theirs in zip(sharded_state_dict(model).items(), sharded_state_dict(wanted).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=key)


def whole(rank: int, size: int, way: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh = mesh_of(way)
    model, other = make(5, way, mesh), make(1, way, mesh)
    load_sharded_state_dict(model, sharded_state_dict(make(1, "none")))
    key, values = next(iter(sharded_state_dict(make(1, "none")).items()))
    with pytest.raises((ValueError, RuntimeError), match=r"0\.qkv\.norm\.weight.*25.*24"):
        load_sharded_state_dict(model, {key: torch.cat([values, values[:1]])}, strict=False)
    optimizer = torch.optim.AdamW(model.parameters())  # without state
    return everything(model, optimizer), everything(other, optimizer)


@pytest.mark.parametrize("way", ["tp", "fsdp", "fsdp tp"])
def test_whole_tensors_are_cut(worker_pool: Pools, way: str) -> None:
    """An unsharded model's state goes straight into one that is sharded."""
    for found, wanted in worker_pool(prod(WAYS[way])).run(whole, way):
        assert_same(found, wanted)
