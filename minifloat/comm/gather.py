"""The quantized all-gather: exactly the quantized whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from minifloat import capability
from minifloat.comm.checks import check_sharded
from minifloat.comm.collectives import Pending, start_all_gather_rows
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.ops.library import directly


def gather(
    part: Quantized, shards: ShardMap, group: Group, *, rowwise: bool, columnwise: bool, gemm_ready: bool = False
) -> Quantized:
    """The quantized whole, [sum(rows), K], from the parts of all ranks; arguments as of :func:`start_gather`."""
    return _start([part], shards, group, _dims(rowwise, columnwise), gemm_ready, overlapped=False).wait()[0]


def start_gather(
    parts: Sequence[Quantized],
    shards: ShardMap,
    group: Group,
    *,
    rowwise: bool,
    columnwise: bool,
    gemm_ready: bool = False,
) -> Pending[list[Quantized]]:
    """Starts to gather several quantized tensors in one call of the backend; ``wait()`` gives them.

    Nothing but codes, scales of blocks and amaxes of rows is sent. A scale or amax of the whole tensor is this rank's
    own: all ranks have the same. The amax that a delayed cast measured stays that of this rank's rows.

    Args:
        parts: of each tensor what :func:`~minifloat.comm.sharded_cast.quantize_shard` gave.
        shards: the rows of every rank, the same for every tensor.
        rowwise, columnwise: the orientations wanted.
        gemm_ready: lay codes out in memory as this device's GEMMs read them (see ``Quantizer.layouts``); once, after
            the wait, where they are gathered in another order.

    Raises:
        ValueError: a part lacks an orientation or has not the rows that ``shards`` says.
    """
    return _start(parts, shards, group, _dims(rowwise, columnwise), gemm_ready, overlapped=True)


def start_gather_alike(parts: Sequence[Operand], shards: ShardMap, group: Group) -> Pending[list[Operand]]:
    """The same of operands that are alike in all but their tensors, as those of experts, which are sent side by side.

    So their number costs no transfers. The wholes are views, ranges of columns of what was received.
    """
    fields = shards.gathered(parts[0].format, parts[0].dim)
    each = {field: [_as_columns(getattr(part, field)) for part in parts] for field, _ in fields}
    xs, maps = [torch.cat(tensors, 1) for tensors in each.values()], [rows for _, rows in fields]
    transfer = start_all_gather_rows(xs, maps, group)

    def finish() -> list[Operand]:
        wholes: list[dict[str, Tensor]] = [{} for _ in parts]
        for (field, own), gathered in zip(each.items(), transfer.wait(), strict=True):
            for made, part, columns in zip(wholes, parts, gathered.split(own[0].shape[1], 1), strict=True):
                made[field] = columns if getattr(part, field).dim() == 2 else columns[:, 0]
        return [with_fields(part, made, shards.total) for part, made in zip(parts, wholes, strict=True)]

    return Pending([], finish)


def _as_columns(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x[:, None]


def _dims(rowwise: bool, columnwise: bool) -> list[int]:
    return [ROWWISE] * rowwise + [COLUMNWISE] * columnwise


def _start(
    parts: Sequence[Quantized],
    shards: ShardMap,
    group: Group,
    dims: Sequence[int],
    gemm_ready: bool,
    *,
    overlapped: bool,
) -> Pending[list[Quantized]]:
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
        return [_assemble({dim: wholes[id(own)] for dim, own in each.items()}, gemm_ready) for each in wanted]

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


def _assemble(found: dict[int, Operand], gemm_ready: bool) -> Quantized:
    if gemm_ready:
        found = {dim: _gemm_layout(whole, dim) for dim, whole in found.items()}
    return Quantized(found.get(ROWWISE), found.get(COLUMNWISE))


def _gemm_layout(operand: Operand, dim: int) -> Operand:
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
    if directly(codes) != "cuda" or codes.numel() == 0:
        return codes.t().contiguous().t()
    from minifloat.ops.matmul.transpose import k_major_copy  # which needs Triton

    return k_major_copy(codes, True, (1, 1)).t()
