"""Signals that wait for the step in progress, and the end of the launcher, which is one."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

ENDING = (signal.SIGTERM, signal.SIGHUP)
"""Signals that programs send. Some send both at once, as systemd does with SendSIGHUP=yes; so they count as equal."""

GRACE = 5.0
"""Seconds in which a launcher repeats a signal: where all processes of a job get it, torchrun then sends it to its
ranks once more, and `timeout` sends it to the process and to its group. Far shorter than the 30 s that torchrun and
Slurm leave before they kill."""

PR_SET_PDEATHSIG = 1  # of prctl(2)
ANSWER = 60.0  # seconds, in which the store of a launcher on another machine answers

PRESSED_GRACE = 1.0
"""Grace for SIGINT of a process without torchrun: a user who presses Ctrl-C again means it, and soon."""


@contextmanager
def signals_noted(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], int]]:
    """Gives a function that returns the SIGINT, SIGTERM or SIGHUP that has come first, or 0.

    The same signal within a grace time is a repetition and does nothing: a rank of torchrun gets its own and then
    torchrun's. SIGTERM and SIGHUP count as the same. Any other signal, or a later one, acts as it always does, so that
    a second Ctrl-C ends the process; only one that comes within `PRESSED_GRACE` does not, for programs repeat SIGINT
    too. A SIGHUP that was ignored before (nohup) stays ignored.

    For the main thread, the only one in which Python sets handlers.
    """
    came, since = 0, 0.0
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    pressed = PRESSED_GRACE if not dist.is_torchelastic_launched() else GRACE

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        nonlocal came, since
        now = clock()
        if not came:
            came, since = number, now
            return
        equal = number == came or (number in ENDING and came in ENDING)
        if not equal or now - since > (pressed if number == signal.SIGINT else GRACE):
            restore()
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: came
    finally:
        restore()


def end_with_launcher() -> None:
    """Has the kernel send SIGTERM when the process that started this one ends, for a rank of torchrun.

    However that ends, and whatever this one does: it may sleep in a call of a library, waiting for other ranks. Other
    processes may outlive their parent: a shell that has been closed is no reason to stop.

    Raises:
        ValueError: torchrun has ended already; the store that it keeps for its ranks is gone.
    """
    if not dist.is_torchelastic_launched():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            socket.create_connection((host, port), ANSWER).close()
        except OSError as error:
            raise ValueError(f"torchrun has ended: no store at {host}:{port} ({error}); start it again") from error
