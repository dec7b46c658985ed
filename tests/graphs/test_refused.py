"""What is refused before a capture, and what a capture tells of an order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minifloat
from minifloat import (
    GroupedLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    autocast,
    make_graphed_callables,
    recompute,
)
from minifloat.graphs.callables import WeightCache
from minifloat.graphs.capture import Progress, Step, steps_of
from tests.helpers.graph_on_cpu import GraphOnCpu

X = torch.randn(4, 32)


def hooked() -> nn.Module:
    module = Linear(32, 32)
    module.weight.register_hook(lambda grad: grad * 2)
    return module


def delayed_wgrad() -> nn.Module:
    return nn.Sequential(LayerNormMLP(32, 64, delay_wgrad_compute=True))


class Forgets(nn.Module):
    """Its output does not depend on one of its inputs."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x * 2


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], type[Exception], str]] = {
    "hooks": (hooked, {}, ValueError, "weight has hooks, which would be captured"),
    "delayed wgrad": (delayed_wgrad, {}, ValueError, "delay_wgrad_compute=True leaves work for"),
    "first microbatch": (nn.Identity, {"cache_quantized_params": True}, TypeError, "Identity: cache_quantized_params"),
    "experts": (lambda: GroupedLinear(2, 32, 32), {"cache_quantized_params": True}, ValueError, "not for grouped"),
    "calibrating": (nn.Identity, {"calibrating": True, "enabled": True}, ValueError, "calibrating=True is for"),
    "order": (nn.Identity, {"_order": [1, 2]}, ValueError, "2 at 1 names none of 1 modules"),
    "warm-ups": (nn.Identity, {"num_warmup_iters": 0}, ValueError, "num_warmup_iters"),
    "kwargs": (nn.Identity, {"sample_kwargs": 3}, TypeError, "sample_kwargs"),
}


@pytest.mark.usefixtures("graph_on_cpu")
@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    make, options, error, words = CASES[name]
    with pytest.raises(error, match=words):
        make_graphed_callables(make(), (X,), **options)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ValueError, match=r"are on \['cpu'\]; a CUDA graph needs all of them on one CUDA device"):
        make_graphed_callables(Linear(32, 32), (X,))


@pytest.mark.usefixtures("graph_on_cpu")
def test_arguments_of_several_modules() -> None:
    pair = [Linear(32, 32), Linear(32, 32)]
    with pytest.raises(ValueError, match="2 modules and sample_args of 1"):
        make_graphed_callables(pair, [(X,)])
    with pytest.raises(ValueError, match="2 modules and sample_kwargs of 1"):
        make_graphed_callables(pair, [(X,), (X,)], sample_kwargs=[{}])


@pytest.mark.usefixtures("graph_on_cpu")
def test_inputs_without_gradients() -> None:
    samples = X.clone().requires_grad_(), X.clone().requires_grad_()
    with pytest.raises(ValueError, match="no output depends on the input number 1"):
        make_graphed_callables(Forgets(), samples)
    module = make_graphed_callables(Forgets(), samples, allow_unused_input=True)
    module(*samples).sum().backward()
    assert samples[0].grad is not None and samples[1].grad is None


@pytest.mark.usefixtures("graph_on_cpu")
def test_calls_that_differ_from_the_capture() -> None:
    module = make_graphed_callables(Linear(32, 32), (X,), recipe="current")
    with pytest.raises(ValueError, match="runs under DelayedScaling"), autocast(recipe="delayed"):
        module(X)
    with pytest.raises(ValueError, match="argument 0 required no gradient"):
        module(X.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"argument 0 was \(\(4, 32\), torch.float32"):
        module(X[:1])
    with pytest.raises(TypeError, match="nested otherwise"):
        module(X, X)
    with torch.no_grad():
        assert module(X[:1]).shape == (1, 32)  # in another mode the module itself runs
    assert module.eval()(X[:1]).shape == (1, 32)
    module.train()
    with pytest.raises(RuntimeError, match="cannot be recomputed"):
        checkpoint(module, X, use_reentrant=False).sum().backward()
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match="weight is in other memory"):
        module(X)


def test_recomputations_that_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds checkpoints of what says that it draws nothing, as modules of ours do that have no dropout."""
    monkeypatch.setattr(recompute, "capturing", lambda: True)
    linear = Linear(32, 32, recipe="current")
    with pytest.raises(RuntimeError, match="draws other random numbers in the recomputation; pass preserve_rng_state"):
        minifloat.checkpoint(linear, X)
    minifloat.checkpoint(linear, X, preserve_rng_state=False).sum().backward()
    LayerNormMLP(32, 64, checkpoint=True)(X).sum().backward()
    attention = MultiheadAttention(32, 2, attention_dropout=0.5)
    with pytest.raises(RuntimeError, match="draws other random numbers"):
        attention(X[:, None], checkpoint_core_attention=True)
    attention.core_attention.attention_dropout = 0.0
    attention(X[:, None], checkpoint_core_attention=True).sum().backward()


@pytest.mark.usefixtures("graph_on_cpu")
def test_quantized_outputs() -> None:
    with pytest.raises(ValueError, match="returns no QuantizedTensor"):
        make_graphed_callables(Linear(32, 32), (X,), sample_kwargs={"fp8_output": True}, recipe="current")


@pytest.mark.usefixtures("graph_on_cpu")
def test_what_was_overwritten_is_not_read() -> None:
    module = make_graphed_callables(Linear(32, 32), (X,), recipe="current")
    first, second = module(X), module(X)
    with pytest.raises(RuntimeError, match="another graph has run since this backward's forward"):
        first.sum().backward()
    second.sum().backward()
    with pytest.raises(RuntimeError, match="another graph has run"):
        second.sum().backward()


@pytest.mark.usefixtures("graph_on_cpu")
def test_graphs_of_two_modules_are_in_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So one that runs again has overwritten what the backward of the other reads."""
    pools, capture = [], GraphOnCpu.capture
    monkeypatch.setattr(GraphOnCpu, "capture", lambda self, call: pools.append(self.pool) or capture(self, call))
    one, two = make_graphed_callables([Linear(32, 32), Linear(32, 32)], [(X,), (X,)], recipe="current")
    assert len(pools) == 4 and len({*map(id, pools)}) == 1
    _, second = one(X), two(X)
    one(X)
    with pytest.raises(RuntimeError, match="another graph has run since this backward's forward"):
        second.sum().backward()


@pytest.mark.usefixtures("graph_on_cpu")
def test_microbatches_of_an_order() -> None:
    module = LayerNormMLP(32, 64)
    ((first, second),) = make_graphed_callables(
        [module], [(X,)], recipe="current", cache_quantized_params=True, _order=[1, 1, -1, -1]
    )
    first(X, is_first_microbatch=True)
    with pytest.raises(ValueError, match="microbatch 1 reads the weights that microbatch 0 has cast"):
        second(X, is_first_microbatch=True)


def test_orders() -> None:
    assert steps_of(None, 2) == [Step(0, 0, True), Step(1, 0, True), Step(1, 0, False), Step(0, 0, False)]
    assert steps_of([1, 1, -1, -1], 1)[2:] == [Step(0, 0, False), Step(0, 1, False)]
    assert steps_of([1, 2], 2) == [Step(0, 0, True), Step(1, 0, True)]  # without gradients
    for order, words in (
        ([1, -1, -1], "-1 at 2 is a backward before its forward"),
        ([1, 2, -2, 1, -1], r"_order has \[2, 1\] forwards and \[1, 1\] backwards"),
        ([0], "0 at 0 names none"),
        ([], r"_order has \[0\] forwards"),
    ):
        with pytest.raises(ValueError, match=words):
            steps_of(order, 2 if order and max(order) > 1 else 1)


def test_progress() -> None:
    """A step may leave out backwards, and a forward that comes again begins another step."""
    progress = Progress()
    first = progress.forward(0)
    assert progress.forward(1) == first
    again = progress.forward(0)
    with pytest.raises(RuntimeError, match="layer: another graph has run"):
        progress.backward(3, first, "layer")
    progress.backward(3, again, "layer")


def test_when_weights_are_cast() -> None:
    """Without a cast there is nothing to skip, nor after a write."""
    module = Linear(32, 32)
    cache, skipped = WeightCache(module, torch.device("cpu")), []
    for first in (False, False, None, False, True, False):
        cache.choose(first)
        skipped.append(bool(cache.skip))
    assert skipped == [False, True, False, True, False, True]
    with torch.no_grad():
        module.weight.mul_(2)
    cache.choose(False)
    assert not cache.skip
    cache.choose(False)
    assert cache.skip
