"""Ranks that share a linear: who has which rows of its activations, and their gathers and sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from minifloat.arguments import label_of
from minifloat.comm import collectives
from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group, ShardMap, unit_rows
from minifloat.comm.sharded_cast import quantize_shard, start_gather
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional.autograd import apply, first_order
from minifloat.functional.quantize import Mode, Ranks
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer
from minifloat.tensor import QuantizedTensor


@dataclass(frozen=True)
class TensorParallel:
    """Ranks of a linear; what they tell each other is an exchange's, one of those in ``exchange.py``.

    Args:
        group: the ranks.
        lengths: of a call under sequence parallelism: how much of dim 0 of X (column) or Y (row) each rank has.
        shards: the same in rows of the matrix [M, K].
        regrouped: it may have been over another group in an earlier forward.
    """

    group: Group = Group()  # noqa: RUF009 - immutable
    lengths: tuple[int, ...] = ()
    shards: ShardMap | None = None
    regrouped: bool = False

    mode: ClassVar[Mode | None] = None
    sequence_parallel: ClassVar[bool] = False
    gathers_x: ClassVar[bool] = False  # fprop and wgrad read the X of all ranks

    # ---- of a layer and of a call ----

    @property
    def ranks(self) -> Ranks | None:
        """Part of it that a spec depends on."""
        return None if self.mode is None else Ranks(self.mode, self.sequence_parallel, self.group)

    def over(self, group: Group) -> Self:
        """Returns the same over other ranks."""
        return replace(self, group=group, regrouped=True)

    def of_call(self, shape: Sequence[int], lengths: Sequence[int] | None, layer: object) -> Self:
        """Adds the rows of a call whose X, on this rank, has ``shape``; see :meth:`Linear.forward`.

        Raises:
            ValueError: naming ``layer``, where the numbers do not fit.
        """
        if self.sequence_parallel:
            return self._with_rows(shape, lengths, layer)
        if lengths is not None and (self.mode is not None or tuple(lengths) != tuple(shape[:1])):
            raise ValueError(f"{label_of(layer)}: rows_per_rank={list(lengths)} is for sequence_parallel=True only")
        return self

    def _with_rows(self, shape: Sequence[int], lengths: Sequence[int] | None, layer: object) -> Self:
        if len(shape) < 2:
            raise ValueError(
                f"{label_of(layer)}: sequence_parallel splits dim 0 of X {tuple(shape)}; give it a dim of rows"
            )
        size, rank, own = self.group.size, self.group.rank, shape[0]
        if lengths is None:
            if self.mode == "row" and own % size:
                raise ValueError(
                    f"{label_of(layer)}: {own} rows do not divide by tp_size={size}; say who gets how many with "
                    "rows_per_rank"
                )
            lengths = (own // size if self.mode == "row" else own,) * size
        expected = sum(lengths) if self.mode == "row" else lengths[rank] if len(lengths) == size else -1
        if len(lengths) != size or min(lengths) < 0 or own != expected:
            raise ValueError(
                f"{label_of(layer)}: rows_per_rank={list(lengths)} does not fit X {tuple(shape)} on rank {rank} of "
                f"{size}"
            )
        inner = 1
        for extent in shape[1:-1]:
            inner *= extent
        shards = ShardMap(tuple([length * inner for length in lengths]))
        return replace(self, lengths=tuple(lengths), shards=shards)

    # ---- gathers ----

    def gather(self, part: Quantized, *, rowwise: bool = False, columnwise: bool = False) -> Gathered:
        """Starts to gather a part in the orientations that are wanted, the rowwise one first."""
        assert self.shards is not None
        wanted = [(rowwise, columnwise)] if rowwise or columnwise else []
        if rowwise and columnwise and part.along(ROWWISE) is not part.along(COLUMNWISE):
            wanted = [(True, False), (False, True)]
        return Gathered(
            [start_gather([part], self.shards, self.group, rowwise=r, columnwise=c, gemm_ready=True) for r, c in wanted]
        )

    # ---- sums ----

    def start_sum(self, x: Tensor) -> Pending[Tensor]:
        """Begins to sum ``x`` over the ranks, of whose rows each gets its own under sequence parallelism."""
        if not self.sequence_parallel:
            return collectives.start_all_reduce(x, self.group)
        assert self.shards is not None
        return collectives.start_reduce_scatter_rows(x, self.shards, self.group)

    # ---- parameters that all ranks have ----

    def start_sum_of_rows(self, gradient: Tensor | None) -> Pending[Tensor | None]:
        """Begins to sum the gradient, if it is needed, of a parameter that all ranks have, each for its own rows."""
        if gradient is None or not self.sequence_parallel:
            return Pending([], lambda: gradient)
        return Pending([], collectives.start_all_reduce(gradient, self.group).wait)

    def replicated(self, parameter: Tensor) -> Tensor:
        """Gives ``parameter``, which all ranks have and each uses for its own rows, the gradient of all of them."""
        return apply(_Replicated, parameter, self) if self.sequence_parallel else parameter


class _Replicated(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, exchange: TensorParallel) -> Tensor:
        ctx.exchange = exchange
        return parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.start_sum_of_rows(gradient.clone()).wait(), None


# ---- gathers of activations ----


def prepare_shard(
    x: Tensor | Quantized, quantizer: Quantizer, shards: ShardMap, group: Group, *, scales_agree: bool = False,
    amaxes: Amaxes | None = None, scale: Tensor | None = None, rng: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Makes the operands of ``x`` that this rank sends, a collective; ``x`` may be quantized.

    Operands are gathered unchanged if their scales are valid for the full tensor: no unit straddles ranks, and scales
    are of blocks or ``scales_agree``. Otherwise, or if an orientation is missing or has another format, the tensor is
    dequantized to its own dtype and passed to :func:`~minifloat.comm.sharded_cast.quantize_shard`, which has the other
    arguments.

    Args:
        x: the rows of this rank. Held in the same formats and orientations by all ranks.
        scales_agree: the caller knows that all ranks cast with the same scale, or the same amax above block scales.
    """
    held = x.operands if isinstance(x, QuantizedTensor) and x.holds_own_matrix else x
    if isinstance(held, Quantized):
        wanted = [ROWWISE] * quantizer.rowwise + [COLUMNWISE] * quantizer.columnwise
        if all(_holds_for_whole(held, quantizer.format(dim), dim, shards, scales_agree) for dim in wanted):
            operands = {dim: held.along(dim) for dim in wanted}
            return Quantized(operands.get(ROWWISE), operands.get(COLUMNWISE))
    if not isinstance(held, Tensor) or isinstance(held, QuantizedTensor):
        held, amaxes = held.dequantize(), None
    return quantize_shard(held, quantizer, shards, group, amaxes=amaxes, scale=scale, rng=rng)


def _holds_for_whole(held: Quantized, fmt: Format, dim: int, shards: ShardMap, scales_agree: bool) -> bool:
    """Whether ``held`` has an operand of this format with the scales that the whole would have."""
    own = fmt.owns_scales(dim) and not fmt.reduces_amax(dim)
    serves = any(operand is not None and operand.serves(dim) and operand.format == fmt for operand in held)
    along = ROWWISE if fmt.symmetric else dim
    return serves and (own or scales_agree or not fmt.quantized) and shards.aligned(unit_rows(fmt, along))


class Gathered:
    """Operands of a whole tensor that is being gathered: reading one waits for it, and releases it."""

    rowwise = columnwise = None  # so that products call along()

    def __init__(self, pending: Sequence[Pending[list[Quantized]]]) -> None:
        self._pending = list(pending)
        self._received: dict[int, Operand] = {}

    def along(self, dim: int) -> Operand:
        """Returns the operand that a GEMM contracts along ``dim``; each can be had once."""
        while dim not in self._received:
            (rowwise, columnwise), *_ = self._pending.pop(0).wait()
            if rowwise is not None:
                self._received[ROWWISE] = rowwise
            if columnwise is not None:
                self._received[COLUMNWISE] = columnwise
        return self._received.pop(dim)


def one_orientation(operand: Operand) -> Quantized:
    """Returns ``operand`` alone, in its place."""
    return Quantized(operand, None) if operand.dim == ROWWISE else Quantized(None, operand)
