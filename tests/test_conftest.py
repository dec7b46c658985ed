"""Tests that uninitialised memory is poisoned in every test, and only where it should be."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

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


def test_other_types() -> None:
    assert torch.empty(3, dtype=torch.bool).all()
    assert torch.empty(3, dtype=torch.float4_e2m1fn_x2).view(torch.uint8).tolist() == [0xFF] * 3
    assert torch.empty(0, 4).shape == (0, 4)
    assert torch.empty(()).isnan()


def test_meta_and_fake_tensors() -> None:
    with torch.device("meta"):
        assert torch.empty(3).is_meta and torch.nn.Linear(2, 2).weight.is_meta
    with FakeTensorMode():
        assert torch.empty(3).new_empty(4).shape == (4,)


def test_dispatch_modes_do_not_see_it() -> None:
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log():
        assert torch.empty(3).isnan().all()
        torch.empty(3, dtype=torch.int32)
    assert seen[0] == "aten.empty.memory_format" and not any("fill" in name for name in seen)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_whole(backend: str) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(x)
        return out + torch.empty(3, device=x.device).copy_(x) + x.new_empty(3).fill_(0)

    x = torch.arange(3.0)
    assert torch.compile(doubled, backend=backend, fullgraph=True)(x).tolist() == [0.0, 2.0, 4.0]


def all_nan(rank: int, world_size: int) -> bool:
    """Whether an empty tensor of a worker process is poisoned."""
    return bool(torch.empty(3).isnan().all())


def test_worker_processes_too(worker_pool: Pools) -> None:
    assert worker_pool(2).run(all_nan) == [True, True]


def test_seed() -> None:
    drawn = torch.rand(4)
    assert drawn.equal(torch.rand(4, generator=torch.Generator().manual_seed(0)))
