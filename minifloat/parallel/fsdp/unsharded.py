"""The memory of one gathered weight: what FSDP2 receives into, and the operands that are views of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.comm.collectives import as_bytes, start_transfers
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp import pytorch


class Wire(NamedTuple):
    """One tensor of an operand of a parameter that is gathered.

    Args:
        name: ``"codes"``, ``"scale_inv"`` or ``"amax"``.
        rows: how many of its rows each rank has.
        received: 1-D, of every rank as much as the largest one has: where the all-gather goes.
        whole: [sum(rows), ...], the parameter's tensor.
        memory: whose memory ``whole`` is: ``received`` itself, its own, or that of all parameters of the weight.
        joined: what was received is copied, since padding lies between the ranks' rows, or there is one rank alone.
    """

    name: str
    rows: ShardMap
    received: Tensor
    whole: Tensor
    memory: Tensor
    joined: bool

    @staticmethod
    def of(name: str, own: Tensor, rows: ShardMap, memory: Tensor | None = None, first: int = 0) -> Wire:
        """``own``: this rank's part, for its dtype and the sizes of a row; ``memory``: of all, from row ``first``."""
        inner = own.shape[1:]
        size = rows.largest * inner.numel() * rows.size if rows.size > 1 else 0
        joined = rows.size == 1 or any(
            count and rows.first(rank) != rank * rows.largest for rank, count in enumerate(rows.rows)
        )
        if memory is not None:
            whole = memory[first : first + rows.total]
            joined = joined or size != whole.numel()  # padding would end up in the rows of the next parameter
            return Wire(name, rows, own.new_empty(size) if joined else whole.view(-1), whole, memory, joined)
        received = own.new_empty(size)
        whole = own.new_empty(rows.total, *inner) if joined else received.view(-1, *inner)[: rows.total]
        return Wire(name, rows, received, whole, whole if joined else received, joined)

    def sent(self, part: Operand) -> Tensor:
        """What this rank sends of its part, 1-D."""
        own: Tensor = getattr(part, self.name)
        if self.rows.size == 1:
            return own.new_empty(0)
        if own.shape[0] == self.rows.largest:
            return own.contiguous().view(-1)
        padded = own.new_empty(self.rows.largest, *own.shape[1:])
        padded[: own.shape[0]] = own
        return padded.view(-1)

    def put_together(self, part: Operand) -> None:
        """Makes ``whole`` of what was received, whose memory is free then."""
        if self.rows.size == 1:
            self.whole.copy_(getattr(part, self.name))
        elif self.joined:
            each = self.received.view(self.rows.size, self.rows.largest, *self.whole.shape[1:])
            torch.cat([own[:count] for own, count in zip(each, self.rows.rows, strict=True)], out=self.whole)
            pytorch.free(self.received)


class _Half(NamedTuple):
    """One operand of the whole weight.

    Args:
        operand: of the weight.
        pieces: of each of its parameters; views.
        wires: of each parameter, the tensors that travel.
        constant: the names of those that all ranks have alike.
    """

    operand: Operand
    pieces: tuple[Operand, ...]
    wires: tuple[tuple[Wire, ...], ...]
    constant: tuple[str, ...]

    @staticmethod
    def of(parts: Sequence[Operand], shards: Sequence[ShardMap]) -> _Half:
        """``parts``: this rank's, one a parameter; ``shards``: the rows of each parameter."""
        part, cols = parts[0], parts[0].shape[1]
        maps = [dict(each.gathered(part.format, part.dim)) for each in shards]
        whole: dict[str, Tensor] = {}
        wires: list[list[Wire]] = [[] for _ in shards]
        for name in maps[0]:
            own, rows = getattr(part, name), [each[name] for each in maps]
            ends = list(accumulate(each.total for each in rows))
            memory = own.new_empty(ends[-1], *own.shape[1:]) if len(rows) > 1 else None
            for mine, each, first in zip(wires, rows, [0, *ends], strict=False):
                mine.append(Wire.of(name, own, each, memory, first))
            whole[name] = wires[0][-1].whole if memory is None else memory
        alike = {name: getattr(part, name) for name in ("scale_inv", "amax") if name not in whole}
        constants = {name: own.clone() for name, own in alike.items() if own is not None}

        def operand(tensors: dict[str, Tensor], rows: int) -> Operand:
            tensors = tensors | constants
            held = tensors["codes"], tensors.get("scale_inv"), tensors.get("amax")
            return Operand(*held, part.format, part.dim, (rows, cols), part.dtype)

        pieces = [
            operand({wire.name: wire.whole for wire in mine}, each.total)
            for mine, each in zip(wires, shards, strict=True)
        ]
        of_all = operand(whole, sum(each.total for each in shards))
        return _Half(of_all, tuple(pieces), tuple(tuple(mine) for mine in wires), tuple(constants))

    def fill(self, number: int, part: Operand) -> None:
        for wire in self.wires[number]:
            wire.put_together(part)
        for name in self.constant if number == 0 else ():
            getattr(self.operand, name).copy_(getattr(part, name))


class Unsharded:
    """Operands of the whole weight [M, K] whose memory comes and goes, one orientation at a time.

    The tensors are made once. What a forward saved for backward is filled again, in place, before backward reads it,
    and its version stays, as with the parameters that FSDP2 gathers itself. The one scale of a tensor, which all ranks
    have alike, does not travel and keeps its memory.

    Args:
        parts: this rank's, of each parameter that the weight is made of, with all operands that will ever be gathered.
        shards: for each parameter the rows that each rank has.

    Attributes:
        operands: of the weight. ``pieces``: of each parameter, the same memory.
    """

    def __init__(self, parts: Sequence[Quantized], shards: Sequence[ShardMap]) -> None:
        with torch.inference_mode(False), torch.no_grad():  # or training could not save what is made here
            self._halves = {ROWWISE: _Half.of([_of(part, ROWWISE) for part in parts], shards)}
            if parts[0].columnwise is parts[0].rowwise:
                self._halves[COLUMNWISE] = self._halves[ROWWISE]
            elif parts[0].columnwise is not None:
                self._halves[COLUMNWISE] = _Half.of([_of(part, COLUMNWISE) for part in parts], shards)
        both = [self._halves.get(dim) for dim in (ROWWISE, COLUMNWISE)]
        self.operands = Quantized(*[half and half.operand for half in both])
        self.pieces = [Quantized(*[half and half.pieces[i] for half in both]) for i in range(len(parts))]
        for tensor in self._memory(self._wires(self._halves)):
            pytorch.free(tensor)

    def _distinct(self, dims: Iterable[int]) -> list[tuple[int, _Half]]:
        """The operands that serve ``dims``, each once, with the place that they have in a part."""
        serving = {ROWWISE if self._halves[dim] is self._halves[ROWWISE] else dim for dim in dims}
        return [(dim, self._halves[dim]) for dim in sorted(serving)]

    def _wires(self, dims: Iterable[int], number: int | None = None) -> list[Wire]:
        """What is gathered for these dims, of one parameter or of all, in the order in which all ranks send it."""
        numbers = range(len(self.pieces)) if number is None else (number,)
        return [wire for i in numbers for _, half in self._distinct(dims) for wire in half.wires[i]]

    @staticmethod
    def _memory(wires: Iterable[Wire]) -> list[Tensor]:
        return [
            tensor for wire in wires for tensor in ((wire.received, wire.memory) if wire.joined else (wire.memory,))
        ]

    def received(self, dims: Iterable[int], number: int) -> list[Tensor]:
        """What the gather of a parameter for these dims fills."""
        return [wire.received for wire in self._wires(dims, number)]

    def memory(self, dims: Iterable[int], number: int) -> list[Tensor]:
        """What is allocated for it, which may be for other parameters too."""
        return self._memory(self._wires(dims, number))

    def wholes(self, dims: Iterable[int], number: int) -> list[Tensor]:
        """The memory of what is made of what was received."""
        return [wire.memory for wire in self._wires(dims, number)]

    def holds(self, dim: int) -> bool:
        """The operand that serves ``dim`` is there."""
        return all(pytorch.is_allocated(wire.memory) for wire in self._wires([dim]))

    def sent(self, dims: Iterable[int], number: int, part: Quantized) -> list[Tensor]:
        """What this rank sends of a parameter, 1-D each: one tensor a wire."""
        return [wire.sent(_of(part, dim)) for dim, half in self._distinct(dims) for wire in half.wires[number]]

    def fill(self, dims: Iterable[int], number: int, part: Quantized) -> None:
        """Makes operands of what was received, and of what all ranks have alike, as in this rank's ``part``."""
        halves = self._distinct(dims)
        written = [t for _, half in halves for t in half.operand[:3] if t is not None]
        with torch.no_grad(), pytorch.versions_kept(written):
            for dim, half in halves:
                half.fill(number, _of(part, dim))

    def share(self, dims: Iterable[int], number: int, rank: int, size: int) -> list[Tensor]:
        """A copy of one of ``size`` equal parts of what was gathered of a parameter, 1-D each, 0 beyond its end."""
        wholes = [wire.whole.reshape(-1) for wire in self._wires(dims, number)]
        counts = [-(-whole.numel() // size) for whole in wholes]
        parts = [whole[rank * count : (rank + 1) * count] for whole, count in zip(wholes, counts, strict=True)]
        return [
            torch.cat([part, part.new_zeros(count - part.numel())]) for part, count in zip(parts, counts, strict=True)
        ]

    def fill_again(self, dims: Iterable[int], number: int, received: Sequence[Tensor]) -> None:
        """Makes operands of all parts that :meth:`share` has given, one after the other."""
        written = [t for _, half in self._distinct(dims) for t in half.operand[:3] if t is not None]
        with torch.no_grad(), pytorch.versions_kept(written):
            for wire, parts in zip(self._wires(dims, number), received, strict=True):
                wire.whole.copy_(parts.reshape(-1)[: wire.whole.numel()].view_as(wire.whole))
                pytorch.free(parts)

    def gather(self, dims: Iterable[int], parts: Sequence[Quantized], group: Group) -> None:
        """Gathers now what FSDP2 did not."""
        dims = list(dims)
        wires = self._wires(dims)
        for tensor in self._memory(wires):
            pytorch.allocate(tensor)
        if group.size > 1:
            sent = [as_bytes(own) for i, part in enumerate(parts) for own in self.sent(dims, i, part)]
            received = [wire.received for wire in wires]
            with torch.no_grad(), pytorch.versions_kept(received):
                start_transfers(sent, [as_bytes(each) for each in received], group).wait()
        for i, part in enumerate(parts):
            self.fill(dims, i, part)


def _of(part: Quantized, dim: int) -> Operand:
    operand = part.rowwise if dim == ROWWISE else part.columnwise
    assert operand is not None
    return operand
