"""One cast for siblings: linears that are given the same input one after the other (q, k, v; gate, up)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import ROWWISE
from minifloat.functional.gathered import Gathered
from minifloat.operand import Quantized
from minifloat.ops import new
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor

Ranks = tuple[Group, ShardMap | None]
"""Who gathers an input, and the rows that each has of it."""

Cast = tuple[torch.dtype, Quantizer, tuple[int, ...], Ranks | None]
"""How an input is cast: to which dtype first, the quantizer, the dims along which it gives values
(``Spec.passing``), and who gathers it, if ranks do: then the operands are this rank's part."""


class _Latest(NamedTuple):
    """The operands of one input, and which layers have read them."""

    source: ReferenceType[Tensor]
    version: int
    cast: Cast
    capturing: bool  # into a CUDA graph: such operands have values in a replay only, others are constants to it
    operands: Quantized
    readers: list[nn.Module]  # not their ids, which other modules have later, on some ranks and not on others


class _Slot:
    """Of one thread: a plain object, which whoever frees the input can empty, in whichever thread that is."""

    def __init__(self) -> None:
        self.latest: _Latest | None = None
        self.scopes = 0
        self.whole: tuple[Quantized, Quantized] | None = None  # a part and what was gathered of it, inside of a scope

    def forget(self, source: ReferenceType[Tensor]) -> None:
        """Called when the input is freed."""
        if self.latest is not None and self.latest.source is source:
            self.latest = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()


_local = _Local()


@contextmanager
def gathered_once() -> Iterator[None]:
    """Column-parallel linears that are given one X inside, one after the other, gather it once.

        with gathered_once():
            q, k, v = self.query(x), self.key(x), self.value(x)

    Under sequence parallelism a linear frees what it gathers right after its product, since nobody knows whether
    another one will read it; here it stays until another tensor is gathered or the context ends. Only what
    siblings would gather alike is shared: not under delayed scaling, which has a scale for each layer, not in high
    precision, not in compiled code. In backward each gathers X again.
    """
    if torch.compiler.is_compiling():
        yield
        return
    slot = _local.slot
    slot.scopes += 1
    try:
        yield
    finally:
        slot.scopes -= 1
        slot.whole = None


def gathered(part: Quantized) -> Quantized | None:
    """What a sibling has just gathered of this very ``part``, rowwise."""
    whole = None if torch.compiler.is_compiling() else _local.slot.whole
    return whole[1] if whole is not None and whole[0] is part else None


def offer(part: Quantized, whole: Quantized | Gathered) -> Quantized | Gathered:
    """What fprop reads of ``whole``, gathered of ``part``; inside of :func:`gathered_once` it stays for siblings."""
    if torch.compiler.is_compiling() or type(whole) is not Gathered or not _local.slot.scopes:
        return whole
    slot = _local.slot
    slot.whole = None  # the one before is freed before this one arrives
    slot.whole = part, Quantized(whole.along(ROWWISE), None)
    return slot.whole[1]


def find(x: Tensor, cast: Cast, reader: nn.Module) -> Quantized | None:
    """The operands that another layer just made of this very ``x``, if they are the same.

    All ranks find the same, since they run the same. For eager code alone: in a compiled graph casts of one tensor are
    common subexpressions.

    A layer that comes a second time is no sibling but a new call: ``x`` may be a buffer that was filled anew in a way
    that PyTorch does not count.
    """
    latest = _local.slot.latest
    if latest is None or latest.source() is not x or x.is_inference() or reader in latest.readers:
        return None
    if latest.version != x._version or latest.cast != cast or latest.capturing != _capturing(x):
        return None
    latest.readers.append(reader)
    return latest.operands


def keep(x: Tensor, cast: Cast, operands: Quantized | None, reader: nn.Module) -> None:
    """Offers operands of ``x`` to the next layers, until ``x`` is freed or another tensor is quantized.

    ``cast``: with a quantizer whose casts siblings would repeat bit for bit (:func:`is_shared`). Eager code alone, as
    :func:`find`.
    """
    slot = _local.slot
    if operands is None or isinstance(x, QuantizedTensor) or x.is_inference():
        return
    if slot.latest is None or slot.latest.operands is not operands:  # else they were found here
        capturing = x.is_cuda and _capturing(x)
        slot.latest = new(_Latest, (ref(x, slot.forget), x._version, cast, capturing, operands, [reader]))


def is_shared(quantizer: Quantizer) -> bool:
    """Siblings would make the same operands: they are quantized, and neither by a layer's own scale nor at random."""
    formats = [fmt for fmt, _ in quantizer.casts]
    return quantizer.quantized and all(f.scale_rule != "given" and f.rounding != "stochastic" for f in formats)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
