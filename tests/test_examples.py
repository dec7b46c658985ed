"""The examples run, and what they print is true."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.distributed_pool import Pools, torchrun_environment

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TINY = "--hidden 32 --layers 1 --context 16 --batch 2 --steps 11"


def main_of(name: str) -> Callable[..., Any]:
    """The main function of an example."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_say_how_to_run_them(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 130
    assert f"examples/{path.name}" in text.split('"""')[1]


def test_train_llama(capsys: pytest.CaptureFixture[str]) -> None:
    losses = main_of("train_llama")(TINY.split())
    assert len(losses) == 11 and losses[-1] < losses[0] - 0.1
    first, second, last = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"step     0  loss {losses[0]:.3f}", f"step    10  loss {losses[10]:.3f}")
    assert 3 < float(last.split()[2]) < losses[0]


def test_huggingface_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    options = f"--hidden 32 --context 16 --steps 4 --out {tmp_path}"
    (loss,), written = main_of("huggingface_trainer")(options.split())
    assert 5 < loss < 6 and written.startswith("import ")
    assert "converted 14 of 15 linear layers" in capsys.readouterr().out


def test_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    losses, same = main_of("lora")(f"--hidden 32 --steps 4 --out {tmp_path}".split())
    assert losses[-1] < losses[0] - 0.1 and same
    assert f"step   3  loss {losses[3]:.3f}" in capsys.readouterr().out


def run_fsdp2(rank: int, world_size: int, folder: str) -> tuple[list[float], bool]:
    with torchrun_environment(rank, world_size):
        losses, same = main_of("fsdp2")([*TINY.split(), "--out", folder])
    return losses, same


def environment_of_rank(rank: int, world_size: int) -> str | None:
    return os.environ.get("RANK")


def test_fsdp2(tmp_path: Path, worker_pool: Pools) -> None:
    (losses, same), other = worker_pool(2).run(run_fsdp2, str(tmp_path))
    assert (losses, same) == other
    assert losses[-1] < losses[0] - 0.1 and same
    assert worker_pool(2).run(environment_of_rank) == [None, None]


@pytest.mark.slow
def test_fsdp2_by_torchrun(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(ROOT / "examples/fsdp2.py"), *TINY.split(), "--out", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "6 weights are gathered as codes" and lines[-1].endswith("the same next loss: True")
