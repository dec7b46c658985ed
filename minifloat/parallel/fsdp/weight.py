"""Weights whose shards FSDP2 gathers quantized: their casts, the memory of a gather, what is sent for which pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifloat import delayed, recompute
from minifloat.autocast import current
from minifloat.comm.collectives import padded_rows, start_all_gather_rows
from minifloat.comm.group import Group, ShardMap
from minifloat.comm.sharded_cast import Repeat, owned_rows, quantize_shards
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import LinearState
from minifloat.nn.quantized_parameters import weight_scale
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp import pytorch
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor, operand_ops
from minifloat.tensor.rows import QuantizedRows, cut_rows, row_unit


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
        """Tensors that are allocated to gather it."""
        return [self.owner, self.received] if self.copies else [self.owner]

    def of(self, part: Quantized) -> Tensor:
        """This rank's rows."""
        own: Tensor = getattr(part.rowwise if self.dim == ROWWISE else part.columnwise, self.field)
        return own

    def padded(self, own: Tensor) -> Tensor:
        """Returns what this rank sends of its rows ``own``, 1-D, of one size on all ranks."""
        if self.rows.size == 1:
            return own.new_empty(0)
        return padded_rows(own, self.rows.largest).contiguous().view(-1)

    def complete(self, own: Tensor) -> None:
        """Fills ``whole`` from what was received, whose memory is freed then; of one rank from its ``own`` rows."""
        if not self.copies:
            return
        with torch.no_grad(), pytorch.preserved_versions([self.whole]):
            if self.rows.size == 1:
                self.whole.copy_(own)
            else:
                parts = self.received.view(self.rows.size, self.rows.largest, *self.whole.shape[1:])
                torch.cat([part[:count] for part, count in zip(parts, self.rows.rows, strict=True)], out=self.whole)
                pytorch.free_storage(self.received)


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
                    pytorch.free_storage(tensor)

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
        """Lists what is gathered of a parameter for these dims, in the order in which all ranks send it."""
        distinct = (ROWWISE,) if self._symmetric else dims
        return [buffer for dim in distinct for buffer in self._buffers[dim][number]]

    def holds(self, dim: int) -> bool:
        """The operand that serves ``dim`` has its memory."""
        return all(pytorch.is_allocated(buffer.owner) for buffer in self.buffers((dim,), 0))

    def set_constants(self, dims: Collection[int], part: Quantized) -> None:
        """Takes what all ranks have alike from this rank's ``part`` of any parameter."""
        with torch.no_grad(), pytorch.preserved_versions([mine for _, _, mine in self._constants]):
            for dim, name, mine in self._constants:
                if dim in dims or self._symmetric:
                    mine.copy_(getattr(part.rowwise if dim == ROWWISE else part.columnwise, name))

    def gather(self, dims: Collection[int], parts: Sequence[Quantized], group: Group) -> None:
        """Gathers now what FSDP2 did not."""
        pairs = [(buffer, part) for number, part in enumerate(parts) for buffer in self.buffers(dims, number)]
        for buffer, _ in pairs:
            pytorch.alloc_storage(buffer.owner)
        sends, maps = [buffer.of(part) for buffer, part in pairs], [buffer.rows for buffer, _ in pairs]
        wholes = [buffer.whole for buffer, _ in pairs]
        with torch.no_grad(), pytorch.preserved_versions(wholes):
            start_all_gather_rows(sends, maps, group, wholes, overlapped=False).wait()
        self.set_constants(dims, parts[0])


class ShardedWeight:
    """A weight [M, K] of a linear layer, which is one parameter or several below each other that are cast as one.

    Shards in high precision are cast at the start of each outermost forward, together with those of all other weights
    (:func:`cast_shards`). The cast shards are freed after the all-gather, and cast again for backward with the amaxes
    and scales of then, so that a rank does not hold its codes of all weights at once. Shards of a quantized parameter
    are sent as they are. The rows of a block that straddles ranks, in either orientation, are sent by the rank of its
    first row.

    Which orientations a gather sends follows from FSDP2's training state (docs/fsdp.md, Which orientation). A compiled
    layer cannot ask for what is missing, so that all is there. What another call finds missing is gathered then and
    there (:meth:`fetch`): a wrong guess costs a gather, never a wrong number.

    Attributes:
        layer, quantizer: whose weight, and how it is cast.
        delayed: the recipe of the layer's amax history, where its scale is what shards in high precision are cast with.
        parameters: from the first row on. ``group``: the ranks. ``fsdp``: FSDP2's group of parameters.
        is_quantized: the parameter is kept quantized.
        owned: for each parameter the rows that each rank sends: whole blocks, of the rank of their first row.
        is_aligned: these are each rank's own, so that it can cast them again by itself.
        parts: what this rank sends of each parameter; None before a cast, and after the all-gather.
        cast: with what the latest cast may be repeated; None where it may not.
        gathered: the memory of the whole, from the first gather on.
        whole: the gathered weight, if it has several parameters and has been gathered ever; else None.
    """

    gathered: GatheredWeight

    def __init__(
        self,
        layer: LinearState,
        quantizer: Quantizer,
        delayed: DelayedScaling | None,
        params: Mapping[str, Any],
        group: Any,
    ) -> None:
        """``params``: FSDP2's records of the parameters, by name; ``group``: of what is gathered together."""
        self.layer, self.quantizer, self.delayed = layer, quantizer, delayed
        named = enumerate(params.items())
        self.parameters = tuple(
            pytorch.ShardedParameter.hook(param, self, number, name) for number, (name, param) in named
        )
        self.group = self.parameters[0].group
        self.is_quantized = isinstance(self.parameters[0].rows, QuantizedTensor)
        self.owned = [each.shards.whole_units(row_unit(quantizer)) for each in self.parameters]
        self.is_aligned = self.owned == [each.shards for each in self.parameters]
        self.parts: Sequence[Quantized] | None = None
        self.cast: Repeat | None = None
        self.whole: QuantizedTensor | None = None
        group.__class__ = pytorch.ShardedGroup
        self.fsdp: pytorch.ShardedGroup = group
        self._dims = (ROWWISE, COLUMNWISE) if quantizer.columnwise else (ROWWISE,)
        self._pending_gather: tuple[Collection[int], Sequence[Quantized]] | None = None
        self._backward_reads_both = False
        self._fetched_in_forward = False  # not so a compiled layer, which takes what is there

    # ---- this rank's part ----

    def rows_to_cast(self) -> Tensor:
        """This rank's rows [m, K] of the blocks that it owns, of all parameters below each other; a collective."""
        unit = row_unit(self.quantizer)
        rows = [owned_rows(each.rows, unit, each.shards, self.group) for each in self.parameters]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def set_parts(self, cast: Quantized) -> None:
        """Takes what :meth:`rows_to_cast` was cast to."""
        if len(self.parameters) == 1:
            self.parts = [cast]
            return
        self.parts, begin = [], 0
        for owned in self.owned:
            end = begin + owned.rows[self.group.rank]
            self.parts.append(cut_rows(cast, begin, end))
            begin = end

    def parts_for(self, dims: Collection[int]) -> Sequence[Quantized]:
        """Returns what this rank sends of each parameter, with operands for ``dims``."""
        if self._lacks(dims) and (self.cast is None or not self.cast.serves(dims)):
            cast_shards([self])  # the last forward had no grad mode, or there was none
        if self._lacks(dims):
            assert self.cast is not None
            self.set_parts(self.cast.recast(self.rows_to_cast(), dims))
        assert self.parts is not None
        return self.parts

    def _lacks(self, dims: Collection[int]) -> bool:
        if self.parts is None:
            return True
        rowwise, columnwise = self.parts[0]
        return (rowwise is None and ROWWISE in dims) or (columnwise is None and COLUMNWISE in dims)

    def _release(self) -> None:
        """Frees the parts, if they can be cast again; to be called in the stream that waits for the gather."""
        if self.cast is not None and self.parts is not None:
            if self.parts[0].any.codes.is_cuda:
                pytorch.record_stream(tensor for part in self.parts for tensor in operand_ops.buffers(part).values())
            self.parts = None

    # ---- a gather of FSDP2's ----

    def begin_gather(self, number: int) -> list[tuple[Buffer, Tensor]]:
        """Lists what is gathered of a parameter, and this rank's rows of each."""
        if number == 0:
            dims = self._dims_to_gather()
            if self.fsdp.training_state == "FORWARD":
                self._fetched_in_forward = False
            if self.fsdp.training_state == "IDLE":
                self.parts = self.cast = None  # not cast since the last step
            if not hasattr(self, "gathered"):
                self.gathered = GatheredWeight(self.parts_for(self._dims)[0], self.owned)
            self._pending_gather = dims, self.parts_for(dims)
        assert self._pending_gather is not None
        dims, parts = self._pending_gather
        return [(buffer, buffer.of(parts[number])) for buffer in self.gathered.buffers(dims, number)]

    def end_gather(self, number: int) -> None:
        """All of a parameter has been received."""
        if number == len(self.parameters) - 1:
            assert self._pending_gather is not None
            dims, parts = self._pending_gather
            self.gathered.set_constants(dims, parts[0])
            self._pending_gather = None
            self._release()

    def as_parameter(self, number: int, dtype: torch.dtype) -> QuantizedTensor:
        """The gathered parameter, which stands for values of ``dtype``."""
        if number == 0 and len(self.parameters) > 1:
            self.whole = self._as_tensor(self.gathered.operands, dtype)
        return self._as_tensor(self.gathered.pieces[number], dtype)

    def _as_tensor(self, operands: Quantized, dtype: torch.dtype) -> QuantizedTensor:
        tensor = QuantizedTensor.from_operands(operands, self.quantizer, operands.any.shape, dtype)
        tensor.gatherer = self
        return tensor

    def is_gathered(self, columnwise: bool) -> bool:
        """Whether it is unsharded since an earlier microbatch: forward gathers nothing, backward the same once more."""
        dims = self._dims if columnwise else (ROWWISE,)
        return self.fsdp.is_unsharded and self.cast is not None and self.cast.serves(dims)

    def _dims_to_gather(self) -> Collection[int]:
        """The dims that the pass which gathers will contract; see the class."""
        state, in_backward = self.fsdp.training_state, pytorch.in_backward()
        again = self.fsdp.reshard_after_backward
        if state == "PRE_BACKWARD" and again and self._fetched_in_forward and not self._backward_reads_both:
            return self._dims[-1:]
        grad = self.fsdp.grad_enabled
        read_at_once = grad and recompute.hooks_read()  # what forward saves for backward
        gathered_later = state == "FORWARD" and self.fsdp.gathers_for_backward and not in_backward and not read_at_once
        no_backward = self._fetched_in_forward and not grad and not in_backward
        return (ROWWISE,) if gathered_later or no_backward else self._dims

    # ---- a call of the layer ----

    def fetch(self, *dims: int) -> None:
        """Gathers the operands of the unsharded weight that are not there; all ranks call it alike."""
        missing = [dim for dim in dims if not self.gathered.holds(dim)]
        if missing:
            self._backward_reads_both |= self.fsdp.training_state == "PRE_BACKWARD"
            held = [dim for dim in self._dims if dim not in missing and self.gathered.holds(dim)]
            self.gathered.gather(missing, self.parts_for(missing), self.group)
            self._release()
            for parameter in self.parameters:  # so that it is freed with the rest
                parameter.register_storage(self.gathered.buffers([*missing, *held], parameter.number))

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """Fetches for a call of a linear that reads ``quantizer``'s orientations, columnwise if backward will.

        Raises:
            ValueError: the call wants another format.
        """
        self._fetched_in_forward = True
        wanted = self._dims if quantizer.columnwise else (ROWWISE,)
        for dim in wanted:
            if quantizer.format(dim) != self.quantizer.format(dim) and not self.is_quantized:
                raise ValueError(
                    f"{label}: the weight was gathered as {self.quantizer.format(dim).spec}, and the recipe in force "
                    f"wants {quantizer.format(dim).spec}; set the layer's recipe before fully_shard, and leave it"
                )
        in_forward = self.fsdp.training_state == "FORWARD" and not pytorch.in_backward()
        if in_forward and self.fsdp.gathers_for_backward and not recompute.hooks_read():
            wanted = (ROWWISE,)  # backward gathers the rest before it reads it
        self.fetch(*wanted)


# ---- the cast of many weights together ----


@torch.no_grad()
def cast_shards(weights: Sequence[ShardedWeight], columnwise: bool = True) -> None:
    """Gives every weight the parts that this rank sends, bit for bit those of the quantized whole; a collective.

    What one scale spans is reduced in one all-reduce a group. Shards that are quantized are their parts.

    Args:
        columnwise: for the orientation that backward reads, too; its codes only come now where they cannot later.

    Raises:
        ValueError: ranks that gather a weight would cast it with different delayed scales.
    """
    checked: set[tuple[DelayedScaling, Group]] = set()
    together: dict[Group, list[ShardedWeight]] = defaultdict(list)
    for weight in weights:
        weight.parts = weight.cast = None  # its memory may serve the new one
        if weight.delayed is not None:
            _check_scales(weight, weight.delayed, checked)
        if weight.is_quantized:
            weight.parts = [_quantized_part(weight, checked)]
        else:
            together[weight.group].append(weight)
    for group, those in together.items():
        quantizers = [each.quantizer.with_usage(columnwise=each.quantizer.columnwise and columnwise) for each in those]
        dims = [(ROWWISE,) if each.is_aligned and each.fsdp.gathers_for_backward else each._dims for each in those]
        rows = [each.rows_to_cast() for each in those]
        # Of several parameters no block straddles ranks, as if each rank were alone.
        maps = [w.owned[0] if len(w.owned) == 1 else ShardMap((x.shape[0],)) for w, x in zip(those, rows, strict=True)]
        scales = [None if w.delayed is None else weight_scale(w.layer, w.parameters[0].name) for w in those]
        made = quantize_shards(rows, quantizers, maps, group, scales, dims)
        for weight, (operands, repeat) in zip(those, made, strict=True):
            weight.cast = repeat if weight.is_aligned else None
            weight.set_parts(operands)


def _quantized_part(weight: ShardedWeight, checked: set[tuple[DelayedScaling, Group]]) -> Quantized:
    rows = weight.parameters[0].rows
    assert isinstance(rows, QuantizedRows)
    if rows.scale is not None and "forward_scaling" in weight.layer._modules:
        recipe = recipe_in_force(weight.layer)
        if isinstance(recipe, DelayedScaling):
            _check_scales(weight, recipe, checked)
        rows.scale = weight_scale(weight.layer, weight.parameters[0].name)  # a checkpoint may have replaced it
    return rows.part


def _check_scales(weight: ShardedWeight, recipe: DelayedScaling, checked: set[tuple[DelayedScaling, Group]]) -> None:
    """Raises where ranks that gather a weight would cast it with different delayed scales; looked at once a recipe."""
    if weight.group.size > 1 and (recipe, weight.group) not in checked:
        context = current()
        group = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
        delayed.check_same_scale(weight.layer, "the weight is sharded", weight.group, recipe, group)
        checked.add((recipe, weight.group))


def owners(model: nn.Module) -> dict[tuple[nn.Module, str], tuple[LinearState, tuple[str, ...], str]]:
    """Whose weights the parameters below ``model`` are, by the module that holds each and its name there.

    Returns:
        For each the layer, and what that calls the parameters of the matrix, and this one.
    """
    found: dict[tuple[nn.Module, str], tuple[LinearState, tuple[str, ...], str]] = {}
    for layer in [each for each in model.modules() if isinstance(each, LinearState)]:
        for names in layer._matrices:
            for name in names:
                path, _, own = name.rpartition(".")
                found[layer.get_submodule(path), own] = layer, names, name
    return found
