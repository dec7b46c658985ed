"""``fully_shard`` over one dim of a mesh of two: beside replicas, and beside tensor parallelism."""

from __future__ import annotations

import pytest

from tests.helpers.distributed_pool import Pools
from tests.helpers.fsdp_meshes import hybrid, tensor_parallel


@pytest.mark.parametrize("shape", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow), (2, 2)])
def test_hybrid(worker_pool: Pools, shape: tuple[int, int]) -> None:
    size = shape[0] * shape[1]
    assert worker_pool(size).run(hybrid, shape) == [[]] * size


def test_tensor_parallel(worker_pool: Pools) -> None:
    assert worker_pool(4).run(tensor_parallel, "mxfp8") == [[]] * 4
