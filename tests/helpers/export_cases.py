"""Models that are exported, the shapes that a program is called with, and how its outputs are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from minifloat import (
    CustomRecipe,
    DelayedScaling,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MoE,
    MultiheadAttention,
    QuantizerRole,
    Recipe,
    TransformerLayer,
)
from minifloat.recipe import named

IN, HIDDEN, OUT = 40, 48, 17
TOKENS = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
SHAPES = (6, 5), (2, 9), (33, 2)


def by_role(role: QuantizerRole) -> Any:
    """MXFP8 inputs and 128x128 tiles of weights."""
    return named("block" if role.tensor_type == "weight" else "mxfp8").quantizer(role)


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    **{name: named(name) for name in ("current", "block", "rowwise", "mxfp8", "nvfp4", "mxfp4", "mxfp6")},
    "custom": CustomRecipe(by_role),
}


def two_linears(recipe: Recipe | str | None = None) -> nn.Sequential:
    return nn.Sequential(Linear(IN, HIDDEN, recipe=recipe), nn.ReLU(), Linear(HIDDEN, OUT, bias=False, recipe=recipe))


def trained(model: nn.Module, steps: int = 2) -> nn.Module:
    """After some steps, which give delayed scaling scales of its own; in ``eval()``."""
    for step in range(steps):
        model(torch.randn(7, 3, IN) * 4.0**step).square().mean().backward()
    model.zero_grad()
    return model.eval()


def assert_same(program: Callable[..., Any], model: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The same bits of every output."""
    with torch.no_grad():
        found, wanted = program(*args, **kwargs), model(*args, **kwargs)
    for one, other in zip(*(x if isinstance(x, tuple | list) else (x,) for x in (found, wanted)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


class Twice(nn.Module):
    """A layer that is called twice, a weight that two layers share and one that is read in high precision too."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.first, self.tied = Linear(IN, IN, recipe=recipe), Linear(IN, IN, recipe=recipe)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tied(self.first(self.first(x).relu()))
        return y + F.linear(x, self.first.weight)


class Grouped(nn.Module):
    def __init__(self, recipe: Any, single: bool) -> None:
        super().__init__()
        self.linear = GroupedLinear(3, IN, OUT, recipe=recipe, single_grouped_weight=single)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(0, 1), torch.tensor([3, 0, 1]))
        return y


LAYERS: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "split": (lambda recipe: Linear(IN, HIDDEN, recipe=recipe, parameters_split=["q", "k", "v"]), 1),
    "layernorm linear": (lambda recipe: LayerNormLinear(IN, OUT, recipe=recipe, return_layernorm_output=True), 1),
    "layernorm mlp": (lambda recipe: LayerNormMLP(IN, HIDDEN, recipe=recipe, activation="swiglu"), 2),
    "attention": (lambda recipe: MultiheadAttention(IN, 4, recipe=recipe, input_layernorm=True), 2),
    "transformer": (lambda recipe: TransformerLayer(IN, HIDDEN, 4, recipe=recipe, normalization="RMSNorm"), 4),
    "grouped": (lambda recipe: Grouped(recipe, False), 1),
    "grouped as one": (lambda recipe: Grouped(recipe, True), 1),
    "experts": (lambda recipe: MoE(IN, HIDDEN, 3, 2, recipe=recipe, shared_ffn_hidden_size=16, shared_gate=True), 4),
    "twice": (Twice, 3),
}
"""Layers, and how many activations each casts."""
