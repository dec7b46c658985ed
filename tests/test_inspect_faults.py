"""``minifloat.inspect`` puts a layer that was spoiled before all others, in whichever recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import GroupedLinear, LayerNormLinear, Linear
from minifloat.inspection import MEANINGS

RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


class Spoil(torch.autograd.Function):
    """Multiplies what a layer reads, and leaves the gradients of the layers before as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor) -> Tensor:
        return x * factors

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def heavy_tails() -> nn.Module:
    model = nn.Sequential(*(Linear(64, 64, bias=False) for _ in range(5)))
    tails = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).mul(10).exp()
    model[2].register_forward_pre_hook(lambda module, args: Spoil.apply(args[0], tails))
    return model


def zero_scale() -> nn.Module:
    """A block whose neighbours' scales are 0 in NVFP4 beside it; elsewhere they are zeros by their codes."""
    model = nn.Sequential(*(Linear(64, 64, bias=False) for _ in range(5)))
    factors = torch.ones(64, 64)
    factors[::16, ::16] = 1e9
    model[2].register_forward_pre_hook(lambda module, args: Spoil.apply(args[0], factors))
    return model


def exploding_norm() -> nn.Module:
    model = nn.Sequential(*(LayerNormLinear(64, 64) for _ in range(5)))
    with torch.no_grad():
        model[2].get_parameter("norm.weight")[::16] = 1e9
    return model


def dead_expert() -> nn.Module:
    """Weights that decay has left as the smallest numbers that fp32 has, beside experts in use."""

    class Layers(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x, [16, 16, 16, 16])
            return x

    model = Layers(GroupedLinear(4, 64, 64, bias=False) for _ in range(5))
    with torch.no_grad():
        model[2].get_submodule("1").get_parameter("weight").mul_(1e-43)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fault", [heavy_tails, zero_scale, exploding_norm, dead_expert])
def test_the_spoiled_layer_comes_first(fault: Callable[[], nn.Module], recipe: str) -> None:
    torch.manual_seed(0)
    model = fault()
    with minifloat.inspect(model, every=1) as seen, minifloat.autocast(recipe=recipe):
        for _ in range(2 if recipe == "delayed" else 1):  # the first finds the scales
            model(torch.randn(64, 64, requires_grad=True)).square().sum().backward()
    ranked = seen.rows()
    assert ranked[0][0].layer.startswith("2") and ranked[0][1].excess > 0.01, seen.table()
    table = seen.table().splitlines()
    assert table[1].startswith("2") and [row.partition(":")[0] for row in table[-len(MEANINGS) :]] == list(MEANINGS)


def test_what_is_usual_of_a_recipe_is_none_of_a_layer() -> None:
    """A twentieth and more of normal values underflows in NVFP4; other layers lose less than one that is spoiled."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Linear(64, 64, bias=False, recipe="nvfp4") for _ in range(3)))
    state = torch.get_rng_state()
    with minifloat.inspect(model, every=1) as seen:
        model(torch.randn(64, 64)).square().sum().backward()
    rows = seen.rows()
    assert all(of.underflow > 0.04 and abs(of.excess) < 0.1 for _, of in rows), seen.table()
    found = torch.get_rng_state()
    torch.set_rng_state(state)
    model(torch.randn(64, 64)).square().sum().backward()
    assert torch.equal(found, torch.get_rng_state())  # what is usual was computed without drawing
