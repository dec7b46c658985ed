"""What is done when a backward has ended, or undone when it has raised."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class BackwardPass:
    """One run of the autograd engine: what its nodes leave to do at its end, and what to do if it never gets there."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.at_end: list[Callable[[bool], None]] = []
        self.on_failure: list[Callable[[], None]] = []

    def finish(self, early: bool = False) -> None:
        """Does now what is left to do, in its order; ``early``, which each is told: the backward goes on."""
        work, self.at_end = self.at_end, []
        for each in work:
            each(early)

    def fail(self) -> None:
        """Drops what is left to do and undoes what was done, the latest first."""
        undo, self.on_failure, self.at_end = self.on_failure, [], []
        for each in reversed(undo):
            each()


class _End:
    """What the engine holds: called where the backward ends well, else freed with its graph task."""

    def __init__(self, backward: BackwardPass) -> None:
        self.backward: BackwardPass | None = backward

    def __call__(self) -> None:
        backward = self.backward
        assert backward is not None
        backward.finish()
        self.backward, backward.on_failure = None, []

    def __del__(self) -> None:
        if self.backward is not None:
            self.backward.fail()


class _Local(threading.local):
    """The latest of this thread."""

    def __init__(self) -> None:
        self.latest = BackwardPass(-1)


_local = _Local()


def running() -> BackwardPass | None:
    """The backward that this node runs in; None outside of the engine. Not for code that is being compiled."""
    task = _graph_task()
    latest = _local.latest
    if latest.task != task:
        if task == -1:
            return None
        latest = _local.latest = BackwardPass(task)
        _queue_callback(_End(latest))
    return latest if task != -1 else None
