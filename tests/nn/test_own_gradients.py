"""Weight gradients that go past autograd, to ``main_grad`` or ``backward_dw``, are those that autograd would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minifloat import GroupedLinear, Linear

COUNTS = [9, 23]
RUNS: dict[str, Any] = {
    "plain": lambda layer, *args: layer(*args),
    "checkpoint": lambda layer, *args: checkpoint(layer, *args, use_reentrant=False),
    "reentrant": lambda layer, *args: checkpoint(layer, *args, use_reentrant=True),
}


class Experts(nn.Module):
    """A grouped linear that is called as a linear."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.grouped = GroupedLinear(2, 32, 32, bias=False, recipe="current", **options)

    def forward(self, x: Tensor, first: bool | None = None) -> Tensor:
        y: Tensor = self.grouped(x, COUNTS, is_first_microbatch=first)
        return y

    def backward_dw(self) -> None:
        self.grouped.backward_dw()


def linear(**options: Any) -> Linear:
    return Linear(32, 32, bias=False, recipe="current", **options)


def pair(make: Any, **options: Any) -> tuple[Any, Any]:
    """A layer and the same with ``options``, whose weights have a ``main_grad`` from the step before."""
    plain, layer = make(), make(**options)
    layer.load_state_dict(plain.state_dict())
    for weight in layer.parameters():
        weight.main_grad = torch.full_like(weight, float("nan"))
    return plain, layer


# ---- a weight that is used twice ----


@pytest.mark.parametrize("make", [linear, Experts, lambda **options: Experts(single_grouped_weight=True, **options)])
@pytest.mark.parametrize("second", [True, False, None])
@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize("run", RUNS)
def test_the_first_product_of_a_step_replaces(make: Any, second: bool | None, delay: bool, run: str) -> None:
    """Of any use: backward comes to the last one first."""
    if run == "reentrant" and second is None:
        pytest.skip("its forward and recomputation do not say that they are of a microbatch")
    plain, layer = pair(make, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    call = RUNS[run]
    for _ in range(2):
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for first in (True, False):
            x, dy = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
            plain(plain(x)).backward(dy)
            call(layer, call(layer, x, first), second and first).backward(dy)
            for _ in range(2 if delay else 0):
                layer.backward_dw()
            for own, p in zip(total, plain.parameters(), strict=True):
                own += p.grad
            plain.zero_grad()
            for weight, own in zip(layer.parameters(), total, strict=True):
                torch.testing.assert_close(weight.main_grad, own)


@pytest.mark.parametrize("run", ["plain", "checkpoint"])
def test_an_evaluation_between_microbatches_replaces_nothing(run: str) -> None:
    """It may cache its weights by ``is_first_microbatch=True``; no backward comes from it."""
    _, layer = pair(linear, fuse_wgrad_accumulation=True)
    x, own = torch.randn(32, 32, requires_grad=True), []
    for first in (True, False):
        with torch.no_grad():
            layer(x, True)
        RUNS[run](layer, x, first).sum().backward()
        own.append(layer.weight.main_grad.clone())
    torch.testing.assert_close(own[1], 2 * own[0])
