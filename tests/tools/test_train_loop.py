"""One step and one evaluation of the main job, against what they are by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minifloat.tools.train.data import fixed_batches
from minifloat.tools.train.loop import NonFiniteError, TrainConfig, evaluate, make_optimizer, train, train_step
from minifloat.tools.train.weights import load_weights
from tests.helpers.micro_training import CPU, MICRO, micro_corpus, micro_model, write_texts
from tests.helpers.train_on_ranks import command

EXACT = TrainConfig(4, batch_size=3, dtype=torch.float32)


class Bigram(nn.Module):
    """Logits of the next of 8 tokens, from the last one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(2 * torch.arange(64.0).sin().view(8, 8))

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_BT, self.weight)


def batch_of(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(8, (sequences, 6), generator=torch.Generator().manual_seed(sequences))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_gradients_are_clipped_without_the_loss_scale(scale: float, clip: float) -> None:
    model, before = Bigram(), Bigram().weight.detach()
    inputs, targets = batch_of(3)
    logits = before.clone().requires_grad_()
    loss = F.cross_entropy(logits[inputs].flatten(0, 1), targets.flatten())
    (gradient,) = torch.autograd.grad(loss, logits)
    norm = float(gradient.norm())
    assert 0.05 < norm < 100
    config = TrainConfig(4, batch_size=3, dtype=torch.float32, clip=clip, loss_scale=scale)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    measured = train_step(model, sgd, (inputs, targets), 0.5, config, CPU)
    assert measured == pytest.approx((loss.item(), norm), rel=1e-6)
    expected = before - 0.5 * gradient * min(1.0, clip / norm)
    torch.testing.assert_close(model.weight.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_backward_runs_in_the_calling_thread(accumulate: int) -> None:
    """Of each micro-batch, and the setting is PyTorch's again after it, also where a backward raises."""
    model, config = Bigram(), TrainConfig(4, batch_size=3, dtype=torch.float32, accumulate=accumulate)
    seen: list[bool] = []
    model.weight.register_hook(lambda _: seen.append(torch.autograd.is_multithreading_enabled()))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    train_step(model, sgd, batch_of(3 * accumulate), 0.5, config, CPU)
    assert seen == [False] * accumulate and torch.autograd.is_multithreading_enabled()
    model.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_step(model, sgd, batch_of(3 * accumulate), 0.5, config, CPU)
    assert torch.autograd.is_multithreading_enabled()


def test_only_matrices_decay() -> None:
    model, config = micro_model(), TrainConfig(4, learning_rate=0.1, weight_decay=0.5)
    model.head.bias = nn.Parameter(torch.ones(256))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, config).step()
    vectors = {name for name, parameter in model.named_parameters() if name.endswith(("norm.weight", "bias"))}
    assert len(vectors) == 2 * MICRO.layers + 2
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 if name in vectors else 1 - 0.1 * 0.5)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0, msg=name)


def test_an_evaluation_counts_each_sequence_once() -> None:
    """Those of the last batch too, which has fewer."""
    model, held_out = Bigram(), [batch_of(3), batch_of(3), batch_of(1)]
    with torch.no_grad():
        pairs = [pair for batch in held_out for pair in zip(*batch, strict=True)]
        each = [float(F.cross_entropy(model(inputs), targets)) for inputs, targets in pairs]
    assert abs(sum(each[:6]) / 6 - each[6]) > 0.1, "the last one is unlike the others"
    model.train()
    assert evaluate(model, held_out, EXACT, CPU) == pytest.approx(sum(each) / 7, rel=1e-6)
    assert model.training


def test_held_out_windows_that_fill_no_batch_are_there() -> None:
    text = micro_corpus().validation
    windows = (len(text) - 1) // MICRO.context
    size = next(size for size in range(2, 9) if windows % size)
    batches = fixed_batches(text, size, MICRO.context, 10**6)
    assert [len(inputs) for inputs, _ in batches] == [size] * (windows // size) + [windows % size]


def test_tokens_are_not_split_without_sequence_parallelism(tmp_path: Path) -> None:
    texts, out = tmp_path / "texts", tmp_path / "out"
    texts.mkdir()
    fixed = ("--model", "micro", "--device", "cpu", "--batch-size", 1, "--steps", 1, "--recipe", "bf16", "--tp", 2)
    asked = ("train", write_texts(texts), *fixed, "--no-sequence-parallel", "--out", out)
    with command(tmp_path / "ranks", 2, *asked) as started:
        assert started.wait() == [0, 0], started.said()
    assert "2, which share each linear; all tokens on each elsewhere" in (out / "report.md").read_text()
    assert math.isfinite(float((out / "metrics.jsonl").read_text().partition('"loss": ')[2].partition(",")[0]))


# ---- gradient accumulation ----


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_accumulated_micro_batches_are_one_batch(parts: int) -> None:
    """The same sequences: the loss, the gradients and what is held out; in fp32, up to the order of sums."""
    fixed = {"learning_rate": 1e-2, "evaluations": 4, "evaluation_batches": 2, "dtype": torch.float32}
    whole, split = TrainConfig(4, 6, **fixed), TrainConfig(4, 6 // parts, accumulate=parts, **fixed)
    runs = [train("bf16", micro_model(), MICRO.context, micro_corpus(), config, CPU) for config in (whole, split)]
    for one, other in zip(*(run.history for run in runs), strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)
        assert other.validation_loss == pytest.approx(one.validation_loss, rel=1e-5)
    speeds = [run.history[0].tokens_per_second * run.history[0].seconds for run in runs]
    assert speeds == pytest.approx([6 * MICRO.context] * 2)


def test_all_micro_batches_are_searched_for_what_is_not_finite() -> None:
    model, calls = micro_model(), [0]

    def overflow(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * math.inf if calls[0] % 2 == 0 else output  # in the second half of each batch

    model.blocks[1].layernorm_mlp.fc1.register_forward_hook(overflow)
    with pytest.raises(NonFiniteError, match=r"step 1 .*the output of blocks.1.layernorm_mlp.fc1 is the first"):
        train("bf16", model, MICRO.context, micro_corpus(), TrainConfig(1, 1, accumulate=2), CPU)


# ---- weights of another run ----


@pytest.mark.parametrize("first, then", [("delayed", "current"), ("current", "delayed"), ("delayed", "delayed")])
def test_weights_go_to_another_recipe(first: str, then: str) -> None:
    source, target = micro_model(first, seed=1), micro_model(then)
    for name, buffer in source.named_buffers():
        if name.endswith("amax_history"):
            buffer.fill_(3.0)
    load_weights(target, source.state_dict(), Path("there"))
    for (name, loaded), parameter in zip(target.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(loaded, parameter), name
    histories = [buffer for name, buffer in target.named_buffers() if name.endswith("amax_history")]
    assert bool(histories) == (then == "delayed")
    assert all(bool((history == 3.0).all()) == (first == "delayed") for history in histories)
    with pytest.raises(ValueError, match=r"there does not fit the model: (?s:.)*Missing key"):
        load_weights(target, {}, Path("there"))
