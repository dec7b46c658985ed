"""Compiled layers are traced once for all numbers of rows.

PyTorch's tracer asks of each tensor of a graph whether its dims are 1, to know its strides. Scales of blocks along the
rows have ``ceil(rows / block)`` of them: under ``dynamic=True`` one graph serves rows that fit one block, and another
all others. Where the user marks the rows as unbacked, it does not ask: one graph serves 0 rows and 1, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters

from minifloat import GroupedLinear, LayerNormMLP, Linear
from tests.helpers.export_cases import RECIPES

pytestmark = pytest.mark.usefixtures("fresh_compiler")

IN, OUT = 32, 48
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda recipe: Linear(IN, OUT, recipe=recipe),
    "LayerNormMLP": lambda recipe: LayerNormMLP(IN, OUT, recipe=recipe),
    "GroupedLinear": lambda recipe: GroupedLinear(3, IN, OUT, recipe=recipe),
}
ROWS = (8, 24, 40, 100, 130, 300)
WHOLE = ("delayed", "current", "rowwise")  # no blocks along the rows
FAST = {("Linear", "block"), ("Linear", "nvfp4"), ("LayerNormMLP", "current"), ("GroupedLinear", "mxfp8")}
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST)) for case in product(LAYERS, RECIPES)]


class Twins:
    """A layer, and a copy of it that is compiled for dynamic rows."""

    def __init__(self, layer: str, recipe: str) -> None:
        self.eager = LAYERS[layer](RECIPES[recipe])
        self.model = copy.deepcopy(self.eager)
        self.compiled = torch.compile(
            lambda *args: self.model(*args), dynamic=True, fullgraph=True, backend="aot_eager"
        )

    def step(self, rows: int, unbacked: bool = False) -> None:
        """The same data through both: the same bits."""
        x = torch.randn(rows, IN)
        splits = [torch.tensor([rows // 3, 0, rows - rows // 3])] * isinstance(self.eager, GroupedLinear)
        found = []
        for run in (self.eager, self.compiled):
            own: Tensor = x.clone().requires_grad_()
            if unbacked:
                mark_unbacked(own, 0)
            torch.manual_seed(rows)  # of stochastic rounding
            y = run(own, *splits)
            y.square().sum().backward()
            found.append((y, own.grad))
        for one, other in zip(*found, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)
        for p, q in zip(self.eager.parameters(), self.model.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None
            if p.dim() == 1:  # a plain sum over the rows
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-5 * float(p.grad.abs().max()))
            else:
                assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize(("layer", "recipe"), CASES)
def test_one_graph_for_rows_of_one_block_and_one_for_more(layer: str, recipe: str) -> None:
    """Linears and experts have one graph for both."""
    twins = Twins(layer, recipe)
    for rows in ROWS:
        twins.step(rows)
    assert counters["stats"]["unique_graphs"] == (2 if layer == "LayerNormMLP" and recipe not in WHOLE else 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (*ROWS[::-1], 16, 32, 128, 1000):
            twins.step(rows)


@pytest.mark.parametrize(("layer", "recipe"), CASES)
def test_one_graph_for_unbacked_rows(layer: str, recipe: str) -> None:
    """No rows and a single one included, which PyTorch compiles apart under ``dynamic=True``."""
    twins = Twins(layer, recipe)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (*ROWS, 1, 0, 1000):
            twins.step(rows, unbacked=True)
    assert counters["stats"]["unique_graphs"] == 1
