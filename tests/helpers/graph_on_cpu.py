"""Stands for a CUDA graph on a CPU: a replay calls the captured function again, and copies to where its results are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor


class Stream:
    def __init__(self, device: torch.device) -> None:
        pass

    @contextmanager
    def current(self) -> Iterator[None]:
        yield


class GraphOnCpu:
    """Its capture runs the function: a first replay, where ``ran``, is done already."""

    ran: ClassVar[bool] = False
    device_type = "cpu"
    Stream = Stream

    def __init__(self, stream: Stream, pool: Any = None) -> None:
        self.pool = object() if pool is None else pool

    def capture(self, function: Callable[[], Any]) -> Any:
        self.function, self.results, self.done = function, function(), self.ran
        return self.results

    @torch.no_grad()
    def replay(self) -> None:
        if self.done:
            self.done = False
            return
        with torch.enable_grad():
            fresh = self.function()
        for place, result in zip(self.results, fresh, strict=True):
            if isinstance(place, Tensor):
                place.copy_(result)
