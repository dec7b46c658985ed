"""Linears that are given one input: each casts what it finds there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from minifloat import Linear

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
