"""Tensors split over ranks: which rows lie where, quantized collectives, and the layers' use of them."""

from minifloat.distributed.gather import gather, start_gather
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap
from minifloat.distributed.shards import prepare_shard, quantize_shard

__all__ = ["Group", "ShardMap", "gather", "prepare_shard", "quantize_shard", "start_gather"]
