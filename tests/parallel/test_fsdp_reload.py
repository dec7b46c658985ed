"""Loads after which ranks must go on alike, also one that has no rows; tensor-parallel shares are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat.distributed import full_state_dict, fully_shard
from minifloat.nn.quantized_parameters import weight_scale
from minifloat.optim import MasterWeights
from minifloat.parallel.fsdp import hooks
from minifloat.recipe import DelayedScaling
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fsdp_cases import layers, mesh_of


def quantized(recipe: Any, size: int, seed: int) -> tuple[Any, MasterWeights]:
    """Two rows over the ranks: of three ranks one has none."""
    torch.manual_seed(seed)
    with minifloat.quantized_model_init(recipe=recipe):
        model = layers(recipe, 32, 2, 32)
    fully_shard(model, mesh=mesh_of(size))
    return model, MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)


def train(model: Any, optimizer: MasterWeights, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def optimizer_state(rank: int, size: int) -> tuple[list[float], list[float]]:
    """Scales of the codes, and outputs, after masters were loaded that round to other codes than there are."""
    recipe = DelayedScaling(amax_history_len=1)
    model, optimizer = quantized(recipe, size, 0)
    other, into = quantized(recipe, size, 7)
    for number in range(3):
        train(model, optimizer, 100 + rank + number)
        train(other, into, 200 + rank + number)
    into.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scales = [float(p._local_tensor.operands.any.scale_inv) for p in other.parameters()]
    return scales, other(torch.ones(1, 32)).flatten().tolist()


def test_optimizer_state(worker_pool: Pools) -> None:
    """All ranks write the loaded masters, or none does: the codes that they gather have one scale."""
    ranks = worker_pool(3).run(optimizer_state)
    assert ranks[0] == ranks[1] == ranks[2]


@on_ranks(3)
def test_in_place(rank: int, size: int, tmp_path: Path) -> None:
    model, optimizer = quantized("mxfp8", size, 0)
    train(model, optimizer, rank)
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path)
    before = full_state_dict(model)
    train(model, optimizer, rank + 10)
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path)
    after = full_state_dict(model)
    same = [torch.equal(before[key].dequantize(), after[key].dequantize()) for key in before]
    train(model, optimizer, rank + 20)  # masters follow what was loaded, on all ranks
    dist.barrier()
    assert same == [True, True]


@on_ranks(2)
def test_microbatches_of_delayed_scaling(rank: int, size: int) -> None:
    """Scales that forward and backward have read, in microbatches between which gathered weights stay."""
    model: Any = layers("delayed", 24, 32, 24)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh_of(size), reshard_after_forward=True)
    model.set_reshard_after_backward(False)
    seen = []
    for scale in (1.0, 4.0, 16.0):  # each update moves the layer's scale
        y = model(scale * torch.randn(4, 24, generator=torch.Generator().manual_seed(rank)))
        unsharded = hooks.parameters_below(model)[0].weight.gathered
        in_forward = float(unsharded.operands.any.scale_inv)
        y.square().sum().backward()
        seen.append((in_forward, float(unsharded.operands.any.scale_inv)))
    assert [forward for forward, _ in seen] == [backward for _, backward in seen]


@on_ranks(2)
def test_histories_that_are_assigned(rank: int, size: int) -> None:
    """The next step of an optimizer casts with the scales of the new buffers."""
    model, optimizer = quantized(DelayedScaling(amax_history_len=1), size, 0)
    train(model, optimizer, 100 + rank)
    histories = {name: value.clone() for name, value in model.state_dict().items() if "_scaling." in name}
    model.load_state_dict(histories, strict=False, assign=True)
    for number in range(2):
        train(model, optimizer, 200 + rank + number)
    for layer in model:
        assert torch.equal(
            layer.weight._local_tensor.operands.any.scale_inv, weight_scale(layer, "weight").reciprocal()
        )


def tensor_parallel(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("shard", "tp"))
    layer = minifloat.Linear(32, 32 * size, parallel_mode="column", tp_mesh=mesh["tp"], recipe="current")
    full_state_dict(fully_shard(layer, mesh=mesh["shard"]))


def test_tensor_parallel_shares(worker_pool: Pools) -> None:
    with pytest.raises(ValueError, match=r"weight is tensor-parallel, .*sharded_state_dict"):
        worker_pool(2).run(tensor_parallel)
