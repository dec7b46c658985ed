"""``minifloat train --cuda-graph``: steps that are replayed give the results of steps that are not, to the bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat.comm.group import Group
from minifloat.tools.cli.train_job import recipe_of
from minifloat.tools.train.captured import check_capture
from minifloat.tools.train.checkpoint import latest
from minifloat.tools.train.checkpoint_writer import Checkpoints
from minifloat.tools.train.data import Corpus
from minifloat.tools.train.loop import Interrupted, Metrics, NonFiniteError, TrainConfig, train
from minifloat.tools.train.model import MODELS, ModelConfig
from minifloat.tools.train.ranks import Ranks
from minifloat.tools.train.step import clipped_gradients, keep_wgrads_unrounded

MICRO = MODELS["micro"]
CONFIG = TrainConfig(steps=6, batch_size=2, evaluations=3, evaluation_batches=2, accumulate=2)


def corpus() -> Corpus:
    text = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    return Corpus(text[:16_000], text[16_000:], "random bytes")


def run(
    device: torch.device, recipe: str, cuda_graph: bool, *, experts: int = 0, rate: float = 0.0, **options: Any
) -> Any:
    model = replace(MICRO, experts=experts, expert_bias_rate=rate).make(recipe_of(recipe), 0)
    config = options.pop("config", CONFIG)
    done = train(recipe, model, 64, corpus(), config, device, cuda_graph=cuda_graph, **options)
    measured = [replace(each, seconds=0.0, tokens_per_second=0.0) for each in done.history]
    return measured, done.gemms, {name: each.detach().clone() for name, each in model.state_dict().items()}


def assert_alike(found: Any, wanted: Any) -> None:
    assert found[0] == wanted[0]
    assert found[1] == wanted[1]
    assert all(torch.equal(found[2][name], each) for name, each in wanted[2].items())


@pytest.mark.parametrize(
    ("recipe", "experts", "rate"),
    [("bf16", 0, 0.0), ("delayed", 0, 0.0), ("nvfp4", 0, 0.0), ("current", 4, 0.0), ("current", 4, 0.125)],
)
def test_replayed_steps_are_the_same(graph_device: torch.device, recipe: str, experts: int, rate: float) -> None:
    """Losses, gradient norms, imbalances, evaluations in between, GEMMs, and parameters and biases at the end."""
    assert_alike(*(run(graph_device, recipe, captured, experts=experts, rate=rate) for captured in (True, False)))


@pytest.mark.parametrize(("recipe", "experts"), [("bf16", 0), ("current", 4)])
def test_fp32_wgrad(graph_device: torch.device, recipe: str, experts: int) -> None:
    """Weight gradients come unrounded, into the buffers that the optimizer steps with; replayed steps are the same."""
    config = replace(CONFIG, fp32_wgrad=True)
    assert_alike(*(run(graph_device, recipe, each, experts=experts, config=config) for each in (True, False)))
    found = []
    for add in (keep_wgrads_unrounded, lambda model: None):
        model = replace(MICRO, experts=experts).make(recipe_of(recipe), 0).to(graph_device)
        add(model)
        for seed in range(2):  # the second step replaces what the first has left
            model.zero_grad()
            batch = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(seed))
            clipped_gradients(model, (batch[0], batch[1]), TrainConfig(1, 2, clip=math.inf), graph_device)
        found.append([parameter.grad for parameter in model.parameters()])
    unrounded, rounded = found
    for mine, theirs in zip(unrounded, rounded, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=1e-6)
    finer = sum(not torch.equal(mine, mine.bfloat16().float()) for mine in unrounded)
    assert finer > sum(not torch.equal(theirs, theirs.bfloat16().float()) for theirs in rounded)


def test_finish(graph_device: torch.device, tmp_path: Path) -> None:
    """The last steps have no recipe, replayed or not, and also in a run that goes on in the middle of them."""
    config = replace(CONFIG, finish=0.5)
    wanted = run(graph_device, "nvfp4", False, config=config)
    assert_alike(run(graph_device, "nvfp4", True, config=config), wanted)
    assert wanted[0][:3] == run(graph_device, "nvfp4", False)[0][:3]
    unquantized = sum(count for gemm, count in wanted[1].items() if gemm.a == "identity")
    assert 4 * unquantized == sum(wanted[1].values())  # autograd runs two of each three, and counts none
    saved, steps = Checkpoints(tmp_path, {}, None, 2, None, {}), iter(range(1, 10))
    with pytest.raises(Interrupted):
        run(graph_device, "nvfp4", True, config=config, checkpoints=saved, stop=lambda: next(steps) == 4)
    saved = replace(saved, start=latest(tmp_path))
    assert_alike(run(graph_device, "nvfp4", True, config=config, checkpoints=saved), wanted)


def test_resume(graph_device: torch.device, tmp_path: Path) -> None:
    """A run that was stopped goes on with the same numbers."""
    whole = run(graph_device, "delayed", False)
    saved = Checkpoints(tmp_path, {}, None, 2, None, {})
    steps = iter(range(1, 10))
    with pytest.raises(Interrupted):
        run(graph_device, "delayed", True, checkpoints=saved, stop=lambda: next(steps) == 3)
    saved = replace(saved, start=latest(tmp_path))
    assert_alike(run(graph_device, "delayed", True, checkpoints=saved), whole)


@pytest.mark.parametrize("sizes", [MICRO, replace(MICRO, experts=4, expert_bias_rate=0.125)])
def test_a_step_that_is_not_finite_changes_nothing(graph_device: torch.device, sizes: ModelConfig) -> None:
    """It is replayed as others, and the optimizer in it does nothing, nor does what balances experts."""

    def saved(model: nn.Module) -> list[tuple[str, Tensor]]:
        biases = [each for each in model.named_buffers() if each[0].endswith("expert_bias")]
        return [*model.named_parameters(), *biases]

    def spoilt(captured: bool) -> tuple[str, dict[str, Any]]:
        model = sizes.make(recipe_of("delayed"), 0)
        kept: dict[str, Any] = {}

        def observe(metrics: Metrics) -> None:
            if metrics.step == 3:
                model.head.weight.data[0] = torch.nan
                kept.update({name: each.clone() for name, each in saved(model)})

        with pytest.raises(NonFiniteError, match="step 4 has loss nan") as error:
            train("delayed", model, 64, corpus(), CONFIG, graph_device, observe, cuda_graph=captured)
        assert all(torch.equal(kept[n].nan_to_num(), each.nan_to_num()) for n, each in saved(model))
        return str(error.value), kept

    (found, mine), (wanted, its) = spoilt(True), spoilt(False)
    assert found == wanted
    assert all(torch.equal(mine[name].nan_to_num(), each.nan_to_num()) for name, each in its.items())


def test_what_cannot_be_captured_is_refused() -> None:
    with pytest.raises(ValueError, match="--cuda-graph needs an NVIDIA GPU, and the device is cpu"):
        run(torch.device("cpu"), "current", True)
    with pytest.raises(ValueError, match="one of 2"):
        check_capture(torch.device("cuda"), Ranks(Group("somewhere", 2)))


class Waits(nn.Module):
    """A model that reads a value back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        y = F.embedding(tokens_BT, self.weight)
        return y * (1.0 if float(y.detach().sum()) > 0 else 0.5)


@pytest.mark.gpu
def test_a_model_that_waits_for_the_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="--cuda-graph: this model cannot be captured, leave it out"):
        train("bf16", Waits(), 64, corpus(), CONFIG, torch.device("cuda"), cuda_graph=True)
    run(torch.device("cuda"), "current", True)
