"""Tensor and sequence parallelism of one linear: what its ranks tell each other, as a value that a call carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from minifloat.arguments import checked
from minifloat.comm import collectives, symmetric_memory
from minifloat.comm.checks import Check, check_call, check_sharded
from minifloat.comm.collectives import Pending
from minifloat.comm.gather import start_gather
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.autograd import apply, first_order
from minifloat.functional.gathered import Gathered, GatheredByProduct, multiplied, only, prepare_shard
from minifloat.functional.gemm import WeightGemm
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix

T = TypeVar("T")
Mode = Literal["column", "row"]
Overlap = Literal["handles", "symmetric_memory"]
"""What runs while rows are communicated: other work, between two handles, or the product that reads or writes them."""


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
        overlap: under sequence parallelism: what hides the gathers and sums. ``"symmetric_memory"`` is for products
            that :mod:`~minifloat.comm.symmetric_memory` has; others use handles.
        lengths: of a call under sequence parallelism: how much of dim 0 of X (column) or Y (row) each rank has.
        shards: the same in rows of the matrix [M, K].
        check: before each collective of a layer, ranks compare what they bring to it, and raise on each of them if that
            does not fit together: for debugging. Of a call it is the label of the layer.
    """

    mode: Mode | None = None
    sequence_parallel: bool = False
    group: Group = Group()  # noqa: RUF009 - immutable
    overlap: Overlap = "handles"
    lengths: tuple[int, ...] = ()
    shards: ShardMap | None = None
    check: Check = False
    regrouped: bool = False

    def over(self, group: Group) -> TensorParallel:
        """The same over other ranks."""
        return replace(self, group=group, regrouped=True)

    def of_call(
        self, shape: Sequence[int], lengths: Sequence[int] | None, label: str, dtype: torch.dtype | None = None
    ) -> TensorParallel:
        """With the rows of a call whose X, on this rank, has ``shape``; see :meth:`Linear.forward`.

        ``dtype``: of X, which ranks compare too. Where they compare, this comes before whatever one could raise alone.

        Raises:
            ValueError: naming ``label``, where the numbers do not fit.
        """
        if self.check and self.group.size > 1:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"{label}: set_check(model) lets ranks compare what they bring, which no graph does; "
                    "set_check(model, False), or leave the layer out with torch.compiler.disable"
                )
            check_call(label, self._first_collective, shape, dtype, lengths, self.gathers_input, self.group)
        if not self.sequence_parallel:
            if lengths is not None and (self.mode is not None or tuple(lengths) != tuple(shape[:1])):
                raise ValueError(f"{label}: rows_per_rank={list(lengths)} is for sequence_parallel=True only")
            return replace(self, check=label) if self.check else self
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
        check = label if self.check else False
        return TensorParallel(self.mode, True, self.group, self.overlap, tuple(lengths), shards, check)

    @property
    def gathers_input(self) -> bool:
        """fprop and wgrad read the X of all ranks."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def gathers_grad_output(self) -> bool:
        """dgrad and wgrad read the dY of all ranks."""
        return self.sequence_parallel and self.mode == "row"

    @property
    def _first_collective(self) -> str:
        """What the sizes of X on the ranks matter to first."""
        if self.mode == "row":
            return "reduce_scatter_rows of Y" if self.sequence_parallel else "all_reduce of Y"
        return "gather of X" if self.sequence_parallel else "all_reduce of dX"

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
        if self.check:
            check_sharded("quantize_shard", as_matrix(x), self.shards, self.group, self.check)
        return prepare_shard(x, quantizer, self.shards, self.group, amaxes=amaxes, scale=scale)

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
            start_gather([part], self.shards, self.group, rowwise=r, columnwise=c, gemm_ready=True, check=self.check)
            for r, c in (wanted[1:] if by_product else wanted)
        ]
        if by_product:
            return GatheredByProduct(part.along(ROWWISE), self.shards, self.group, wanted[0][1], pending)
        return Gathered(pending)

    def _carries(self, a: Operand) -> bool:
        """Rows of ``a``, or of its product, are communicated through symmetric memory."""
        if self.overlap != "symmetric_memory" or self.check or self.shards is None:
            return False
        return symmetric_memory.carries(a, self.shards, self.group)

    # ---- what is multiplied and summed ----

    def output(self, product: WeightGemm, x: Quantized | Gathered, bias: Tensor | None) -> Tensor:
        """Y of a linear, from fprop without its bias: a sum over ranks takes that once, at its end."""
        if self.mode != "row":
            return multiplied(product._replace(bias=bias), x)
        y = self._start_summed(product, only(x, ROWWISE)).wait()
        return y if bias is None else (y + bias).to(y.dtype)

    def start_grad_input(self, product: WeightGemm, dy: Quantized | Gathered, wgrad_follows: bool) -> Pending[Tensor]:
        """dX of a linear, from dgrad; a sum over ranks begins, and may be in the memory of this rank's addend.

        A column-parallel backward communicates X and dX: the sum of dX goes on during wgrad where that follows, else
        during dgrad.
        """
        if self.mode != "column":
            return done(multiplied(product, dy))
        if wgrad_follows:
            return self._start_sum(multiplied(product, dy))
        return self._start_summed(product, only(dy, ROWWISE))

    def reduce_output(self, y: Tensor) -> Tensor:
        """The sum over ranks of what a row-parallel layer computed without a product, in whose memory it may be."""
        return self._start_sum(y).wait() if self.mode == "row" else y

    def start_sum_of_rows(self, gradient: Tensor | None) -> Pending[Tensor | None]:
        """Begins to sum the gradient, if it is needed, of a parameter that all ranks have, each for its own rows."""
        if gradient is None or not self.sequence_parallel:
            return done(gradient)
        return Pending([], collectives.start_all_reduce(gradient, self.group, check=self.check).wait)

    def replicated(self, parameter: Tensor) -> Tensor:
        """``parameter``, which all ranks have and each uses for its own rows, with the gradient of all of them."""
        return apply(_Replicated, parameter, self) if self.sequence_parallel else parameter

    def _start_summed(self, product: WeightGemm, a: Quantized) -> Pending[Tensor]:
        """The sum of the ranks' products, whose addends may be sent while the product is computed."""
        gemm, _, out_dtype, fast_accum, bias, _ = product
        if self._carries(a.any) and symmetric_memory.multiplies(a.any, w := product.operand, bias, out_dtype):
            summed = symmetric_memory.multiply_and_sum(
                gemm, a.any, w, self.group, out_dtype=out_dtype, fast_accum=fast_accum
            )
            return done(summed)
        return self._start_sum(product.of(a))

    def _start_sum(self, x: Tensor) -> Pending[Tensor]:
        if not self.sequence_parallel:
            return collectives.start_all_reduce(x, self.group, check=self.check)
        assert self.shards is not None
        return collectives.start_reduce_scatter_rows(x, self.shards, self.group, check=self.check)


UNSHARDED = TensorParallel()
"""One rank does it all."""


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
        parallel = getattr(module, "_parallel", None)
        if isinstance(parallel, TensorParallel) and parallel.group.size > 1:
            module._parallel = replace(parallel, overlap=overlap)  # type: ignore[assignment]


@checked
def set_check(model: nn.Module, check: bool = True) -> None:
    """Says whether the tensor-parallel layers of ``model`` compare what the ranks bring, from their next forward on.

    For debugging: dtype, sizes and row counts, before a call of a layer and before each collective in it, forward and
    backward. If they do not fit together, each rank raises a ``ValueError`` that names the layer, the collective and
    what every rank brought. It costs a few small transfers and waits of the host for each, and compiled code has to do
    without. All ranks must say the same.
    """
    for module in model.modules():
        for holder in (module, *module._forward_pre_hooks.values()):
            parallel = getattr(holder, "_parallel", None)
            if isinstance(parallel, TensorParallel) and parallel.group.size > 1:
                setattr(holder, "_parallel", replace(parallel, check=check))  # noqa: B010 - hooks have any type


def done(x: T) -> Pending[T]:
    """A handle of a result that is there already."""
    return Pending([], lambda: x)


class _Replicated(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, parallel: TensorParallel) -> Tensor:
        ctx.parallel = parallel
        return parameter.view_as(parameter)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.start_sum_of_rows(gradient.clone()).wait(), None
