"""Expert parallelism: tokens travel to the ranks that have their experts, and their results travel back.

Rank r of p has experts r G to (r + 1) G - 1, G = E / p. Rows of tokens are sorted by expert, so that those for one rank
are neighbours; a rank sorts what it receives by expert again, rank by rank inside of each expert. That is the order in
which one process would have the tokens of all ranks, one rank's below the other's, and all results are that process's,
to the bit.

======================  =========  =====================================================================
tensor                  shape      what travels, dispatch (forward X, backward dY)
======================  =========  =====================================================================
tokens                  [T, K]     each goes to k rows
rows sent               [S, K]     S <= T k, without dropped choices: codes and scales, or values
rows received           [R, K]     by rank; then by expert
results                 [R, N]     combine (forward Y, backward dX): values, added up by their token
======================  =========  =====================================================================

Codes travel where one process computes the operands of wgrad from the codes of fprop as well (:func:`sends_codes`):
tokens are cast before they are sent, an FP8 byte and the scale of its block for each element. Scales of one amax come
from the largest of all ranks, one for each expert. Elsewhere values travel, and the receiver casts whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.autocast import DelayedCall
from minifloat.comm.collectives import all_reduce_max, as_bytes, exchange_rows, from_bytes
from minifloat.comm.group import Group
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.autograd import apply, first_order
from minifloat.functional.experts import Experts, Tokens, cast_tokens
from minifloat.functional.grouped import GroupLayout
from minifloat.functional.quantize import RoleCasts
from minifloat.functional.router import Routing
from minifloat.operand import Operand, Quantized
from minifloat.ops.grouped import gathered_amax
from minifloat.ops.permute import permute_rows
from minifloat.quantizer import Quantizer, as_matrix


class Dispatch(NamedTuple):
    """Where the rows of this rank's tokens go, and what it receives from others.

    Attributes:
        group: the ranks that share out the experts.
        sent, received: rows to each rank, and from each.
        order: int64 [R], which of the received rows are those of the first expert, the second, and so on.
        inverse: int64 [R], the place of each received row in that order.
        layout: rows of each of this rank's G experts.
        slots: T k, this rank's choices, dropped ones too.
    """

    group: Group
    sent: list[int]
    received: list[int]
    order: Tensor
    inverse: Tensor
    layout: GroupLayout
    slots: int

    def send(self, x: Tensor) -> Tensor:
        """Sends rows of tokens [T k, ...] to their experts, in high precision: [R, ...]."""
        result: Tensor = apply(DispatchFunction, x, self, False)
        return result

    def collect(self, y: Tensor) -> Tensor:
        """Sends rows of experts [R, ...] back to their tokens, [T k, ...]."""
        result: Tensor = apply(DispatchFunction, y, self, True)
        return result

    def exchange(self, x_tokens: Tokens | None, y_tokens: Tokens | None) -> Experts:
        """The exchange of a linear."""
        return ExpertParallel(layout=self.layout, x_tokens=x_tokens, y_tokens=y_tokens, dispatch=self)

    @property
    def experts(self) -> slice:
        """This rank's among those of all ranks."""
        groups = self.layout.offsets.shape[0] - 1
        return slice(self.group.rank * groups, (self.group.rank + 1) * groups)


def dispatch_of(routing: Routing, group: Group) -> Dispatch:
    """Exchanges how many rows each expert gets, and waits for the device: the sizes of what follows are needed here.

    The one point where a mixture of experts waits; backward knows all that it needs.
    """
    counts = routing.counts
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group.process_group)
    by_rank = received.view(group.size, -1)
    send, receive = torch.stack([counts.view(group.size, -1).sum(1), by_rank.sum(1)]).tolist()
    groups = by_rank.shape[1]
    experts = torch.arange(groups, device=counts.device).repeat(group.size)
    experts = experts.repeat_interleave(received, output_size=sum(receive))
    order = torch.sort(experts, stable=True).indices
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    offsets = torch.zeros(groups + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(by_rank.sum(0), 0, out=offsets[1:])
    return Dispatch(group, send, receive, order, inverse, GroupLayout(offsets, sum(receive)), routing.order.shape[0])


def send_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Sends rows [T k, ...], sorted by all experts, to the ranks of these; returns what came, sorted, [R, ...]."""
    x = exchange_rows(x[: sum(dispatch.sent)], dispatch.sent, dispatch.received, dispatch.group)
    return x.index_select(0, dispatch.order)


def return_rows(y: Tensor, dispatch: Dispatch) -> Tensor:
    """Sends rows [R, ...] back to where they came from, [T k, ...]; those of dropped slots are 0."""
    y = exchange_rows(y.index_select(0, dispatch.inverse), dispatch.received, dispatch.sent, dispatch.group)
    dropped = dispatch.slots - y.shape[0]
    return torch.cat([y, y.new_zeros(dropped, *y.shape[1:])]) if dropped else y


class DispatchFunction(torch.autograd.Function):
    """Sends rows to their experts, or ``back``: each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch, back: bool) -> Tensor:
        ctx.dispatch, ctx.back = dispatch, back
        return return_rows(x, dispatch) if back else send_rows(x, dispatch)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return (send_rows if ctx.back else return_rows)(dy, ctx.dispatch), None, None


# ---- tokens that are quantized before they travel ----


def sends_codes(quantizer: Quantizer) -> bool:
    """Whether the rowwise codes of tokens say all that their operands are made of, each row by itself.

    So it is of formats whose codes serve both orientations, as those of one amax, of columnwise operands that are cast
    from the rowwise one, and where none is wanted. Tiles, rotations along rows and random bits span several rows.
    """
    row, column = quantizer.row_format, quantizer.format(COLUMNWISE)
    if not row.quantized or row.tile or row.transform != "none" or row.rounding == "stochastic":
        return False
    if row.scale_rule == "given":  # the histories of experts are those of their ranks
        return False
    return quantizer.chained or not quantizer.columnwise or (row == column and row.symmetric)


def send_operand(sent: Operand, dispatch: Dispatch) -> Operand:
    """Sends a rowwise operand of all experts' rows [T k, K], in one transfer; returns that of this rank's, [R, K].

    What belongs to a row (codes, scales of blocks, an amax a row) travels; what belongs to an expert is on all ranks.
    """
    fmt, layout = sent.format, dispatch.layout
    of_rows = [True, bool(fmt.grid or fmt.block), fmt.amax_per_row]
    fields: list[Any] = [*sent[:3]]
    moved = [place for place, field in enumerate(fields) if of_rows[place] and field is not None]
    parts = [as_bytes(fields[place]) for place in moved]
    data = send_rows(parts[0] if len(parts) == 1 else torch.cat(parts, 1), dispatch)
    own = [field if field is None or of_rows[place] else field[dispatch.experts] for place, field in enumerate(fields)]
    for place, part in zip(moved, data.split([part.shape[1] for part in parts], 1), strict=True):
        own[place] = from_bytes(part.contiguous(), fields[place])
    codes, scale_inv, amax = own
    return Operand(codes, scale_inv, amax, fmt, sent.dim, (layout.rows, sent.shape[1]), sent.dtype, layout.offsets)


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
    ) -> Quantized:
        """Casts tokens and sends them, or sends them and casts."""
        if tokens is None:
            return super()._cast(cast, x, None, delayed_call, *scale)
        quantizer, dispatch = cast.quantizers[0], self.dispatch
        if not sends_codes(quantizer):
            rows = permute_rows(as_matrix(x), None, tokens.routing.inverse, tokens.routing.offsets)
            return cast.of_groups(send_rows(rows, dispatch), self.layout.offsets, delayed_call)
        rowwise = RoleCasts([quantizer.with_usage(rowwise=True, columnwise=False)], cast.kinds, "")
        amax = self._amax(quantizer, x, tokens)
        row = send_operand(cast_tokens(rowwise, x, *tokens, None, amax).along(ROWWISE), dispatch)
        return self._both(quantizer, cast.kinds, row, amax)

    def _amax(self, quantizer: Quantizer, x: Tensor, tokens: Tokens) -> Tensor | None:
        """The largest amax of each expert's rows on any rank, fp32 [E], where its scale comes from one."""
        if not any(fmt.needs_amax and not fmt.amax_per_row for fmt, _ in quantizer.casts[:1]):
            return None
        return all_reduce_max([gathered_amax(x, tokens.rows, tokens.routing.offsets)], self.dispatch.group)[0]

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

    def _summed(self, rows: Tensor, tokens: Tokens | None) -> Tensor:
        if tokens is None:
            return rows
        return super()._summed(return_rows(rows, self.dispatch), tokens)
