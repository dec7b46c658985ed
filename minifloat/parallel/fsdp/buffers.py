"""The memory of a gathered weight: what all-gathers receive into, and the operands that are views of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.comm.collectives import padded_rows, start_all_gather_rows
from minifloat.comm.group import Group, ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp.pytorch import alloc_storage, free_storage, is_allocated, preserved_versions


class Buffer(NamedTuple):
    """One tensor of a parameter that is gathered.

    Args:
        dim, field: the operand that it is of, and its name there.
        rows: how many of its rows each rank has.
        received: 1-D, as much of each rank as the largest one has: where an all-gather of FSDP2's goes.
        whole: [sum(rows), ...].
        owner: the tensor whose memory ``whole`` is a part of.
        copies: what is received is copied to ``whole``; else it is the same memory.
    """

    dim: int
    field: str
    rows: ShardMap
    received: Tensor
    whole: Tensor
    owner: Tensor
    copies: bool

    @property
    def memory(self) -> list[Tensor]:
        """What is allocated to gather it."""
        return [self.owner, self.received] if self.copies else [self.owner]

    def of(self, part: Quantized) -> Tensor:
        """This rank's rows."""
        own: Tensor = getattr(part.rowwise if self.dim == ROWWISE else part.columnwise, self.field)
        return own

    def padded(self, own: Tensor) -> Tensor:
        """What this rank sends of its rows ``own``, 1-D, of one size on all ranks."""
        if self.rows.size == 1:
            return own.new_empty(0)
        return padded_rows(own, self.rows.largest).contiguous().view(-1)

    def complete(self, own: Tensor) -> None:
        """Fills ``whole`` from what was received, whose memory is freed then; of one rank from its ``own`` rows."""
        if not self.copies:
            return
        with torch.no_grad(), preserved_versions([self.whole]):
            if self.rows.size == 1:
                self.whole.copy_(own)
            else:
                parts = self.received.view(self.rows.size, self.rows.largest, *self.whole.shape[1:])
                torch.cat([part[:count] for part, count in zip(parts, self.rows.rows, strict=True)], out=self.whole)
                free_storage(self.received)

    def share(self, rank: int, size: int) -> tuple[Buffer, Tensor]:
        """What gathers ``whole`` from ``size`` equal parts, and a copy of one of them."""
        flat = self.whole.view(-1)
        parts = ShardMap.chunks(flat.numel(), size)
        own = flat[parts.first(rank) : parts.end(rank)].clone()
        received = own.new_empty(size * parts.largest)
        return self._replace(rows=parts, received=received, whole=flat, copies=True), own


def _buffers(dim: int, field: str, maps: Sequence[ShardMap], like: Tensor) -> tuple[Tensor, list[Buffer]]:
    """A tensor of the whole weight, and what gathers the rows of each of its parameters, which ``maps`` says."""
    firsts = [0, *accumulate(rows.total for rows in maps)]
    ends = [first + rows.size * rows.largest for first, rows in zip(firsts, maps, strict=False)]
    owner = like.new_empty(max(firsts[-1], ends[-1]), *like.shape[1:])
    buffers = []
    for rows, first, following, end in zip(maps, firsts, firsts[1:], ends, strict=False):
        # Padding comes after all rows of the parameter, and does not overwrite those of the next one.
        adjoining = all(rows.first(rank) == rank * rows.largest for rank, count in enumerate(rows.rows) if count)
        in_place = rows.size > 1 and adjoining and (end == following or rows is maps[-1])
        size = (end - first) * like.shape[1:].numel() if rows.size > 1 else 0
        received = owner[first:end].view(-1) if in_place else like.new_empty(size)
        buffers.append(Buffer(dim, field, rows, received, owner[first:following], owner, not in_place))
    return owner[: firsts[-1]], buffers


class GatheredWeight:
    """Operands of the whole weight [M, K] whose memory is allocated and freed, one orientation at a time.

    The tensors are made once. What a forward saved for backward is filled again, in place, before backward reads it,
    and its version stays, as with the parameters that FSDP2 gathers itself. The one scale of a tensor, which all ranks
    have alike, is not gathered and keeps its memory.

    Attributes:
        operands: of the weight. ``pieces``: of each parameter, the same memory.
    """

    def __init__(self, part: Quantized, shards: Sequence[ShardMap]) -> None:
        """``part``: this rank's of one parameter, in all orientations that will ever be gathered.

        ``shards``: for each parameter the rows that each rank sends.
        """
        self._buffers: dict[int, list[list[Buffer]]] = {}  # by dim of the operand, of each parameter
        self._constants: list[tuple[int, str, Tensor]] = []  # what is not gathered, by dim and field
        operands: dict[int, list[Operand]] = {}  # of the weight, then of its parameters
        with torch.inference_mode(False), torch.no_grad():  # or training could not save what is made here
            for dim, own in ((ROWWISE, part.rowwise), (COLUMNWISE, part.columnwise)):
                if own is not None:
                    shared = dim == COLUMNWISE and own is part.rowwise
                    operands[dim] = operands[ROWWISE] if shared else self._allocate(dim, own, shards)
        self._symmetric = part.columnwise is part.rowwise
        columnwise: Sequence[Operand | None] = operands.get(COLUMNWISE) or [None] * (len(shards) + 1)
        self.operands, *self.pieces = map(Quantized, operands[ROWWISE], columnwise)
        for number in range(len(shards)):
            for buffer in self.buffers(tuple(operands), number):
                for tensor in buffer.memory:
                    free_storage(tensor)

    def _allocate(self, dim: int, own: Operand, shards: Sequence[ShardMap]) -> list[Operand]:
        """The operand of the weight and those of its parameters, of which ``own`` is this rank's part of one."""
        constants = {"scale_inv": own.scale_inv, "amax": own.amax}
        wholes: list[dict[str, Any]] = [{} for _ in range(len(shards) + 1)]
        self._buffers[dim] = [[] for _ in shards]
        for fields in zip(*[rows.gathered(own.format, own.dim) for rows in shards], strict=True):
            name = fields[0][0]
            constants.pop(name, None)
            wholes[0][name], buffers = _buffers(dim, name, [rows for _, rows in fields], getattr(own, name))
            for i, buffer in enumerate(buffers):
                self._buffers[dim][i].append(buffer)
                wholes[i + 1][name] = buffer.whole
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in constants.items() if tensor is not None}
        self._constants += [(dim, name, tensor) for name, tensor in copies.items()]
        counts = [sum(each.total for each in shards), *[each.total for each in shards]]
        return [
            own._replace(shape=(rows, own.shape[1]), **copies, **tensors)
            for rows, tensors in zip(counts, wholes, strict=True)
        ]

    def buffers(self, dims: Collection[int], number: int) -> list[Buffer]:
        """What is gathered of a parameter for these dims, in the order in which all ranks send it."""
        distinct = (ROWWISE,) if self._symmetric else dims
        return [buffer for dim in distinct for buffer in self._buffers[dim][number]]

    def holds(self, dim: int) -> bool:
        """The operand that serves ``dim`` has its memory."""
        return all(is_allocated(buffer.owner) for buffer in self.buffers((dim,), 0))

    def set_constants(self, dims: Collection[int], part: Quantized) -> None:
        """Takes what all ranks have alike from this rank's ``part`` of any parameter."""
        with torch.no_grad(), preserved_versions([mine for _, _, mine in self._constants]):
            for dim, name, mine in self._constants:
                if dim in dims or self._symmetric:
                    mine.copy_(getattr(part.rowwise if dim == ROWWISE else part.columnwise, name))

    def gather(self, dims: Collection[int], parts: Sequence[Quantized], group: Group) -> None:
        """Gathers now what FSDP2 did not."""
        pairs = [(buffer, part) for number, part in enumerate(parts) for buffer in self.buffers(dims, number)]
        for buffer, _ in pairs:
            alloc_storage(buffer.owner)
        sends, maps = [buffer.of(part) for buffer, part in pairs], [buffer.rows for buffer, _ in pairs]
        wholes = [buffer.whole for buffer, _ in pairs]
        with torch.no_grad(), preserved_versions(wholes):
            start_all_gather_rows(sends, maps, group, wholes, overlapped=False).wait()
        self.set_constants(dims, parts[0])
