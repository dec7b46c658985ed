"""Exposed communication, from a profile of the device, kernel by kernel."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
"""Beginning and end of something."""

WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # what a trace calls things that a device does
# NCCL's kernels. Of symmetric memory: its barriers, the pause that orders its streams, and copies between GPUs, which
# a trace does not tell from those within one; a layer has hardly any of these.
COMMUNICATION = ("nccl", "barrier_kernel", "spin_kernel", "memcpy ptop", "memcpy dtod")


@dataclass(frozen=True)
class Exposure:
    """Milliseconds of a step, mean over ranks: all of it, any communication, communication alone, nothing at all."""

    row: str
    contender: str
    step: float
    communication: float
    exposed: float
    idle: float

    def __str__(self) -> str:
        times = f"{self.step:9.3f} ms  communication {self.communication:7.3f}  exposed {self.exposed:7.3f}"
        return f"{self.row:24}{self.contender:28}{times} ({self.exposed / self.step:5.1%})  idle {self.idle:6.3f}"


def covered(intervals: Iterable[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def exposures(communication: Sequence[Interval], computation: Sequence[Interval]) -> tuple[float, float, float, float]:
    """Times of the whole span, of communication, of communication while nothing is computed, and of nothing.

    Times in which intervals overlap count once.
    """
    both = [*communication, *computation]
    if not both:
        return 0.0, 0.0, 0.0, 0.0
    step = max(end for _, end in both) - min(begin for begin, _ in both)
    busy = covered(both)
    return step, covered(communication), busy - covered(computation), step - busy


def intervals(events: Iterable[Mapping[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """Communication and computation among the events of a Chrome trace, in microseconds."""
    communication: list[Interval] = []
    computation: list[Interval] = []
    for event in events:
        if event.get("cat") in WORK:
            communicates = any(word in event["name"].lower() for word in COMMUNICATION)
            (communication if communicates else computation).append((event["ts"], event["ts"] + event["dur"]))
    return communication, computation


def exposure(row: str, contender: str, call: Callable[[], Any], steps: int = 5) -> Exposure:
    """Profiles ``steps`` calls, one after the other, on all ranks; warm them up before."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = exposures(*intervals(events))
    times = torch.tensor(found, dtype=torch.float64, device="cuda") / 1000 / steps
    dist.all_reduce(times)
    return Exposure(row, contender, *(times / dist.get_world_size()).tolist())
