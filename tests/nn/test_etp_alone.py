"""Extended tensor parallelism in a group of one changes nothing: no bit, no collective, no line of output."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, autocast
from minifloat.nn.embedding import EtpEmbedding
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.etp_linears import recorded

MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **etp: Linear(32, 40, **etp),
    "LayerNormLinear": lambda **etp: LayerNormLinear(32, 40, **etp),
    "LayerNormMLP": lambda **etp: LayerNormMLP(32, 48, activation="swiglu", **etp),
    "TransformerLayer": lambda **etp: TransformerLayer(32, 48, 4, hidden_dropout=0.0, attention_dropout=0.0, **etp),
    "GroupedLinear": lambda **etp: GroupedLinear(3, 32, 40, **etp),
    "EtpEmbedding": lambda **etp: EtpEmbedding(20, 32, **etp),
}


def results(make: Callable[..., nn.Module], recipe: str | None, **etp: Any) -> list[Tensor]:
    """Outputs, gradients and parameters of two steps."""
    torch.manual_seed(0)
    module, found = make(**etp), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(6, 2, 32, requires_grad=True)
        inputs: tuple[Any, ...] = (x,)
        if isinstance(module, GroupedLinear):
            inputs = x.flatten(0, 1), [5, 0, 7]
        elif isinstance(module, EtpEmbedding):
            inputs = (torch.randint(20, (6, 2)),)
        with nullcontext() if recipe is None else autocast(recipe=recipe):
            y = module(*inputs)
        y.square().sum().backward()
        found += [y.detach(), *([x.grad] if x.grad is not None else []), *(p.grad for p in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in module.parameters())]


@pytest.mark.parametrize("recipe", [None, "current", "delayed", "nvfp4"])
@on_ranks(2)
def test_a_group_of_one_changes_nothing(rank: int, size: int, recipe: str | None) -> None:
    own = [dist.new_group([each]) for each in range(size)][rank]
    printed, found = StringIO(), []
    with redirect_stdout(printed):
        for etp in ({}, {"etp_group": own}):
            with recorded() as collectives:  # delayed scaling has some of its own
                found.append(([results(make, recipe, **etp) for make in MODULES.values()], collectives))
    (expected, theirs), (tensors, ours) = found
    assert ours == theirs and not printed.getvalue()
    for name, wanted, got in zip(MODULES, expected, tensors, strict=True):
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert a.shape == b.shape and torch.equal(a, b), name
