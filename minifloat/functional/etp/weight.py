"""A weight whose rows are sharded: its cast, its gather, and where its gradient goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from minifloat.comm.collectives import Pending, start_all_reduce, start_reduce_scatter_rows
from minifloat.comm.gather import start_gather
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.comm.sharded_cast import quantize_shards
from minifloat.formats import IDENTITY, ROWWISE
from minifloat.functional.etp.lane import Step, lane_of
from minifloat.functional.grouped_weight import SeparateOperands
from minifloat.functional.weight_gradient import Product, accumulated, computed
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor.rows import row_unit

Reduction = Literal["mean", "sum"]
"""Of the gradients of ranks that have different data."""


class Sharding(NamedTuple):
    """How the rows of a weight are shared out.

    Args:
        group: the ranks.
        shards: the rows of each, of a matrix [N, K]; those of all experts alike.
        reduction: what becomes of the gradients of all ranks.
        matrices: how many there are.
        replicas: ranks with other data that have the same rows; gradients are summed over them too, and averaged over
            both.
    """

    group: Group
    shards: ShardMap
    reduction: Reduction
    matrices: int = 1
    replicas: Group = Group()

    @property
    def own(self) -> slice:
        """This rank's rows, counted in the whole."""
        return slice(self.shards.first(self.group.rank), self.shards.end(self.group.rank))


class Owner(Protocol):
    """The layer of a weight: what it keeps of it on this rank."""

    def _etp_rows(self) -> list[Tensor]:
        """This rank's rows [n, K] of each matrix."""

    def _etp_parameters(self) -> list[Any]:
        """The parameters that have these rows."""

    def _etp_ready(self, quantizer: Quantizer) -> list[Quantized] | None:
        """This rank's part of each matrix where parameters are kept as ``quantizer`` gives them; else None."""

    def _etp_scales(self) -> list[Tensor | None]:
        """What delayed scaling casts each matrix with now, fp32 [1]; None under other recipes."""

    def _etp_join(self, matrices: Sequence[Quantized]) -> Quantized:
        """The operands of the weight from those of its matrices, as products read them."""

    def _etp_part(self, matrices: Sequence[Quantized]) -> Quantized:
        """The same of this rank's rows, which are saved: in the memory of the matrices."""

    def _etp_gradients(self, gradients: Tensor) -> Iterable[tuple[Any, Tensor]]:
        """The parameters with their gradients, from those of :meth:`_etp_rows`, [matrices, n, K]."""


class Cast(NamedTuple):
    """This rank's rows of all matrices, as they were cast, and the parameters of then with counts of their writes.

    ``shards``: the rows of each rank; of parameters that are kept quantized whole blocks in both orientations.
    """

    quantizer: Quantizer
    dtype: torch.dtype
    parameters: list[Any]
    versions: tuple[int, ...]
    parts: list[Quantized]
    shards: ShardMap


class EtpWeight:
    """The weight of a layer: one matrix [N, K], or those of all experts [G, N, K], gathered together.

    Rows are cast when they are first used after a write, together with those of all weights that the last pass over
    the model used: one all-reduce of amaxes and one launch a phase in each step.
    """

    def __init__(self, owner: Owner, sharding: Sharding) -> None:
        self.owner, self.sharding = owner, sharding
        self.lane = lane_of(sharding.group)
        self.successors: dict[tuple[Step | None, Step], Step] = {}
        self._cast: Cast | None = None

    # ---- the cast ----

    def cast(self, quantizer: Quantizer, dtype: torch.dtype, *, again: bool = False) -> list[Quantized]:
        """This rank's rows as ``quantizer`` casts those of all ranks; a collective if they have changed.

        Args:
            dtype: of values that are not quantized.
            again: whether or not PyTorch has seen them change.
        """
        known = self._cast
        if known is not None and known.dtype == dtype and _formats(known.quantizer) == _formats(quantizer):
            fits = known.quantizer.rowwise >= quantizer.rowwise and known.quantizer.columnwise >= quantizer.columnwise
            if fits and not again and not _capturing() and self._is_current(known):
                return known.parts
            rowwise = quantizer.rowwise or known.quantizer.rowwise
            quantizer = quantizer.with_usage(
                rowwise=rowwise, columnwise=quantizer.columnwise or known.quantizer.columnwise
            )
        self._cast = Cast(quantizer, dtype, [], (), [], self.sharding.shards)
        stale = [self] + [
            each
            for each in self.lane.used()
            if isinstance(each, EtpWeight) and each is not self and each._cast is not None and each.parts() is None
        ]
        _cast_together(stale)
        assert self._cast is not None
        return self._cast.parts

    def parts(self) -> list[Quantized] | None:
        """As of :class:`~minifloat.functional.etp.lane.Source`."""
        known = self._cast
        return known.parts if known is not None and known.parts and self._is_current(known) else None

    def forget(self) -> None:
        """Rows may have changed in a way that PyTorch does not see."""
        self._cast = None

    def _versions(self) -> tuple[int, ...]:
        scales = [scale for scale in self.owner._etp_scales() if scale is not None]
        tensors = *self.owner._etp_parameters(), *scales
        return tuple([0 if each.is_inference() else each._version for each in tensors])

    def _is_current(self, cast: Cast) -> bool:
        """It is what casting the rows now would give."""
        parameters = self.owner._etp_parameters()
        same = all(mine is theirs for mine, theirs in zip(cast.parameters, parameters, strict=True))
        return same and cast.versions == self._versions()

    # ---- the gather ----

    def start(self, dim: int, parts: Sequence[Quantized]) -> Pending[list[Quantized]]:
        """As of :class:`~minifloat.functional.etp.lane.Source`."""
        assert self._cast is not None
        shards, group, rowwise = self._cast.shards, self.sharding.group, dim == ROWWISE
        single = self.sharding.matrices == 1  # others are put in their order as they are joined
        return start_gather(parts, shards, group, rowwise=rowwise, columnwise=not rowwise, gemm_ready=single)

    def nbytes(self, parts: Sequence[Quantized]) -> int:
        """As of :class:`~minifloat.functional.etp.lane.Source`; codes and scales."""
        held = [part.any for part in parts]
        tensors = [tensor for each in held for tensor in (each.codes, each.scale_inv) if tensor is not None]
        return self.sharding.group.size * sum(tensor.nbytes for tensor in tensors)

    def forward(self) -> Quantized:
        """The weight for fprop, gathered from what :meth:`cast` gave last."""
        assert self._cast is not None
        return self.owner._etp_join(self.lane.take(self, ROWWISE, self._cast.parts))

    def saved(self, dim: int) -> Any:
        """This rank's part of the operand for ``dim``, likewise."""
        assert self._cast is not None
        return self.owner._etp_part(self._cast.parts).along(dim)

    def values(self) -> Any:
        """The same in high precision."""
        rows = self.owner._etp_rows()
        shape = rows[0].shape[0], rows[0].shape[1]
        parts = [Quantized(Operand(own, None, None, IDENTITY, ROWWISE, shape, own.dtype), None) for own in rows]
        return self.owner._etp_part(parts).along(ROWWISE)

    def backward(self, dim: int, part: Any) -> Any:
        """The operand that ``part`` is this rank's part of."""
        parts = [Quantized(each, None) if each.dim == ROWWISE else Quantized(None, each) for each in split(part)]
        return self.owner._etp_join(self.lane.take(self, dim, parts, saved=True)).along(dim)

    # ---- the gradient ----

    def reduce(self, product: Product, sink: Callable[..., object], main_grad: bool) -> None:
        """Gives this rank's rows of the reduced gradient to ``sink``, once later work has been started.

        It is computed, sent and summed in the dtype of what it is added to.

        Args:
            product: computes dW [N, K] or [G, N, K].
            sink: is called for each parameter, with a product that gives the gradient.
            main_grad: it adds to ``parameter.main_grad``, not to ``parameter.grad``.
        """
        group, shards = self.sharding.group, self.sharding.shards
        wanted = next(each for each in self.owner._etp_parameters() if each.requires_grad)
        dtype = wanted.main_grad.dtype if main_grad else wanted.dtype
        send = _send_buffer(wanted, self.sharding.matrices, dtype, product, shards)
        pending = start_reduce_scatter_rows(send, ShardMap.even(send.shape[0] // group.size, group.size), group)
        if self.sharding.replicas.size == 1:
            self.lane.reduce(pending, partial(self._finish, sink))
        else:
            self.lane.reduce(pending, partial(self._reduce_replicas, sink))

    def _reduce_replicas(self, sink: Callable[..., object], total: Tensor) -> None:
        self.lane.reduce(start_all_reduce(total, self.sharding.replicas), partial(self._finish, sink))

    def _finish(self, sink: Callable[..., object], total: Tensor) -> None:
        group, shards = self.sharding.group, self.sharding.shards
        if self.sharding.reduction == "mean":
            total.div_(group.size * self.sharding.replicas.size)
        each = total.view(self.sharding.matrices, shards.largest, total.shape[1])[:, : shards.rows[group.rank]]
        for parameter, own in self.owner._etp_gradients(each):
            if parameter.requires_grad:
                sink(parameter, partial(computed, own))
                accumulated(parameter)


def _send_buffer(like: Tensor, matrices: int, dtype: torch.dtype, product: Product, shards: ShardMap) -> Tensor:
    """dW as ranks are sent it: each rank's rows of every matrix, padded to the largest number; [size * ..., K]."""
    size, most, cols = shards.size, shards.largest, like.shape[-1]
    options: dict[str, Any] = {"dtype": dtype, "device": like.device}
    if matrices == 1:  # only the last ranks have fewer rows, so that the product writes what is sent
        send = torch.empty(size * most, cols, **options)
        send[shards.total :].zero_()
        product(dtype, send[: shards.total], False)
        return send
    send = (torch.empty if shards.is_even else torch.zeros)(size, matrices, most, cols, **options)
    dw = product(dtype)
    for rank, count in enumerate(shards.rows):
        send[rank, :, :count] = dw[:, shards.first(rank) : shards.end(rank)]
    return send.view(-1, cols)


def _cast_together(weights: Sequence[EtpWeight]) -> None:
    """Casts the rows of weights that one group shares; a collective."""
    xs: list[Tensor] = []
    quantizers: list[Quantizer] = []
    maps: list[ShardMap] = []
    scales: list[Tensor | None] = []
    ready = [each.owner._etp_ready(each._cast.quantizer) for each in weights if each._cast is not None]
    for each in [each for each, parts in zip(weights, ready, strict=True) if parts is None]:
        assert each._cast is not None
        rows, quantizer = each.owner._etp_rows(), each._cast.quantizer
        xs += rows if quantizer.quantized else [own.to(each._cast.dtype) for own in rows]
        quantizers += [quantizer] * len(rows)
        maps += [each.sharding.shards] * len(rows)
        scales += each.owner._etp_scales()
    with torch.no_grad():
        made = iter(quantize_shards(xs, quantizers, maps, weights[0].sharding.group, scales))
    for each, parts in zip(weights, ready, strict=True):
        assert each._cast is not None
        shards, own = each.sharding.shards, parts
        if own is None:
            own = [next(made) for _ in range(each.sharding.matrices)]
        else:
            shards = shards.whole_units(row_unit(each._cast.quantizer))
        parameters, versions = each.owner._etp_parameters(), each._versions()
        each._cast = each._cast._replace(parameters=parameters, versions=versions, parts=own, shards=shards)


def _formats(quantizer: Quantizer) -> Quantizer:
    """Equal for quantizers that differ in nothing but the orientations that are wanted."""
    return quantizer.with_usage(rowwise=True, columnwise=True)


def _capturing() -> bool:
    """A CUDA graph is being recorded: what it replays must cast the weights of then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def stand_in(weight: EtpWeight, shape: Sequence[int], like: Tensor) -> Tensor:
    """What an autograd function gets for W: a tensor of its shape, dtype and device that has no memory of its own.

    The gradient of the parameters goes past autograd, which would call their hooks without one. Nothing reads its
    values, NaN.
    """
    whole = torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(tuple(shape))
    whole.requires_grad_(any(each.requires_grad for each in weight.owner._etp_parameters()))
    whole.etp = weight  # type: ignore[attr-defined]
    whole.made_of = weight.owner._etp_parameters()  # type: ignore[attr-defined]
    return whole


def split(part: Any) -> list[Operand]:
    """The operands of single matrices; ``part``: of one, or of those of experts."""
    return part.split() if isinstance(part, SeparateOperands) else [part]
