"""All source text of a machine as one corpus: each content once, whole files held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minifloat.tools.train.data import HELD_OUT_EVERY, Corpus, standard_library

_NAMES = """
    py pyi pyx pxd c h cc hh cpp hpp cxx hxx cu cuh inl inc proto js ts jsx tsx css sh pl pm rb go rs java lua jl r f
    f90 cmake md rst txt toml yaml yml cfg ini td tcl el vim sql
"""
SUFFIXES = frozenset(f".{name}" for name in _NAMES.split())
LARGEST = 1 << 20  # bytes; larger files are generated, or data
PARTS = "train", "validation"


def roots() -> list[Path]:
    """Where a machine has source text: Python's standard library, installed packages, headers and shared files."""
    found = [standard_library(), *(Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib"))]
    found += [
        Path(path) for path in ("/usr/include", "/usr/src", "/usr/share", "/usr/lib/python3", "/usr/local/include")
    ]
    return [path for path in dict.fromkeys(path.resolve() for path in found) if path.is_dir()]


def gather(folders: Sequence[Path]) -> Corpus:
    """The source text below ``folders`` as bytes; one file in twenty, by its content, is held out.

    Raises ValueError where one of the two parts has no text.
    """
    parts: dict[str, list[bytes]] = {name: [] for name in PARTS}
    seen: set[bytes] = set()
    files = 0
    for path in source_files(folders):
        try:
            content = path.read_bytes()
        except OSError:  # no permission, or a link that leads nowhere
            continue
        digest = hashlib.sha256(content).digest()
        if not content or b"\0" in content:
            continue
        files += 1
        if digest not in seen:
            seen.add(digest)
            parts[PARTS[int.from_bytes(digest[:8], "big") % HELD_OUT_EVERY == 0]].append(content)
    if not all(parts.values()):
        raise ValueError(f"{len(seen)} source files below {', '.join(map(str, folders))} are too few to hold some out")
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(parts[name])), dtype=torch.uint8) for name in PARTS)
    whole = hashlib.sha256(b"".join(sorted(seen))).hexdigest()
    source = (
        f"source text below {', '.join(map(str, folders))}: {len(seen):,} files of {files:,}, each content once, "
        f"{len(train) + len(held_out):,} bytes, {len(parts['validation']):,} files held out; sha256 of the "
        f"sorted digests {whole}"
    )
    return Corpus(train, held_out, source)


def source_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Files of source text below ``folders``, in a fixed order."""
    for top in folders:
        for folder, folders_in, names in os.walk(top):
            folders_in[:] = sorted(name for name in folders_in if name != "__pycache__" and name[0] != ".")
            for path in (Path(folder, name) for name in sorted(names)):
                if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= LARGEST:
                    yield path


def write(corpus: Corpus, folder: Path) -> None:
    """Keeps a corpus of bytes, so that a study which goes on has the same text whatever has been installed since."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        np.save(folder / f"{name}.npy", getattr(corpus, name).numpy())
    aside = folder / "source.txt.tmp"
    aside.write_text(corpus.source)
    aside.replace(folder / "source.txt")  # the last: without it there is no text


def read(folder: Path) -> Corpus | None:
    """The corpus that :func:`write` kept, read as it is used; None if there is none."""
    if not (folder / "source.txt").exists():
        return None

    def part(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))

    return Corpus(part("train"), part("validation"), (folder / "source.txt").read_text())
