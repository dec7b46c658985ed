"""FSDP2 with quantized gathers: ``fully_shard`` sends the codes of weights, exactly those of the whole weight."""

from minifloat.distributed.fsdp.api import fully_shard, sharded_weights

__all__ = ["fully_shard", "sharded_weights"]
