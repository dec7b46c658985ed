"""``benchmarks/steps.py``: the steps of a call are timed where they run, and the library is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import steps


def test_steps() -> None:
    scaled_mm = torch._scaled_mm
    found = steps.time_steps("current", (4, 8, 8), "cpu", 3)
    assert torch._scaled_mm is scaled_mm
    inside = {path: count for path, (count, _) in found.items()}
    for direction, step in (("forward", "quantize_inputs"), ("forward", "fprop"), ("backward", "dgrad")):
        assert inside[direction, step] == 1
    assert inside["backward", "accumulate", "wgrad"] == 1 and ("forward", "wgrad") not in inside
    spent = {path: seconds for path, (_, seconds) in found.items()}
    assert 0 < spent["forward", "fprop"] < spent["forward",]
    assert 0 < spent["backward", "accumulate", "wgrad"] < spent["backward", "accumulate"] < spent["backward",]


@pytest.mark.parametrize("recipe", ["torch", "current"])
@pytest.mark.parametrize("calling_thread", [False, True])
def test_the_thread_of_the_backward(recipe: str, calling_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is chosen for all calls, warm-up included; the setting is then as it was, also after an error."""
    seen: list[bool] = []
    backward = torch.Tensor.backward

    def watched(y: torch.Tensor, *args: Any) -> None:
        seen.append(torch.autograd.is_multithreading_enabled())
        if len(seen) > 23:
            raise KeyError("the second time")
        backward(y, *args)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    steps.time_steps(recipe, (4, 8, 8), "cpu", 3, calling_thread=calling_thread)
    assert seen == [not calling_thread] * 23 and torch.autograd.is_multithreading_enabled()
    with pytest.raises(KeyError):
        steps.time_steps(recipe, (4, 8, 8), "cpu", 3, calling_thread=calling_thread)
    assert torch.autograd.is_multithreading_enabled()
