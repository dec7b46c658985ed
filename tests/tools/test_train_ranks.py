"""`minifloat train` on several ranks: the training of one process, its batches, rows and linears shared out."""

from __future__ import annotations

import errno
import math
import os
import re
import threading
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from minifloat.comm.group import Group
from minifloat.tools.train import checkpoint_writer
from minifloat.tools.train.checkpoint import CheckpointError, latest
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError
from minifloat.tools.train.loop import Metrics, NonFiniteError, TrainConfig, train
from minifloat.tools.train.model import Transformer
from minifloat.tools.train.ranks import Ranks
from tests.helpers.distributed_pool import Pools
from tests.helpers.micro_training import CPU, MICRO, micro_corpus
from tests.helpers.train_on_ranks import CONFIG, SIZES, Outcome, close, run

FOUR = replace(CONFIG, batch_size=4)
EXACT = replace(FOUR, dtype=torch.float32)
UNCLIPPED = replace(EXACT, clip=math.inf)


class Grid(NamedTuple):
    """Ranks, ``--tp``, ``--etp`` and ``--ep`` (both None: ``--fsdp``)."""

    size: int
    tp: int = 1
    etp: int | None = None
    ep: int | None = None


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


alone = cache(partial(run, 0, 1))


def on_ranks(pool: Pools, grid: Grid, recipe: str | None, config: TrainConfig, **options: Any) -> Outcome:
    """Of the first of so many ranks; all say the same."""
    if grid.size == 1:
        return run(0, 1, recipe, config, **options)
    outcomes = pool(grid.size).run(partial(run, tp=grid.tp, etp=grid.etp, ep=grid.ep, **options), recipe, config)
    for other in outcomes[1:]:
        assert torch.equal(other.numbers, outcomes[0].numbers)
        assert (other.count, other.gemms) == (outcomes[0].count, outcomes[0].gemms)
    first: Outcome = outcomes[0]
    return first


@pytest.mark.parametrize(
    "grid, options",
    [
        (Grid(2), {}), (Grid(4, 2), {"sequence_parallel": True}), slow(Grid(4, 2), {"sequence_parallel": False}),
        (Grid(2, etp=1), {}), (Grid(4, etp=2), {}), (Grid(4, 2, 2), {}), slow(Grid(4, etp=4), {}),
    ],
)  # fmt: skip
def test_in_fp32_it_is_the_training_of_one_process(worker_pool: Pools, grid: Grid, options: dict[str, bool]) -> None:
    whole, shared = alone(None, EXACT), on_ranks(worker_pool, grid, None, EXACT, **options)
    assert shared.count == whole.count == sum(parameter.numel() for parameter in whole.parameters.values())
    close(shared, whole, 1e-5, 1e-4)


@pytest.mark.parametrize("grid, more", [(Grid(2), {}), (Grid(3, etp=3), {"accumulate": 2})])
def test_ranks_may_have_unequal_shares(worker_pool: Pools, grid: Grid, more: dict[str, int]) -> None:
    """Of a batch, and of the last that is held out, of which a rank has none; rows that do not divide."""
    corpus, odd = micro_corpus(), replace(EXACT, batch_size=5, evaluation_batches=9, **more)
    assert (len(corpus.validation) - 1) // 64 % 5 == 1
    close(on_ranks(worker_pool, grid, None, odd), alone(None, odd), 1e-5, 1e-4)


@pytest.mark.parametrize(
    "recipe, grid, bound",
    [
        *[(recipe, Grid(2), 0.01) for recipe in ("delayed", "block")], ("nvfp4", Grid(2), 0.05),
        ("delayed", Grid(2, etp=2), 0.01), ("delayed", Grid(2, 2), 0.02), ("mxfp8", Grid(2, 2), 0.02),
        slow("mxfp8", Grid(4, etp=2), 0.01), slow("block", Grid(2, 2), 0.02), slow("nvfp4", Grid(2, 2), 0.05),
        *[slow(recipe, Grid(4, 2), 0.02) for recipe in ("delayed", "block")], slow("nvfp4", Grid(3), 0.05),
        *[slow(recipe, Grid(2), 0.01) for recipe in ("current", "mxfp8")],
    ],
)  # fmt: skip
def test_losses_of_every_recipe(worker_pool: Pools, recipe: str, grid: Grid, bound: float) -> None:
    """Equal weights, so where scales span no rows of other ranks, the first loss is that of one process."""
    whole, shared = alone(recipe, FOUR), on_ranks(worker_pool, grid, recipe, FOUR)
    torch.testing.assert_close(shared.numbers, whole.numbers, rtol=5 * bound, atol=0)
    torch.testing.assert_close(torch.tensor(shared.losses), torch.tensor(whole.losses), rtol=bound, atol=0)
    if grid.tp == 1:
        assert shared.gemms == whole.gemms  # each rank runs every linear of every step
        if recipe in ("delayed", "block", "mxfp8"):
            assert shared.losses[0] == pytest.approx(whole.losses[0], rel=1e-6)
            assert shared.norms[0] == pytest.approx(whole.norms[0], rel=1e-3)


@pytest.mark.parametrize(
    "recipe, tp, experts",
    [("delayed", 2, 0), ("mxfp8", 1, 5), *[slow(r, 1, 0) for r in ("current", "nvfp4", "block")], slow("mxfp8", 2, 0)],
)
def test_rows_of_weights_train_as_with_fsdp(worker_pool: Pools, recipe: str, tp: int, experts: int) -> None:
    """To the bit, where neither the norm's order of sums scales gradients nor bf16 rounds those of weights.

    Each rank's router balances its own tokens, and some of five experts get none.
    """
    sizes = replace(SIZES, experts=experts) if experts else SIZES
    grids = (Grid(2 * tp, tp, etp) for etp in (2, None))
    shared, by_fsdp = (on_ranks(worker_pool, grid, recipe, UNCLIPPED, sizes=sizes) for grid in grids)
    assert shared.gemms == by_fsdp.gemms and shared.losses == by_fsdp.losses and shared.validation == by_fsdp.validation
    assert all(torch.equal(shared.parameters[name], each) for name, each in by_fsdp.parameters.items())
    torch.testing.assert_close(torch.tensor(shared.norms), torch.tensor(by_fsdp.norms), rtol=1e-6, atol=0)


@pytest.mark.parametrize("grid", [Grid(2), Grid(2, etp=2), Grid(2, ep=2)])
def test_a_bias_balances_experts_over_all_ranks(worker_pool: Pools, grid: Grid, tmp_path: Path) -> None:
    """No loss of a rank's own is in the way: it is the training of one process, biases included."""
    sizes, folders = replace(SIZES, experts=4, expert_bias_rate=2**-5), (tmp_path / "one", tmp_path / "all")
    grids = Grid(1), grid
    whole, shared = (
        on_ranks(worker_pool, each, None, EXACT, sizes=sizes, folder=folder)
        for each, folder in zip(grids, folders, strict=True)
    )
    close(shared, whole, 1e-5, 1e-4)
    biases = []
    for folder in folders:
        saved = latest(folder)
        assert saved is not None
        state = saved.model_state()
        biases.append(torch.stack([state[name] for name in sorted(state) if name.endswith("expert_bias")]))
    assert torch.equal(*biases) and biases[0].any()


EXPERTS = replace(SIZES, experts=4)


@pytest.mark.parametrize("grid", [Grid(2, ep=2), Grid(4, ep=2), Grid(4, etp=2, ep=2), slow(Grid(4, ep=4))])
def test_experts_of_ranks_train_as_with_fsdp(worker_pool: Pools, grid: Grid) -> None:
    """In fp32, where only the order of sums differs; each rank's router balances its own tokens."""
    options: dict[str, Any] = {"sizes": EXPERTS}
    shared, by_fsdp = (on_ranks(worker_pool, each, None, EXACT, **options) for each in (grid, Grid(grid.size)))
    assert shared.count == by_fsdp.count == EXPERTS.parameters and shared.parameters.keys() == by_fsdp.parameters.keys()
    close(shared, by_fsdp, 1e-5, 1e-4)


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


def from_its_middle(
    pool: Pools, first: Grid, then: Grid, recipe: str | None, config: TrainConfig, folder: Path, **options: Any
) -> tuple[Outcome, Outcome]:
    """A training, and one that goes on from its second step, whose checkpoints have the parameters of one process."""
    whole = on_ranks(pool, first, recipe, config, folder=folder / "whole", **options)
    saved = latest(folder / "whole")
    assert saved is not None and saved.step == 4
    state = saved.model_state()
    assert all(torch.equal(state[name], parameter) for name, parameter in whole.parameters.items())
    (folder / "part").mkdir()
    (folder / "whole" / "step-00000002").rename(folder / "part" / "step-00000002")
    return whole, on_ranks(pool, then, recipe, config, folder=folder / "part", **options)


@pytest.mark.parametrize(
    "first, then",
    [
        (Grid(2), Grid(1)), (Grid(1), Grid(2)), (Grid(2, etp=2), Grid(1)),
        (Grid(4, 2, 2), Grid(2)), (Grid(2), Grid(4, 2, 2)), (Grid(2, 2), Grid(1)),
        slow(Grid(2), Grid(3)), slow(Grid(3), Grid(4, 2)), slow(Grid(3, etp=3), Grid(2, etp=2)),
        slow(Grid(4, etp=4), Grid(4, etp=2)), slow(Grid(1), Grid(4, etp=2)), slow(Grid(4, etp=2), Grid(4, 2)),
        slow(Grid(4, 2), Grid(2)),
    ],
)  # fmt: skip
def test_a_run_goes_on_on_other_ranks(worker_pool: Pools, tmp_path: Path, first: Grid, then: Grid) -> None:
    """In fp32, where only the order of sums differs."""
    whole, part = from_its_middle(worker_pool, first, then, None, EXACT, tmp_path)
    close(part, whole, 1e-5, 1e-4)


@pytest.mark.parametrize(
    "first, then",
    [
        (Grid(2, ep=2), Grid(2)), (Grid(4, ep=2), Grid(4, ep=4)), (Grid(4, etp=2, ep=2), Grid(4, ep=2)),
        slow(Grid(4), Grid(4, etp=2, ep=2)), slow(Grid(2), Grid(2, ep=2)), slow(Grid(4, ep=4), Grid(4, etp=4)),
    ],
)  # fmt: skip
def test_experts_go_on_on_other_ranks(worker_pool: Pools, tmp_path: Path, first: Grid, then: Grid) -> None:
    """As many, since a router's loss is that of a rank's tokens."""
    whole, part = from_its_middle(worker_pool, first, then, None, EXACT, tmp_path, sizes=EXPERTS)
    close(part, whole, 1e-5, 1e-4)


def test_experts_go_on_bitwise(worker_pool: Pools, tmp_path: Path) -> None:
    grid = Grid(4, ep=2)
    whole, part = from_its_middle(worker_pool, grid, grid, "current", FOUR, tmp_path, sizes=EXPERTS)
    close(part, whole, 0, 0)
    saved = latest(tmp_path / "whole")
    assert saved is not None
    first, second, *others = (load_file(saved.path / f"model-{i + 1:05}-of-00004.safetensors") for i in range(4))
    experts = {name for name in first if ".experts." in name}
    assert experts and experts.isdisjoint(second) and len(second) == len(experts) and not any(others)


@pytest.mark.parametrize(
    "recipe, grid", [("delayed", Grid(2)), ("nvfp4", Grid(2)), ("delayed", Grid(4, 2, 2)), ("nvfp4", Grid(2, etp=2))]
)
def test_a_run_goes_on_bitwise_on_as_many_ranks(worker_pool: Pools, tmp_path: Path, recipe: str, grid: Grid) -> None:
    """With delayed scaling's buffers, and with random numbers, of which the second rank has its own."""
    whole, part = from_its_middle(worker_pool, grid, grid, recipe, FOUR, tmp_path)
    close(part, whole, 0, 0)


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


@pytest.mark.parametrize("grid", [Grid(2), Grid(4, etp=2)])
def test_no_two_ranks_write_the_same(worker_pool: Pools, tmp_path: Path, grid: Grid) -> None:
    """Shards are in the files of all ranks; rows are in the file of one replica, all else in the first's."""
    whole = on_ranks(worker_pool, grid, None, FOUR, folder=tmp_path)
    saved = latest(tmp_path)
    assert saved is not None
    files = {kind: [f"{kind}-{i + 1:05}-of-{grid.size:05}.safetensors" for i in range(grid.size)]
             for kind in ("model", "training")}  # fmt: skip
    assert set(saved.files) == {*files["model"], *files["training"]}
    assert {path.name for path in saved.path.iterdir()} == {*saved.files, "checkpoint.json"}
    models = [load_file(saved.path / name) for name in files["model"]]
    sizes = [sum(tensor.numel() for tensor in each.values()) for each in models]
    assert sum(sizes) == whole.count and max(sizes) < 0.6 * sum(sizes) + (grid.etp is not None) * sum(sizes)
    if grid.etp is not None:
        rows = {name for name in models[0] if re.search(r"\.(qkv\.linear|proj|fc1|fc2)\.weight", name)}
        assert len(rows) == 8 and rows <= models[1].keys() and "norm.weight" not in models[1]
        assert not models[2] and not models[3]
    assert all(torch.equal(saved.model_state()[name], tensor) for name, tensor in whole.parameters.items())
    missing = replace(saved, files={name: each for name, each in saved.files.items() if "2-of" not in name})
    with pytest.raises(CheckpointError, match=r"tensor .* of shape .* is not complete"):
        missing.model_state()
