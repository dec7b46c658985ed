"""A rank's part of a tensor that may be quantized already."""

from __future__ import annotations

from torch import Tensor

from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap, unit_rows
from minifloat.comm.sharded_cast import quantize_shard
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.operand import Quantized
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
