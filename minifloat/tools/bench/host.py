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
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
GOALS = {"forward": {"current": 1 / 4}, "forward + backward": {"current": 1 / 2.5}}
"""The ratio to eager PyTorch: at most 4 times its time, and so on."""
OTHER_GOALS = {"forward": 1 / 5, "forward + backward": 1 / 3}  # of the other recipes
COMPILED_GOAL = 1 / 1.5  # the ratio to compiled PyTorch


def forward(module: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], x: Tensor, dy: Tensor) -> Call:
    """The call of one forward that a backward could follow."""
    leaf = x.detach().requires_grad_()
    return lambda: [module(leaf)]


def as_it_is(call: Call) -> Call:
    """The call; PyTorch runs the backward of what is on a GPU in a thread of its own."""
    return call


def in_calling_thread(call: Call) -> Call:
    """The call with its backward in the calling thread; the setting is as before after each, for contenders alternate.

    See docs/layers.md.
    """

    def run() -> Outputs:
        with torch.autograd.set_multithreading_enabled(False):
            return call()

    return run


def build(direction: str, compiled: bool, threads: Callable[[Call], Call], device: torch.device, tiny: bool) -> Case:
    """All contenders, forward alone or with backward, eager or each compiled as one graph, and ``threads`` of each."""
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
            return threads(start(called, parameters, x, dy))

        goal = COMPILED_GOAL if compiled else GOALS[direction].get(recipe, OTHER_GOALS[direction])
        goals: dict[Measure, float] = {"ratio": goal}
        return Contender(
            f"{name}, compiled" if compiled else name, setup, gate.against(reference), gate.bound(recipe),
            goals=goals if name.startswith("minifloat") else {}, compiled=compiled,
        )  # fmt: skip

    contenders = [contender("torch bf16", partial(torch_linear, w), "bf16")]
    contenders += [contender(f"minifloat {name}", partial(our_linear, w, name), name) for name in RECIPES]
    if not compiled:
        contenders += [contender(f"TE {name}", partial(te_linear, w, name), name) for name in TE_RECIPES]
    return Case(tuple(contenders), (contenders[0].name,), host=True)


WAYS = (
    ("", "forward", as_it_is),
    ("", "forward + backward", as_it_is),
    (", calling thread", "forward + backward", in_calling_thread),
)
ROWS = tuple(
    Row("host", f"{' x '.join(map(str, SHAPE))}{', compiled' * compiled}{where}, {direction}",
        partial(build, direction, compiled, threads))
    for compiled in (False, True)
    for where, direction, threads in WAYS
)  # fmt: skip
