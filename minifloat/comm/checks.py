"""Checks of what ranks must agree on: the recipe of a layer, and the rows of a collective."""

from __future__ import annotations

import zlib
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.comm.group import Group, group_of_name
from minifloat.comm.shard_map import ShardMap


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
    said = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(table))
    return f"the ranks of its group run under different recipes; give all the same: {said}"


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
