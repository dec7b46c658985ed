"""Timing: contenders interleaved A B A B, round by round, sustained and in bursts, with the SM clock of each round.

*Sustained* is calls back to back for all of the rounds, so that a GPU runs at the clock that its power limit leaves.
*Burst* is one call at a time on a cool chip and a cold cache: a pause, then a large write that empties L2 and lets the
host run ahead of the device, then the call. A copy of a large tensor takes part in every round: its speed is what
rooflines are made of.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from minifloat.graphs.capture import no_garbage_collection
from minifloat.tools.bench.registry import Call

Mode = Literal["sustained", "burst"]
MODES: tuple[Mode, ...] = ("sustained", "burst")
COPY = "copy"  # the name of the copy among the contenders' times

BUFFER = 2**30  # bytes read, and written, by one copy; far more than any cache
TINY_BUFFER = 2**16
SUSTAINED = 0.008  # seconds that calls of one contender take in a round, about; at least one call
MOST_CALLS = 50
LEAST_STEPS = 4
HOST_CALLS = 50
TINY_HOST_CALLS = 5
PAUSE = 0.004  # seconds, before each burst
FLUSHES = 3  # writes of the buffer before each burst: half a millisecond and more


@dataclass
class Rounds:
    """Seconds a call of each contender, by mode: one list a contender, one entry a round; SM clocks in MHz."""

    seconds: dict[Mode, dict[str, list[float]]] = field(default_factory=dict)
    clocks: dict[Mode, list[int | None]] = field(default_factory=dict)


class Timer:
    """Runs rounds on one device."""

    def __init__(self, device: torch.device, *, tiny: bool = False) -> None:
        self.device = device
        self.clock = sm_clock(device)
        size, self.host_calls = (TINY_BUFFER, TINY_HOST_CALLS) if tiny else (BUFFER, HOST_CALLS)
        self.source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
        self.target = torch.zeros_like(self.source)

    def copy(self) -> tuple[Tensor]:
        """The copy whose speed is the ceiling."""
        return (self.target.copy_(self.source),)

    @property
    def copy_bytes(self) -> int:
        """Bytes read and written by one copy."""
        return 2 * self.source.nbytes

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(
        self, calls: Mapping[str, Call], rounds: int, *, burst: bool = True, host: bool = False, step: bool = False
    ) -> Rounds:
        """Times each call in each of ``rounds`` rounds, one after the other within the round.

        Args:
            host: seconds that the host spends on a call, the device's queue short; sustained only.
            step: seconds by the host's clock, from an idle device to an idle device, so that none gets ahead while
                another one's work is done.
        """
        found = Rounds()
        if not host:
            calls = {COPY: self.copy, **calls}  # first in each round: the host gets ahead
        least = LEAST_STEPS if step else 1
        counts = {name: self.host_calls if host else max(self._count(call), least) for name, call in calls.items()}
        for mode in MODES[: 1 if host or not burst else 2]:
            times: dict[str, list[float]] = {name: [] for name in calls}
            clocks: list[int | None] = []
            for _ in range(rounds):
                begun = {name: self._start(call, counts[name], mode, host, step) for name, call in calls.items()}
                clocks.append(self.clock())  # the device is at work still, where it is a GPU
                self.synchronize()
                for name, seconds in begun.items():
                    times[name].append(seconds())
            found.seconds[mode], found.clocks[mode] = times, clocks
        return found

    def _start(self, call: Call, count: int, mode: Mode, host: bool, step: bool) -> Callable[[], float]:
        """Launches one contender's part of a round; the result gives seconds a call, after synchronizing."""
        if mode == "burst":
            self._cool()
            count = 1
        if host or step or self.device.type != "cuda":
            return self._by_clock(call, count, step)
        return self._by_events(call, count)

    def _cool(self) -> None:
        self.synchronize()
        if self.device.type == "cuda":
            time.sleep(PAUSE)
        for _ in range(FLUSHES):
            self.target.fill_(1)

    def _by_clock(self, call: Call, count: int, wait: bool) -> Callable[[], float]:
        self.synchronize()
        with no_garbage_collection():  # as timeit: whoever runs when it is due would be billed for it
            begin = time.perf_counter()
            for _ in range(count):
                call()
            if wait:
                self.synchronize()
            taken = (time.perf_counter() - begin) / count
        return lambda: taken

    def _by_events(self, call: Call, count: int) -> Callable[[], float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with no_garbage_collection():  # as timeit: whoever runs when it is due would be billed for it
            begin.record()
            for _ in range(count):
                call()
            end.record()
        return lambda: begin.elapsed_time(end) / 1000 / count

    def _count(self, call: Call) -> int:
        """Calls that take about :data:`SUSTAINED` together."""
        self.synchronize()
        begin = time.perf_counter()
        call()
        self.synchronize()
        return min(max(round(SUSTAINED / (time.perf_counter() - begin)), 1), MOST_CALLS)


def sm_clock(device: torch.device) -> Callable[[], int | None]:
    """Reads the clock of the SMs in MHz, from the driver's library; None where there is none."""
    if device.type != "cuda":
        return lambda: None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return lambda: None
    handle, megahertz = ctypes.c_void_p(), ctypes.c_uint()
    name = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)):
        return lambda: None

    def read() -> int | None:
        sm = 1  # NVML_CLOCK_SM
        return None if nvml.nvmlDeviceGetClockInfo(handle, sm, ctypes.byref(megahertz)) else megahertz.value

    return read
