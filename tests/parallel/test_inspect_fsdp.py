"""``minifloat.inspect`` under ``fully_shard``: names the rank, and changes no bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import minifloat
from minifloat.distributed import fully_shard
from tests.helpers.distributed_pool import Pools


def _train(rank: int, inspected: bool) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[minifloat.Linear(64, 64, recipe="current") for _ in range(3)])
    with torch.no_grad():
        model[1].weight[:32, 0] = 1  # in the rows of rank 0, the largest
        model[2].weight[40, 5] = math.nan  # in those of rank 1
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    seen = minifloat.inspect(model, every=2) if inspected else None
    results = []
    for step in range(2):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2 * step + rank))
        y = model(x)
        y.nan_to_num().sum().backward()
        results += [y.detach(), *(p.grad.to_local().clone() for p in model.parameters())]
    if seen is not None:
        seen.close()
    return results, seen


def _compare(rank: int, size: int) -> tuple[Any, ...]:
    plain, _ = _train(rank, False)
    inspected, seen = _train(rank, True)
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(plain, inspected, strict=True))
    own = {place.role: of.saturation for place, of in seen.rows() if place.layer == "1"}["W"]
    seen.reduce()
    first = seen.first_nonfinite
    return same, own >= 1 / 64, (first.rank, first.place.layer, first.place.role, first.elements, first.step)


def test_two_ranks(worker_pool: Pools) -> None:
    found = 1, "2", "W", 1, 0
    assert worker_pool(2).run(_compare) == [(True, True, found), (True, False, found)]
