"""Tests of the pool of worker processes that the distributed tests run on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed_pool import Pools, RankDiedError, on_ranks


def summed(rank: int, world_size: int, start: int) -> int:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


def process(rank: int, world_size: int) -> tuple[int, int, int]:
    return rank, os.getpid(), torch.get_num_threads()


def refused(rank: int, world_size: int) -> None:
    raise ValueError(f"refused by {rank}")


def refused_by_last(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        refused(rank, world_size)
    return summed(rank, world_size, 0)


def aborted_by_last(rank: int, world_size: int) -> int:
    if rank == world_size - 1:
        os.abort()
    return summed(rank, world_size, 0)


def asleep(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_exception_names_rank_and_place(worker_pool: Pools) -> None:
    pids = worker_pool(2).run(process)
    with pytest.raises(ValueError, match=r"refused by [01]") as caught:
        worker_pool(2).run(refused)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank ") and "test_distributed_pool.py" in note and "in refused" in note
    assert worker_pool(2).run(process) == pids  # all ranks raised alike: they are still in step


def test_exception_of_one_rank(worker_pool: Pools) -> None:
    with pytest.raises(ValueError, match="refused by 1") as caught:
        worker_pool(2).run(refused_by_last)
    assert caught.value.__notes__[0].startswith("on rank 1 of 2")
    assert worker_pool(2).run(summed, 0) == [1, 1]


def test_dead_rank(worker_pool: Pools) -> None:
    with pytest.raises(RankDiedError, match="rank 1 of 2 died: SIGABRT"):
        worker_pool(2).run(aborted_by_last)
    assert worker_pool(2).run(summed, 0) == [1, 1]


def test_timeout(worker_pool: Pools) -> None:
    worker_pool(2).run(process)  # the start of the processes is not what times out
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        worker_pool(2).run(asleep, timeout=0.5)
    assert worker_pool(2).run(summed, 0) == [1, 1]


def test_what_one_rank_returns_or_raises_fails_a_test_on_ranks(worker_pool: Pools) -> None:
    with pytest.raises(AssertionError, match="wrong: 3"):
        found_by_last(worker_pool, 2, value=3)
    with pytest.raises(ValueError, match="0 on 1"):
        found_by_last(worker_pool, 2, value=0)
    found_by_last(worker_pool, 1, value=3)


@on_ranks(1, 2)
def found_by_last(rank: int, world_size: int, value: int) -> str:
    if rank == 1 and not value:
        raise ValueError(f"0 on {rank}")
    return f"wrong: {value}" * (rank == 1)
