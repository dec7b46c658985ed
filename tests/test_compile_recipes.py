"""Recipes in compiled code: equal ones, custom ones, changes between steps, contexts that are left by an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    LayerNormLinear,
    Linear,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Quantizer,
    autocast,
)
from minifloat.autocast import current
from minifloat.formats import Format
from minifloat.recipe import DelayedScalingRequest, QuantizerRole, Recipe
from tests.helpers.compiled import Pair, compiled, graphs
from tests.helpers.sample import first_by_default

pytestmark = pytest.mark.usefixtures("fresh_compiler")

IN, OUT = 32, 17
CURRENT = Float8CurrentScaling()


def by_format(role: QuantizerRole) -> Quantizer:
    return Quantizer(Format("e5m2" if role.tensor_type == "grad_output" else "e4m3", 32, scale_rule="e8m0"))


def by_recipe(role: QuantizerRole) -> Quantizer:
    return CURRENT.quantizer(role)


def by_new_recipe(role: QuantizerRole) -> Quantizer:
    return Float8BlockScaling(use_f32_scales=True).quantizer(role)


def by_request(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    return DelayedScalingRequest(amax_history_len=4) if role.tensor_type == "weight" else Quantizer(Format())


def by_argument(scale_rule: str, role: QuantizerRole) -> Quantizer:
    return Quantizer(Format("e4m3", 32, scale_rule=scale_rule))


def by_closure() -> Recipe:
    """Its factory is another function each time."""
    element = "e4m3"

    def factory(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
        weight = role.tensor_type == "weight"
        return DelayedScalingRequest(amax_history_len=4) if weight else Quantizer(Format(element))

    return CustomRecipe(factory)


RECIPES: dict[str, Callable[[], Recipe]] = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "current, options": lambda: Float8CurrentScaling(amax_epsilon=1e-3, use_power_2_scales=True),
    "rowwise": Float8RowwiseScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
    "by_format": lambda: CustomRecipe(by_format),
    "by_recipe": lambda: CustomRecipe(by_recipe),
    "by_new_recipe": lambda: CustomRecipe(by_new_recipe),
    "by_request": lambda: CustomRecipe(by_request),
    "by_closure": by_closure,
    "by_lambda": lambda: CustomRecipe(lambda role: by_format(role)),
    "by_partial": lambda: CustomRecipe(partial(by_argument, "e8m0")),
}
DEFAULT = [("own", "by_request"), ("inside", "delayed"), ("inside", "by_new_recipe"), ("outside", "by_lambda")]
SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in product(("own", "outside", "inside"), RECIPES)
    if case not in DEFAULT
]


def around(recipe: Recipe | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if recipe is None else autocast(recipe=recipe)


class Ways(Pair):
    """A linear that gets an equal recipe, made anew in each step, in one of three ways; never run eagerly before."""

    def __init__(self, make: Callable[[], Recipe], way: str) -> None:
        self.make, self.way = make, way

        def call(model: Any, x: Tensor) -> Tensor:
            with around(make() if way == "inside" else None):
                y: Tensor = model(x)
            return y

        delayed = make().quantizer(QuantizerRole("linear", "weight")).row_format.scale_rule == "given"
        super().__init__(Linear(IN, OUT), call, make() if delayed else None)

    def step(self, x: Tensor, seed: int = 0, training: bool = True) -> Tensor:
        if self.way == "own":
            self.eager.recipe, self.model.recipe = self.make(), self.make()  # type: ignore[assignment]
        with around(self.make() if self.way == "outside" else None):
            return super().step(x, seed, training)


@pytest.mark.parametrize(("way", "name"), [*DEFAULT, *SLOW])
def test_equal_recipes(name: str, way: str) -> None:
    """Nothing is compiled again from the third step on, nor in the second but for what a factory has answered.

    That holds for factories that are made anew in each step, too.
    """
    pair = Ways(RECIPES[name], way)
    for _ in range(2):
        pair.step(torch.randn(6, IN))
    assert graphs() <= (2 if name.startswith("by_") else 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            pair.step(torch.randn(6, IN))


@first_by_default
@pytest.mark.parametrize("way", ["own", "outside"])
def test_another_recipe_compiles_once(way: str) -> None:
    """Each recipe has its numbers and its graph."""
    made = [RECIPES[name] for name in ("current", "current, options", "nvfp4")]
    pair, x = Ways(made[0], way), torch.randn(6, IN)

    def turn() -> list[Tensor]:
        outputs = []
        for make in made:
            pair.make = make
            outputs.append(pair.step(x))
        return outputs

    first, second, third = turn()
    assert graphs() == 3 and not torch.equal(first, second) and not torch.equal(second, third)
    with torch._dynamo.config.patch(error_on_recompile=True):
        turn()
        turn()


def test_factory_in_compiled_code_is_called_once() -> None:
    """It runs while the layer is traced, and its answers are kept: also where autocast gets an equal recipe."""
    asked: list[str] = []

    def factory(role: QuantizerRole) -> Quantizer:
        asked.append(role.tensor_type)
        return Quantizer(Format())

    run = compiled(Linear(IN, OUT))
    for _ in range(3):
        with autocast(recipe=CustomRecipe(factory)):
            run(torch.randn(6, IN))
    assert sorted(asked) == sorted(("input", "weight", "output", "grad_output", "grad_input"))


# ---- contexts ----


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_context_that_an_error_leaves(recipe: str) -> None:
    """Outside of compiled code: histories are as before the region, and the next region's are the eager ones."""
    pair = Pair(Linear(IN, OUT), recipe=RECIPES[recipe]())
    x = torch.randn(6, IN)

    def step(run: Callable[[Tensor], Tensor], fails: bool) -> None:
        with autocast(recipe=RECIPES[recipe]()):
            y = run(x)
            if fails:
                raise ArithmeticError
        y.sum().backward()

    for fails in (False, True, False, True, True, False):
        for run in (pair.eager, pair.run):
            with pytest.raises(ArithmeticError) if fails else contextlib.nullcontext():
                step(run, fails)
        pair.same_state()
    assert torch.equal(pair.eager(x), pair.model(x))  # in high precision: no context is left in force


def test_error_inside_of_compiled_code() -> None:
    """It reaches the caller, in one graph perhaps as the compiler's own error, and leaves no recipe in force."""
    layer, x = Linear(IN, OUT), torch.randn(6, IN)
    wanted = layer(x)

    def run(x: Tensor) -> Tensor:
        with autocast(recipe="current"):
            layer(x)
            raise ArithmeticError("of the user's")

    for fullgraph, error in ((False, ArithmeticError), (True, Exception)):
        with pytest.raises(error, match="of the user's"):
            compiled(run, fullgraph=fullgraph)(x)
        assert torch.equal(layer(x), wanted)


def test_error_that_compiled_code_catches() -> None:
    layer, x = Linear(IN, OUT), torch.randn(6, IN)

    def run(x: Tensor) -> Tensor:
        try:
            with autocast(recipe="current"):
                layer(x)
                raise ArithmeticError
        except ArithmeticError:
            y: Tensor = layer(x)
        return y

    assert torch.equal(compiled(run)(x), layer(x))


def test_error_in_a_context_of_compiled_code() -> None:
    """Raised in some steps after a layer: what it recorded is forgotten, also where compiled code catches the error."""
    recipe, fails = RECIPES["delayed"](), ""

    def call(model: Any, x: Tensor) -> Tensor:
        try:
            with autocast(recipe=recipe):
                y: Tensor = model(x)
                if fails:
                    raise ArithmeticError
        except ArithmeticError:
            if fails == "uncaught":
                raise
            y = model(2 * x)
        return y

    pair = Pair(Linear(IN, IN), call, recipe, fullgraph=False)
    for fails in ("", "uncaught", "caught", ""):
        x = torch.randn(6, IN)
        if fails == "uncaught":
            for run in (partial(call, pair.eager), pair.run):
                with pytest.raises(ArithmeticError):
                    run(x)
            pair.same_state()
        else:
            pair.step(x)
    assert current() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_contexts_outside_and_inside(enabled: bool) -> None:
    """The inner one counts, and what follows it has the outer one's again; a layer's own recipe wins over both."""

    def call(model: Any, x: Tensor) -> Tensor:
        first: Tensor = model[0](x)
        with autocast(enabled=enabled, recipe="mxfp8"):
            second: Tensor = model[1](first)
            third: Tensor = model[2](second)
        fourth: Tensor = model[3](third)
        return fourth

    layers = [Linear(IN, IN), Linear(IN, IN), Linear(IN, IN, recipe="nvfp4"), LayerNormLinear(IN, IN)]
    pair = Pair(torch.nn.Sequential(*layers), call, RECIPES["delayed"]())
    for _ in range(3):
        with autocast(recipe=RECIPES["delayed"]()):
            pair.step(torch.randn(6, IN))
    assert graphs() <= 2


def test_recipe_of_a_context_in_compiled_code_changes() -> None:
    """As of a schedule that the traced function reads: each recipe is compiled once, and none is used for another."""
    recipe = RECIPES["delayed"]()

    def call(model: Any, x: Tensor) -> Tensor:
        with autocast(recipe=recipe):
            y: Tensor = model(x)
        return y

    pair = Pair(Linear(IN, OUT), call, recipe)
    for round in range(2):
        with torch._dynamo.config.patch(error_on_recompile=round > 0):
            for name in ("delayed", "current", "nvfp4"):
                recipe = RECIPES[name]()
                pair.step(torch.randn(6, IN), seed=1)
    assert graphs() == 3
