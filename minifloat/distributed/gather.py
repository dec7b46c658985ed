"""The quantized all-gather: codes and scales on the wire, and exactly the quantized whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from minifloat import capability
from minifloat.distributed.checks import check_sharded
from minifloat.distributed.collectives import Pending, start_all_gather_rows
from minifloat.distributed.group import Group
from minifloat.distributed.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.kernels.library import directly
from minifloat.operand import Operand, Quantized


def gather(
    part: Quantized,
    shards: ShardMap,
    group: Group,
    *,
    rowwise: bool,
    columnwise: bool,
    into: Quantized | None = None,
    gemm_ready: bool = False,
    check: bool = False,
) -> Quantized:
    """The quantized whole, [sum(rows), K], from the parts of all ranks; arguments as of :func:`start_gather`."""
    usage = {"rowwise": rowwise, "columnwise": columnwise, "gemm_ready": gemm_ready, "check": check}
    return start_gather([part], shards, group, into=None if into is None else [into], **usage).wait()[0]


def start_gather(
    parts: Sequence[Quantized],
    shards: ShardMap,
    group: Group,
    *,
    rowwise: bool,
    columnwise: bool,
    into: Sequence[Quantized] | None = None,
    gemm_ready: bool = False,
    check: bool = False,
) -> Pending[list[Quantized]]:
    """Starts to gather several quantized tensors in one call of the backend; ``wait()`` gives them.

    Nothing but codes, scales of blocks and amaxes of rows travels. A scale or amax of the whole tensor is this rank's
    own, since all agree on it. The amax that a delayed cast measured stays that of this rank's rows.

    Args:
        parts: of each tensor what :func:`~minifloat.distributed.shards.quantize_shard` gave.
        shards: the rows of every rank, the same for every tensor.
        rowwise, columnwise: the orientations wanted.
        into: the wholes, whose memory is filled and which are returned. Equal row counts go straight there.
        gemm_ready: lay codes out in memory as this device's GEMMs read them (see ``Quantizer.layouts``); once, after
            the wait, where that is not how they travel.
        check: compare sizes and row counts of all ranks first, and raise on each of them if they disagree.

    Raises:
        ValueError: a part lacks an orientation or has not the rows that ``shards`` says, or ``into`` has other formats,
            dtypes or shapes than the wholes.
    """
    dims = [dim for dim, wanted in ((ROWWISE, rowwise), (COLUMNWISE, columnwise)) if wanted]
    targets = [None] * len(parts) if into is None else list(into)
    plans = [_plan(part, shards, dims, target) for part, target in zip(parts, targets, strict=True)]
    moved = [rows for plan in plans for source in plan.sources for rows in source.moved]
    for rows in moved:
        check_sharded("gather", rows.own, rows.map, group, check)
    transfer = start_all_gather_rows([r.own for r in moved], [r.map for r in moved], group, [r.target for r in moved])

    def finish() -> list[Quantized]:
        gathered = iter(transfer.wait())
        return [
            _assemble(plan, [_whole(source, gathered, shards) for source in plan.sources], target, gemm_ready)
            for plan, target in zip(plans, targets, strict=True)
        ]

    return Pending([], finish)


class _Rows(NamedTuple):
    """A tensor that is gathered along its first dim: this rank's rows, those of all ranks, where the whole may go."""

    own: Tensor
    map: ShardMap
    target: Tensor | None


class _Source(NamedTuple):
    """An operand, and which of its fields are gathered; the other tensors are equal on all ranks."""

    operand: Operand
    fields: tuple[str, ...]
    moved: list[_Rows]


class _Plan(NamedTuple):
    """What is gathered of a tensor: the operands that serve the wanted dims, each once, and which serves which."""

    sources: list[_Source]
    serving: dict[int, int]


def _plan(part: Quantized, shards: ShardMap, dims: Sequence[int], into: Quantized | None) -> _Plan:
    plan = _Plan([], {})
    for dim in dims:
        operand = part.along(dim)
        known = [i for i, source in enumerate(plan.sources) if source.operand is operand]
        plan.serving[dim] = known[0] if known else len(plan.sources)
        if not known:
            plan.sources.append(_source(operand, shards, None if into is None else into.along(dim)))
    return plan


def _source(operand: Operand, shards: ShardMap, target: Operand | None) -> _Source:
    fmt, dim = operand.format, operand.dim
    maps = {"codes": shards.codes(fmt, dim)}
    if fmt.quantized and fmt.block:
        maps["scale_inv"] = shards.scales(fmt, dim)
    if fmt.amax_per_row and dim == ROWWISE:
        maps["amax"] = shards
    moved = []
    for field, rows in maps.items():
        own, place = getattr(operand, field), getattr(target, field, None)
        moved.append(_Rows(own, rows, place if place is not None and place.is_contiguous() else None))
    if target is not None:
        _check_target(operand, target, shards)
    return _Source(operand, tuple(maps), moved)


def _check_target(operand: Operand, target: Operand, shards: ShardMap) -> None:
    shape = shards.total, operand.shape[1]
    if (target.format, target.shape, target.dtype) != (operand.format, shape, operand.dtype):
        raise ValueError(
            f"gathering {operand.format.spec} of {operand.dtype} {shape} into {target.format.spec} of {target.dtype} "
            f"{target.shape}: give operands of the whole, as the quantizer makes them of a tensor of that shape"
        )


def _whole(source: _Source, gathered: Iterator[Tensor], shards: ShardMap) -> Operand:
    own = source.operand
    made = {field: next(gathered) for field in source.fields}
    scale_inv, amax = made.get("scale_inv", own.scale_inv), made.get("amax", own.amax)
    return Operand(made["codes"], scale_inv, amax, own.format, own.dim, (shards.total, own.shape[1]), own.dtype)


def _assemble(plan: _Plan, wholes: Sequence[Operand], into: Quantized | None, gemm_ready: bool) -> Quantized:
    found = {dim: _laid_out(wholes[i], dim) if gemm_ready else wholes[i] for dim, i in plan.serving.items()}
    if into is None:
        return Quantized(found.get(ROWWISE), found.get(COLUMNWISE))
    for dim, operand in found.items():
        for old, new in zip(into.along(dim)[:3], operand[:3], strict=True):  # codes, scales, amax
            if old is not None and new is not None and old is not new:
                old.copy_(new)
    return into


def _laid_out(operand: Operand, dim: int) -> Operand:
    """The operand with its tensors in memory as GEMMs that contract ``dim`` read them on its device."""
    fmt = operand.format
    if not operand.codes.is_cuda or not capability.k_major(fmt):
        return operand
    if dim == COLUMNWISE:
        return operand._replace(codes=_transposed(operand.codes), dim=COLUMNWISE)
    if fmt.block and not fmt.tile and operand.scale_inv is not None:
        return operand._replace(scale_inv=operand.scale_inv.t().contiguous().t())
    return operand


def _transposed(codes: Tensor) -> Tensor:
    """``codes`` [M, K] with M consecutive in memory."""
    if not directly(codes) or codes.numel() == 0:
        return codes.t().contiguous().t()
    from minifloat.kernels.matmul.transpose import k_major_copy  # which needs Triton

    return k_major_copy(codes, True, (1, 1)).t()
