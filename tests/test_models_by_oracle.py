"""The models by hand against the oracle in numpy: ``fused_model`` and ``tensor_parallel_oracle`` cast with the package.

What a module is held to, bit for bit, must not repeat a mistake of the package. So each cast that a model makes in a
step is made again by ``oracle``, each update of delayed scaling is computed again, and products are those of the
values that the oracle's codes stand for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.nn import LayerNormLinear, LayerNormMLP
from minifloat.operand import Operand, Quantized
from minifloat.recipe import DelayedScaling, Recipe
from tests.helpers import fused_model, linear_model, oracle, tensor_parallel_oracle
from tests.helpers.fused_model import fill
from tests.helpers.oracle_casts import OracleCast, differences, oracle_cast
from tests.helpers.recipes import NAMED, for_each
from tests.helpers.sample import each_once

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
RECIPES = NAMED | {"delayed": DelayedScaling(margin=1, amax_history_len=2)}  # the third step drops the first one's amax


class Cast(NamedTuple):
    """What was cast, with which of delayed scaling's scales, and to what."""

    kind: str
    x: Tensor
    scale: Tensor | None
    operands: Quantized

    def check(self) -> None:
        """Codes, scales and amaxes are the oracle's; codes that round at random are not looked at."""
        for dim, operand in zip((ROWWISE, COLUMNWISE), self.operands, strict=True):
            assert operand is not None and operand.scale_inv is not None
            fmt = operand.format
            level = float(self.scale) if fmt.scale_rule == "given" and self.scale is not None else None
            want = oracle_cast(self.x.detach(), fmt, ROWWISE if fmt.symmetric else dim, level)
            fields = (operand.codes, operand.scale_inv, operand.amax)
            got = OracleCast(*(None if t is None else t.contiguous().numpy() for t in fields))  # type: ignore[arg-type]
            if fmt.rounding == "stochastic":
                got = got._replace(codes=want.codes)
            assert not differences(f"{self.kind} {fmt.spec}", got, want)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[Cast]:
    """All that the two models cast."""
    seen: list[Cast] = []

    def scale_of(model: Any, kind: str) -> Tensor | None:
        if not model.histories:
            return None
        forward = kind in fused_model.FORWARD_SLOTS
        slots = fused_model.FORWARD_SLOTS if forward else fused_model.BACKWARD_SLOTS
        scale: Tensor = model.histories[not forward].scale[slots.index(kind)]
        return scale.clone()

    def recorded(owner: type, name: str) -> None:
        cast = getattr(owner, name)

        def call(self: Any, kind: str, x: Tensor, *rest: Any) -> Quantized:
            result: Quantized = cast(self, kind, x, *rest)
            seen.append(Cast(kind, x, scale_of(self, kind), result))
            return result

        monkeypatch.setattr(owner, name, call)

    recorded(fused_model.LinearModel, "cast")
    recorded(tensor_parallel_oracle.Linear, "_cast")
    return seen


def check_updates(linear: Any, casts: list[Cast], before: list[tuple[Tensor, Tensor]], recipe: Recipe) -> None:
    """Histories and scales after a step: those of before, the largest amax of each kind, numerics 1.1."""
    slots = fused_model.FORWARD_SLOTS, fused_model.BACKWARD_SLOTS
    assert isinstance(recipe, DelayedScaling)
    for names, history, (scale, amaxes), largest in zip(slots, linear.histories, before, (448, 57344), strict=True):
        newest = [[float(c.x.detach().float().abs().max()) for c in casts if c.kind == name] for name in names]
        amaxes[0] = torch.tensor([max(each, default=0.0) for each in newest])
        rolled, fresh = oracle.delayed_update(
            amaxes.numpy(), scale.numpy(), largest, recipe.margin, recipe.amax_compute_algo
        )
        assert np.array_equal(history.amax_history.numpy(), rolled) and np.array_equal(history.scale.numpy(), fresh)


def copies(linear: Any) -> list[tuple[Tensor, Tensor]]:
    return [(history.scale.clone(), history.amax_history.clone()) for history in linear.histories]


@each_once
@for_each(RECIPES)
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_fused_model(kind: type[nn.Module], recipe: Recipe, casts: list[Cast]) -> None:
    """Whose products and norms are compared with float64 wherever it is used: here are its casts and its state."""
    module = kind(48, 33, params_dtype=BF16)
    fill(module)
    model = fused_model.Model(module, recipe)  # type: ignore[arg-type]
    for scale in (1.0, 4.0, 0.25) if isinstance(recipe, DelayedScaling) else (1.0,):
        before = {name: copies(linear) for name, linear in model.linears.items()}
        x, dy = (torch.randn(21, n).mul(scale).to(BF16) for n in (48, 33 if kind is LayerNormLinear else 48))
        casts.clear()
        model.step(x, dy, BF16)
        model.checks.run()
        assert len(casts) == 3 * len(model.linears)
        for each in casts:
            each.check()
        if isinstance(recipe, DelayedScaling):
            halves = [casts[:2] + casts[-1:], casts[2:5]][: len(model.linears)]  # fc2 lies between fc1's casts
            for (name, linear), own in zip(model.linears.items(), halves, strict=True):
                check_updates(linear, own, before[name], recipe)


def exact(a: Operand, a_along: int, b: Operand, b_along: int) -> linear_model.Product:
    return linear_model.product(linear_model.values(a, a_along), linear_model.values(b, b_along))


@each_once
@for_each(RECIPES)
@pytest.mark.parametrize("mode", ["column", "row"])
def test_tensor_parallel_oracle(mode: Any, recipe: Recipe, casts: list[Cast]) -> None:
    """Two ranks that share the rows of activations: casts, state, and Y as the float64 sum of the ranks' products."""
    group, rows = tensor_parallel_oracle.Group(2, True), [3, 16]
    model = tensor_parallel_oracle.Linear(torch.randn(64, 32), None, mode, group, recipe)
    for scale in (1.0, 4.0, 0.25) if isinstance(recipe, DelayedScaling) else (1.0,):
        before = copies(model)
        x, dy = (torch.randn(19, n).mul(scale).to(BF16) for n in (32, 64))
        casts.clear()
        column = mode == "column"
        ys = model.forward(list(x.split(rows) if column else x.chunk(2, 1)), rows)
        model.finish(0)
        model.backward(list(dy.chunk(2, 1) if column else dy.split(rows)))
        model.finish(1)
        assert [cast.kind for cast in casts] == {
            "column": ["input", "weight", "weight", "grad_output", "grad_output"],
            "row": ["input", "input", "weight", "weight", "grad_output"],
        }[mode]
        gathered = next(cast for cast in casts if cast.kind == ("input" if column else "grad_output"))
        assert torch.equal(gathered.x, x if column else dy)
        for each in casts:
            each.check()
        if isinstance(recipe, DelayedScaling):
            check_updates(model, casts, before, recipe)
        inputs, weights = ([c.operands.along(ROWWISE) for c in casts if c.kind == kind] for kind in ("input", "weight"))
        parts = [exact(a, ROWWISE, w, ROWWISE) for a, w in zip(inputs * 2 if column else inputs, weights, strict=True)]
        if column:
            for y, part in zip(ys, parts, strict=True):
                linear_model.assert_within(y, part, linear_model.bound(part, BF16), "Y")
            continue
        total = parts[0]._replace(exact=parts[0].exact + parts[1].exact)
        limit = sum(linear_model.bound(part, BF16) for part in parts)
        limit = limit + linear_model.rounding(np.abs(total.exact) + limit, BF16)  # of the sum
        linear_model.assert_within(torch.cat(ys), total, limit, "Y")
