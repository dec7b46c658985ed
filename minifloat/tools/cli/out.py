"""Where a command's output goes: a folder that no other process writes to, and streams that may break."""

from __future__ import annotations

import fcntl
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LOCK = ".lock"


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Makes the folder `out` and keeps other processes from claiming it.

    The lock is the kernel's, so it ends with this process however that dies. Child programs do not inherit it. The
    file says which process has it. Raises ValueError when another one has, and when `out` cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to ({error}); choose another --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(64).strip() or "unknown"
            raise ValueError(
                f"another process trains in {out} (pid {owner}); wait for its end, or choose another --out"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


class _Droppable(io.FileIO):
    """A file descriptor; what it does not take is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:  # the reader has gone, or the disk is full
            return memoryview(data).nbytes


@contextmanager
def output_optional() -> Iterator[None]:
    """Inside, standard output and error may break (`| head -1`, a full disk): what they do not take is dropped.

    For commands whose results are files: a training does not end because nobody reads along.
    """
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = map(_droppable, before)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _droppable(stream: Any) -> Any:
    """The stream with a file that drops, unless it is of no file descriptor, as in a notebook or a test."""
    if stream is None:  # it was closed before Python began
        return open(os.devnull, "w")
    try:
        stream.flush()
        file = _Droppable(stream.fileno(), "w", closefd=False)
    except OSError:  # io.UnsupportedOperation is one
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )
