"""`minifloat train --fsdp`: the training of one process, its batches and parameters shared out, with --tp as well."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minifloat.comm.group import Group
from minifloat.tools.cli import train as training
from minifloat.tools.train import checkpoint_writer, loop
from minifloat.tools.train.checkpoint import CheckpointError, complete, latest
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError
from minifloat.tools.train.loop import Metrics, NonFiniteError, TrainConfig, train
from minifloat.tools.train.model import MODELS, Transformer
from minifloat.tools.train.ranks import Ranks
from minifloat.tools.train.state import read_history
from tests.helpers.distributed_pool import Pools
from tests.helpers.micro_training import CPU, MICRO, invoke, micro_corpus, write_texts
from tests.helpers.train_on_ranks import CONFIG, SIZES, Outcome, close, command, run

FOUR = replace(CONFIG, batch_size=4)
EXACT = replace(FOUR, dtype=torch.float32)
SLOW = pytest.mark.slow


def on_ranks(worker_pool: Pools, size: int, *arguments: Any) -> Outcome:
    """Of the first of so many ranks; all say the same."""
    outcomes = worker_pool(size).run(run, *arguments)
    for other in outcomes[1:]:
        assert torch.equal(other.numbers, outcomes[0].numbers)
        assert (other.count, other.gemms) == (outcomes[0].count, outcomes[0].gemms)
    first: Outcome = outcomes[0]
    return first


@pytest.mark.parametrize("size, tp, sequence_parallel", [(2, 1, True), (4, 2, True), (4, 2, False)])
def test_in_fp32_it_is_the_training_of_one_process(
    worker_pool: Pools, size: int, tp: int, sequence_parallel: bool
) -> None:
    alone = run(0, 1, None, EXACT)
    shared = on_ranks(worker_pool, size, None, EXACT, tp, sequence_parallel)
    assert shared.count == alone.count == sum(parameter.numel() for parameter in alone.parameters.values())
    close(shared, alone, 1e-5, 1e-4)


def test_ranks_may_have_unequal_shares(worker_pool: Pools) -> None:
    """Two and three sequences of a batch, and one and none of the last batch that is held out."""
    corpus, odd = micro_corpus(), replace(EXACT, batch_size=5, evaluation_batches=9)
    assert (len(corpus.validation) - 1) // 64 % 5 == 1
    close(on_ranks(worker_pool, 2, None, odd), run(0, 1, None, odd), 1e-5, 1e-4)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_losses_of_every_recipe(worker_pool: Pools, recipe: str) -> None:
    """Equal weights, so where scales span no tokens of other ranks, the first loss is that of one process."""
    alone, shared = run(0, 1, recipe, FOUR), on_ranks(worker_pool, 2, recipe, FOUR)
    assert shared.gemms == alone.gemms  # each rank runs every linear of every step
    bound = 0.05 if recipe == "nvfp4" else 0.01
    torch.testing.assert_close(shared.numbers, alone.numbers, rtol=5 * bound, atol=0)
    torch.testing.assert_close(torch.tensor(shared.losses), torch.tensor(alone.losses), rtol=bound, atol=0)
    if recipe in ("delayed", "block", "mxfp8"):
        assert shared.losses[0] == pytest.approx(alone.losses[0], rel=1e-6)
        assert shared.norms[0] == pytest.approx(alone.norms[0], rel=1e-3)


@SLOW
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("size, tp", [(3, 1), (4, 1), (4, 2)])
def test_losses_on_more_ranks(worker_pool: Pools, recipe: str, size: int, tp: int) -> None:
    shared, alone = on_ranks(worker_pool, size, recipe, FOUR, tp), run(0, 1, recipe, FOUR)
    bound = 0.05 if recipe == "nvfp4" else 0.02
    torch.testing.assert_close(torch.tensor(shared.losses), torch.tensor(alone.losses), rtol=bound, atol=0)


def test_data_ranks_round_with_random_numbers_of_their_own() -> None:
    class Rank(Ranks):
        data = Group("", 4, 0)

    class Other(Ranks):
        data = Group("", 4, 3)

    seeds = {Other().seed(0, 1), Other().seed(0, 2), Other().seed(1, 1)}
    assert Rank().seed(0, 1) is None and len(seeds) == 3 and None not in seeds


def overflow_on_the_second_rank(rank: int, size: int, folder: Path) -> str:
    """What is said of an infinity in its third step."""
    ranks = Ranks.of_world(CPU, 1)
    model = Transformer(SIZES, seed=3, ranks=ranks).shard()
    left = [2]

    def overflow(module: torch.nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        left[0] -= module.training
        return output * torch.inf if rank == 1 and left[0] < 0 else output

    model.blocks[0].layernorm_mlp.fc2.register_forward_hook(overflow)
    checkpoints = Checkpoints(folder, {"of": "a test"}, None)
    with pytest.raises(NonFiniteError) as caught:
        train("micro", model, MICRO.context, micro_corpus(), CONFIG, CPU, checkpoints=checkpoints, ranks=ranks)
    return str(caught.value)


def test_all_ranks_stop_where_one_overflows(worker_pool: Pools, tmp_path: Path) -> None:
    first, second = worker_pool(2).run(overflow_on_the_second_rank, tmp_path)
    assert first == second and "step 3 has loss nan" in first
    saved = latest(tmp_path)
    assert saved is not None and saved.step == 2 and f"step 2 is saved in {saved.path}" in first
    assert all(bool(tensor.isfinite().all()) for tensor in saved.model_state().values())


# ---- checkpoints ----


def continued(worker_pool: Pools, size: int, tp: int, recipe: str | None, config: Any, folder: Path) -> Outcome:
    """A training that goes on from the newest checkpoint in ``folder``."""
    if size == 1:
        return run(0, 1, recipe, config, folder=folder)
    return on_ranks(worker_pool, size, recipe, config, tp, True, folder)


@pytest.mark.parametrize(
    "first, then",
    [
        ((2, 1), (1, 1)),
        ((1, 1), (2, 1)),
        ((4, 2), (2, 1)),
        *[pytest.param(*each, marks=SLOW) for each in (((2, 1), (3, 1)), ((4, 2), (4, 1)), ((3, 1), (4, 2)))],
        *[pytest.param(*each, marks=SLOW) for each in (((2, 2), (4, 2)), ((4, 2), (1, 1)), ((4, 1), (2, 2)))],
    ],
)
def test_a_run_goes_on_on_other_ranks(
    worker_pool: Pools, tmp_path: Path, first: tuple[int, int], then: tuple[int, int]
) -> None:
    """In fp32, where only the order of sums differs; the files are those of one process."""
    whole = continued(worker_pool, *first, None, EXACT, tmp_path / "whole")
    part = tmp_path / "part"
    part.mkdir()
    (tmp_path / "whole" / "step-00000002").rename(part / "step-00000002")
    close(continued(worker_pool, *then, None, EXACT, part), whole, 1e-5, 1e-4)
    for folder, outcome in ((tmp_path / "whole", whole), (part, None)):
        saved = latest(folder)
        assert saved is not None and saved.step == 4
        state = saved.model_state()
        assert outcome is None or all(torch.equal(state[name], p) for name, p in outcome.parameters.items())


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_run_goes_on_bitwise_on_as_many_ranks(worker_pool: Pools, tmp_path: Path, recipe: str) -> None:
    """With delayed scaling's buffers, and with random numbers, of which the second rank has its own."""
    whole = continued(worker_pool, 2, 1, recipe, FOUR, tmp_path / "whole")
    part = tmp_path / "part"
    part.mkdir()
    (tmp_path / "whole" / "step-00000002").rename(part / "step-00000002")
    close(continued(worker_pool, 2, 1, recipe, FOUR, part), whole, 0, 0)


def full_disk_of_the_second_rank(rank: int, size: int, folder: Path) -> tuple[str, int]:
    """What is said of it, and the last step that was done."""
    ranks, seen = Ranks.of_world(CPU, 1), [0]
    model = Transformer(SIZES, seed=3, ranks=ranks).shard()
    write = checkpoint_writer.write_tensors

    def full(*arguments: Any) -> Any:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    def observe(metrics: Metrics) -> None:
        seen.append(metrics.step)
        for thread in threading.enumerate():
            if thread.name == "save-2":
                thread.join()

    checkpoint_writer.write_tensors = full
    try:
        with pytest.raises(SaveError) as caught:
            train(
                "micro", model, MICRO.context, micro_corpus(), replace(CONFIG, steps=9), CPU, observe,
                checkpoints=Checkpoints(folder, {"of": "a test"}, 2), ranks=ranks,
            )  # fmt: skip
    finally:
        checkpoint_writer.write_tensors = write
    return str(caught.value), seen[-1]


def test_all_ranks_stop_where_one_cannot_save(worker_pool: Pools, tmp_path: Path) -> None:
    first, second = worker_pool(2).run(full_disk_of_the_second_rank, tmp_path)
    assert first == second and "step 2 could not be written" in first[0] and "No space left on device" in first[0]
    assert first[1] == 3 and not list(tmp_path.iterdir())


def test_each_rank_writes_its_own_part(worker_pool: Pools, tmp_path: Path) -> None:
    whole = on_ranks(worker_pool, 2, None, CONFIG, 1, True, tmp_path)
    saved = latest(tmp_path)
    assert saved is not None
    files = {f"{kind}-{rank:05}-of-00002.safetensors" for kind in ("model", "training") for rank in (1, 2)}
    assert set(saved.files) == files and {path.name for path in saved.path.iterdir()} == files | {"checkpoint.json"}
    models = [load_file(saved.path / name) for name in sorted(files) if name.startswith("model")]
    sizes = [sum(tensor.numel() for tensor in each.values()) for each in models]
    assert sum(sizes) == sum(tensor.numel() for tensor in saved.model_state().values()) and max(sizes) < 0.6 * sum(
        sizes
    )
    assert all(torch.equal(saved.model_state()[name], tensor) for name, tensor in whole.parameters.items())
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


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def interrupt_the_second_rank() -> None:
    """In the middle of its third step."""
    step, left = loop.train_step, [2]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and os.environ["RANK"] == "1":
            left[0] = 99
            for _ in range(2):  # its own, and torchrun's
                signal.raise_signal(signal.SIGTERM)
        return step(*arguments)

    loop.train_step = interrupted


def test_the_command_is_stopped_and_goes_on(options: tuple[object, ...], tmp_path: Path) -> None:
    out, more = tmp_path / "out", ("--recipe", "mxfp8", "--steps", 5)
    with command(tmp_path / "a", 2, *options, *more, "--fsdp", "--out", out, hook=interrupt_the_second_rank) as stopped:
        assert stopped.wait() == [128 + signal.SIGINT, 128 + signal.SIGTERM], stopped.said()
    told = stopped.said()[1]
    assert "mxfp8: stopped after step 3" in told and "continue with: torchrun --nproc-per-node 2 " in told
    assert "UserWarning" not in told, told
    with command(tmp_path / "b", 2, *options, *more, "--fsdp", "--out", out, "--resume") as finished:
        assert finished.wait() == [0, 0], finished.said()
    assert finished.said()[0].count("mxfp8: validation loss") == 1 and not finished.said(1)[0]  # the first alone talks
    code, text = invoke(*options, *more, "--out", tmp_path / "alone")
    assert code == 0, text
    losses, expected = ([record["loss"] for record in written(each)] for each in (out, tmp_path / "alone"))
    assert len(losses) == 5 and losses == pytest.approx(expected, rel=0.01)
    report = (out / "report.md").read_text()
    assert "ranks: 2, which shard the parameters and share the batch" in report and "**passed**" in report
    parameters = re.compile(r"model: ([\d,]+) parameters")
    assert parameters.findall(report) == parameters.findall((tmp_path / "alone" / "report.md").read_text())
    code, text = invoke("generate", out, "--tokens", 3, "--temperature", 0, "--prompt", "the ", "--device", "cpu")
    assert code == 0 and text.startswith("the ")


def test_experts_are_sharded_too(options: tuple[object, ...], tmp_path: Path) -> None:
    """Two ranks train a mixture of experts as one does: the router's loss is the mean of theirs."""
    out, more = tmp_path / "out", ("--recipe", "mxfp8", "--steps", 3, "--experts", 4)
    with command(tmp_path / "a", 2, *options, *more, "--fsdp", "--out", out) as finished:
        assert finished.wait() == [0, 0], finished.said()
    code, text = invoke(*options, *more, "--out", tmp_path / "alone")
    assert code == 0, text
    losses, expected = ([record["loss"] for record in written(each)] for each in (out, tmp_path / "alone"))
    assert len(losses) == 3 and losses == pytest.approx(expected, rel=0.01)


def test_mistakes_end_with_a_message(options: tuple[object, ...], tmp_path: Path) -> None:
    code, said = invoke(*options, "--fsdp", "--out", tmp_path / "out")
    assert code == 2 and "start N with: torchrun --nproc-per-node N" in said.replace("\n", " ")
    few = ("--batch-size", 1, "--steps", 1, "--fsdp")
    with command(tmp_path / "few", 2, *options, *few, "--out", tmp_path / "out") as refused:
        for process in refused.processes:
            process.join(60)
            assert process.exitcode == 2
    assert "1 sequences in a step are too few for 2 ranks that share them" in refused.said()[1]


def in_fp32() -> None:
    """Activations too, so that on other ranks no more than the order of sums differs."""
    training.TrainConfig = partial(TrainConfig, dtype=torch.float32)  # type: ignore[misc, assignment]


@SLOW
@pytest.mark.parametrize("recipe, bound", [("bf16", 1e-4), ("mxfp8", 0.02)])
def test_ranks_killed_twelve_times(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, bound: float
) -> None:
    """Every other kill of a rank hits a save; each time other ranks go on, with the losses of one process."""
    moments, out = 12, tmp_path / "out"
    choose, inside, reached = random.Random(0), 0, [0]
    all_options = (*options, "--recipe", recipe, "--steps", 4 * moments + 4, "--save-every", 1, "--learning-rate", 1e-3)
    monkeypatch.setattr(training, "TrainConfig", TrainConfig)  # to be put back
    in_fp32()
    code, text = invoke(*all_options, "--out", tmp_path / "whole")
    assert code == 0, text
    expected = [(record["loss"], record["gradient_norm"]) for record in written(tmp_path / "whole")]
    saves = out / "checkpoints" / recipe
    grids = [(2, ("--fsdp",)), (4, ("--fsdp", "--tp", 2)), (1, ()), (3, ("--fsdp",))]
    for moment in range(moments + 1):  # the last one ends in order
        size, more = grids[moment % len(grids)] if moment < moments else (2, ("--fsdp",))
        resume = ("--resume",) if latest(saves) is not None else ()
        with command(tmp_path / f"{moment}", size, *all_options, *more, "--out", out, *resume, hook=in_fp32) as ranks:
            if moment == moments:
                assert ranks.wait() == [0] * size, ranks.said()
            else:
                save = f".step-{reached[-1] + choose.randint(2, 4):08}.partial"
                awaited = saves / (save if moment % 2 == 0 else save[1 : -len(".partial")])
                while ranks.processes[0].is_alive() and not awaited.exists():
                    time.sleep(0.001)
                time.sleep(choose.uniform(0.0, 0.01 if moment % 2 == 0 else 0.1))
                ranks.processes[0 if moment % 2 == 0 else choose.randrange(size)].kill()
                for process in ranks.processes:  # with gloo the others see it; torchrun would end them
                    process.join(5)
        newest = latest(saves)
        assert len(complete(saves)) == len(list(saves.glob("step-*")))  # what has a checkpoint's name is complete
        assert newest is not None, ranks.said()
        inside += any(saves.glob(".step-*.partial"))
        reached.append(newest.step)
        history = [(m.loss, m.gradient_norm) for m in read_history(newest.training_state()["history"])]
        mine, other = torch.tensor(history).T, torch.tensor(expected[: newest.step]).T
        torch.testing.assert_close(mine[0], other[0], rtol=bound, atol=0)
        torch.testing.assert_close(mine[1], other[1], rtol=5 * bound, atol=0)
    print(f"{inside} of {moments} kills inside a save; steps reached {reached[1:]}")
    assert inside > 0 and reached == sorted(reached) and reached[-1] == len(expected)
