"""The ranks that share a linear, as a value that a call carries: the rows of each, and their gathers and sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from minifloat.arguments import checked, label_of
from minifloat.comm import collectives, symmetric_memory
from minifloat.comm.checks import check_call
from minifloat.comm.collectives import Pending
from minifloat.comm.gather import start_gather
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.autograd import apply, first_order
from minifloat.functional.gathered import Gathered, GatheredByProduct
from minifloat.functional.gemm import WeightGemm
from minifloat.functional.linear_config import Mode, Overlap, Ranks
from minifloat.operand import Operand, Quantized


@dataclass(frozen=True)
class TensorParallel:
    """The ranks of a linear; what they tell each other is an exchange's, one of those in ``exchange.py``.

    Args:
        group: the ranks.
        overlap: under sequence parallelism: what hides the gathers and sums. ``"symmetric_memory"`` is for products
            that :mod:`~minifloat.comm.symmetric_memory` has; others use handles.
        lengths: of a call under sequence parallelism: how much of dim 0 of X (column) or Y (row) each rank has.
        shards: the same in rows of the matrix [M, K].
        check: before each call of a layer, ranks compare what they bring to it, and raise on each of them if that does
            not fit together: for debugging.
        regrouped: it may have been over another group in an earlier forward.
    """

    group: Group = Group()  # noqa: RUF009 - immutable
    overlap: Overlap = "handles"
    lengths: tuple[int, ...] = ()
    shards: ShardMap | None = None
    check: bool = False
    regrouped: bool = False

    mode: ClassVar[Mode | None] = None
    sequence_parallel: ClassVar[bool] = False
    gathers_x: ClassVar[bool] = False  # fprop and wgrad read the X of all ranks

    # ---- of a layer and of a call ----

    @property
    def ranks(self) -> Ranks | None:
        """What a spec depends on."""
        return None if self.mode is None else Ranks(self.mode, self.sequence_parallel, self.group, self.overlap)

    def over(self, group: Group) -> Self:
        """The same over other ranks."""
        return replace(self, group=group, regrouped=True)

    def of_call(
        self, shape: Sequence[int], lengths: Sequence[int] | None, layer: object, dtype: torch.dtype | None = None
    ) -> Self:
        """With the rows of a call whose X, on this rank, has ``shape``; see :meth:`Linear.forward`.

        ``dtype``: of X, which ranks compare too. Where they compare, this comes before whatever one could raise alone.

        Raises:
            ValueError: naming ``layer``, where the numbers do not fit.
        """
        if self.check and self.group.size > 1:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{label_of(layer)}: set_check(model) lets ranks compare what they bring, which no graph does; "
                    "set_check(model, False), or leave the layer out with torch.compiler.disable"
                )
            check_call(label_of(layer), self._first_collective, shape, dtype, lengths, self.gathers_x, self.group)
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

    @property
    def _first_collective(self) -> str:
        """What the sizes of X on the ranks matter to first."""
        if self.mode == "row":
            return "reduce_scatter_rows of Y" if self.sequence_parallel else "all_reduce of Y"
        return "gather of X" if self.sequence_parallel else "all_reduce of dX"

    # ---- gathers ----

    def gather(
        self, part: Quantized, *, rowwise: bool = False, columnwise: bool = False, multiplied: bool = True
    ) -> Gathered:
        """Starts to gather a part in the orientations that are wanted, the rowwise one first.

        ``multiplied``: the rowwise one is for fprop or dgrad, which may bring it.
        """
        assert self.shards is not None
        wanted = [(rowwise, columnwise)] if rowwise or columnwise else []
        if rowwise and columnwise and part.along(ROWWISE) is not part.along(COLUMNWISE):
            wanted = [(True, False), (False, True)]
        by_product = rowwise and multiplied and self._carries(part.along(ROWWISE))
        pending = [
            start_gather([part], self.shards, self.group, rowwise=r, columnwise=c, gemm_ready=True)
            for r, c in (wanted[1:] if by_product else wanted)
        ]
        if by_product:
            return GatheredByProduct(part.along(ROWWISE), self.shards, self.group, wanted[0][1], pending)
        return Gathered(pending)

    def _carries(self, a: Operand) -> bool:
        """Rows of ``a``, or of its product, are communicated through symmetric memory."""
        if self.overlap != "symmetric_memory" or self.shards is None:
            return False
        return symmetric_memory.carries(a, self.shards, self.group)

    # ---- sums ----

    def _start_summed(self, product: WeightGemm, a: Operand) -> Pending[Tensor]:
        """The sum of the ranks' products, whose addends may be sent while the product is computed."""
        gemm, w, out_dtype, fast_accum, bias, _ = product
        if self._carries(a) and symmetric_memory.multiplies(a, w, bias, out_dtype):
            summed = symmetric_memory.multiply_and_sum(
                gemm, a, w, self.group, out_dtype=out_dtype, fast_accum=fast_accum
            )
            return Pending([], lambda: summed)
        return self.start_sum(product.of(a))

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
        """``parameter``, which all ranks have and each uses for its own rows, with the gradient of all of them."""
        return apply(_Replicated, parameter, self) if self.sequence_parallel else parameter


@checked
def set_overlap(model: nn.Module, overlap: Overlap) -> None:
    """Sets how the tensor-parallel layers of ``model`` overlap communication, from their next forward on; on all ranks.

    Args:
        overlap: ``"handles"``: collectives of the backend run beside other work. ``"symmetric_memory"``: where PyTorch
            has it (``docs/distributed.md``, Overlap), a product runs in parts while the rows of other parts are sent.

    Raises:
        ValueError: ``overlap`` is neither.
    """
    for module in model.modules():
        exchange = getattr(module, "_exchange", None)
        if isinstance(exchange, TensorParallel) and exchange.group.size > 1:
            module._exchange = replace(exchange, overlap=overlap)  # type: ignore[assignment]


@checked
def set_check(model: nn.Module, check: bool = True) -> None:
    """Says whether the tensor-parallel layers of ``model`` compare what the ranks bring, from their next forward on.

    For debugging: dtype, sizes, row counts, recipe and needed gradients, before each call of a layer. If they do not
    fit together, each rank raises a ``ValueError`` that names the layer, the collective and what every rank brought. It
    costs a few small transfers and waits of the host for each, and compiled code has to do without. All ranks must say
    the same.
    """
    for module in model.modules():
        exchange = getattr(module, "_exchange", None)
        if isinstance(exchange, TensorParallel) and exchange.group.size > 1:
            module._exchange = replace(exchange, check=check)  # type: ignore[assignment]


class _Replicated(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, exchange: TensorParallel) -> Tensor:
        ctx.exchange = exchange
        return parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.start_sum_of_rows(gradient.clone()).wait(), None
