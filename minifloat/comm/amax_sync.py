"""What ranks tell each other before a sharded cast: amaxes, and rows of units that straddle ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.comm.cache import kept
from minifloat.comm.collectives import as_bytes, exchange_rows, from_bytes, max_of_all, waited
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap, moves_rows, unit_rows
from minifloat.formats import ROWWISE, Format
from minifloat.ops import quantize
from minifloat.ops.quantize import scale_shape
from minifloat.quantizer import Amaxes, Quantizer


def reduce_amaxes(levels: Amaxes, quantizer: Quantizer, group: Group, *, in_place: bool) -> Amaxes:
    """The largest over the ranks of a tensor's amaxes, in one all-reduce; those of single rows are a rank's own.

    Args:
        levels: one entry a cast. Scales, and None where blocks find their own, stay what they are.
        in_place: the result may take the memory of ``levels``.
    """
    own: dict[int, Tensor] = {}
    for i in _reduced(quantizer):
        level = levels[i]
        if level is not None:
            own[i] = level
    agreed = dict(zip(own, max_of_all(list(own.values()), group, in_place=in_place), strict=True))
    return tuple([agreed.get(i, level) for i, level in enumerate(levels)])


@kept
def _reduced(quantizer: Quantizer) -> tuple[int, ...]:
    """The casts whose amax all ranks share."""
    return tuple([
        i for i, (fmt, dim) in enumerate(quantizer.casts)
        if fmt.needs_amax and not (fmt.amax_per_row and dim == ROWWISE)
    ])  # fmt: skip


def straddling_amaxes(
    sources: Sequence[Tensor], casts: Sequence[tuple[int, Format, int]], shards: ShardMap, group: Group
) -> dict[int, tuple[Tensor, Tensor]]:
    """The amaxes, over all ranks, of the blocks that the head and the tail of this rank's rows are part of.

    Every rank sends two rows of amaxes a cast, in one small all-gather, in the dtype of ``sources``, whose values they
    are.

    Args:
        sources: [rows, K], what each cast of a quantizer casts.
        casts: those whose blocks straddle: number, format and dim.

    Returns:
        By number of the cast two grids of amaxes, fp32 [1, blocks]; meaningless where there is no head, or no tail.
    """
    local, widths = [], []
    for i, fmt, dim in casts:
        x, cut = sources[i], shards.pieces(group.rank, unit_rows(fmt, dim))
        widths.append(scale_shape(fmt, dim, 1, x.shape[1])[1])
        for amax in quantize.amax([x[: cut.head], x[cut.tail :]], [fmt.spec] * 2, [dim] * 2):
            local.append(amax.flatten() if amax.shape[0] else amax.new_zeros(widths[-1]))
    own = torch.cat(local).to(sources[0].dtype)[None]
    gathered = waited(torch.ops._c10d_functional.all_gather_into_tensor(as_bytes(own), group.size, group.name))
    each = from_bytes(gathered, own).float().split([2 * width for width in widths], dim=1)
    result = {}
    for (i, fmt, dim), width, amaxes in zip(casts, widths, each, strict=True):
        ends = [end for rank in range(group.size) for end in shards.straddling(rank, unit_rows(fmt, dim))]
        rows = amaxes.reshape(len(ends), width)
        found = []
        for unit in shards.straddling(group.rank, unit_rows(fmt, dim)):
            shares = [row for row, end in zip(rows.unbind(), ends, strict=True) if end == unit]
            found.append(torch.stack(shares).amax(0, keepdim=True))
        result[i] = found[0], found[1]
    return result


def rows_owned(x: Tensor, unit: int, shards: ShardMap, group: Group) -> Tensor:
    """Sends the rows of units that began on earlier ranks there, and takes those that complete this rank's last."""
    sent = shards.sent(unit)
    head = sum(sent[group.rank])
    received = exchange_rows(x[:head], sent[group.rank], [line[group.rank] for line in sent], group)
    return torch.cat([x[head:], received])


def rows_returned(values: Tensor, fmt: Format, shards: ShardMap, group: Group) -> Tensor:
    """The inverse of :func:`rows_owned`."""
    unit = unit_rows(fmt, ROWWISE)
    if not moves_rows(fmt) or shards.aligned(unit):
        return values
    sent = shards.sent(unit)
    taken = [line[group.rank] for line in sent]
    kept = values.shape[0] - sum(taken)
    head = exchange_rows(values[kept:], taken, sent[group.rank], group)
    return torch.cat([head, values[:kept]])
