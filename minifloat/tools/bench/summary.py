"""Summary of the rounds: medians, ratios, fractions of the roofline, goals met or missed, and all of it as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from minifloat.tools.bench.measure import COPY, Mode
from minifloat.tools.bench.registry import AT_LEAST, Measure
from minifloat.tools.bench.run import Entry, Result


class Verdict(NamedTuple):
    """One goal of one contender."""

    measure: Measure
    value: float | None
    goal: float

    @property
    def met(self) -> bool:
        """Whether the goal is met; one that was not measured is not."""
        if self.value is None:
            return False
        return self.value >= self.goal if self.measure in AT_LEAST else self.value <= self.goal


def seconds(result: Result, name: str, mode: Mode = "sustained") -> float | None:
    """The median over the rounds of one call; None if it was not timed."""
    times = result.rounds.seconds.get(mode, {}).get(name)
    return None if times is None else statistics.median(times)


def ratio(result: Result, name: str, mode: Mode = "sustained") -> float | None:
    """Speed relative to the baseline: the median of the ratios of the rounds."""
    times = result.rounds.seconds.get(mode, {})
    if result.baseline is None or name not in times:
        return None
    pairs = zip(times[result.baseline], times[name], strict=True)
    return statistics.median(base / own for base, own in pairs)


def fraction(result: Result, entry: Entry, mode: Mode = "sustained") -> float | None:
    """Roofline time over measured time, the median over the rounds."""
    times, roofline = result.rounds.seconds.get(mode, {}), entry.roofline
    if roofline is None or entry.name not in times or COPY not in times:
        return None
    own = times[entry.name]
    if roofline.products is not None and roofline.products not in times:
        return None
    products = times[roofline.products] if roofline.products is not None else [0.0] * len(own)
    moved = [copy * roofline.bytes / result.copy_bytes for copy in times[COPY]]
    return statistics.median((p + m) / o for p, m, o in zip(products, moved, own, strict=True))


def rate(result: Result, entry: Entry, mode: Mode = "sustained") -> tuple[float, str] | None:
    """TFLOP/s, or GB/s of the bytes that must move where nothing is multiplied."""
    time = seconds(result, entry.name, mode)
    if time is None:
        return None
    if result.case.flops:
        return result.case.flops / time / 1e12, "TFLOP/s"
    return None if entry.roofline is None else (entry.roofline.bytes / time / 1e9, "GB/s")


def copy_rate(result: Result, mode: Mode = "sustained") -> float | None:
    """GB/s, read and written, of the copy that took part in the rounds."""
    time = seconds(result, COPY, mode)
    return None if time is None else result.copy_bytes / time / 1e9


def memory(result: Result, entry: Entry) -> float | None:
    """Peak memory as a multiple of the case's memory baseline."""
    peaks = {each.name: each.peak for each in result.entries}
    base = peaks.get(result.case.memory_baseline or "")
    return None if not base or entry.peak is None else entry.peak / base


def verdicts(result: Result, entry: Entry) -> list[Verdict]:
    """The contender's goals, on sustained figures."""
    values: dict[Measure, float | None] = {
        "ratio": ratio(result, entry.name),
        "roofline": fraction(result, entry),
        "memory": memory(result, entry),
    }
    return [Verdict(measure, values[measure], goal) for measure, goal in entry.goals.items()]


def mean_ratios(results: Sequence[Result], suite: str) -> dict[str, float]:
    """Geometric means over a suite's rows of the ratios of contenders that were timed in all of them."""
    rows = [result for result in results if result.suite == suite]
    names = [entry.name for entry in rows[0].entries] if len(rows) > 1 else []
    found = {name: [ratio(result, name) for result in rows] for name in names}
    return {
        name: math.exp(statistics.fmean(math.log(value) for value in values if value is not None))
        for name, values in found.items()
        if None not in values
    }


def as_dict(result: Result) -> dict[str, Any]:
    """All of a row: what was concluded, and every round."""
    case, timed = result.case, result.rounds
    return {
        "suite": result.suite,
        "row": result.row,
        "flops": case.flops,
        "axis": case.axis,
        "baseline": result.baseline,
        "times_are": "of the host" if case.host else "of whole steps" if case.step else "of the device",
        "copy_bytes": result.copy_bytes,
        "copy_gb_per_s": {mode: copy_rate(result, mode) for mode in timed.seconds},
        "sm_clock_mhz": timed.clocks,
        "contenders": [_entry(result, entry) for entry in result.entries],
        "copy_seconds": {mode: times[COPY] for mode, times in timed.seconds.items() if COPY in times},
    }


def _entry(result: Result, entry: Entry) -> dict[str, Any]:
    speed = rate(result, entry)
    modes = [mode for mode, times in result.rounds.seconds.items() if entry.name in times]
    return {
        "name": entry.name,
        "status": entry.status,
        "message": entry.message,
        "error": entry.error if entry.error is None or math.isfinite(entry.error) else str(entry.error),
        "bound": entry.bound,
        "peak_bytes": entry.peak,
        "rate": None if speed is None else {"value": speed[0], "unit": speed[1]},
        "roofline": None if entry.roofline is None else entry.roofline._asdict(),
        "goals": [verdict._asdict() | {"met": verdict.met} for verdict in verdicts(result, entry)],
        "median_seconds": {mode: seconds(result, entry.name, mode) for mode in modes},
        "ratio": {mode: ratio(result, entry.name, mode) for mode in modes},
        "roofline_fraction": {mode: fraction(result, entry, mode) for mode in modes},
        "round_seconds": {mode: result.rounds.seconds[mode][entry.name] for mode in modes},
    }
