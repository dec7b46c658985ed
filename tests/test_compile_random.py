"""Random bits of compiled code are those of eager code, and as many, where what draws is given equal tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from minifloat import GroupedLinear, GroupedMLP, Linear
from tests.helpers.compiled import compiled

pytestmark = pytest.mark.usefixtures("fresh_compiler")

IN, OUT, ROWS = 32, 48, 20
SPLITS = torch.tensor([7, 0, 13])


class Siblings(nn.Module):
    """Linears whose dY is one tensor, or groups whose offsets are; one of them is called twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        make: Callable[[], nn.Module] = {
            "linear": lambda: Linear(IN, OUT, bias=False, recipe="nvfp4"),
            "experts": lambda: GroupedLinear(3, IN, OUT, bias=False, recipe="nvfp4"),
            "mlp": lambda: GroupedMLP(3, IN, OUT, bias=False, recipe="nvfp4"),
        }[kind]
        self.q, self.k = make(), make()

    def forward(self, x: Tensor) -> Tensor:
        more = [] if self.kind == "linear" else [SPLITS]
        y: Tensor = self.q(x, *more) + self.k(x, *more) + self.q(x, *more)
        return y


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation.namespace == "minifloat" and "mm" in operation.__name__
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, x: model(x),
    "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "selectively": lambda model, x: checkpoint(
        model, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy)
    ),
}


@pytest.mark.parametrize(
    ("kind", "way", "backend"),
    [
        ("linear", "plain", "inductor"),
        ("linear", "checkpointed", "aot_eager"),
        ("linear", "selectively", "aot_eager"),
        ("experts", "plain", "aot_eager"),
        ("mlp", "checkpointed", "aot_eager"),
    ],
)
def test_siblings_draw_as_in_eager_code(kind: str, way: str, backend: str) -> None:
    torch.manual_seed(0)
    model, found = Siblings(kind), []
    x = torch.randn(ROWS, IN)
    for run in (partial(WAYS[way], model), compiled(partial(WAYS[way], model), backend=backend)):
        model.zero_grad()
        torch.manual_seed(1)  # of stochastic rounding
        own = x.clone().requires_grad_()
        y = run(own)
        y.square().sum().backward()
        found.append([y, own.grad, *[p.grad for p in model.parameters()], torch.get_rng_state()])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
