"""Handles of gathered operands: the gather has started, or the product that reads the operand performs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minifloat.comm import symmetric_memory
from minifloat.comm.collectives import Pending
from minifloat.comm.gather import start_gather
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.gemm import WeightGemm
from minifloat.operand import Operand, Quantized


class Gathered:
    """Operands of a whole tensor that is being gathered: reading one waits for it, and releases it."""

    def __init__(self, pending: Sequence[Pending[list[Quantized]]]) -> None:
        self._pending = list(pending)
        self._received: dict[int, Operand] = {}

    def along(self, dim: int) -> Operand:
        """The operand that a GEMM contracts along ``dim``; each can be had once."""
        while dim not in self._received:
            (rowwise, columnwise), *_ = self._pending.pop(0).wait()
            if rowwise is not None:
                self._received[ROWWISE] = rowwise
            if columnwise is not None:
                self._received[COLUMNWISE] = columnwise
        return self._received.pop(dim)

    def multiplied(self, product: WeightGemm) -> Tensor:
        """``product`` of the rowwise operand."""
        return product.of(only(self, ROWWISE))


class GatheredByProduct(Gathered):
    """The same where the rowwise operand is gathered while it is multiplied, before all else.

    Args:
        part: this rank's, rowwise.
        serves_both: it is wanted columnwise, too: a transpose is left to the product that reads it so.
        pending: gathers that have started.
    """

    def __init__(
        self,
        part: Operand,
        shards: ShardMap,
        group: Group,
        serves_both: bool,
        pending: Sequence[Pending[list[Quantized]]],
    ) -> None:
        super().__init__(pending)
        self._part: Operand | None = part
        self._shards, self._group, self._serves_both = shards, group, serves_both

    def multiplied(self, product: WeightGemm) -> Tensor:
        part, self._part = self._part, None
        assert part is not None
        w, bias, out_dtype = product.operand, product.bias, product.out_dtype
        if symmetric_memory.multiplies(part, w, bias, out_dtype):
            y, whole = symmetric_memory.gather_and_multiply(
                product.gemm, part, w, self._group, bias=bias, out_dtype=out_dtype, fast_accum=product.fast_accum
            )
            if self._serves_both:
                self._received[COLUMNWISE] = whole
            return y
        own, both = [Quantized(part, part if self._serves_both else None)], self._serves_both
        started = start_gather(own, self._shards, self._group, rowwise=True, columnwise=both, gemm_ready=True)
        self._pending.insert(0, started)
        return super().multiplied(product)


def only(operands: Quantized | Gathered, dim: int) -> Quantized:
    """What a GEMM reads that contracts ``dim``, and nothing that would live as long."""
    operand = operands.along(dim)
    return Quantized(operand, None) if dim == ROWWISE else Quantized(None, operand)


def multiplied(product: WeightGemm, a: Quantized | Gathered) -> Tensor:
    """``product`` of the rowwise operand of ``a``."""
    return a.multiplied(product) if isinstance(a, Gathered) else product.of(only(a, ROWWISE))
