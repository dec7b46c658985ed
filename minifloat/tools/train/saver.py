"""Checkpoints that are written while the training goes on.

`torch.distributed.checkpoint.async_save` would do so too, but its index is a pickle. Here a thread writes a copy of the
state: each rank its own part, whose place is in the file, and the first one the index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from minifloat.tools.train.checkpoint import Checkpoints, SaveError
from minifloat.tools.train.parts import Parts
from minifloat.tools.train.ranks import Ranks

PATIENCE = 60.0  # seconds


class Saver:
    """Writes one checkpoint at a time, in a thread. All ranks call `save` and `wait` alike."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks) -> None:
        self.checkpoints, self._ranks = checkpoints, ranks
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, model: Parts, training: Parts, values: Mapping[str, Any]) -> Path:
        """Begins to write, when the save before has ended; returns the folder that will be there.

        Raises:
            SaveError: the one before failed.
        """
        self.wait()

        def write() -> None:
            try:
                rank, exchange = self._ranks.savers.rank, self._ranks.exchange
                self.checkpoints.save(step, model, training, values, rank, exchange)
            except Exception as error:  # raised again by `wait`
                self._error = error

        self._thread = Thread(target=write, name=f"save-{step}", daemon=True)
        self._thread.start()
        return self.checkpoints.path(step)

    @property
    def failed(self) -> bool:
        """The last save has failed on this rank; the others may learn so a moment later."""
        return self._error is not None

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises SaveError where that failed."""
        self.close()
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, SaveError):
                raise error
            raise SaveError(f"a checkpoint was not written: {type(error).__name__}: {error}") from error

    def close(self, seconds: float | None = None) -> None:
        """As `wait`, but raises nothing, and waits no longer than so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
            self._thread = None


@contextmanager
def saving(checkpoints: Checkpoints | None, ranks: Ranks) -> Iterator[Saver | None]:
    """A saver, whose last save is awaited at the end; after an error not for long, since another rank may hang."""
    saver = None if checkpoints is None else Saver(checkpoints, ranks)
    try:
        yield saver
        if saver is not None:
            saver.wait()
    except Exception:  # but at a second Ctrl-C, which is none, the process ends at once
        if saver is not None:
            saver.close(PATIENCE)
        raise
