"""Files of tensors in the safetensors format, and the digest of each.

They are written and read here rather than by the safetensors library: in one pass with the digest; with Python's lock
released, so that a thread writes while a training goes on; and without mapping, since a mapped file that is cut while
it is read ends the process. Nothing in such a file can run.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
MOST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
CHUNK = 2**24  # bytes that are hashed and written at a time


@dataclass(frozen=True)
class Stored:
    """Entry of a file in an index: its size and its SHA-256, as ``sha256sum`` prints it."""

    size: int
    sha256: str

    @staticmethod
    def of(content: bytes) -> Stored:
        return Stored(len(content), hashlib.sha256(content).hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Stored:
    """Writes tensors of the CPU."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # each is aligned
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name in order:
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    prefix, digest = memoryview(len(described).to_bytes(8, "little") + described), hashlib.sha256()
    with path.open("wb") as file:
        for content in (prefix, *(_bytes(tensors[name]) for name in order)):
            for start in range(0, content.nbytes, CHUNK):
                digest.update(content[start : start + CHUNK])
                file.write(content[start : start + CHUNK])
        return Stored(file.tell(), digest.hexdigest())


def read_tensors(path: Path, stored: Stored) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file; raises ValueError, naming it, where it is damaged or no such file."""
    digest, tensors = hashlib.sha256(), {}
    with open_plain(path) as file:
        try:
            start, header = _read_header(file, os.fstat(file.fileno()).st_size)
            digest.update(start)
            metadata = header.pop(METADATA, {})
            for name, dtype, shape in _described(header, os.fstat(file.fileno()).st_size - len(start)):
                tensors[name] = torch.empty(shape, dtype=dtype)
                content = _bytes(tensors[name])
                if file.readinto(content) != content.nbytes:
                    raise ValueError("it was cut while it was read")
                digest.update(content)
        except (ValueError, TypeError, KeyError, RuntimeError, RecursionError, MemoryError) as error:
            raise ValueError(f"{path} is damaged: {error or type(error).__name__}") from error
    if digest.hexdigest() != stored.sha256:
        raise ValueError(f"{path} is damaged: its SHA-256 is not the one that was stored")
    if not _is_text(metadata):
        raise ValueError(f"{path} is damaged: its metadata is no text")
    return tensors, metadata


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a small file; raises ValueError where it has more than ``most`` bytes."""
    with open_plain(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most:,} bytes")
    return content


def digest_of(path: Path) -> Stored:
    """The size and the digest of a file."""
    with open_plain(path) as file:
        digest = hashlib.file_digest(file, "sha256")
        return Stored(file.tell(), digest.hexdigest())


def open_plain(path: Path) -> BufferedReader:
    """Opens a file to read; raises ValueError for a link, which may lead anywhere, a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} is a link, and a checkpoint's files are its own; copy the file here") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no plain file")
    return os.fdopen(descriptor, "rb")


def _bytes(tensor: Tensor) -> memoryview:
    """Bytes of a tensor, in its memory."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def _read_header(file: BufferedReader, size: int) -> tuple[bytes, dict[str, Any]]:
    """All bytes before the tensors', and what they say."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MOST_HEADER, size - 8):
        raise ValueError(f"its header would have {length:,} bytes, the file has {size:,}")
    described = file.read(length)
    header = json.loads(described)
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return prefix + described, header


def _described(header: dict[str, Any], size: int) -> Iterator[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape of each tensor, in the order of the file; together they have exactly its bytes."""
    position = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, end = entry["data_offsets"]
        dtype, shape = DTYPES.get(str(entry["dtype"])), entry["shape"]
        if dtype is None:
            raise ValueError(f"tensor {name!r:.80} has the unknown dtype {entry['dtype']!r:.80}")
        if not _are_sizes(shape) or not _are_sizes([start, end]):
            raise ValueError(f"tensor {name!r:.80} has no shape or no place")
        if start != position or end != start + math.prod(shape) * dtype.itemsize or end > size:
            raise ValueError(f"tensor {name!r:.80} of shape {shape} would be at bytes {start} to {end} of {size:,}")
        position = end
        yield name, dtype, shape
    if position != size:
        raise ValueError(f"its tensors have {position:,} bytes, the file {size:,}")


def _are_sizes(values: Any) -> bool:
    few = isinstance(values, list) and len(values) <= 64
    return few and all(type(n) is int and 0 <= n <= sys.maxsize for n in values)


def _is_text(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
