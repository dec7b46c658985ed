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

Call = Callable[..., Any]


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

    exact_biases = True  # else their gradients may be sums in another order

    def __init__(
        self, model: nn.Module, call: Call = lambda model, x: model(x), recipe: Recipe | None = None, **options: Any
    ) -> None:  # fmt: skip
        self.eager, self.model, self.call = model, copy.deepcopy(model), call
        if recipe is not None:
            prepare(self.eager, recipe)
            prepare(self.model, recipe)
        self.run = compiled(lambda x, *more: call(self.model, x, *more), **options)

    def same(self, eager: Tensor | None, found: Tensor | None) -> bool:
        if eager is None or found is None:
            return eager is found
        return torch.equal(eager, found)

    def step(self, x: Tensor, seed: int = 0, training: bool = True, *more: Any) -> Tensor:
        """The output of compiled code, which must equal eager code's, as gradients and buffers must."""
        found = []
        for run in (lambda *given: self.call(self.eager, *given), self.run):
            torch.manual_seed(seed)  # of stochastic rounding
            own = x.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                y = run(own, *more)
            if training:
                y.square().sum().backward()
            found.append((y.detach(), own.grad))
        (y, dx), (z, dz) = found
        assert self.same(y, z), "output"
        assert self.same(dx, dz), "input gradient"
        self.same_state()
        return z  # type: ignore[no-any-return]

    def same_state(self) -> None:
        """Gradients, main gradients and buffers are equal."""
        for (name, p), q in zip(self.eager.named_parameters(), self.model.parameters(), strict=True):
            if name.endswith("bias") and not self.exact_biases and p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5 * float(p.grad.abs().max()))
            else:
                assert self.same(p.grad, q.grad), name
            if hasattr(p, "main_grad"):
                assert self.same(p.main_grad, q.main_grad), name  # type: ignore[attr-defined]
        buffers = dict(self.model.named_buffers())
        assert buffers.keys() == dict(self.eager.named_buffers()).keys()
        for name, buffer in self.eager.named_buffers():
            assert self.same(buffer, buffers[name]), name
