"""``minifloat.inspect`` finds and names what is wrong, and changes no bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import LayerNormLinear, LayerNormMLP, Linear

RECIPES = ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4", "mxfp4", "mxfp6", "w4a8"]
MODULES = {
    "linears": lambda: nn.Sequential(Linear(64, 96), nn.GELU(), Linear(96, 64)),
    "siblings": lambda: _Siblings(),
    "layernorm_linear": lambda: LayerNormLinear(64, 96),
    "layernorm_mlp": lambda: LayerNormMLP(64, 128, activation="gelu"),
    "gated_recomputed": lambda: LayerNormMLP(64, 128, activation="swiglu", checkpoint=True),
    "transformer": lambda: minifloat.TransformerLayer(64, 128, 4),
}


class _Siblings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = Linear(64, 32), Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * self.up(x)


def _train(kind: str, recipe: str, inspected: bool) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = MODULES[kind]().bfloat16()
    seen = minifloat.inspect(model, every=2) if inspected else None
    results = []
    for _ in range(3):
        x = torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        with minifloat.autocast(recipe=recipe):
            y = model(x)
        y.float().square().sum().backward()
        results += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    if seen is not None:
        seen.close()
    return results, seen


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_bit_changes_and_every_operand_is_seen(kind: str, recipe: str) -> None:
    plain, _ = _train(kind, recipe, False)
    inspected, seen = _train(kind, recipe, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, inspected, strict=True))
    roles: dict[str, set[str]] = {}
    for place, of in seen.rows():
        roles.setdefault(place.layer, set()).add(place.role)
        assert of.nonfinite == 0 and not math.isnan(of.snr)
    linears = sum(isinstance(m, Linear) for m in MODULES[kind]().modules())
    assert len(roles) == linears and all(found == {"X", "W", "dY"} for found in roles.values())


def _step(model: nn.Module, x: Tensor, recipe: str = "current", scale: float = 1.0) -> Any:
    with minifloat.inspect(model, every=1) as seen, minifloat.autocast(recipe=recipe):
        (model(x).float().sum() * scale).backward()
    return seen


def test_a_planted_nan_is_named() -> None:
    model = nn.Sequential(Linear(64, 64), Linear(64, 64), Linear(64, 64))
    with torch.no_grad():
        model[1].weight[3, 5] = math.nan
    first = _step(model, torch.randn(32, 64)).first_nonfinite
    assert (first.step, first.rank, first.place.layer, first.place.role, first.elements) == (0, 0, "1", "W", 1)


def test_a_planted_layer_that_saturates_is_named() -> None:
    model = nn.Sequential(Linear(64, 64), Linear(64, 64))
    with torch.no_grad():
        model[1].weight.copy_(torch.ones(64, 64))  # each element is the largest
    rows = dict(_step(model, torch.randn(32, 64)).rows())
    worst = max(rows, key=lambda place: rows[place].saturation)
    assert (worst.layer, worst.role, rows[worst].saturation) == ("1", "W", 1)


def test_a_planted_gradient_that_underflows_is_named() -> None:
    class Shrinking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            dy = dy * 1e-14
            dy[0] = 1  # what the scale of the others comes from
            return dy

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Linear(64, 64), Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Shrinking.apply(self.first(x)))

    seen = _step(Model(), torch.randn(32, 64))
    rows = dict(seen.rows())
    worst = max(rows, key=lambda place: rows[place].underflow)
    assert (worst.layer, worst.role, rows[worst].underflow) == ("first", "dY", 31 / 32)
    assert "first" in seen.table()


def test_steps_are_counted_and_written(tmp_path: Path) -> None:
    model = Linear(64, 64, recipe="mxfp8", name="head")
    with minifloat.inspect(model, every=2) as seen:
        for _ in range(4):
            model(torch.randn(32, 64)).sum().backward()
            model.eval()(torch.randn(32, 64))
            model.train()
        with pytest.raises(RuntimeError, match="close"):
            minifloat.inspect(model)
    model(torch.randn(32, 64)).sum().backward()
    lines = [json.loads(line) for line in seen.write(tmp_path).read_text().splitlines()]
    assert {line["step"] for line in lines} == {0, 2}
    assert {line["layer"] for line in lines} == {"Linear 'head'"}
    found = {(line["role"], line["orientation"]) for line in lines}  # those alone that GEMMs read: there is no dgrad
    assert found == {("X", "rowwise"), ("X", "columnwise"), ("W", "rowwise"), ("dY", "columnwise")}


def test_a_weight_that_is_kept_for_microbatches_is_seen() -> None:
    model = Linear(64, 64, recipe="current")
    with minifloat.inspect(model, every=1) as seen:
        for first in (True, False):
            model(torch.randn(32, 64), is_first_microbatch=first).sum().backward()
    (weight,) = [of for place, of in seen.rows() if place.role == "W"]
    assert weight.amax == model.weight.abs().max()


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4", "delayed"])
def test_experts_keep_their_bits_uninspected(recipe: str) -> None:
    def train(inspected: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = minifloat.MoE(64, 64, 4, top_k=2).bfloat16()
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        seen = minifloat.inspect(model, every=1) if inspected else None
        with minifloat.autocast(recipe=recipe):
            y = model(x)
        y.float().square().sum().backward()
        if seen is not None:
            seen.close()
            assert not any("fc" in place.layer for place, _ in seen.rows())
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
