"""A rank's rows of a quantized parameter: what it keeps of blocks that straddle ranks, what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.comm.collectives import exchange_rows
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap, unit_rows
from minifloat.formats import ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.ops.quantize import code_shape, scale_shape
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.tensor import QuantizedTensor, operand_ops
from minifloat.tensor.base import CodedTensor
from minifloat.tensor.saved_rows import SavedRows, saved_chunk, write_item


class Cover:
    """The rows from the first to the last block that a rank's rows are part of; none if it has none.

    Args:
        unit: rows of the largest block, a power of two, so that smaller ones end where it does.
        shards, rank: the rows of every rank, and which one this is.
        group: the ranks; None for what was unpickled, until it is in the place of a parameter again.

    Attributes:
        begin, end: the rows, counted in the whole.
        above: how many of them lie above the rank's own.
        exact: no rank has rows of a block that it has not all of.
    """

    def __init__(self, unit: int, shards: ShardMap, rank: int, group: Group | None) -> None:
        self.unit, self.shards, self.rank, self.group = unit, shards, rank, group
        self.begin, self.end = self._range(rank)
        self.above = shards.first(rank) - self.begin
        self.exact = shards.aligned(unit)

    def _range(self, rank: int) -> tuple[int, int]:
        first, end = self.shards.first(rank), self.shards.end(rank)
        if first == end:
            return first, first
        return first - first % self.unit, min(end + -end % self.unit, self.shards.total)

    @property
    def saved(self) -> tuple[int, int]:
        """The rows that the rank saves: of the blocks whose first row is its own. They end where the cover does."""
        owned = self.shards.whole_units(self.unit)
        return owned.first(self.rank), owned.end(self.rank)

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
        sizes = range(self.group.size)
        first, ranges = self.shards.first(self.rank), [self._range(other) for other in sizes]
        own = self.shards.end(self.rank)
        sent = [(max(first, begin), min(own, end)) for begin, end in ranges]
        received = [
            max(0, min(self.shards.end(other), self.end) - max(self.shards.first(other), self.begin)) for other in sizes
        ]
        rows = [x[begin - first : end - first] if end > begin else x[:0] for begin, end in sent]
        return exchange_rows(torch.cat(rows), [part.shape[0] for part in rows], received, self.group)


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
        assert isinstance(self, QuantizedRows)
        self.cover = cover
        return self

    @property
    def holds_own_matrix(self) -> bool:
        """The operands are of these rows, not of more."""
        return self.cover.exact and super().holds_own_matrix

    @property
    def part(self) -> Quantized:
        """What this rank gathers, as :func:`~minifloat.distributed.quantize_shard` would give it; views."""
        if self.cover.exact:
            return self._operands
        row, column = self._operands
        rowwise = None if row is None else self._owned(row)
        shared = row is column
        return Quantized(rowwise, rowwise if shared else None if column is None else self._owned(column))

    def _owned(self, operand: Operand) -> Operand:
        fmt, dim, (rows, cols) = operand.format, operand.dim, operand.shape
        shards, rank = self.cover.shards, self.cover.rank

        def before(row: int) -> tuple[int, int]:
            """Rows of codes and of scales above ``row`` of the whole, counted from the cover's first."""
            above = min(row - self.cover.begin, rows)
            return code_shape(fmt, dim, above, cols)[0], scale_shape(fmt, dim, above, cols)[0]

        cast, owned = shards.sources(fmt, dim), shards.whole_units(unit_rows(fmt, dim))
        if not rows:
            return operand._replace(shape=(0, cols))
        codes = operand.codes[before(cast.first(rank))[0] : before(cast.end(rank))[0]]
        scale_inv, amax = operand.scale_inv, operand.amax
        if scale_inv is not None and fmt.block:
            scale_inv = scale_inv[before(owned.first(rank))[1] : before(owned.end(rank))[1]]
        if amax is not None and fmt.amax_per_row and dim == ROWWISE:
            amax = amax[self.cover.above : self.cover.above + self.shape[0]]
        return operand._replace(codes=codes, scale_inv=scale_inv, amax=amax, shape=(self.shape[0], cols))

    # ---- torch.distributed.checkpoint, which asks the local tensor of a DTensor ----

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        """What this rank saves: whole blocks, at most one range of rows."""
        begin, end = self.cover.saved
        first_of_none = self.cover.shards.total == 0 == self.cover.rank  # for the key to be there
        return [write_item(fqn, whole, begin, end)] if end > begin or first_of_none else []

    def __create_chunk_list__(self) -> list[Any]:
        """What this rank loads."""
        return [saved_chunk(*self.cover.loaded, self.shape[1])]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The rows from ``index.offset`` on, of one of the above."""
        begin, (loaded, end) = index.offset[0], self.cover.loaded
        shape = end - begin, self.shape[1]
        operands = self._operands
        if operands.any.shape[0] < end - loaded:
            operands = operand_ops.each(operands, lambda o: _beside(o, end - loaded))
        if begin == loaded:
            return SavedRows.of(self, operands, shape, whole=False)
        operands = operand_ops.each(operands, lambda o: _cut(o, begin - loaded))
        return SavedRows.of(self, operands, shape, whole=False).clone()  # not the memory that it is a part of

    # ---- what QuantizedTensor does otherwise ----

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._operands.dequantize(dtype or self.dtype)
        own = values[self.cover.above : self.cover.above + self.shape[0]]
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

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        _, (inner, context, _, _, *others) = super().__reduce_ex__(protocol)
        return _rebuild_rows, (inner, context, (self.cover.unit, self.cover.shards.rows, self.cover.rank), *others)


def _cut(operand: Operand, begin: int) -> Operand:
    rows = operand_ops.cut(operand, begin, operand.shape[0])
    assert rows is not None
    return rows


def _beside(empty: Operand, rows: int) -> Operand:
    """Memory for other rows, and the very scale or amax of the whole tensor."""
    fmt, dim, cols = empty.format, empty.dim, empty.shape[1]
    codes = empty.codes.new_zeros(code_shape(fmt, dim, rows, cols))
    scale_inv, amax = empty.scale_inv, empty.amax
    if scale_inv is not None and fmt.block:
        scale_inv = scale_inv.new_zeros(scale_shape(fmt, dim, rows, cols))
    if amax is not None and fmt.amax_per_row and dim == ROWWISE:
        amax = amax.new_zeros(rows)
    return empty._replace(codes=codes, scale_inv=scale_inv, amax=amax, shape=(rows, cols))


def _rebuild_rows(
    inner: dict[str, Tensor],
    context: tuple[Any, ...],
    cover: tuple[int, tuple[int, ...], int],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> QuantizedTensor:
    """What a pickle calls; its arguments are plain data, for ``torch.load(weights_only=True)`` as well."""
    description, dtype, _ = context
    quantizer, operands = operand_ops.restore(description, inner)
    unit, rows, rank = cover
    self = QuantizedRows.of(operands, quantizer, dtype, Cover(unit, ShardMap(tuple(rows)), rank, None))
    self.scale = inner.get("scale")
    self._set_attributes(attributes)
    return self.requires_grad_(requires_grad)  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuild_rows])


def put_in_place(new: QuantizedTensor, old: Tensor) -> None:
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
    unit = max(unit_rows(o.format, o.dim) for o in operand_ops.distinct(whole.operands).values())
    cover = Cover(unit, shards, group.rank, group)
    covered = whole.detach()[cover.begin : cover.end] if cover.end > cover.begin else whole.detach()[:0]
    copied = covered.clone()
    assert isinstance(copied, QuantizedTensor)
    return QuantizedRows.of(copied.operands, copied.quantizer, whole.dtype, cover)
