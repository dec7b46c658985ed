"""How a vocabulary is split over ranks: the one rule that embedding, output head and cross entropy share."""

from __future__ import annotations

from minifloat.comm.shard_map import ShardMap


def vocabulary_shards(vocabulary: int, ranks: int) -> ShardMap:
    """The tokens of each rank, in their order: ``ceil(vocabulary / ranks)``, and the last rank has what is left.

    So any vocabulary is split as it is, with nothing padded, and as ``torch.chunk`` and DTensor's ``Shard(0)`` do it.

    Raises:
        ValueError: nothing would be left for the last rank.
    """
    most = -(-vocabulary // ranks)
    if vocabulary <= most * (ranks - 1):
        raise ValueError(
            f"a vocabulary of {vocabulary} in pieces of {most} leaves rank {ranks - 1} of {ranks} without a token; "
            "use a smaller tensor-parallel group"
        )
    return ShardMap((most,) * (ranks - 1) + (vocabulary - most * (ranks - 1),))
