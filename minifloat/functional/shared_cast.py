"""One cast for siblings: linears that are given the same input one after the other (q, k, v; gate, up)."""

from __future__ import annotations

import threading
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor


class _Latest(NamedTuple):
    """The operands of one input, and which layers have read them."""

    source: ReferenceType[Tensor]
    version: int
    dtype: torch.dtype
    quantizer: Quantizer
    capturing: bool  # into a CUDA graph: such operands have values in a replay only, others are constants to it
    operands: Quantized
    readers: set[int]


class _Slot:
    """Of one thread: a plain object, which whoever frees the input can empty, in whichever thread that is."""

    def __init__(self) -> None:
        self.latest: _Latest | None = None


class _Local(threading.local):
    def __init__(self) -> None:
        self.slot = _Slot()


_local = _Local()


def find(x: Tensor, dtype: torch.dtype, quantizer: Quantizer, reader: object) -> Quantized | None:
    """The operands that another layer just made of this very ``x``, cast to ``dtype`` first, if they are the same.

    A layer that comes a second time is no sibling but a new call: ``x`` may be a buffer that was filled anew in a way
    that PyTorch does not count.
    """
    if torch.compiler.is_compiling():
        return None
    latest = _local.slot.latest
    if latest is None or latest.source() is not x or x.is_inference() or id(reader) in latest.readers:
        return None
    same = latest.version == x._version and latest.dtype == dtype and latest.quantizer == quantizer
    if not same or latest.capturing != _capturing(x):
        return None
    latest.readers.add(id(reader))
    return latest.operands


def keep(x: Tensor, dtype: torch.dtype, quantizer: Quantizer, operands: Quantized | None, reader: object) -> None:
    """Offers operands of ``x`` to the next layers, until ``x`` is gone or another tensor is quantized.

    Not where a sibling's would differ: each has its own delayed scale and draws its own random bits. A compiled graph
    needs no help: casts of the same tensor are common subexpressions there.
    """
    if torch.compiler.is_compiling() or operands is None or isinstance(x, QuantizedTensor) or x.is_inference():
        return
    if any(fmt.scale_rule == "given" or fmt.rounding == "stochastic" for fmt, _ in quantizer.casts):
        return
    slot = _local.slot
    if slot.latest is not None and slot.latest.operands is operands:
        return  # they were found here

    def forget(dead: ReferenceType[Tensor]) -> None:
        if slot.latest is not None and slot.latest.source is dead:
            slot.latest = None

    slot.latest = _Latest(ref(x, forget), x._version, dtype, quantizer, _capturing(x), operands, {id(reader)})


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
