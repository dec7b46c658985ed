"""Weights whose shards FSDP2 gathers quantized: their casts, the memory of a gather, what is sent for which pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minifloat import delayed, recompute
from minifloat.autocast import current
from minifloat.comm.collectives import padded_rows, start_all_gather_rows
from minifloat.comm.group import Group, ShardMap
from minifloat.comm.sharded_cast import owned_rows
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.etp.rows import Cast, ShardedRows, Sharding, cast_together
from minifloat.nn.expert_parameters import ExpertParameters
from minifloat.nn.linear_call import recipe_in_force
from minifloat.nn.linear_state import LinearState
from minifloat.nn.quantized_parameters import weight_scale
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp import hooks
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling, Recipe
from minifloat.tensor import QuantizedTensor, operand_ops
from minifloat.tensor.rows import QuantizedRows, cut_rows, row_unit


class Buffer(NamedTuple):
    """One tensor of a parameter that is gathered.

    Args:
        dim, field: the operand that it is of, and its name there.
        rows: how many of its rows each rank has.
        received: 1-D, as much of each rank as the largest one has: where an all-gather of FSDP2's goes.
        full: [sum(rows), ...].
        owner: the tensor whose memory ``full`` is a part of.
        copies: what is received is copied to ``full``; else it is the same memory.
    """

    dim: int
    field: str
    rows: ShardMap
    received: Tensor
    full: Tensor
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

    def sent(self, part: Quantized) -> Tensor:
        """Returns what this rank sends of its rows, 1-D, of one size on all ranks."""
        own = self.of(part)
        if self.rows.size == 1:
            return own.new_empty(0)
        return padded_rows(own, self.rows.largest).contiguous().view(-1)

    def complete(self, part: Quantized) -> None:
        """Fills ``full`` from what was received, whose memory is freed then; of one rank from its own rows."""
        if not self.copies:
            return
        with torch.no_grad(), hooks.preserved_versions([self.full]):
            if self.rows.size == 1:
                self.full.copy_(self.of(part))
            else:
                parts = self.received.view(self.rows.size, self.rows.largest, *self.full.shape[1:])
                torch.cat([part[:count] for part, count in zip(parts, self.rows.rows, strict=True)], out=self.full)
                hooks.free_storage(self.received)


def _buffers(dim: int, field: str, maps: Sequence[ShardMap], like: Tensor) -> tuple[Tensor, list[Buffer]]:
    """Makes a tensor of the full weight, and what gathers the rows of each of its parameters, which ``maps`` says."""
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


def _gathered_fields(own: Operand, rows: ShardMap) -> Sequence[tuple[str, ShardMap]]:
    """The fields of an operand that ranks gather, and how much each has: rows, or of stacked matrices all of some."""
    if own.codes.dim() == 2:
        return rows.gathered(own.format, own.dim)
    return [(name, rows) for name in operand_ops.BUFFERS if getattr(own, name) is not None]


class GatheredWeight:
    """Operands of the full weight [M, K] whose memory is allocated and freed, one orientation at a time.

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
                    hooks.free_storage(tensor)

    def _allocate(self, dim: int, own: Operand, shards: Sequence[ShardMap]) -> list[Operand]:
        """Makes the operand of the weight and those of its parameters; ``own``: this rank's part of one of them."""
        constants = {"scale_inv": own.scale_inv, "amax": own.amax}
        full: list[dict[str, Any]] = [{} for _ in range(len(shards) + 1)]
        self._buffers[dim] = [[] for _ in shards]
        for fields in zip(*[_gathered_fields(own, rows) for rows in shards], strict=True):
            name = fields[0][0]
            constants.pop(name, None)
            full[0][name], buffers = _buffers(dim, name, [rows for _, rows in fields], getattr(own, name))
            for i, buffer in enumerate(buffers):
                self._buffers[dim][i].append(buffer)
                full[i + 1][name] = buffer.full
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in constants.items() if tensor is not None}
        self._constants += [(dim, name, tensor) for name, tensor in copies.items()]
        counts = [sum(each.total for each in shards), *[each.total for each in shards]]
        return [
            own._replace(shape=(rows, own.shape[1]), **copies, **tensors)
            for rows, tensors in zip(counts, full, strict=True)
        ]

    def buffers(self, dims: Collection[int], number: int) -> list[Buffer]:
        """Lists what is gathered of a parameter for these dims, in the order in which all ranks send it."""
        distinct = (ROWWISE,) if self._symmetric else dims
        return [buffer for dim in distinct for buffer in self._buffers[dim][number]]

    def holds(self, dim: int) -> bool:
        """Whether the operand that serves ``dim`` has its memory, or needs none."""
        return all(b.owner.numel() == 0 or b.owner.untyped_storage().size() > 0 for b in self.buffers((dim,), 0))

    def set_constants(self, dims: Collection[int], part: Quantized) -> None:
        """Takes what all ranks have alike from this rank's ``part`` of any parameter."""
        with torch.no_grad(), hooks.preserved_versions([mine for _, _, mine in self._constants]):
            for dim, name, mine in self._constants:
                if dim in dims or self._symmetric:
                    mine.copy_(getattr(part.rowwise if dim == ROWWISE else part.columnwise, name))

    def gather(self, dims: Collection[int], parts: Sequence[Quantized], group: Group) -> None:
        """Gathers now what FSDP2 did not."""
        pairs = [(buffer, part) for number, part in enumerate(parts) for buffer in self.buffers(dims, number)]
        for buffer, _ in pairs:
            hooks.alloc_storage(buffer.owner)
        sends, maps = [buffer.of(part) for buffer, part in pairs], [buffer.rows for buffer, _ in pairs]
        full = [buffer.full for buffer, _ in pairs]
        with torch.no_grad(), hooks.preserved_versions(full):
            start_all_gather_rows(sends, maps, group, full, overlapped=False).wait()
        self.set_constants(dims, parts[0])


class ShardedWeight(ShardedRows):
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
        quantizer: how it is cast.
        delayed: the recipe of the layer's amax history, where its scale is what shards in high precision are cast with.
        params: its parameters, from the first row on. ``group``: the ranks. ``fsdp``: FSDP2's group of parameters.
        owned: for each parameter the rows that each rank sends: whole blocks, of the rank of their first row.
        sharding: of all of them together; where they are each rank's own, it can cast them again by itself.
        cast: what the rows were cast to, its parts until the all-gather if they can be cast again.
        gathered: the memory of the full weight, from the first gather on.
        full: the gathered weight, if it has several parameters and has been gathered ever; else None.
    """

    gathered: GatheredWeight

    def __init__(
        self, layer: LinearState, quantizer: Quantizer, recipe: DelayedScaling | None, params: dict[str, Any], fsdp: Any
    ) -> None:
        """``params``: FSDP2's records of the parameters, by name; ``fsdp``: of what is gathered together."""
        self.layer, self.quantizer, self.delayed = layer, quantizer, recipe
        named = enumerate(params.items())
        self.params = tuple(hooks.ShardedParameter.hook(param, self, number, name) for number, (name, param) in named)
        self.group = self.params[0].group
        self.owned = [each.shards.whole_units(row_unit(quantizer)) for each in self.params]
        # Of several parameters no block straddles ranks, as if each rank were alone.
        several = ShardMap((sum([each.rows[self.group.rank] for each in self.owned]),))
        own = self.owned == [each.shards for each in self.params]
        self.sharding = Sharding(self.group, several if len(params) > 1 else self.owned[0], "mean", recasts=own)
        self.cast: Cast | None = None
        self.full: QuantizedTensor | None = None
        fsdp.__class__ = hooks.ShardedGroup
        self.fsdp: hooks.ShardedGroup = fsdp
        self._dims = (ROWWISE, COLUMNWISE) if quantizer.columnwise else (ROWWISE,)
        self._pending_gather: tuple[Collection[int], Sequence[Quantized]] | None = None
        self._backward_reads_both = False
        self._fetched_in_forward = False  # not so a compiled layer, which takes what is there

    @property
    def left_unquantized(self) -> bool:
        """Whether the layer's recipe was set to "none" since, and the parameters are in high precision."""
        return self.layer.recipe == "none" and not isinstance(self.params[0].local, QuantizedTensor)

    # ---- this rank's part ----

    def parameters(self) -> list[Any]:
        return [each.local for each in self.params]

    def matrices(self) -> list[Tensor]:
        """Returns this rank's rows [m, K] of the blocks that it owns, of all parameters; a collective."""
        unit = row_unit(self.quantizer)
        rows = [owned_rows(each.rows, unit, each.shards, self.group) for each in self.params]
        return rows if len(rows) == 1 else [torch.cat(rows)]

    def scales(self) -> list[Tensor | None]:
        return [None if self.delayed is None else weight_scale(self.layer, self.params[0].name)]

    def parts_for(self, dims: Collection[int]) -> Sequence[Quantized]:
        """Returns what this rank sends of each parameter, with operands for ``dims``."""
        (part,) = self._matrices_for(dims)
        if len(self.params) == 1:
            return [part]
        ends = [0, *accumulate([each.rows[self.group.rank] for each in self.owned])]
        return [cut_rows(part, begin, end) for begin, end in pairwise(ends)]

    def _matrices_for(self, dims: Collection[int]) -> Sequence[Quantized]:
        """Casts the matrices, where they are not there with operands for ``dims``."""
        if not (self._holds(dims) or self._repeats(dims)):
            cast_shards([self])  # the last forward had no grad mode, or there was none
        assert self.cast is not None
        if not self._holds(dims):
            self.cast = self.cast._replace(parts=self.cast.repeat(self, *dims))
        assert self.cast.parts is not None
        return self.cast.parts.matrices

    def _holds(self, dims: Collection[int]) -> bool:
        if self.cast is None or self.cast.parts is None:
            return False
        part = self.cast.parts.matrices[0]  # all are alike
        return all((part.rowwise if dim == ROWWISE else part.columnwise) is not None for dim in dims)

    def _repeats(self, dims: Collection[int]) -> bool:
        return self.cast is not None and bool(self.cast.repeats) and self.cast.repeats[0].serves(dims)

    def _release(self) -> None:
        """Frees the parts, if they can be cast again; to be called in the stream that waits for the gather."""
        if self.cast is not None and self.cast.repeats and self.cast.parts is not None:
            for part in self.cast.parts.matrices if self.params[0].device.type == "cuda" else ():
                hooks.record_stream(operand_ops.buffers(part).values())
            self.cast = self.cast._replace(parts=None)

    # ---- a gather of FSDP2's ----

    def begin_gather(self, number: int) -> tuple[list[Buffer], Quantized]:
        """Returns what is gathered of a parameter, and this rank's part of it."""
        if number == 0:
            dims = self._dims_to_gather()
            if self.fsdp.training_state == "FORWARD":
                self._fetched_in_forward = False
            if self.fsdp.training_state == "IDLE":
                self.cast = None  # not cast since the last step
            if not hasattr(self, "gathered"):
                self.gathered = GatheredWeight(self.parts_for(self._dims)[0], self.owned)
            self._pending_gather = dims, self.parts_for(dims)
        assert self._pending_gather is not None
        dims, parts = self._pending_gather
        return self.gathered.buffers(dims, number), parts[number]

    def end_gather(self, number: int) -> None:
        """Completes a parameter, all of which has been received."""
        assert self._pending_gather is not None
        dims, parts = self._pending_gather
        for buffer in self.gathered.buffers(dims, number):
            buffer.complete(parts[number])
        if number == len(self.params) - 1:
            self.gathered.set_constants(dims, parts[0])
            self._pending_gather = None
            self._release()

    def as_parameter(self, number: int, dtype: torch.dtype) -> QuantizedTensor:
        """Makes the gathered parameter, which stands for values of ``dtype``."""
        if number == 0 and len(self.params) > 1:
            self.full = self._as_tensor(self.gathered.operands, dtype)
        return self._as_tensor(self.gathered.pieces[number], dtype)

    def _as_tensor(self, operands: Quantized, dtype: torch.dtype) -> QuantizedTensor:
        tensor = QuantizedTensor.from_operands(operands, self.quantizer, operands.any.shape, dtype)
        tensor.gatherer = self
        return tensor

    def is_gathered(self, columnwise: bool) -> bool:
        """Whether it is unsharded since an earlier microbatch: forward gathers nothing, backward the same once more."""
        dims = self._dims if columnwise else (ROWWISE,)
        return self.fsdp.is_unsharded and self._repeats(dims)

    def _dims_to_gather(self) -> Collection[int]:
        """Chooses the dims that the pass which gathers will contract; see the class."""
        state, in_backward = self.fsdp.training_state, hooks.in_backward()
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
            for parameter in self.params:  # so that it is freed with the rest
                parameter.register_storage(self.gathered.buffers([*missing, *held], parameter.number))

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """Fetches for a call of a linear that reads ``quantizer``'s orientations, columnwise if backward will.

        Raises:
            ValueError: the call wants another format.
        """
        self._fetched_in_forward = True
        is_quantized = isinstance(self.params[0].local, QuantizedTensor)
        wanted = self._dims if quantizer.columnwise else (ROWWISE,)
        for dim in wanted:
            if quantizer.format(dim) != self.quantizer.format(dim) and not is_quantized:
                raise ValueError(
                    f"{label}: the weight was gathered as {self.quantizer.format(dim).spec}, and the recipe in force "
                    f"wants {quantizer.format(dim).spec}; set the layer's recipe before fully_shard, or to 'none' later"
                )
        in_forward = self.fsdp.training_state == "FORWARD" and not hooks.in_backward()
        if in_forward and self.fsdp.gathers_for_backward and not recompute.hooks_read():
            wanted = (ROWWISE,)  # backward gathers the rest before it reads it
        self.fetch(*wanted)


# ---- the cast of many weights together ----


def cast_shards(weights: Sequence[ShardedWeight], columnwise: bool = True) -> None:
    """Casts what this rank sends of every weight, with one all-reduce a group; a collective.

    Args:
        columnwise: for the orientation that backward reads, too; its codes only come now where they cannot later.

    Raises:
        ValueError: ranks that gather a weight would cast it with different delayed scales.
    """
    context = current()
    together: dict[Group, list[tuple[ShardedWeight, Quantizer, torch.dtype]]] = defaultdict(list)
    for weight in weights:
        weight.cast = None  # its memory may serve the new one
        later = weight.sharding.recasts and weight.fsdp.gathers_for_backward
        weight.dims = (ROWWISE,) if later else weight._dims
        recipe: Recipe | None = weight.delayed
        first, group = weight.params[0], weight.group
        rows = first.local
        if isinstance(rows, QuantizedRows) and rows.scale is not None and "forward_scaling" in weight.layer._modules:
            recipe = recipe_in_force(weight.layer)
            rows.scale = weight_scale(weight.layer, first.name)  # a checkpoint may have replaced it
        if isinstance(recipe, DelayedScaling) and group.size > 1:
            agreed = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
            delayed.check_same_scale(weight.layer, "the weight is sharded", group, recipe, agreed)
        quantizer = weight.quantizer.with_usage(columnwise=weight.quantizer.columnwise and columnwise)
        together[weight.sharding.group].append((weight, quantizer, first.orig_dtype))
    for wanted in together.values():
        for (weight, *_), cast in zip(wanted, cast_together(wanted), strict=True):
            weight.cast = cast


def owners(model: nn.Module) -> dict[tuple[nn.Module, str], tuple[LinearState, tuple[str, ...], str]]:
    """Finds the layers of the parameters below ``model``, by the module that holds each and its name there.

    Returns:
        For each the layer, and what that calls the parameters of the matrix, and this one.
    """
    found: dict[tuple[nn.Module, str], tuple[LinearState, tuple[str, ...], str]] = {}
    for layer in [each for each in model.modules() if isinstance(each, LinearState)]:
        for names in layer._matrices:
            for name in names:
                path, _, own = name.rpartition(".")
                found[layer.get_submodule(path), own] = layer, names, name
        if isinstance(layer, ExpertParameters) and not layer._matrices:  # one parameter
            found[layer._holder, layer._weight_names[0]] = layer, layer._weight_names, layer._weight_names[0]
    return found
