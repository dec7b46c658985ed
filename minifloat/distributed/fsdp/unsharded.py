"""The memory of one gathered weight: what FSDP2 receives into, and the operands that are views of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.distributed.collectives import as_bytes, start_transfers
from minifloat.distributed.fsdp import pytorch
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized


class Wire(NamedTuple):
    """One tensor of an operand that is gathered.

    Args:
        name: ``"codes"``, ``"scale_inv"`` or ``"amax"``.
        rows: how many of its rows each rank has.
        received: 1-D, of every rank as much as the largest one has: where the all-gather goes.
        whole: [sum(rows), ...], the operand's tensor: a view of ``received`` where only the end of that is padding.
        joined: ``whole`` has memory of its own, since padding lies between the ranks' rows, or there is one rank alone.
    """

    name: str
    rows: ShardMap
    received: Tensor
    whole: Tensor
    joined: bool

    @staticmethod
    def of(name: str, own: Tensor, rows: ShardMap) -> Wire:
        """With new memory; ``own``: this rank's part, for its dtype and the sizes of a row."""
        inner = own.shape[1:]
        count = rows.largest * inner.numel() if rows.size > 1 else 0
        received = own.new_empty(count * rows.size)
        joined = rows.size == 1 or any(
            count and rows.first(rank) != rank * rows.largest for rank, count in enumerate(rows.rows)
        )
        whole = own.new_empty(rows.total, *inner) if joined else received.view(-1, *inner)[: rows.total]
        return Wire(name, rows, received, whole, joined)

    @property
    def memory(self) -> list[Tensor]:
        """What is allocated and freed."""
        return [self.received, self.whole] if self.joined else [self.received]

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
        """Makes ``whole`` of what was received."""
        if self.rows.size == 1:
            self.whole.copy_(getattr(part, self.name))
        elif self.joined:
            each = self.received.view(self.rows.size, self.rows.largest, *self.whole.shape[1:])
            torch.cat([own[:count] for own, count in zip(each, self.rows.rows, strict=True)], out=self.whole)


def _gathered(operand: Operand, shards: ShardMap) -> dict[str, ShardMap]:
    """The tensors of an operand that travel, and the rows that each rank has of them."""
    fmt, dim = operand.format, operand.dim
    rows = {"codes": shards.codes(fmt, dim)}
    if fmt.quantized and fmt.block:
        rows["scale_inv"] = shards.scales(fmt, dim)
    if fmt.amax_per_row and dim == ROWWISE:
        rows["amax"] = shards
    return rows


class _Half(NamedTuple):
    """One operand of the whole, the tensors of it that travel, and the names of those that all ranks have alike."""

    operand: Operand
    wires: tuple[Wire, ...]
    constant: tuple[str, ...]

    @staticmethod
    def of(part: Operand, shards: ShardMap) -> _Half:
        wires = tuple(Wire.of(name, getattr(part, name), rows) for name, rows in _gathered(part, shards).items())
        made = {wire.name: wire.whole for wire in wires}
        alike = {name: getattr(part, name) for name in ("scale_inv", "amax") if name not in made}
        made |= {name: own.clone() for name, own in alike.items() if own is not None}
        constant = tuple(name for name, own in alike.items() if own is not None)
        tensors = made["codes"], made.get("scale_inv"), made.get("amax")
        whole = Operand(*tensors, part.format, part.dim, (shards.total, part.shape[1]), part.dtype)
        return _Half(whole, wires, constant)

    def fill(self, part: Operand) -> None:
        for wire in self.wires:
            wire.put_together(part)
        for name in self.constant:
            getattr(self.operand, name).copy_(getattr(part, name))


class Unsharded:
    """Operands of the whole weight [M, K] whose memory comes and goes, one orientation at a time.

    The tensors are made once. What a forward saved for backward is filled again, in place, before backward reads it,
    and its version stays, as with the parameters that FSDP2 gathers itself. The one scale of a tensor, which all ranks
    have alike, does not travel and keeps its memory.

    Args:
        part: this rank's, with all operands that will ever be gathered.
        shards: the rows of the weight that each rank has.
    """

    def __init__(self, part: Quantized, shards: ShardMap) -> None:
        assert part.rowwise is not None
        with torch.inference_mode(False), torch.no_grad():  # or training could not save what is made here
            self._halves = {ROWWISE: _Half.of(part.rowwise, shards)}
            if part.columnwise is part.rowwise:
                self._halves[COLUMNWISE] = self._halves[ROWWISE]
            elif part.columnwise is not None:
                self._halves[COLUMNWISE] = _Half.of(part.columnwise, shards)
        both = [self._halves.get(dim) for dim in (ROWWISE, COLUMNWISE)]
        self.operands = Quantized(*[half and half.operand for half in both])
        for tensor in self.memory(self._halves):
            pytorch.free(tensor)

    def _distinct(self, dims: Iterable[int]) -> list[tuple[int, _Half]]:
        """The operands that serve ``dims``, each once, with the place that they have in a part."""
        serving = {ROWWISE if self._halves[dim] is self._halves[ROWWISE] else dim for dim in dims}
        return [(dim, self._halves[dim]) for dim in sorted(serving)]

    def wires(self, dims: Iterable[int]) -> list[Wire]:
        """What is gathered for these dims, in the order in which all ranks send it."""
        return [wire for _, half in self._distinct(dims) for wire in half.wires]

    def memory(self, dims: Iterable[int]) -> list[Tensor]:
        """What is allocated for these dims."""
        return [tensor for wire in self.wires(dims) for tensor in wire.memory]

    def holds(self, dim: int) -> bool:
        """The operand that serves ``dim`` is there."""
        return all(pytorch.is_allocated(tensor) for tensor in self.memory([dim]))

    def sent(self, dims: Iterable[int], part: Quantized) -> list[Tensor]:
        """What this rank sends, 1-D each: one tensor a wire."""
        return [wire.sent(_of(part, dim)) for dim, half in self._distinct(dims) for wire in half.wires]

    def fill(self, dims: Iterable[int], part: Quantized) -> None:
        """Makes operands of what was received, and of what all ranks have alike, as in this rank's ``part``."""
        halves = self._distinct(dims)
        written = [t for _, half in halves for t in half.operand[:3] if t is not None]
        with torch.no_grad(), pytorch.versions_kept(written):
            for dim, half in halves:
                half.fill(_of(part, dim))

    def gather(self, dims: Iterable[int], part: Quantized, group: Group) -> None:
        """Gathers now what FSDP2 did not."""
        dims = list(dims)
        wires, memory = self.wires(dims), self.memory(dims)
        for tensor in memory:
            pytorch.allocate(tensor)
        if group.size > 1:
            received = [as_bytes(wire.received) for wire in wires]
            with torch.no_grad(), pytorch.versions_kept(memory):
                start_transfers([as_bytes(own) for own in self.sent(dims, part)], received, group).wait()
        self.fill(dims, part)


def _of(part: Quantized, dim: int) -> Operand:
    operand = part.rowwise if dim == ROWWISE else part.columnwise
    assert operand is not None
    return operand
