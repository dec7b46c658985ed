"""Rows of the benchmark, fixed in tables, each with its contenders side by side.

A :class:`Row` is one line of a suite's table and knows how to build its :class:`Case`: random data and the
:class:`Contender`\\ s that compute the same thing from it. A contender is timed only after the outputs of the very call
that would be timed have passed its gate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Outputs = Sequence[Tensor]
Call = Callable[[], Outputs]

Measure = Literal["ratio", "roofline", "memory"]
"""Quantity of a goal: speed against the baseline (at least), fraction of the roofline (at least), peak memory against
the case's memory baseline (at most)."""

AT_LEAST: frozenset[Measure] = frozenset(("ratio", "roofline"))


class UnavailableError(Exception):
    """This machine lacks what the contender needs; its line stays in the report and says so."""


class Roofline(NamedTuple):
    """The shortest time: the products of another contender, measured beside it, and bytes at the speed of a copy."""

    bytes: float
    products: str | None = None


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    Args:
        name: in the report.
        setup: makes modules and operands, outside the timing, and returns the call that is timed.
        error: how wrong a call's outputs are.
        bound: the largest error with which a speed is reported; NaN never passes.
        roofline: what its time is compared with.
        goals: what it should reach, by measure.
        compiled: it goes through ``torch.compile``, which takes seconds.
    """

    name: str
    setup: Callable[[], Call]
    error: Callable[[Outputs], float]
    bound: float
    roofline: Roofline | None = None
    goals: Mapping[Measure, float] = field(default_factory=dict)
    compiled: bool = False


@dataclass(frozen=True)
class Case:
    """The contenders of a row on one device.

    Args:
        baselines: ratios are to the fastest of these.
        flops: of one call; 0 where speed is counted in bytes or time.
        axis: what a plot over this suite's rows has on its horizontal axis, such as ``("tokens", 8192)``.
        memory_baseline: whose peak memory others are compared with.
        shared_bytes: of the inputs, which belong to each contender's peak memory.
        host: the time of one call is what the host spends on it, not the device.
        step: the time of one call is the host's clock, which waits for the device before and after a few of them.
        burst: also measured cool: one call at a time, with pauses.
    """

    contenders: tuple[Contender, ...]
    baselines: tuple[str, ...] = ()
    flops: float = 0.0
    axis: tuple[str, float] | None = None
    memory_baseline: str | None = None
    shared_bytes: int = 0
    host: bool = False
    step: bool = False
    burst: bool = True


@dataclass(frozen=True)
class Row:
    """One line of a suite's table; ``build(device, tiny)`` makes its case, much smaller if ``tiny``."""

    suite: str
    name: str
    build: Callable[[torch.device, bool], Case]


SUITES = {
    "linear": "linear", "tokens": "linear", "shapes": "linear", "fused": "fused", "casts": "casts",
    "grouped": "grouped", "experts": "experts", "model": "model", "host": "host",
}  # fmt: skip
"""The module in which a suite's rows are, in the order of the report."""


def rows(suites: Sequence[str] = ()) -> list[Row]:
    """All rows of these suites (none: of all). No other suite is imported: it may need what an old revision lacks."""
    found = []
    for suite in suites or SUITES:
        table: tuple[Row, ...] = importlib.import_module(f"minifloat.tools.bench.{SUITES[suite]}").ROWS
        found += [row for row in table if row.suite == suite]
    return found


def choose(suites: Sequence[str] = (), only: str = "") -> list[Row]:
    """The rows of these suites (none: of all) whose ``suite: name`` contains ``only``, in upper or lower case.

    Raises:
        ValueError: there is no such suite, or no such row.
    """
    for suite in suites:
        if suite not in SUITES:
            raise ValueError(f"there is no suite {suite!r}; choose from {', '.join(SUITES)}")
    found = [row for row in rows(suites) if only.lower() in title(row).lower()]
    if not found:
        raise ValueError(
            f"--only {only!r} matches no row of {', '.join(suites or SUITES)}; give a part of 'suite: name'"
        )
    return found


def title(row: Row) -> str:
    """``suite: name``."""
    return f"{row.suite}: {row.name}"
