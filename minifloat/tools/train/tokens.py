"""Tokens other than bytes: the tokenizers library, an optional dependency, and packed token files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUFFIXES = (".bin", ".npy")
DTYPES = ("uint16", "uint32")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a JSON file of the tokenizers library."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"--tokenizer: {path} is no readable tokenizer of the tokenizers library ({error}); give its tokenizer.json"
        ) from error
    return read_tokenizer(content, path)


def read_tokenizer(content: bytes, path: Path) -> Tokenizer:
    """The tokenizer that the JSON file `path` has."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError("a tokenizer needs the tokenizers library; get it with: pip install tokenizers") from error
    with tokenizer_errors(f"--tokenizer: {path} is no readable tokenizer of the tokenizers library"):
        return Tokenizer.from_buffer(content)


@contextmanager
def tokenizer_errors(problem: str) -> Iterator[None]:
    """Turns what the tokenizers library raises into a ValueError; it raises no class of its own, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # which is no Exception
            raise ValueError(f"{problem} ({error}); give its tokenizer.json") from error
        raise


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte pair encoding of the bytes of ``texts``, whose tokens stay within words, numbers and runs of spaces."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError("a tokenizer needs the tokenizers library; get it with: pip install tokenizers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Tensor:
    """All texts' tokens in a row, without special tokens: uint16 where the vocabulary allows it, else int32."""
    dtype = torch.uint16 if tokenizer.get_vocab_size() <= 2**16 else torch.int32
    pieces, rest = [torch.empty(0, dtype=torch.int32)], iter(texts)
    with tokenizer_errors("the tokenizer cannot encode the text"):
        while some := list(islice(rest, 1000)):  # an encoding has much more than its tokens
            encodings = tokenizer.encode_batch(some, add_special_tokens=False)
            pieces += [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in encodings]
    return torch.cat(pieces).to(dtype)


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that token files do not have."""
    if dtype not in DTYPES:
        raise ValueError(f"--token-dtype: there are no tokens of {dtype!r}; choose {' or '.join(DTYPES)}")


@dataclass(frozen=True)
class TokenFile:
    """A vector of tokens that is read from disk as it is used; it has what a training needs of a tensor.

    The file is not mapped: of a mapped one that is cut while it is read, the next read ends the process.
    """

    path: Path
    file: BufferedReader
    dtype: torch.dtype
    start: int  # in bytes
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> TokenFile:
        first, end, step = part.indices(self.length)
        assert step == 1, "parts are contiguous"
        return replace(self, start=self.start + first * self.dtype.itemsize, length=max(0, end - first))

    def split(self, size: int) -> Iterator[TokenFile]:
        return (self[first : first + size] for first in range(0, self.length, size))

    def long(self) -> Tensor:
        """All of it, int64. Raises OSError where the file has become too short."""
        content = memoryview(bytearray(self.length * self.dtype.itemsize))
        done = 0
        while done < len(content):
            read = os.preadv(self.file.fileno(), [content[done:]], self.start + done)
            if not read:
                raise OSError(
                    f"{self.path} was cut while it was read: there is nothing after byte {self.start + done:,}; put "
                    "the whole file back, and continue with --resume"
                )
            done += read
        return torch.frombuffer(content, dtype=self.dtype).long() if done else torch.empty(0, dtype=torch.int64)


def open_file(path: Path, dtype: str) -> TokenFile:
    """A token file: `.npy`, or `.bin`, raw, of `dtype`."""
    import numpy as np

    check_dtype(dtype)
    if not path.is_file():
        raise ValueError(f"{path} is no file; check its spelling")
    try:  # mapped for what its header says and for the check of its size; nothing is read through the mapping
        npy = path.suffix == ".npy"
        mapped = np.lib.format.open_memmap(path, "r") if npy else np.memmap(path, np.dtype(dtype), "r")
    except OSError:
        raise
    except Exception as error:  # of numpy's parsers: ValueError, EOFError, SyntaxError, TokenError, RecursionError
        raise ValueError(f"{path} holds no tokens: {error or type(error).__name__}") from error
    if not mapped.size:
        raise ValueError(f"{path} holds no tokens: it is empty")
    if mapped.ndim != 1 or mapped.dtype.name not in DTYPES:
        found = f"{mapped.dtype.name} {list(mapped.shape)}"
        raise ValueError(f"{path} holds {found}; token files are vectors of {' or '.join(DTYPES)}")
    if not mapped.dtype.isnative:
        raise ValueError(f"{path} holds {mapped.dtype.name} of another byte order; save it in this machine's own")
    return TokenFile(path, path.open("rb"), getattr(torch, mapped.dtype.name), mapped.offset, len(mapped))


def check_vocabulary(path: Path, text: TokenFile, vocabulary: int | None) -> int:
    """The vocabulary's size, when all of the token file's tokens are in it; else raises ValueError."""
    largest = max(int(piece.long().max()) for piece in text.split(2**24))
    if vocabulary is None:
        raise ValueError(
            f"{path} does not say how large its vocabulary is; give --vocabulary (its largest token is {largest}) or "
            "--tokenizer"
        )
    if largest >= vocabulary:
        raise ValueError(
            f"the largest token of {path} is {largest}, but the vocabulary has {vocabulary}; give a larger --vocabulary"
            ", the right --tokenizer or the right --token-dtype"
        )
    return vocabulary
