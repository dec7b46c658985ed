"""Processes that start at once: a server that has done the slow imports forks them."""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any

SLOW = [
    *(f"minifloat.tools.cli.{name}" for name in ("bench", "doctor", "generate", "study")),
    *("matplotlib.backends.backend_agg", "pydantic.main", "pydantic.types", "rich.progress", "safetensors.torch"),
    *("minifloat.distributed", "minifloat.parallel.fsdp", "pytest", "torch._dynamo", "torch.distributed.checkpoint"),
    *("tests.helpers.fsdp_kill", "tests.helpers.train_on_ranks"),
]
"""What any child imports: there is one server in a process, and the first child starts it."""


@functools.cache
def children() -> Any:
    """The context of such processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context
