"""FSDP2 with quantized gathers: ``fully_shard`` sends the codes of weights, exactly those of the whole weight."""

from minifloat.parallel.fsdp.api import fully_shard, sharded_weights
from minifloat.parallel.fsdp.full_state import full_state_dict, load_full_state_dict

__all__ = ["full_state_dict", "fully_shard", "load_full_state_dict", "sharded_weights"]
