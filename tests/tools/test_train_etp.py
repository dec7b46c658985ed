"""`minifloat train --etp`: the training of one process, its batches and the rows of its weights shared out."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minifloat.tools.cli.ranks import check_started
from minifloat.tools.train.checkpoint import CheckpointError, latest
from minifloat.tools.train.loop import TrainConfig
from minifloat.tools.train.model import MODELS
from tests.helpers.distributed_pool import Pools
from tests.helpers.micro_training import invoke, micro_corpus, write_texts
from tests.helpers.train_on_ranks import CONFIG, SIZES, Outcome, close, command, of_torchrun, run

FOUR = replace(CONFIG, batch_size=4)
EXACT = replace(FOUR, dtype=torch.float32)
UNCLIPPED = replace(EXACT, clip=math.inf)
SLOW = pytest.mark.slow
SLOW_CASES = [pytest.param(recipe, tp, marks=SLOW) for recipe in ("delayed", "block", "mxfp8") for tp in (1, 2)]

alone = cache(partial(run, 0, 1))


def on_ranks(pool: Pools, size: int, etp: int | None, *arguments: Any, tp: int = 1, **options: Any) -> Outcome:
    """Of the first of so many ranks; all say the same."""
    outcomes = pool(size).run(partial(run, tp=tp, etp=etp, **options), *arguments)
    for other in outcomes[1:]:
        assert torch.equal(other.numbers, outcomes[0].numbers)
        assert (other.count, other.gemms) == (outcomes[0].count, outcomes[0].gemms)
    first: Outcome = outcomes[0]
    return first


@pytest.mark.parametrize("size, etp, tp", [(2, 1, 1), (4, 2, 1), (4, 2, 2), pytest.param(4, 4, 1, marks=SLOW)])
def test_in_fp32_it_is_the_training_of_one_process(worker_pool: Pools, size: int, etp: int, tp: int) -> None:
    whole, shared = alone(None, EXACT), on_ranks(worker_pool, size, etp, None, EXACT, tp=tp)
    assert shared.count == whole.count == sum(parameter.numel() for parameter in whole.parameters.values())
    close(shared, whole, 1e-5, 1e-4)


def test_ranks_may_have_unequal_shares(worker_pool: Pools) -> None:
    """One or two sequences of a batch, none and one of the last that is held out, and rows that do not divide."""
    corpus, odd = micro_corpus(), replace(EXACT, batch_size=5, evaluation_batches=9, accumulate=2)
    assert (len(corpus.validation) - 1) // 64 % 5 == 1
    close(on_ranks(worker_pool, 3, 3, None, odd), alone(None, odd), 1e-5, 1e-4)


@pytest.mark.parametrize("recipe, tp", [("current", 1), ("nvfp4", 1), ("delayed", 2), *SLOW_CASES])
def test_every_recipe_trains_as_with_fsdp(worker_pool: Pools, recipe: str, tp: int) -> None:
    """To the bit, where neither the norm's order of sums scales gradients nor bf16 rounds those of weights."""
    equals_fsdp(*(on_ranks(worker_pool, 2 * tp, etp, recipe, UNCLIPPED, tp=tp) for etp in (2, None)))


def test_experts_train_as_with_fsdp(worker_pool: Pools) -> None:
    """Each rank's router balances its own tokens, and some experts get none."""
    sizes = replace(SIZES, experts=5)
    shared, by_fsdp = (on_ranks(worker_pool, 2, etp, "mxfp8", UNCLIPPED, sizes=sizes) for etp in (2, None))
    equals_fsdp(shared, by_fsdp)


def equals_fsdp(shared: Outcome, by_fsdp: Outcome) -> None:
    assert shared.gemms == by_fsdp.gemms and shared.losses == by_fsdp.losses and shared.validation == by_fsdp.validation
    assert all(torch.equal(shared.parameters[name], each) for name, each in by_fsdp.parameters.items())
    torch.testing.assert_close(torch.tensor(shared.norms), torch.tensor(by_fsdp.norms), rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe, size", [("delayed", 2), pytest.param("mxfp8", 4, marks=SLOW)])
def test_losses_are_those_of_one_process(worker_pool: Pools, recipe: str, size: int) -> None:
    """In bf16. Equal weights, so where scales span no tokens of other ranks, the first loss is the same."""
    whole, shared = alone(recipe, FOUR), on_ranks(worker_pool, size, 2, recipe, FOUR)
    torch.testing.assert_close(shared.numbers, whole.numbers, rtol=0.05, atol=0)
    torch.testing.assert_close(torch.tensor(shared.losses), torch.tensor(whole.losses), rtol=0.01, atol=0)
    assert shared.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
    assert shared.norms[0] == pytest.approx(whole.norms[0], rel=1e-3)


# ---- checkpoints ----

Grid = tuple[int, int | None, int]
"""Ranks, --etp (None: --fsdp) and --tp."""


def continued(pool: Pools, grid: Grid, recipe: str | None, config: TrainConfig, folder: Path) -> Outcome:
    """A training that goes on from the newest checkpoint in ``folder``."""
    size, etp, tp = grid
    if size == 1:
        return run(0, 1, recipe, config, folder=folder)
    return on_ranks(pool, size, etp, recipe, config, tp=tp, folder=folder)


@pytest.mark.parametrize(
    "first, then",
    [
        ((2, 2, 1), (1, None, 1)),
        ((4, 2, 2), (2, None, 1)),
        ((2, None, 1), (4, 2, 2)),
        *[pytest.param(*each, marks=SLOW) for each in (((3, 3, 1), (2, 2, 1)), ((4, 4, 1), (4, 2, 1)))],
        *[pytest.param(*each, marks=SLOW) for each in (((1, None, 1), (4, 2, 1)), ((4, 2, 1), (4, None, 2)))],
    ],
)
def test_a_run_goes_on_on_other_ranks(worker_pool: Pools, tmp_path: Path, first: Grid, then: Grid) -> None:
    """In fp32, where only the order of sums differs; the files are those of one process."""
    whole = continued(worker_pool, first, None, EXACT, tmp_path / "whole")
    part = keep_the_first_half(tmp_path)
    close(continued(worker_pool, then, None, EXACT, part), whole, 1e-5, 1e-4)
    for folder, outcome in ((tmp_path / "whole", whole), (part, None)):
        saved = latest(folder)
        assert saved is not None and saved.step == 4
        state = saved.model_state()
        assert outcome is None or all(torch.equal(state[name], p) for name, p in outcome.parameters.items())


def keep_the_first_half(folder: Path) -> Path:
    """Of the checkpoints of a run."""
    part = folder / "part"
    part.mkdir()
    (folder / "whole" / "step-00000002").rename(part / "step-00000002")
    return part


@pytest.mark.parametrize("recipe, grid", [("delayed", (4, 2, 2)), ("nvfp4", (2, 2, 1))])
def test_a_run_goes_on_bitwise_on_as_many_ranks(worker_pool: Pools, tmp_path: Path, recipe: str, grid: Grid) -> None:
    """With delayed scaling's buffers, and with random numbers, of which the second rank has its own."""
    whole = continued(worker_pool, grid, recipe, FOUR, tmp_path / "whole")
    close(continued(worker_pool, grid, recipe, FOUR, keep_the_first_half(tmp_path)), whole, 0, 0)


def test_no_two_ranks_write_the_same(worker_pool: Pools, tmp_path: Path) -> None:
    """Rows are in the file of one replica, all else in the first's."""
    whole = on_ranks(worker_pool, 4, 2, None, FOUR, folder=tmp_path)
    saved = latest(tmp_path)
    assert saved is not None
    models = [load_file(saved.path / f"model-{rank:05}-of-00004.safetensors") for rank in range(1, 5)]
    rows = {name for name in models[0] if re.search(r"\.(qkv\.linear|proj|fc1|fc2)\.weight", name)}
    assert len(rows) == 8 and rows <= models[1].keys() and "norm.weight" not in models[1]
    assert not models[2] and not models[3]
    assert sum(tensor.numel() for each in models for tensor in each.values()) == whole.count
    missing = replace(saved, files={name: each for name, each in saved.files.items() if "2-of" not in name})
    with pytest.raises(CheckpointError, match=r"tensor .* of shape .* is not complete"):
        missing.model_state()


# ---- the command ----


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...]:
    monkeypatch.setitem(MODELS, "micro", SIZES)
    texts = tmp_path / "texts"
    texts.mkdir()
    return ("train", write_texts(texts), "--model", "micro", "--device", "cpu", "--batch-size", 4)


def test_the_command_goes_on_on_one_rank(options: tuple[object, ...], tmp_path: Path) -> None:
    out, more = tmp_path / "out", ("--recipe", "mxfp8", "--save-every", 2)
    with command(tmp_path / "a", 2, *options, *more, "--etp", 2, "--steps", 2, "--out", out) as finished:
        assert finished.wait() == [0, 0], finished.said()
    assert not finished.said(1)[0]  # the first alone talks
    report = (out / "report.md").read_text()
    assert "ranks: 2, which share the batch, and 2 at a time the rows of each weight" in report and "passed" in report
    code, text = invoke(*options, *more, "--steps", 3, "--out", out, "--resume")
    assert code == 0, text


@pytest.mark.parametrize(
    "started, tp, fsdp, etp, message",
    [
        (
            4,
            1,
            True,
            2,
            "--fsdp shards all parameters over the ranks that share the batch, --etp 2 the rows of weights",
        ),
        (3, 1, False, 2, "--etp is 2, but torchrun has started 3; start a multiple of 2, or start 2 with: torchrun"),
        (
            2,
            2,
            False,
            2,
            "--tp is 2 and --etp is 2, but torchrun has started 2; start a multiple of 4, or start 4 with",
        ),
        (1, 1, False, 2, "start 2 with: torchrun --nproc-per-node 2 --no-python minifloat train --etp 2 ..."),
        (2, 1, False, 0, "--etp is 0"),
    ],
)
def test_other_processes_than_the_options_say(
    monkeypatch: pytest.MonkeyPatch, started: int, tp: int, fsdp: bool, etp: int, message: str
) -> None:
    for name, value in of_torchrun(0, started).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_started(tp, fsdp, etp)
