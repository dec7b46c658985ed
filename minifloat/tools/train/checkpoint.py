"""Checkpoints: folders that are complete whenever they have their name, and in which nothing can run.

    OUT/checkpoints/RUN/step-00000100/
        model.safetensors      the model's state dict
        training.safetensors   optimizer, random numbers, data stream, history
        checkpoint.json        settings and other plain values; size and SHA-256 of every other file
        tokenizer.json         where the run has a tokenizer

Of several ranks each writes what it has, to `model-00001-of-00004.safetensors` and so on, whose metadata says which
parts of which tensors these are. A folder is written under another name, brought to disk and then renamed; an older one
is renamed before it is deleted. So a process that dies at any moment leaves complete checkpoints and, at most,
leftovers that the next save removes. A checkpoint that is damaged is renamed when its step is saved again, and never
deleted. Only missing files and wrong content are damage: a file that cannot be read now may be good.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from minifloat.tools.train.parts import Parts, assemble
from minifloat.tools.train.tensor_file import Stored, digest_of, read_bytes, read_tensors, write_tensors

VERSION = 2
OPTIONS = ("recipe", "model", "batch_size", "accumulate", "learning_rate", "seed")  # the settings that options give
EXTENDED = "steps"  # the setting that may differ: a run goes on to another end
MODEL, TRAINING, PLAIN, TOKENIZER = "model", "training", "checkpoint.json", "tokenizer.json"
NAME, LEFTOVER = re.compile(r"step-(\d{8,18})"), re.compile(r"\.step-\d{8,}\.partial")
DAMAGED = "damaged-"  # before the name of what was set aside
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")  # no path: a checkpoint's files are in its folder
MOST_PLAIN = 2**24  # bytes
WAY_OUT = "copy it again, or use the one before it"
LOG = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is damaged, or of something else."""


class VersionError(CheckpointError):
    """A checkpoint is of another version of minifloat; it may be good, and is not set aside."""


class SaveError(OSError):
    """A checkpoint could not be written; the older ones are as they were."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `settings` are what its training was told, `values` its plain state."""

    path: Path
    step: int
    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    files: Mapping[str, Stored]

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """Raises CheckpointError, saying why, when `path` holds no complete checkpoint of this program.

        Digests are compared by :meth:`verify`, and by what reads the files.
        """
        try:
            with _reading(path):
                plain = json.loads(read_bytes(path / PLAIN, MOST_PLAIN))
        except (ValueError, RecursionError) as error:
            why = "" if isinstance(error, CheckpointError) else f" ({type(error).__name__}: {error})"
            raise CheckpointError(f"{path} is no checkpoint of minifloat: it has no readable {PLAIN}{why}") from error
        try:
            with _reading(path):
                return _check(path, plain)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path / PLAIN} is damaged: {type(error).__name__}: {error}; {WAY_OUT}") from error

    def verify(self) -> Checkpoint:
        """This checkpoint; raises CheckpointError, naming the file, where one has other bytes than were saved."""
        for name, stored in self.files.items():
            try:
                with _reading(self.path):
                    found = digest_of(self.path / name)
            except CheckpointError:
                raise
            except ValueError as error:
                raise CheckpointError(f"{self.path} is damaged: {error}; {WAY_OUT}") from error
            if found != stored:
                raise CheckpointError(f"{self.path} is damaged: {name} has other bytes than were saved; {WAY_OUT}")
        return self

    def model_state(self) -> dict[str, Tensor]:
        """The model's state dict, on the CPU; raises CheckpointError where it is damaged."""
        return self._tensors(MODEL)

    def training_state(self) -> dict[str, Tensor]:
        """The tensors of the training, on the CPU; raises CheckpointError where they are damaged."""
        return self._tensors(TRAINING)

    def content(self, name: str) -> bytes | None:
        """A file other than those of tensors, if there is one; raises CheckpointError where it is damaged."""
        if name not in self.files:
            return None
        with _reading(self.path):
            content = read_bytes(self.path / name, self.files[name].size)
        if Stored.of(content) != self.files[name]:
            raise CheckpointError(f"{self.path} is damaged: {name} has other bytes than were saved; {WAY_OUT}")
        return content

    def _tensors(self, kind: str) -> dict[str, Tensor]:
        names = [name for name in self.files if re.fullmatch(rf"{kind}(-\d+-of-\d+)?\.safetensors", name)]
        try:
            with _reading(self.path):
                return assemble(read_tensors(self.path / name, self.files[name]) for name in names)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self.path} has no usable {kind}: {error}; {WAY_OUT}") from error

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError, naming the option and both values, when the checkpoint is of another training."""
        if (other := self.difference(settings)) is not None:
            raise ValueError(
                f"{self.path} was trained with {other}; give the same, start anew without --resume in another --out, "
                "or start another run from it with --resume-from"
            )

    def difference(self, settings: Mapping[str, Any]) -> str | None:
        """The first setting in which another training differs, with both values; None if this one can go on as it."""
        for name in [*settings, *(name for name in self.settings if name not in settings)]:
            saved, given = self.settings.get(name), settings.get(name)
            if saved != given and name != EXTENDED:
                label = f"--{name.replace('_', '-')}" if name in OPTIONS else name.replace("_", " ")
                label, saved, given = _innermost(label, saved, given)
                return f"{label} {_show(saved)}, this command has {_show(given)}"
        return None


@dataclass(frozen=True)
class Checkpoints:
    """Where and when one run saves, and what it continues from.

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
        for path in reversed(_named(self.folder)):
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
        model: Parts,
        training: Parts,
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
            found = together(exchange, lambda: _write_parts(_aside(target), model, training, rank, size))
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
        (partial / PLAIN).write_text(json.dumps(plain | {"sha256": _digest(plain)}, indent=1))
        _sync(partial / PLAIN)
        _sync(partial)
        partial.rename(target)
        _sync(self.folder)

    def _remove_oldest(self, step: int) -> None:
        """Of the checkpoints up to `step`; none that is damaged, and what cannot be removed stays."""
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


def check_saves(every: int | None, keep: int) -> None:
    """Raises ValueError for numbers of steps and of checkpoints that are none."""
    for option, value in (("--save-every", every), ("--keep", keep)):
        if value is not None and value < 1:
            raise ValueError(f"{option} is {value}; choose at least 1")


def together(exchange: Callable[[Any], list[Any]], action: Callable[[], Any]) -> list[Any]:
    """What `action` returns on each rank; raises SaveError on all of them where it fails on one."""
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


def complete(folder: Path, tell: bool = True) -> list[Checkpoint]:
    """The checkpoints in a run's folder whose files have their sizes, oldest first; others are passed over."""
    found = []
    for path in _named(folder):
        try:
            found.append(Checkpoint.read(path))
        except CheckpointError as error:
            if tell:
                LOG.warning("passed over: %s", error)
    return sorted(found, key=lambda each: each.step)


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in a run's folder that is not damaged."""
    for checkpoint in reversed(complete(folder)):
        try:
            return checkpoint.verify()
        except CheckpointError as error:
            LOG.warning("passed over: %s", error)
    return None


def locate(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest in it.

    `path` is a checkpoint, a run's folder of them, an `--out` or the `checkpoints` in it. Raises ValueError when there
    is none, and when there are several runs.
    """
    if (path / PLAIN).exists() or NAME.fullmatch(path.name):
        return Checkpoint.read(path).verify()
    runs = [path, *sorted((path if path.name == "checkpoints" else path / "checkpoints").glob("*"))]
    found = [newest for run in runs if (newest := latest(run)) is not None]
    if not found:
        raise ValueError(f"there is no complete checkpoint in {path}; train with --save-every, or check the path")
    if len(found) > 1:
        raise ValueError(f"{path} has several runs; choose {' or '.join(str(each.path) for each in found)}")
    return found[0]


def _check(path: Path, plain: dict[str, Any]) -> Checkpoint:
    """The checkpoint that `plain` describes, if its files are there; else an error of any kind."""
    version = plain.get("minifloat") if isinstance(plain, dict) else None
    if version is None:
        raise CheckpointError(f"{path / PLAIN} is not of a minifloat checkpoint")
    if version == 1:
        raise VersionError(
            f"{path} is of an older minifloat, whose checkpoints had a pickle in them, which is not read, for it could "
            "run code; continue it with that version, or train anew with another --out"
        )
    if plain.pop("sha256") != _digest(plain):
        raise CheckpointError(f"{path / PLAIN} is damaged, or was changed: its SHA-256 is not its own; {WAY_OUT}")
    if version != VERSION:
        raise VersionError(
            f"{path} is of version {version!r:.20}, this minifloat reads {VERSION}; use the one of its time"
        )
    step, settings, values = plain["step"], plain["settings"], plain["values"]
    if type(step) is not int or step < 1 or not isinstance(settings, dict) or not isinstance(values, dict):
        raise CheckpointError(f"{path / PLAIN} is damaged: its step, settings or values are none; {WAY_OUT}")
    if NAME.fullmatch(path.name) and _number(path) != step:
        raise CheckpointError(
            f"{path} is of step {step}, which is not the one of its name; rename it, or copy it again"
        )
    files = {name: Stored(**each) for name, each in plain["files"].items()}
    for name, stored in files.items():
        found = _status(path / name) if FILE.fullmatch(name) else None
        if not FILE.fullmatch(name) or (found is not None and stat.S_ISLNK(found.st_mode)):
            raise CheckpointError(f"{path} names the file {name!r:.80}, which is not in its folder; do not trust it")
        size = found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None
        if size != stored.size:
            state = "is missing" if size is None else f"has {size:,} of {stored.size:,} bytes"
            raise CheckpointError(f"{path} is incomplete: {name} {state}; {WAY_OUT}")
    return Checkpoint(path, step, settings, values, files)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Of errors of the system only those that say that a file is missing are damage; others may soon be over."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}; {WAY_OUT}") from error
    except OSError as error:
        raise OSError(
            f"{path} cannot be read now: {error}; mend that and run again, or move it elsewhere to go on without it"
        ) from error


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _digest(plain: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _named(folder: Path) -> list[Path]:
    """What has a checkpoint's name, by step."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _write_parts(folder: Path, model: Parts, training: Parts, rank: int, size: int) -> dict[str, Stored]:
    """The files of one rank, on the disk."""
    of = "" if size == 1 else f"-{rank + 1:05}-of-{size:05}"
    stored = {}
    for kind, parts in ((MODEL, model), (TRAINING, training)):
        name = f"{kind}{of}.safetensors"
        try:
            stored[name] = write_tensors(folder / name, parts.tensors, parts.metadata())
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


def _innermost(label: str, saved: Any, given: Any) -> tuple[str, Any, Any]:
    """Of two configurations of transformers, which have dozens of entries, the first entry that differs."""
    if not all(isinstance(each, dict) and "transformers" in each for each in (saved, given)):
        return label, saved, given
    label = "--hf"
    while isinstance(saved, dict) and isinstance(given, dict):
        name = next(name for name in [*given, *saved] if saved.get(name) != given.get(name))
        label += "" if name == "transformers" else f" {name}"
        saved, given = saved.get(name), given.get(name)
    return label, saved, given


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    return str(value)
