"""Real text as bytes: reading it, holding a part out, drawing batches, and its unigram entropy."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CHUNK = 65_536  # bytes; long enough that a chunk's edges, where the text is cut, are rare
HELD_OUT_EVERY = 20  # one chunk in so many is validation text
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "idlelib", "node_modules", "site-packages", "dist-packages", "test", "tests"}
)


@dataclass(frozen=True)
class Corpus:
    """A text as two disjoint uint8 vectors: what is trained on and what is held out."""

    train: Tensor
    validation: Tensor
    source: str


def standard_library() -> Path:
    """The folder of the running Python's own standard library: real text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def load(paths: Sequence[Path] = (), *, least: int) -> Corpus:
    """Reads `paths` (files or folders; none: Python's standard-library sources) and splits them.

    `least` is the number of bytes that each part must have to hold one sequence. Raises ValueError when a path does not
    exist, when there is no text, and when there is too little of it.
    """
    if paths:
        files, source = [file for path in paths for file in text_files(path)], ", ".join(map(str, paths))
    else:
        files = [file for file in text_files(standard_library()) if file.suffix == ".py"]
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    text = b"\n".join(content for file in files if b"\0" not in (content := file.read_bytes()))
    if not text:
        raise ValueError(f"found no text in {source} ({len(files)} files); name files or folders that hold some")
    train, validation = split(text)
    if min(len(train), len(validation)) < least:
        raise ValueError(
            f"{len(text)} bytes of text leave {len(train)} to train on and {len(validation)} held out, but each needs "
            f"{least} for one sequence; give more text or choose a model with a shorter context"
        )
    return Corpus(train, validation, f"{source}: {len(files)} files, {len(text):,} bytes")


def text_files(path: Path) -> Iterator[Path]:
    """`path` itself, or the files below it, sorted, without hidden ones, caches, tests and installed packages."""
    if path.is_file():
        yield path
    elif path.is_dir():
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and name[0] != ".")
            yield from (Path(folder, name) for name in sorted(names) if name[0] != ".")
    else:
        raise ValueError(f"{path} is neither a file nor a folder; check its spelling")


def split(text: bytes) -> tuple[Tensor, Tensor]:
    """The (not empty) text's training and validation bytes, both uint8.

    The text is cut into contiguous chunks of 64 KiB (a short text: into `HELD_OUT_EVERY` equal ones) and the last chunk
    of each group of `HELD_OUT_EVERY` is held out. Contiguous, because single bytes would be known from their
    neighbours in the training text; spread out, because one block at the end would be another kind of text.
    """
    chunk = min(CHUNK, max(1, len(text) // HELD_OUT_EVERY))
    chunks = torch.frombuffer(bytearray(text), dtype=torch.uint8).split(chunk)
    held_out = [piece for i, piece in enumerate(chunks) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    train = [piece for i, piece in enumerate(chunks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return _join(train), _join(held_out)


def batches(text: Tensor, batch_size: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random (inputs, targets), each int64 [batch_size, context]; equal seeds give equal batches."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield _windows(text, torch.randint(len(text) - context, (batch_size,), generator=generator), context)


def fixed_batches(text: Tensor, batch_size: int, context: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """At most `count` batches of windows spread evenly over the text: the same for every run, none twice."""
    windows = min(batch_size * count, (len(text) - 1) // context)
    starts = torch.linspace(0, len(text) - 1 - context, windows, dtype=torch.float64).long()
    return [_windows(text, part, context) for part in starts.split(batch_size)]


def unigram_entropy(train: Tensor, validation: Tensor) -> float:
    """The loss, in nats a byte, on `validation` of a model that knows only how often each byte occurs in `train`.

    Every count starts at one, so that a byte which `train` lacks costs much but not infinitely much.
    """
    frequency = torch.bincount(train.long(), minlength=256).double() + 1
    held_out = torch.bincount(validation.long(), minlength=256).double()
    log_probability = (frequency / frequency.sum()).log()
    return float(-(held_out * log_probability).sum() / held_out.sum())


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def _join(pieces: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
