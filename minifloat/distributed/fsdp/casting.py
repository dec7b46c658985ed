"""The shards of many weights cast together: one reduction of amaxes and one launch for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import delayed
from minifloat.autocast import current
from minifloat.distributed.collectives import max_of_all
from minifloat.distributed.fsdp.rows import QuantizedRows
from minifloat.distributed.group import Group
from minifloat.distributed.shards import casts_alone, quantize_shard
from minifloat.formats import ROWWISE
from minifloat.functional.plan import FORWARD_SLOTS
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor

if TYPE_CHECKING:
    from minifloat.distributed.fsdp.weight import ShardedWeight


@torch.no_grad()
def cast_shards(weights: Sequence[ShardedWeight], columnwise: bool = True) -> None:
    """Gives every weight the part that this rank sends, bit for bit that of the quantized whole; a collective.

    What one scale spans is agreed on in one all-reduce a group. Where blocks straddle ranks, each such weight adds the
    exchange that :func:`~minifloat.distributed.quantize_shard` describes. Shards that are quantized are their parts.

    Args:
        columnwise: in the orientation that backward reads, too.

    Raises:
        ValueError: ranks that gather a weight do not agree on the delayed scale that it is cast with.
    """
    by_group: dict[Group, list[ShardedWeight]] = defaultdict(list)
    for weight in weights:
        rows = weight.rows
        if isinstance(rows, QuantizedTensor):
            _bind_scale(weight, rows)
            weight.part = rows.part if isinstance(rows, QuantizedRows) else rows.operands
            continue
        weight.part = None  # its memory may serve the new one
        quantizer = weight.quantizer.with_usage(columnwise=weight.quantizer.columnwise and columnwise)
        if casts_alone(quantizer, weight.shards):
            by_group[weight.group].append(weight)
        else:
            weight.part = quantize_shard(rows, quantizer, weight.shards, weight.group, scale=_delayed_scale(weight))
    for group, together in by_group.items():
        quantizers = [w.quantizer.with_usage(columnwise=w.quantizer.columnwise and columnwise) for w in together]
        xs = [weight.rows for weight in together]
        levels = _agreed(find_amaxes(xs, quantizers), quantizers, group)
        parts = cast_all(xs, quantizers, levels, scales=[_delayed_scale(weight) for weight in together])
        for weight, part in zip(together, parts, strict=True):
            weight.part = part


def _agreed(amaxes: Sequence[Amaxes], quantizers: Sequence[Quantizer], group: Group) -> list[Amaxes]:
    """The largest over the ranks of all tensors' amaxes, in one all-reduce; those of single rows are a rank's own."""
    result = [list(levels) for levels in amaxes]
    places: list[tuple[int, int]] = []
    own: list[Tensor] = []
    for i, (quantizer, levels) in enumerate(zip(quantizers, amaxes, strict=True)):
        for j, ((fmt, dim), amax) in enumerate(zip(quantizer.casts, levels, strict=True)):
            if amax is not None and fmt.needs_amax and not (fmt.amax_per_row and dim == ROWWISE):
                places.append((i, j))
                own.append(amax)
    for (i, j), amax in zip(places, max_of_all(own, group), strict=True):
        result[i][j] = amax
    return [tuple(levels) for levels in result]


def _delayed_scale(weight: ShardedWeight) -> Tensor | None:
    """The scale that the layer's history gives, fp32 [1], where it has one."""
    if weight.delayed is None:
        return None
    _check_scales_agree(weight, weight.delayed)
    return _layer_scale(weight)


def _layer_scale(weight: ShardedWeight) -> Tensor:
    slot = FORWARD_SLOTS.index("weight")
    return weight.layer.forward_scaling.scale[slot : slot + 1]


def _bind_scale(weight: ShardedWeight, rows: QuantizedTensor) -> None:
    """Lets optimizers cast with the layer's scale, whose buffer a move or a checkpoint may have replaced."""
    if rows.scale is not None and "forward_scaling" in weight.layer._modules:
        recipe = weight.layer.recipe_in_force()
        if isinstance(recipe, DelayedScaling):
            _check_scales_agree(weight, recipe)
        rows.scale = _layer_scale(weight)


def _check_scales_agree(weight: ShardedWeight, recipe: DelayedScaling) -> None:
    """Raises where ranks that gather a weight would cast it with different delayed scales."""
    if weight.group.size == 1:
        return
    if not recipe.reduce_amax:
        raise ValueError(
            f"{weight.layer.label}: the weight is sharded, and all ranks must cast it with one scale, but "
            "DelayedScaling(reduce_amax=False) gives each rank its own; use reduce_amax=True"
        )
    context = current()
    group = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
    if group is not None and group.size == dist.get_world_size():
        return
    agree = {dist.get_rank()} if group is None else set(dist.get_process_group_ranks(group.process_group))
    missing = set(dist.get_process_group_ranks(weight.group.process_group)) - agree
    if missing:
        raise ValueError(
            f"{weight.layer.label}: the weight is sharded, and all ranks must cast it with one scale, but autocast's "
            f"amax_reduction_group leaves out ranks {sorted(missing)}; give it one that contains the sharding group"
        )
