"""Ranks of ``etp_group`` that do not do the same raise under PyTorch's debug level, in place of a hang."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from minifloat import Linear
from tests.helpers.distributed_pool import WorkerPool, process_group


def _debug() -> None:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()


def _step_apart(rank: int, size: int, how: str) -> str:
    """One rank alone writes a weight in the middle of a forward, or leaves a layer out; returns the error."""
    torch.manual_seed(1)
    layers = nn.ModuleList([Linear(16, 16, recipe="current", etp_group=process_group()) for _ in range(3)])
    x = torch.randn(4, 16)
    for step in range(3):
        y, last = x, step == 2 and rank == 0
        try:
            for i, layer in enumerate(layers):
                if last and i == 1 and how == "writes":
                    with torch.no_grad():
                        layer.weight.mul_(2)
                y = y if last and i == 1 and how == "skips" else layer(y)
            y.sum().backward()
        except RuntimeError as error:
            return f"step {step}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("writes", "step 2: Detected mismatch between collectives on ranks"),
        ("skips", "step 2: Linear(16, 16): ranks of etp_group gather different weights"),
    ],
)
def test_ranks_that_differ_raise(how: str, error: str) -> None:
    pool = WorkerPool(2, _debug)
    try:
        for said in pool.run(_step_apart, how):
            assert said.startswith(error), said
    finally:
        pool.kill()
