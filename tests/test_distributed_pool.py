"""Tests of the pool of worker processes that the distributed tests run on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed_pool import Pools, RankDiedError, on_ranks


class AwkwardError(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, layer: str, number: int) -> None:
        super().__init__(f"{layer}: {number}")


def summed(rank: int, world_size: int, start: int) -> int:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total)


def process(rank: int, world_size: int) -> tuple[int, int, int]:
    return rank, os.getpid(), torch.get_num_threads()


def drawn(rank: int, world_size: int) -> torch.Tensor:
    return torch.rand(3)


def refused(rank: int, world_size: int) -> None:
    raise ValueError(f"refused by {rank}")


def awkward(rank: int, world_size: int) -> None:
    raise AwkwardError("fc1", 7)


def unsendable(rank: int, world_size: int) -> object:
    return lambda: rank


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


def test_processes_stay_and_have_one_thread(worker_pool: Pools) -> None:
    first, second = worker_pool(2).run(process), worker_pool(2).run(process)
    assert first == second
    assert [rank for rank, _, _ in first] == [0, 1] and [threads for _, _, threads in first] == [1, 1]
    assert len({os.getpid(), *(pid for _, pid, _ in first)}) == 3


def test_every_run_has_the_same_seed(worker_pool: Pools) -> None:
    once, again = worker_pool(2).run(drawn), worker_pool(2).run(drawn)
    assert once[0].equal(once[1]) and once[0].equal(again[0])


def test_exception_names_rank_and_place(worker_pool: Pools) -> None:
    pids = worker_pool(2).run(process)
    with pytest.raises(ValueError, match=r"refused by [01]") as caught:
        worker_pool(2).run(refused)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank ") and "test_distributed_pool.py" in note and "in refused" in note
    assert worker_pool(2).run(process) == pids  # all ranks raised alike: they are still in step


def test_exception_that_does_not_pickle(worker_pool: Pools) -> None:
    with pytest.raises(RuntimeError, match="AwkwardError: fc1: 7"):
        worker_pool(2).run(awkward)
    with pytest.raises(Exception, match="pickle"):
        worker_pool(2).run(unsendable)


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
