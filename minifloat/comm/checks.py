"""What the ranks of a layer must agree on: sizes, options and recipe of a call, and the rows of a collective.

What ``set_check`` asks costs an exchange of Python objects and waits of the host: for debugging, and not inside a
compiled graph.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.comm.group import Group, group_of_name
from minifloat.comm.shard_map import ShardMap


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
    counts = None if lengths is None else list(lengths)
    said = f"X {tuple(shape)}" + f" of {dtype}" * (dtype is not None) + f" with rows_per_rank={counts}" * bool(counts)
    table = _of_all(label, (said, tuple(shape), dtype, counts), group)
    own = [call[1][:1] for call in table]
    wanted = own[:1] * group.size if counts is None or not split else [(length,) for length in counts]
    rows_fit = own == wanted and all(call[3] == counts for call in table)
    if not rows_fit or len({(call[1][1:], call[2]) for call in table}) > 1:
        way_out = "; give all ranks the same rows_per_rank, with the rows of each" * (split and not rows_fit)
        raise ValueError(f"{_disagreement(f'{label}: {collective}', [call[0] for call in table])}{way_out}")


def check_options(label: str, options: str, group: Group) -> None:
    """All ranks call a layer with the same ``options``, in words; raises as :func:`check_call` does."""
    table = [said for (said,) in _of_all(label, (options,), group)]
    if len(set(table)) > 1:
        raise ValueError(_disagreement(label, table))


def _of_all(label: str, own: tuple[Any, ...], group: Group) -> list[tuple[Any, ...]]:
    """What all ranks bring; raises ValueError on each of them where some are in other layers, or elsewhere in one."""
    table: list[tuple[str, tuple[Any, ...]]] = [(label, own)] * group.size
    dist.all_gather_object(table, (label, own), group=group.process_group)
    if len({(of_rank, len(call)) for of_rank, call in table}) > 1:
        said = [f"{of_rank} of {call[0]}" for of_rank, call in table]
        raise ValueError(f"{label}: ranks are in other layers: {_by_rank(said)}")
    return [call for _, call in table]


def _disagreement(what: str, table: Sequence[str]) -> str:
    return f"{what}: the ranks do not fit together: {_by_rank(table)}"


def _by_rank(table: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(table))


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
    return f"the ranks of its group run under different recipes; give all the same: {_by_rank(table)}"


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


def check_sharded(collective: str, x: Tensor, shards: ShardMap, group: Group) -> None:
    """Raises ValueError, naming the collective and the sizes, unless this rank brings the rows that ``shards`` says."""
    if shards.size != group.size or x.shape[0] != shards.rows[group.rank]:
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows, but the row counts of the ranks "
            f"are {shards.rows}; give every rank the counts of all"
        )


def check_summed(collective: str, x: Tensor, shards: ShardMap, group: Group) -> None:
    """The same of rows that are to be summed, and split as ``shards`` says."""
    if shards.size != group.size or x.shape[0] != shards.total:
        raise ValueError(
            f"{collective}: rank {group.rank} of {group.size} has {x.shape[0]} rows to sum, of which the ranks are to "
            f"get {shards.rows}; the counts of the {group.size} ranks must add up to the rows"
        )
