"""Suite ``host``: what the host spends on one call of a small Linear, which the device does not notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minifloat.tools.bench import gate
from minifloat.tools.bench.linear import data, our_linear, te_linear, torch_linear
from minifloat.tools.bench.modules import Made, expected, step
from minifloat.tools.bench.peers import TE_RECIPES
from minifloat.tools.bench.registry import Call, Case, Contender, Measure, Outputs, Row

SHAPE = 64, 256, 256  # tokens, out, in
TINY = 16, 64, 64
RECIPES = ("delayed", "current", "block", "mxfp8")
GOALS = {"forward": 60.0, "forward + backward": 300.0}  # microseconds
COMPILED_GOAL = 1 / 1.5  # the ratio to compiled PyTorch: at most 1.5 times its time


def forward(module: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor, dy: Tensor) -> Call:
    """The call of one forward that a backward could follow."""
    leaf = x.detach().requires_grad_()
    return lambda: [module(leaf)]


def build(direction: str, compiled: bool, device: torch.device, tiny: bool) -> Case:
    """All contenders, forward alone or with backward, eager or each compiled as one graph."""
    tokens, out, into = TINY if tiny else SHAPE
    x, w, dy = data(device, tokens, out, into)
    reference: Outputs = expected(torch_linear(w, torch.float32), x, dy)
    start = step
    if direction == "forward":
        start, reference = forward, reference[:1]

    def contender(name: str, make: Callable[[], Made], recipe: str) -> Contender:
        def setup() -> Call:
            module, parameters = make()
            called = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
            return start(called, parameters, x, dy)

        goals: dict[Measure, float] = {"ratio": COMPILED_GOAL} if compiled else {"microseconds": GOALS[direction]}
        return Contender(
            f"{name}, compiled" if compiled else name, setup, gate.against(reference), gate.bound(recipe),
            goals=goals if name.startswith("minifloat") else {}, compiled=compiled,
        )  # fmt: skip

    contenders = [contender("torch bf16", partial(torch_linear, w), "bf16")]
    contenders += [contender(f"minifloat {name}", partial(our_linear, w, name), name) for name in RECIPES]
    if not compiled:
        contenders += [contender(f"TE {name}", partial(te_linear, w, name), name) for name in TE_RECIPES]
    return Case(tuple(contenders), (contenders[0].name,), host=True)


ROWS = tuple(
    Row("host", f"{' x '.join(map(str, SHAPE))}{', compiled' * compiled}, {way}", partial(build, way, compiled))
    for compiled in (False, True)
    for way in GOALS
)
