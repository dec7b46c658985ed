"""Meshes whose ranks are in orders of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from minifloat import Linear
from minifloat.distributed import parallelize
from tests.helpers.distributed_pool import Pools

PLAN = {"0": "column"}


def parallelized(rank: int, size: int, ranks: list[list[int]], names: tuple[str, str]) -> list[int]:
    """The rows of the weight that this rank has."""
    model = nn.Sequential(Linear(1, 8, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(8.0)[:, None])
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
    parallelize(model, mesh, plan=PLAN, sequence_parallel=False)  # type: ignore[arg-type]
    return model[0].weight.flatten().int().tolist()


def refused(rank: int, size: int, ranks: list[list[int]], names: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="are in different orders"):
        parallelized(rank, size, ranks, names)


@pytest.mark.parametrize("dim", ["dp", "etp"])
def test_orders_of_ranks(worker_pool: Pools, dim: str) -> None:
    """One order of all groups of a dim is as good as another; several would mix pieces of different parts."""
    copies = 2 if dim == "dp" else 1
    for ranks in ([[0, 1], [2, 3]], [[1, 0], [3, 2]], [[1, 3], [0, 2]]):
        rows = worker_pool(4).run(parallelized, ranks, (dim, "tp"))
        assert sorted(row for own in rows for row in own) == sorted(list(range(8)) * copies)
    worker_pool(4).run(refused, [[3, 1], [0, 2]], (dim, "tp"))
