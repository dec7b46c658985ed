"""Ctrl-C that waits for the step in progress."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_noted() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the SIGINT or SIGTERM that has come, or 0. The second one acts as it always does.

    For the main thread, the only one in which Python sets handlers.
    """
    came = 0
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        nonlocal came
        came = number
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came
    finally:
        restore()
