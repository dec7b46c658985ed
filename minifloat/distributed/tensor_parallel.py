"""Tensor and sequence parallelism of one linear: what its ranks tell each other, as a value that a call carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.distributed import collectives
from minifloat.distributed.collectives import Pending
from minifloat.distributed.gather import start_gather
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap
from minifloat.distributed.shards import prepare_shard
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer

T = TypeVar("T")
Mode = Literal["column", "row"]


class Gathered:
    """Operands of a whole tensor that are on their way: whoever reads one waits for it, and it is kept no longer."""

    def __init__(self, arriving: Sequence[Pending[list[Quantized]]]) -> None:
        self._arriving = list(arriving)
        self._here: dict[int, Operand] = {}

    def along(self, dim: int) -> Operand:
        """The operand that a GEMM contracts along ``dim``; each can be had once."""
        while dim not in self._here:
            (rowwise, columnwise), *_ = self._arriving.pop(0).wait()
            if rowwise is not None:
                self._here[ROWWISE] = rowwise
            if columnwise is not None:
                self._here[COLUMNWISE] = columnwise
        return self._here.pop(dim)


@dataclass(frozen=True)
class TensorParallel:
    """How a linear Y = X W^T + b, W [N, K], is split over p ranks, which communicate in the dtype of the activations.

    =================  ===================================  ===================================
    on one rank        column: W [N/p, K], b [N/p]          row: W [N, K/p], b [N]
    =================  ===================================  ===================================
    X                  [M, K]                               [M, K/p]
    Y                  [M, N/p]                             [M, N], summed over the ranks
    dX                 [M, K], summed over the ranks        [M, K/p]
    sequence parallel  X, dX are [m, K]: X is gathered for  Y, dY are [m, N]: the sum over the
                       fprop and again for wgrad, the sum   ranks is scattered, dY gathered for
                       over the ranks is scattered          dgrad and wgrad
    =================  ===================================  ===================================

    fprop Y = X W^T (+ b; after the sum if row); dgrad dX = dY W; wgrad dW = dY^T X, always of the rank's own part.
    What is gathered is quantized before, as the whole would be: ranks agree on amaxes and exchange what blocks share.

    Args:
        mode: None is no parallelism: nothing is gathered and nothing is summed.
        sequence_parallel: where X (column) or Y (row) is not split by columns, it is by rows.
        group: the ranks.
        lengths: of a call under sequence parallelism: how much of dim 0 of X (column) or Y (row) each rank has.
        shards: the same in rows of the matrix [M, K].
    """

    mode: Mode | None = None
    sequence_parallel: bool = False
    group: Group = Group()  # noqa: RUF009 - immutable
    lengths: tuple[int, ...] = ()
    shards: ShardMap | None = None

    def of_call(self, shape: Sequence[int], lengths: Sequence[int] | None, label: str) -> TensorParallel:
        """With the rows of a call whose X, on this rank, has ``shape``; see :meth:`Linear.forward`.

        Raises:
            ValueError: naming ``label``, where the numbers do not fit.
        """
        if not self.sequence_parallel:
            if lengths is not None and (self.mode is not None or tuple(lengths) != tuple(shape[:1])):
                raise ValueError(f"{label}: rows_per_rank={list(lengths)} is for sequence_parallel=True only")
            return self
        if len(shape) < 2:
            raise ValueError(f"{label}: sequence_parallel splits dim 0 of X {tuple(shape)}; give it a dim of rows")
        size, rank, own = self.group.size, self.group.rank, shape[0]
        if lengths is None:
            if self.mode == "row" and own % size:
                raise ValueError(
                    f"{label}: {own} rows do not divide by tp_size={size}; say who gets how many with rows_per_rank"
                )
            lengths = (own // size if self.mode == "row" else own,) * size
        expected = sum(lengths) if self.mode == "row" else lengths[rank] if len(lengths) == size else -1
        if len(lengths) != size or min(lengths) < 0 or own != expected:
            raise ValueError(
                f"{label}: rows_per_rank={list(lengths)} does not fit X {tuple(shape)} on rank {rank} of {size}"
            )
        inner = 1
        for extent in shape[1:-1]:
            inner *= extent
        shards = ShardMap(tuple([length * inner for length in lengths]))
        return TensorParallel(self.mode, True, self.group, tuple(lengths), shards)

    @property
    def gathers_input(self) -> bool:
        """fprop and wgrad read the X of all ranks."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def gathers_grad_output(self) -> bool:
        """dgrad and wgrad read the dY of all ranks."""
        return self.sequence_parallel and self.mode == "row"

    def output_shape(self, shape: Sequence[int], features: int) -> tuple[int, ...]:
        """Of Y on this rank, from that of X."""
        if not self.sequence_parallel:
            return (*shape[:-1], features)
        length = sum(self.lengths) if self.mode == "column" else self.lengths[self.group.rank]
        return (length, *shape[1:-1], features)

    # ---- what is gathered ----

    def quantize_shard(
        self, x: Tensor, quantizer: Quantizer, scale: Tensor | None = None, amaxes: Amaxes | None = None
    ) -> Quantized:
        """This rank's part of the quantized whole.

        Args:
            x: its rows of the whole, [..., K], which may be quantized.
            scale: that of delayed scaling, fp32 [1].
            amaxes: of these rows, where they are known; ranks agree on the largest.
        """
        assert self.shards is not None
        return prepare_shard(x, quantizer, self.shards, self.group, amaxes=amaxes, scale=scale)

    def gather(self, part: Quantized, *, rowwise: bool = False, columnwise: bool = False) -> Gathered:
        """Starts to gather a part in the orientations that are wanted, the rowwise one first."""
        assert self.shards is not None
        wanted = [(rowwise, columnwise)] if rowwise or columnwise else []
        if rowwise and columnwise and part.along(ROWWISE) is not part.along(COLUMNWISE):
            wanted = [(True, False), (False, True)]
        return Gathered(
            [start_gather([part], self.shards, self.group, rowwise=r, columnwise=c, gemm_ready=True) for r, c in wanted]
        )

    # ---- what is summed ----

    def fused_bias(self, bias: Tensor | None) -> Tensor | None:
        """What fprop adds to its product: a sum over ranks takes the bias once, at its end."""
        return None if self.mode == "row" else bias

    def reduce_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Y of a linear from this rank's product, in whose memory it may be."""
        if self.mode != "row":
            return y
        y = self._start_sum(y).wait()
        return y if bias is None else (y + bias).to(y.dtype)

    def start_reduce_grad_input(self, dx: Tensor) -> Pending[Tensor]:
        """Begins to sum this rank's dX, in whose memory the sum may be."""
        return self._start_sum(dx) if self.mode == "column" else done(dx)

    def start_reduce_bias_gradient(self, db: Tensor | None) -> Pending[Tensor | None]:
        """The same of db, if it is needed, where each rank has seen its own rows of dY only."""
        return self.start_sum_of_rows(db) if self.mode == "row" else done(db)

    def start_sum_of_rows(self, gradient: Tensor | None) -> Pending[Tensor | None]:
        """The same of the gradient of a parameter that all ranks have, to which each one's rows add."""
        if gradient is None or not self.sequence_parallel:
            return done(gradient)
        return Pending([], collectives.start_all_reduce(gradient, self.group).wait)

    def replicated(self, parameter: Tensor) -> Tensor:
        """``parameter``, which all ranks have and each uses for its own rows, with the gradient of all of them."""
        if not self.sequence_parallel:
            return parameter
        result: Tensor = _Replicated.apply(parameter, self)  # type: ignore[no-untyped-call]
        return result

    def _start_sum(self, x: Tensor) -> Pending[Tensor]:
        if not self.sequence_parallel:
            return collectives.start_all_reduce(x, self.group)
        assert self.shards is not None
        return collectives.start_reduce_scatter_rows(x, self.shards, self.group)


UNSHARDED = TensorParallel()
"""One rank does it all."""


def done(x: T) -> Pending[T]:
    """What nobody needs to wait for."""
    return Pending([], lambda: x)


class _Replicated(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.start_sum_of_rows(gradient.clone()).wait(), None
