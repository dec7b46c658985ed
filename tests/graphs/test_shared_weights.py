"""Graphs of modules whose weights ranks share, with eager modules between them. On GPUs: benchmarks/nccl_etp.py."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.distributed_pool import Pools
from tests.helpers.etp_graphs import after_a_failure, compare, frozen, in_main_grad


@pytest.mark.parametrize(
    "recipe", ["mxfp8", "delayed", *[pytest.param(n, marks=pytest.mark.slow) for n in ("none", "current")]]
)
def test_attention_captured_and_experts_eager(worker_pool: Pools, recipe: str) -> None:
    """Bit for bit; nothing is in flight at a graph's begin, and no gather crosses it."""
    for different in worker_pool(2).run(compare, recipe, True, torch.float32):
        assert not different


def test_all_captured_with_more_ahead(worker_pool: Pools) -> None:
    """One graph after the other, of uneven rows, with two gathers ahead in each."""
    for different in worker_pool(3).run(compare, "current", False, torch.bfloat16, 2):
        assert not different


def test_main_grad(worker_pool: Pools) -> None:
    for different in worker_pool(2).run(in_main_grad):
        assert not different


def test_a_frozen_weight(worker_pool: Pools) -> None:
    for different in worker_pool(2).run(frozen):
        assert not different


@pytest.mark.parametrize("backward", [False, True])
def test_a_capture_that_fails(worker_pool: Pools, backward: bool) -> None:
    for different in worker_pool(2).run(after_a_failure, backward):
        assert not different
