"""``minifloat.inspect`` finds and names what is wrong, and changes no bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minifloat
from minifloat import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from minifloat.tools.inspected import read_lines

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
    assert seen.lines(forget=True) == lines and not seen.lines() and not seen.rows()


def test_a_cast_that_overflows_is_the_worst_when_it_is_read_again(tmp_path: Path) -> None:
    model = Linear(64, 64, bias=False, recipe="mxfp4")
    x = torch.full((32, 64), 3.38e38)  # finite, and infinite in powers of two
    seen = _step(model, x, "mxfp4")
    seen.write(tmp_path)
    assert {line.place.role: line.losses.snr for line in read_lines(tmp_path)}["X"] == -math.inf
    assert read_lines(tmp_path)[0].losses.nonfinite == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_element_is_counted_once(recipe: str) -> None:
    model = nn.Sequential(Linear(64, 96, bias=False), Linear(96, 32, bias=False))
    seen = _step(model, torch.randn(32, 64, requires_grad=True), recipe)
    sizes = {"X": (32 * 64, 32 * 96), "W": (96 * 64, 32 * 96), "dY": (32 * 96, 32 * 32)}
    for (_, place), sums in seen._measured.items():
        assert sums[1] == sizes[place.role][int(place.layer)], place


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_counts_nothing_twice(reentrant: bool) -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(self[0], x, use_reentrant=reentrant)

    seen = _step(Model(Linear(64, 64, bias=False)), torch.randn(32, 64, requires_grad=True), "mxfp8")
    sizes = {place[1:]: float(sums[1]) for (_, place), sums in seen._measured.items()}
    assert {role for role, _ in sizes} == {"X", "W", "dY"}
    assert all(size == (64 * 64 if place[0] == "W" else 32 * 64) for place, size in sizes.items())


def test_rows_with_more_elements_that_are_not_finite_come_first() -> None:
    model = nn.Sequential(Linear(64, 64), Linear(64, 64))
    with torch.no_grad():
        model[0].weight[3, 5] = math.nan  # a row of the next X
    counts = [of.nonfinite for _, of in _step(model, torch.randn(32, 64), "mxfp8").rows()]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) > 2


def test_a_part_that_is_evaluated_is_no_part_of_the_step() -> None:
    """Checkpoints compute without gradients too, inside of the model."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Linear(64, 64), Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True))

    model = Model()
    with minifloat.inspect(model, every=1) as seen, minifloat.autocast(recipe="current"):
        y = model(torch.randn(32, 64, requires_grad=True))
        with torch.no_grad():
            model.second(torch.full((1, 64), 1e6))
        y.sum().backward()
    rows = seen.rows()
    assert {place[:2] for place, _ in rows} == {
        (name, role) for name in ("first", "second") for role in ("X", "W", "dY")
    }
    assert all(of.amax < 1e3 for _, of in rows)


def test_casts_are_numbered_in_the_step() -> None:
    model = nn.Sequential(Linear(64, 64, recipe="mxfp8"), Linear(64, 64, recipe="mxfp8"))
    with minifloat.inspect(model, every=1) as seen:
        for step in range(3):
            x = torch.randn(32, 64)
            x[0, 0] = math.nan if step == 2 else 0
            model(x).sum().backward()
    first = seen.first_nonfinite
    assert first is not None and (first.step, first.order, first.place.role) == (2, 1, "X")


def test_a_weight_that_is_kept_for_microbatches_is_seen() -> None:
    model = Linear(64, 64, recipe="current")
    with minifloat.inspect(model, every=1) as seen:
        for first in (True, False):
            model(torch.randn(32, 64), is_first_microbatch=first).sum().backward()
    (weight,) = [of for place, of in seen.rows() if place.role == "W"]
    assert weight.amax == model.weight.abs().max()


def test_compiled_models_are_refused_and_uninspected_ones_named() -> None:
    model = nn.Sequential(Linear(64, 64), Linear(64, 64))
    with pytest.raises(ValueError, match="inspect: OptimizedModule is compiled"):
        minifloat.inspect(torch.compile(model))
    model[1].compile()
    with pytest.raises(ValueError, match="inspect: 1 is compiled"):
        minifloat.inspect(model)
    with pytest.warns(UserWarning, match="no step has reported a cast"), minifloat.inspect(model[0]):
        model[0](torch.randn(32, 64))  # under no recipe


@pytest.mark.parametrize("options", [{}, {"recompute_activation": True, "single_grouped_weight": True}], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_keep_their_bits(recipe: str, options: dict[str, Any]) -> None:
    def train(inspected: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = minifloat.MoE(64, 64, 4, top_k=2, **options).bfloat16()
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        seen = minifloat.inspect(model, every=1) if inspected else None
        with minifloat.autocast(recipe=recipe):
            y = model(x)
        y.float().square().sum().backward()
        if seen is not None:
            seen.close()
            found = {(place.layer, place.role) for place, _ in seen.rows()}
            assert found == {(f"experts.fc{i}", role) for i in (1, 2) for role in ("X", "W", "dY")}
            assert all(of.snr > 10 for _, of in seen.rows())  # each beside the values that it was cast from
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_measured_as_single_linears(recipe: str) -> None:
    """Of rows that are no expert's nothing is counted; rotated groups have no shares of codes."""
    torch.manual_seed(0)
    splits, rows = [5, 0, 27], 40
    experts = GroupedLinear(3, 64, 96, recipe=recipe)
    x, dy = torch.randn(rows, 64), torch.randn(rows, 96)
    x[3, 7] = math.inf
    x[sum(splits) :] = math.nan
    with minifloat.inspect(experts, every=1) as seen:
        x_in = x.clone().requires_grad_()
        experts(x_in, splits).backward(dy)
    singles = nn.ModuleList(Linear(64, 96, recipe=recipe) for _ in splits)
    with minifloat.inspect(singles[0], every=1) as one:
        one._names, start = {single: "" for single in singles}, 0
        one._begin(singles[0], ())
        for single, size, number in zip(singles, splits, range(3), strict=True):
            single.weight.data.copy_(experts.get_submodule(str(number)).weight)
            rows_of = slice(start, start := start + size)
            single(x[rows_of].clone().requires_grad_()).backward(dy[rows_of])
    want = {place[1:]: of for place, of in one.rows()}
    got = {place[1:]: of for place, of in seen.rows()}
    assert got.keys() == want.keys()
    for place, of in got.items():
        drawn = recipe == "nvfp4" and place[0] == "dY"
        rotated = recipe == "nvfp4" and place in {("X", "columnwise"), ("dY", "columnwise")}
        assert (of.amax, of.nonfinite) == (want[place].amax, want[place].nonfinite)
        assert drawn or of.snr == pytest.approx(want[place].snr, abs=1e-6, nan_ok=True)
        assert math.isnan(of.underflow) if rotated else drawn or of[1:3] == pytest.approx(want[place][1:3])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(recipe: str) -> None:
    with torch.device("cuda"):
        for kind in MODULES:
            test_no_bit_changes_and_every_operand_is_seen(kind, recipe)
        test_experts_keep_their_bits(recipe, {})
        test_experts_are_measured_as_single_linears(recipe)
