"""Checkpoints: folders that are complete whenever they have their name, and in which nothing can run.

    OUT/checkpoints/RUN/step-00000100/
        model.safetensors      the model's state dict
        training.safetensors   optimizer, random numbers, data stream, history
        checkpoint.json        settings and other plain values; size and SHA-256 of every other file
        tokenizer.json         where the run has a tokenizer

Of several ranks each writes what it has, to `model-00001-of-00004.safetensors` and so on, whose metadata says which
shards of which tensors these are. `checkpoint_writer` writes them. Only missing files and wrong content are damage: a
file that cannot be read now may be good.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from minifloat.tools.train.local_tensors import assemble
from minifloat.tools.train.run import NEWER
from minifloat.tools.train.tensor_file import Stored, digest_of, read_bytes, read_tensors

VERSION = 3
OPTIONS = "recipe", "model", "batch_size", "accumulate", "learning_rate", "seed", "finish"  # given by options
EXTENDED = "steps"  # the setting that may differ: a run goes on to another end
MODEL, TRAINING, PLAIN, TOKENIZER = "model", "training", "checkpoint.json", "tokenizer.json"
NAME = re.compile(r"step-(\d{8,18})")
DAMAGED = "damaged-"  # before the name of what was set aside
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")  # no path: a checkpoint's files are in its folder
MOST_PLAIN = 2**24  # bytes
WAY_OUT = "copy it again, or use the one before it"
LOG = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint is damaged, or of something else."""


class VersionError(CheckpointError):
    """A checkpoint is of another version of minifloat; it may be good, and is not set aside."""


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
            with _reading(self.path, "is damaged"):
                if digest_of(self.path / name) != stored:
                    raise ValueError(f"{name} has other bytes than were saved")
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
        with _reading(self.path, "is damaged"):
            content = read_bytes(self.path / name, self.files[name].size)
            if Stored.of(content) != self.files[name]:
                raise ValueError(f"{name} has other bytes than were saved")
        return content

    def _tensors(self, kind: str) -> dict[str, Tensor]:
        names = [name for name in self.files if re.fullmatch(rf"{kind}(-\d+-of-\d+)?\.safetensors", name)]
        with _reading(self.path, f"has no usable {kind}"):
            return assemble(read_tensors(self.path / name, self.files[name]) for name in names)

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
            saved, given = (each.get(name, NEWER.get(name)) for each in (self.settings, settings))
            if saved != given and name != EXTENDED:
                label = f"--{name.replace('_', '-')}" if name in OPTIONS else name.replace("_", " ")
                label, saved, given = _innermost(label, saved, given)
                return f"{label} {_show(saved)}, this command has {_show(given)}"
        return None


def complete(folder: Path, tell: bool = True) -> list[Checkpoint]:
    """The checkpoints in a run's folder whose files have their sizes, oldest first; others are passed over."""
    found = []
    for path in named(folder):
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
    if plain.pop("sha256") != digest_of_plain(plain):
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
def _reading(path: Path, problem: str | None = None) -> Iterator[None]:
    """Reports a missing file as damage; other errors of the system are raised as they are, for they may soon be over.

    `problem`: what a ValueError says of the checkpoint.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is incomplete: {error}; {WAY_OUT}") from error
    except OSError as error:
        raise OSError(
            f"{path} cannot be read now: {error}; mend that and run again, or move it elsewhere to go on without it"
        ) from error
    except ValueError as error:
        if problem is None or isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} {problem}: {error}; {WAY_OUT}") from error


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def digest_of_plain(plain: dict[str, Any]) -> str:
    """The SHA-256 of an index, but for its own entry."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def named(folder: Path) -> list[Path]:
    """Lists what has a checkpoint's name, by step."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if NAME.fullmatch(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _innermost(label: str, saved: Any, given: Any) -> tuple[str, Any, Any]:
    """Finds the first entry that differs of two configurations of transformers, which have dozens."""
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
