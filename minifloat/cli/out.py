"""The folder for a command's results: it is there, it can be written to, and no other process writes to it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Makes the folder `out` and keeps other processes from claiming it.

    The lock is the kernel's, so it ends with this process however that dies. Child programs do not inherit it. Raises
    ValueError when another process has it, and when `out` cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a")
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to ({error}); choose another --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process trains in {out}; wait for its end, or choose another --out") from error
        yield
