"""Linears that are given one input: each casts what it finds there; a compiler casts it once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from minifloat import Linear
from tests.helpers.sample import first_by_default

RECIPES = ["current", "block", "mxfp8"]


def linears(recipe: str, number: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Linear(32, 16 + i, recipe=recipe) for i in range(number))


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("way", ["numpy", "data", "dlpack"])
def test_memory_that_is_written_in_between(name: str, way: str) -> None:
    """In ways which PyTorch does not count, as writes for a CUDA graph are."""
    first, second = linears(name, 2)
    x = torch.randn(5, 32)
    first(x)
    version = x._version
    if way == "numpy":
        x.numpy()[:] *= np.arange(-2.0, 3.0, dtype=np.float32)[:, None]
    elif way == "data":
        x.data.mul_(torch.arange(-2.0, 3.0)[:, None])
    else:
        torch.utils.dlpack.from_dlpack(x).mul_(torch.arange(-2.0, 3.0)[:, None])  # type: ignore[attr-defined]
    assert x._version == version
    assert torch.equal(second(x), second(x.clone()))
    assert torch.equal(first(x), first(x.clone()))


@first_by_default
@pytest.mark.parametrize("name", RECIPES)
def test_one_cast_in_a_compiled_graph(name: str) -> None:
    """There the casts of one tensor are common subexpressions."""
    layers, forward = linears(name), []
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
    assert all(torch.equal(y, layer(x)) for y, layer in zip(ys, layers, strict=True))
