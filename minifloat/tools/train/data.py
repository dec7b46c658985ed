"""Text or tokens to train on: reading them, holding a part out, drawing batches, and their unigram entropy."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minifloat.tools.train import tokens

CHUNK = 65_536  # tokens; long enough that a chunk's edges, where the text is cut, are rare
HELD_OUT_EVERY = 20  # one chunk in so many is validation text
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "idlelib", "node_modules", "site-packages", "dist-packages", "test", "tests"}
)


Text = Tensor | tokens.TokenFile


@dataclass(frozen=True)
class Corpus:
    """Two disjoint vectors of tokens, what is trained on and what is held out: uint8, uint16, int32 or uint32.

    A token is a byte, or one of the `vocabulary` tokens of a tokenizer; `tokenizer` is that one's JSON where it is
    known. `unit` names what losses are per.
    """

    train: Text
    validation: Text
    source: str
    vocabulary: int = 256
    unit: str = "byte"
    tokenizer: bytes | None = None

    @property
    def fingerprint(self) -> str:
        """Sizes, and a hash of 64 stretches of 4096 tokens of each part and of the tokenizer."""
        digest = hashlib.sha256(self.tokenizer or b"")
        for part in (self.train, self.validation):
            for piece in part.split(max(1, len(part) // 64)):
                digest.update(piece[:4096].long().numpy().tobytes())
        return f"{len(self.train)}+{len(self.validation)} {self.unit}s, {digest.hexdigest()[:16]}"


def standard_library() -> Path:
    """The folder of the running Python's own standard library: real text that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def load(
    paths: Sequence[Path] = (),
    *,
    least: int,
    tokenizer: Path | None = None,
    vocabulary: int | None = None,
    token_dtype: str = "uint16",
) -> Corpus:
    """Reads `paths` and splits them.

    They are text files or folders (none: Python's standard-library sources), read as bytes or through the `tokenizer`,
    a JSON file of the tokenizers library; or one packed token file, `.npy` or `.bin` (raw, of `token_dtype`), which is
    read as it is used, and whose last twentieth is held out. Its `vocabulary` is the tokenizer's if not given.

    `least` is the number of tokens that each part must have to hold one sequence. Raises ValueError when a path does
    not exist, when there is no text or too little of it, and when a token is outside of the vocabulary.
    """
    tokens.check_dtype(token_dtype)
    if any(path.suffix in tokens.SUFFIXES for path in paths):
        corpus = _load_packed(paths, tokenizer, vocabulary, token_dtype)
    elif vocabulary is not None:
        raise ValueError(
            "--vocabulary is for packed token files; of text it is 256 bytes, or the tokenizer's; leave it out"
        )
    else:
        corpus = _load_text(paths, tokenizer)
    train, held_out = len(corpus.train), len(corpus.validation)
    if min(train, held_out) < least:
        raise ValueError(
            f"{train + held_out} {corpus.unit}s of text leave {train} to train on and {held_out} held out, but each "
            f"needs {least} for one sequence; give more text or choose a model with a shorter context"
        )
    return corpus


def _load_text(paths: Sequence[Path], tokenizer: Path | None) -> Corpus:
    if paths:
        files, source = [file for path in paths for file in text_files(path)], ", ".join(map(str, paths))
    else:
        files = [file for file in text_files(standard_library()) if file.suffix == ".py"]
        source = f"the standard library of Python {sysconfig.get_python_version()}"
    texts = [content for file in files if b"\0" not in (content := file.read_bytes())]
    if not any(texts):
        raise ValueError(f"found no text in {source} ({len(files)} files); name files or folders that hold some")
    joined = b"\n".join(texts)
    source += f": {len(files)} files, {len(joined):,} bytes"
    if tokenizer is None:
        return Corpus(*split(torch.frombuffer(bytearray(joined), dtype=torch.uint8)), source)
    loaded, content = tokens.load_tokenizer(tokenizer), tokenizer.read_bytes()
    text = tokens.encode(loaded, (each.decode("utf-8", errors="replace") + "\n" for each in texts))
    source += f", {len(text):,} tokens of {tokenizer}"
    return Corpus(*split(text), source, loaded.get_vocab_size(), "token", content)


def _load_packed(paths: Sequence[Path], tokenizer: Path | None, vocabulary: int | None, dtype: str) -> Corpus:
    if len(paths) > 1:
        raise ValueError(f"{len(paths)} paths with a token file among them; give one token file, and nothing else")
    text = tokens.open_file(paths[0], dtype)
    known = None if tokenizer is None else tokens.load_tokenizer(tokenizer).get_vocab_size()
    size = tokens.check_vocabulary(paths[0], text, known if vocabulary is None else vocabulary)
    content = None if tokenizer is None else tokenizer.read_bytes()
    held_out = len(text) // HELD_OUT_EVERY
    parts = text[: len(text) - held_out], text[len(text) - held_out :]
    return Corpus(*parts, f"{paths[0]}: {len(text):,} tokens", size, "token", content)


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


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """The (not empty) text's training and validation tokens.

    The text is cut into contiguous chunks of 64 Ki (a short text: into `HELD_OUT_EVERY` equal ones) and the last chunk
    of each group of `HELD_OUT_EVERY` is held out. Contiguous, because single tokens would be known from their
    neighbours in the training text; spread out, because one block at the end would be another kind of text.
    """
    chunks = text.split(min(CHUNK, max(1, len(text) // HELD_OUT_EVERY)))
    held_out = [piece for i, piece in enumerate(chunks) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    train = [piece for i, piece in enumerate(chunks) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return _join(train, text.dtype), _join(held_out, text.dtype)


class Batches(Iterator[tuple[Tensor, Tensor]]):
    """Endless random (inputs, targets), each int64 [batch_size, context]; equal seeds give equal batches.

    The state of `generator` is the position in the stream.
    """

    def __init__(self, text: Text, batch_size: int, context: int, seed: int) -> None:
        self.text, self.batch_size, self.context = text, batch_size, context
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.context, (self.batch_size,), generator=self.generator)
        return _windows(self.text, starts, self.context)


def fixed_batches(text: Text, batch_size: int, context: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """At most `count` batches of windows spread evenly over the text: the same for every run, none twice."""
    windows = min(batch_size * count, (len(text) - 1) // context)
    starts = torch.linspace(0, len(text) - 1 - context, windows, dtype=torch.float64).long()
    return [_windows(text, part, context) for part in starts.split(batch_size)]


def unigram_entropy(train: Text, validation: Text, vocabulary: int = 256) -> float:
    """The loss, in nats a token, on `validation` of a model that knows only how often each token occurs in `train`.

    Every count starts at one, so that a token which `train` lacks costs much but not infinitely much.
    """
    frequency, held_out = _counts(train, vocabulary) + 1, _counts(validation, vocabulary)
    log_probability = (frequency / frequency.sum()).log()
    return float(-(held_out * log_probability).sum() / held_out.sum())


def _counts(text: Text, vocabulary: int) -> Tensor:
    """Counts each token, float64 [vocabulary], in pieces: the text may be larger than the memory."""
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for piece in text.split(2**24):
        counts += torch.bincount(piece.long(), minlength=vocabulary)
    return counts


def _windows(text: Text, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    rows = torch.stack([text[start : start + context + 1].long() for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def _join(pieces: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *pieces])
