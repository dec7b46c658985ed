"""Optimizers step rows of weights: what was cast of them before is not used again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import minifloat
from tests.helpers.distributed_pool import on_ranks

OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),  # its kernel does not raise the versions of parameters
    "foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "single": partial(torch.optim.SGD, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("recipe", ["current", "none"])
@on_ranks(2)
def test_rows_are_cast_again_after_a_step(rank: int, size: int, kind: str, recipe: str | None) -> None:
    def make(group: Any) -> minifloat.Linear:
        torch.manual_seed(1)
        return minifloat.Linear(32, 64, False, recipe=recipe, etp_group=group)

    whole, sharded = make(None), make(dist.group.WORLD)
    optimizer = OPTIMIZERS[kind](sharded.parameters())
    torch.manual_seed(10 + rank)
    for step in range(3):
        rows: list[Any] = [None] * size
        dist.all_gather_object(rows, sharded.weight.detach())
        before = whole.weight.detach().clone()
        with torch.no_grad():
            whole.weight.copy_(torch.cat(rows))
        assert step == 0 or not torch.equal(whole.weight, before)
        x = torch.randn(16, 32)
        with torch.autocast("cpu", torch.bfloat16):
            y, expected = sharded(x), whole(x)
        assert torch.equal(y, expected)
        y.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
