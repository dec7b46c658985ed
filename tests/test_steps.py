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


def test_pytorchs_linear_has_no_steps() -> None:
    assert set(steps.time_steps("torch", (4, 8, 8), "cpu", 2)) == {("forward",), ("backward",)}


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


@pytest.mark.parametrize("wait", [False, True])
def test_waits(wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each call, or once before those that are timed; in no step."""
    waits: list[str] = []
    monkeypatch.setattr(steps, "synchronize", waits.append)
    found = steps.time_steps("torch", (4, 8, 8), "cpu", 3, wait=wait)
    assert waits == ["cpu"] * (24 if wait else 1) and set(found) == {("forward",), ("backward",)}


def test_the_command_says_what_ran(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[dict[str, Any]] = []

    def recorded(*_: Any, **options: Any) -> dict[tuple[str, ...], list[float]]:
        given.append(options)
        return {("forward",): [1.0, 2.5]}

    monkeypatch.setattr(steps, "time_steps", recorded)
    arguments = ["torch", "--device", "cpu"]
    for more, told in (([], "cpu"), (["--calling-thread", "--no-wait"], "calling thread, no waits")):
        steps.main([*arguments, *more])
        first, second = capsys.readouterr().out.split("\n")[1:3]
        assert first.endswith(told) and second.split() == ["forward", "1.0", "calls", "2.5", "us"]
    assert given == [{"calling_thread": False, "wait": True}, {"calling_thread": True, "wait": False}]
