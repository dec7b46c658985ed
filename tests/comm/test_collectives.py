"""The collectives of plain tensors and of quantized rows: sums, handles, and checks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.comm import collectives
from minifloat.comm.collectives import (
    all_gather_rows,
    all_reduce,
    start_all_gather_rows,
    start_all_reduce,
    start_reduce_scatter_rows,
)
from minifloat.distributed import Group, ShardMap
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.gather_cases import Wire, world

ROWS = [(3, 3), (5, 2), (0, 4), (0, 0)]


def addends(rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """One a rank, of small integers, whose sum is exact in any order."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(-8, 8, (rows, 6), generator=generator).to(dtype) for _ in range(size)]


def maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function


def scattered(rank: int, size: int, rows: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    shards, group = ShardMap(rows), world()
    own = addends(shards.total, size, dtype)
    scatter = maybe_compiled(lambda x: start_reduce_scatter_rows(x, shards, group).wait(), compiled)
    expected = torch.stack(own).sum(0).split(list(rows))[rank]
    found = scatter(own[rank].clone())
    assert found.dtype == dtype and torch.equal(found, expected)
    strided = own[rank].t().contiguous().t()
    assert torch.equal(scatter(strided), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_reduce_scatter_rows(worker_pool: Pools, compiled: bool) -> None:
    """Equal, uneven and empty shares, in the dtype of the addends."""
    for rows in [(5, 2)] if compiled else ROWS:
        worker_pool(2).run(scattered, rows, torch.bfloat16, compiled)
    if not compiled:
        worker_pool(3).run(scattered, (4, 0, 7), torch.float32, False)


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_all_reduce(rank: int, size: int, compiled: bool) -> None:
    group = world()
    own = addends(5, size, torch.bfloat16)
    reduce = maybe_compiled(lambda x: all_reduce(x, group), compiled)
    expected = torch.stack(own).sum(0)
    found = reduce(own[rank].clone())
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert torch.equal(reduce(own[rank].t().contiguous().t()), expected)
    assert reduce(own[rank][:0]).shape == (0, 6)


def gathered(rank: int, size: int, rows: tuple[int, ...], dtype: torch.dtype) -> None:
    shards = ShardMap(rows)
    whole = torch.arange(shards.total * 6).reshape(shards.total, 2, 3).to(dtype)
    own = whole[shards.first(rank) : shards.end(rank)]
    with Wire() as wire:
        assert torch.equal(all_gather_rows(own, shards, world()), whole)
    assert all(sent.dtype == torch.uint8 for sent in wire.sent)
    strided = own.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(all_gather_rows(strided, shards, world()), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_all_gather_rows(worker_pool: Pools, dtype: torch.dtype) -> None:
    for rows in ROWS:
        worker_pool(2).run(gathered, rows, dtype)


# ---- handles ----


@on_ranks(2)
def test_handles(rank: int, size: int) -> None:
    """Transfers that run beside each other and are waited for in any order; a handle keeps nothing afterwards."""
    group, own = world(), addends(6, size, torch.float32)
    first = own[rank].clone()
    alive = weakref.ref(first)
    summed = start_all_reduce(own[rank].clone(), group)
    gathering = start_all_gather_rows([first, first.half()], [ShardMap((6, 6))] * 2, group)
    scattering = start_reduce_scatter_rows(own[rank].clone(), ShardMap((2, 4)), group)
    del first
    total = torch.stack(own).sum(0)
    assert torch.equal(scattering.wait(), total.split([2, 4])[rank])
    whole, half = gathering.wait()
    assert torch.equal(whole, torch.cat(own)) and torch.equal(half, torch.cat(own).half())
    assert torch.equal(summed.wait(), total)
    assert alive() is None, "the handle keeps what was sent"
    with pytest.raises(AssertionError, match="has been waited for"):
        summed.wait()


def test_one_rank_alone() -> None:
    x, shards, group = torch.randn(4, 3), ShardMap((4,)), Group()
    assert torch.equal(all_gather_rows(x, shards, group), x)
    assert torch.equal(start_reduce_scatter_rows(x, shards, group).wait(), x)
    assert torch.equal(all_reduce(x, group), x)


@on_ranks(2)
def test_own_mistakes(rank: int, size: int) -> None:
    """A rank that is wrong by itself says so before it communicates."""
    x = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=r"rank \d of 2 has 4 rows, but the row counts of the ranks are \(3, 3\)"):
        all_gather_rows(x, ShardMap((3, 3)), world())
    with pytest.raises(ValueError, match=r"4 rows to sum, of which the ranks are to get \(2, 3\)"):
        start_reduce_scatter_rows(x, ShardMap((2, 3)), world())


def test_bytes_of_single_elements_of_any_stride() -> None:
    """A dim of size 1 may have any stride: PyTorch calls it contiguous, and refuses to view it as another dtype."""
    for x in (torch.arange(6.0).view(1, 6).t()[2:3], torch.arange(6.0)[::5][:1], torch.ones(3, 0).t()):
        back = collectives.from_bytes(collectives.as_bytes(x), x)
        assert torch.equal(back, x)
