"""A weight whose rows are sharded: its cast, its gather, and where its gradient goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat.comm.collectives import Pending, start_all_reduce, start_reduce_scatter_rows
from minifloat.comm.gather import start_gather, start_gather_alike
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import IDENTITY, ROWWISE
from minifloat.functional.etp.lane import Key, Lane, Step, capturing, lane_of
from minifloat.functional.etp.rows import Cast, Owner, Parts, Sharding, Wanted, cast_together, versions
from minifloat.functional.grouped_weight import SeparateOperands
from minifloat.functional.weight_gradient import Product, accumulated, computed
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.tensor.steps import count_steps

_numbers = itertools.count()


class EtpWeight:
    """The weight of a layer: one matrix [N, K], or those of all experts [G, N, K], gathered together.

    Rows are cast when they are first used after a write, together with those of all weights that the last pass over
    the model used: one all-reduce of amaxes and one launch a phase in each step. A graph casts those of its module.

    ``collected``: where a graph is captured, the gradients of parameters that it gives to autograd; else None.
    """

    def __init__(self, owner: Owner, sharding: Sharding) -> None:
        self.owner, self.sharding = owner, sharding
        self.lane = lane_of(sharding.group)
        self.number = next(_numbers)
        self.casts = 0
        self.successors: dict[tuple[Key | None, Key], Step] = {}
        self._cast: Cast | None = None
        self._leaf: Tensor | None = None
        self.collected: dict[Tensor, Tensor] | None = None

    # ---- the cast ----

    def cast(
        self,
        quantizer: Quantizer,
        dtype: torch.dtype,
        *,
        first: bool | None = None,
        scales: Sequence[Tensor | None] | None = None,
    ) -> list[Quantized]:
        """This rank's rows as ``quantizer`` casts those of all ranks; a collective if they have changed.

        Args:
            dtype: of values that are not quantized.
            first: True: they may have changed in a way that PyTorch does not see; False: not even delayed scaling's
                new scale changes what they are cast to.
            scales: delayed scaling's that a recomputation reads in place of the layer's; what they give is not kept.
        """
        known, unseen = self._cast, first is True and not self.lane.renewed(self)
        in_graph = self.lane.in_graph
        anew = capturing() if in_graph is None else self in in_graph
        if known is not None and known.dtype == dtype and _formats(known.quantizer) == _formats(quantizer):
            fits = known.quantizer.rowwise >= quantizer.rowwise and known.quantizer.columnwise >= quantizer.columnwise
            current = self._is_current(known, scales=first is not False)
            if fits and current and not unseen and scales is None and not anew:
                return known.parts
            rowwise = quantizer.rowwise or known.quantizer.rowwise
            quantizer = quantizer.with_usage(
                rowwise=rowwise, columnwise=quantizer.columnwise or known.quantizer.columnwise
            )
        others: list[EtpWeight] = []
        if scales is None and in_graph is not None:
            others = [each for each in in_graph if each is not self and isinstance(each, EtpWeight) and each._cast]
        elif scales is None:
            used = [each for each in self.lane.used_with(self) if isinstance(each, EtpWeight)]
            begins = unseen and not self.lane.has_renewed()
            others = [each for each in used if each._cast is not None and (begins or not each._is_current(each._cast))]
            if begins:
                self.lane.renew(others)
        wanted = [Wanted(self.owner, self.sharding, quantizer, dtype)]
        wanted += [Wanted(each.owner, each.sharding, *each._cast[:2]) for each in others if each._cast is not None]
        for each, made in zip([self, *others], cast_together(wanted, scales), strict=True):
            count_steps(made.parameters)
            each._cast, each.casts = made, each.casts + 1
            if in_graph is not None:
                in_graph.pop(each, None)
        assert self._cast is not None
        return self._cast.parts

    def parts(self, values: bool = False) -> Parts | None:
        """As of :class:`~minifloat.functional.etp.lane.Source`."""
        known = self._cast
        if known is None or not self._is_current(known):
            return None
        return self._values() if values else Parts(known.parts, known.shards)

    def forget(self) -> None:
        """Rows may have changed in a way that PyTorch does not see."""
        self._cast = self._cast and self._cast._replace(parts=[])

    def _is_current(self, cast: Cast, scales: bool = True) -> bool:
        """It is what casting the rows now would give; ``scales``: delayed scaling's have to be the same."""
        parameters = self.owner._etp_parameters()
        same = cast.parts and all(mine is theirs for mine, theirs in zip(cast.parameters, parameters, strict=True))
        if not same or cast.versions != versions(parameters) or cast.scale_versions is None:
            return False
        return not scales or cast.scale_versions == versions(self.owner._etp_scales())

    # ---- the gather ----

    def start(self, dim: int, parts: Parts) -> Pending[list[Quantized]]:
        """As of :class:`~minifloat.functional.etp.lane.Source`."""
        (matrices, shards), group, rowwise = parts, self.sharding.group, dim == ROWWISE
        if self.sharding.matrices == 1:
            return start_gather(matrices, shards, group, rowwise=rowwise, columnwise=not rowwise, gemm_ready=True)
        pending = start_gather_alike([each.along(dim) for each in matrices], shards, group)
        return Pending([], lambda: [Quantized(x, None) if rowwise else Quantized(None, x) for x in pending.wait()])

    def nbytes(self, dim: int, parts: Parts) -> int:
        """As of :class:`~minifloat.functional.etp.lane.Source`."""
        own = [each.along(dim) for each in parts.matrices]
        counts = [parts.shards.gather_bytes(x.format, x.dim, x.shape[1], x.codes.itemsize) for x in own]
        return self.sharding.group.size * sum(counts)

    def forward(self) -> Quantized:
        """The weight for fprop, gathered from what :meth:`cast` gave last."""
        assert self._cast is not None
        parts = Parts(self._cast.parts, self._cast.shards)
        return self.owner._etp_join(self.lane.take(self, ROWWISE, parts, self.casts))

    @property
    def latest(self) -> tuple[int, ShardMap]:
        """The number of the latest cast, and the rows of each rank in it: what a backward has to know of it."""
        assert self._cast is not None
        return self.casts, self._cast.shards

    def saved(self, dim: int) -> Any:
        """This rank's part of the operand for ``dim``, likewise."""
        assert self._cast is not None
        return self.owner._etp_part(self._cast.parts).along(dim)

    def values(self) -> Any:
        """The same in high precision."""
        return self.owner._etp_part(self._values().matrices).along(ROWWISE)

    def _values(self) -> Parts:
        rows = self.owner._etp_rows()
        shape = rows[0].shape[0], rows[0].shape[1]
        own = [Quantized(Operand(each, None, None, IDENTITY, ROWWISE, shape, each.dtype), None) for each in rows]
        return Parts(own, self.sharding.shards)

    def backward(self, dim: int, part: Any, cast: tuple[int, ShardMap], *, values: bool = False) -> Any:
        """The operand that ``part`` is this rank's part of, which :meth:`saved` or :meth:`values` gave after a cast.

        ``cast``: what was the :attr:`latest` then.
        """
        number, shards = cast
        own = [Quantized(each, None) if each.dim == ROWWISE else Quantized(None, each) for each in split(part)]
        parts = Parts(own, self.sharding.shards if values else shards)
        return self.owner._etp_join(self.lane.take(self, dim, parts, number, values=values)).along(dim)

    # ---- the gradient ----

    def leaf(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """What stands in for W in autograd, which comes to it in each backward after all nodes that use W."""
        trained = any(each.requires_grad for each in self.owner._etp_parameters())
        known = self._leaf
        kind = torch.Size(shape), like.dtype, like.device, trained
        if known is not None and (known.shape, known.dtype, known.device, known.requires_grad) == kind:
            return known
        with torch.inference_mode(False):
            leaf = torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(tuple(shape))
            if trained:
                leaf.requires_grad_().register_hook(lambda gradient: self.lane.complete(self))
        self._leaf = leaf
        return leaf

    @property
    def trained_leaf(self) -> Tensor | None:
        """What stood in for W in the latest forward; None if there is no gradient of it."""
        return self._leaf if self._leaf is not None and self._leaf.requires_grad else None

    def reduce(self, product: Product, sink: Callable[..., object], main_grad: bool, delayed: bool) -> None:
        """Gives this rank's rows of the reduced gradient to ``sink``, once later work has been started.

        It is computed, sent and summed in the dtype of what it is added to. Of a weight that is used several times in
        a backward ``sink`` is given the sum, as hooks of autograd are.

        Args:
            product: computes dW [N, K] or [G, N, K].
            sink: is called for each parameter, with a product that gives the gradient.
            main_grad: it adds to ``parameter.main_grad``, not to ``parameter.grad``.
            delayed: it is computed after the backward, and added for each use.
        """
        group, shards = self.sharding.group, self.sharding.shards
        wanted = next((each for each in self.owner._etp_parameters() if each.requires_grad), None)
        if wanted is None:  # all were frozen after the forward: they get no gradient, as from autograd
            return
        dtype = wanted.main_grad.dtype if main_grad else wanted.dtype
        send = _send_buffer(wanted, self.sharding.matrices, dtype, product, shards)
        pending = start_reduce_scatter_rows(send, ShardMap.even(send.shape[0] // group.size, group.size), group)
        if self.collected is not None and not main_grad:
            sink = partial(_collect, self.collected)
        gradient = self.lane.gradient(self, partial(self._finish, sink), delayed)
        gradient.awaited += 1
        add = gradient.add
        for ranks in reversed(self.sharding.replicas):
            add = partial(_reduce_further, self.lane, ranks, add)
        self.lane.reduce(pending, add)

    def _finish(self, sink: Callable[..., object], total: Tensor) -> None:
        group, shards = self.sharding.group, self.sharding.shards
        if self.sharding.reduction == "mean":
            total.div_(self.sharding.data_ranks)
        each = total.view(self.sharding.matrices, shards.largest, total.shape[1])[:, : shards.rows[group.rank]]
        for parameter, own in self.owner._etp_gradients(each):
            if parameter.requires_grad:
                sink(parameter, partial(computed, own))
                if self.collected is None:
                    accumulated(parameter)


def _reduce_further(lane: Lane, ranks: Group, finish: Callable[[Tensor], None], total: Tensor) -> None:
    lane.reduce_further(start_all_reduce(total, ranks), finish)


def _collect(collected: dict[Tensor, Tensor], parameter: Tensor, product: Product) -> None:
    """Adds to the gradients that a graph gives to autograd."""
    own, known = product(parameter.dtype), collected.get(parameter)
    collected[parameter] = own if known is None else known + own


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


def _formats(quantizer: Quantizer) -> Quantizer:
    """Equal for quantizers that differ in nothing but the orientations that are wanted."""
    return quantizer.with_usage(rowwise=True, columnwise=True)


def stand_in(weight: EtpWeight, shape: Sequence[int], like: Tensor) -> Tensor:
    """What an autograd function gets for W: a tensor of its shape, dtype and device that has no memory of its own.

    The gradient of the parameters goes past autograd, which would call their hooks without one. Nothing reads its
    values, NaN.
    """
    leaf = weight.leaf(shape, like)
    whole = leaf.view_as(leaf)
    whole.etp = weight  # type: ignore[attr-defined]
    whole.made_of = weight.owner._etp_parameters()  # type: ignore[attr-defined]
    return whole


def split(part: Any) -> list[Operand]:
    """The operands of single matrices; ``part``: of one, or of those of experts."""
    return part.split() if isinstance(part, SeparateOperands) else [part]
