"""Whether the ranks of a collective agree on dtype, sizes and row counts, asked before it could hang or corrupt.

Asking costs a small exchange of Python objects and waits of the host: for debugging, and not inside a compiled graph.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.comm.group import Group, group_of_name
from minifloat.comm.shard_map import ShardMap

Check = bool | str
"""Whether to look at all ranks, and raise on each of them. A string does so too, and names the layer in the error."""


class _Call(NamedTuple):
    """What one rank brings to a collective, or to a layer, which stands for those that it runs.

    Args:
        collective: its name, or the label of the layer.
        shape: of X, or [rows, cols] of what is communicated, with its later dims flattened.
        dtype: None where ranks need not have the same.
        counts: the row counts that the rank was given.
        options: of a layer's call, in place of sizes.
    """

    collective: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    counts: tuple[int, ...] | None = None
    is_layer: bool = False
    options: str = ""

    def __str__(self) -> str:
        if self.options:
            return self.options
        if not self.is_layer:
            return f"{self.dtype} {list(self.shape)}" + f" with row counts {self.counts}" * bool(self.counts)
        kind = "" if self.dtype is None else f" of {self.dtype}"
        return f"X {self.shape}{kind}" + ("" if self.counts is None else f" with rows_per_rank={list(self.counts)}")


def check_call(
    label: str,
    collective: str,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    lengths: Sequence[int] | None,
    split: bool,
    group: Group,
) -> None:
    """What all ranks give to a layer fits together; to be asked before one of them could fail alone.

    Args:
        label: of the layer.
        collective: the first that would go wrong.
        shape, dtype: of X on this rank.
        lengths: the ``rows_per_rank`` that it was given.
        split: dim 0 of X is shared out over the ranks, as ``lengths`` says, or else evenly.

    Raises:
        ValueError: on every rank, naming the collective and the sizes.
    """
    counts = None if lengths is None else tuple(lengths)
    table = _of_all(_Call(label, tuple(shape), dtype, counts, is_layer=True), group, label)
    own = [call.shape[:1] for call in table]
    wanted = own[:1] * group.size if lengths is None or not split else [(length,) for length in lengths]
    rows_fit = own == wanted and len({call.counts for call in table}) == 1
    if rows_fit and len({(call.shape[1:], call.dtype) for call in table}) == 1:
        return
    way_out = "; give all ranks the same rows_per_rank, with the rows of each" * (split and not rows_fit)
    raise ValueError(f"{_disagreement(collective, table, label)}{way_out}")


def check_options(label: str, options: str, group: Group) -> None:
    """All ranks call a layer with the same ``options``, in words.

    Raises:
        ValueError: on every rank, naming the layer and the options of each.
    """
    table = _of_all(_Call(label, (), None, options=options), group, label)
    if len(set(table)) > 1:
        raise _disagreement(label, table, label)


def other_recipes(recipe: str, group: str, device: str) -> str:
    """What the ranks of the group of that name run a layer under, if that is not the same on all: a small collective.

    What is gathered would be codes of several formats, and what is summed products of several. All ranks get words for
    an error, "" if there is none.
    """
    process_group = group_of_name(group)
    digest = zlib.crc32(recipe.encode())
    ends = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, process_group)
    if int(ends.sum()) == 0:
        return ""
    table = [recipe] * process_group.size()
    dist.all_gather_object(table, recipe, group=process_group)
    calls = "; ".join(f"rank {rank}: {of_rank}" for rank, of_rank in enumerate(table))
    return f"the ranks of its group run under different recipes; give all the same: {calls}"


def other_recipes_in_trace(recipe: str, group: str, device: str) -> str:
    """The same while a compiler traces the layer; once for each recipe, since a rank may trace it alone.

    Without the layer's name, which the compiler would guard: equal layers are traced once, whatever their names.
    """
    agreed = _agreed.setdefault(group_of_name(group), set())
    others = "" if recipe in agreed else other_recipes(recipe, group, device)
    if not others:
        if len(agreed) >= _MOST_AGREED:
            agreed.clear()
        agreed.add(recipe)
    return others


_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_MOST_AGREED = 4096
other_recipes_in_trace._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


def check_sharded(collective: str, x: Tensor, shards: ShardMap, group: Group, everywhere: Check) -> None:
    """Each rank brings the rows that ``shards`` says, of which ``everywhere`` asks all ranks.

    Raises:
        ValueError: it does not, or ranks differ in dtype, columns or ``shards``; names the collective and the sizes.
    """
    if everywhere:
        table = _table(collective, x, shards.rows, group, everywhere)
        alike = len({(call.dtype, call.shape[1], call.counts) for call in table}) == 1
        if not alike or [call.shape[0] for call in table] != list(shards.rows):
            raise _disagreement(collective, table, everywhere)
    if shards.size != group.size or x.shape[0] != shards.rows[group.rank]:
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows, but the row counts of the ranks "
            f"are {shards.rows}; give every rank the counts of all"
        )


def check_summed(collective: str, x: Tensor, shards: ShardMap | None, group: Group, everywhere: Check) -> None:
    """All ranks bring equal sizes, of rows to be split as ``shards`` says; else as :func:`check_sharded`."""
    if everywhere:
        table = _table(collective, x, shards.rows if shards else (), group, everywhere)
        fits = shards is None or (shards.size == group.size and shards.total == table[0].shape[0])
        if len(set(table)) > 1 or not fits:
            raise _disagreement(collective, table, everywhere)
    if shards is not None and (shards.size != group.size or x.shape[0] != shards.total):
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows to sum, of which the ranks are to "
            f"get {shards.rows}; the counts of the {group.size} ranks must add up to the rows"
        )


def _table(collective: str, x: Tensor, counts: Sequence[int], group: Group, everywhere: Check) -> list[_Call]:
    """What every rank brings."""
    shape = x.shape[0] if x.dim() else 1, math.prod(x.shape[1:])
    return _of_all(_Call(collective, shape, x.dtype, tuple(counts)), group, everywhere)


def _of_all(own: _Call, group: Group, everywhere: Check) -> list[_Call]:
    """The calls of all ranks.

    Raises:
        ValueError: on every rank: some are in other collectives or layers.
    """
    table = [own] * group.size
    if group.size > 1:
        dist.all_gather_object(table, own, group=group.process_group)
    if len({(call.is_layer, call.collective) for call in table}) > 1:
        raise _disagreement(own.collective, table, everywhere)
    return table


def _disagreement(collective: str, table: Sequence[_Call], everywhere: Check) -> ValueError:
    several = len({call.collective for call in table}) > 1
    what = "ranks are in other collectives" if several else "the ranks do not fit together"
    calls = [f"rank {rank}: " + f"{call.collective} of " * several + str(call) for rank, call in enumerate(table)]
    layer = f"{everywhere}: " if isinstance(everywhere, str) and everywhere != collective else ""
    return ValueError(f"{layer}{collective}: {what}: {'; '.join(calls)}")
