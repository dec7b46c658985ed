"""Contenders that are modules: one forward and backward of each, on the same data from the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from minifloat.tools.bench import gate
from minifloat.tools.bench.registry import Call, Contender, Measure, Outputs, Roofline

Made = tuple[nn.Module, Sequence[Tensor]]
"""A module and its parameters, in an order that all contenders of a case share."""


def step(module: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor, dy: Tensor) -> Call:
    """The call of one forward and backward: gives Y, dX and the gradients of the parameters."""
    leaf = x.detach().requires_grad_()  # a leaf of its own, so that gradients of contenders do not mix
    leaves = (leaf, *parameters)

    def call() -> Outputs:
        for each in leaves:
            each.grad = None
        y = module(leaf)
        y.backward(dy)
        return [y.detach(), *(each.grad for each in leaves)]  # type: ignore[list-item]

    return call


def expected(made: Made, x: Tensor, dy: Tensor) -> Outputs:
    """Computes the results in float32, by a module of float32 parameters."""
    return step(*made, x.float(), dy.float())()


class Modules:
    """Makes the contenders of one case.

    Args:
        x, dy: the input and the output's gradient.
        reference: outputs in float32.
        products: how many quantized products one result lies behind.
    """

    def __init__(self, x: Tensor, dy: Tensor, reference: Outputs, products: int = 1) -> None:
        self.x, self.dy, self.products = x, dy, products
        self.error = gate.against(reference)

    def __call__(
        self,
        name: str,
        make: Callable[[], Made],
        recipe: str = "bf16",
        *,
        compiled: bool = False,
        fullgraph: bool = True,
        roofline: Roofline | None = None,
        goals: Mapping[Measure, float] | None = None,
    ) -> Contender:
        """The contender of that name; ``recipe`` gives its gate.

        ``fullgraph``: a compiler that would return to eager code in between fails, lest that be measured as compiled.
        """

        def setup() -> Call:
            module, parameters = make()
            called = torch.compile(module, fullgraph=fullgraph, dynamic=False) if compiled else module
            return step(called, parameters, self.x, self.dy)

        allowed = gate.bound(recipe, self.products)
        label = f"{name}, compiled" if compiled else name
        return Contender(label, setup, self.error, allowed, roofline, goals or {}, compiled)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the tensors that belong to all contenders."""
        return self.x.nbytes + self.dy.nbytes


def with_weights(module: nn.Module, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Made:
    """The module, its parameters set to these values."""
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return module, parameters
