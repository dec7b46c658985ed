"""Rows of a quantized parameter that are no whole blocks: a rank keeps the blocks that its rows are part of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.distributed.collectives import exchange_rows
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap, unit_rows
from minifloat.formats import ROWWISE
from minifloat.kernels.quantize import code_shape, scale_shape
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor import QuantizedTensor


class Cover:
    """The rows from the first to the last block that a rank's rows are part of; none if it has none.

    Args:
        unit: rows of the largest block, a power of two, so that smaller ones end where it does.
        shards, group: the rows of every rank, and the ranks.
    """

    def __init__(self, unit: int, shards: ShardMap, group: Group) -> None:
        self.shards, self.group = shards, group
        self._unit = unit
        self.begin, self.end = self._range(group.rank)
        self.above = shards.first(group.rank) - self.begin

    def _range(self, rank: int) -> tuple[int, int]:
        first, end = self.shards.first(rank), self.shards.end(rank)
        if first == end:
            return first, first
        return first - first % self._unit, min(end + -end % self._unit, self.shards.total)

    def gather(self, x: Tensor) -> Tensor:
        """The rows of the cover, [end - begin, K], from each rank's own ``x`` [m, K]; a collective."""
        rank, sizes = self.group.rank, range(self.group.size)
        first, ranges = self.shards.first(rank), [self._range(other) for other in sizes]
        own = self.shards.end(rank)
        sent = [(max(first, begin), min(own, end)) for begin, end in ranges]
        received = [
            max(0, min(self.shards.end(other), self.end) - max(self.shards.first(other), self.begin)) for other in sizes
        ]
        rows = [x[begin - first : end - first] if end > begin else x[:0] for begin, end in sent]
        return exchange_rows(torch.cat(rows), [part.shape[0] for part in rows], received, self.group)


class QuantizedRows(QuantizedTensor):
    """Rows [m, K] of a quantized parameter whose blocks straddle ranks, with the codes and scales of the whole.

    The operands are of the rows of :class:`Cover`, so that values can be read by this rank alone. Who writes exchanges
    the rows of straddling blocks with neighbours, fewer than two blocks' a rank, and agrees on amaxes: a collective.
    """

    cover: Cover

    @staticmethod
    def of(operands: Quantized, quantizer: Quantizer, dtype: torch.dtype, cover: Cover) -> QuantizedRows:
        """This rank's rows; ``operands``: of the cover."""
        rows, cols = cover.shards.rows[cover.group.rank], operands.any.shape[1]
        self = QuantizedRows(operands, quantizer, (rows, cols), dtype)
        assert isinstance(self, QuantizedRows)
        self.cover = cover
        return self

    @property
    def holds_own_matrix(self) -> bool:
        """The operands are of more rows than these."""
        return False

    @property
    def part(self) -> Quantized:
        """What this rank gathers, as :func:`~minifloat.distributed.quantize_shard` would give it; views."""
        row, column = self._operands
        rowwise = None if row is None else self._owned(row)
        shared = row is column
        return Quantized(rowwise, rowwise if shared else None if column is None else self._owned(column))

    def _owned(self, operand: Operand) -> Operand:
        fmt, dim, (rows, cols) = operand.format, operand.dim, operand.shape
        shards, rank = self.cover.shards, self.cover.group.rank

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

    # ---- what QuantizedTensor does otherwise ----

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._operands.dequantize(dtype or self.dtype)
        return values[self.cover.above : self.cover.above + self.shape[0]]

    def _as_matrix(self, values: Tensor) -> Tensor:
        dtype = values.dtype if values.dtype in (torch.float32, torch.bfloat16, torch.float16) else self.dtype
        return self.cover.gather(values.to(self.device, dtype).expand(self.shape).contiguous())

    def _same_form(self, other: QuantizedTensor) -> bool:
        return isinstance(other, QuantizedRows) and super()._same_form(other)

    def _like(
        self, operands: Quantized, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
    ) -> QuantizedTensor:
        out = QuantizedRows.of(operands, self.quantizer, operands.any.dtype, self.cover)
        out.scale, out.amax_group, out.source_version = self.scale, self.amax_group, self.source_version
        return out

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        if (view.shape, view.stride(), view.dtype) != (self.shape, self.stride(), self.dtype):
            raise NotImplementedError(  # a copy of the values would swallow what a checkpoint loads into it
                f"{self.shape[0]} of {self.cover.shards.total} rows of a quantized parameter have no views of shape "
                f"{tuple(view.shape)}: read dequantize(), write whole shards"
            )
        return self._like(self._operands)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        raise NotImplementedError(
            f"{self.shape[0]} of {self.cover.shards.total} rows of a quantized parameter are no whole blocks, and "
            "cannot be saved by themselves: save the masters, which are in the state of MasterWeights"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        assert isinstance(copied, QuantizedTensor)
        memo[id(self)] = copied
        return copied


@torch.no_grad()
def rows_of(whole: QuantizedTensor, shards: ShardMap, group: Group) -> QuantizedTensor:
    """This rank's rows of a quantized parameter that all ranks have, in memory of their own."""
    unit = max(unit_rows(fmt, dim) for fmt, dim in whole.quantizer.casts)
    first, end = shards.first(group.rank), shards.end(group.rank)
    if shards.aligned(unit):
        rows = whole.detach()[first:end].clone()
        assert isinstance(rows, QuantizedTensor)
        return rows
    cover = Cover(unit, shards, group)
    covered = whole.detach()[cover.begin : cover.end] if end > first else whole.detach()[:0]
    copied = covered.clone()
    assert isinstance(copied, QuantizedTensor)
    return QuantizedRows.of(copied.operands, copied.quantizer, whole.dtype, cover)
