"""Experts in CUDA graphs: a captured step, replayed on other tokens, is the eager one; the host waits for nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat.nn import GroupedMLP, MoE

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
T, H, F, E, K = 200, 128, 96, 6, 2
RECIPES = pytest.mark.parametrize("recipe", ["none", "current", "delayed", "block", "mxfp8"])
Step = Callable[[nn.Module], list[Tensor]]


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_replays(layer: nn.Module, step: Step, others: list[Callable[[], Any]]) -> None:
    """``step`` captured and replayed gives what it gives in eager code, after each of ``others`` changed its inputs."""

    def run(of: nn.Module) -> list[Tensor]:
        of.zero_grad(set_to_none=True)
        return step(of) + [p.grad for p in of.parameters() if p.grad is not None]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(layer)
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with no_synchronization(), torch.cuda.graph(graph):
        captured = run(layer)
    twin = copy.deepcopy(layer)
    for change in others:
        change()
        graph.replay()
        found = [each.clone() for each in captured]
        with no_synchronization():
            expected = run(twin)
        assert len(found) == len(expected) > 3
        for mine, its in zip(found, expected, strict=True):
            assert torch.equal(mine, its)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


@RECIPES
@pytest.mark.parametrize("single", [False, True], ids=["each", "single"])
def test_moe(recipe: str, single: bool) -> None:
    """Whatever experts the tokens choose: also all of them the same ones."""
    torch.manual_seed(0)
    layer = MoE(H, F, E, K, dtype=BF16, device="cuda", recipe=recipe, single_grouped_weight=single)
    x, dy = values(T, H).requires_grad_(), values(T, H)

    def step(of: nn.Module) -> list[Tensor]:
        x.grad = None
        y = of(x)
        y.backward(dy)
        assert x.grad is not None
        return [y.detach(), x.grad]

    def change(alike: bool) -> None:
        with torch.no_grad():
            x.copy_(values(1, H).expand(T, H) if alike else values(T, H))
            dy.copy_(values(T, H))

    check_replays(layer, step, [lambda: change(False), lambda: change(True), lambda: change(False)])


@RECIPES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_grouped_mlp(recipe: str, bias: bool) -> None:
    """Counts that change, with empty experts and rows that are nobody's."""
    torch.manual_seed(0)
    layer = GroupedMLP(E, H, F, bias=bias, dtype=BF16, device="cuda", recipe=recipe)
    x, dy = values(T, H).requires_grad_(), values(T, H)
    p = torch.rand(T, device="cuda").requires_grad_()
    counts = torch.full((E,), T // E, device="cuda")

    def step(of: nn.Module) -> list[Tensor]:
        x.grad = p.grad = None
        y = of(x, counts, probabilities=p)
        y.backward(dy)
        assert x.grad is not None and p.grad is not None
        return [y.detach(), x.grad, p.grad]

    def change(*own: int) -> None:
        with torch.no_grad():
            x.copy_(values(T, H)), dy.copy_(values(T, H)), counts.copy_(torch.tensor(own))

    changes = [(T, 0, 0, 0, 0, 0), (1, 0, 99, 17, 0, 3), (40, 50, 30, 40, 20, 20)]
    check_replays(layer, step, [lambda own=own: change(*own) for own in changes])  # type: ignore[misc]
