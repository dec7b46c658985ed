"""``benchmarks/steps.py``: the steps of a plan are timed where they run, and the library is left as it was."""

from __future__ import annotations

import torch

from benchmarks import steps


def test_steps() -> None:
    scaled_mm = torch._scaled_mm
    found = steps.time_steps("current", (4, 8, 8), "cpu", 3)
    assert torch._scaled_mm is scaled_mm
    inside = {path: count for path, (count, _) in found.items()}
    for direction, step in (("forward", "quantize_inputs"), ("forward", "fprop"), ("backward", "dgrad")):
        assert inside[direction, step] == 1
    assert inside["backward", "accumulate_dw", "wgrad"] == 1 and ("forward", "wgrad") not in inside
    spent = {path: seconds for path, (_, seconds) in found.items()}
    assert 0 < spent["forward", "fprop"] < spent["forward",]
    assert 0 < spent["backward", "accumulate_dw", "wgrad"] < spent["backward", "accumulate_dw"] < spent["backward",]


def test_pytorchs_linear_has_no_steps() -> None:
    assert set(steps.time_steps("torch", (4, 8, 8), "cpu", 2)) == {("forward",), ("backward",)}
