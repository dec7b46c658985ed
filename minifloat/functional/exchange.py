"""Moves activations between the ranks of a linear: one class for each way to split it.

All communicate in the dtype of the activations. What is gathered is quantized before, as the whole would be: ranks
agree on amaxes and exchange what blocks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from minifloat.autocast import DelayedCall
from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.quantize import Mode, cast_with, delayed_scale, record_all, reuse, values_of
from minifloat.functional.spec import Given, Spec
from minifloat.functional.tensor_parallel import (
    Gathered,
    TensorParallel,
    one_orientation,
    prepare_shard,
)
from minifloat.functional.weight_source import WeightSource
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.rows import row_unit

Inputs = tuple[Any, Quantized, Quantized]
"""X as fprop reads it, W, and this rank's X."""


class KnownOfX(NamedTuple):
    """Facts about X that its cast would find out, where they are known, and ``label``, which changes its operands."""

    scale: Tensor | None = None
    amaxes: Amaxes | None = None
    label: Callable[[Quantized], Quantized] | None = None


UNKNOWN = KnownOfX()


def waited(x: Any) -> Any:
    """Waits for ``x`` if that is a sum over ranks under way."""
    return x.wait() if isinstance(x, Pending) else x


def high_precision(spec: Spec, weight: Tensor) -> Tensor:
    """The values of a weight that its cast reads; one that stays unquantized comes in the dtype of the products."""
    if isinstance(weight, QuantizedTensor):
        return weight.dequantize()
    return weight if spec.casts_w else weight.to(spec.options.dtype)


class Exchange(TensorParallel):
    """Casts and products of a linear, and its communication, of which there is none here: one rank has all of it.

    ========  ==========  =======================================
    X         [M, K]
    W         [N, K]
    Y         [M, N]      fprop Y = X W^T + b
    dX        [M, K]      dgrad dX = dY W
    dW        [N, K]      wgrad dW = dY^T X; db = the sum of dY's rows
    ========  ==========  =======================================
    """

    memory: ClassVar[Any] = ()
    """Tensors beside X, W, Y and their gradients that passes read or write; None: they communicate."""

    def output_shape(self, shape: Sequence[int], features: int) -> tuple[int, ...]:
        """Shape of Y on this rank, from that of X."""
        return (*shape[:-1], features)

    def values(self, x: Any) -> Any:
        """X, or dY, in high precision as an operand."""
        return values_of(x)

    # ---- forward ----

    def quantize_inputs(
        self, spec: Spec, source: WeightSource, given: Given, x: Tensor | None, weight: Tensor,
        known: KnownOfX = UNKNOWN,
    ) -> Inputs:  # fmt: skip
        """X and W in the orientations that forward and backward read, those not ``given`` in one launch a phase.

        ``x``: None if its operands exist.
        """
        x_operands, w = given.x, source.operands(given.w)
        if w is None and (isinstance(weight, QuantizedTensor) or not spec.casts_w):
            weight = high_precision(spec, weight)
        if x_operands is None:
            assert x is not None
            x = x.dequantize() if isinstance(x, QuantizedTensor) else x
            scale, amaxes, label = known
            if w is None:  # whose amaxes are found
                cast, both = spec.casts.both, None if amaxes is None else (amaxes, None)
                if given.delayed is None and cast.casts is not None:
                    x_operands, w = cast.casts((x, weight), both)
                else:
                    x_operands, w = cast((x, weight), given.delayed, scale, both)
            else:
                (x_operands,) = spec.casts.x((x,), given.delayed, scale, None if amaxes is None else (amaxes,))
            x_operands = x_operands if label is None else label(x_operands)
        elif w is None:
            (w,) = spec.casts.w((weight,), given.delayed)
        return x_operands, w, x_operands

    def fprop(self, spec: Spec, x: Any, w: Quantized, bias: Tensor | None) -> Tensor:
        """Y [M, N], summed over the ranks."""
        x_rows, w_rows = x.rowwise or x.along(ROWWISE), w.rowwise or w.along(ROWWISE)
        return spec.multiply_rows("fprop", x_rows, w_rows, spec.options.dtype, bias, spec.config.fast_fprop)

    # ---- backward ----

    def bias_gradient(self, spec: Spec, dy: Tensor) -> Any:
        """Computes db [N], summed over the ranks; the sum may go on."""
        return as_matrix(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy).sum(0)

    def quantize_dy(
        self, spec: Spec, dy: Tensor, delayed_call: DelayedCall | None, amaxes: Amaxes | None = None
    ) -> Any:
        """Casts dY for dgrad and wgrad, unless it comes quantized alike, or an override wants its values."""
        if spec.override is not None:
            return Quantized(self.values(dy), None)
        if isinstance(dy, QuantizedTensor):
            existing = reuse(dy, spec.dy)
            if existing is not None:
                return existing
            dy = dy.dequantize()
        cast, given = spec.casts.dy, None if amaxes is None else (amaxes,)
        if delayed_call is None and cast.casts is not None:
            return cast.casts((dy,), given)[0]
        return cast((dy,), delayed_call, None, given)[0]

    def load_x(self, spec: Spec, x: Operand, scale: Tensor | None) -> Any:
        """Makes wgrad's operand of the saved X; a value is cast with delayed scaling's ``scale``, and not recorded."""
        return x if spec.again is None else cast_with(x.codes, spec.again, scale).along(COLUMNWISE)

    def dgrad(self, spec: Spec, dy: Any, w: Operand) -> Any:
        """Computes dX [M, K], summed over the ranks; the sum may go on during wgrad."""
        dy_rows = dy.rowwise or dy.along(ROWWISE)
        return spec.multiply("dgrad", dy_rows, w, spec.options.dtype, None, spec.config.fast_dgrad)

    def wgrad(
        self, spec: Spec, dy: Operand, x: Any, dtype: torch.dtype, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """Computes dW [N, K]; to ``out``, or added to it."""
        x = self.dequantized(x) if spec.override == "dequantized" else x
        return spec.multiply("wgrad", dy, x, dtype, None, spec.config.fast_wgrad, out, accumulate)

    def dequantized(self, operand: Any) -> Any:
        """The values of an operand, for a backward in high precision that has saved codes."""
        return values_of(operand.dequantize(), operand.offsets)


LOCAL = Exchange()


class _Split(Exchange):
    """A linear that ranks share."""

    def _quantize_part(
        self, spec: Spec, x: Tensor, quantizer: Quantizer, kind: str, delayed_call: DelayedCall | None,
        scale: Tensor | None = None, amaxes: Amaxes | None = None,
    ) -> Quantized:  # fmt: skip
        """Casts this rank's rows for a gather; delayed scaling records their own amax: ranks agree at the update."""
        assert self.shards is not None
        scale = delayed_scale(delayed_call, kind) if scale is None else scale
        part = prepare_shard(x, quantizer, self.shards, self.group, amaxes=amaxes, scale=scale)
        if delayed_call is not None:
            record_all(delayed_call, [kind], [part])
        if spec.seen is not None and self.shards.aligned(row_unit(quantizer)):
            spec.seen(kind, x, part)
        return part


class Column(_Split):
    """Each rank has some of the rows of W and b, and of the columns of Y.

    =========  ==========  =======================================
    X          [M, K]      the same on all ranks
    w_shard_n  [N/p, K]
    y_shard_n  [M, N/p]    fprop y_shard_n = X w_shard_n^T + b_shard_n
    dX         [M, K]      dgrad dX = all_reduce(dy_shard_n w_shard_n), the sum over n
    dw_shard_n [N/p, K]    wgrad dw_shard_n = dy_shard_n^T X
    =========  ==========  =======================================
    """

    mode = "column"

    def dgrad(self, spec: Spec, dy: Any, w: Operand) -> Pending[Tensor]:
        """The sum goes on during wgrad."""
        return self.start_sum(super().dgrad(spec, dy, w))


class Row(_Split):
    """Each rank has some of the columns of W and of X; b is whole on each.

    =========  ==========  =======================================
    x_shard_k  [M, K/p]
    w_shard_k  [N, K/p]
    Y          [M, N]      fprop Y = all_reduce(x_shard_k w_shard_k^T) + b, the sum over k
    dx_shard_k [M, K/p]    dgrad dx_shard_k = dY w_shard_k
    dw_shard_k [N, K/p]    wgrad dw_shard_k = dY^T x_shard_k
    =========  ==========  =======================================
    """

    mode = "row"

    def fprop(self, spec: Spec, x: Any, w: Quantized, bias: Tensor | None) -> Tensor:
        y = self.start_sum(super().fprop(spec, x, w, None)).wait()
        return y if bias is None else (y + bias).to(y.dtype)


class ColumnSequence(Column):
    """:class:`Column` whose X and dX are split by rows.

    =========  ==========  =======================================
    x_shard_m  [m, K]      X = gather(x_shard_m), as codes, for fprop and again for wgrad
    y_shard_n  [M, N/p]    fprop y_shard_n = X w_shard_n^T + b_shard_n
    dx_shard_m [m, K]      dgrad dx_shard_m = reduce_scatter(dy_shard_n w_shard_n)
    dw_shard_n [N/p, K]    wgrad dw_shard_n = dy_shard_n^T X
    =========  ==========  =======================================
    """

    sequence_parallel = gathers_x = True

    def output_shape(self, shape: Sequence[int], features: int) -> tuple[int, ...]:
        return (sum(self.lengths), *shape[1:-1], features)

    def quantize_inputs(
        self, spec: Spec, source: WeightSource, given: Given, x: Tensor | None, weight: Tensor,
        known: KnownOfX = UNKNOWN,
    ) -> Inputs:  # fmt: skip
        """X is gathered while the weight is cast."""
        part, w = given.x, source.operands(given.w)
        if part is None:
            assert x is not None
            part = self._quantize_part(spec, x, spec.x, "input", given.delayed, known.scale, known.amaxes)
            part = part if known.label is None else known.label(part)
        gathered = self.gather(part, rowwise=True)
        if w is None:
            (w,) = spec.casts.w((high_precision(spec, weight),), given.delayed)
        return gathered, w, part

    def load_x(self, spec: Spec, x: Operand, scale: Tensor | None) -> Gathered:
        """The X of all ranks, whose gather begins."""
        if spec.again is not None:
            x = self._quantize_part(spec, x.codes, spec.again, "input", None, scale).along(COLUMNWISE)
        rowwise = spec.along == ROWWISE
        return self.gather(one_orientation(x), rowwise=rowwise, columnwise=not rowwise)

    def wgrad(
        self, spec: Spec, dy: Operand, x: Any, dtype: torch.dtype, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        return super().wgrad(spec, dy, x.along(spec.along), dtype, out, accumulate)


class RowSequence(Row):
    """:class:`Row` whose Y and dY are split by rows.

    =========  ==========  =======================================
    x_shard_k  [M, K/p]
    y_shard_m  [m, N]      fprop y_shard_m = reduce_scatter(x_shard_k w_shard_k^T) + b
    dy_shard_m [m, N]      dY = gather(dy_shard_m), as codes, for dgrad and wgrad
    dx_shard_k [M, K/p]    dgrad dx_shard_k = dY w_shard_k
    dw_shard_k [N, K/p]    wgrad dw_shard_k = dY^T x_shard_k; db = all_reduce(the sum of dy_shard_m's rows)
    =========  ==========  =======================================
    """

    sequence_parallel = True

    def output_shape(self, shape: Sequence[int], features: int) -> tuple[int, ...]:
        return (self.lengths[self.group.rank], *shape[1:-1], features)

    def bias_gradient(self, spec: Spec, dy: Tensor) -> Any:
        return self.start_sum_of_rows(super().bias_gradient(spec, dy))

    def quantize_dy(
        self, spec: Spec, dy: Tensor, delayed_call: DelayedCall | None, amaxes: Amaxes | None = None
    ) -> Gathered:
        """This rank's rows are cast, and those of all ranks gathered."""
        if spec.override is not None:
            part = Quantized(values_of(dy), None)
        else:
            part = self._quantize_part(spec, dy, spec.dy, "grad_output", delayed_call)
        return self.gather(part, rowwise=spec.options.needs_x, columnwise=spec.options.needs_w)


_EXCHANGES: dict[tuple[Mode, bool], type[_Split]] = {
    ("column", False): Column,
    ("row", False): Row,
    ("column", True): ColumnSequence,
    ("row", True): RowSequence,
}


def make_exchange(mode: Mode, sequence_parallel: bool, group: Group) -> Exchange:
    """Makes the exchange of a linear that ``group`` shares."""
    return _EXCHANGES[mode, sequence_parallel](group)


def in_mode(own: Exchange, mode: Mode) -> Exchange:
    """The exchange of the same ranks in another mode."""
    return make_exchange(mode, own.sequence_parallel, own.group)
