"""All source text of a machine as one corpus, of bytes or of tokens: each content once, whole files held out."""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minifloat.tools.train import tokens
from minifloat.tools.train.data import HELD_OUT_EVERY, Corpus, standard_library

_NAMES = """
    py pyi pyx pxd c h cc hh cpp hpp cxx hxx cu cuh inl inc proto js ts jsx tsx css sh pl pm rb go rs java lua jl r f
    f90 cmake md rst txt toml yaml yml cfg ini td tcl el vim sql
"""
SUFFIXES = frozenset(f".{name}" for name in _NAMES.split())
LARGEST = 1 << 20  # bytes; larger files are generated, or data
PARTS = "train", "validation"


def roots() -> list[Path]:
    """Lists folders of source text: Python's standard library, installed packages, headers and shared files."""
    found = [standard_library(), *(Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib"))]
    found += [
        Path(path) for path in ("/usr/include", "/usr/src", "/usr/share", "/usr/lib/python3", "/usr/local/include")
    ]
    return [path for path in dict.fromkeys(path.resolve() for path in found) if path.is_dir()]


def gather(
    folders: Sequence[Path], vocabulary: int = 0, most: int | None = None, held_out_every: int = HELD_OUT_EVERY
) -> Corpus:
    """The source text below ``folders``; one file in ``held_out_every``, by its content, is held out.

    Args:
        vocabulary: of the byte pair encoding that is trained on what is not held out; 0: tokens are bytes.
        most: about how many bytes: the share of the files, by content, that has so many; None: all.

    Raises:
        ValueError: one of the two parts has no text.
    """
    sizes: dict[bytes, tuple[Path, int]] = {}
    files = 0
    for path in source_files(folders):
        try:
            content = path.read_bytes()
        except OSError:  # no permission, or a link that leads nowhere
            continue
        if not content or b"\0" in content:
            continue
        files += 1
        sizes.setdefault(hashlib.sha256(content).digest(), (path, len(content)))
    below = 2**64 * (1.0 if most is None else most / max(1, sum(size for _, size in sizes.values())))
    chosen = {digest: path for digest, (path, _) in sizes.items() if int.from_bytes(digest[8:16], "big") < below}
    parts: dict[str, list[bytes]] = {name: [] for name in PARTS}
    for digest, path in chosen.items():
        parts[PARTS[int.from_bytes(digest[:8], "big") % held_out_every == 0]].append(path.read_bytes())
    where = ", ".join(map(str, folders))
    if not all(parts.values()):
        raise ValueError(f"{len(chosen)} source files below {where} are too few to hold some out")
    whole = hashlib.sha256(b"".join(sorted(chosen))).hexdigest()
    shown = ", ".join("/".join(folder.parts[-2:]) for folder in folders)  # reports travel: no path of this machine
    source = (
        f"source text below {shown}: {len(chosen):,} files of {files:,}, each content once, "
        f"{sum(sizes[digest][1] for digest in chosen):,} bytes, {len(parts['validation']):,} files held out; sha256 of "
        f"the sorted digests {whole}"
    )
    if not vocabulary:
        train, held_out = (torch.frombuffer(bytearray(b"\n".join(parts[name])), dtype=torch.uint8) for name in PARTS)
        return Corpus(train, held_out, source)
    texts = [[content.decode("utf-8", errors="replace") + "\n" for content in parts[name]] for name in PARTS]
    tokenizer = tokens.train_tokenizer(texts[0], vocabulary)
    train, held_out = (tokens.encode(tokenizer, part) for part in texts)
    source += f"; {len(train):,} and {len(held_out):,} tokens of {vocabulary:,} byte pairs"
    return Corpus(train, held_out, source, vocabulary, "token")


def source_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Files of source text below ``folders``, in a fixed order."""
    for top in folders:
        for folder, folders_in, names in os.walk(top):
            folders_in[:] = sorted(name for name in folders_in if name != "__pycache__" and name[0] != ".")
            for path in (Path(folder, name) for name in sorted(names)):
                if path.suffix in SUFFIXES and path.is_file() and path.stat().st_size <= LARGEST:
                    yield path


def write(corpus: Corpus, folder: Path) -> None:
    """Keeps a corpus, so that a study which goes on, here or elsewhere, has the same text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        np.save(folder / f"{name}.npy", getattr(corpus, name).numpy())
    aside = folder / "corpus.json.tmp"
    aside.write_text(json.dumps({"source": corpus.source, "vocabulary": corpus.vocabulary, "unit": corpus.unit}))
    aside.replace(folder / "corpus.json")  # the last: without it there is no text


def read(folder: Path) -> Corpus | None:
    """The corpus that :func:`write` kept, read as it is used; None if there is none."""
    if not (folder / "corpus.json").exists():
        return None

    def part(name: str) -> Tensor:
        return torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c"))

    return Corpus(part("train"), part("validation"), **json.loads((folder / "corpus.json").read_text()))
