"""Gathers of activations: a rank's part, which may be quantized already, and handles of the whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group, ShardMap, unit_rows
from minifloat.comm.sharded_cast import quantize_shard
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer
from minifloat.tensor import QuantizedTensor


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

    Operands are gathered as they are where their scales hold for the whole: no unit straddles ranks, and either scales
    are those of blocks alone or ``scales_agree``. Otherwise, or where an orientation is missing or has another format,
    the tensor is dequantized to its own dtype and cast again by :func:`~minifloat.comm.sharded_cast.quantize_shard`,
    whose other arguments these are.

    Args:
        x: the rows of this rank. Held in the same formats and orientations by all ranks.
        scales_agree: the caller knows that all ranks cast with the same scale, or the same amax above block scales.
    """
    held = x.operands if isinstance(x, QuantizedTensor) and x.holds_own_matrix else x
    if isinstance(held, Quantized):
        wanted = [ROWWISE] * quantizer.rowwise + [COLUMNWISE] * quantizer.columnwise
        if all(_holds_for_whole(held, quantizer.format(dim), dim, shards, scales_agree) for dim in wanted):
            operands = {dim: held.along(dim) for dim in wanted}
            return Quantized(operands.get(ROWWISE), operands.get(COLUMNWISE))
    if not isinstance(held, Tensor) or isinstance(held, QuantizedTensor):
        held, amaxes = held.dequantize(), None
    return quantize_shard(held, quantizer, shards, group, amaxes=amaxes, scale=scale, rng=rng)


def _holds_for_whole(held: Quantized, fmt: Format, dim: int, shards: ShardMap, scales_agree: bool) -> bool:
    """``held`` has an operand of this format with the scales that the whole would have."""
    own = fmt.owns_scales(dim) and not fmt.reduces_amax(dim)
    serves = any(operand is not None and operand.serves(dim) and operand.format == fmt for operand in held)
    along = ROWWISE if fmt.symmetric else dim
    return serves and (own or scales_agree or not fmt.quantized) and shards.aligned(unit_rows(fmt, along))


class Gathered:
    """Operands of a whole tensor that is being gathered: reading one waits for it, and releases it."""

    rowwise = None  # so that products call along()

    def __init__(self, pending: Sequence[Pending[list[Quantized]]]) -> None:
        self._pending = list(pending)
        self._received: dict[int, Operand] = {}

    def along(self, dim: int) -> Operand:
        """The operand that a GEMM contracts along ``dim``; each can be had once."""
        while dim not in self._received:
            (rowwise, columnwise), *_ = self._pending.pop(0).wait()
            if rowwise is not None:
                self._received[ROWWISE] = rowwise
            if columnwise is not None:
                self._received[COLUMNWISE] = columnwise
        return self._received.pop(dim)


def one_orientation(operand: Operand) -> Quantized:
    """``operand`` alone, in its place."""
    return Quantized(operand, None) if operand.dim == ROWWISE else Quantized(None, operand)


# ---- one gather for siblings: linears that are given the same input one after the other (q, k, v; gate, up) ----


class _Local(threading.local):
    """Of one thread: a part and what was gathered of it, inside of a scope."""

    def __init__(self) -> None:
        self.scopes = 0
        self.whole: tuple[Quantized, Quantized] | None = None


_local = _Local()


@contextmanager
def gathered_once() -> Iterator[None]:
    """Column-parallel linears that are given one X inside, one after the other, gather it once.

        with gathered_once():
            q, k, v = self.query(x), self.key(x), self.value(x)

    Under sequence parallelism a linear frees what it gathers right after its product, since nobody knows whether
    another one will read it; here it stays until another tensor is gathered or the context ends. Only what
    siblings would gather alike is shared: not under delayed scaling, which has a scale for each layer, not in high
    precision, not in compiled code. In backward each gathers X again.
    """
    if torch.compiler.is_compiling():
        yield
        return
    _local.scopes += 1
    try:
        yield
    finally:
        _local.scopes -= 1
        _local.whole = None


def shared_whole(part: Quantized) -> Quantized | None:
    """What a sibling has just gathered of this very ``part``, rowwise."""
    whole = None if torch.compiler.is_compiling() else _local.whole
    return whole[1] if whole is not None and whole[0] is part else None


def offer(part: Quantized, whole: Quantized | Gathered) -> Quantized | Gathered:
    """What fprop reads of ``whole``, gathered of ``part``; inside of :func:`gathered_once` it stays for siblings."""
    if torch.compiler.is_compiling() or isinstance(whole, Quantized) or not _local.scopes:
        return whole
    _local.whole = None  # the one before is freed before this one arrives
    _local.whole = part, Quantized(whole.along(ROWWISE), None)
    return _local.whole[1]
