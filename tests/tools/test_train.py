"""The main job: the text, the model, the loop, the checks and the command."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat import Linear
from minifloat.functional import Gemm
from minifloat.ops import matmul
from minifloat.recipe import NAMES, named
from minifloat.tools.cli import output
from minifloat.tools.cli.names import MAX_GAP, MAX_GRADIENT_GAP
from minifloat.tools.cli.output import LOCK, claimed
from minifloat.tools.train import data, report
from minifloat.tools.train.loop import Metrics, Run, TrainConfig, train
from tests.helpers.micro_training import CPU, MICRO, invoke, micro_model, write_texts
from tests.helpers.sample import each_once

EXPECTED = {"fprop": ("e4m3", "e4m3"), "dgrad": ("e5m2", "e4m3"), "wgrad": ("e5m2", "e4m3")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Text with a structure that a micro model learns in a few steps, in two files, beside files to be skipped."""
    write_texts(tmp_path)
    (tmp_path / "image.bin").write_bytes(b"\x89\0\0\0" * 100)
    for skipped in (".git", "__pycache__", "tests"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "c.txt").write_text("skipped")
    return tmp_path


@pytest.fixture
def corpus(folder: Path) -> data.Corpus:
    return data.load([folder], least=MICRO.context + 1)


def micro_run(corpus: data.Corpus, recipe: str | None = None, steps: int = 12, device: torch.device = CPU) -> Run:
    config = TrainConfig(steps, batch_size=4, learning_rate=1e-2, seed=2, evaluations=3, evaluation_batches=2)
    return train(recipe or "bf16", micro_model(recipe, seed=2), MICRO.context, corpus, config, device)


def made_run(name: str, norms: list[float], validation: float, gemms: Counter[Gemm] | None = None) -> Run:
    steps = [Metrics(i + 1, 5.5 - i, norm, 1e-3, 0.1, 100.0) for i, norm in enumerate(norms)]
    steps[-1] = replace(steps[-1], validation_loss=validation)
    return Run(name, tuple(steps), gemms or Counter(), 3 * report.MIB, 1000)


# Text


def test_load_is_sorted_and_skips_binaries_and_hidden_folders(folder: Path) -> None:
    corpus = data.load([folder], least=1)
    again = data.load([folder], least=1)
    assert torch.equal(corpus.train, again.train) and torch.equal(corpus.validation, again.validation)
    assert bytes(corpus.train[:10].tolist()) == b"def double"  # a.txt comes first, however the disk lists them
    sizes = [(folder / name).stat().st_size for name in ("a.txt", "b.txt")]
    assert len(corpus.train) + len(corpus.validation) == sum(sizes) + 1


def test_split_is_disjoint_and_whole() -> None:
    text = bytes(range(256)) * 1000
    train_text, held_out = data.split(torch.tensor(list(text), dtype=torch.uint8))
    chunk = len(text) // data.HELD_OUT_EVERY
    assert bytes(held_out.tolist()) == text[-chunk:]
    assert bytes(train_text.tolist()) == text[:-chunk]
    long = torch.zeros(data.CHUNK * 20 + 100, dtype=torch.uint8)
    long[data.CHUNK * 19 : data.CHUNK * 20] = 1
    long_train, long_held_out = data.split(long)
    assert long_held_out.unique().tolist() == [1] and long_train.unique().tolist() == [0]
    assert (len(long_train), len(long_held_out)) == (data.CHUNK * 19 + 100, data.CHUNK)


def test_batches_repeat_with_the_seed_and_targets_follow_inputs() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first, again, other = (data.Batches(text, 8, 16, seed) for seed in (1, 1, 2))
    for _ in range(3):
        inputs, targets = next(first)
        assert torch.equal(inputs, next(again)[0])
        assert not torch.equal(inputs, next(other)[0])
        assert torch.equal(inputs + 1, targets) and inputs.shape == (8, 16) and inputs.dtype == torch.int64


def test_text_errors_name_the_number_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a folder; check its spelling"):
        data.load([tmp_path / "missing"], least=1)
    with pytest.raises(ValueError, match=r"0 files.*name files"):
        data.load([tmp_path], least=1)
    (tmp_path / "short.txt").write_text("x" * 100)
    with pytest.raises(ValueError, match=r"100 bytes .* 95 .* 5 .* needs 65 .* shorter context"):
        data.load([tmp_path], least=65)


# Model


def test_all_linears_but_the_head_are_minifloats() -> None:
    made = [name for name, module in micro_model().named_modules() if isinstance(module, Linear)]
    assert len(made) == MICRO.linears and "head" not in made


def test_logits_are_causal(device: torch.device) -> None:
    model = micro_model().to(device)
    text = torch.randint(256, (2, MICRO.context), device=device)
    changed = text.clone()
    changed[:, 40] = (text[:, 40] + 1) % 256
    logits, other = model(text), model(changed)
    assert logits.shape == (2, MICRO.context, 256)
    assert torch.equal(logits[:, :40], other[:, :40])
    assert (logits[:, 40:] != other[:, 40:]).any(-1).all()


def test_a_shorter_sequence_runs_and_a_longer_one_is_refused() -> None:
    model = micro_model()
    assert model(torch.zeros(1, 7, dtype=torch.int64)).shape == (1, 7, 256)
    with pytest.raises(ValueError, match="65 tokens in a sequence exceed the model's context of 64"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_twins_start_equal_and_the_seed_decides() -> None:
    plain, quantized, other = micro_model(), micro_model("current"), micro_model(seed=1)
    for (name, a), (_, b) in zip(plain.named_parameters(), quantized.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(plain.embedding.weight, other.embedding.weight)


# Loop


@pytest.mark.parametrize("recipe", [None, "current"])
def test_training_lowers_the_loss_and_repeats(corpus: data.Corpus, recipe: str | None) -> None:
    first, again = (micro_run(corpus, recipe) for _ in range(2))
    assert [m.loss for m in first.history] == [m.loss for m in again.history]
    assert first.validation_loss == again.validation_loss
    assert first.history[-1].loss < first.history[0].loss - 1
    assert [m.step for m in first.history if m.validation_loss is not None] == [4, 8, 12]


@pytest.mark.gpu
def test_training_on_a_gpu(corpus: data.Corpus) -> None:
    run = micro_run(corpus, "current", device=torch.device("cuda"))
    assert run.history[-1].loss < run.history[0].loss - 1 and run.peak_bytes


# Checks


def counts(**changed: Counter[Gemm]) -> Counter[Gemm]:
    right = {gemm: Counter({Gemm(gemm, a, b, "reference"): 6}) for gemm, (a, b) in EXPECTED.items()}
    return sum((right | changed).values(), Counter())


def test_gemm_check_accepts_what_the_recipe_promises() -> None:
    assert report.check_gemms("current", counts(), EXPECTED, each=6) == []
    mixed = Counter({Gemm("fprop", "e4m3", "e4m3", "native"): 4, Gemm("fprop", "e4m3", "e4m3", "reference"): 2})
    assert report.check_gemms("current", counts(fprop=mixed), EXPECTED, each=6) == []


@pytest.mark.parametrize(
    "wgrad, message",
    [
        (Counter({Gemm("wgrad", "bfloat16", "bfloat16", "torch"): 6}), "6 wgrad GEMMs ran as bfloat16 x bfloat16"),
        (Counter({Gemm("wgrad", "e4m3", "e4m3", "reference"): 6}), "6 wgrad GEMMs ran as e4m3 x e4m3"),
        (Counter(), "0 wgrad GEMMs ran as e5m2 x e4m3 instead of 6"),
        (Counter({Gemm("wgrad", "e5m2", "e4m3", "reference"): 5}), "5 wgrad GEMMs ran as e5m2 x e4m3 instead of 6"),
    ],
)
def test_gemm_check_names_what_ran_otherwise(wgrad: Counter[Gemm], message: str) -> None:
    problems = report.check_gemms("current", counts(wgrad=wgrad), EXPECTED, each=6)
    assert any(message in problem for problem in problems) and all("wgrad" in problem for problem in problems)


def test_report_has_every_field() -> None:
    runs = [made_run("current", [1.0, 1.0], 2.2, counts()), made_run("bf16", [1.0, 1.0], 2.0)]
    text = report.render(runs, {"device": "cpu"}, 3.25, report.compare(*runs), ["current: 6 wgrad GEMMs ran as x"])
    for part in (
        "FAILED",
        "- device: cpu",
        "loss.png",
        "| current | 5.5000 | 4.5000 | 2.2000 | 100 | 3 MiB |",
        "Unigram entropy of the held-out text: 3.2500",
        "+0.2000 nats/byte (+10.00%)",
        "| current | dgrad | e5m2 | e4m3 | reference | 6 |",
    ):
        assert part in text, part
    assert "**passed**" in report.render(runs[1:], {}, 3.25, None, [])


def test_figure_has_the_losses_and_the_gap() -> None:
    runs = [made_run("current", [1.0, 1.0], 2.2), made_run("bf16", [1.0, 1.0], 2.0)]
    losses, gap = report.figure(runs, 3.25, "current and bf16, micro, 2026-11-27").axes
    assert losses.get_title().startswith("current and bf16, micro, 2026-11-27\n")
    trained, marked, _ = (line.get_xydata().tolist() for line in gap.lines)
    assert trained == [[1, 0], [2, 0]] and marked == [[2, pytest.approx(10)]]
    assert [line.get_ydata()[-1] for line in losses.lines] == [4.5, 2.2, 4.5, 2.0, 3.25]
    assert len(report.figure(runs[:1], 3.25, "current").axes) == 1


# Command


def micro_command(folder: Path, out: Path, *more: object) -> tuple[int, str]:
    fixed = ("--model", "micro", "--steps", 20, "--batch-size", 4, "--seed", 3, "--device", "cpu", "--against", "bf16")
    return invoke("train", folder, "--out", out, *fixed, *more)


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=[pytest.mark.slow] * (name != "current")) for name in NAMES]
)
def test_train_command(folder: Path, tmp_path: Path, recipe: str) -> None:
    out = tmp_path / "out"
    code, output = micro_command(folder, out, "--recipe", recipe)
    assert code == 0, output
    assert f"validation loss of {recipe} - bf16 = " in output and "unigram entropy" in output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["run"], line["step"]) for line in lines] == [(r, s) for r in (recipe, "bf16") for s in range(1, 21)]
    assert all(math.isfinite(line["loss"]) and line["tokens_per_second"] > 0 for line in lines)
    assert lines[-1]["validation_loss"] < lines[-21 + 2]["loss"]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    text = (out / "report.md").read_text()
    assert "**passed**" in text and f"| {recipe} | wgrad |" in text and "| bf16 | fprop |" in text


def test_command_says_at_once_what_it_does_and_then_how_far_it_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no terminal shows bars; the estimate counts both runs."""
    monkeypatch.setattr(output, "EVERY", 0.0)
    code, said = micro_command(folder, tmp_path / "out")
    first, second, third, *lines = said.splitlines()
    assert code == 0 and first == "minifloat train: current and then bf16, model micro, 20 steps"
    assert re.fullmatch(r"41,120 parameters, on cpu: .*; text: .*", second) and third == f"results: {tmp_path / 'out'}"
    assert len([line for line in lines if re.fullmatch(r"about \d:\d\d to go, for 40 steps in all", line)]) == 1
    status = r"loss \d\.\d{3} lr \d\.\de-\d\d norm \d+\.\d\d [\d,]+ bytes/s \d+\.\d\d GiB"
    step = rf"(\w+): step (\d+) of 20, {status}(?:, \d:\d\d to go)?"
    told = [found.groups() for line in lines if (found := re.fullmatch(step, line))]
    assert told == [(run, str(each)) for run in ("current", "bf16") for each in range(1, 21)]


def test_time_left_is_that_of_the_steps_to_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs to step 20, the first resumed after step 12; the first step takes a minute, the others 4 seconds."""
    now = 0.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    left = {"a": 8, "b": 20}
    clock, said = output.Clock(28), []
    for name in left:
        for step in range(1, 21):
            now += (60.0 if (name, step) == ("a", 13) else 4.0) if step > 20 - left[name] else 0.0
            said += clock.lines(name, Metrics(step, 1.0, 1.0, 1.0, 1.0, 1.0), 20, left, "STATUS", False)
    assert said[:4] == [
        "a: step 13 of 20, STATUS",  # what is left is not known yet
        "about 1:36 to go, for 28 steps in all",
        "a: step 16 of 20, STATUS, 1:36 to go",
        "a: step 19 of 20, STATUS, 1:24 to go",
    ]
    assert said[-1] == "b: step 20 of 20, STATUS, 0:00 to go" and len(said) == 1 + 1 + 9


# which scale argument of which GEMM belongs to a tensor: 2 is operand a's, 9 is operand b's
SCALE_ARGUMENTS = {
    "input": {"fprop": 1, "wgrad": 5},
    "weight": {"fprop": 5, "dgrad": 5},
    "grad_output": {"dgrad": 1, "wgrad": 1},
}


def break_scale(monkeypatch: pytest.MonkeyPatch, tensor: str, factor: float) -> None:
    """Multiplies one tensor's dequantization scale by `factor` in every GEMM that reads it."""
    multiply = matmul.Product.run

    def broken(self: matmul.Product, *args: Any) -> torch.Tensor:
        arguments = list(args)
        if self.gemm in SCALE_ARGUMENTS[tensor]:
            arguments[SCALE_ARGUMENTS[tensor][self.gemm]] = arguments[SCALE_ARGUMENTS[tensor][self.gemm]] * factor
        return multiply(self, *arguments)

    monkeypatch.setattr(matmul.Product, "run", broken)


@each_once
@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("tensor", list(SCALE_ARGUMENTS))
def test_any_scale_off_by_two_fails_the_loss_check(
    corpus: data.Corpus, monkeypatch: pytest.MonkeyPatch, tensor: str, factor: float
) -> None:
    twin, right = micro_run(corpus), micro_run(corpus, "current")
    break_scale(monkeypatch, tensor, factor)
    wrong = micro_run(corpus, "current")
    assert report.check_loss("current", report.compare(right, twin), MAX_GAP, MAX_GRADIENT_GAP) == []
    assert report.check_loss("current", report.compare(wrong, twin), MAX_GAP, MAX_GRADIENT_GAP) != []


def test_a_scale_off_by_two_fails_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_scale(monkeypatch, "weight", 2.0)
    code, output = micro_command(folder, tmp_path / "out")
    assert code == 1 and "FAILED: current: the" in output
    assert "**FAILED**" in (tmp_path / "out" / "report.md").read_text()


def test_a_gemm_that_ran_unquantized_fails_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = type(named("current"))
    monkeypatch.setattr(recipe, "expected_gemms", lambda _: EXPECTED | {"wgrad": ("mxfp8", "mxfp8")})
    code, output = micro_command(folder, tmp_path / "out", "--recipe", "current")
    assert code == 1 and "wgrad GEMMs ran as" in output


def test_a_folder_of_another_process_is_refused_until_that_one_dies(folder: Path, tmp_path: Path) -> None:
    """SIGKILL gives the folder back, though a child of the killed process goes on."""
    out = tmp_path / "out"
    code = (
        "import subprocess, sys, time; from pathlib import Path; from minifloat.tools.cli.output import claimed\n"
        "with claimed(Path(sys.argv[1])):\n"
        "    print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            status, output = micro_command(folder, out)
            assert status == 2 and f"another process trains in {out} (pid {other.pid}); wait for its end" in output
            assert [path.name for path in out.iterdir()] == [LOCK]
            other.kill()
            other.wait()
            with claimed(out):
                os.kill(child, 0)  # it is there
        finally:
            other.kill()
            os.kill(child, signal.SIGKILL)
