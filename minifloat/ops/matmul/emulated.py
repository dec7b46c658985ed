"""The scaled product on bf16 tensor cores, for formats that no library multiplies on this device.

bf16 holds every code of 4, 6 and 8 bits times a power of two, or an E2M1 code times its E4M3 block scale. So operands
are written out as bf16 without error, products of two of them are exact in fp32, and one fp32 factor, what scales the
whole contraction, is multiplied in last: only the order and roundings of fp32 sums differ from the reference.

Codes times E8M0 scales can leave the range of bf16; ``docs/numerics.md`` 1.7 says what is lost then. Where fp32 sums
are still to be scaled or added to, each row is divided by its largest scale, which becomes its factor; a scale that is
NaN makes its row NaN. Scales of 128-blocks that are any fp32 number do not fit bf16: the reference multiplies those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.ops.matmul.reference import UNSCALED, Scales, Values, values_shape
from minifloat.ops.quantize.reference import _blocks, _unblock, decode

LARGEST = torch.finfo(torch.bfloat16).max


def is_direct(a: Format, b: Format, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the product of :func:`values` is the result: no factor or bias is left to be applied to fp32 sums."""
    scaled = all(fmt.block and fmt.scaling.power_of_two for fmt in (a, b))
    return scaled and bias is None and out_dtype == torch.bfloat16


def prepare(writer: Any, a: Any, b: Any, direct: bool) -> tuple[Sequence[Tensor], Scales]:
    """The operands and their scales, written by ``values`` and ``spread`` of ``writer``: this module, or kernels."""
    if direct:
        return (writer.values(*a), writer.values(*b)), UNSCALED
    left, right = writer.spread(*a), writer.spread(*b)
    return (left.codes, right.codes), Scales(_factor(a, left), _factor(b, right), left.divisor * right.divisor)


def _factor(operand: Any, written: Values) -> Tensor | None:
    """Factor of an operand; None for values cast under scales that are powers of two: those are in them."""
    cast_as_values = operand[0].dtype == torch.bfloat16
    return None if cast_as_values and operand[3].scaling.power_of_two else written.factor


def multiply(operands: Sequence[Tensor], out_dtype: torch.dtype = torch.float32) -> Tensor:
    """[m, n]: the ``codes`` of two :class:`Values`, [m, k] and [n, k] in bf16, summed in fp32, not yet scaled."""
    left, right = operands
    if left.shape[1] != right.shape[1]:  # a packed operand may end with a zero code that the other lacks
        depth = min(left.shape[1], right.shape[1])
        left, right = left[:, :depth], right[:, :depth]
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=out_dtype)
    # The same exact products; the CPU's bf16 product cannot give fp32.
    return (left.float() @ right.t().float()).to(out_dtype)


def values(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, along: int, outer: int
) -> Tensor:
    """bf16 [outer, contracted]: what an operand stands for, under scales of blocks that are powers of two.

    Arguments as of ``reference.spread``, layout as of :func:`spread`.
    """
    shape = values_shape(codes, fmt, dim, along, outer)
    scales = fmt.scaling.values(scale_inv).bfloat16()
    scaled = _blocks(_bf16(codes, fmt, dim, shape), *fmt.scale_block(dim)) * scales[:, None, :, None]
    result = _unblock(scaled.clamp(-LARGEST, LARGEST), shape)
    return result if along == ROWWISE else result.t()


def spread(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, along: int, outer: int
) -> Values:
    """An operand written out as bf16; arguments as of ``reference.spread``. No scales of segments are left beside it.

    ``codes`` of the result is a view of the [M, K] layout, transposed or not: bf16 tensor cores take either.
    """
    shape = values_shape(codes, fmt, dim, along, outer)
    values = _bf16(codes, fmt, dim, shape)
    factor, divisor = scale_inv.reshape(-1), 1.0
    if fmt.block:
        if fmt.scale_rule == "two_level":
            assert amax is not None
            scales, factor, divisor = fmt.scaling.values(scale_inv), amax, 6.0 * fmt.block_scale_max
        else:
            grid = fmt.scaling.values(scale_inv)
            largest = grid.amax(along, keepdim=True)
            scales = grid / largest  # powers of two: exact, but for what is below 2^-149
            factor = largest.reshape(-1).repeat_interleave(fmt.scale_block(dim)[0 if along == ROWWISE else 1])[:outer]
        blocks = _blocks(values, *fmt.scale_block(dim))
        values = _unblock(blocks * scales.bfloat16()[:, None, :, None], shape)
    return Values(values if along == ROWWISE else values.t(), None, factor, divisor)


def _bf16(codes: Tensor, fmt: Format, dim: int, shape: torch.Size) -> Tensor:
    """The [M, K] values of codes, not scaled."""
    dtype = fmt.encoding.dtype
    # On a GPU PyTorch's conversion is one pass, a table several.
    return decode(codes, fmt, dim, shape, torch.bfloat16) if dtype is None else codes.view(dtype).bfloat16()
