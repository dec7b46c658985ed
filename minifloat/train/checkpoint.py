"""Checkpoints: folders that are complete whenever they have their name.

    OUT/checkpoints/RUN/step-00000100/
        model.safetensors   the model's state dict
        training/           torch.distributed.checkpoint's format: optimizer, random numbers, data stream, history
        checkpoint.json     settings and other plain values, and the size of every other file
        tokenizer.json      where the run has a tokenizer

A folder is written under another name, brought to disk and then renamed; an older one is renamed before it is deleted.
So a process that dies at any moment leaves complete checkpoints and, at most, leftovers that the next save removes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = 1
OPTIONS = ("recipe", "model", "steps", "batch_size", "learning_rate", "seed")  # the settings that options give
MODEL, TRAINING, PLAIN, TOKENIZER = "model.safetensors", "training", "checkpoint.json", "tokenizer.json"
NAME, LEFTOVER = re.compile(r"step-\d{8,}"), re.compile(r"\.step-\d{8,}\.partial")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `settings` are what its training was told, `values` its plain state."""

    path: Path
    step: int
    settings: Mapping[str, Any]
    values: Mapping[str, Any]

    @staticmethod
    def read(path: Path) -> Checkpoint:
        """Raises ValueError, saying why, when `path` holds no complete checkpoint of this program."""
        try:
            plain = json.loads((path / PLAIN).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no checkpoint of minifloat: it has no readable {PLAIN}") from error
        if not isinstance(plain, dict) or plain.get("minifloat") != VERSION:
            raise ValueError(f"{path / PLAIN} is not of a minifloat checkpoint of version {VERSION}")
        found = _sizes(path)
        for name, size in plain["files"].items():
            if found.get(name) != size:
                state = f"has {found[name]:,} of {size:,} bytes" if name in found else "is missing"
                raise ValueError(f"{path} is incomplete: {name} {state}")
        return Checkpoint(path, plain["step"], plain["settings"], plain["values"])

    def model_state(self) -> dict[str, Tensor]:
        """The model's state dict, on the CPU. Raises ValueError where safetensors is not installed."""
        need_safetensors()
        from safetensors.torch import load_file

        return load_file(self.path / MODEL)

    def training_state(self) -> dict[str, Tensor]:
        """The tensors of the training, on the CPU."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata
        from torch.distributed.checkpoint.state_dict_loader import load

        reader, tensors = FileSystemReader(self.path / TRAINING), {}
        for name, described in reader.read_metadata().state_dict_metadata.items():
            assert isinstance(described, TensorStorageMetadata), f"{name} was saved as a tensor"
            tensors[name] = torch.empty(described.size, dtype=described.properties.dtype)
        with _one_process():
            load(tensors, storage_reader=reader, no_dist=True)
        return tensors

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError, naming the option and both values, when the checkpoint is of another training."""
        for name in [*settings, *(name for name in self.settings if name not in settings)]:
            saved, given = self.settings.get(name), settings.get(name)
            if saved != given:
                label = f"--{name.replace('_', '-')}" if name in OPTIONS else name.replace("_", " ")
                raise ValueError(
                    f"{self.path} was trained with {label} {_show(saved)}, this command has "
                    f"{_show(given)}; give the same, or start anew without --resume in another --out"
                )


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

    def __post_init__(self) -> None:
        need_safetensors()  # better now than at the first save
        for name, value in (("save_every", self.every), ("keep", self.keep)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; choose at least 1")
        if self.start is not None:
            self.start.check(self.settings)
        reached = 0 if self.start is None else self.start.step
        for other in complete(self.folder)[-1:]:
            if other.step > reached:
                raise ValueError(
                    f"{other.path} is of an earlier training; continue from it with --resume, or choose another --out"
                )

    def due(self, step: int, steps: int) -> bool:
        return step == steps or (self.every is not None and step % self.every == 0)

    def path(self, step: int) -> Path:
        """The folder of the state after `step`."""
        return self.folder / f"step-{step:08}"

    def save(
        self, step: int, model: Mapping[str, Tensor], training: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> Path:
        """Writes the state after `step`, then removes the oldest checkpoints beyond `keep`; returns the new folder."""
        target = self.path(step)
        if target.exists():
            Checkpoint.read(target)  # the same step of the same run: there is nothing to add, if it is complete
            return target
        for leftover in self.folder.glob(".step-*"):
            if LEFTOVER.fullmatch(leftover.name):
                shutil.rmtree(leftover)
        partial = _aside(target)
        partial.mkdir(parents=True)
        _write(partial, step, self.settings, model, training, values, self.files)
        partial.rename(target)
        _sync(self.folder)
        for old in complete(self.folder)[: -self.keep]:
            shutil.rmtree(old.path.rename(_aside(old.path)))
        return target


def need_safetensors() -> None:
    """Raises ValueError where safetensors is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError("checkpoints need safetensors; get it with: pip install minifloat[train]")


def complete(folder: Path) -> list[Checkpoint]:
    """The complete checkpoints in a run's folder, oldest first; anything else in it is passed over."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if NAME.fullmatch(path.name):
            try:
                found.append(Checkpoint.read(path))
            except ValueError as error:
                warnings.warn(f"passed over: {error}", stacklevel=2)
    return sorted(found, key=lambda each: each.step)


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint in a run's folder."""
    return next(reversed(complete(folder)), None)


def locate(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest in it: `path` is a checkpoint, a run's folder of them or an `--out`.

    Raises ValueError when there is none, and when an `--out` holds those of several runs.
    """
    if (path / PLAIN).exists() or NAME.fullmatch(path.name):
        return Checkpoint.read(path)
    runs = [path, *sorted((path / "checkpoints").glob("*"))]
    found = [newest for run in runs if (newest := latest(run)) is not None]
    if not found:
        raise ValueError(f"there is no complete checkpoint in {path}; train with --save-every, or check the path")
    if len(found) > 1:
        raise ValueError(f"{path} has several runs; choose {' or '.join(str(each.path) for each in found)}")
    return found[0]


def _write(
    folder: Path,
    step: int,
    settings: Mapping[str, Any],
    model: Mapping[str, Tensor],
    training: Mapping[str, Tensor],
    values: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> None:
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save_file({name: tensor.detach().contiguous() for name, tensor in model.items()}, folder / MODEL)
    with _one_process():
        save(dict(training), storage_writer=FileSystemWriter(folder / TRAINING, sync_files=False), no_dist=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    plain = {"minifloat": VERSION, "step": step, "settings": settings, "values": values, "files": _sizes(folder)}
    (folder / PLAIN).write_text(json.dumps(plain, indent=1))
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files if path != folder / PLAIN}


def _sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _one_process() -> Iterator[None]:
    """Without the warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={each}" for name, each in value.items())
    return str(value)
