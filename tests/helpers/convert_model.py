"""A transformer of PyTorch that tests of ``convert`` convert, and steps of it that are compared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat.convert import ConversionReport, DefaultFilter, convert


class Attention(nn.Module):
    """One head, with q, k and v as separate linears."""

    def __init__(self, width: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return self.o(y)


class Block(nn.Module):
    """Pre-norm attention and a gated MLP."""

    def __init__(self, width: int, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, linear)
        self.gate, self.up = linear(width, 2 * width), linear(width, 2 * width)
        self.down = linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """A projection, two blocks and a head; with ``linear`` of another class for what the default rule converts."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear, width: int = 32, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, width)
        self.project = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width, linear) for _ in range(2)])
        self.head = nn.Linear(width, 40, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.project(self.tokens(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(24).reshape(2, 12) * 7 % 40

PARTS = ("attention.q", "attention.k", "attention.v", "attention.o", "gate", "up", "down")

INSIDE = [f"blocks.{i}.{part}" for i in range(2) for part in PARTS]


def small_too(model: nn.Module, recipe: Any = "current", rules: Any = (), **options: Any) -> ConversionReport:
    """Converts by the default rule, with layers as small as these."""
    return convert(model, recipe, DefaultFilter(model, smallest=1), rules, **options)


def everything(module: nn.Module, name: str) -> bool:
    return True


def step(model: nn.Module, ids: Tensor = IDS) -> tuple[Tensor, list[Tensor | None]]:
    """Logits and the gradients of all parameters of one step, with the same random bits each time."""
    model.zero_grad()
    torch.manual_seed(3)
    y = model(ids)
    F.cross_entropy(y.flatten(0, 1), ids.flatten()).backward()
    return y.detach(), [p.grad for p in model.parameters()]


def assert_same_step(a: nn.Module, b: nn.Module) -> None:
    (y, grads), (expected, wanted) = step(a), step(b)
    assert torch.equal(y, expected)
    for found, want in zip(grads, wanted, strict=True):
        assert found is not None and want is not None and torch.equal(found, want)
