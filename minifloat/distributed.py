"""Tensors and models split over ranks; ``comm`` has the collectives, ``parallel`` what is done to models."""

from minifloat.arguments import checked
from minifloat.comm import sharded_cast as _cast
from minifloat.comm.group import Group, ShardMap
from minifloat.functional import tensor_parallel as _gather
from minifloat.nn.expert_parameters import ep_parameters
from minifloat.nn.tensor_parallel import etp_parameters
from minifloat.parallel.data_parallel import data_parallel, reduce_replicated
from minifloat.parallel.fsdp import full_state_dict, fully_shard, load_full_state_dict, sharded_weights
from minifloat.parallel.parallelize import parallelize
from minifloat.parallel.state_dict import (
    load_sharded_optimizer_state_dict,
    load_sharded_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)

# What layers call for each forward is checked where users call it.
gather = checked(_cast.gather)
start_gather = checked(_cast.start_gather)
prepare_shard = checked(_gather.prepare_shard)
quantize_shard = checked(_cast.quantize_shard)

__all__ = [
    "Group", "ShardMap", "data_parallel", "ep_parameters", "etp_parameters", "full_state_dict", "fully_shard",
    "gather", "load_full_state_dict", "load_sharded_optimizer_state_dict", "load_sharded_state_dict", "parallelize",
    "prepare_shard", "quantize_shard", "reduce_replicated", "sharded_optimizer_state_dict", "sharded_state_dict",
    "sharded_weights", "start_gather",
]  # fmt: skip
