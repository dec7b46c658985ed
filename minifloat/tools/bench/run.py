"""One row after the other: build, gate, measure the memory, time what passed."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from minifloat.tools.bench.measure import Rounds, Timer
from minifloat.tools.bench.registry import Call, Case, Contender, Measure, Roofline, Row, UnavailableError

Status = Literal["ok", "wrong", "failed", "unavailable", "skipped"]
WARM_UP = 6  # calls before the gate: delayed scaling needs some to find its scales, and compilers to compile


@dataclass(frozen=True)
class Options:
    """Options of a run; ``quick`` leaves out bursts and what is compiled."""

    rounds: int = 20
    quick: bool = False
    tiny: bool = False


@dataclass
class Entry:
    """Result of one contender: ``error`` against its bound, ``peak`` bytes of memory with all that it holds."""

    name: str
    status: Status
    message: str = ""
    error: float | None = None
    bound: float = 0.0
    peak: int | None = None
    roofline: Roofline | None = None
    goals: Mapping[Measure, float] = field(default_factory=dict)


@dataclass
class Result:
    """A row's entries and rounds; contenders that did not pass have no times. ``case`` is without its contenders."""

    suite: str
    row: str
    case: Case
    entries: list[Entry] = field(default_factory=list)
    rounds: Rounds = field(default_factory=Rounds)
    copy_bytes: int = 0

    @property
    def baseline(self) -> str | None:
        """The fastest of the baselines that were timed."""
        times = self.rounds.seconds.get("sustained", {})
        candidates = [name for name in self.case.baselines if name in times]
        return min(candidates, key=lambda name: statistics.median(times[name])) if candidates else None

    @property
    def problems(self) -> list[str]:
        """Contenders that are wrong or broke down."""
        bad = [entry for entry in self.entries if entry.status in ("wrong", "failed")]
        return [f"{self.suite}: {self.row}: {entry.name}: {entry.message}" for entry in bad]


def run(
    rows: Sequence[Row], device: torch.device, options: Options, done: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Measures all rows; ``done`` sees each result as soon as it is there."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)  # events and the peers' modules go to the current one
    timer = Timer(device, tiny=options.tiny)
    results = []
    for row in rows:
        results.append(run_row(row, timer, options))
        done(results[-1])
        # Nothing of a row stays on the device, nor compiled code, of which PyTorch keeps eight shapes at most.
        torch.compiler.reset()
        _empty(device)
    return results


def run_row(row: Row, timer: Timer, options: Options) -> Result:
    """Gates and times the contenders of one row."""
    case = row.build(timer.device, options.tiny)
    result = Result(row.suite, row.name, replace(case, contenders=()), copy_bytes=timer.copy_bytes)
    calls: dict[str, Call] = {}
    for contender in case.contenders:
        goals = {} if options.tiny else dict(contender.goals)  # set for the whole shapes on a GPU
        entry = Entry(contender.name, "ok", bound=contender.bound, roofline=contender.roofline, goals=goals)
        result.entries.append(entry)
        call = prepare(contender, entry, timer.device, options)
        if call is not None:
            calls[contender.name] = call
        if entry.peak is not None:
            entry.peak += case.shared_bytes
    if calls:
        result.rounds = timer.run(
            calls, options.rounds, burst=case.burst and not options.quick, host=case.host, step=case.step
        )
    return result


def prepare(contender: Contender, entry: Entry, device: torch.device, options: Options) -> Call | None:
    """Sets a contender up and lets it through the gate, which ``entry`` notes; gives the call if it may be timed."""
    if contender.compiled and options.quick:
        entry.status, entry.message = "skipped", "--quick compiles nothing"
        return None
    before = _allocated(device)
    try:
        call = contender.setup()
        call()
        peak = peak_memory(lambda: [call() for _ in range(WARM_UP - 1)], device)
        entry.error = contender.error([output.detach() for output in call()])
    except UnavailableError as lacking:
        entry.status, entry.message = "unavailable", str(lacking)
        return None
    except Exception as raised:  # whatever a peer or a kernel throws: the others are measured all the same
        entry.status, entry.message = "failed", f"{type(raised).__name__}: {_first_line(raised)}"
        return None
    entry.peak = None if peak is None else peak - before
    if not entry.error <= contender.bound:
        entry.status, entry.message = "wrong", f"WRONG (error {entry.error:.2g}, bound {contender.bound:.2g})"
        return None
    return call


def peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes allocated on the device at the peak of a call, all tensors that are there counted; None off GPUs.

    A CUDA graph allocates where it is captured, and nothing in replays.
    """
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated(device)


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
