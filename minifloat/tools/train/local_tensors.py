"""The tensors of a checkpoint that one rank has, some of them sharded, and the whole ones assembled from all ranks'."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

KEY = "parts"  # of a file's metadata


class Chunk(NamedTuple):
    """Consecutive rows of a shard: the whole tensor's shape, and the chunk's offset in it, in each dim."""

    shape: list[int]
    offset: list[int]
    rows: int


@dataclass(frozen=True)
class LocalTensors:
    """Tensors on the CPU; ``chunks``: of those that are shards of larger ones, in the order of their rows."""

    tensors: Mapping[str, Tensor]
    chunks: Mapping[str, list[Chunk]] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """The chunks, as a safetensors file keeps them."""
        return {KEY: json.dumps(self.chunks)} if self.chunks else {}


def assemble(files: Iterable[tuple[dict[str, Tensor], dict[str, str]]]) -> dict[str, Tensor]:
    """The whole tensors of all ranks' files, given as tensors and metadata; raises ValueError where a chunk lacks."""
    whole: dict[str, Tensor] = {}
    found: dict[str, list[tuple[list[Chunk], Tensor]]] = {}
    for tensors, metadata in files:
        chunks = _read_chunks(metadata)
        for name, tensor in tensors.items():
            if name in chunks:
                found.setdefault(name, []).append((chunks[name], tensor))
            elif name in whole:
                raise ValueError(f"tensor {name!r:.80} is in two files")
            else:
                whole[name] = tensor
    for name, shards in found.items():
        if name in whole:
            raise ValueError(f"tensor {name!r:.80} is in two files")
        try:
            whole[name] = _join(name, shards)
        except (TypeError, LookupError, RuntimeError, OverflowError) as error:
            raise ValueError(f"the parts of tensor {name!r:.80} have no place in it: {error}") from error
        shards.clear()
    return whole


def _read_chunks(metadata: dict[str, str]) -> dict[str, list[Chunk]]:
    try:
        found = json.loads(metadata.get(KEY, "{}"))
        return {name: [Chunk(*chunk) for chunk in chunks] for name, chunks in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the places of a file's parts are unreadable: {error}") from error


def _join(name: str, shards: list[tuple[list[Chunk], Tensor]]) -> Tensor:
    parts: list[tuple[Chunk, Tensor]] = []
    for chunks, tensor in shards:
        parts += zip(chunks, tensor.split([chunk.rows for chunk in chunks]), strict=True)
    shape, dtype = parts[0][0].shape, parts[0][1].dtype
    if sum(part.numel() for _, part in parts) != math.prod(shape):  # before memory is asked for
        raise ValueError(f"tensor {name!r:.80} of shape {shape!r:.80} is not complete")
    whole, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    for chunk, part in parts:
        if chunk.shape != shape or part.dtype != dtype or part.ndim != len(shape) or len(chunk.offset) != len(shape):
            raise ValueError(f"the parts of tensor {name!r:.80} are of different ones")
        for target, values in ((whole, part), (filled, True)):
            for dim, (start, size) in enumerate(zip(chunk.offset, part.shape, strict=True)):
                target = target.narrow(dim, start, size)
            target[...] = values
    if not bool(filled.all()):
        raise ValueError(f"the parts of tensor {name!r:.80} overlap, so that others are missing")
    return whole
