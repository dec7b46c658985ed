"""Tensors split over ranks: which rows lie where, quantized collectives, and the layers' use of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minifloat.arguments import checked
from minifloat.distributed import gather as _gather
from minifloat.distributed import shards as _shards
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap

if TYPE_CHECKING:
    from minifloat.distributed.ddp import data_parallel
    from minifloat.distributed.fsdp import full_state_dict, fully_shard, load_full_state_dict, sharded_weights
    from minifloat.distributed.model import parallelize
    from minifloat.distributed.state_dict import (
        load_sharded_optimizer_state_dict,
        load_sharded_state_dict,
        sharded_optimizer_state_dict,
        sharded_state_dict,
    )
    from minifloat.distributed.tensor_parallel import set_check, set_overlap
    from minifloat.functional.shared_cast import gathered_once

# What layers call for each forward is checked where users call it.
gather = checked(_gather.gather)
start_gather = checked(_gather.start_gather)
prepare_shard = checked(_shards.prepare_shard)
quantize_shard = checked(_shards.quantize_shard)

__all__ = [
    "Group",
    "ShardMap",
    "data_parallel",
    "full_state_dict",
    "fully_shard",
    "gather",
    "gathered_once",
    "load_full_state_dict",
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "parallelize",
    "prepare_shard",
    "quantize_shard",
    "set_check",
    "set_overlap",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "sharded_weights",
    "start_gather",
]


def __getattr__(name: str) -> Any:
    """What stands above this package's other files, or brings DTensor along: imported at first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "gathered_once":
        return getattr(import_module("minifloat.functional.shared_cast"), name)
    files = {"parallelize": "model", "set_check": "tensor_parallel", "set_overlap": "tensor_parallel"}
    files |= {"data_parallel": "ddp"} | dict.fromkeys(
        ("full_state_dict", "fully_shard", "load_full_state_dict", "sharded_weights"), "fsdp"
    )
    file = files.get(name, "state_dict")
    return getattr(import_module(f"{__name__}.{file}"), name)
