"""``torch.compile(mode="reduce-overhead")``: Inductor's CUDA graphs of whole layers, whose memory is one pool."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from minifloat.nn import GroupedLinear, LayerNormMLP, Linear

RECIPES = ("current", "delayed", "block", "mxfp8", "rowwise")


def equal_linears(recipe: str) -> nn.Module:
    """Two of one shape: the second reads what the first one's graph left in the pool."""
    return nn.Sequential(*[Linear(256, 256, recipe=recipe, device="cuda", dtype=torch.bfloat16) for _ in range(2)])


def fused(recipe: str) -> nn.Module:
    return LayerNormMLP(256, 512, activation="swiglu", recipe=recipe, device="cuda", dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [equal_linears, fused])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_steps_are_those_of_eager(recipe: str, make: type[nn.Module]) -> None:
    """Six steps: warm-up, the capture of forward and backward, and replays; no tensor is left in the pool."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make(recipe)
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, mode="reduce-overhead")
    with warnings.catch_warnings(), torch._inductor.config.patch(emulate_precision_casts=True):
        warnings.filterwarnings("error", ".*pending, uninvoked backwards.*")
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(64, 256, device="cuda").bfloat16().requires_grad_()
            other, dy = x.detach().clone().requires_grad_(), torch.randn(64, 256, device="cuda").bfloat16()
            y, expected = compiled(other), model(x)
            assert torch.equal(y, expected), step
            y.backward(dy), expected.backward(dy)
            assert x.grad is not None and other.grad is not None and torch.equal(other.grad, x.grad), step
            for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
                assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad), step
                mine.grad = its.grad = None


@pytest.mark.gpu
def test_experts_with_other_counts() -> None:
    torch._dynamo.reset()
    grouped = GroupedLinear(4, 256, 256, recipe="current", device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(copy.deepcopy(grouped), mode="reduce-overhead")
    for own in ((64, 0, 0, 0), (10, 20, 30, 4), (0, 1, 2, 3), (16, 16, 16, 16)):
        torch.compiler.cudagraph_mark_step_begin()
        x, counts = torch.randn(64, 256, device="cuda").bfloat16(), torch.tensor(own, device="cuda")
        assert torch.equal(compiled(x, counts), grouped(x, counts))
