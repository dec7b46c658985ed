"""Checkpoints of `minifloat train`: a run that was stopped, or killed, goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat.recipe import NAMES
from minifloat.tools.cli.resume import last_recipe, resume_command
from minifloat.tools.train import checkpoint_writer, loop
from minifloat.tools.train.checkpoint import Checkpoint, CheckpointError, complete, latest, locate
from minifloat.tools.train.loop import Interrupted, Metrics, NonFiniteError, Run
from minifloat.tools.train.state import TrainState, own_random_numbers, read_history
from tests.helpers.children import children
from tests.helpers.micro_training import (
    invoke,
    losses,
    micro_model,
    train_and_save,
    train_in_child,
    write_texts,
)

STEPS = 5
HAVE_STATE = ("delayed", "nvfp4")  # histories, and random numbers


class Counted:
    """Answers true from its `count`-th call on."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, *_: Any) -> bool:
        self.left -= 1
        return self.left <= 0


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Resuming


@pytest.mark.parametrize(
    "recipe",
    ["bf16", "delayed", "nvfp4", *[pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n not in HAVE_STATE]],
)
def test_a_stopped_run_goes_on_bitwise(tmp_path: Path, recipe: str) -> None:
    chosen = None if recipe == "bf16" else recipe
    whole = train_and_save(tmp_path / "whole", chosen, STEPS, every=None)
    with pytest.raises(Interrupted, match=r"stopped after step 2, saved in .*step-00000002"):
        train_and_save(tmp_path / "parts", chosen, STEPS, every=None, stop=Counted(2))
    seen: list[Metrics] = []
    torch.randn(3)  # what the generators of the process hold does not matter
    continued = train_and_save(tmp_path / "parts", chosen, STEPS, every=3, observe=seen.append)
    assert losses(continued) == losses(whole)
    assert continued.gemms == whole.gemms and tuple(seen) == continued.history
    ends = [locate(tmp_path / part) for part in ("whole", "parts")]
    expected, reached = ({**end.model_state(), **end.training_state()} for end in ends)
    assert set(expected) == set(reached) and "random/cpu" in expected
    for name in set(expected) - {"history"}:  # which has the times
        assert torch.equal(reached[name], expected[name]), name


def test_a_run_that_is_finished_is_read_back(tmp_path: Path) -> None:
    whole = train_and_save(tmp_path, "current", STEPS)
    again = train_and_save(tmp_path, "current", STEPS)
    assert again.history == whole.history and again.gemms == whole.gemms


@pytest.mark.gpu
def test_a_stopped_run_goes_on_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.micro_training.CPU", torch.device("cuda"))
    whole = train_and_save(tmp_path / "whole", "nvfp4", STEPS)
    with pytest.raises(Interrupted):
        train_and_save(tmp_path / "parts", "nvfp4", STEPS, stop=Counted(2))
    continued = train_and_save(tmp_path / "parts", "nvfp4", STEPS)
    assert [m.loss for m in continued.history] == pytest.approx([m.loss for m in whole.history], rel=1e-2)


def test_all_random_numbers_of_a_run_come_from_its_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = train_and_save(tmp_path / "a", "nvfp4", 2)
    torch.manual_seed(2)
    assert losses(train_and_save(tmp_path / "b", "nvfp4", 2)) == losses(first)
    before = torch.get_rng_state()
    with own_random_numbers(5, torch.device("cpu")):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


# Numbers that are not finite


def overflow_at(step: int) -> Callable[..., torch.Tensor | None]:
    """A forward hook for a module that runs once a step in training: its output of that step gets an infinity."""
    done = Counted(step)

    def hook(module: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not (module.training and done()):
            return None
        output = output.clone()
        output[3, ..., 5] = math.inf
        return output

    return hook


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_layer_that_overflows_is_named_and_the_state_before_it_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    whole = train_and_save(tmp_path / "whole", recipe, STEPS, every=None)
    broken = micro_model(recipe)
    broken.blocks[0].self_attention.proj.register_forward_hook(overflow_at(3))
    monkeypatch.setattr("tests.helpers.micro_training.micro_model", lambda _: broken)
    message = rf"{recipe}: step 3 has loss nan .*output of blocks.0.self_attention.proj is .*step 2 is saved in"
    with pytest.raises(NonFiniteError, match=message):
        train_and_save(tmp_path / "broken", recipe, STEPS, every=None)
    monkeypatch.undo()
    assert losses(train_and_save(tmp_path / "broken", recipe, STEPS, every=None)) == losses(whole)


def test_parameters_that_are_not_finite_are_named_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = micro_model()
    monkeypatch.setattr("tests.helpers.micro_training.micro_model", lambda _: broken)

    def poison(metrics: Metrics) -> None:
        if metrics.step == 2:
            torch.nn.init.constant_(broken.blocks[0].layernorm_mlp.fc2.weight, math.nan)

    message = r"step 3 .*output of blocks.0.layernorm_mlp.fc2 is the first .* finite, for its weight is not; nothing is"
    with pytest.raises(NonFiniteError, match=message):
        train_and_save(tmp_path, None, 4, every=None, observe=poison)
    assert not list(tmp_path.iterdir())


# The command


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    (tmp_path / "text").mkdir()
    write_texts(tmp_path / "text")
    options = "--model micro --steps 6 --batch-size 1 --device cpu --recipe current --against bf16 --max-gap inf"
    return ["train", tmp_path / "text", *options.split(), "--max-gradient-gap", "inf"]


def written(out: Path) -> list[tuple[Any, ...]]:
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["run"], r["step"], r["loss"], r["gradient_norm"], r["validation_loss"]) for r in records]


def signal_at(number: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the signal in the middle of that training step, over all runs."""
    step, now = loop.train_step, Counted(steps)

    def interrupted(*arguments: Any) -> Any:
        if now() and now.left == 0:
            signal.raise_signal(number)
        return step(*arguments)

    monkeypatch.setattr(loop, "train_step", interrupted)


@pytest.mark.parametrize("number, steps, at", [(signal.SIGINT, 3, "current"), (signal.SIGTERM, 9, "bf16")])
def test_a_signal_saves_and_resume_goes_on(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, steps: int, at: str
) -> None:
    assert invoke(*command, "--out", tmp_path / "whole")[0] == 0
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    signal_at(number, steps, monkeypatch)
    code, output = invoke(*command, "--out", tmp_path / "parts")
    monkeypatch.undo()
    assert code == 128 + number and f"{at}: stopped after step 3" in output, output
    assert f"--out {tmp_path / 'parts'} --resume" in output
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    code, output = invoke(*command, "--out", tmp_path / "parts", "--resume")
    assert code == 0, output
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    assert f"{at} continued from: step 3" in (tmp_path / "parts" / "report.md").read_text()


def test_a_run_with_a_finish_is_extended(command: list[object], tmp_path: Path) -> None:
    """The last fifth of a 4-bit run has no recipe; the fifth of the shorter run counts as none of the longer one's."""
    arguments = *command, "--recipe", "nvfp4", "--out", tmp_path / "run"
    for options in (("--steps", 5), ("--steps", 10, "--resume")):
        code, output = invoke(*arguments, *options)
        assert code == 0, output
        saved = latest(tmp_path / "run/checkpoints/nvfp4")
        assert saved is not None and last_recipe(saved) == "bf16"
    report = (tmp_path / "run/report.md").read_text()
    assert "finish=0.2" in report and "nvfp4 continued from: step 5" in report
    assert last_recipe(replace(saved, step=8)) == "nvfp4"  # of the longer run


def test_resume_from_another_folder(command: list[object], tmp_path: Path) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert invoke(*command, "--out", first, "--save-every", 2, "--keep", 5)[0] == 0
    saved = first / "checkpoints" / "bf16" / "step-00000004"
    code, output = invoke(*command, "--out", second, "--resume-from", saved)
    assert code == 0 and written(second) == written(first), output
    assert files_of(second / "checkpoints") == ["bf16"]  # current was finished, and stays where it is
    code, output = invoke(*command, "--out", third, "--resume-from", first)
    assert code == 0 and written(third) == written(first), output


def test_mistakes_of_resuming_end_with_a_message(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    for arguments, message in (
        (("--out", out, "--resume"), "has no complete checkpoint of current or bf16"),
        (("--resume",), "has checkpoints to continue from; name one with --out"),
        (("--resume", "--resume-from", out), "give one of them"),
        (("--resume-from", tmp_path / "text"), "it has no readable checkpoint.json"),
    ):
        code, output = invoke(*command, *arguments)
        assert code == 2 and message in output.replace("\n", " "), output
    assert invoke(*command, "--out", out)[0] == 0
    for arguments, message in (
        (("--out", out), "is of an earlier training"),
        (("--out", out, "--recipe", "delayed"), "would overwrite those of current; choose another --out"),
        (("--out", out, "--recipe", "delayed", "--resume"), "would overwrite those of current; choose another --out"),
        (("--out", out, "--resume", "--steps", 3), "is of step 6, beyond --steps 3; choose at least 6"),
        (("--out", out, "--resume", "--model", "tiny"), "--model dim=32"),
        (("--resume-from", out, "--layers", 1), "has the weights of a model with --model {'dim': 32"),
        (("--resume-from", out, "--recipe", "mxfp8", "--against", "block"), "has several runs; choose"),
    ):
        code, output = invoke(*command, *arguments)
        assert code == 2 and message in output.replace("\n", " "), output


def test_a_run_begins_anew_in_no_folder_of_damaged_checkpoints(tmp_path: Path) -> None:
    """It would write the same steps again."""
    (tmp_path / "text").mkdir()
    options = "--model micro --steps 3 --batch-size 1 --device cpu --recipe bf16 --save-every 1 --keep 9 --out"
    short = ["train", write_texts(tmp_path / "text"), *options.split(), tmp_path / "out"]
    assert invoke(*short)[0] == 0
    folder = tmp_path / "out" / "checkpoints" / "bf16"
    saved = sorted(folder.iterdir())
    for path in saved:
        (path / "model.safetensors").write_bytes(b"")
    code, output = invoke(*short)
    assert code == 2 and "step-00000003 is of an earlier training; continue from it with --resume, move" in output
    assert sorted(folder.iterdir()) == saved
    for path in saved:
        path.rename(path.with_name(f"damaged-{path.name}"))
    code, output = invoke(*short)
    assert code == 2 and "damaged-step-00000003 is of an earlier training" in output
    code, output = invoke(*short, "--resume")
    assert code == 2 and "has no complete checkpoint of bf16" in output and len(files_of(folder)) == 3


def test_a_second_interrupt_does_not_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save would take a minute; the next one finds what it left."""
    ended = threading.Event()
    sync = checkpoint_writer._sync

    def slow(path: Path) -> None:
        assert ended.wait(60)
        sync(path)

    def press(metrics: Metrics) -> None:
        if metrics.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_writer, "_sync", slow)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        train_and_save(tmp_path, None, 4, every=2, observe=press)
    seconds, waiting = time.monotonic() - begin, [t for t in threading.enumerate() if t.name == "save-2"]
    ended.set()
    for thread in waiting:
        thread.join()
    assert seconds < 30 and len(waiting) == 1 and waiting[0].daemon


def test_a_resume_that_fails_takes_nothing_away(
    command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the run that does not load nor of the one before it."""
    out = tmp_path / "out"
    assert invoke(*command, "--out", out, "--tensorboard")[0] == 0
    history, events = written(out), {path.stat().st_size for path in (out / "tensorboard").rglob("events*")}
    load = TrainState.load

    def fail(self: TrainState, checkpoint: Checkpoint) -> None:
        if checkpoint.settings["recipe"] == "bf16":
            raise CheckpointError("damaged since it was chosen")
        load(self, checkpoint)

    monkeypatch.setattr(TrainState, "load", fail)
    code, output = invoke(*command, "--out", out, "--tensorboard", "--resume")
    assert code == 1 and "FAILED: damaged since it was chosen" in output
    assert sorted(written(out)) == sorted(history)
    assert {path.stat().st_size for path in (out / "tensorboard").rglob("events*")} == events
    monkeypatch.undo()
    assert invoke(*command, "--out", out, "--resume")[0] == 0 and written(out) == history


def test_resume_command_starts_what_was_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    module = f"{sys.executable} -m minifloat"
    for started, again in (("/lib/minifloat/__main__.py", module), ("bin/minifloat", tmp_path / "bin/minifloat")):
        monkeypatch.setattr(sys, "argv", [started, "train"])
        assert resume_command(["train"], Path("/o")) == f"{again} train --out /o --resume"


def test_tensorboard_has_the_whole_history(command: list[object], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    assert invoke(*command, "--out", out, "--tensorboard")[0] == 0
    assert invoke(*command, "--out", out, "--tensorboard", "--resume")[0] == 0  # finished: written again, not twice
    events = EventAccumulator(str(out / "tensorboard" / "current"))
    events.Reload()
    expected = [loss for run, _, loss, *_ in written(out) if run == "current"]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(expected)
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 7))
    assert [event.step for event in events.Scalars("validation_loss")] == list(range(1, 7))


# Processes that die


def saves_begun(folder: Path) -> set[str]:
    """The saves that are being written, or that a process did not finish."""
    return {path.name for path in folder.glob(".step-*.partial")}


def wait_for(path: Path, process: Any) -> None:
    """Returns when there is such a path, or the process has ended."""
    while process.is_alive() and not path.exists():
        time.sleep(0.001)


def kill_at_random_moments(folder: Path, recipe: str, moments: int) -> None:
    """Every other kill hits a save; after each one the newest checkpoint is that of an uninterrupted run."""
    torch.set_num_threads(1)
    choose, steps, inside, reached = random.Random(0), 6 * moments, 0, [0]
    expected = losses(train_and_save(folder / "whole", recipe, steps, every=None))
    out = folder / "killed"
    for moment in range(moments):
        before = saves_begun(out)  # a leftover is of the next step, or of one before the newest
        process = children().Process(target=train_in_child, args=(out, recipe, steps, moment == 0))
        process.start()
        if moment == 0:  # a save that takes seconds: this one is surely hit
            wait_for(out / ".step-00000002.partial", process)
        elif moment % 2:
            wait_for(out / f"step-{reached[-1] + 1:08}", process)
            time.sleep(choose.uniform(0.0, 0.3))
        else:
            wait_for(out / f".step-{reached[-1] + choose.randint(2, 3):08}.partial", process)
            time.sleep(choose.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        inside += bool(saves_begun(out) - before)
        newest = latest(out)
        assert len(complete(out)) == len(list(out.glob("step-*")))  # what has a checkpoint's name is complete
        if newest is not None:
            history = read_history(newest.training_state()["history"])
            assert [(m.loss, m.gradient_norm, m.validation_loss) for m in history] == expected[: newest.step]
            assert set(newest.model_state()) == set(micro_model(recipe).state_dict())
        reached.append(0 if newest is None else newest.step)
    print(f"{inside} of {moments} kills inside a save; steps reached {reached[1:]} of {steps}")
    assert inside > 0 and reached == sorted(reached) and reached[-1] > 0, (inside, reached)
    finished: Run = train_and_save(out, recipe, steps, every=None)
    assert losses(finished) == expected


def test_a_killed_run_goes_on_bitwise(tmp_path: Path) -> None:
    kill_at_random_moments(tmp_path, "delayed", 3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_run_killed_twenty_times_goes_on_bitwise(tmp_path: Path, recipe: str) -> None:
    kill_at_random_moments(tmp_path, recipe, 20)
