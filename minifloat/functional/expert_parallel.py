"""Expert parallelism: tokens are sent to the ranks that have their experts, and results are sent back.

Rank r of p has experts r G to (r + 1) G - 1, G = E / p. Rows of tokens are sorted by expert, so rows for one rank are
adjacent; a rank sorts received rows again, by expert and within an expert by rank. One process with the tokens of all
ranks, one rank's below the other's, would have the same order, and all results equal that process's, to the bit.

==============================  ==========  ==========================================================================
tensor                          shape       sent by
==============================  ==========  ==========================================================================
tokens of this rank             [T, K]      dispatch (forward X, backward dY): each once to a rank, however many of
                                            its experts are there, [U, K]; there to the rows of its choices
rows of this rank's tokens      [S, K]      S <= T k, without dropped choices; sorted by expert
rows of this rank's experts     [R, N]      combine (forward Y, backward dX): a row for each choice, and its probability
==============================  ==========  ==========================================================================

Dispatch sends the fewest bytes (:func:`form_of`): codes of tokens, cast before they are sent, if scales are of rows and
one process also makes wgrad's operands from the codes of fprop; otherwise codes of rows, if a scale is of an expert;
otherwise values of tokens, which the receiver casts. Results are added up by token, in high precision.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.autocast import DelayedCall
from minifloat.comm.collectives import (
    Pending,
    all_reduce_max,
    as_bytes,
    from_bytes,
    recipes_of_all,
    start_exchange_rows,
)
from minifloat.comm.group import Group
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.autograd import apply, as_output, first_order
from minifloat.functional.experts import Experts, Tokens, cast_tokens
from minifloat.functional.grouped import GroupLayout
from minifloat.functional.quantize import RoleCasts
from minifloat.functional.router import Routing
from minifloat.operand import Operand, Quantized
from minifloat.ops.grouped import gathered_amax
from minifloat.ops.permute import unpermute_rows
from minifloat.quantizer import Quantizer, as_matrix

Transfer = Callable[[Tensor, "Dispatch"], Pending[Tensor]]
"""Starts to move rows between the ranks of a dispatch."""


class Counts(NamedTuple):
    """Numbers of rows that this rank sends to each rank and receives from each."""

    sent: list[int]
    received: list[int]

    @property
    def back(self) -> Counts:
        """Counts of the way back."""
        return Counts(self.received, self.sent)


class Plan(NamedTuple):
    """Properties of a coming call that decide what is sent, on which all ranks must agree.

    Attributes:
        label: name of the layer in errors.
        recipes: those of both linears, in words.
        fused: one autograd function runs them, which reads codes.
        trains: some weight gets a gradient, and wgrad reads columnwise operands.
        needs: whether X, the probabilities and Y have gradients, which all ranks send or none.
    """

    label: str
    recipes: str
    fused: bool
    trains: bool
    needs: tuple[bool, bool, bool]

    @property
    def word(self) -> int:
        """A number for all of it."""
        flags = self.fused, self.trains, *self.needs
        return zlib.crc32(self.recipes.encode()) << 5 | sum(flag << place for place, flag in enumerate(flags))


class Dispatch(NamedTuple):
    """Destinations of this rank's tokens, and the rows that it receives from others.

    Attributes:
        group: the ranks that share out the experts.
        routing: the choices of this rank's tokens among all experts.
        tokens: int64 [U], those that go to the first rank, the second, and so on; ``of_tokens`` counts them.
        source: int32 [R], for each row of this rank's experts the token among those received.
        probabilities: fp32 [R], those of the rows, if there are any.
        of_rows: counts of rows.
        order: int64 [R], for each row of this rank's experts its place among the rows received, which come by rank.
        inverse: int64 [R], the inverse of ``order``.
        layout: rows of each of this rank's G experts.
        fused: all ranks run an MLP as one autograd function, so that codes may be sent.
        trains: some rank's weights get a gradient.
        needs: whether X and the probabilities get gradients on all ranks: some rank's do, or only some rank's Y does.
    """

    group: Group
    routing: Routing
    tokens: Tensor
    of_tokens: Counts
    source: Tensor
    probabilities: Tensor | None
    of_rows: Counts
    order: Tensor
    inverse: Tensor
    layout: GroupLayout
    fused: bool
    trains: bool
    needs: tuple[bool, bool]

    def with_gradients(self, *given: Tensor | None) -> list[Any]:
        """Gives X and the probabilities gradients that others' backward waits for, where this rank needs none."""
        return [
            x.detach().requires_grad_() if need and x is not None and not x.requires_grad else x
            for x, need in zip(given, self.needs, strict=True)
        ]

    def spread(self, x: Tensor) -> Tensor:
        """Sends tokens [T, K] to their experts: rows [R, K], in high precision."""
        result: Tensor = apply(ExchangeRowsFunction, x, self, spread_tokens, returned_sums)
        return result

    def gather(self, y: Tensor) -> Tensor:
        """Sends rows of experts [R, N] back and adds them up, [T, N]."""
        result: Tensor = apply(ExchangeRowsFunction, y, self, returned_sums, spread_tokens)
        return result

    def probabilities_of(self, p: Tensor) -> Tensor:
        """Selects the probabilities of this rank's experts' rows, [R], from those sent of tokens' rows, ``p`` [T k]."""
        result: Tensor = apply(ExchangeRowsFunction, p, self, sent_probabilities, return_rows)
        return result

    def collect(self, y: Tensor) -> Tensor:
        """Sends rows of experts [R, ...] back, [T k, ...]."""
        result: Tensor = apply(ExchangeRowsFunction, y, self, return_rows, send_rows)
        return result

    def exchange(self, x_tokens: Tokens | None, y_tokens: Tokens | None) -> Experts:
        """The exchange of a linear."""
        return ExpertParallel(layout=self.layout, x_tokens=x_tokens, y_tokens=y_tokens, dispatch=self)

    @property
    def experts(self) -> slice:
        """This rank's among those of all ranks."""
        groups = self.layout.offsets.shape[0] - 1
        return slice(self.group.rank * groups, (self.group.rank + 1) * groups)


def dispatch_of(routing: Routing, group: Group, plan: Plan, probabilities: Tensor | None = None) -> Dispatch:
    """Finds what goes where, in two small exchanges, and waits for the device: the sizes of transfers are needed here.

    The one point where a mixture of experts waits; backward knows all that it needs.

    Args:
        probabilities: fp32 [T k], of the rows of tokens; sent along, without a gradient.

    Raises:
        ValueError: on all ranks, if they run under different recipes.
    """
    size, groups = group.size, routing.counts.shape[0] // group.size
    # All but what has sizes that the host must know is computed before it waits: it is then that the device idles.
    tokens, own_tokens, sources = sent_tokens(routing, size)
    word = torch.full((size, 1), plan.word, device=tokens.device)
    own = torch.cat([routing.counts.view(size, groups).long(), own_tokens[:, None], word], 1)
    got = torch.empty_like(own)
    dist.all_to_all_single(got, own, group=group.process_group)
    # What comes is in blocks, by rank and expert, of rows that are needed by expert and rank.
    got, (got_tokens, words) = got[:, :groups], got[:, groups:].unbind(1)
    blocks = got.t().flatten()
    to_experts = _starts(got.flatten()).view(size, groups).t().flatten() - _starts(blocks)
    to_tokens = _starts(got_tokens).int().repeat(groups)
    offsets = torch.zeros(groups + 1, dtype=torch.int32, device=tokens.device)
    offsets[1:] = blocks.cumsum(0)[size - 1 :: size]
    numbers = torch.stack([own[:, :groups].sum(1), got.sum(1), own_tokens, got_tokens, words]).tolist()
    of_rows, of_tokens, said = Counts(*numbers[:2]), Counts(*numbers[2:4]), numbers[4]
    if any(each >> 5 != plan.word >> 5 for each in said):
        raise ValueError(f"{plan.label}: {recipes_of_all(plan.recipes, group.process_group)}")
    fused, trains, x, p, y = ([each >> place & 1 for each in said] for place in range(5))
    received = sum(of_rows.received)
    sent = sources[:, None]
    if probabilities is not None:
        sent = torch.stack([sources, probabilities.detach().view(torch.int32)], 1)
    pending = start_exchange_rows(sent[: sum(of_rows.sent)], *of_rows, group)
    places = torch.arange(received, device=tokens.device)
    block_of_row = torch.repeat_interleave(blocks, output_size=received)
    order = places + to_experts[block_of_row]
    inverse = torch.empty_like(order).scatter_(0, order, places)
    source, *weights = pending.wait().index_select(0, order).unbind(1)
    return Dispatch(
        group, routing, tokens[: sum(of_tokens.sent)], of_tokens, source + to_tokens[block_of_row],
        weights[0].contiguous().view(torch.float32) if weights else None, of_rows, order, inverse,
        GroupLayout(offsets, received), all(fused), any(trains), (any(x) or any(y) != all(y), any(p)),
    )  # fmt: skip


def sent_tokens(routing: Routing, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lists the tokens for the first of ``size`` ranks, for the second and so on.

    Returns:
        Tokens, int64, some more than there are; how many are for each rank, int64 [size]; and for each row of tokens
        the place of its token among those for its rank, int32 [T k].
    """
    device, length = routing.order.device, routing.inverse.shape[0]
    token_of_row = routing.order.long() // routing.inverse.shape[1]
    rows = torch.arange(routing.order.shape[0], device=device, dtype=torch.int32)
    first_rows = routing.offsets[:: routing.counts.shape[0] // size].contiguous()
    rank_of_row = torch.searchsorted(first_rows, rows, right=True) - 1  # ``size`` of those that are dropped
    goes = torch.zeros(size + 1, length, dtype=torch.bool, device=device)
    goes[rank_of_row, token_of_row] = True
    counts = goes.sum(1)
    place = (goes.flatten().cumsum(0) - 1).view(size + 1, length)
    sources = (place - _starts(counts)[:, None])[rank_of_row, token_of_row].int()
    tokens = torch.empty(size * length + 1, dtype=torch.int64, device=device)
    targets = torch.where(goes, place, size * length)[:size].flatten()
    tokens.scatter_(0, targets, torch.arange(length, device=device).repeat(size))
    return tokens, counts[:size], sources


def _starts(counts: Tensor) -> Tensor:
    """Computes where each of consecutive pieces begins."""
    return counts.cumsum(0) - counts


def send_tokens(x: Tensor, dispatch: Dispatch) -> Pending[Tensor]:
    """Sends tokens [T, ...] to the ranks of their experts; gives what came, by rank."""
    return start_exchange_rows(x.index_select(0, dispatch.tokens), *dispatch.of_tokens, dispatch.group)


def send_rows(x: Tensor, dispatch: Dispatch) -> Pending[Tensor]:
    """Sends rows [T k, ...], sorted by all experts, to the ranks of these; gives what came, sorted, [R, ...]."""
    sent = start_exchange_rows(x[: sum(dispatch.of_rows.sent)], *dispatch.of_rows, dispatch.group)
    return sent.then(lambda rows: rows.index_select(0, dispatch.order))


def return_rows(y: Tensor, dispatch: Dispatch) -> Pending[Tensor]:
    """Sends rows [R, ...] back to where they came from, [T k, ...]; those of dropped slots are 0."""

    def with_dropped(rows: Tensor) -> Tensor:
        dropped = dispatch.routing.order.shape[0] - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(dropped, *rows.shape[1:])]) if dropped else rows

    sent = start_exchange_rows(y.index_select(0, dispatch.inverse), *dispatch.of_rows.back, dispatch.group)
    return sent.then(with_dropped)


def returned_sums(y: Tensor, dispatch: Dispatch) -> Pending[Tensor]:
    """Sends rows [R, N] back; gives the sums of each token's, [T, N], as one process adds them up."""
    routing = dispatch.routing
    return return_rows(y, dispatch).then(lambda rows: unpermute_rows(rows, None, routing.inverse, routing.offsets))


def spread_tokens(x: Tensor, dispatch: Dispatch) -> Pending[Tensor]:
    """Sends tokens [T, ...]; gives the rows of this rank's experts, [R, ...]."""
    return send_tokens(x, dispatch).then(lambda tokens: tokens.index_select(0, dispatch.source))


def sent_probabilities(p: Tensor, dispatch: Dispatch) -> Pending[Tensor]:
    """Gives what came for ``p`` along with the sources of rows."""
    assert dispatch.probabilities is not None
    return Pending([], partial(as_output, dispatch.probabilities, dispatch.probabilities.shape))


class ExchangeRowsFunction(torch.autograd.Function):
    """Sends rows by ``there``, and their gradients by ``back``, its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch, there: Transfer, back: Transfer) -> Tensor:
        ctx.dispatch, ctx.back = dispatch, back
        return there(x, dispatch).wait()

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return ctx.back(dy, ctx.dispatch).wait(), None, None, None


# ---- quantized before sending ----

Form = Literal["codes of tokens", "codes of rows", "values"]


def form_of(quantizer: Quantizer, top_k: int, ranks: int) -> Form:
    """Chooses what dispatch sends of a token with ``top_k`` experts on ``ranks`` ranks.

    Codes, if they say all that the operands are made of, each row by itself: of formats whose codes serve both
    orientations, of columnwise operands that are cast from the rowwise one, and where no rank wants any. Tiles,
    rotations along rows and random bits span several rows. Where a scale is of an expert, a token has other codes for
    each: these are sent if they are fewer bytes than its values, once for each rank that has one of its experts.
    """
    row, column = quantizer.row_format, quantizer.format(COLUMNWISE)
    one_by_one = not (row.tile or row.transform != "none" or row.rounding == "stochastic")
    both = quantizer.chained or not quantizer.columnwise or (row == column and row.symmetric)
    if not row.quantized or not one_by_one or not both or row.scale_rule == "given":  # whose histories are ranks'
        return "values"
    if row.amax_per_row or (row.block and row.scale_rule != "two_level"):
        return "codes of tokens"
    distinct = ranks * (1 - (1 - 1 / ranks) ** top_k)  # ranks of a token, where experts are drawn evenly
    return "codes of rows" if top_k * (4 if row.packed else 8) < 16 * distinct else "values"


def moved(operand: Operand, dispatch: Dispatch, of_tokens: bool) -> Pending[Operand]:
    """Sends a rowwise operand of tokens [T, K] or of rows [T k, K], in one transfer; gives that of rows [R, K].

    Fields of a row (codes, scales of blocks, an amax a row) are sent; fields of an expert are on all ranks.
    """
    fmt, layout = operand.format, dispatch.layout
    of_rows = [True, bool(fmt.grid or fmt.block), fmt.amax_per_row]
    fields: list[Any] = [*operand[:3]]
    places = [place for place, field in enumerate(fields) if of_rows[place] and field is not None]
    parts = [as_bytes(fields[place]) for place in places]
    own = [field if field is None or of_rows[place] else field[dispatch.experts] for place, field in enumerate(fields)]

    def joined_again(data: Tensor) -> Operand:
        for place, part in zip(places, data.split([part.shape[1] for part in parts], 1), strict=True):
            own[place] = from_bytes(part.contiguous(), fields[place])
        codes, scale_inv, amax = own
        shape = layout.rows, operand.shape[1]
        return Operand(codes, scale_inv, amax, fmt, operand.dim, shape, operand.dtype, layout.offsets)

    data = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (spread_tokens if of_tokens else send_rows)(data, dispatch).then(joined_again)


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertParallel(Experts):
    """Exchange of experts that ranks share out: X or Y has this rank's tokens [T, K], the products its experts' rows.

    Args:
        dispatch: where rows go.
        layout: that of ``dispatch``.
        x_tokens, y_tokens: tokens of X and dX, or of Y and dY; the other matrix has this rank's experts' rows.
    """

    dispatch: Dispatch

    def _cast(
        self, cast: RoleCasts, x: Tensor, tokens: Tokens | None, delayed_call: DelayedCall | None, *scale: Tensor | None
    ) -> Pending[Quantized] | Quantized:
        """Casts tokens and sends them, or sends them and casts."""
        if tokens is None:
            return super()._cast(cast, x, None, delayed_call, *scale)
        x, quantizer, dispatch = as_matrix(x), cast.quantizers[0], self.dispatch
        of_ranks = quantizer.with_usage(columnwise=dispatch.trains)  # of which some may have frozen experts
        form = form_of(of_ranks, tokens.routing.inverse.shape[1], dispatch.group.size)
        if form == "values":
            return send_tokens(x, dispatch).then(
                lambda received: cast_tokens(cast, received, dispatch.source, self.layout.offsets, delayed_call)
            )
        rowwise, amax = cast.like(quantizer.with_usage(rowwise=True, columnwise=False), ""), None
        if form == "codes of tokens":
            (operands,) = rowwise([x], None)
        else:
            offsets = tokens.routing.offsets
            (amax,) = all_reduce_max([gathered_amax(x, tokens.rows, offsets)], dispatch.group)
            operands = cast_tokens(rowwise, x, tokens.rows, offsets, None, amax)
        sent = moved(operands.along(ROWWISE), dispatch, form == "codes of tokens")
        return sent.then(lambda row: self._both(quantizer, cast.kinds, row, amax))

    def _both(self, quantizer: Quantizer, kinds: Sequence[str], row: Operand, amax: Tensor | None) -> Quantized:
        """The operands that ``quantizer`` makes of the values that a rowwise one came from."""
        if not quantizer.columnwise:
            return Quantized(row, None)
        device, chained = row.codes.device.type, quantizer.chained
        if len(quantizer.layouts(device)) == 1 and not chained:
            return Quantized(row, row)
        # With the scale that they have, the values of 8-bit codes, of four bits of precision at most and so in bf16 as
        # well, are cast to the same codes again, in another order.
        values = row.dequantize(row.dtype if chained else torch.bfloat16)
        columnwise = RoleCasts([Quantizer(quantizer.format(COLUMNWISE), rowwise=False)], kinds, device)
        known = None if chained or amax is None else amax[self.dispatch.experts]
        column = columnwise.of_groups(values, self.layout.offsets, None, amax=known).along(COLUMNWISE)
        return Quantized(row, column._replace(dtype=row.dtype))

    def _summed(self, rows: Tensor, tokens: Tokens | None) -> Pending[Tensor] | Tensor:
        return rows if tokens is None else returned_sums(rows, self.dispatch)
