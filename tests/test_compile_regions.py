"""Regional compilation: of equal layers that are each compiled by themselves only the first one takes time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat import (
    CustomRecipe,
    GroupedLinear,
    LayerNormMLP,
    Linear,
    MoE,
    MultiheadAttention,
    Quantizer,
    TransformerLayer,
    autocast,
    convert,
    prepare,
)
from minifloat.formats import Format
from minifloat.recipe import QuantizerRole, Recipe, RecipeLike
from tests.helpers.compiled import graphs

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 16
Call = Callable[[Any, Tensor], Tensor]


def plain(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def run(
    layers: list[Any], call: Call = plain, recipe: RecipeLike | None = None, steps: int = 2, backend: str = "eager"
) -> int:
    """Trains a stack of compiled layers beside its eager copies, and gives the number of graphs. All must be equal."""
    twins = copy.deepcopy(layers)
    for layer in layers:
        layer.compile(fullgraph=True, backend=backend)
    found: list[list[Any]] = []
    for each in (layers, twins):
        torch.manual_seed(1)
        for _ in range(steps):
            x = start = torch.randn(4, 2, WIDTH, requires_grad=True)
            with contextlib.nullcontext() if recipe is None else autocast(recipe=recipe):
                for layer in each:
                    x = call(layer, x)
            x.square().sum().backward()
        model = nn.ModuleList(each)
        found.append([x.detach(), start.grad, *[p.grad for p in model.parameters()], *model.buffers()])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    return graphs()


def attention(name: str) -> MultiheadAttention:
    number = int(name.removeprefix("layer"))
    options: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "attention_dropout": 0.0}
    return MultiheadAttention(WIDTH, 2, layer_number=number, name=name, **options)


def packed(layer: Any, x: Tensor) -> Tensor:
    starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    y: Tensor = layer(x.reshape(-1, WIDTH), cu_seqlens_q=starts)
    return y.reshape(x.shape)


def grouped(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer(x.reshape(-1, WIDTH), torch.tensor([5, 3]))
    return y.reshape(x.shape)


class Block(nn.Module):
    """Of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


KINDS: dict[str, tuple[Callable[[str], Any], Call]] = {
    "LayerNormMLP": (lambda name: LayerNormMLP(WIDTH, 24, name=name), plain),
    "GroupedLinear": (lambda name: GroupedLinear(2, WIDTH, WIDTH, name=name), grouped),
    "MoE": (lambda name: MoE(WIDTH, 24, 4, shared_ffn_hidden_size=8, aux_loss_coefficient=0.1, name=name), plain),
    "MultiheadAttention": (attention, packed),
}


@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
def test_twelve_transformer_layers(recipe: str) -> None:
    """More than the eight compilations that PyTorch allows a function."""
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recipe": recipe}
    assert run([TransformerLayer(WIDTH, 24, 2, layer_number=i, **options) for i in range(12)], steps=1) == 1


@pytest.mark.parametrize("way", ["own", "outside"])
def test_forty_eight_layers_under_delayed_scaling(way: str) -> None:
    """Names and places differ, and whether an autocast has seen a layer already."""
    layers = [Linear(WIDTH, WIDTH, name=f"layer{i}", recipe="delayed" if way == "own" else None) for i in range(48)]
    prepare(nn.ModuleList(layers), "delayed")
    assert run(layers, recipe=None if way == "own" else "delayed", backend="aot_eager") == 1


def test_converted_blocks() -> None:
    """Their linears are named by where they are in the model."""
    model = nn.Sequential(*[Block() for _ in range(12)])
    convert(model, "delayed", filter_fn=lambda *_: True)
    assert run(list(model)) == 1


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(kind, recipe, marks=[pytest.mark.slow] * ((i + j) % 2))
        for i, kind in enumerate(KINDS)
        for j, recipe in enumerate(("delayed", "current"))
    ],
)
def test_layers_of_any_names(kind: str, recipe: str) -> None:
    make, call = KINDS[kind]
    layers = [make(f"layer{i}") for i in range(3)]
    prepare(nn.ModuleList(layers), recipe)
    assert run(layers, call, recipe) == 1


def test_recipe_that_asks_for_names() -> None:
    """Layers that are prepared have its answers: one graph for each kind of answer."""

    def factory(role: QuantizerRole) -> Quantizer:
        return Quantizer.identity() if role.name == "layer11" else Quantizer(Format())

    recipe: Recipe = CustomRecipe(factory)
    layers = [Linear(WIDTH, WIDTH, name=f"layer{i}") for i in range(12)]
    prepare(nn.ModuleList(layers), recipe)
    assert run(layers, recipe=recipe) == 2
