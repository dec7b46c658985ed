"""Writes checkpoints: see `checkpoint` for what they are.

A folder is written under another name, brought to disk and then renamed; an older one is renamed before it is deleted.
So a process that dies at any moment leaves complete checkpoints and, at most, leftovers that the next save removes. A
checkpoint that is damaged is renamed when its step is saved again, and never deleted.

A thread writes a copy of the state while the training goes on: each rank its own part, and the first one the index.
`torch.distributed.checkpoint.async_save` would do so too, but its index is a pickle.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from minifloat.tools.train.checkpoint import (
    DAMAGED,
    MODEL,
    PLAIN,
    TRAINING,
    VERSION,
    Checkpoint,
    CheckpointError,
    VersionError,
    complete,
    digest_of_plain,
    named,
)
from minifloat.tools.train.local_tensors import LocalTensors
from minifloat.tools.train.ranks import Ranks
from minifloat.tools.train.tensor_file import Stored, digest_of, write_tensors

LEFTOVER = re.compile(r"\.step-\d{8,}\.partial")
PATIENCE = 60.0  # seconds
LOG = logging.getLogger(__name__)


class SaveError(OSError):
    """A checkpoint could not be written; the older ones are as they were."""


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of one run: where and when it saves, and what it continues from.

    `settings` must be equal for a run to be continued. `every` is in steps; without it the end alone is saved. `keep`
    is how many checkpoints stay. `files` are further files of each checkpoint.
    """

    folder: Path
    settings: Mapping[str, Any]
    every: int | None = None
    keep: int = 2
    start: Checkpoint | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    _passed_over: set[Path] = field(default_factory=set, init=False)  # they are damaged, and never deleted

    def __post_init__(self) -> None:
        check_saves(self.every, self.keep)
        if self.start is not None:
            self.start.check(self.settings)
        reached = 0 if self.start is None else self.start.step
        for path in reversed(named(self.folder)):
            try:
                later = Checkpoint.read(path)
                good = later.step > reached and later.verify() is later
            except VersionError:
                raise
            except CheckpointError:
                self._passed_over.add(path)  # `latest` has said so
                continue
            if good:
                raise ValueError(
                    f"{path} is of an earlier training; continue from it with --resume, or choose another --out"
                )

    def due(self, step: int, steps: int) -> bool:
        return step == steps or (self.every is not None and step % self.every == 0)

    def path(self, step: int) -> Path:
        """The folder of the state after `step`."""
        return self.folder / f"step-{step:08}"

    def save(
        self,
        step: int,
        model: LocalTensors,
        training: LocalTensors,
        values: Mapping[str, Any],
        rank: int = 0,
        exchange: Callable[[Any], list[Any]] = lambda value: [value],
    ) -> Path:
        """Writes the state after `step`, then removes the oldest checkpoints beyond `keep`; returns the new folder.

        Args:
            model, training: what this rank has.
            exchange: gives all ranks' values, in their order; a collective of the ranks that save.

        Raises:
            SaveError: on all ranks, where one could not write; what was begun is gone.
        """
        target, first = self.path(step), rank == 0
        try:
            if not all(together(exchange, lambda: not first or self._prepare(target))):
                return target  # is there already
            size = len(exchange(None))
            found = together(exchange, lambda: _write_files(_aside(target), model, training, rank, size))
            stored = {name: each for one in found for name, each in one.items()}
            together(exchange, lambda: self._finish(target, step, values, stored) if first else None)
        except (SaveError, RuntimeError) as error:  # the latter where a rank is gone
            if first:
                _remove(_aside(target), missing_ok=True)
            raise SaveError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; mend that and run "
                "again, with --resume if there is an older one, which is as it was"
            ) from error
        if first:
            self._remove_oldest(step)
        return target

    def _prepare(self, target: Path) -> bool:
        """Makes the folder to write to; false where the checkpoint is there already, of this very run."""
        if target.is_symlink() or target.exists():
            try:
                Checkpoint.read(target).verify()
                return False
            except VersionError:
                raise
            except CheckpointError as error:
                self._set_aside(target, error)
        for leftover in self.folder.glob(".step-*") if self.folder.is_dir() else ():
            if LEFTOVER.fullmatch(leftover.name):
                with suppress(OSError):  # then it is in the way of its own step alone
                    _remove(leftover)
        _make_folder(_aside(target))
        return True

    def _finish(self, target: Path, step: int, values: Mapping[str, Any], stored: dict[str, Stored]) -> None:
        """Gives the folder its name once all that belongs to it is on the disk."""
        partial = _aside(target)
        for name, content in self.files.items():
            (partial / name).write_bytes(content)
            stored[name] = digest_of(partial / name)
            _sync(partial / name)
        for name, one in stored.items():
            size = (partial / name).stat().st_size if (partial / name).exists() else 0
            if size != one.size:
                raise OSError(f"{name} has {size:,} of {one.size:,} bytes here; all nodes must see the same --out")
        files = {name: asdict(one) for name, one in sorted(stored.items())}
        plain = {"minifloat": VERSION, "step": step, "settings": self.settings, "values": values, "files": files}
        (partial / PLAIN).write_text(json.dumps(plain | {"sha256": digest_of_plain(plain)}, indent=1))
        _sync(partial / PLAIN)
        _sync(partial)
        partial.rename(target)
        _sync(self.folder)

    def _remove_oldest(self, step: int) -> None:
        """Removes the oldest checkpoints up to `step`; damaged ones, and what cannot be removed, stay."""
        try:
            found = [each.path for each in complete(self.folder, tell=False) if each.step <= step]
            for path in [path for path in found if path not in self._passed_over][: -self.keep]:
                _remove(path.rename(_aside(path)))
        except OSError as error:
            LOG.warning("older checkpoints than that of step %d are not removed: %s", step, error)

    def _set_aside(self, path: Path, error: CheckpointError) -> None:
        aside, count = path.with_name(DAMAGED + path.name), 1
        while aside.is_symlink() or aside.exists():
            count += 1
            aside = path.with_name(f"{DAMAGED}{path.name}-{count}")
        path.rename(aside)
        self._passed_over.discard(path)
        LOG.warning("set aside as %s: %s", aside, error)


class Saver:
    """Writes one checkpoint at a time, in a thread. All ranks call `save` and `wait` alike."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks) -> None:
        self.checkpoints, self._ranks = checkpoints, ranks
        self._thread: Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, model: LocalTensors, training: LocalTensors, values: Mapping[str, Any]) -> Path:
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
        """Waits like `wait`, but raises nothing, and no longer than so many seconds."""
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


def check_saves(every: int | None, keep: int) -> None:
    """Raises ValueError for numbers of steps and of checkpoints that are none."""
    for option, value in (("--save-every", every), ("--keep", keep)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; choose at least 1")


def together(exchange: Callable[[Any], list[Any]], action: Callable[[], Any]) -> list[Any]:
    """Runs `action` on each rank and returns its result; raises SaveError on all of them where it fails on one."""
    result, cause = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is: the others wait to hear of it
        cause = error
    answers = exchange((result, cause and f"{type(cause).__name__}: {cause}"))
    for _, problem in answers:
        if problem is not None:
            raise SaveError(problem) from cause
    return [each for each, _ in answers]


def _write_files(folder: Path, model: LocalTensors, training: LocalTensors, rank: int, size: int) -> dict[str, Stored]:
    """The files of one rank, on the disk."""
    of = "" if size == 1 else f"-{rank + 1:05}-of-{size:05}"
    stored = {}
    for kind, local in ((MODEL, model), (TRAINING, training)):
        name = f"{kind}{of}.safetensors"
        try:
            stored[name] = write_tensors(folder / name, local.tensors, local.metadata())
            _sync(folder / name)
        except OSError as error:  # of a full disk, which does not say where
            raise OSError(f"{name}: {error}") from error
    return stored


def _make_folder(path: Path) -> None:
    """Makes a folder, and those above it, whose entries are on the disk."""
    if not path.parent.exists():
        _make_folder(path.parent)
    path.mkdir()
    _sync(path.parent)


def _remove(path: Path, missing_ok: bool = False) -> None:
    """Deletes a folder, or a link to one, which is not followed."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists() or not missing_ok:
        shutil.rmtree(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
