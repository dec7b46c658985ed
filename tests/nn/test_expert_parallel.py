"""Experts that ranks share out, beside one process that has all experts and the tokens of all ranks, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import minifloat
from minifloat import GroupedMLP
from minifloat.functional import Routing, sort_by_expert
from minifloat.recipe import Float8CurrentScaling, Recipe
from tests.helpers.distributed_pool import on_ranks
from tests.helpers.recipes import NAMED

E, H, F, K = 6, 64, 48, 2
BF16 = torch.bfloat16
RECIPES: dict[str, Any] = {name: recipe for name, recipe in NAMED.items() if name != "delayed"} | {"none": "none"}


def tokens_of(rank: int, size: int) -> int:
    """Other numbers on each rank; the last one has none."""
    return 0 if rank == size - 1 else 7 + 6 * rank


def choices(tokens: int, skewed: bool) -> Tensor:
    """int64 [T, K]: some dropped; ``skewed``: all experts but one of the first rank get nothing."""
    if skewed:
        return torch.ones(tokens, K, dtype=torch.int64)
    chosen = torch.rand(tokens, E).argsort(1)[:, :K]
    return torch.where(torch.rand(tokens, K) < 0.2, -1, chosen)


def ragged(*shape: int) -> Tensor:
    """Rows of very different sizes: casts of casts and casts of values differ."""
    x = torch.randn(*shape) * torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1)))
    return x.to(BF16)


@dataclass
class Run:
    """A step of an MLP on some tokens."""

    mlp: GroupedMLP
    x: Tensor
    p: Tensor
    dy: Tensor
    routing: Routing

    def __call__(self, *args: Any) -> list[Tensor]:
        """Y, dX, dp."""
        x, p = self.x.clone().requires_grad_(), self.p.clone().requires_grad_()
        y = self.mlp(x, self.routing, *args, probabilities=p)
        y.backward(self.dy)
        assert x.grad is not None and p.grad is not None
        return [y.detach(), x.grad, p.grad]


def compare(rank: int, size: int, options: dict[str, Any], skewed: bool = False, steps: int = 1) -> list[str]:
    """Runs both: what differs."""
    wrong = []
    torch.manual_seed(3)
    whole = GroupedMLP(E, H, F, dtype=BF16, **options)
    torch.manual_seed(3)
    own = GroupedMLP(E, H, F, dtype=BF16, ep_group=dist.group.WORLD, **options)
    for (name, mine) in own.named_parameters():
        theirs = whole.get_parameter(name)
        first = own.fc1.first_expert if theirs.dim() != mine.dim() or theirs.shape != mine.shape else 0
        if not torch.equal(mine, theirs[first : first + len(mine)]):
            wrong.append(f"initial {name}")
    counts = [tokens_of(r, size) for r in range(size)]
    ends = torch.tensor(counts).cumsum(0).tolist()
    at = slice(ends[rank] - counts[rank], ends[rank])
    for step in range(steps):
        x, p, dy = ragged(sum(counts), H), torch.rand(sum(counts), K), ragged(sum(counts), H)
        indices = choices(sum(counts), skewed)
        args = () if steps == 1 else (step == 0,)
        expected = Run(whole, x, p, dy, sort_by_expert(indices, E))(*args)
        found = Run(own, x[at], p[at], dy[at], sort_by_expert(indices[at], E))(*args)
        for name, mine, theirs in zip(("Y", "dX", "dp"), found, expected, strict=True):
            if not torch.equal(mine, theirs[at]):
                wrong.append(f"{name} in step {step}: {(mine.float() - theirs[at].float()).abs().max()}")
    for (name, mine) in own.named_parameters():
        theirs = whole.get_parameter(name)
        first = own.fc1.first_expert if theirs.shape != mine.shape else 0
        assert mine.grad is not None and theirs.grad is not None
        if not torch.equal(mine.grad, theirs.grad[first : first + len(mine)]):
            wrong.append(f"gradient of {name}")
    return wrong


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2, 3)
def test_as_one_process(rank: int, size: int, recipe: str) -> list[str]:
    return compare(rank, size, {"recipe": RECIPES[recipe]})
