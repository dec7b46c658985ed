"""Stands for a CUDA graph on a CPU: a replay calls the captured function again, and copies to where its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Stream:
    def __init__(self, device: torch.device) -> None:
        pass

    @contextmanager
    def current(self) -> Iterator[None]:
        yield


class Undone(TorchDispatchMode):
    """At its end memory that was there before it is as it was: a capture writes to none."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[Tensor, Tensor | None]] = {}  # by address all memory, and what was in it before

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # of a tensor with parts, whose own operations come here
        for each in tree_leaves((args, kwargs)):
            self._know(each, before=True)
        result = operation(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            self._know(each, before=False)
        return result

    def _know(self, x: Any, before: bool) -> None:
        if isinstance(x, Tensor) and (address := x.untyped_storage().data_ptr()) not in self.known:
            memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            self.known[address] = memory, memory.clone() if before else None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for memory, before in self.known.values():
            if before is not None:
                memory.copy_(before)


class GraphOnCpu:
    """Its capture runs the function, and leaves neither what that wrote nor the random numbers that it drew."""

    device_type = "cpu"
    Stream = Stream

    def __init__(self, stream: Stream, pool: Any = None) -> None:
        self.pool = object() if pool is None else pool

    def capture(self, function: Callable[[], Any]) -> Any:
        with Undone(), torch.random.fork_rng([]):
            self.function, self.results = function, function()
        return self.results

    @torch.no_grad()
    def replay(self) -> None:
        with torch.enable_grad():
            fresh = self.function()
        for place, result in zip(self.results, fresh, strict=True):
            if isinstance(place, Tensor):
                place.copy_(result)
