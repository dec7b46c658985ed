"""Casts of sharded tensors, each rank's exact part of the quantized whole, and gathers of these parts.

Where a scale spans rows of several ranks they communicate first: one scale for the whole tensor, or NVFP4's amax, by a
MAX all-reduce of amaxes; blocks, rotations and packed bytes that straddle ranks by sending their rows to the rank of
the first one. Random bits depend on an element's place in the whole. A gather gives the quantized whole, to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.comm.collectives import (
    Pending,
    all_reduce_max,
    check_sharded,
    start_all_gather_rows,
    start_exchange_rows,
    wait_tensor,
)
from minifloat.comm.group import Group, ShardMap, cached, unit_rows
from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, Format
from minifloat.formats.elements import FLT_MAX
from minifloat.operand import Operand, Quantized
from minifloat.ops import quantize
from minifloat.ops.library import apart, directly
from minifloat.quantizer import Amaxes, Quantizer, as_matrix, cast_all, find_amaxes


def quantize_shard(
    x: Tensor, quantizer: Quantizer, shards: ShardMap, group: Group, *, amaxes: Amaxes | None = None,
    scale: Tensor | None = None, rng: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Casts this rank's rows of a sharded matrix, a collective; :func:`gather` joins the parts.

    Codes and scales equal, bit for bit, those of the full matrix, for the rows in ``shards.codes`` and
    ``shards.scales``: this rank's own, except in units that straddle ranks. The operands have the logical shape of
    ``x``.

    Args:
        x: [..., K], bf16, fp16 or fp32, leading dims flattened: the rows of this rank, perhaps none. Any strides.
        amaxes: those of ``x`` alone, if a producer's kernel found them already (``Quantizer.amax``).
        scale: fp32 [1], what delayed scaling casts with, equal on all ranks. The measured amax is that of ``x`` alone.
        rng: int64 [2], seed and offset of stochastic rounding, equal on all ranks. None: those that the first draws.

    Raises:
        ValueError: ``x`` has not the rows that ``shards`` says, or delayed scaling was given no scale.
    """
    x = as_matrix(x)
    check_sharded("quantize_shard", x, shards, group)
    if group.size == 1:
        return cast_all([x], [quantizer], [amaxes], None if rng is None else [rng], scales=[scale])[0]
    x = x.contiguous()
    if quantizer.chained:
        first = quantizer.with_usage(rowwise=True, columnwise=False)
        made_first = quantize_shard(x, first, shards, group, amaxes=amaxes, scale=scale, rng=rng).any
        second = _cast_values_of(made_first, Quantizer(quantizer.format(COLUMNWISE), rowwise=False), shards, group)
        return Quantized(made_first if quantizer.rowwise else None, second)
    quantizers, units, stochastic = _sharded_casts(quantizer, shards)
    sources = [x if unit == 1 else owned_rows(x, unit, shards, group) for unit in units]
    found = find_amaxes(sources, quantizers) if amaxes is None else _given(amaxes, sources, x, quantizers)
    levels = reduce_amaxes(found, quantizers, group, in_place=amaxes is None)
    rngs = None
    if stochastic:
        if rng is None:  # all ranks draw, so that their generators stay in step
            rng = wait_tensor(torch.ops._c10d_functional.broadcast(quantize.draw_seed(apart(x, 0)), 0, group.name))
        firsts = [shards.whole_units(unit).first(group.rank) for unit in units]
        rngs = [torch.cat([rng, torch.full_like(rng[:1], first)]) for first in firsts]
    made = cast_all(sources, quantizers, levels, rngs, scales=[scale] * len(units))
    return _of_rows(Quantized(made[0].rowwise, made[-1].columnwise), x)


class Repeat(NamedTuple):
    """Repeats the cast of whole blocks: amaxes that ranks share, and delayed scaling's scale of then, fp32 [1]."""

    quantizer: Quantizer
    amaxes: Amaxes
    scale: Tensor | None

    def serves(self, dims: Collection[int]) -> bool:
        """Whether there are amaxes for all of these orientations."""
        return COLUMNWISE not in dims or self.quantizer.columnwise

    def along(self, dims: Collection[int]) -> tuple[Quantizer, Amaxes]:
        """Returns the cast in these orientations alone; in all, where one operand serves them."""
        rowwise, columnwise = ROWWISE in dims, COLUMNWISE in dims
        if len(self.quantizer.casts) == 1 or (rowwise and columnwise):
            return self.quantizer, self.amaxes
        return self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise), (self.amaxes[columnwise],)

    def recast(self, rows: Tensor, dims: Collection[int]) -> Quantized:
        """The operands of ``rows`` for ``dims``, as :func:`cast_shards` gave them; no collective."""
        quantizer, amaxes = self.along(dims)
        with torch.no_grad():
            return cast_all([rows], [quantizer], [amaxes], scales=[self.scale])[0]


def is_plain(quantizer: Quantizer) -> bool:
    """Codes follow from values and amaxes, for each orientation by itself, and no random bits are drawn."""
    return not quantizer.chained and all(fmt.rounding != "stochastic" for fmt, _ in quantizer.casts)


def quantize_shards(
    xs: Sequence[Tensor], quantizers: Sequence[Quantizer], maps: Sequence[ShardMap], group: Group,
    scales: Sequence[Tensor | None], dims: Sequence[Collection[int]] | None = None,
) -> list[tuple[Quantized, Repeat | None]]:  # fmt: skip
    """:func:`quantize_shard` of many matrices [rows, K], with one all-reduce for all amaxes and one launch a phase.

    Those that are not plain are cast one by one. Each comes with what repeats its cast, if this rank alone may.
    ``dims``: the orientations of each to cast now, where the others may follow by repetition; None: all.
    """
    made: dict[int, Quantized] = {}
    alone: set[int] = set()
    repeats: dict[int, Repeat] = {}
    places: list[int] = []
    sources: list[Tensor] = []
    casts: list[Quantizer] = []
    for i, (x, quantizer, shards) in enumerate(zip(xs, quantizers, maps, strict=True)):
        if not is_plain(quantizer):
            made[i] = quantize_shard(x, quantizer, shards, group, scale=scales[i])
            continue
        own, units, _ = _sharded_casts(quantizer, shards)
        alone |= {i} if units == [1] else set()
        places += [i] * len(own)
        casts += own
        sources += [x.contiguous() if unit == 1 else owned_rows(x, unit, shards, group) for unit in units]
    levels = reduce_amaxes(find_amaxes(sources, casts), casts, group, in_place=True)
    delayed = {i: scale for i in alone if (scale := scales[i]) is not None}
    copies = dict(zip(delayed, torch.cat([*delayed.values()]).split(1) if delayed else (), strict=True))
    for n, i in enumerate(places):
        if i in alone:
            repeats[i] = Repeat(quantizers[i], levels[n], copies.get(i))  # the next update writes the scale itself
            casts[n], levels[n] = repeats[i].along((ROWWISE, COLUMNWISE) if dims is None else dims[i])
    parts = cast_all(sources, casts, levels, scales=[scales[i] for i in places])
    for i, cast in zip(places, parts, strict=True):
        made[i] = Quantized(made[i].rowwise, cast.columnwise) if i in made else cast
    return [(_of_rows(made[i], x), repeats.get(i)) for i, x in enumerate(xs)]


@cached
def _sharded_casts(quantizer: Quantizer, shards: ShardMap) -> tuple[list[Quantizer], list[int], bool]:
    """Returns the quantizers of a rank's part in all orientations, and whether some draw random bits.

    One quantizer for both orientations, unless they cast other rows: where some straddle ranks. For each the rows that
    must lie together; 1 where none straddle.
    """
    stochastic = any(fmt.rounding == "stochastic" for fmt, _ in quantizer.casts)
    units = [unit_rows(fmt, dim) for fmt, dim in quantizer.casts]
    units = [1 if shards.aligned(unit) else unit for unit in units]
    if len({shards.whole_units(unit) for unit in units}) < 2:
        return [quantizer], [max(units, default=1)], stochastic
    return [quantizer.with_usage(columnwise=False), quantizer.with_usage(rowwise=False)], units, stochastic


def _of_rows(made: Quantized, x: Tensor) -> Quantized:
    """Operands with the logical shape of ``x``, where their codes are not of the rows that a rank has."""
    shape, one = (x.shape[0], x.shape[1]), made.columnwise is made.rowwise
    rowwise, columnwise = (o if o is None or o.shape == shape else o._replace(shape=shape) for o in made)
    return Quantized(rowwise, rowwise if one else columnwise)


def _given(amaxes: Amaxes, sources: Sequence[Tensor], x: Tensor, quantizers: Sequence[Quantizer]) -> Sequence[Amaxes]:
    """The amaxes that a caller knows of ``x``; found anew of rotated rows that moved, whose values no rank had."""
    if len(quantizers) == 1 and sources[0] is x:
        return [amaxes]
    each = iter(amaxes)
    known = [tuple([next(each) for _ in quantizer.casts]) for quantizer in quantizers]
    return [
        levels
        if source is x or all(fmt.transform == "none" for fmt, _ in quantizer.casts)
        else find_amaxes([source], [quantizer])[0]
        for levels, source, quantizer in zip(known, sources, quantizers, strict=True)
    ]


def _cast_values_of(rowwise: Operand, quantizer: Quantizer, shards: ShardMap, group: Group) -> Operand | None:
    """Makes the columnwise operand of a chained quantizer: a second cast, of what the rowwise one stands for."""
    unit = unit_rows(rowwise.format, ROWWISE)
    owned = shards.whole_units(unit).rows[group.rank], rowwise.shape[1]
    values = _return_rows(rowwise._replace(shape=owned).dequantize(), unit, shards, group)
    return quantize_shard(values, quantizer, shards, group).columnwise


# ---- amax synchronization ----


def reduce_amaxes(
    amaxes: Sequence[Amaxes], quantizers: Sequence[Quantizer], group: Group, *, in_place: bool = False
) -> list[Amaxes]:
    """The largest over the ranks of many tensors' amaxes, in one all-reduce; those of single rows are a rank's own.

    Args:
        amaxes: for each tensor one entry a cast. Scales, and None where blocks find their own, stay what they are.
        in_place: the result may take the memory of ``amaxes``.
    """
    result = [list(levels) for levels in amaxes]
    shared: dict[tuple[int, int], Tensor] = {}
    for i, quantizer in enumerate(quantizers):
        for j in _shared_amaxes(quantizer):
            level = result[i][j]
            if level is not None:
                shared[i, j] = level
    for (i, j), largest in zip(shared, all_reduce_max(list(shared.values()), group, in_place=in_place), strict=True):
        result[i][j] = largest
    return [tuple(levels) for levels in result]


@torch.no_grad()
def scale_of(
    xs: Sequence[Tensor], quantizer: Quantizer, scale: Tensor, group: Group, margin: int = 0, *, keeps: bool = False
) -> Tensor:
    """Computes the delayed scale, fp32 [1], of tensors that share it: ``max * 2^-margin / amax``; a collective.

    ``scale``: what it is where that is undefined, and with ``keeps`` also where no value saturates under it.
    """
    fmt = quantizer.given
    if fmt is None:
        return scale
    amaxes = [levels[0] for levels in find_amaxes(xs, [Quantizer(Format(fmt.element))] * len(xs))]
    (amax,) = all_reduce_max([torch.cat([amax for amax in amaxes if amax is not None]).amax(0, keepdim=True)], group)
    largest = torch.full_like(amax, ELEMENTS[fmt.element].max * 2.0**-margin)
    held = largest / scale * (1 + 2**-6) if keeps else 0  # a rounding above it is no saturation
    return torch.where(amax.isfinite() & (amax > held), (largest / amax).clamp(max=FLT_MAX), scale)


@cached
def _shared_amaxes(quantizer: Quantizer) -> tuple[int, ...]:
    """The casts whose amax all ranks share."""
    return tuple([
        i for i, (fmt, dim) in enumerate(quantizer.casts)
        if fmt.reduces_amax(dim)
    ])  # fmt: skip


# ---- rows of straddling units ----


def owned_rows(x: Tensor, unit: int, shards: ShardMap, group: Group) -> Tensor:
    """Returns the rows of the units that this rank owns: sends those of units that began on earlier ranks there."""
    if shards.aligned(unit):
        return x
    sent = shards.sent(unit)
    head = sum(sent[group.rank])
    received = start_exchange_rows(x[:head], sent[group.rank], [line[group.rank] for line in sent], group).wait()
    return torch.cat([x[head:], received])


def _return_rows(values: Tensor, unit: int, shards: ShardMap, group: Group) -> Tensor:
    """The inverse of :func:`owned_rows`."""
    if shards.aligned(unit):
        return values
    sent = shards.sent(unit)
    taken = [line[group.rank] for line in sent]
    own = values.shape[0] - sum(taken)
    head = start_exchange_rows(values[own:], taken, sent[group.rank], group).wait()
    return torch.cat([head, values[:own]])


# ---- the gather ----


def gather(
    part: Quantized, shards: ShardMap, group: Group, *, rowwise: bool, columnwise: bool, gemm_ready: bool = False
) -> Quantized:
    """Gathers the quantized matrix [sum(rows), K] from the parts of all ranks; arguments as in :func:`start_gather`."""
    return start_gather(
        [part], shards, group, rowwise=rowwise, columnwise=columnwise, gemm_ready=gemm_ready, overlapped=False
    ).wait()[0]


def start_gather(
    parts: Sequence[Quantized], shards: ShardMap, group: Group, *, rowwise: bool, columnwise: bool,
    gemm_ready: bool = False, overlapped: bool = True,
) -> Pending[list[Quantized]]:  # fmt: skip
    """Starts gathering several quantized tensors in one call of the backend; ``wait()`` returns them.

    Only codes, scales of blocks and amaxes of rows are sent; all ranks have the scale or amax of the full tensor. The
    amax measured by a delayed cast stays that of this rank's rows.

    Args:
        parts: of each tensor what :func:`~minifloat.comm.sharded_cast.quantize_shard` gave.
        shards: the rows of every rank, the same for every tensor.
        rowwise, columnwise: the orientations wanted.
        gemm_ready: lay codes out in memory as this device's GEMMs read them (see ``Quantizer.layouts``), after the
            wait.
        overlapped: as in :func:`~minifloat.comm.collectives.start_all_gather_rows`.

    Raises:
        ValueError: a part lacks an orientation or has not the rows that ``shards`` says.
    """
    dims = [ROWWISE] * rowwise + [COLUMNWISE] * columnwise
    wanted = [{dim: part.along(dim) for dim in dims} for part in parts]
    owns = {id(own): own for operands in wanted for own in operands.values()}  # one that serves two dims once
    xs: list[Tensor] = []
    maps: list[ShardMap] = []
    for own in owns.values():
        for field, rows in shards.gathered(own.format, own.dim):
            xs.append(getattr(own, field))
            maps.append(rows)
            check_sharded("gather", xs[-1], rows, group)
    transfer = start_all_gather_rows(xs, maps, group, overlapped=overlapped)

    def finish() -> list[Quantized]:
        gathered = iter(transfer.wait())
        wholes = {key: _whole(own, gathered, shards) for key, own in owns.items()}
        layout = _gemm_layout if gemm_ready else lambda whole, _: whole
        found = [{dim: layout(wholes[id(own)], dim) for dim, own in each.items()} for each in wanted]
        return [Quantized(each.get(ROWWISE), each.get(COLUMNWISE)) for each in found]

    return Pending([], finish)


def start_gather_alike(parts: Sequence[Operand], shards: ShardMap, group: Group) -> Pending[list[Operand]]:
    """Starts to gather operands that are alike but for their tensors, as experts', sent side by side.

    So their number costs no transfers. The wholes are views, ranges of columns of what was received.
    """
    fields = shards.gathered(parts[0].format, parts[0].dim)
    each = {field: [getattr(part, field) for part in parts] for field, _ in fields}
    each = {field: [x if x.dim() == 2 else x[:, None] for x in xs] for field, xs in each.items()}
    xs, maps = [torch.cat(tensors, 1) for tensors in each.values()], [rows for _, rows in fields]
    transfer = start_all_gather_rows(xs, maps, group)

    def finish() -> list[Operand]:
        wholes: list[dict[str, Tensor]] = [{} for _ in parts]
        for (field, own), gathered in zip(each.items(), transfer.wait(), strict=True):
            for made, part, columns in zip(wholes, parts, gathered.split(own[0].shape[1], 1), strict=True):
                made[field] = columns if getattr(part, field).dim() == 2 else columns[:, 0]
        return [with_fields(part, made, shards.total) for part, made in zip(parts, wholes, strict=True)]

    return Pending([], finish)


def _whole(own: Operand, gathered: Iterator[Tensor], shards: ShardMap) -> Operand:
    made = {field: next(gathered) for field, _ in shards.gathered(own.format, own.dim)}
    return with_fields(own, made, shards.total)


def with_fields(operand: Operand, made: Mapping[str, Tensor], rows: int) -> Operand:
    """The operand of other rows, with the tensors ``made``; where it has others, which all ranks share, those."""
    # Spelled out: a graph that PyTorch 2.11 compiles returns what _replace gives with the old shape.
    scale_inv, amax = made.get("scale_inv", operand.scale_inv), made.get("amax", operand.amax)
    shape = rows, operand.shape[1]
    return Operand(made["codes"], scale_inv, amax, operand.format, operand.dim, shape, operand.dtype)


def _gemm_layout(operand: Operand, dim: int) -> Operand:
    """The operand with its tensors in memory as GEMMs that contract ``dim`` read them on its device."""
    fmt = operand.format
    if not operand.codes.is_cuda or not backends.k_major(fmt):
        return operand
    if dim == COLUMNWISE:
        return operand._replace(codes=_transposed(operand.codes), dim=COLUMNWISE)
    if fmt.block and not fmt.tile and operand.scale_inv is not None:
        return operand._replace(scale_inv=operand.scale_inv.t().contiguous().t())
    return operand


def _transposed(codes: Tensor) -> Tensor:
    """Copies ``codes`` [M, K] with M consecutive in memory."""
    if directly(codes) != "cuda" or codes.numel() == 0:
        return codes.t().contiguous().t()
    from minifloat.ops.matmul.kernels import k_major_copy  # which needs Triton

    return k_major_copy(codes, True, (1, 1)).t()
