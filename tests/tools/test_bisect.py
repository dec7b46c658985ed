"""``minifloat bisect``: layers that must stay in high precision are found, in few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat.tools.bisect import Verdict, bisect, relative_error, suspects
from tests.helpers.micro_training import invoke, write_texts

LAYERS = [f"blocks.{number}.fc" for number in range(24)]


def found(bad: set[str], order: Sequence[str] = LAYERS, most: int = 8) -> Verdict:
    """A loss of which each bad layer that is quantized costs 2 %, and each other 0.01 %."""

    def gap(kept: Sequence[str]) -> float:
        quantized = set(LAYERS) - set(kept)
        return 0.02 * len(quantized & bad) + 0.0001 * len(quantized)

    verdict = bisect(order, gap, 0.01, most)
    assert verdict.gap <= 0.01 and verdict.gap == (gap(verdict.kept) if len(verdict.kept) < 24 else 0.0)
    assert verdict.gap_before == gap(())
    return verdict


@pytest.mark.parametrize("bad", LAYERS)
def test_one_among_24_in_at_most_8_runs(bad: str) -> None:
    """In any place of the order; the first suspect in two runs."""
    verdict = found({bad})
    assert verdict.kept == (bad,) and verdict.exact and verdict.runs <= 8
    assert bad != LAYERS[0] or verdict.runs == 2
    assert verdict.rules == f"rules=[('{bad}', 'none')]"


def test_several_or_none() -> None:
    assert found({LAYERS[2], LAYERS[5]}).kept == tuple(LAYERS[:6])
    assert found(set()) == Verdict((), found(set()).gap, found(set()).gap, 1, True)
    few = found({LAYERS[20]}, most=3)
    assert few.kept == tuple(LAYERS) and not few.exact and few.runs == 3


@pytest.mark.parametrize("most", range(2, 9))
def test_no_run_more_than_the_most(most: int) -> None:
    assert all(found({bad}, most=most).runs <= most for bad in LAYERS)


def test_a_loss_that_is_nan_is_too_far() -> None:
    verdict = bisect(["a", "b"], lambda kept: 0.0 if "b" in kept else math.nan, 0.01)
    assert verdict.kept == ("b",) and verdict.gap_before == math.inf
    with pytest.raises(ValueError, match="0 layers and 8 runs"):
        bisect([], lambda kept: 0.0, 0.01)


class Outliers(torch.autograd.Function):
    """Gives values as they are; a few columns of the gradient grow."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * COLUMNS


COLUMNS = torch.ones(64).index_fill(0, torch.arange(0, 64, 16), 1e12)


@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4", "block"])
@pytest.mark.parametrize("plant", ["weight", "input", "gradient"])
def test_the_worst_casts_come_first(recipe: str, plant: str) -> None:
    """Outliers in one tensor of the layer 2, beside which other elements underflow; the layer before sees them too."""
    torch.manual_seed(0)
    model = nn.Sequential(*[minifloat.Linear(64, 64, bias=False, recipe=recipe) for _ in range(5)])
    if plant == "weight":
        with torch.no_grad():
            model[2].get_parameter("weight").mul_(COLUMNS)
        model[2].register_forward_pre_hook(lambda module, args: (args[0] / COLUMNS,))
    elif plant == "input":
        model[2].register_forward_pre_hook(lambda module, args: (args[0] * COLUMNS,))
        model[2].register_forward_hook(lambda module, args, y: y / 1e12)
    else:
        model[3].register_forward_pre_hook(lambda module, args: (Outliers.apply(args[0]),))
    x = torch.randn(96, 64, requires_grad=True)
    errors = suspects(model, lambda: model(x).square().mean().backward())
    assert len(errors) == 5 and sorted(errors.values(), reverse=True) == list(errors.values())
    assert "2" in list(errors)[:2] and errors["2"] > 0.5, errors


def test_relative_error() -> None:
    """Of 448, 1 and 0 in FP8: the first two are exact; of what underflows all."""
    quantizer = minifloat.Float8CurrentScaling().quantizer(minifloat.QuantizerRole("linear", "input"))
    x = torch.zeros(4, 16)
    x[0, 0], x[1, 1] = 448.0, 1.0
    assert relative_error(x, quantizer) == 0.0
    x[2, :2] = 1e-6
    assert relative_error(x, quantizer) == 0.5
    assert relative_error(x.clone().fill_(math.inf), quantizer) == math.inf
    assert relative_error(x[:0], quantizer) == 0.0


def test_an_error_is_at_most_1_under_stochastic_rounding() -> None:
    """One small element in ten is rounded up to ten times its size."""
    quantizer = minifloat.NVFP4BlockScaling().quantizer(minifloat.QuantizerRole("linear", "grad_output"))
    x = torch.full((64, 64), 0.05)
    x[:, ::16] = 6.0
    assert 0.9 < relative_error(x, quantizer) <= 1


def test_the_command(tmp_path: Path) -> None:
    """Of a gap that any recipe reaches, one that none does, and mistakes."""
    text, short = write_texts(tmp_path), ("--model", "micro", "--steps", 2, "--batch-size", 2, "--device", "cpu")
    code, said = invoke("bisect", text, *short, "--gap", 10)
    assert code == 0 and "lose most" in said and "no layer has to stay in bf16" in said, said
    code, said = invoke("bisect", text, *short, "--gap", -10, "--runs", 3)
    assert code == 0 and "3 runs did not tell whether fewer are enough: rules=[('" in said, said
    code, said = invoke("bisect", text, *short, "--learning-rate", 1e30)
    assert code == 2 and "the run in bf16 has no finite loss" in said and "gap" not in said, said
    code, said = invoke("bisect", text, "--recipe", "bf16")
    assert code == 2 and "bf16 is what runs are compared with" in said
