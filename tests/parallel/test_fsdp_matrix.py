"""Every recipe, kind of parameters, module and way to shard it, beside an unsharded replica; memory over 200 steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.distributed_pool import Pools
from tests.helpers.fsdp_cases import (
    KINDS,
    MATRIX,
    RECIPES,
    TWINS,
    Case,
    high_precision,
    in_lockstep,
    loss,
    trajectory,
    width,
)
from tests.helpers.memory import live_tensors


@pytest.mark.slow
@pytest.mark.parametrize(("module", "recipe", "kind", "units"), MATRIX, ids=lambda value: value)
def test_matrix(worker_pool: Pools, module: str, recipe: str, kind: str, units: str) -> None:
    """What GEMMs read has the bytes of the quantized whole at each of 20 steps; a third of the cases on 2, 3, 4."""
    size = 2 + MATRIX.index((module, recipe, kind, units)) % 3
    assert worker_pool(size).run(KINDS[kind], Case(module, recipe, units), 20, timeout=280) == [""] * size


@pytest.mark.parametrize(
    ("module", "recipe", "kind", "units"),
    [
        ("MultiheadAttention", "delayed", "high-precision", "nested"),
        ("TransformerLayer", "nvfp4", "quantized", "parts"),
        ("Linear", "block", "quantized", "nested"),
    ],
)
def test_of_the_matrix(worker_pool: Pools, module: str, recipe: str, kind: str, units: str) -> None:
    assert worker_pool(3).run(KINDS[kind], Case(module, recipe, units), 2) == [""] * 3


def tampered(rank: int, size: int, where: str) -> str:
    """What a comparison says where one bit of what rank 0 has gathered is another."""
    case = Case("Linear", "mxfp8", reshard=True)
    twins = high_precision(case, size)
    layer, gathered = twins.sharded[1], []

    def flip(codes: Tensor) -> None:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((codes,)):
            codes.view(torch.uint8)[-1, -1] ^= rank == 0

    def before(module: Any, _: Any) -> None:
        gathered[:] = [module.weight.operands]
        if where == "forward":
            flip(gathered[0].rowwise.codes)

    def after(module: Any, _: Any, y: Tensor) -> None:
        if where == "backward":  # FSDP2's own hook, which gathers, was there first
            y.register_hook(lambda _: flip(gathered[0].columnwise.codes))

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
    return in_lockstep(rank, size, twins, case, 1)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_comparisons_see_one_bit(worker_pool: Pools, where: str) -> None:
    found, _ = worker_pool(2).run(tampered, where)
    assert found == f"step 0: codes of 1 in {where}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_trajectories(worker_pool: Pools, recipe: str, kind: str) -> None:
    """Two ranks' losses are those of the replica; three add gradients in another order, and codes follow.

    A code of FP4 that follows is a step of a third to a half: there losses part ways after a few steps.
    """
    case = Case("TransformerLayer", recipe)
    assert worker_pool(2).run(trajectory, TWINS[kind], case, 20) == [0.0] * 2
    assert max(worker_pool(3).run(trajectory, TWINS[kind], case, 5 if recipe == "nvfp4" else 20)) < 0.02


# ---- memory ----


def leaks(rank: int, size: int, kind: str, reshard: bool, steps: int) -> list[str]:
    """What a quarter of the steps left behind, and all of them have more of."""
    case = Case("LayerNormMLP", "mxfp8", "nested", reshard=reshard)
    twins = TWINS[kind](case, size)
    model, optimizer = twins.sharded, twins.optimizers[1]
    x = torch.randn(6, 2, width(twins.plain), requires_grad=True)
    for step in range(steps):
        loss(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        if step == steps // 4:
            before, resident = live_tensors(), resident_bytes()
    after, grown = live_tensors(), resident_bytes() - resident
    wrong = [f"{before} tensors and bytes have become {after}"] * (after != before)
    return wrong + [f"{grown} more bytes are resident"] * (grown > 2**22)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_no_leak(worker_pool: Pools, kind: str, reshard: bool) -> None:
    assert worker_pool(2).run(leaks, kind, reshard, 200, timeout=580) == [[]] * 2
