"""Modules, recipes and modes under torch.compile, each with each: the eager bits, in one graph.

By default each module and each recipe meets each mode, or most of them; the ``slow`` tests are the full product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import LayerNormLinear, LayerNormMLP, Linear, MultiheadAttention, TransformerLayer, autocast
from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.compiled import Pair, graphs

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH, HEADS, BATCH = 16, 2, 2
MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(Linear, WIDTH, 12),
    "LayerNormLinear": partial(LayerNormLinear, WIDTH, 12),
    "LayerNormMLP": partial(LayerNormMLP, WIDTH, 24),
    "MultiheadAttention": partial(MultiheadAttention, WIDTH, HEADS, attention_dropout=0.0),
    "TransformerLayer": partial(TransformerLayer, WIDTH, 24, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
}
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=3),
    **{name: named(name) for name in ("current", "rowwise", "block", "mxfp8", "nvfp4")},
}
MODES = ("training", "inference", "checkpoint", "dynamic")
Case = tuple[str, str, str]
EAGER = {"backend": "aot_eager"}
INDUCTOR = {"backend": "inductor"}
REDUCE_OVERHEAD = INDUCTOR | {"mode": "reduce-overhead"}
SMALL = ("Linear", "LayerNormLinear", "LayerNormMLP")


def under(recipe: Recipe, model: Any, x: Tensor) -> Any:
    """The recipe is in force in the traced function alone."""
    with autocast(recipe=recipe):
        return model(x)


def tokens(length: int, device: str) -> Tensor:
    return torch.randn(length, BATCH, WIDTH, device=device)


def run(
    module: str, recipe: str, mode: str, compiler: Mapping[str, Any] = EAGER, device: str = "cpu",
    **options: Any,
) -> None:  # fmt: skip
    """Three steps in one graph, each of which is compared with the eager one; ``compiler``: how it is compiled."""
    torch.manual_seed(0)
    chosen, model = RECIPES[recipe], MODULES[module](device=device, **options)
    call: Any = partial(under, chosen)
    if mode == "checkpoint":
        call = lambda model, x: under(chosen, partial(minifloat.checkpoint, model), x)  # noqa: E731
    if mode == "inference":
        model.eval()
    pair = Pair(model, call, chosen, dynamic=mode == "dynamic", **compiler)
    if mode == "checkpoint" and recipe == "delayed":
        with pytest.raises(RuntimeError, match="leave what is checkpointed uncompiled"):
            pair.run(tokens(4, device).requires_grad_())
        return
    for number, length in enumerate((4, 6, 8) if mode == "dynamic" else (4, 4, 4)):
        torch.compiler.cudagraph_mark_step_begin()
        for each in (pair.eager, pair.model):
            each.zero_grad()  # those in a CUDA graph's memory must not outlive its next run
        pair.step(tokens(length, device), seed=number, training=mode != "inference")
        assert graphs() == 1


def pairs() -> Iterator[Case]:
    """Each recipe with the smallest module; each module, and each recipe but one, with two modes or more."""
    for i, recipe in enumerate(RECIPES):
        yield "Linear", recipe, MODES[i % 4]
    for module, recipes in (
        ("LayerNormMLP", ("nvfp4", "mxfp8", "delayed", "current")),
        ("LayerNormLinear", ("block",)),
        ("MultiheadAttention", ("mxfp8",)),
        ("TransformerLayer", ("delayed",)),  # its own tests have more
    ):
        yield from zip([module] * 4, recipes, MODES, strict=False)
    yield "MultiheadAttention", "current", "checkpoint"


DEFAULT = list(pairs())


@pytest.mark.parametrize("case", DEFAULT, ids=" ".join)
def test_pairs(case: Case) -> None:
    run(*case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case for case in product(MODULES, RECIPES, MODES) if case not in DEFAULT], ids=" ".join
)
def test_product(case: Case) -> None:
    run(*case)


@pytest.mark.parametrize(
    "case",
    [
        ("Linear", "rowwise", "training"),
        ("LayerNormLinear", "nvfp4", "inference"),
        *[
            pytest.param(case, marks=pytest.mark.slow)
            for case in product(SMALL, RECIPES, MODES)
            if case[1:] != ("delayed", "checkpoint")
        ],
    ],
    ids=str,
)
def test_inductor(case: Case) -> None:
    """The default backend; without biases, whose gradients are plain sums in an order of its own."""
    run(*case, INDUCTOR, bias=False)


def test_reduce_overhead_without_a_gpu() -> None:
    """There it is Inductor's default."""
    run("Linear", "current", "training", REDUCE_OVERHEAD, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case not in DEFAULT))
        for case in product(MODULES, RECIPES, MODES)
        if case[1:] != ("delayed", "checkpoint")
    ],
    ids=" ".join,
)
def test_reduce_overhead(case: Case) -> None:
    """Inductor's CUDA graphs: warm-up, capture and replay are the three steps."""
    with torch._inductor.config.patch(emulate_precision_casts=True):
        run(*case, REDUCE_OVERHEAD, "cuda", bias=False)
