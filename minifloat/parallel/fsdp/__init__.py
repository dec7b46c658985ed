"""FSDP2 with quantized gathers: ``fully_shard`` sends the codes of weights, exactly those of the full weight."""

from minifloat.parallel.fsdp.api import full_state_dict, fully_shard, load_full_state_dict, sharded_weights

__all__ = ["full_state_dict", "fully_shard", "load_full_state_dict", "sharded_weights"]
