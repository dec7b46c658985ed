"""Mixtures of experts under DDP and FSDP2: one process that has the data of all ranks, bit for bit; checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import minifloat
from minifloat.nn import MoE
from minifloat.optim import MasterWeights
from minifloat.parallel.data_parallel import data_parallel
from minifloat.parallel.fsdp.api import fully_shard
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.selection import diagonals

WRAPPERS = {"ddp": data_parallel, "fsdp": fully_shard, "torch fsdp": torch_fully_shard}


def make(recipe: str, single: bool, seed: int = 0, quantized: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"recipe": recipe, "single_grouped_weight": single, "aux_loss_coefficient": 0.0}
    with minifloat.quantized_model_init(quantized, recipe=recipe):
        return nn.Sequential(
            *[MoE(32, 48, 4, 2, shared_ffn_hidden_size=16, shared_gate=True, **options) for _ in range(2)]
        )


def whole(value: Tensor | None) -> Tensor:
    assert value is not None
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize(("wrapper", "recipe", "single"), diagonals(2, WRAPPERS, ["current", "none"], [False, True]))
@on_ranks(2)
def test_steps_are_those_of_one_process(rank: int, size: int, wrapper: str, recipe: str, single: bool) -> str:
    """Three steps of both; what differs first, or ""."""
    twin = make(recipe, single)
    model = copy.deepcopy(twin)
    parts = [model] if wrapper == "ddp" else [*model, model]
    for part in parts:
        wrapped = WRAPPERS[wrapper](part)  # type: ignore[operator]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        data = [torch.randn(11, 32, generator=generator) for _ in range(size)]
        wrapped(data[rank]).square().sum().backward()
        gradients = []
        for own in data:
            gradients.append(torch.autograd.grad(twin(own).square().sum(), list(twin.parameters())))
        for (name, mine), parameter, *each in zip(model.named_parameters(), twin.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack([gradient / size for gradient in each]).sum(0)
            if not torch.equal(whole(mine.grad), parameter.grad):
                return f"step {step}: the gradient of {name}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), parameter in zip(model.named_parameters(), twin.parameters(), strict=True):
            if not torch.equal(whole(mine), parameter):
                return f"step {step}: {name}"
    return ""


@on_ranks(2)
def test_quantized_experts_are_those_of_the_first_rank(rank: int, size: int) -> str:
    """Three steps of quantized experts that start otherwise on each rank; what differs first from rank 0's, or ""."""
    models = [make("delayed", False, seed, quantized=True) for seed in (rank, 0)]
    wrapped = data_parallel(models[0])
    optimizers = [MasterWeights(each.parameters(), torch.optim.SGD, lr=0.1) for each in models]
    for step in range(3):
        x = torch.randn(11, 32, generator=torch.Generator().manual_seed(step))
        results = [each(x) for each in (wrapped, models[1])]
        if not torch.equal(*results):
            return f"step {step}"
        for result, optimizer in zip(results, optimizers, strict=True):
            result.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return ""
