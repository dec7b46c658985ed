"""`minifloat train --tp N`: the training of one process on several ranks, and checkpoints that fit any number."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from minifloat.tools.cli.ranks import check_started
from minifloat.tools.train.checkpoint import latest
from minifloat.tools.train.data import Batches
from tests.helpers.distributed_pool import Pools
from tests.helpers.micro_training import MICRO, write_texts
from tests.helpers.train_on_ranks import CONFIG, close, command, of_torchrun, run

ODD = 63  # tokens in a sequence: with two of them each of two ranks has 63 rows, which no block length divides
EXACT = replace(CONFIG, dtype=torch.float32)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_in_fp32_it_is_the_training_of_one_process(worker_pool: Pools, sequence_parallel: bool) -> None:
    alone = run(0, 1, None, EXACT, context=ODD)
    first, second = worker_pool(2).run(run, None, EXACT, 2, sequence_parallel, None, ODD)
    assert first.count == second.count == alone.count
    assert torch.equal(first.numbers, second.numbers)
    close(first, alone, 1e-4, 3e-3)


@pytest.mark.parametrize(
    "recipe", ["delayed", "mxfp8", *[pytest.param(name, marks=pytest.mark.slow) for name in ("current", "block")]]
)
def test_losses_with_and_without_sequence_parallelism(worker_pool: Pools, recipe: str) -> None:
    check_losses(worker_pool, recipe, 0.02)


@pytest.mark.slow
def test_losses_in_four_bits(worker_pool: Pools) -> None:
    check_losses(worker_pool, "nvfp4", 0.05)


def check_losses(worker_pool: Pools, recipe: str, most: float) -> None:
    """Shards of weights are quantized by themselves, and random bits differ: that shows in four bits."""
    alone = run(0, 1, recipe, context=ODD)
    for sequence_parallel in (True, False):
        first, second = worker_pool(2).run(run, recipe, CONFIG, 2, sequence_parallel, None, ODD)
        assert torch.equal(first.numbers, second.numbers)  # all ranks see the same losses and norms
        torch.testing.assert_close(torch.tensor(first.losses), torch.tensor(alone.losses), rtol=most, atol=0)


def test_a_checkpoint_of_two_ranks_is_that_of_one(worker_pool: Pools, tmp_path: Path) -> None:
    first, _ = worker_pool(2).run(run, None, EXACT, 2, True, tmp_path / "two", ODD)
    saved = latest(tmp_path / "two")
    assert saved is not None
    for name, parameter in saved.model_state().items():
        assert torch.equal(parameter, first.parameters[name]), name
    start = tmp_path / "one"
    start.mkdir()
    (tmp_path / "two" / "step-00000002").rename(start / "step-00000002")
    close(run(0, 1, None, EXACT, folder=start, context=ODD), first, 1e-4, 3e-3)  # goes on from step 2, on one rank


# ---- the command ----

# `micro`, with heads for two ranks, in two processes that torchrun starts
COMMAND = """
from minifloat.tools.cli import main
from tests.helpers import train_on_ranks
train_on_ranks.MODELS["micro"] = train_on_ranks.SIZES
main()
"""


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [*started, "-c", COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def micro_options(folder: Path, steps: int) -> tuple[object, ...]:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    return ("train", write_texts(texts), "--model", "micro", "--batch-size", 2, "--steps", steps, "--device", "cpu")


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = torchrun(*micro_options(tmp_path, 2), "--tp", 2, "--recipe", "block", "--out", out, "--check-ranks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("block: validation loss") == 1, "the first rank alone talks"
    assert "2, which share each linear; split by tokens elsewhere" in (out / "report.md").read_text()


def die_at_the_third_step() -> None:
    draw, drawn = Batches.__next__, count(1)

    def die(self: Batches) -> tuple[torch.Tensor, torch.Tensor]:
        if next(drawn) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(self)

    Batches.__next__ = die  # type: ignore[method-assign]


def test_a_rank_that_dies_ends_the_command(tmp_path: Path) -> None:
    """The other one by itself, with gloo; with NCCL torchrun ends it."""
    out = tmp_path / "out"
    options = (*micro_options(tmp_path, 50), "--tp", 2, "--out", out)
    with command(tmp_path / "ranks", 2, *options, hook=die_at_the_third_step) as started:
        for process in started.processes:
            process.join(60)
        assert started.processes[1].exitcode == -signal.SIGKILL and started.processes[0].exitcode not in (0, None)
    assert (out / "metrics.jsonl").read_text().count("\n") == 2  # it had begun
    assert not (out / "report.md").exists()


def test_a_resumed_command_with_a_failed_check(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = (*micro_options(tmp_path, 2), "--tp", 2, "--out", out)
    with command(tmp_path / "first", 2, *options) as first:
        assert first.wait() == [0, 0], first.said()
    with command(tmp_path / "second", 2, *options, "--resume", "--against", "bf16", "--max-gap", 1e-9) as second:
        assert second.wait() == [1, 1]
    errors = second.said(0)[1] + second.said(1)[1]
    assert errors.count("FAILED: current: the final validation loss") == 1  # said once
    assert "barrier" not in errors  # no rank waits for another
    assert "torchrun --nproc-per-node 2" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    "started, tp, fsdp, message",
    [
        (
            2,
            4,
            False,
            "--tp is 4, but torchrun has started 2; give --tp 2, or --fsdp or --etp to share the batch, or start 4 ",
        ),
        (
            4,
            1,
            False,
            "--tp is 1, but torchrun has started 4; give --tp 4, or --fsdp or --etp to share the batch, or start 1 ",
        ),
        (1, 2, False, "start 2 with: torchrun --nproc-per-node 2 --no-python minifloat train --tp 2 ..."),
        (4, 3, True, "--tp is 3, but torchrun has started 4; start a multiple of 3, or start 3 with"),
        (4, 0, True, "--tp is 0"),
        (0, 1, True, "start N with: torchrun --nproc-per-node N --no-python minifloat train --fsdp ..."),
    ],
)
def test_other_processes_than_the_options_say(
    monkeypatch: pytest.MonkeyPatch, started: int, tp: int, fsdp: bool, message: str
) -> None:
    for name, value in (of_torchrun(0, started) if started else {}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_started(tp, fsdp)


def test_a_context_that_ranks_cannot_split_is_a_users_mistake(tmp_path: Path) -> None:
    """No traceback, on no rank."""
    short = ("--context", 1, "--tp", 2, "--out", tmp_path / "out")
    with command(tmp_path / "ranks", 2, *micro_options(tmp_path, 2), *short) as refused:
        for rank, process in enumerate(refused.processes):
            process.join(60)
            said = refused.said(rank)[1]
            assert process.exitcode == 2 and "error: 1 tokens in a sequence are too few" in said
            assert "Traceback" not in said


def test_heads_that_ranks_cannot_share_are_a_users_mistake() -> None:
    with pytest.raises(ValueError, match=r"2 query and 1 key/value heads .* 2 ranks; choose a --tp that divides 1"):
        MICRO.check_ranks(2)
