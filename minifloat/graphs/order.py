"""The order in which the graphs of one memory pool are captured, and have to be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Step(NamedTuple):
    """The forward or the backward of one microbatch through one module."""

    module: int
    microbatch: int
    forward: bool


def steps_of(order: Sequence[int] | None, modules: int) -> list[Step]:
    """The steps of an ``_order`` as :func:`make_graphed_callables` takes it; None: all forwards, then all backwards.

    Raises:
        ValueError: a number names no module, a backward comes before its forward, or modules differ in microbatches.
    """
    if order is None:
        order = [*range(1, modules + 1), *range(-modules, 0)]
    counts = [[0, 0] for _ in range(modules)]
    steps = []
    for place, number in enumerate(order):
        if not 1 <= abs(number) <= modules:
            raise ValueError(
                f"_order: {number} at {place} names none of {modules} modules; forwards are 1 to {modules}, backwards "
                f"-1 to {-modules}"
            )
        done = counts[abs(number) - 1]
        if number < 0 and done[1] == done[0]:
            raise ValueError(f"_order: {number} at {place} is a backward before its forward; give each one after it")
        steps.append(Step(abs(number) - 1, done[number < 0], number > 0))
        done[number < 0] += 1
    backwards = any(number < 0 for number in order)
    if any(done != [counts[0][0], counts[0][0] * backwards] or not done[0] for done in counts):
        raise ValueError(
            f"_order has {[done[0] for done in counts]} forwards and {[done[1] for done in counts]} backwards of the "
            "modules; each needs as many of both, one for each microbatch"
        )
    return steps


class Progress:
    """Which graph of a pool ran last. Memory that one graph has freed belongs to those that were captured after it."""

    def __init__(self) -> None:
        self.latest = -1
        self.round = 0

    def forward(self, place: int) -> int:
        """A forward runs; returns the round that it is part of: one that comes a second time begins another."""
        if place <= self.latest:
            self.round += 1
        self.latest = place
        return self.round

    def backward(self, place: int, round_: int, label: str) -> None:
        """A backward runs, of a forward of ``round_``.

        Raises:
            RuntimeError: what the forward saved has been overwritten.
        """
        if round_ != self.round or place <= self.latest:
            raise RuntimeError(
                f"{label}: another graph has run since this backward's forward, or this backward before, and what it "
                "reads is overwritten; run forwards and backwards in the order of their capture, with an _order that "
                "gives each microbatch in flight graphs of its own"
            )
        self.latest = place
