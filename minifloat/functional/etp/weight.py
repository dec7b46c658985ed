"""A weight whose rows are sharded: its cast, its gather, and where its gradient goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from minifloat.arguments import label_of
from minifloat.autocast import surrounding_recipe
from minifloat.comm.collectives import Pending, averages, start_all_reduce, start_reduce_scatter_rows
from minifloat.comm.group import Group, ShardMap
from minifloat.comm.sharded_cast import start_gather, start_gather_alike
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional.autograd import apply, first_order, is_wanted
from minifloat.functional.etp.prefetch_queue import Key, Step, queue_of
from minifloat.functional.etp.rows import Cast, EtpRows, Parts, Sharding, cast_together
from minifloat.functional.grouped import SeparateOperands
from minifloat.functional.spec import Spec
from minifloat.functional.weight_source import Product, WeightSource, accumulated, computed, into_grad, into_main_grad
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer
from minifloat.recompute import capturing
from minifloat.tensor.base import count_steps, versions

_VALUES = Quantizer.identity().with_usage(columnwise=False)
_numbers = itertools.count()


class Saved(NamedTuple):
    """Rows of each rank that a backward gathers, of the cast of this number; ``cast`` repeats it."""

    number: int
    shards: ShardMap
    cast: Cast | None


class EtpWeight:
    """The weight of a layer: one matrix [N, K], or those of all experts [G, N, K], gathered together.

    Rows are cast when they are first used in a pass over the model, together with those of all weights that followed
    them in the last one: one all-reduce of amaxes and one launch a phase. Those of a layer that is told which
    microbatch is the first are kept for the others, unless PyTorch sees a write. A graph casts those of its module.

    Attributes:
        number: that no other has.
        casts: how many casts there have been, equal on all ranks.
        sums_after: how many short sums the latest backward waited for between its reduction and the next gather.
        following: the weight that was first used after this one in the latest pass.
        successors: what was gathered next, by what was gathered before it and what of it.
        leaf: what autograd saw in place of W in the latest forward.
    """

    def __init__(self, rows: EtpRows) -> None:
        self.rows = rows
        self.queue = queue_of(rows.sharding.group)
        self.number = next(_numbers)
        self.casts = 0
        self.sums_after = 0
        self.following: EtpWeight | None = None
        self.successors: dict[tuple[Key | None, Key], Step] = {}
        self.leaf: Tensor | None = None
        self._cast: Cast | None = None
        self._keeps_cast = False

    def __reduce__(self) -> tuple[type[EtpWeight], tuple[EtpRows]]:
        """Copies and pickles the rows alone."""
        return EtpWeight, (self.rows,)

    @property
    def sharding(self) -> Sharding:
        """The sharding of the rows."""
        return self.rows.sharding

    # ---- the cast ----

    def cast(
        self, quantizer: Quantizer, dtype: torch.dtype, *, first: bool | None = None,
        scales: Sequence[Tensor | None] | None = None,
    ) -> Sequence[Quantized]:  # fmt: skip
        """This rank's rows as ``quantizer`` casts those of all ranks; a collective if they have changed.

        Args:
            dtype: of values that are not quantized.
            first: they may have changed in a way that PyTorch does not see since: True: the latest call, None: the
                latest pass; False: not even delayed scaling's new scale changes what they are cast to.
            scales: delayed scaling's that a recomputation reads in place of the layer's; what they give is not kept.
        """
        queue = self.queue
        queue.begin_use(self)
        known, unseen = self._cast, first is not False and self not in (queue.recast_this_step if first else queue.cast)
        queue.recast_this_step.discard(self)
        self._keeps_cast = first is not None
        anew = unseen or scales is not None or (capturing() if queue.in_graph is None else self in queue.in_graph)
        if known is not None and known.dtype == dtype and known.quantizer.same_formats(quantizer):
            quantizer = quantizer.with_usage(
                rowwise=quantizer.rowwise or known.quantizer.rowwise,
                columnwise=quantizer.columnwise or known.quantizer.columnwise,
            )
            if quantizer == known.quantizer and not anew and self._is_current(known, scales=first is not False):
                return self._parts.matrices
        casts: dict[EtpWeight, tuple[EtpRows, Quantizer, torch.dtype]] = {self: (self.rows, quantizer, dtype)}
        for each in () if scales is not None else self._used_after() if queue.in_graph is None else queue.in_graph:
            layer, seen = each.rows.layer, each in queue.cast and not first
            latest, now = layer._configs.latest, layer.recipe or surrounding_recipe()  # "none" casts nothing
            theirs = each._cast if latest is not None and latest.recipe is now else None
            too = queue.in_graph is not None or (unseen and not seen)
            if theirs is not None and (too or not each._is_current(theirs)):
                casts.setdefault(each, (each.rows, *theirs[:2]))
        for each, made in zip(casts, cast_together(list(casts.values()), scales), strict=True):
            count_steps(made.parameters)
            each._cast, each.casts = made, each.casts + 1
            queue.cast.add(each)
            if queue.in_graph is not None:
                queue.in_graph.pop(each, None)
            elif unseen and each is not self:
                queue.recast_this_step.add(each)
        return self._parts.matrices

    def _used_after(self) -> list[EtpWeight]:
        """Lists what followed it in the latest pass, and is likely to in this one: alive, as this weight is."""
        found: dict[EtpWeight, None] = {}
        each = self.following
        while each is not None and each is not self and each not in found:
            found[each] = None
            each = each.following
        return list(found)

    def end_pass(self) -> None:
        """Frees what was cast, unless it is kept for further microbatches."""
        if not self._keeps_cast:
            self.forget()

    @property
    def _parts(self) -> Parts:
        cast = self._cast
        assert cast is not None and (cast.parts or cast.repeats), "the rows are cast before they are gathered"
        if cast.parts is None:
            parts = cast.repeat(self.rows, ROWWISE, COLUMNWISE)
            self._cast = cast = cast._replace(parts=parts)
        assert cast.parts is not None
        return cast.parts

    def parts(self, dim: int, values: bool = False) -> Parts | None:
        """This rank's rows as they were cast last, or their ``values``; None if the parameters have changed since."""
        cast = self._cast
        if cast is None or not self._is_current(cast, scales=not self._keeps_cast):
            return None
        return self._values() if values else cast.parts or cast.repeat(self.rows, dim)

    def forget(self) -> None:
        """Rows may have changed in a way that PyTorch does not see."""
        self._cast = self._cast and self._cast._replace(parts=None, repeats=[])

    def _is_current(self, cast: Cast, scales: bool = True) -> bool:
        """Whether casting the rows now would give it; ``scales``: delayed scaling's have to be the same."""
        if not (cast.parts or cast.repeats) or not self._is_same(cast) or cast.scale_versions is None:
            return False
        return not scales or cast.scale_versions == versions([s for s in self.rows.scales() if s is not None])

    def _is_same(self, cast: Cast) -> bool:
        """Whether the parameters are those that were cast, and PyTorch has seen no write to them."""
        parameters = self.rows.parameters()
        same = all(mine is theirs for mine, theirs in zip(cast.parameters, parameters, strict=True))
        return same and cast.versions == versions(parameters)

    # ---- the gather ----

    def start(self, dim: int, parts: Parts) -> Pending[list[Quantized]]:
        """Gathers ``parts``, for products that contract ``dim``."""
        self.queue.gathered += 1
        (matrices, shards), group, rowwise = parts, self.sharding.group, dim == ROWWISE
        if self.sharding.matrices == 1:
            return start_gather(matrices, shards, group, rowwise=rowwise, columnwise=not rowwise, gemm_ready=True)
        pending = start_gather_alike([each.along(dim) for each in matrices], shards, group)
        return Pending([], lambda: [_quantized(each, dim) for each in pending.wait()])

    def nbytes(self, dim: int, parts: Parts) -> int:
        """Counts the bytes of the operands that ``parts`` are gathered to, the same on all ranks."""
        own = parts.matrices[0].along(dim)
        sent = parts.shards.gather_bytes(own.format, own.dim, own.shape[1], own.codes.itemsize)
        return self.sharding.group.size * len(parts.matrices) * sent

    def forward(self) -> Quantized:
        """Gathers the weight for fprop from what :meth:`cast` gave last."""
        return self.rows.join(self.queue.take(self, ROWWISE, lambda: self._parts, self.casts))

    def saved(self, dim: int, *, values: bool = False) -> tuple[Any, Saved]:
        """This rank's part of the operand for ``dim``, or of the weight in high precision, and what it is of.

        Where rows are cast again for backward it has no codes.
        """
        parts, cast = self._values() if values else self._parts, self._cast
        if values or cast is None or not cast.repeats or self._keeps_cast:
            return self.rows.part(parts.matrices).along(dim), Saved(self.casts, parts.shards, None)
        self._cast = cast = cast._replace(parts=None)
        part = parts.matrices[0].along(dim)
        empty = Operand(part.codes.new_empty(0), None, None, part.format, dim, part.shape, part.dtype)
        return empty, Saved(self.casts, parts.shards, cast)

    def _values(self) -> Parts:
        values = self.rows.matrices()
        shape = values[0].shape[0], values[0].shape[1]
        own = [Quantized(Operand(each, None, None, IDENTITY, ROWWISE, shape, each.dtype), None) for each in values]
        return Parts(own, self.sharding.shards)

    def backward(self, dim: int, part: Any, of: Saved, *, values: bool = False) -> Any:
        """Gathers the operand of which ``part`` is this rank's; ``part``, ``of``: as :meth:`saved` gave them.

        Raises:
            ValueError: rows that are to be cast again have been written since the forward.
        """

        def own() -> Parts:
            if of.cast is not None:
                return of.cast.repeat(self.rows, dim)
            each = part.split() if isinstance(part, SeparateOperands) else [part]
            return Parts([_quantized(operand, operand.dim) for operand in each], of.shards)

        if of.cast is not None and not self._is_same(of.cast):
            raise ValueError(
                f"{label_of(self.rows.layer)}: the weight was written between a forward and its backward, which casts "
                "it again; write it after backward, or do without parallelize(recast=True)"
            )
        return self.rows.join(self.queue.take(self, dim, own, of.number, values=values)).along(dim)

    def full(self) -> Tensor:
        """Gathers the matrix [N, K], in the dtype of the parameter, whose gradient is that of its rows."""
        like = self.rows.parameters()[0]
        grad_anchor = self.grad_anchor((self.sharding.shards.total, like.shape[-1]))
        self.cast(_VALUES, like.dtype)
        full: Tensor = self.forward().along(ROWWISE).codes
        return apply(_Full, self, grad_anchor, full)

    # ---- the gradient ----

    def grad_anchor(self, shape: Sequence[int]) -> Tensor:
        """Returns what an autograd function gets for W: a tensor of its shape, dtype and device without its memory.

        The gradient of the parameters goes past autograd, which would call their hooks without one. Autograd comes to
        the leaf in each backward after all nodes that use W. Nothing reads its values, NaN.
        """
        self.rows.check()
        parameters, leaf = self.rows.parameters(), self.leaf
        like, trained = parameters[0], any(each.requires_grad for each in parameters)
        kind = torch.Size(shape), like.dtype, like.device, trained
        if leaf is None or (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) != kind:
            with torch.inference_mode(False):
                leaf = torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(tuple(shape))
                if trained:
                    leaf.requires_grad_().register_hook(lambda _: self._deliver(1 + len(self.sharding.replicas)))
            self.leaf = leaf
        # Those with hooks are left out: autograd would call them, without a gradient.
        seen = [each for each in parameters if not (each._backward_hooks or each._post_accumulate_grad_hooks)]
        return apply(_GradAnchor, self.rows.layer, leaf, *seen)

    def reduce(self, product: Product, sink: Callable[..., object], main_grad: bool, delayed: bool) -> None:
        """Gives this rank's rows of the reduced gradient to ``sink``, once later work has been started.

        It is computed, sent and summed in the dtype of what it is added to, or ``reduce_dtype``. Of a weight that is
        used several times in a backward ``sink`` is given the sum, as hooks of autograd are.

        Args:
            product: computes dW [N, K] or [G, N, K].
            sink: is called for each parameter, with a product that gives the gradient.
            main_grad: it adds to ``parameter.main_grad``, not to ``parameter.grad``.
            delayed: it is computed after the backward, and added for each use.
        """
        group, shards = self.sharding.group, self.sharding.shards
        wanted = next((each for each in self.rows.parameters() if each.requires_grad), None)
        if wanted is None:  # all were frozen after the forward: they get no gradient, as from autograd
            return
        dtype = self.sharding.reduce_dtype or (wanted.main_grad.dtype if main_grad else wanted.dtype)
        rows = self.sharding.matrices * shards.largest
        nbytes = group.size * rows * wanted.shape[-1] * dtype.itemsize
        self.queue.make_room(nbytes)
        send = _send_buffer(wanted, self.sharding.matrices, dtype, product, shards)
        groups = (group, *self.sharding.replicas)
        mean = self.sharding.reduction == "mean"
        divided = mean and averages(send, groups)
        start = partial(start_reduce_scatter_rows, send, ShardMap.even(rows, group.size), group, mean=divided)
        if self.queue.collected is not None and not main_grad:
            sink = partial(_collect, self.queue.collected)
        divisor = self.sharding.summed * (1 if divided else math.prod([each.size for each in groups]))
        give = partial(self._give, sink, divisor if mean else 1)
        finish = give if delayed else partial(self._add, give)
        for ranks in reversed(self.sharding.replicas):
            finish = partial(self._reduce_further, ranks, divided, finish)
        self.queue.reduce(self, start, finish, nbytes)

    def _reduce_further(self, ranks: Group, mean: bool, finish: Callable[[Tensor], None], total: Tensor) -> None:
        pending = start_all_reduce(total, ranks, mean=mean)
        self.queue.later(lambda: finish(pending.wait()))

    def _add(self, give: Callable[[Tensor], None], own: Tensor) -> None:
        _, known = self.queue.sums.get(self, (give, None))
        self.queue.sums[self] = give, own if known is None else known.add_(own)

    def _deliver(self, rounds: int) -> None:
        """Gives the sum away once all of it has arrived; ``rounds``: of reductions that are still to be started."""
        if rounds:
            self.queue.later(partial(self._deliver, rounds - 1))
        elif (found := self.queue.sums.pop(self, None)) is not None:
            give, total = found
            give(total)

    def _give(self, sink: Callable[..., object], divisor: int, total: Tensor) -> None:
        group, shards = self.sharding.group, self.sharding.shards
        if divisor > 1:
            total.div_(divisor)
        each = total.view(self.sharding.matrices, shards.largest, total.shape[1])[:, : shards.rows[group.rank]]
        for parameter, own in self.rows.gradients(each):
            if parameter.requires_grad:
                sink(parameter, partial(computed, own))
                if self.queue.collected is None:
                    accumulated(parameter)


class EtpWeightSource(WeightSource):
    """A weight of which each rank has rows, for one call: gathered for each product, and its gradient reduced.

    w_shard_n [n, K] -> codes -> gather -> W [N, K] for fprop, and again for dgrad; dW [N, K] -> reduce_scatter.

    Args:
        etp: the weight.
        of_gradient: the other arguments of :class:`WeightSource`.
    """

    def __init__(self, etp: EtpWeight, *of_gradient: Any) -> None:
        super().__init__(etp.rows.parameters(), *of_gradient)
        self.etp, self.leaf = etp, etp.leaf  # which autograd comes to in this call's backward

    def _wanted(self) -> Self | None:
        assert self.leaf is not None
        return copy(self) if is_wanted(self.leaf) else None

    def operands(self, existing: Quantized | None) -> Quantized:
        return self.etp.forward()

    def save(self, spec: Spec, weight: Tensor, w: Quantized) -> Any:
        """Chooses this rank's part, and remembers which cast it is of and the rows of each rank."""
        values = spec.override == "high_precision"
        part, self._of = self.etp.saved(ROWWISE if values else spec.along, values=values)
        return part

    def for_dgrad(self, spec: Spec, saved: Any) -> Any:
        """Gathers W from the parts that ranks have saved."""
        return self.etp.backward(spec.along, saved, self._of, values=spec.override == "high_precision")

    def _add(self, spec: Spec, product: Product) -> None:
        """Reduces dW over the ranks; autograd gets nothing."""
        sink = into_main_grad if self.main_grad else into_grad
        self.etp.reduce(product, sink, self.main_grad, spec.options.delays_wgrad)


class _Full(torch.autograd.Function):
    """A gathered weight as what the rows of all ranks make up; ``grad_anchor``: what autograd sees of it."""

    @staticmethod
    def forward(ctx: Any, source: EtpWeight, grad_anchor: Tensor, full: Tensor) -> Tensor:
        ctx.source = source
        return full.view_as(full)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.source.reduce(partial(computed, gradient), into_grad, main_grad=False, delayed=False)
        return None, None, None


class _GradAnchor(torch.autograd.Function):
    """A view of ``leaf`` in the place of ``parameters``; what asks for the gradient of these alone is refused."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, leaf: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer, ctx.leaf, ctx.inputs = layer, leaf, 2 + len(parameters)
        ctx.set_materialize_grads(False)
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: None) -> tuple[None, ...]:
        if not is_wanted(ctx.leaf):
            raise ValueError(
                f"{label_of(ctx.layer)}: backward(inputs=...) and torch.autograd.grad give no gradient to a weight "
                "that etp_group shares, which goes past autograd; call backward() without inputs, or do not ask for "
                "this one"
            )
        return (None,) * ctx.inputs


def _collect(collected: dict[Tensor, Tensor], parameter: Tensor, product: Product) -> None:
    """Adds to the gradients that a graph gives to autograd."""
    own, known = product(parameter.dtype), collected.get(parameter)
    collected[parameter] = own if known is None else known + own


def _send_buffer(like: Tensor, matrices: int, dtype: torch.dtype, product: Product, shards: ShardMap) -> Tensor:
    """Lays dW out for the ranks: each one's rows of every matrix, padded to the largest number; [size * ..., K]."""
    size, most, cols = shards.size, shards.largest, like.shape[-1]
    options: dict[str, Any] = {"dtype": dtype, "device": like.device}
    if matrices == 1 and shards.is_even:
        return product(dtype)  # not every library writes to memory that it is given
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


def _quantized(operand: Operand, dim: int) -> Quantized:
    """Puts ``operand`` in the place of ``dim``."""
    return Quantized(operand, None) if dim == ROWWISE else Quantized(None, operand)
