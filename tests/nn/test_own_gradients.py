"""Weight gradients that go past autograd, to ``main_grad`` or ``backward_dw``, are those that autograd would give."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from minifloat import GroupedLinear, LayerNormMLP, Linear
from tests.helpers.distributed_pool import on_ranks, process_group

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
@pytest.mark.parametrize("delay", [False, True], ids=["now", "later"])
@pytest.mark.parametrize(
    ("run", "second"),  # without True and None of one reentrant microbatch: its recomputation does not know of one
    [case for case in product(RUNS, (True, False, None)) if case != ("reentrant", None)],
)
def test_the_first_product_of_a_step_replaces(make: Any, second: bool | None, delay: bool, run: str) -> None:
    """Of any use: backward comes to the last one first."""
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


# ---- backwards that are to give the gradient of X alone ----

OPTIONS = [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}]


def of_x(way: str, y: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of X, and of nothing else."""
    if way == "grad":
        return torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    y.square().sum().backward(inputs=[x], retain_graph=True)
    return x.grad


@pytest.mark.parametrize("make", [linear, Experts, lambda **options: LayerNormMLP(32, 32, bias=False, **options)])
@pytest.mark.parametrize("options", OPTIONS, ids=["main_grad", "later"])
@pytest.mark.parametrize("way", ["grad", "inputs"])
@pytest.mark.parametrize("run", ["plain", "checkpoint"])
def test_a_gradient_of_x_alone(make: Any, options: dict[str, bool], way: str, run: str) -> None:
    """It leaves ``main_grad``, ``grad`` and the queue alone, and the next backward gives them as ever."""
    plain, layer = pair(make, **options)
    for weight in layer.parameters():
        weight.main_grad.zero_()
    x = torch.randn(32, 32, requires_grad=True)
    y = RUNS[run](layer, x)
    dx = of_x(way, y, x)
    (wanted,) = torch.autograd.grad(plain(x).square().sum(), x)
    assert dx is not None and torch.equal(dx, wanted)
    assert all(p.grad is None and not p.main_grad.any() for p in layer.parameters())
    assert not any(getattr(each, "_wgrad_tasks", ()) for each in layer.modules())
    y.square().sum().backward()
    if options.get("delay_wgrad_compute"):
        layer.backward_dw()
    plain(x).square().sum().backward()
    for own, p in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.main_grad if own.grad is None else own.grad, p.grad)


def test_the_gradients_that_are_asked_for() -> None:
    """Of one expert alone; and of all, by ``torch.autograd.grad``, which returns none."""
    plain, layer = pair(Experts, fuse_wgrad_accumulation=True)
    weights = list(layer.parameters())
    x = torch.randn(32, 32, requires_grad=True)
    layer(x, True).sum().backward(inputs=[weights[1]])
    plain(x).sum().backward()
    wanted = [p.grad for p in plain.parameters()]
    assert weights[0].main_grad.isnan().all() and torch.equal(weights[1].main_grad, wanted[1])
    _, *own = torch.autograd.grad(layer(x, True).sum(), [x, *weights], allow_unused=True)
    assert own == [None, None]
    assert all(torch.equal(weight.main_grad, dw) for weight, dw in zip(weights, wanted, strict=True))


@on_ranks(2)
def test_a_gradient_of_x_alone_over_ranks(rank: int, size: int) -> None:
    for options in ({}, *OPTIONS):
        torch.manual_seed(0)
        layer: Any = linear(etp_group=process_group(), **options)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        x = torch.randn(32, 32, requires_grad=True)
        y = layer(x)
        assert of_x("grad", y, x) is not None and not layer._wgrad_tasks
        assert layer.weight.grad is None and not layer.weight.main_grad.any()
        y.square().sum().backward()
        if options.get("delay_wgrad_compute"):
            layer.backward_dw()
        assert layer.weight.main_grad.any() or layer.weight.grad is not None


# ---- weights that are computed ----


@pytest.mark.parametrize("options", OPTIONS, ids=["main_grad", "later"])
@pytest.mark.parametrize("make", [linear, Experts])
def test_a_weight_that_is_computed(make: Any, options: dict[str, bool]) -> None:
    """Autograd gives the gradients of what it is computed from, as where it gives all."""
    plain, layer = pair(make, **options)
    for each in (plain, layer):
        weight_norm(each if make is linear else getattr(each.grouped, "1"))
    for _ in range(2):
        x = torch.randn(32, 32)
        for each in (plain, layer):
            each(x, True).square().sum().backward()
        if options.get("delay_wgrad_compute"):
            layer.backward_dw()
        for own, p in zip(layer.parameters(), plain.parameters(), strict=True):
            assert own.grad is not None and torch.equal(own.grad, p.grad)


@pytest.mark.parametrize("options", OPTIONS, ids=["main_grad", "later"])
def test_a_weight_that_is_given(options: dict[str, bool]) -> None:
    """As by ``torch.func.functional_call``, here of an adapter's product."""
    gradients = []
    for layer in pair(linear, **options):
        a, b = torch.ones(32, 2, requires_grad=True), torch.ones(2, 32, requires_grad=True)
        functional_call(layer, {"weight": a @ b}, torch.ones(32, 32)).square().sum().backward()
        gradients.append((a.grad, b.grad))
    assert all(torch.equal(own, other) for own, other in zip(*gradients, strict=True))
