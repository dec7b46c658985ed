"""What is done when a backward has ended, or undone when it has raised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class BackwardPass:
    """One run of the autograd engine: what its nodes leave to do at its end, and what to do if it never gets there.

    Args:
        task: the engine's number of it.
        outer: a backward that was running in this thread when this one began, maybe inside of one of its nodes.

    ``at_end`` has what is done for each node, ``together`` what is done once, and for which items.
    """

    def __init__(self, task: int, outer: BackwardPass | None = None) -> None:
        self.task = task
        self.outer = outer
        self.ended = False
        self.at_end: list[Callable[[bool], None]] = []
        self.together: dict[Together, list[Any]] = {}
        self.on_failure: list[Callable[[], None]] = []

    def finish(self, early: bool = False) -> None:
        """Does now what is left to do, in its order; ``early``, which each is told: the backward goes on."""
        work, self.at_end = self.at_end, []
        together, self.together = self.together, {}
        for each in work:
            each(early)
        for all_at_once, items in together.items():
            all_at_once(self, items, early)

    def fail(self) -> None:
        """Drops what is left to do and undoes what was done, the latest first."""
        undo, self.on_failure, self.at_end, self.together = self.on_failure, [], [], {}
        for each in reversed(undo):
            each()


Together = Callable[[BackwardPass, list[Any], bool], None]


class _End:
    """What the engine holds: called where the backward ends well, else freed with its graph task."""

    def __init__(self, backward: BackwardPass) -> None:
        self.backward: BackwardPass | None = backward

    def __call__(self) -> None:
        backward = self.backward
        assert backward is not None
        backward.finish()
        self.backward, backward.on_failure, backward.ended = None, [], True

    def __del__(self) -> None:
        if self.backward is not None:
            self.backward.ended = True
            self.backward.fail()


class _Local(threading.local):
    """The backward that began last in this thread."""

    def __init__(self) -> None:
        self.latest = BackwardPass(-1)
        self.latest.ended = True


_local = _Local()


def running() -> BackwardPass | None:
    """The backward that this node runs in; None outside of the engine. Not for code that is being compiled."""
    task = _graph_task()
    latest = _local.latest
    if latest.task == task:
        return latest if task != -1 else None
    return None if task == -1 else _find_or_begin(task)


def _find_or_begin(task: int) -> BackwardPass:
    """The backward of this number: one that goes on after another one inside of it, or else a new one.

    One object a backward: what its nodes did is undone in the reverse order.
    """
    newest: BackwardPass | None = _local.latest
    while newest is not None and newest.ended:
        newest = newest.outer
    found = newest
    while found is not None and found.task != task:
        found = found.outer
    if found is None:
        found = newest = BackwardPass(task, newest)
        _queue_callback(_End(found))
    assert newest is not None
    _local.latest = newest
    return found
