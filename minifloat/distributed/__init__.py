"""Tensors split over ranks: which rows lie where, quantized collectives, and the layers' use of them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minifloat.distributed.gather import gather, start_gather
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap
from minifloat.distributed.shards import prepare_shard, quantize_shard

if TYPE_CHECKING:
    from minifloat.distributed.model import parallelize
    from minifloat.distributed.state_dict import (
        load_sharded_optimizer_state_dict,
        load_sharded_state_dict,
        sharded_optimizer_state_dict,
        sharded_state_dict,
    )

__all__ = [
    "Group",
    "ShardMap",
    "gather",
    "load_sharded_optimizer_state_dict",
    "load_sharded_state_dict",
    "parallelize",
    "prepare_shard",
    "quantize_shard",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "start_gather",
]


def __getattr__(name: str) -> Any:
    """What stands above the modules of ``nn``, and brings DTensor along: imported at first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "model" if name == "parallelize" else "state_dict"
    return getattr(import_module(f"{__name__}.{file}"), name)
