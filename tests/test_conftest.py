"""Tests that uninitialised memory is poisoned in every test, and only where it should be; and other settings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from tests.helpers.distributed_pool import Pools

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu], ids=str)
def test_floats_are_nan(dtype: torch.dtype, device: torch.device) -> None:
    like = torch.zeros(2, 3, device=device).to(dtype)
    for tensor in (
        torch.empty(2, 3, dtype=dtype, device=device),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (1, 5), dtype=dtype, device=device),
        like.new_empty(2, 3),
    ):
        assert tensor.dtype == dtype and tensor.device.type == device.type and tensor.shape == (2, 3)
        assert tensor.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_integers_are_the_largest(dtype: torch.dtype, device: torch.device) -> None:
    assert torch.empty(5, dtype=dtype, device=device).tolist() == [torch.iinfo(dtype).max] * 5


def all_nan(rank: int, world_size: int) -> bool:
    """Whether an empty tensor of a worker process is poisoned."""
    return bool(torch.empty(3).isnan().all())


def test_worker_processes_too(worker_pool: Pools) -> None:
    assert worker_pool(2).run(all_nan) == [True, True]


def test_seed() -> None:
    drawn = torch.rand(4)
    assert drawn.equal(torch.rand(4, generator=torch.Generator().manual_seed(0)))


def test_examples_have_no_deadline() -> None:
    """That of 200 ms, the default, was missed where other processes had the cores."""
    assert settings(max_examples=1).deadline is None
