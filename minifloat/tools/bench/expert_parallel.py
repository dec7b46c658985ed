"""Suites ``experts`` and ``exposed-experts`` of several GPUs: a mixture of experts that ranks share out.

Each rank has 16,384 tokens of Qwen3-30B-A3B's shapes. The baseline sends bf16 and multiplies bf16; ``codes`` are
recipes whose tokens travel as codes (:func:`~minifloat.functional.expert_parallel.sends_codes`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from minifloat.comm.group import Group
from minifloat.nn import MoE
from minifloat.recipe import Float8BlockScaling
from minifloat.tools.bench import gate
from minifloat.tools.bench.experts import QWEN3_30B_A3B, Sizes, moe_data
from minifloat.tools.bench.exposed import Exposure, exposure
from minifloat.tools.bench.rounds import Call, Line, timed

CONTENDERS: dict[str, tuple[str, Any]] = {
    "bf16": ("bf16", "none"),
    "current": ("current", "current"),
    "current, cached": ("current", "current"),
    "block": ("block", "block"),
    "block, codes": ("block", Float8BlockScaling(columnwise_source="rowwise_dequantized")),
}
"""Bound and recipe of each contender; those with cached weights cast them in their first step alone."""
GOALS = {"current": 1.2, "current, cached": 1.2, "block, codes": 1.2}
PRODUCTS = 4  # that the last of the gradients lies behind


def moe_steps(group: Group, device: torch.device, sizes: Sizes) -> dict[str, tuple[Call, float]]:
    """A step of each contender on this rank's tokens, and how far its results are from those in bf16.

    Raises:
        AssertionError: too far.
    """
    (router, w1, w2), x, dy = moe_data(sizes, device)
    x, dy = (each.roll(group.rank, 0) for each in (x, dy))  # other tokens on each rank
    x.requires_grad_()
    local = sizes.experts // group.size
    own = slice(group.rank * local, (group.rank + 1) * local)
    found: dict[str, tuple[Call, float]] = {}
    expected: list[torch.Tensor] = []
    for name, (checked_as, recipe) in CONTENDERS.items():
        moe = MoE(
            *sizes[:4], device=device, dtype=torch.bfloat16, recipe=recipe, single_grouped_weight=True,
            ep_group=group.process_group,
        )  # fmt: skip
        with torch.no_grad():
            for parameter, value in zip(moe.parameters(), (router, w1[own], w2[own]), strict=True):
                parameter.copy_(value)
        call = partial(step, moe, x, dy, None)
        if name.endswith("cached"):
            step(moe, x, dy, True)
            call = partial(step, moe, x, dy, False)
        outputs = [output.detach() for output in call()]
        expected = expected or outputs
        error = gate.relative_error(outputs, expected)
        bound = gate.bound(checked_as, PRODUCTS)
        assert error <= bound, f"{name} is {error:.3f} off bf16's, and {bound:.3f} is allowed"
        found[name] = call, error
    return found


def step(moe: MoE, x: torch.Tensor, dy: torch.Tensor, first: bool | None) -> list[torch.Tensor]:
    """Output, dX and the gradients of the parameters."""
    y = moe(x, first)
    return [y, *torch.autograd.grad(y, [x, *moe.parameters()], dy)]


def experts(group: Group, rounds: int, sizes: Sizes = QWEN3_30B_A3B) -> Iterator[Line]:
    """The time of a step."""
    steps = moe_steps(group, torch.device("cuda", torch.cuda.current_device()), sizes)
    found = timed({name: call for name, (call, _) in steps.items()}, rounds)
    for name, times in found.items():
        ratio = statistics.median(b / t for b, t in zip(found["bf16"], times, strict=True))
        yield Line(
            f"experts, ep {group.size}", name, statistics.median(times), ratio, steps[name][1], GOALS.get(name), times
        )


def exposed_experts(group: Group, rounds: int, sizes: Sizes = QWEN3_30B_A3B) -> Iterator[Exposure]:
    """Measures the part of a step's communication that nothing hides."""
    for name, (call, _) in moe_steps(group, torch.device("cuda", torch.cuda.current_device()), sizes).items():
        yield exposure(f"exposed experts, ep {group.size}", name, call)
