"""A model and its compiled copy on the same data: equal to the bit, in few graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from minifloat.nn import prepare
from minifloat.recipe import Recipe

Call = Callable[[Any, Tensor], Any]


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``torch.compile`` in one graph, without a backend's own numerics."""
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True} | options)  # type: ignore[no-any-return]


def graphs() -> int:
    """How often something was compiled since the test began."""
    return counters["stats"]["unique_graphs"]


class Pair:
    """A model and a copy of it, each called by ``call``, that one in compiled code.

    Args:
        recipe: makes the buffers of delayed scaling beforehand.
        options: of ``torch.compile``.
    """

    def __init__(
        self, model: nn.Module, call: Call = lambda model, x: model(x), recipe: Recipe | None = None, **options: Any
    ) -> None:
        self.eager, self.model, self.call = model, copy.deepcopy(model), call
        if recipe is not None:
            prepare(self.eager, recipe)
            prepare(self.model, recipe)
        self.run = compiled(lambda x: call(self.model, x), **options)

    def step(self, x: Tensor, seed: int = 0, training: bool = True) -> Tensor:
        """The output of both, whose output, gradients and buffers must be equal."""
        found = []
        for run in (lambda x: self.call(self.eager, x), self.run):
            torch.manual_seed(seed)  # of stochastic rounding
            own = x.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                y = run(own)
            if training:
                y.square().sum().backward()
            found.append((y.detach(), own.grad))
        (y, dx), (z, dz) = found
        assert torch.equal(y, z), "output"
        assert (dx is None and dz is None) or torch.equal(dx, dz), "input gradient"
        self.same_state()
        return z  # type: ignore[no-any-return]

    def same_state(self) -> None:
        """Gradients, main gradients and buffers are equal."""
        for (name, p), q in zip(self.eager.named_parameters(), self.model.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
            if hasattr(p, "main_grad"):
                assert torch.equal(p.main_grad, q.main_grad), name  # type: ignore[attr-defined]
        buffers = dict(self.model.named_buffers())
        assert buffers.keys() == dict(self.eager.named_buffers()).keys()
        for name, buffer in self.eager.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
