"""The shards of many weights cast together: one reduction of amaxes and one launch for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minifloat import delayed
from minifloat.autocast import current
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap, unit_rows
from minifloat.comm.sharded_cast import owned_rows, quantize_shard, reduce_amaxes
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.plan import FORWARD_SLOTS
from minifloat.nn.sharding import check_scales_agree
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp.rows import QuantizedRows
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor

if TYPE_CHECKING:
    from minifloat.parallel.fsdp.parameter import ShardedParameter
    from minifloat.parallel.fsdp.weight import ShardedWeight


class Cast(NamedTuple):
    """A cast of one matrix, which is this rank's rows of all parameters of a weight below each other.

    Args:
        quantizer: of both orientations, or of one.
        unit: rows that lie together.
        straddling: for each parameter, whether such units straddle ranks, and their rows move.
        lengths: of each operand, by spec and dim, and by the names of its tensors: the rows that are each parameter's.
    """

    quantizer: Quantizer
    unit: int
    straddling: tuple[bool, ...]
    lengths: dict[tuple[str, int], dict[str, list[int]]]

    @staticmethod
    def of(quantizer: Quantizer, shards: Sequence[ShardMap], rank: int) -> Cast:
        unit = max(unit_rows(fmt, dim) for fmt, dim in quantizer.casts)
        lengths = {}
        for fmt, dim in quantizer.casts:
            maps = [dict(each.gathered(fmt, dim)) for each in shards]
            lengths[fmt.spec, dim] = {name: [each[name].rows[rank] for each in maps] for name in maps[0]}
        return Cast(quantizer, unit, tuple(not each.aligned(unit) for each in shards), lengths)


class Casting(NamedTuple):
    """How this rank's rows of a weight are cast.

    Args:
        quantizer: of the weight.
        casts: what gives its operands: one cast for all, or one for each orientation, where rows move; none where
            :func:`~minifloat.distributed.quantize_shard` casts each parameter by itself.
        rows: how many of each parameter are this rank's.
    """

    quantizer: Quantizer
    casts: tuple[Cast, ...]
    rows: tuple[int, ...]

    @staticmethod
    def of(quantizer: Quantizer, shards: Sequence[ShardMap], rank: int) -> Casting | None:
        """None where the parts of several parameters are not those of casting the whole, or cannot be separated.

        That is where a unit of rows (:func:`~minifloat.comm.shard_map.unit_rows`) lies in two parameters.
        """
        formats = {quantizer.row_format, quantizer.format(COLUMNWISE)}
        plain = not quantizer.chained and all(fmt.rounding != "stochastic" for fmt in formats)
        units = [unit_rows(fmt, dim) for fmt, dim in quantizer.casts]
        if len(shards) > 1 and (not plain or any(each.total % unit for each in shards[:-1] for unit in units)):
            return None
        casts: tuple[Quantizer, ...] = ()
        if plain and (len(units) == 1 or all(each.aligned(unit) for each in shards for unit in units)):
            casts = (quantizer,)
        elif plain:
            casts = quantizer.with_usage(columnwise=False), quantizer.with_usage(rowwise=False)
        made = tuple(Cast.of(each, shards, rank) for each in casts)
        return Casting(quantizer, made, tuple(each.rows[rank] for each in shards))

    @property
    def repeatable(self) -> bool:
        """A rank can cast its rows once more by itself, to the same bits, with the amaxes that were agreed on."""
        fixed = all(fmt.rounding != "stochastic" for fmt, _ in self.quantizer.casts)
        return len(self.casts) == 1 and fixed and not any(self.casts[0].straddling)

    def sources(self, parameters: Sequence[ShardedParameter]) -> list[Tensor]:
        """What each of the casts is of."""
        known: dict[int, Tensor] = {}
        for cast in self.casts:
            if cast.unit not in known:
                rows = [owned_rows(each.rows, cast.unit, each.shards, each.group) for each in parameters]
                known[cast.unit] = rows[0] if len(rows) == 1 else torch.cat(rows)
        return [known[cast.unit] for cast in self.casts]

    def parts(self, made: Sequence[Quantized]) -> Sequence[Quantized]:
        """What this rank sends of each parameter, of what the casts gave; views."""
        if len(self.rows) == 1 and len(made) == 1 and not self.casts[0].straddling[0]:
            return made
        row, column = made[0].rowwise, made[-1].columnwise
        rows = self._split(row, self.casts[0])
        columns = rows if column is row else self._split(column, self.casts[-1])
        return [Quantized(*both) for both in zip(rows, columns, strict=True)]

    def _split(self, operand: Operand | None, cast: Cast) -> Sequence[Operand | None]:
        if operand is None:
            return [None] * len(self.rows)
        shapes = [(rows, operand.shape[1]) for rows in self.rows]
        if len(shapes) == 1:
            return [operand._replace(shape=shapes[0])]
        lengths = cast.lengths[operand.format.spec, operand.dim]
        views = {name: getattr(operand, name).split(rows) for name, rows in lengths.items()}
        return [
            operand._replace(shape=shape, **{name: tensors[i] for name, tensors in views.items()})
            for i, shape in enumerate(shapes)
        ]


class Agreed(NamedTuple):
    """What a cast that is repeated takes.

    Args:
        casting: of the orientations that ``amaxes`` are for.
        amaxes: one for each of its quantizer's casts, all ranks' alike.
        scale: delayed scaling's when they were agreed on, fp32 [1].
    """

    casting: Casting
    amaxes: Amaxes
    scale: Tensor | None

    def serves(self, dims: Iterable[int]) -> bool:
        """There are amaxes for all of these orientations."""
        return COLUMNWISE not in dims or self.casting.quantizer.columnwise

    def along(self, dims: Collection[int]) -> tuple[Quantizer, Amaxes]:
        """How to cast in these orientations alone; in all, where one operand serves them."""
        quantizer = self.casting.quantizer
        if len(quantizer.casts) == 1 or (ROWWISE in dims and COLUMNWISE in dims):
            return quantizer, self.amaxes
        row, column = self.amaxes
        if ROWWISE in dims:
            return quantizer.with_usage(columnwise=False), (row,)
        return quantizer.with_usage(rowwise=False), (column,)


@torch.no_grad()
def cast_again(weight: ShardedWeight, agreed: Agreed, dims: Collection[int]) -> Sequence[Quantized]:
    """The parts of a weight as :func:`cast_shards` gave them, along ``dims``; no collective."""
    quantizer, amaxes = agreed.along(dims)
    (source,) = agreed.casting.sources(weight.parameters)
    return agreed.casting.parts(cast_all([source], [quantizer], [amaxes], scales=[agreed.scale]))


@torch.no_grad()
def cast_shards(weights: Sequence[ShardedWeight], columnwise: bool = True) -> None:
    """Gives every weight the parts that this rank sends, bit for bit those of the quantized whole; a collective.

    What one scale spans is agreed on in one all-reduce a group. Where blocks straddle ranks, each such weight adds the
    exchange that :func:`~minifloat.distributed.quantize_shard` describes. Shards that are quantized are their parts.

    Args:
        columnwise: for the orientation that backward reads, too; its codes only come now where they cannot later.

    Raises:
        ValueError: ranks that gather a weight do not agree on the delayed scale that it is cast with.
    """
    checked: set[tuple[DelayedScaling, Group]] = set()
    together: dict[Group, list[ShardedWeight]] = defaultdict(list)
    for weight in weights:
        if weight.is_quantized:
            weight.parts = [_kept_quantized(weight, checked)]
            continue
        weight.parts = weight.agreed = None  # its memory may serve the new one
        if weight.delayed is not None:
            _check_scales(weight, weight.delayed, checked)
        if weight.casting(columnwise).casts:
            together[weight.group].append(weight)
        else:
            weight.parts = _cast_by_parameter(weight, weight.casting(columnwise).quantizer)
    for group, those in together.items():
        _cast_together(those, group, columnwise)


def _kept_quantized(weight: ShardedWeight, checked: set[tuple[DelayedScaling, Group]]) -> Quantized:
    rows = weight.parameters[0].rows
    assert isinstance(rows, QuantizedTensor)
    _bind_scale(weight, rows, checked)
    return rows.part if isinstance(rows, QuantizedRows) else rows.operands


def _cast_by_parameter(weight: ShardedWeight, quantizer: Quantizer) -> list[Quantized]:
    scale = _delayed_scale(weight)
    return [quantize_shard(each.rows, quantizer, each.shards, each.group, scale=scale) for each in weight.parameters]


def _cast_together(weights: Sequence[ShardedWeight], group: Group, columnwise: bool) -> None:
    """One launch for amaxes, one reduction, one launch for casts."""
    owners: list[ShardedWeight] = []
    casts: list[Cast] = []
    xs: list[Tensor] = []
    for weight in weights:
        casting = weight.casting(columnwise)
        owners += [weight] * len(casting.casts)
        casts += casting.casts
        xs += casting.sources(weight.parameters)
    quantizers = [cast.quantizer for cast in casts]
    levels = reduce_amaxes(find_amaxes(xs, quantizers), quantizers, group)
    scales = _delayed_scales(owners)
    for i, weight in enumerate(owners):
        if weight.casting(columnwise).repeatable:
            weight.agreed = Agreed(weight.casting(columnwise), levels[i], scales[i])
            if weight.gathers_again:  # what backward reads is cast then
                quantizers[i], levels[i] = weight.agreed.along([ROWWISE])
    results = iter(cast_all(xs, quantizers, levels, scales=scales))
    for weight in weights:
        casting = weight.casting(columnwise)
        weight.parts = casting.parts([next(results) for _ in casting.casts])


# ---- delayed scaling ----


def _delayed_scale(weight: ShardedWeight) -> Tensor | None:
    """The scale that the layer's history gives, fp32 [1], where it has one."""
    return None if weight.delayed is None else _layer_scale(weight)


def _delayed_scales(weights: Sequence[ShardedWeight]) -> list[Tensor | None]:
    """Those of many weights, as they are now."""
    found = [_delayed_scale(weight) for weight in weights]
    own = [scale for scale in found if scale is not None]
    copies = iter(torch.cat(own).split(1) if own else ())
    return [None if scale is None else next(copies) for scale in found]


def _layer_scale(weight: ShardedWeight) -> Tensor:
    slot = FORWARD_SLOTS.index("weight")
    return weight.layer.forward_scaling.scale[slot : slot + 1]


def _bind_scale(weight: ShardedWeight, rows: QuantizedTensor, checked: set[tuple[DelayedScaling, Group]]) -> None:
    """Lets optimizers cast with the layer's scale, whose buffer a move or a checkpoint may have replaced."""
    if rows.scale is not None and "forward_scaling" in weight.layer._modules:
        recipe = weight.layer._recipe_in_force()
        if isinstance(recipe, DelayedScaling):
            _check_scales(weight, recipe, checked)
        rows.scale = _layer_scale(weight)


def _check_scales(weight: ShardedWeight, recipe: DelayedScaling, checked: set[tuple[DelayedScaling, Group]]) -> None:
    """Raises where ranks that gather a weight would cast it with different delayed scales; looked at once a recipe."""
    if weight.group.size > 1 and (recipe, weight.group) not in checked:
        context = current()
        group = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
        check_scales_agree(f"{weight.layer._label}: the weight is sharded", weight.group, recipe, group)
        checked.add((recipe, weight.group))
