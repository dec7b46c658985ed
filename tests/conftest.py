"""What every test has: poisoned empties, a fixed seed, devices, and pools of worker processes."""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.helpers.distributed_pool import Pools, WorkerPool
from tests.helpers.poison import poison_empties

MOST_CACHED = 2**30  # bytes

if "PYTEST_XDIST_WORKER" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # each xdist worker has a core of its own

settings.register_profile("any speed", settings(), deadline=None)  # other processes may have the cores
settings.load_profile("any speed")


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


@pytest.fixture
def graph_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured on a CPU, by a stand-in."""
    from minifloat.graphs import capture
    from tests.helpers.graph_on_cpu import GraphOnCpu

    monkeypatch.setattr(capture, "Graph", GraphOnCpu)


@pytest.fixture
def graph_device(
    device: torch.device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    """A device of graphs: a GPU, which then gives the same bits each time, or a CPU with the stand-in."""
    if device.type == "cpu":
        request.getfixturevalue("graph_on_cpu")
        yield device
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    yield torch.device("cuda", torch.cuda.current_device())
    torch.use_deterministic_algorithms(False)


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


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for PyTorch's kernels: on small matrices a second one costs more than it gives, and ranks have one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def quiet_transformers() -> Iterator[None]:
    """No warnings of ``transformers``."""
    logging = pytest.importorskip("transformers.utils.logging")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No guard, graph or count of one test meets another, and the compiler's own trace is not in pytest's report."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none, and begin with those that use worker processes.

    Workers of xdist get neighbours (``--dist worksteal``): so one of them has those processes, and not each.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        interpreted = item.path.name.startswith("test_triton_") and "device" in getattr(item, "fixturenames", ())
        if interpreted and torch.cuda.is_available() and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="the compiled kernels are tested here, not the interpreted ones"))
    items.sort(key=lambda item: "worker_pool" not in getattr(item, "fixturenames", ()))
