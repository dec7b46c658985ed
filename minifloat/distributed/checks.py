"""Whether the ranks of a collective agree on dtype, sizes and row counts, asked before it could hang or corrupt.

Asking costs a small all-gather and a synchronisation with the host: for debugging, and not inside a compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap

_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))


class _Line(NamedTuple):
    """What one rank brings: ``x`` [rows, cols] with its later dims flattened, and the row counts that it was given."""

    dtype: torch.dtype
    rows: int
    cols: int
    counts: tuple[int, ...]


def check_sharded(collective: str, x: Tensor, shards: ShardMap, group: Group, everywhere: bool) -> None:
    """Each rank brings the rows that ``shards`` says; ``everywhere``: look at all ranks, and raise on each of them.

    Raises:
        ValueError: it does not, or ranks differ in dtype, columns or ``shards``; names the collective and the sizes.
    """
    if everywhere:
        table = _table(x, shards.rows, group.size, group)
        alike = len({(line.dtype, line.cols, line.counts) for line in table}) == 1
        if not alike or [line.rows for line in table] != list(table[0].counts):
            raise _disagreement(collective, table)
    if shards.size != group.size or x.shape[0] != shards.rows[group.rank]:
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows, but the row counts of the ranks "
            f"are {shards.rows}; give every rank the counts of all"
        )


def check_summed(collective: str, x: Tensor, shards: ShardMap | None, group: Group, everywhere: bool) -> None:
    """All ranks bring equal sizes, of rows to be split as ``shards`` says; else as :func:`check_sharded`."""
    if everywhere:
        table = _table(x, shards.rows if shards else (), group.size if shards else 0, group)
        if len(set(table)) > 1 or (shards and sum(table[0].counts) != table[0].rows):
            raise _disagreement(collective, table)
    if shards is not None and (shards.size != group.size or x.shape[0] != shards.total):
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows to sum, of which the ranks are to "
            f"get {shards.rows}; the counts of the {group.size} ranks must add up to the rows"
        )


def check_exchanged(
    collective: str, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, everywhere: bool
) -> None:
    """Each rank brings the rows that it sends, which are those that others expect; else as :func:`check_sharded`."""
    if everywhere:
        table = _table(x, (*send, *receive), 2 * group.size, group)
        sent = [line.counts[: group.size] for line in table]
        expected = [line.counts[group.size :] for line in table]
        alike = len({(line.dtype, line.cols) for line in table}) == 1
        if not alike or sent != list(zip(*expected, strict=True)) or [sum(s) for s in sent] != [t.rows for t in table]:
            raise _disagreement(collective, table)
    if len(send) != group.size or len(receive) != group.size or sum(send) != x.shape[0]:
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows, sends {tuple(send)} and receives "
            f"{tuple(receive)}; one count a rank is needed, and those sent must add up to the rows"
        )


def _table(x: Tensor, counts: Sequence[int], number: int, group: Group) -> list[_Line]:
    """What every rank brings. Counts of another number than this are shown as -1: all must send equally much."""
    listed = list(counts) if len(counts) == number else [-1] * number
    rows = x.shape[0] if x.dim() else 1
    stated = torch.tensor([[_DTYPES.index(x.dtype), rows, math.prod(x.shape[1:]), *listed]], device=x.device)
    if group.size > 1:
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(stated, group.size, group.name)
        stated = torch.ops._c10d_functional.wait_tensor(gathered)
    return [_Line(_DTYPES[dtype], rows, cols, tuple(rest)) for dtype, rows, cols, *rest in stated.tolist()]


def _disagreement(collective: str, table: Sequence[_Line]) -> ValueError:
    lines = [
        f"rank {rank}: {line.dtype} [{line.rows}, {line.cols}]" + f" with row counts {line.counts}" * bool(line.counts)
        for rank, line in enumerate(table)
    ]
    return ValueError(f"{collective}: the ranks do not fit together: {'; '.join(lines)}")
