"""Siblings that are given one input share one cast of it, and nothing else is shared or kept."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from minifloat import Linear
from minifloat.functional import linear
from tests.helpers.count_casts import CountCasts
from tests.helpers.sample import first_by_default

SHARING = ["current", "block", "mxfp8"]


def siblings(recipe: str, number: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Linear(32, 16 + i, recipe=recipe) for i in range(number))


def casts_of(x: Tensor, layers: nn.ModuleList) -> int:
    with CountCasts() as casts:
        for layer in layers:
            layer(x)
    return casts.shapes[tuple(x.shape)]


def alone(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output with nothing to share."""
    linear._local.slot.latest = None
    y: Tensor = layer(x.clone())
    return y


@pytest.mark.parametrize("name", [*SHARING, "delayed", "nvfp4"])
def test_one_cast_for_three(name: str) -> None:
    """Outputs and gradients are those of layers that each cast for themselves; NVFP4's input is not random."""
    layers = siblings(name)
    expected = casts_of(torch.randn(5, 32), layers[:1])
    x = torch.randn(5, 32, requires_grad=True)
    assert casts_of(x, layers) == expected * (3 if name == "delayed" else 1)
    if name == "delayed":
        return
    torch.manual_seed(1)
    ys = [layer(x) for layer in layers]
    sum(y.square().sum() for y in ys).backward()  # type: ignore[union-attr]
    found = [x.grad, *(layer.weight.grad for layer in layers)]
    layers.zero_grad()
    z = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    outs = []
    for layer in layers:
        linear._local.slot.latest = None
        outs.append(layer(z))
    sum(y.square().sum() for y in outs).backward()  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(ys, outs, strict=True))
    for a, b in zip(found, [z.grad, *(layer.weight.grad for layer in layers)], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("name", SHARING)
def test_released_with_the_input(name: str) -> None:
    """The operands live no longer than the input."""
    layer = Linear(32, 16, recipe=name)
    x = torch.randn(5, 32)
    with torch.no_grad():
        layer(x)
    latest = linear._local.slot.latest
    assert latest is not None
    codes = weakref.ref(latest.operands.any.codes)
    del latest
    del x
    gc.collect()
    assert linear._local.slot.latest is None and codes() is None


@pytest.mark.parametrize("name", SHARING)
def test_not_after_a_write(name: str) -> None:
    first, second = siblings(name, 2)
    x = torch.randn(5, 32)
    first(x)
    x.mul_(-2)
    assert torch.equal(second(x), alone(second, x))


def test_not_for_another_tensor_dtype_or_recipe() -> None:
    first, second = siblings("current", 2)
    x = torch.randn(5, 32)
    first(x)
    assert torch.equal(second(x.clone()), alone(second, x))
    other = Linear(32, 16, recipe="mxfp8")
    first(x)
    assert torch.equal(other(x), alone(other, x))
    first(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = second(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, alone(second, x))


def test_not_across_threads() -> None:
    first, second = siblings("current", 2)
    x = torch.randn(5, 32)
    first(x)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(casts_of(x, nn.ModuleList([second]))))
    thread.start()
    thread.join()
    assert seen[0] > 0


def test_not_for_inference_tensors() -> None:
    """They count no writes."""
    first, second = siblings("current", 2)
    with torch.inference_mode():
        x = torch.randn(5, 32)
        first(x)
        x.mul_(-2)
        assert torch.equal(second(x), alone(second, x))


def test_evaluation_then_training() -> None:
    """A forward that needs no columnwise operand leaves one that training does not take."""
    first, second = siblings("mxfp8", 2)
    x = torch.randn(5, 32)
    with torch.no_grad():
        first(x)
    second(x).sum().backward()
    found = second.weight.grad
    second.zero_grad()
    alone(second, x).sum().backward()
    assert torch.equal(found, second.weight.grad)


def test_original_input_is_not_kept_twice() -> None:
    layer = Linear(32, 16, recipe="current", save_original_input=True)
    linear._local.slot.latest = None
    layer(torch.randn(5, 32, requires_grad=True))
    assert linear._local.slot.latest is None


@first_by_default
@pytest.mark.parametrize("name", SHARING)
def test_one_cast_in_a_compiled_graph(name: str) -> None:
    """There the casts of one tensor are common subexpressions."""
    layers, forward = siblings(name), []
    casts = (torch.ops.minifloat.cast.default, torch.ops.minifloat.amax_and_cast.default)

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        forward.append(sum(node.target in casts for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(lambda x: [layer(x) for layer in layers], fullgraph=True, backend=backend)
    x = torch.randn(5, 32)
    ys = compiled(x)
    torch._dynamo.reset()
    assert forward[0] == 1 + len(layers)
    assert all(torch.equal(y, alone(layer, x)) for y, layer in zip(ys, layers, strict=True))


def test_a_layer_that_comes_again_casts_anew() -> None:
    """Its input may be a buffer that was filled in a way which PyTorch does not count, as for a CUDA graph."""
    values = np.ones((4, 32), dtype=np.float32)
    x, layer = torch.from_numpy(values), Linear(32, 32, recipe="current")
    layer(x)
    values *= 3
    y = layer(x)
    assert torch.equal(y, layer(torch.from_numpy(values.copy())))


def test_an_input_that_dies_in_another_thread_is_forgotten() -> None:
    """As on a GPU, where backward frees it."""
    x, layer = torch.randn(4, 32), Linear(32, 32, recipe="current")
    layer(x)
    held = [x]
    del x
    slot = linear._local.slot
    assert slot.latest is not None
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert slot.latest is None
