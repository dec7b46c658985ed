"""`minifloat train --tp N`: the training of one process on several ranks, and checkpoints that fit any number."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifloat.distributed.group import Group
from minifloat.nn.linear import Linear
from minifloat.recipe import named
from minifloat.train.checkpoint import Checkpoints, latest
from minifloat.train.loop import TrainConfig, train
from minifloat.train.model import Transformer
from minifloat.train.ranks import ALONE, Ranks
from tests.conftest import Pools
from tests.micro_training import CPU, MICRO, micro_corpus, write_texts

ODD = 63  # tokens in a sequence: with two of them each of two ranks has 63 rows, which no block length divides
SIZES = replace(MICRO, heads=2, kv_heads=2)
CONFIG = TrainConfig(4, batch_size=2, learning_rate=1e-2, evaluations=2, evaluation_batches=1)


def run(
    rank: int,
    world_size: int,
    recipe: str | None,
    dtype: torch.dtype,
    sequence_parallel: bool,
    folder: Path | None = None,
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Losses and gradient norms of a training, its parameters as one process has them, and how many they are."""
    ranks = ALONE if world_size == 1 else Ranks(Group.of(dist.group.WORLD), sequence_parallel)

    def linear(*args: int, **kwargs: Any) -> Linear:
        return Linear(*args, bias=False, recipe=None if recipe is None else named(recipe), **kwargs)

    model = Transformer(SIZES, linear, seed=3, ranks=ranks)
    config = replace(CONFIG, dtype=dtype)
    checkpoints = None
    if folder is not None:
        checkpoints = Checkpoints(folder, {"of": "a test"}, 2, start=latest(folder))
    result = train("micro", model, ODD, micro_corpus(), config, CPU, checkpoints=checkpoints, ranks=ranks)
    numbers = [number for metrics in result.history for number in (metrics.loss, metrics.gradient_norm)]
    parameters = dict(model.named_parameters())
    whole = ranks.whole({name: p.detach() for name, p in parameters.items()}, parameters)
    return numbers, whole, result.parameters


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_in_fp32_it_is_the_training_of_one_process(worker_pool: Pools, sequence_parallel: bool) -> None:
    numbers, whole, count = run(0, 1, None, torch.float32, True)
    for others in worker_pool(2).run(run, None, torch.float32, sequence_parallel):
        assert others[2] == count
        torch.testing.assert_close(torch.tensor(others[0]), torch.tensor(numbers), rtol=1e-4, atol=0)
        for name, parameter in whole.items():
            torch.testing.assert_close(others[1][name], parameter, rtol=0, atol=3e-3, msg=name)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_losses_of_every_recipe_with_and_without_sequence_parallelism(worker_pool: Pools, recipe: str) -> None:
    numbers, _, _ = run(0, 1, recipe, torch.bfloat16, True)
    for sequence_parallel in (True, False):
        first, second = worker_pool(2).run(run, recipe, torch.bfloat16, sequence_parallel)
        assert first[0] == second[0]  # all ranks see the same losses and norms
        assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
        losses, expected = torch.tensor(first[0][::2]), torch.tensor(numbers[::2])
        # Shards of weights are quantized by themselves, and random bits differ: that shows in four bits.
        torch.testing.assert_close(losses, expected, rtol=0.05 if recipe == "nvfp4" else 0.02, atol=0)


def test_a_checkpoint_of_two_ranks_is_that_of_one(worker_pool: Pools, tmp_path: Path) -> None:
    ranks = worker_pool(2).run(run, None, torch.float32, True, tmp_path / "two")
    saved = latest(tmp_path / "two")
    assert saved is not None
    for name, parameter in saved.model_state().items():
        assert torch.equal(parameter, ranks[0][1][name]), name
    start = tmp_path / "one"
    start.mkdir()
    (tmp_path / "two" / "step-00000002").rename(start / "step-00000002")
    numbers, whole, _ = run(0, 1, None, torch.float32, True, start)  # goes on from step 2, on one rank
    torch.testing.assert_close(torch.tensor(numbers), torch.tensor(ranks[0][0]), rtol=1e-4, atol=0)
    for name, parameter in whole.items():
        torch.testing.assert_close(parameter, ranks[0][1][name], rtol=0, atol=3e-3, msg=name)


COMMAND = "from minifloat.cli import main; main()"
DIES = f"""
import os, signal
from minifloat.train.data import Batches
draw = Batches.__next__
def die(self, drawn=[]):
    drawn.append(0)
    if len(drawn) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return draw(self)
Batches.__next__ = die
{COMMAND}
"""


def torchrun(*arguments: object, script: str = COMMAND) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    root = str(Path(__file__).parent.parent)
    return subprocess.run(
        [*command, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_the_command(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    out = tmp_path / "out"
    common = ("train", write_texts(texts), "--model", "tiny", "--batch-size", 2, "--steps", 2, "--device", "cpu")
    done = torchrun(*common, "--tp", 2, "--recipe", "block", "--out", out, "--check-ranks")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("block: validation loss") == 1, "the first rank alone talks"
    assert "2, which share each linear; split by tokens elsewhere" in (out / "report.md").read_text()
    refused = torchrun(*common, "--tp", 4, "--out", tmp_path / "other")
    assert refused.returncode != 0
    assert "--tp is 4, but torchrun has started 2" in refused.stderr


def test_a_resumed_command_with_a_failed_check(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    write_texts(texts)
    out = tmp_path / "out"
    common = ("train", texts, "--model", "tiny", "--batch-size", 2, "--device", "cpu", "--tp", 2, "--out", out)
    assert torchrun(*common, "--steps", 2).returncode == 0
    failed = torchrun(*common, "--steps", 2, "--resume", "--against", "bf16", "--max-gap", 1e-9)
    assert failed.returncode != 0
    assert failed.stderr.count("FAILED: current: the final validation loss") == 1  # said once
    assert "barrier" not in failed.stderr  # no rank waits for another
    assert "torchrun --nproc-per-node 2" in (out / "report.md").read_text()


def test_heads_that_ranks_cannot_share_are_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 query and 1 key/value heads .* 2 ranks; choose a --tp that divides 1"):
        MICRO.check_ranks(2)


def test_a_rank_that_dies_ends_the_command(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    out = tmp_path / "out"
    done = torchrun(
        "train", write_texts(texts), "--model", "tiny", "--batch-size", 2, "--steps", 50, "--device", "cpu",
        "--tp", 2, "--out", out, script=DIES,
    )  # fmt: skip
    assert done.returncode not in (0, None)
    assert "exitcode: -9" in done.stderr
    assert (out / "metrics.jsonl").read_text().count("\n") == 2  # it had begun
    assert not (out / "report.md").exists()
