"""Noise of a study: how far apart its controls end, and what it takes to resolve a gap of a given size.

In exact arithmetic a control is bf16, so the gaps of the controls are noise alone, with a mean of zero; those of a
recipe that does no harm have the same spread. The floor is their root mean square. Its interval is that of chi-square
with one degree of freedom a seed: the controls of a seed share its bf16 run, so they count as one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from minifloat.tools.train.study_statistics import CONFIDENCE, inverse, student_t

POWER = 0.8
MOST_SEEDS = 500


@dataclass(frozen=True)
class Noise:
    """The relative gaps of the controls to bf16 of the same seed.

    Args:
        gaps: at the end of the runs, of all controls and seeds.
        seeds: how many.
        by_step: root mean square of the gaps, by evaluated step.
    """

    gaps: tuple[float, ...]
    seeds: int
    by_step: Mapping[int, float]

    @property
    def floor(self) -> float:
        """Root mean square."""
        return root_mean_square(self.gaps)

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of the floor, 95 %, on both sides."""
        tail = (1 - CONFIDENCE) / 2
        low, high = (math.sqrt(self.seeds / chi_square(self.seeds, p)) for p in (1 - tail, tail))
        return low * self.floor, high * self.floor

    def reached(self, resolution: float) -> int | None:
        """The first evaluated step from which on the floor is at most ``resolution``."""
        first = None
        for step, floor in sorted(self.by_step.items()):
            first = None if floor > resolution else step if first is None else first
        return first

    def describe(self, resolution: float) -> list[str]:
        """Sentences for the report and the terminal."""
        low, high = self.interval
        largest = max(map(abs, self.gaps))
        steps = max(self.by_step)
        lines = [
            f"noise floor: after {steps} steps the controls are {self.floor:.3%} from bf16 (root mean square of "
            f"{len(self.gaps)} runs of {self.seeds} seeds, {CONFIDENCE:.0%} interval {low:.3%} to {high:.3%}; the "
            f"largest {largest:.3%})",
            "noise floor by step: " + ", ".join(f"{step}: {floor:.3%}" for step, floor in self.by_step.items()),
        ]
        step = self.reached(resolution)
        when = f"from step {step} on" if step is not None else f"at no evaluated step up to {steps}"
        lines.append(f"it is at most {resolution:.2%} {when}")
        for spread, what in ((self.floor, "this spread"), (high, "the upper end of its interval")):
            wide, sure = seeds_for(spread, resolution), seeds_for(spread, resolution, POWER)
            lines.append(
                f"with {what} an interval of +-{resolution:.2%} takes {_count(wide)} of so many steps, and finding a "
                f"gap of {resolution:.2%} with {POWER:.0%} probability {_count(sure)}"
            )
        if half_width(self.floor, self.seeds) > resolution:
            lines.append(
                f"these {self.seeds} seeds cannot tell {resolution:.2%}: their interval would be "
                f"+-{half_width(self.floor, self.seeds):.3%}"
            )
        return lines


def noise_of(by_step: Mapping[int, Sequence[float]], seeds: int) -> Noise:
    """Computes the noise from the controls' gaps by evaluated step, all runs at each."""
    floors = {step: root_mean_square(gaps) for step, gaps in by_step.items()}
    return Noise(tuple(by_step[max(by_step)]), seeds, floors)


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def half_width(spread: float, seeds: int, power: float | None = None) -> float:
    """Half the width of the 95 % interval of a mean over seeds; with ``power`` the gap found with that probability."""
    if seeds < 2:
        return math.inf
    t = student_t(seeds - 1) + (0.0 if power is None else student_t(seeds - 1, 2 * power - 1))
    return t * spread / math.sqrt(seeds)


def seeds_for(spread: float, resolution: float, power: float | None = None) -> int | None:
    """The fewest seeds whose :func:`half_width` is at most ``resolution``; None where so many are hopeless."""
    seeds = bisect_left(range(MOST_SEEDS + 1), True, key=lambda n: half_width(spread, n, power) <= resolution)
    return seeds if seeds <= MOST_SEEDS else None


def chi_square(freedom: int, probability: float) -> float:
    """The value below which chi-square is with this probability."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)

    def below(x: float) -> float:
        return float(torch.special.gammainc(half, half.new_tensor(x / 2)))

    return inverse(below, probability, freedom + 20 * math.sqrt(2 * freedom) + 20)


def _count(seeds: int | None) -> str:
    return f"more than {MOST_SEEDS:,} seeds" if seeds is None else f"{seeds} seeds"
