"""What every test has: poisoned empties, a fixed seed, devices, and pools of worker processes."""

from __future__ import annotations

import functools
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.helpers.distributed_pool import WorkerPool

Pools = Callable[[int], WorkerPool]
MOST_CACHED = 2**30  # bytes
SIGNED_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)

if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # each xdist worker has a core of its own


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a new tensor with NaN, or with the largest value of an integer type.

    All bits set is NaN in the floating-point types used here, float8 and e8m0 included. The whole storage is filled, so
    that the gaps of a strided tensor are poisoned too. Fake tensors and other subclasses have no memory of their own.
    """
    if type(tensor) is not torch.Tensor or tensor.is_meta:
        return
    with torch._C._DisableTorchDispatch():  # a test that counts operations does not see this one
        tensor.untyped_storage().fill_(0xFF)  # type: ignore[attr-defined]
        if tensor.dtype == torch.bool:
            tensor.data.fill_(True)  # a bool byte of 0xFF is not a bool
        elif tensor.dtype in SIGNED_INTEGERS:
            tensor.data.fill_(torch.iinfo(tensor.dtype).max)  # -1, all bits set, would be a valid index


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if not torch.compiler.is_compiling():
            poison(tensor)
        return tensor

    return empty


def poison_empties() -> None:
    """Let the functions that give uninitialised memory, called from Python, give poison."""
    with torch.device("cpu"):
        torch.empty(0)  # device contexts list the constructors at first use: they must list the real ones
    torch.empty = _poisoned(torch.empty)
    torch.empty_like = _poisoned(torch.empty_like)
    torch.empty_strided = _poisoned(torch.empty_strided)
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]
    launch = sys.modules.get("minifloat.ops.launch")  # which tests of kernels have imported
    if launch is not None:
        launch.empty_strided = _poisoned(launch.empty_strided)  # type: ignore[attr-defined]


@pytest.fixture(scope="session", autouse=True)
def _poisoned_empties() -> None:
    """A read of memory that nobody wrote shows as NaN, not as whatever was there."""
    poison_empties()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same numbers in every test, whatever ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _shared_gpu() -> Iterator[None]:
    """What a test leaves in the allocator's cache is for the other processes that test on the same GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > MOST_CACHED:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _accelerate_as_new() -> Iterator[None]:
    """Accelerate, and with it the Trainer of ``transformers``, keeps the settings of its first use in the process."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the test runs on."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[Pools]:
    """`worker_pool(world_size).run(fn, *args)` runs a function on every rank; the processes stay for later tests."""

    @functools.cache
    def pool(world_size: int) -> WorkerPool:
        started.append(WorkerPool(world_size, setup=poison_empties))
        return started[-1]

    started: list[WorkerPool] = []
    yield pool
    for each in started:
        each.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none, and keep the tests that use worker processes on one xdist worker."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        interpreted = item.path.name.startswith("test_triton_") and "device" in getattr(item, "fixturenames", ())
        if interpreted and torch.cuda.is_available() and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="the compiled kernels are tested here, not the interpreted ones"))
        if "worker_pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("worker_pool"))
