"""``minifloat.inspect`` of layers that ranks share: names the rank, and changes no bit."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import minifloat
from minifloat.comm.dtensor_ddp import local_rows
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


def _model(kind: str) -> nn.Module:
    """Layers that ranks share in each way."""
    group = dist.group.WORLD
    if kind in ("sequence parallel", "split blocks"):
        ranks: dict[str, Any] = {"tp_group": group, "sequence_parallel": True, "recipe": "mxfp8"}
        return nn.Sequential(
            minifloat.Linear(64, 128, parallel_mode="column", **ranks),
            minifloat.Linear(128, 64, parallel_mode="row", **ranks),
        )
    if kind == "expert parallel":
        recipe = minifloat.Float8BlockScaling(columnwise_source="rowwise_dequantized")  # so that codes travel
        return minifloat.MoE(128, 128, 4, top_k=2, ep_group=group, recipe=recipe)
    if kind == "experts":
        model: nn.Module = minifloat.MoE(64, 64, 4, top_k=2, recipe="current", single_grouped_weight=True)
    else:
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        minifloat.convert(model, "nvfp4", filter_fn=lambda module, name: True)
    fully_shard(model)
    return model


def _same(rank: int, size: int, kind: str) -> tuple[bool, set[tuple[str, str]], list[float], float]:
    results, amaxes = [], []
    for inspected in (False, True):
        torch.manual_seed(0)
        model = _model(kind)
        width = 128 if kind == "expert parallel" else 64
        x = torch.randn(
            40 if kind == "split blocks" else 64, width, generator=torch.Generator().manual_seed(rank)
        ).requires_grad_()
        with minifloat.inspect(model, every=1) if inspected else nullcontext() as seen:
            y = model(x)
            y.square().sum().backward()
        grads = [local_rows(p.grad) for p in model.parameters() if p.grad is not None]
        results.append([y.detach(), x.grad, *grads])
        amaxes.append(x.detach().abs().max())
    seen.reduce()
    dist.all_reduce(amaxes[0], dist.ReduceOp.MAX)
    rows = seen.rows()
    first = min(place.layer for place, _ in rows)
    found = {of.amax for place, of in rows if place.role == "X" and place.layer == first}
    same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, {place[:2] for place, _ in rows}, sorted(found), amaxes[0].item()


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("sequence parallel", ("0", "1")),
        ("experts", ("experts.fc1", "experts.fc2")),
        ("expert parallel", ("experts.fc1", "experts.fc2")),
        ("converted", ("0", "2")),
    ],
)
def test_layers_that_ranks_share(worker_pool: Pools, kind: str, layers: tuple[str, str]) -> None:
    """Their bits stay, and each operand is measured over all ranks: of X the largest value of both is known."""
    for same, found, amaxes, amax in worker_pool(2).run(_same, kind):
        assert same and found == {(layer, role) for layer in layers for role in ("X", "W", "dY")}
        assert amaxes == [pytest.approx(amax)]


def test_rows_that_split_a_block(worker_pool: Pools) -> None:
    """What ranks gather, X of the first layer and dY of the last one, is left out where a block is of both."""
    for same, found, *_ in worker_pool(2).run(_same, "split blocks"):
        assert same and found == {("0", "W"), ("0", "dY"), ("1", "X"), ("1", "W")}
