"""The sharded cast: each rank's exact part of what quantizing the whole tensor would give.

Where a scale spans rows of several ranks they agree first, each format in its own way:

- one scale for the whole tensor, or NVFP4's amax above block scales: a MAX all-reduce of the amaxes;
- blocks of single-byte codes: a small all-gather of the amaxes of straddling blocks, at most two a rank;
- packed or rotated formats: the rows of a straddling unit go to the rank of its first row, fewer than a unit a rank.

Random bits of stochastic rounding depend on an element's place in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.comm.amax_sync import reduce_amaxes, rows_owned, rows_returned, straddling_amaxes
from minifloat.comm.cache import kept
from minifloat.comm.checks import Check, check_sharded
from minifloat.comm.collectives import waited
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap, moves_rows, unit_rows
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.operand import Quantized
from minifloat.ops import quantize
from minifloat.quantizer import Amaxes, Quantizer, as_matrix, assemble, cast_all, find_amaxes
from minifloat.tensor import QuantizedTensor

_functional = torch.ops._c10d_functional


def quantize_shard(
    x: Tensor,
    quantizer: Quantizer,
    shards: ShardMap,
    group: Group,
    *,
    amaxes: Amaxes | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
    check: Check = False,
) -> Quantized:
    """This rank's part of the quantized whole; a collective. :func:`~minifloat.comm.gather.gather` joins parts.

    The codes and scales are those that ``quantizer`` gives for the rows of all ranks below each other, bit for bit.
    They are of the rows that ``shards.codes`` and ``shards.scales`` say: this rank's own, but for units that straddle
    ranks. The logical shape of the operands is that of ``x``.

    Args:
        x: [..., K], bf16, fp16 or fp32, leading dims flattened: the rows of this rank, perhaps none. Any strides.
        amaxes: those of ``x`` alone, if a producer's kernel found them already (``Quantizer.amax``).
        scale: fp32 [1], what delayed scaling casts with, equal on all ranks. The measured amax is that of ``x`` alone.
        rng: int64 [2], seed and offset of stochastic rounding, equal on all ranks. None: those that the first draws.
        check: compare dtype, sizes and row counts of all ranks first, and raise on each of them if they disagree.

    Raises:
        ValueError: ``x`` has not the rows that ``shards`` says, or delayed scaling was given no scale.
    """
    x = as_matrix(x)
    check_sharded("quantize_shard", x, shards, group, check)
    if group.size == 1:
        return cast_all([x], [quantizer], [amaxes], None if rng is None else [rng], scales=[scale])[0]
    x = x.contiguous()
    if casts_alone(quantizer, shards):
        found = find_amaxes([x], [quantizer])[0] if amaxes is None else amaxes
        agreed = reduce_amaxes(found, quantizer, group, in_place=amaxes is None)
        return cast_all([x], [quantizer], [agreed], scales=[scale])[0]
    sources = _sources(x, quantizer, shards, group)
    levels = _levels(sources, quantizer, shards, group, amaxes, scale)
    pieces = _pieces(sources, levels, quantizer, shards, group)
    made = _cast(pieces, quantizer, rng, group)
    outputs = [
        _join(parts, results, fmt, level)
        for parts, results, (fmt, _), level in zip(pieces, made, quantizer.casts, levels, strict=True)
        if fmt.quantized
    ]
    shape = x.shape[0], x.shape[1]
    if not quantizer.chained:
        return assemble(quantizer, quantizer.casts, iter(outputs), shape, x.dtype, x)
    rowwise = assemble(quantizer.with_usage(columnwise=False), quantizer.casts, iter(outputs), shape, x.dtype).rowwise
    own = rows_returned(_values(pieces[0], made[0], quantizer.row_format), quantizer.row_format, shards, group)
    second = quantize_shard(own, Quantizer(quantizer.format(COLUMNWISE), rowwise=False), shards, group)
    return Quantized(rowwise, second.columnwise)


def prepare_shard(
    x: Tensor | Quantized,
    quantizer: Quantizer,
    shards: ShardMap,
    group: Group,
    *,
    scales_agree: bool = False,
    amaxes: Amaxes | None = None,
    scale: Tensor | None = None,
    rng: Tensor | None = None,
) -> Quantized:
    """What a rank gathers of ``x``, which may be quantized already; a collective.

    Operands travel as they are where their scales hold for the whole: no unit straddles ranks, and either scales are
    those of blocks alone or ``scales_agree``. Otherwise, or where an orientation is missing or has another format, the
    tensor is dequantized to its own dtype and cast again by :func:`quantize_shard`, whose other arguments these are.

    Args:
        x: the rows of this rank. Held in the same formats and orientations by all ranks.
        scales_agree: the caller knows that all ranks cast with the same scale, or the same amax above block scales.
    """
    held = x.operands if isinstance(x, QuantizedTensor) and x.holds_own_matrix else x
    if isinstance(held, Quantized):
        wanted = [ROWWISE] * quantizer.rowwise + [COLUMNWISE] * quantizer.columnwise
        if all(_travels(held, quantizer.format(dim), dim, shards, scales_agree) for dim in wanted):
            kept = {dim: held.along(dim) for dim in wanted}
            return Quantized(kept.get(ROWWISE), kept.get(COLUMNWISE))
    if not isinstance(held, Tensor) or isinstance(held, QuantizedTensor):
        held, amaxes = held.dequantize(), None
    return quantize_shard(held, quantizer, shards, group, amaxes=amaxes, scale=scale, rng=rng)


def _travels(held: Quantized, fmt: Format, dim: int, shards: ShardMap, scales_agree: bool) -> bool:
    """``held`` has an operand of this format that needs no agreement between ranks, or has it."""
    own = fmt.block > 0 and (fmt.scale_rule != "two_level" or (fmt.amax_per_row and dim == ROWWISE))
    serves = any(operand is not None and operand.serves(dim) and operand.format == fmt for operand in held)
    along = ROWWISE if fmt.symmetric else dim
    return serves and (own or scales_agree or not fmt.quantized) and shards.aligned(unit_rows(fmt, along))


@kept
def casts_alone(quantizer: Quantizer, shards: ShardMap) -> bool:
    """With the amaxes agreed on, an ordinary cast of the rank's rows gives its part: nothing straddles or is drawn."""
    return not quantizer.chained and all(
        shards.aligned(unit_rows(fmt, dim)) and fmt.rounding != "stochastic" for fmt, dim in quantizer.casts
    )


# ---- rows of straddling units ----


def _sources(x: Tensor, quantizer: Quantizer, shards: ShardMap, group: Group) -> list[Tensor]:
    """What is cast, for each cast of the quantizer: ``x``, or the rows of the units that this rank owns."""
    known: dict[int, Tensor] = {}
    for fmt, dim in quantizer.casts:
        unit = unit_rows(fmt, dim) if moves_rows(fmt) else 1
        if unit not in known:
            known[unit] = x if shards.aligned(unit) else rows_owned(x, unit, shards, group)
    return [known[unit_rows(fmt, dim) if moves_rows(fmt) else 1] for fmt, dim in quantizer.casts]


# ---- amaxes ----


def _levels(
    sources: Sequence[Tensor],
    quantizer: Quantizer,
    shards: ShardMap,
    group: Group,
    amaxes: Amaxes | None,
    scale: Tensor | None,
) -> list[Tensor | None]:
    """What each cast takes: the amax that ranks agree on, the given scale, or None where blocks find their own."""
    levels: list[Tensor | None] = list(amaxes) if amaxes is not None else [None] * len(sources)
    missing = []
    for i, (fmt, dim) in enumerate(quantizer.casts):
        if fmt.scale_rule == "given":
            levels[i] = scale if scale is not None else levels[i]
            if levels[i] is None:
                raise ValueError("delayed scaling casts with a scale from its history; pass it as scale=")
        elif fmt.needs_amax:
            rotated_apart = fmt.transform != "none" and not shards.aligned(unit_rows(fmt, dim))
            if levels[i] is None or rotated_apart:  # a rank alone does not know what its rotated rows are
                missing.append((i, fmt, dim))
    if missing:
        unknown = [sources[i] for i, _, _ in missing]
        found = quantize.amax(unknown, [fmt.spec for _, fmt, _ in missing], [dim for _, _, dim in missing])
        for (i, _, _), amax in zip(missing, found, strict=True):
            levels[i] = amax
    return list(reduce_amaxes(tuple(levels), quantizer, group, in_place=amaxes is None))


class _Piece(NamedTuple):
    """Rows that are cast by themselves.

    Args:
        x: [rows, K].
        level: the amax or scale that the cast takes, or the amaxes of the blocks; None where it finds its own.
        first: the first row, counted in the whole.
        owned: the scales are this rank's.
    """

    x: Tensor
    level: Tensor | None
    first: int
    owned: bool


def _pieces(
    sources: Sequence[Tensor], levels: Sequence[Tensor | None], quantizer: Quantizer, shards: ShardMap, group: Group
) -> list[list[_Piece]]:
    """What each cast is made of: one matrix, or three where blocks straddle ranks that agree on their amaxes."""
    straddling = [
        (i, fmt, dim) for i, (fmt, dim) in enumerate(quantizer.casts)
        if fmt.quantized and not moves_rows(fmt) and not shards.aligned(unit_rows(fmt, dim))
    ]  # fmt: skip
    agreed = straddling_amaxes(sources, straddling, shards, group) if straddling else {}
    result = []
    for i, (fmt, dim) in enumerate(quantizer.casts):
        x, first = sources[i], shards.sources(fmt, dim).first(group.rank)
        if i not in agreed:
            result.append([_Piece(x, levels[i], first, True)])
            continue
        head, tail, end = shards.pieces(group.rank, unit_rows(fmt, dim))
        head_amax, tail_amax = agreed[i]
        result.append(
            [_Piece(x[:head], head_amax, first, False)] * (head > 0)
            + [_Piece(x[head:tail], None, first + head, True)] * (tail > head or end == 0)
            + [_Piece(x[tail:], tail_amax, first + tail, True)] * (end > tail)
        )
    return result


# ---- the cast ----


def _cast(
    pieces: Sequence[Sequence[_Piece]], quantizer: Quantizer, rng: Tensor | None, group: Group
) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Codes, scales and measured amax of every piece of every cast, in one call."""
    flat = [
        (piece, fmt, dim)
        for (fmt, dim), parts in zip(quantizer.casts, pieces, strict=True)
        for piece in parts
        if fmt.quantized
    ]
    if not flat:
        return [[] for _ in pieces]
    seeds: dict[int, Tensor] = {}
    if any(fmt.rounding == "stochastic" for fmt, _ in quantizer.casts):
        rng = _drawn_by_first(flat[0][0].x, group) if rng is None else rng
        seeds = {p.first: torch.cat([rng, torch.full_like(rng[:1], p.first)]) for p, _, _ in flat}
    outputs = quantize.cast(
        [piece.x for piece, _, _ in flat],
        [piece.level for piece, _, _ in flat],
        [seeds[piece.first] if fmt.rounding == "stochastic" else None for piece, fmt, _ in flat],
        [fmt.spec for _, fmt, _ in flat],
        [dim for _, _, dim in flat],
        [False] * len(flat),
        None,
    )
    each = iter(zip(outputs[0::3], outputs[1::3], outputs[2::3], strict=True))
    return [
        [next(each) for _ in parts] if fmt.quantized else []
        for (fmt, _), parts in zip(quantizer.casts, pieces, strict=True)
    ]


def _values(pieces: Sequence[_Piece], made: Sequence[tuple[Tensor, Tensor, Tensor]], fmt: Format) -> Tensor:
    """What the rowwise codes of the pieces stand for, in the dtype that they were cast from."""
    values = []
    for (x, level, _, _), (codes, scale_inv, _) in zip(pieces, made, strict=True):
        amax = level if fmt.scale_rule == "two_level" else None
        values.append(quantize.dequantize(codes, scale_inv, amax, fmt.spec, ROWWISE, *x.shape, x.dtype))
    return torch.cat(values)


def _drawn_by_first(x: Tensor, group: Group) -> Tensor:
    """Seed and offset, int64 [2]. All ranks draw, so that their generators stay in step."""
    return waited(_functional.broadcast(quantize.draw_seed(x), 0, group.name))


def _join(
    pieces: Sequence[_Piece], results: Sequence[tuple[Tensor, Tensor, Tensor]], fmt: Format, level: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """One cast's codes and the scales that this rank owns, as ``assemble`` takes them."""
    codes, scales, measured = zip(*results, strict=True)
    if len(pieces) == 1 and pieces[0].owned:
        return codes[0], scales[0], measured[0], level
    owned = [scale for piece, scale in zip(pieces, scales, strict=True) if piece.owned]
    return torch.cat(codes), torch.cat(owned) if owned else scales[0][:0].clone(), measured[0], level
