"""Compiled delayed scaling on several ranks: the numbers of the same steps without a compiler."""

from __future__ import annotations

import contextlib
import copy
import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat import Linear, autocast, prepare
from minifloat.recipe import DelayedScaling
from tests.helpers.distributed_pool import Pools

RECIPE = DelayedScaling(amax_history_len=2, reduce_amax=True)


def steps(model: nn.Module, way: str, group: dist.ProcessGroup | None, compiled: bool, rank: int) -> list[Tensor]:
    """Output, gradients and all state after steps on data of this rank."""

    def forward(x: Tensor) -> Tensor:
        inside = autocast(recipe=RECIPE, amax_reduction_group=group) if way == "inside" else contextlib.nullcontext()
        with inside:
            result: Tensor = model(x)
        return result

    call = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    torch.manual_seed(rank)
    for step in range(3):
        x = (torch.randn(5, 16) * 10.0 ** (rank - step)).requires_grad_()
        outside = autocast(recipe=RECIPE, amax_reduction_group=group) if way == "outside" else contextlib.nullcontext()
        with outside:
            y = call(x)
        model.zero_grad()
        (y * (rank + 1)).square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]


def both(rank: int, size: int, way: str, subgroup: bool) -> list[Tensor]:
    logging.getLogger("torch.__trace").disabled = True
    torch._dynamo.reset()
    torch.manual_seed(0)
    recipe = RECIPE if way == "own" else None
    model = nn.Sequential(Linear(16, 12, recipe=recipe), nn.ReLU(), Linear(12, 8, recipe=recipe))
    prepare(model, RECIPE)
    group = dist.new_group([0, 1]) if subgroup else None
    wanted = steps(copy.deepcopy(model), way, group, False, rank)
    found = steps(model, way, group, True, rank)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return list(model.buffers())


@pytest.mark.parametrize("way", ["own", "outside", "inside"])
def test_compiled_delayed_scaling(way: str, worker_pool: Pools) -> None:
    """Outputs, gradients and histories of both directions and of all layers, also over a group that was asked for."""
    first, second = worker_pool(2).run(both, way, way == "outside")
    assert len(first) == 8 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
