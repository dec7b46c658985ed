"""PyTorch's pipelines, whose first step runs stages on memory that nothing was written to, to learn shapes."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from minifloat import DelayedScaling, Linear, autocast
from tests.helpers.compiled import compiled
from tests.helpers.distributed_pool import on_ranks

RECIPE = DelayedScaling(amax_history_len=4, reduce_amax=False)
OWN_CONTEXT = "own context"


class Stage(nn.Module):
    """A layer, inside of a context of its own where there is one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layer = Linear(16, 16, recipe=RECIPE if way in ("own recipe", "compiled") else None)

    def forward(self, x: Tensor) -> Tensor:
        with autocast(recipe=RECIPE) if self.way == OWN_CONTEXT else nullcontext():
            return F.silu(self.layer(x))


@pytest.mark.parametrize("way", ["own recipe", "context", OWN_CONTEXT, "compiled"])
@on_ranks(2)
def test_learning_shapes_leaves_histories_alone(rank: int, world_size: int, way: str) -> None:
    """Two ranks' steps give histories and gradients of one process that calls the layers without a pipeline."""
    torch.manual_seed(0)
    stages = [Stage(way), Stage(way)]
    own = copy.deepcopy(stages[rank])
    piped: Any = compiled(own) if way == "compiled" else own
    stage = PipelineStage(piped, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=F.mse_loss, scale_grads=False)
    for _ in range(3):
        x, target = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
        for module in (own, *stages):
            module.zero_grad()
        with autocast(recipe=RECIPE) if way == "context" else nullcontext():
            if rank == 0:
                schedule.step(x.flatten(0, 1))
            else:
                schedule.step(target=target.flatten(0, 1))
        with autocast(recipe=RECIPE) if way == "context" else nullcontext():
            for microbatch, wanted in zip(x, target, strict=True):
                F.mse_loss(stages[1](stages[0](microbatch)), wanted).backward()
        for (name, want), got in zip(stages[rank].state_dict().items(), own.state_dict().values(), strict=True):
            assert torch.equal(got, want), name
        assert torch.equal(own.layer.weight.grad, stages[rank].layer.weight.grad)  # type: ignore[arg-type]
