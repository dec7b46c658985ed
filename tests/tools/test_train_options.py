"""Options of `minifloat train` that change what a run is: its end, its start, its batches and its sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.tools.train.checkpoint import locate
from minifloat.tools.train.loop import TrainConfig
from minifloat.tools.train.model import MODELS, ModelConfig
from tests.helpers.micro_training import MICRO, invoke, micro_model, write_texts


@pytest.fixture
def options(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "texts").mkdir()
    fixed = "--model micro --device cpu --batch-size 1 --recipe bf16"
    return ("train", write_texts(tmp_path / "texts"), *fixed.split())


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_extended(options: tuple[object, ...], tmp_path: Path) -> None:
    """Its rates are from then on those of a run that was as long from the start."""
    out = tmp_path / "out"
    assert invoke(*options, "--steps", 4, "--out", out)[0] == 0
    first = written(out)
    code, said = invoke(*options, "--steps", 7, "--out", out, "--resume")
    assert code == 0, said
    after = written(out)
    assert after[:4] == first and [record["step"] for record in after] == list(range(1, 8))
    longer = TrainConfig(7, learning_rate=MICRO.learning_rate)
    assert [record["learning_rate"] for record in after[4:]] == [longer.rate(step) for step in (5, 6, 7)]
    assert after[-1]["validation_loss"] < first[-1]["validation_loss"]
    assert "continued from: step 4" in (out / "report.md").read_text() and locate(out).step == 7


def test_another_run_starts_from_weights(options: tuple[object, ...], tmp_path: Path) -> None:
    first, second, same = (tmp_path / name for name in ("first", "second", "same"))
    assert invoke(*options, "--steps", 2, "--out", first)[0] == 0
    other = (*options, "--steps", 2, "--learning-rate", 1e-9, "--seed", 5, "--accumulate", 2)
    code, said = invoke(*other, "--out", second, "--resume-from", first)
    assert code == 0 and f"another run, from the weights of {first}, which had --batch-size" not in said
    assert f"another run, from the weights of {first}, which had --learning-rate 0.012" in said
    before, after = locate(first).model_state(), locate(second).model_state()
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)
    assert [record["step"] for record in written(second)] == [1, 2]
    assert f"started from the weights of: {locate(first).path}" in (second / "report.md").read_text()
    code, said = invoke(*other, "--out", second, "--resume")  # the one run, not the other
    assert code == 0 and "another run" not in said
    code, said = invoke(*options, "--steps", 3, "--out", same, "--resume-from", first)
    assert code == 0 and "another run" not in said and written(same)[:2] == written(first)


def test_a_mixture_of_experts(options: tuple[object, ...], tmp_path: Path) -> None:
    """Trains, goes on, generates, and says how its choices are balanced."""
    out, own = tmp_path / "out", ("--experts", 4, "--top-k", 2, "--recipe", "current")
    code, said = invoke(*options, *own, "--steps", 2, "--out", out)
    assert code == 0, said
    assert locate(out).settings["model"] == replace(MICRO, experts=4, top_k=2).settings()
    assert all(1 <= record["imbalance"] <= 4 for record in written(out))
    report = (out / "report.md").read_text()
    assert "Experts of current: the busiest has" in report and "**passed**" in report
    code, said = invoke(*options, *own, "--steps", 4, "--out", out, "--resume")
    assert code == 0 and len(written(out)) == 4, said
    code, said = invoke("generate", out, "--tokens", 2, "--device", "cpu")
    assert code == 0, said


def test_a_bias_that_balances_experts(options: tuple[object, ...], tmp_path: Path) -> None:
    """Each step moves it, also of a run that goes on; what generates has it."""
    out, own = tmp_path / "out", ("--experts", 4, "--expert-bias-rate", 0.125, "--recipe", "current")
    for steps, more in ((2, ()), (3, ("--resume",))):
        code, said = invoke(*options, *own, "--steps", steps, "--out", out, *more)
        assert code == 0, said
        biases = [each for name, each in locate(out).model_state().items() if name.endswith("expert_bias")]
        moved = torch.stack(biases) / 0.125
        assert moved.shape == (MICRO.layers, 4) and moved.any() and moved.equal(moved.round())
        assert moved.abs().max() <= steps
    assert locate(out).settings["model"] == replace(MICRO, experts=4, expert_bias_rate=0.125).settings()
    code, said = invoke("generate", out, "--tokens", 2, "--device", "cpu")
    assert code == 0, said


@pytest.mark.parametrize(
    "sizes", [MICRO, MODELS["tiny"], ModelConfig(80, 3, 5, 1, 112, 16, vocabulary=300), replace(MICRO, experts=4)]
)
def test_parameters_are_counted_without_a_model(sizes: ModelConfig) -> None:
    with torch.device("meta"):
        model = sizes.make(None, 0) if sizes != MICRO else micro_model()
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_settings_of_a_billion_layers_are_refused(options: tuple[object, ...], tmp_path: Path) -> None:
    """Of a checkpoint, before anything of that size is made."""
    out = tmp_path / "out"
    assert invoke(*options, "--steps", 1, "--out", out)[0] == 0
    from dataclasses import replace

    from minifloat.tools.train.generate import load_model

    saved = locate(out)
    for change, message in (
        ({"layers": 10**9}, "--layers is 1000000000; choose a whole number from 1 to 10,000"),
        ({"layers": "2"}, "--layers is '2'; choose"),
        ({"layers": 9_000}, "does not fit its own settings: of 9000 layers it has no weights"),
        ({"depth": 1}, "does not say which model it is of"),
    ):
        hostile = replace(saved, settings={**saved.settings, "model": {**saved.settings["model"], **change}})
        with pytest.raises(ValueError, match=message):
            load_model(hostile, None, torch.device("cpu"))
