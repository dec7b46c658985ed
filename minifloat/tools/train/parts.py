"""What one rank has of a set of tensors, and the whole ones, put together from what all of them have."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

KEY = "parts"  # of a file's metadata


class Place(NamedTuple):
    """Where so many rows of a part begin in the whole, in each dim, and the whole one's shape."""

    shape: list[int]
    start: list[int]
    rows: int


@dataclass(frozen=True)
class Parts:
    """Tensors on the CPU; those that are parts of larger ones have places, of their rows one after the other."""

    tensors: Mapping[str, Tensor]
    places: Mapping[str, list[Place]] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """The places, as a safetensors file keeps them."""
        return {KEY: json.dumps(self.places)} if self.places else {}


def assemble(files: Iterable[tuple[dict[str, Tensor], dict[str, str]]]) -> dict[str, Tensor]:
    """The whole tensors of all ranks' files, given as tensors and metadata; raises ValueError where a part lacks."""
    whole: dict[str, Tensor] = {}
    found: dict[str, list[tuple[list[Place], Tensor]]] = {}
    for tensors, metadata in files:
        places = _read_places(metadata)
        for name, tensor in tensors.items():
            if name in places:
                found.setdefault(name, []).append((places[name], tensor))
            elif name in whole:
                raise ValueError(f"tensor {name!r:.80} is in two files")
            else:
                whole[name] = tensor
    for name, parts in found.items():
        if name in whole:
            raise ValueError(f"tensor {name!r:.80} is in two files")
        try:
            whole[name] = _join(name, parts)
        except (TypeError, LookupError, RuntimeError, OverflowError) as error:
            raise ValueError(f"the parts of tensor {name!r:.80} have no place in it: {error}") from error
        parts.clear()
    return whole


def _read_places(metadata: dict[str, str]) -> dict[str, list[Place]]:
    try:
        places = json.loads(metadata.get(KEY, "{}"))
        return {name: [Place(*place) for place in each] for name, each in places.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the places of a file's parts are unreadable: {error}") from error


def _join(name: str, found: list[tuple[list[Place], Tensor]]) -> Tensor:
    parts: list[tuple[Place, Tensor]] = []
    for places, tensor in found:
        parts += zip(places, tensor.split([place.rows for place in places]), strict=True)
    shape, dtype = parts[0][0].shape, parts[0][1].dtype
    if sum(part.numel() for _, part in parts) != math.prod(shape):  # before memory is asked for
        raise ValueError(f"tensor {name!r:.80} of shape {shape!r:.80} is not complete")
    whole, filled = torch.empty(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    for place, part in parts:
        if place.shape != shape or part.dtype != dtype or part.ndim != len(shape) or len(place.start) != len(shape):
            raise ValueError(f"the parts of tensor {name!r:.80} are of different ones")
        for target, values in ((whole, part), (filled, True)):
            for dim, (start, size) in enumerate(zip(place.start, part.shape, strict=True)):
                target = target.narrow(dim, start, size)
            target[...] = values
    if not bool(filled.all()):
        raise ValueError(f"the parts of tensor {name!r:.80} overlap, so that others are missing")
    return whole
