"""The shards of many weights cast together: one reduction of amaxes and one launch for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minifloat import delayed
from minifloat.autocast import current
from minifloat.comm.group import Group
from minifloat.comm.sharded_cast import quantize_shard, reduce_amaxes
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Quantized
from minifloat.parallel.fsdp.rows import QuantizedRows
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.recipe import DelayedScaling

if TYPE_CHECKING:
    from minifloat.parallel.fsdp.weight import ShardedWeight


class Cast(NamedTuple):
    """What a cast that is repeated takes.

    Args:
        quantizer: of the orientations that ``amaxes`` are for.
        amaxes: one for each of its casts, all ranks' alike.
        scale: delayed scaling's when they were synchronized, fp32 [1].
    """

    quantizer: Quantizer
    amaxes: Amaxes
    scale: Tensor | None

    def serves(self, dims: Collection[int]) -> bool:
        """There are amaxes for all of these orientations."""
        return COLUMNWISE not in dims or self.quantizer.columnwise

    def along(self, dims: Collection[int]) -> tuple[Quantizer, Amaxes]:
        """How to cast in these orientations alone; in all, where one operand serves them."""
        rowwise, columnwise = ROWWISE in dims, COLUMNWISE in dims
        if len(self.quantizer.casts) == 1 or (rowwise and columnwise):
            return self.quantizer, self.amaxes
        return self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise), (self.amaxes[columnwise],)

    def again(self, rows: Tensor, dims: Collection[int]) -> Quantized:
        """The operands of ``rows`` for ``dims``, as :func:`cast_shards` gave them; no collective."""
        quantizer, amaxes = self.along(dims)
        with torch.no_grad():
            return cast_all([rows], [quantizer], [amaxes], scales=[self.scale])[0]


@torch.no_grad()
def cast_shards(weights: Sequence[ShardedWeight], columnwise: bool = True) -> None:
    """Gives every weight the parts that this rank sends, bit for bit those of the quantized whole; a collective.

    What one scale spans is reduced in one all-reduce a group. Shards that are quantized are their parts.

    Args:
        columnwise: for the orientation that backward reads, too; its codes only come now where they cannot later.

    Raises:
        ValueError: ranks that gather a weight would cast it with different delayed scales.
    """
    checked: set[tuple[DelayedScaling, Group]] = set()
    together: dict[Group, list[ShardedWeight]] = defaultdict(list)
    for weight in weights:
        weight.parts = weight.cast = None  # its memory may serve the new one
        if weight.delayed is not None:
            _check_scales(weight, weight.delayed, checked)
        if weight.is_quantized:
            weight.parts = [_quantized_part(weight, checked)]
        elif weight.is_plain:
            together[weight.group].append(weight)
        else:  # a columnwise operand that is cast from the rowwise one, or random bits; of one parameter
            rows, (scale,) = weight.rows_to_cast(), _delayed_scales([weight])
            weight.parts = [quantize_shard(rows, weight.quantizer, weight.owned[0], weight.group, scale=scale)]
    for group, those in together.items():
        quantizers = [each.quantizer.with_usage(columnwise=each.quantizer.columnwise and columnwise) for each in those]
        sources = [weight.rows_to_cast() for weight in those]
        amaxes = reduce_amaxes(find_amaxes(sources, quantizers), quantizers, group)
        scales = _delayed_scales(those)
        for i, weight in enumerate(those):
            if weight.is_aligned:
                weight.cast = Cast(quantizers[i], amaxes[i], scales[i])
                if weight.fsdp.gathers_for_backward:  # what backward reads is cast then
                    quantizers[i], amaxes[i] = weight.cast.along((ROWWISE,))
        for weight, operands in zip(those, cast_all(sources, quantizers, amaxes, scales=scales), strict=True):
            weight.set_parts(operands)


def _quantized_part(weight: ShardedWeight, checked: set[tuple[DelayedScaling, Group]]) -> Quantized:
    rows = weight.parameters[0].rows
    assert isinstance(rows, QuantizedRows)
    if rows.scale is not None and "forward_scaling" in weight.layer._modules:
        recipe = weight.layer._recipe_in_force()
        if isinstance(recipe, DelayedScaling):
            _check_scales(weight, recipe, checked)
        rows.scale = weight.layer._weight_scale()  # for optimizers: a move or a checkpoint may have replaced the buffer
    return rows.part


def _delayed_scales(weights: Sequence[ShardedWeight]) -> list[Tensor | None]:
    """Copies of what delayed scaling casts the weights with now, fp32 [1]; None for the others."""
    own = [weight.layer._weight_scale() for weight in weights if weight.delayed is not None]
    copies = iter(torch.cat(own).split(1) if own else ())
    return [None if weight.delayed is None else next(copies) for weight in weights]


def _check_scales(weight: ShardedWeight, recipe: DelayedScaling, checked: set[tuple[DelayedScaling, Group]]) -> None:
    """Raises where ranks that gather a weight would cast it with different delayed scales; looked at once a recipe."""
    if weight.group.size > 1 and (recipe, weight.group) not in checked:
        context = current()
        group = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
        delayed.check_same_scale(f"{weight.layer._label}: the weight is sharded", weight.group, recipe, group)
        checked.add((recipe, weight.group))
