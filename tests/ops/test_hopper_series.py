"""The loop of ``hopper_device.sums_of_series``, which no interpreter runs: its Python, with stand-ins for hardware."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from minifloat.ops.grouped import hopper, hopper_device

STAGES = hopper.STAGES


class Scale(NamedTuple):
    """Of a step, or of none."""

    step: int | None

    def __mul__(self, other: Any) -> Any:
        assert self == other
        return self

    def __getitem__(self, place: Any) -> Any:
        return self


class Warpgroup:
    """Its products in flight, and the steps that it has waited for, issued, added and released, each in order."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.flying: list[int] = []
        self.arrived = self.issued = self.added = self.released = 0

    def wait(self, barrier: int, phase: int, pred: bool = True) -> None:
        if pred:
            place = self.first + self.arrived
            assert (barrier, phase) == (place % STAGES, place // STAGES % 2)
            self.arrived += 1

    def begun(self, part: int, a_tiles: Any, b_tiles: Any, stage: int) -> int:
        assert self.issued < self.arrived and stage == (self.first + self.issued) % STAGES
        self.flying.append(self.issued)
        self.issued += 1
        return self.flying[-1]

    def complete(self, left: int, deps: tuple[Any, ...]) -> Any:
        self.flying = self.flying[-left:] if left else []
        return deps[0]

    def fma(self, product: int, scale: Scale, total: int) -> int:
        assert product == scale.step == total == self.added and product not in self.flying
        self.added += 1
        return self.added

    def arrive(self, barrier: int, count: int = 1, pred: bool = True) -> None:
        if pred:
            assert barrier == (self.first + self.released) % STAGES
            assert self.released < self.issued and self.released not in self.flying
            self.released += 1


def zeros(*shape: Any) -> int:
    return 0


def following(stage: int, phase: int, stages: int) -> tuple[int, int]:
    return (stage + 1) % stages, phase ^ (stage == stages - 1)


@pytest.mark.parametrize("clear", [False, True])
def test_each_step_is_waited_for_added_and_released_once_and_in_order(clear: bool) -> None:
    """For any number of steps, from any stage: none is read before it has come, nor released before it was read."""
    cleared: list[int] = []
    for series in (hopper.SERIES, 4):
        for steps in range(3 * series + 2):
            for first in range(2 * STAGES):
                group, barriers = Warpgroup(first), SimpleNamespace(index=lambda stage: stage)
                stand_ins = {
                    "gl": SimpleNamespace(zeros=zeros, float32=None, static_range=range, fma=group.fma, maximum=max),
                    "mbarrier": SimpleNamespace(wait=group.wait, arrive=group.arrive),
                    "hopper": SimpleNamespace(warpgroup_mma_wait=group.complete),
                    "begun": group.begun,
                    "loaded": lambda k, steps, *at: (Scale(k if k < steps else None),) * 2,
                    "following": following,
                    "clear_after": lambda x, y, rest, depth: cleared.append(rest),
                    "range": range, "_HALF": 64, "_BN": 128, "_BK": 128, "_SUMS": None,
                }  # fmt: skip
                run = FunctionType(hopper_device.sums_of_series.fn.__code__, stand_ins)
                rest = 48 if clear else 128
                cleared.clear()
                total, stage, phase = run(
                    0, first % STAGES, first // STAGES % 2, steps, (steps - 1) * 128 + rest, barriers, barriers,
                    barriers, barriers, 0, 0, 0, 0, False, clear, series, STAGES,
                )  # fmt: skip
                assert total == group.arrived == group.issued == group.added == group.released == steps
                end = first + steps
                assert (stage, phase) == (end % STAGES, end // STAGES % 2)
                assert cleared == [48] * (clear and steps > 0)
