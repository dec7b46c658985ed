"""Checkpoints of a training as files: small ones, what is in a folder, and ways to damage them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minifloat.tools.train import checkpoint
from minifloat.tools.train.checkpoint_writer import Checkpoints
from minifloat.tools.train.local_tensors import LocalTensors

MODEL, TRAINING = "model.safetensors", "training.safetensors"


def file_names(folder: Path) -> list[str]:
    """Of the files and folders in it, sorted."""
    return sorted(path.name for path in folder.iterdir())


def save(checkpoints: Checkpoints, step: int, values: dict[str, Any] | None = None) -> Path:
    """A checkpoint of two tensors."""
    model, training = LocalTensors({"w": torch.ones(2)}), LocalTensors({"t": torch.zeros(0, 3)})
    return checkpoints.save(step, model, training, values or {})


def truncate(path: Path) -> None:
    """The last bytes are missing."""
    path.write_bytes(path.read_bytes()[:-5])


def flip_bit(path: Path, where: float = 0.5) -> None:
    """One bit is another, at a fraction of the size or, as an integer, at that byte."""
    content = bytearray(path.read_bytes())
    content[where if isinstance(where, int) else int(len(content) * where)] ^= 1
    path.write_bytes(content)


def change_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a checkpoint's index as an attacker would, with the digest that belongs to it."""
    plain = json.loads((folder / checkpoint.PLAIN).read_text())
    del plain["sha256"]
    change(plain)
    (folder / checkpoint.PLAIN).write_text(json.dumps(plain | {"sha256": checkpoint.digest_of_plain(plain)}))
