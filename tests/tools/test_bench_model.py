"""Suite ``model`` of the benchmark: what contenders share, what they are checked for, and how a step is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat.graphs import capture
from minifloat.tools.bench import model, registry, run
from minifloat.tools.bench.measure import Timer
from minifloat.tools.bench.model import MODELS, RECIPES, STEPS, Made, Step, Training
from tests.helpers.graph_on_cpu import GraphOnCpu

CPU = torch.device("cpu")
NAMES = list(MODELS)


class Captured(GraphOnCpu):
    ran = True  # what is captured here has trained a step


@pytest.fixture(scope="module", params=NAMES)
def training(request: pytest.FixtureRequest) -> Training:
    return Training(MODELS[request.param].tiny(), CPU)


def checked(training: Training, made: Made, wrong: Callable[[nn.Module], None] = lambda module: None) -> float:
    """The error of that model, after ``wrong`` has changed it."""
    training.reset()
    step = Step(training, made)
    wrong(made.module)
    return training.error([step() for _ in range(STEPS)][-1])


def test_all_train_the_same_parameters_from_the_same_start(training: Training) -> None:
    for made in (training.torch_model(), training.our_model("current", "eager")):
        training.reset()
        step = Step(training, made)
        places = [each.data_ptr() for each in made.module.parameters()]
        assert places == [each.data_ptr() for each in training.weights]
        assert float(step()[0]) == pytest.approx(training.first, rel=1e-3)
    assert training.first > training.last + 0.01  # something is learned that an error can be of


@pytest.mark.parametrize("name", NAMES)
def test_delayed_scaling_is_checked_when_it_has_its_scales(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Gradients of a mean over thousands of tokens are zero in E5M2 before, one linear behind the other."""
    forward = model.LanguageModel.forward

    def of_many(self: model.LanguageModel, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = forward(self, tokens, targets)
        return loss.detach() + 1e-5 * (loss - loss.detach())

    monkeypatch.setattr(model.LanguageModel, "forward", of_many)
    training = Training(MODELS[name].tiny(), CPU)
    assert checked(training, training.our_model("delayed", "eager")) < model.BOUNDS["delayed"] / 4


def spoil(factor: float, which: Callable[[str], bool]) -> Callable[[nn.Module], None]:
    """Makes gradients of parameters wrong."""

    def apply(module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if which(name):
                parameter.register_hook(lambda gradient: gradient * factor)

    return apply


@pytest.mark.parametrize(
    "wrong",
    [
        spoil(2.0, lambda name: True),  # which AdamW does not notice, nor the loss
        spoil(0.0, lambda name: "embedding" not in name),
        spoil(-1.0, lambda name: "fc1" in name or "qkv" in name),
        spoil(float("nan"), lambda name: name.endswith("proj.weight")),
    ],
)
def test_a_wrong_step_has_no_speed(wrong: Callable[[nn.Module], None]) -> None:
    training = Training(MODELS[NAMES[0]].tiny(), CPU)
    assert checked(training, training.our_model("block", "eager")) < model.BOUNDS["block"] / 4
    assert not checked(training, training.our_model("block", "eager"), wrong) <= model.BOUNDS["block"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_is_the_eager_one(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(capture, "Graph", Captured)
    (row,) = registry.choose(["model"], "model: gpt-2")
    case = row.build(CPU, True)
    errors = []
    for way in ("", ", captured"):
        (one,) = (each for each in case.contenders if each.name == f"minifloat {recipe}{way}")
        entry = run.Entry(one.name, "ok")
        call = run.prepare(one, entry, CPU, run.Options(tiny=True))
        assert call is not None and entry.status == "ok", entry.message
        errors.append(entry.error)
    assert errors[0] == errors[1]
    assert [len(call()) for _ in range(3)] == [2] * 3  # replayed


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_steps_on_a_gpu(name: str) -> None:
    """Captured ones too, whose peak is that of their capture."""
    (row,) = registry.choose(["model"], f"model: {name}")
    device = torch.device("cuda", 0)
    result = run.run_row(row, Timer(device, tiny=True), run.Options(rounds=1, tiny=True, quick=True))
    assert result.problems == []
    peaks: dict[str, Any] = {entry.name: entry.peak for entry in result.entries if entry.status == "ok"}
    for recipe in RECIPES:
        eager, captured = (peaks[f"minifloat {recipe}{way}"] for way in ("", ", captured"))
        assert captured > 0.8 * eager > 0
