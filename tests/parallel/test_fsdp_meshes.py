"""``fully_shard`` over one dim of a mesh of two: beside replicas, and beside tensor parallelism."""

from __future__ import annotations

import pytest

from tests.helpers.distributed_pool import Pools
from tests.helpers.fsdp_cases import KINDS, Case
from tests.helpers.fsdp_meshes import hybrid, tensor_parallel


@pytest.mark.parametrize("shape", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow), (2, 2)])
def test_hybrid(worker_pool: Pools, shape: tuple[int, int]) -> None:
    size = shape[0] * shape[1]
    assert worker_pool(size).run(hybrid, shape) == [[]] * size


@pytest.mark.parametrize(
    ("recipe", "kind", "options"),
    [
        ("nvfp4", "high-precision", ()),
        ("current", "quantized", ()),
        pytest.param("delayed", "high-precision", ("checkpoint",), marks=pytest.mark.slow),
        pytest.param("mxfp8", "high-precision", ("evaluate",), marks=pytest.mark.slow),
        pytest.param("mxfp8", "quantized", ("accumulate",), marks=pytest.mark.slow),
        pytest.param("block", "high-precision", ("keep",), marks=pytest.mark.slow),
    ],
)
def test_fewer_ranks_for_backward(worker_pool: Pools, recipe: str, kind: str, options: tuple[str, ...]) -> None:
    """Four ranks gather for forward, two for backward what these have kept; unaligned and empty shards."""
    case = Case("linears", recipe, "each", reshard=2, options=options)
    assert worker_pool(4).run(KINDS[kind], case, 3) == [""] * 4


def test_fewer_ranks_for_backward_of_several_parameters(worker_pool: Pools) -> None:
    """Those of query, key and value share the memory of the gathered weight."""
    case = Case("transformer", "current", "each", reshard=2)
    assert worker_pool(4).run(KINDS["high-precision"], case, 2) == [""] * 4


def test_tensor_parallel(worker_pool: Pools) -> None:
    assert worker_pool(4).run(tensor_parallel, "mxfp8") == [[]] * 4
