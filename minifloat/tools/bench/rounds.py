"""The clock of several ranks: contenders take turns in each round, and a call takes what the slowest rank takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]


@dataclass(frozen=True)
class Line:
    """One contender of one row: milliseconds a call (median), times the baseline's speed, and what it should reach."""

    row: str
    contender: str
    ms: float
    ratio: float
    error: float
    goal: float | None
    rounds: list[float]

    def __str__(self) -> str:
        met = self.goal is not None and self.ratio >= self.goal
        verdict = "" if self.goal is None else f"  goal {self.goal:.2f} {'met' if met else 'MISSED'}"
        return f"{self.row:34}{self.contender:26}{self.ms:9.3f} ms{self.ratio:7.2f}x  error {self.error:.2g}{verdict}"


def timed(calls: Mapping[str, Call], rounds: int, count: int = 5) -> dict[str, list[float]]:
    """Milliseconds a call of the slowest rank, of each contender in each round, the mean of ``count`` calls.

    Raises:
        RuntimeError: what the contenders keep leaves so little memory that the allocator had to give blocks back to
            the device and ask for others, which stops it.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(2):
            call()
    retries = _retries()
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end) / count, device="cuda")
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found[name].append(float(slowest))
        if _retries() > retries:
            raise RuntimeError(
                f"{len(calls)} contenders leave too little memory to be timed: take fewer (fsdp: --only)"
            )
    return found


def _retries() -> int:
    """Counts how often the allocator of some rank has run out of memory and freed what it had cached."""
    counted = torch.tensor(torch.cuda.memory_stats().get("num_alloc_retries", 0), device="cuda")
    dist.all_reduce(counted)
    return int(counted)
