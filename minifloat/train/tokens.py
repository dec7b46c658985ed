"""Tokens other than bytes: the tokenizers library, an optional dependency, and packed token files."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
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
        raise ValueError(f"{path} is no readable tokenizer of the tokenizers library: {error}") from error
    return read_tokenizer(content, path)


def read_tokenizer(content: bytes, path: Path) -> Tokenizer:
    """The tokenizer that the JSON file `path` has."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            "a tokenizer needs the tokenizers library; get it with: pip install minifloat[tokenizers]"
        ) from error
    try:
        return Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path} is no readable tokenizer of the tokenizers library: {error}") from error


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Tensor:
    """All texts' tokens in a row, without special tokens: uint16 where the vocabulary allows it, else int32."""
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
    dtype = torch.uint16 if tokenizer.get_vocab_size() <= 2**16 else torch.int32
    return torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int32).to(dtype)


def map_file(path: Path, dtype: str) -> Tensor:
    """A token file as a vector that is read from disk as it is used: `.npy`, or `.bin`, raw, of `dtype`."""
    import numpy as np

    if dtype not in DTYPES:
        raise ValueError(f"there are no tokens of {dtype!r}; choose {' or '.join(DTYPES)}")
    if not path.is_file():
        raise ValueError(f"{path} is no file; check its spelling")
    try:  # mode c: copied where it is written to, which nothing here does
        npy = path.suffix == ".npy"
        mapped = np.lib.format.open_memmap(path, "c") if npy else np.memmap(path, np.dtype(dtype), "c")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} holds no tokens: {error}") from error
    if not mapped.size:
        raise ValueError(f"{path} holds no tokens: it is empty")
    if mapped.ndim != 1 or mapped.dtype.name not in DTYPES:
        found = f"{mapped.dtype.name} {list(mapped.shape)}"
        raise ValueError(f"{path} holds {found}; token files are vectors of {' or '.join(DTYPES)}")
    if not mapped.dtype.isnative:
        raise ValueError(f"{path} holds {mapped.dtype.name} of another byte order; save it in this machine's own")
    return torch.from_numpy(mapped)


def check_vocabulary(path: Path, text: Tensor, vocabulary: int | None) -> int:
    """The vocabulary's size, when all of the token file's tokens are in it; else raises ValueError."""
    largest = int(text.numpy().max())
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
