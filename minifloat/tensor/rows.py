"""Rows of a quantized parameter: those of a rank, with what it keeps of blocks that straddle ranks, and saved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.comm.collectives import start_exchange_rows
from minifloat.comm.group import Group, ShardMap, unit_rows
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.tensor import operand_ops
from minifloat.tensor.base import CodedTensor, copied
from minifloat.tensor.quantized_tensor import QuantizedTensor, check_form


class SavedRows(QuantizedTensor):
    """A range of rows of ``source``, in its memory, into which codes are copied range by range.

    A range of rows of a :class:`QuantizedTensor` with one scale refuses codes of another scale. ``SavedRows`` accepts
    them: in a checkpoint all rows have the new scale, and DCP loads all of them.
    """

    source: QuantizedTensor
    first: int  # row of the operands of the source
    whole: bool  # all rows of the parameter, which may then take values, too

    @staticmethod
    def of(
        source: QuantizedTensor, operands: Quantized, shape: Sequence[int], stride: Sequence[int] | None = None, *,
        first: int = 0, whole: bool,
    ) -> SavedRows:  # fmt: skip
        """``operands``: of the rows from ``first`` on."""
        self = SavedRows(operands, source.quantizer, shape, source.dtype, stride)
        self.source, self.first, self.whole = source, first, whole
        self.scale, self._group = source.scale, source._group
        return self

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        part = super()._part(view)
        if part is None:
            raise self._refusal()  # the checkpoint has other ranges of rows than whole blocks
        rows, cols = self._operands.any.shape
        first = self.first + (view.storage_offset() // cols if cols else 0)
        whole = self.whole and part._operands.any.shape[0] == rows
        out = SavedRows.of(self.source, part._operands, part.shape, part.stride(), first=first, whole=whole)
        out._wholes = part._wholes
        return out

    def _as_matrix(self, values: Tensor) -> Tensor:
        if self.whole:
            return super()._as_matrix(values)
        raise self._refusal()

    def _refusal(self) -> ValueError:
        held = self._operands.any
        return ValueError(
            f"codes of another recipe, or values, cannot be loaded into {held.shape[0]} rows of a quantized parameter "
            f"({held.format.spec}), which are not all of it: load the state of MasterWeights, whose masters are "
            "written to parameters of any recipe, or load into parameters in high precision"
        )

    def _store(self, operands: Quantized, noop_flag: Tensor | None = None) -> None:
        super()._store(operands.map(self._with_amax), noop_flag)
        # A rank without rows loads a block for its scale alone; optimizers of all ranks are to notice the write alike.
        torch.autograd.graph.increment_version(self.source._operands.any.codes)

    def _with_amax(self, loaded: Operand) -> Operand:
        """Adds the amax of all rows that were loaded, where it was measured on these alone: under delayed scaling."""
        if loaded.format.scale_rule != "given" or loaded.amax is None:
            return loaded
        ranges: dict[tuple[int, int], Tensor] = self.source.__dict__.setdefault("_loaded_amaxes", {})
        begin, end = self.first, self.first + loaded.shape[0]
        for other in [each for each in ranges if each[0] < end and begin < each[1]]:
            del ranges[other]
        ranges[begin, end] = loaded.amax.to(self.device)
        return loaded._replace(amax=torch.stack(list(ranges.values())).amax(0))


def _saved(self: QuantizedTensor, index: Any) -> Tensor:
    """Lists what ``torch.distributed.checkpoint`` saves, and loads into, maybe in several ranges of rows."""
    return SavedRows.of(self, self._operands, self.shape, self.stride(), whole=True)


setattr(QuantizedTensor, "__get_tensor_shard__", _saved)  # noqa: B010 - which this module is above


def saved_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """DCP's description of a part of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def write_item(fqn: str, whole: Tensor, chunk: Any) -> Any:
    """DCP's order to save ``chunk`` of ``whole``."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=whole.dtype), size=whole.size())
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def row_unit(quantizer: Quantizer) -> int:
    """Rows that stay together on one rank: those of the largest block, or rotation, of either orientation.

    It is a power of two, so that smaller blocks end where it does.
    """
    column = quantizer.format(COLUMNWISE)
    rows = unit_rows(quantizer.row_format, ROWWISE)
    return max(rows, unit_rows(column, ROWWISE if column.symmetric else COLUMNWISE)) if quantizer.columnwise else rows


def cut_rows(operands: Quantized, begin: int, end: int) -> Quantized:
    """Rows ``begin`` to ``end``, whole blocks, as views."""
    rows = operand_ops.cut(operands, begin, end) if end > begin else operand_ops.cut(operands, 0, 0)
    assert rows is not None
    return rows


class Cover:
    """The rows from the first to the last block that a rank's rows are part of; none if it has none.

    Args:
        unit: rows of the largest block; see :func:`row_unit`.
        shards, rank: the rows of every rank, and which one this is.
        group: the ranks; None for what was unpickled, until it is in the place of a parameter again.

    Attributes:
        begin, end: the rows, counted in the whole.
        own: the rank's rows, counted in the cover.
        owned: the rows of the blocks whose first row is the rank's own, counted in the whole. They end with the cover.
        exact: no rank has rows of a block that it has not all of.
    """

    def __init__(self, unit: int, shards: ShardMap, rank: int, group: Group | None) -> None:
        self.unit, self.shards, self.rank, self.group = unit, shards, rank, group
        self.begin, self.end = self._range(rank)
        self.own = slice(shards.first(rank) - self.begin, shards.end(rank) - self.begin)
        self.all_owned = shards.whole_units(unit)
        self.owned = self.all_owned.first(rank), self.all_owned.end(rank)
        self.exact = self.all_owned == shards

    def _range(self, rank: int) -> tuple[int, int]:
        first, end = self.shards.first(rank), self.shards.end(rank)
        if first == end:
            return first, first
        return first - first % self.unit, min(end + -end % self.unit, self.shards.total)

    @property
    def loaded(self) -> tuple[int, int]:
        """The rows that the rank loads: all; the first block's if it has none, for the scale of the whole tensor."""
        return (self.begin, self.end) if self.end > self.begin else (0, min(self.unit, self.shards.total))

    def gather(self, x: Tensor) -> Tensor:
        """The rows of the cover, [end - begin, K], from each rank's own ``x`` [m, K]; a collective."""
        if self.exact:
            return x
        if self.group is None:
            raise ValueError(
                f"{x.shape[0]} of {self.shards.total} rows of a quantized parameter were unpickled, and are no whole "
                "blocks: they can be read, and copied to the parameter that they are of, not written"
            )
        ranks = range(self.group.size)
        own = [(self.shards.first(rank), self.shards.end(rank)) for rank in ranks]
        sent = [_common(own[self.rank], self._range(rank)) for rank in ranks]
        received = [_common(rows, (self.begin, self.end)) for rows in own]
        first = own[self.rank][0]
        rows = torch.cat([x[begin - first : end - first] for begin, end in sent])
        return start_exchange_rows(rows, [e - b for b, e in sent], [e - b for b, e in received], self.group).wait()


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The rows that lie in both ranges."""
    begin = max(one[0], other[0])
    return begin, max(begin, min(one[1], other[1]))


class QuantizedRows(QuantizedTensor):
    """A rank's rows [m, K] of a quantized parameter, with the codes and scales of the whole.

    The operands are of the rows of :class:`Cover`, so that values can be read by this rank alone. Where blocks straddle
    ranks, who writes exchanges their rows with neighbours, fewer than two blocks' a rank: a collective, as is agreeing
    on amaxes.

    ``torch.distributed.checkpoint`` asks for what is saved and loaded: whole blocks, each saved by the rank of its
    first row, and the cover loaded from whoever saved it, so that codes are never cut.
    """

    cover: Cover

    @staticmethod
    def of(operands: Quantized, quantizer: Quantizer, dtype: torch.dtype, cover: Cover) -> QuantizedRows:
        """This rank's rows; ``operands``: of the cover."""
        rows, cols = cover.shards.rows[cover.rank], operands.any.shape[1]
        self = QuantizedRows(operands, quantizer, (rows, cols), dtype)
        self.cover = cover
        return self

    def join(self, group: Group) -> None:
        """Agrees with the ranks of ``group``: it may have been unpickled, and no file has a process group."""
        self._group = group.name
        if self.cover.group is None:
            self.cover = Cover(self.cover.unit, self.cover.shards, self.cover.rank, group)

    @property
    def holds_own_matrix(self) -> bool:
        """Whether the operands are of these rows, not of more."""
        return self.cover.exact and super().holds_own_matrix

    @property
    def part(self) -> Quantized:
        """Views of the rows that this rank sends: those it owns."""
        if self.cover.exact:
            return self._operands
        return cut_rows(self._operands, *[row - self.cover.begin for row in self.cover.owned])

    # ---- torch.distributed.checkpoint, which asks the local tensor of a DTensor ----

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        """Lists what this rank saves: whole blocks, at most one range of rows."""
        begin, end = self.cover.owned
        first_of_none = self.cover.shards.total == 0 == self.cover.rank  # for the key to be there
        return [write_item(fqn, whole, self._chunk(begin, end))] if end > begin or first_of_none else []

    def __create_chunk_list__(self) -> list[Any]:
        """Lists what this rank loads."""
        return [self._chunk(*self.cover.loaded)]

    def _chunk(self, begin: int, end: int) -> Any:
        return saved_chunk((begin, 0), (end - begin, self.shape[1]))

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The rows from ``index.offset`` on, of one of the above."""
        begin, (loaded, end) = index.offset[0], self.cover.loaded
        shape = end - begin, self.shape[1]
        operands = self._operands
        if operands.any.shape[0] < end - loaded:
            operands = operands.map(lambda o: _with_memory(o, end - loaded))
        if begin == loaded:
            return SavedRows.of(self, operands, shape, whole=False)
        operands = cut_rows(operands, begin - loaded, operands.any.shape[0])
        return SavedRows.of(self, operands, shape, whole=False).clone()  # not the memory that it is a part of

    # ---- what QuantizedTensor does otherwise ----

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._operands.dequantize(dtype or self.dtype)
        own = values[self.cover.own]
        return own if self.cover.exact else own.clone()  # alone in its memory, which DCP's stager takes as a whole

    def _as_matrix(self, values: Tensor) -> Tensor:
        dtype = values.dtype if values.dtype in DTYPES else self.dtype
        return self.cover.gather(values.to(self.device, dtype).expand(self.shape).contiguous())

    def _same_form(self, other: CodedTensor) -> bool:
        alike = self.cover.exact if not isinstance(other, QuantizedRows) else self.cover.begin == other.cover.begin
        return alike and super()._same_form(other)

    def _like(
        self, operands: Quantized, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
    ) -> QuantizedTensor:
        if shape is not None and (tuple(shape), stride) != (tuple(self.shape), self.stride()):
            return super()._like(operands, shape, stride)
        out = QuantizedRows.of(operands, self.quantizer, operands.any.dtype, self.cover)
        out.scale, out._group, out.source_version = self.scale, self._group, self.source_version
        out.owner = self.owner
        return out

    def _zeros(self, size: Sequence[int], device: Any) -> QuantizedTensor:
        if tuple(size) != tuple(self.shape):
            return super()._zeros(size, device)
        covered = super()._zeros(self._operands.any.shape, device)
        out = QuantizedRows.of(covered.operands, covered.quantizer, self.dtype, self.cover)
        out.scale = covered.scale
        return out

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        if self.cover.exact:
            return super()._part(view)
        alike = (view.shape, view.stride(), view.dtype) == (self.shape, self.stride(), self.dtype)
        return self._like(self._operands) if alike else None

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        cover = self.cover.unit, self.cover.shards, self.cover.rank, self.cover.group
        description = operand_ops.describe(self.quantizer, self._operands)
        return list(self._buffers()), (description, self.dtype, self._group, cover)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[Any, ...], outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> QuantizedRows:
        description, dtype, group, cover = context
        quantizer, operands = operand_ops.restore(description, inner)
        self = QuantizedRows.of(operands, quantizer, dtype, Cover(*cover))
        self.scale, self._group = inner.get("scale"), group
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, (inner, context, _, _, *others) = super().__reduce_ex__(protocol)
        return _rebuild_rows, (inner, context, (self.cover.unit, self.cover.shards.rows, self.cover.rank), *others)


def _with_memory(empty: Operand, rows: int) -> Operand:
    """Memory for other rows, and the very scale or amax of the whole tensor."""
    own = {name: getattr(empty, name) for name in operand_ops.BUFFERS}
    gathered = ShardMap((rows,)).gathered(empty.format, empty.dim)
    fields: dict[str, Any] = {name: own[name].new_zeros(field.total, *own[name].shape[1:]) for name, field in gathered}
    return empty._replace(shape=(rows, empty.shape[1]), **fields)


def _rebuild_rows(
    inner: dict[str, Tensor], context: tuple[Any, ...], cover: tuple[int, tuple[int, ...], int], requires_grad: bool,
    attributes: dict[str, Any],
) -> QuantizedTensor:  # fmt: skip
    """Unpickles; its arguments are plain data, for ``torch.load(weights_only=True)`` as well."""
    unit, shards, rank = cover
    context = *context, (unit, ShardMap(tuple(shards)), rank, None)
    self = QuantizedRows.__tensor_unflatten__(inner, context, (), ())
    check_form(self._operands, (self.cover.end - self.cover.begin, self.shape[1]))
    self._set_attributes(attributes)
    return self.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuild_rows])


def adopt_group(new: QuantizedTensor, old: Tensor) -> None:
    """Lets ``new``, which others have put in the place of ``old``, agree with the ranks that that one does.

    It may have been unpickled, as by ``load_state_dict(assign=True)``, and no file has a process group.
    """
    if isinstance(old, QuantizedRows):
        new._group = old._group
        if isinstance(new, QuantizedRows):
            new.cover = old.cover


@torch.no_grad()
def rows_of(whole: QuantizedTensor, shards: ShardMap, group: Group) -> QuantizedRows:
    """This rank's rows of a quantized parameter that all ranks have, in memory of their own."""
    cover = Cover(row_unit(whole.quantizer), shards, group.rank, group)
    covered = cut_rows(whole.operands, cover.begin, cover.end)
    own = covered.map(lambda operand: operand_ops.map_buffers(operand, copied))
    rows = QuantizedRows.of(own, whole.quantizer, whole.dtype, cover)
    rows.owner = whole.owner
    return rows
