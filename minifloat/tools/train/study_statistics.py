"""Statistics of a study: how far its runs are from bf16, and whether that is too far.

The gap of a run is relative: its final validation loss over that of bf16 with the same seed, less one. Seeds are the
sample. An interval is Student's: mean +- t s / sqrt(n), with the standard deviation s of the n seeds and the quantile t
of n - 1 degrees of freedom that leaves 2.5 % on each side (4.303 for three seeds).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Interval:
    """A mean and how far its interval reaches to each side."""

    mean: float
    half: float

    @property
    def lower(self) -> float:
        return self.mean - self.half

    @property
    def upper(self) -> float:
        return self.mean + self.half


@dataclass(frozen=True)
class Outcome:
    """A recipe's or a control's gaps, one a seed; a recipe has a limit and is compared with the controls."""

    name: str
    gaps: tuple[float, ...]
    limit: float | None = None
    p_value: float | None = None  # see `p_value`
    smallest_p: float = 1.0  # that these seeds can give
    controls_upper: float | None = None  # the largest upper end of the controls' intervals of the absolute gap

    @property
    def absolute(self) -> Interval:
        return interval([abs(gap) for gap in self.gaps])

    @property
    def signed(self) -> Interval:
        return interval(self.gaps)

    @property
    def within(self) -> bool:
        """The upper end of the interval of the absolute gap is at most the limit."""
        return self.limit is not None and self.absolute.upper <= self.limit

    @property
    def indistinct(self) -> bool:
        """The controls are as far from bf16, as far as these seeds can tell; never, if they could not tell at all.

        The permutation test alone would excuse a gap of any size that is not the largest at every seed, so the mean
        must lie within the controls' intervals too.
        """
        return self.p_value is not None and self.smallest_p <= SIGNIFICANCE < self.p_value and self._as_controls

    @property
    def _as_controls(self) -> bool:
        return self.controls_upper is not None and self.absolute.mean <= self.controls_upper

    @property
    def passed(self) -> bool:
        return self.within or self.indistinct

    @property
    def problem(self) -> str | None:
        """Says what is wrong with a recipe that failed."""
        if self.limit is None or self.passed:
            return None
        controls = "of too few seeds for the controls"
        if self.smallest_p <= SIGNIFICANCE:
            upper = "" if self.controls_upper is None else f", upper end of their intervals {self.controls_upper:.3%}"
            controls = f"farther than the controls (p {self.p_value:.3f}{upper})"
        return (
            f"{self.name}: the mean absolute gap to bf16 is {self.absolute.mean:.3%}, {self.absolute.upper:.3%} at the "
            f"upper end of its interval, over the limit of {self.limit:.2%} and {controls}"
        )

    @property
    def verdict(self) -> str:
        """Says the result in words."""
        if self.limit is None:
            return "control"
        if self.within:
            return "passed: within the limit"
        return "passed: not distinguishable from the controls" if self.indistinct else "FAILED"


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that Student's distribution stays within, on both sides, with the probability ``confidence``.

    With t = sqrt(n) tan(a) that probability is the integral of cos^(n-1) from 0 to a over that from 0 to pi/2; the
    integral of a power of the cosine follows from the one two below it (by parts).
    """
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom have no t distribution; at least two seeds are needed")

    def integral(power: int, angle: float) -> float:
        if power < 2:
            return math.sin(angle) if power else angle
        step = math.cos(angle) ** (power - 1) * math.sin(angle)
        return (step + (power - 1) * integral(power - 2, angle)) / power

    wanted = confidence * integral(freedom - 1, math.pi / 2)
    return math.sqrt(freedom) * math.tan(inverse(lambda angle: integral(freedom - 1, angle), wanted, math.pi / 2))


def inverse(rising: Callable[[float], float], value: float, high: float) -> float:
    """Finds where, between 0 and ``high``, a rising function has a value."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return low


def interval(values: Sequence[float]) -> Interval:
    """The mean of at least two values with its 95 % interval."""
    half = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), half)


def p_value(gaps: Sequence[float], controls: Sequence[Sequence[float]]) -> float:
    """Probability of a mean absolute gap as large as that of ``gaps``, were they like the gaps of the controls.

    An exact permutation test. If the recipe did no more than another order of sums does, then at each seed its absolute
    gap and those of the controls could as well have come in any other order. So of all the ways to take one of them at
    each seed, (number of controls + 1) ^ seeds, it counts those whose mean is at least the recipe's. With two controls
    and three seeds the smallest is 1/27: the recipe is the farthest from bf16 at every seed.
    """
    choices = list(itertools.product(*zip(*([abs(gap) for gap in each] for each in (gaps, *controls)), strict=True)))
    own = math.fsum(abs(gap) for gap in gaps)
    return sum(math.fsum(choice) >= own for choice in choices) / len(choices)


def outcomes(
    losses: Mapping[str, Sequence[float]], baseline: str, controls: Sequence[str], limits: Mapping[str, float]
) -> list[Outcome]:
    """Controls first, then the recipes of ``limits``, from the losses of each run by seed."""

    def gaps(name: str) -> tuple[float, ...]:
        return tuple(loss / other - 1 for loss, other in zip(losses[name], losses[baseline], strict=True))

    compared = [gaps(name) for name in controls]
    smallest = (1 + len(controls)) ** -len(losses[baseline])
    found = [Outcome(name, gaps(name)) for name in controls]
    upper = max((control.absolute.upper for control in found), default=None)
    for name, limit in limits.items():
        found.append(Outcome(name, gaps(name), limit, p_value(gaps(name), compared), smallest, upper))
    return found
