"""The scaled product in plain PyTorch, segment by segment of the contracted dim: the definition.

The codes of a segment (128 elements, or an MX block of 32) are multiplied and summed *exactly*, in float64 (E5M2 in two
parts), the sum is rounded once to fp32, multiplied by the two scales of that segment, and added in fp32 to the segments
before it, in order; what scales the whole tensor is multiplied in last. So a row depends on that row alone.

:func:`fold` makes MXFP4 operands E4M3 ones with a scale for each 128 x 128 tile, without rounding: an E2M1 value times
a power of two from 2^-8 to 2^6 is an E4M3 value. So what the scale of a block has beyond that of its tile goes into its
codes, wherever the scales of the blocks that are not zero are at most 2^14 apart; the largest is put at 2^6. Where they
are further apart, or one is NaN, the scale of the tile is NaN, so that a product is not wrong in silence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.formats.elements import E4M3
from minifloat.ops.quantize.reference import decode


class Values(NamedTuple):
    """An operand spread out for the product, contracted dim last.

    ``codes``: [outer, contracted], float64, or bf16 for the emulated product. ``scales``: fp32 [outer, segments], or
    None where no segment has its own. ``factor``: fp32 [1] or [outer], for the whole contraction, over ``divisor``.
    """

    codes: Tensor
    scales: Tensor | None
    factor: Tensor
    divisor: float


def scaled_product(a: Values, b: Values, segment: int, split: tuple[bool, bool]) -> Tensor:
    """fp32 [m, n]: ``a`` [m, k] times ``b`` [n, k] transposed. ``split``: ``Element.split`` of the two."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    depth = min(a.codes.shape[1], b.codes.shape[1])  # a packed operand may end with a zero code that the other lacks
    total = a.codes.new_zeros(rows, cols, dtype=torch.float32)
    for index, start in enumerate(range(0, depth, segment)):
        part = slice(start, min(start + segment, depth))
        product = _product(a.codes[:, part], b.codes[:, part], split)
        scale = _segment_scale(a.scales, b.scales, index)
        total += product if scale is None else product * scale
    return total


def tensor_factor(a: Values, b: Values) -> Tensor:
    """fp32, broadcasting over [m, n]: the scales that span the whole contraction."""
    left = a.factor[:, None] if a.factor.numel() > 1 else a.factor
    factor = left * b.factor
    divisor = a.divisor * b.divisor
    return factor if divisor == 1 else factor * torch.full_like(factor[:1], 1.0 / divisor)


def _segment_scale(a: Tensor | None, b: Tensor | None, index: int) -> Tensor | None:
    if a is None or b is None:
        left = None if a is None else a[:, index, None]
        return left if b is None else b[None, :, index]
    return a[:, index, None] * b[None, :, index]


def _product(a: Tensor, b: Tensor, split: tuple[bool, bool]) -> Tensor:
    """fp32 [m, n]: the exact a b^T, rounded once."""
    if not any(split):
        return (a @ b.t()).float()
    return _rounded_sum([left @ right.t() for left in _parts(a, split[0]) for right in _parts(b, split[1])])


def _parts(x: Tensor, split: bool) -> list[Tensor]:
    if not split:
        return [x]
    large = x.abs() >= 1  # NaN goes with the small ones
    return [x.masked_fill(~large, 0.0), x.masked_fill(large, 0.0)]


def _rounded_sum(terms: list[Tensor]) -> Tensor:
    """The sum of float64 terms rounded once to fp32, though float64 may not hold it.

    What float64 loses is kept beside (Knuth's two-sum) and folded into the last bit (rounding to odd: Boldo and
    Melquiond, 2008), so that the rounding to fp32 sees which side of a tie the exact sum lies on.
    """
    total, rest = terms[0], torch.zeros_like(terms[0])
    for term in terms[1:]:
        total, lost = _two_sum(total, term)
        rest = rest + lost
    total, rest = _two_sum(total, rest.nan_to_num(0.0, 0.0, 0.0))  # an infinity loses nothing
    even = (total.view(torch.int64) & 1) == 0
    odd = torch.nextafter(total, torch.where(rest > 0, torch.inf, -torch.inf).double())
    return torch.where(even & (rest.abs() > 0), odd, total).float()


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def spread(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, along: int, outer: int, segment: int
) -> Values:
    """An operand cast along ``dim``, contracted along ``along``, ``outer`` elements wide in the other dim."""
    shape = values_shape(codes, fmt, dim, along, outer)
    values = decode(codes, fmt, dim, shape, torch.float64)
    scales: Tensor | None = None
    factor, divisor = scale_inv.reshape(-1), 1.0
    if fmt.block:
        rows, cols = fmt.scale_block(dim)
        if fmt.scale_rule == "two_level":
            assert amax is not None
            block_scales = fmt.scaling.values(scale_inv).repeat_interleave(rows, 0).repeat_interleave(cols, 1)
            values = values * block_scales[: shape[0], : shape[1]].double()
            factor, divisor = amax, 6.0 * fmt.block_scale_max
        else:
            grid = fmt.scaling.values(scale_inv)
            grid = grid if along == ROWWISE else grid.t()
            outer_block = rows if along == ROWWISE else cols
            scales = grid.repeat_interleave(outer_block, 0)[:outer].repeat_interleave(fmt.block // segment, 1)
            factor = grid.new_ones(1)
    return Values(values if along == ROWWISE else values.t(), scales, factor, divisor)


def finish(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Adds the bias in fp32 and rounds once."""
    return (product if bias is None else product + bias.to(out_dtype).float()).to(out_dtype).contiguous()


class Scales(NamedTuple):
    """Factors of the whole contraction: fp32 [1] or [m] and [n], None for none, and what they are over."""

    left: Tensor | None
    right: Tensor | None
    divisor: float


UNSCALED = Scales(None, None, 1.0)


def scaled(product: Tensor, scales: Scales, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """fp32 ``product`` [m, n] times its scales, if any, plus ``bias`` [n] in the output's dtype, rounded once."""
    left, right, divisor = scales
    if left is not None or right is not None:
        one = product.new_ones(1)
        left, right = one if left is None else left, one if right is None else right
        product = product * tensor_factor(Values(left, None, left, divisor), Values(right, None, right, 1.0))
    return finish(product, bias, out_dtype)


def values_shape(codes: Tensor, fmt: Format, dim: int, along: int, outer: int) -> torch.Size:
    """[M, K] of the values of an operand; arguments as of :func:`spread`."""
    length = codes.shape[1] if along == ROWWISE else codes.shape[0]
    if fmt.packed and dim == along and codes.dtype != torch.bfloat16:  # values, see ``casts.Casts``
        length *= 2
    return torch.Size((outer, length) if along == ROWWISE else (length, outer))


def contracted_length(codes: Tensor, fmt: Format, dim: int, along: int) -> int:
    """Length of the contracted dim as it is stored: a packed one may end with a zero code, which adds nothing."""
    return values_shape(codes, fmt, dim, along, 0)[1 if along == ROWWISE else 0]


TILE, BLOCK = 128, 32
"""Sides of a tile of the result; elements of the contracted dim under one scale of MXFP4."""
HIGHEST, LOWEST = 6, -8
"""Exponents of the powers of two that make an E4M3 value of every E2M1 value."""
LEAST = 1
"""The least exponent byte of a scale of the result: fp32 powers of two below it are denormals."""


class Folded(NamedTuple):
    """E4M3 operand of a product.

    Args:
        codes: uint8 [outer, contracted], the contracted dim rounded up to whole tiles with zero codes.
        scale: fp32 [outer / 128, contracted / 128], rounded up; NaN where a tile could not be folded.
    """

    codes: Tensor
    scale: Tensor


def fold(codes: Tensor, scale_inv: Tensor, fmt: Format, dim: int, along: int, outer: int) -> Folded:
    """The MXFP4 operand that was cast along ``dim`` and is contracted along ``along``, ``outer`` wide."""
    length = contracted_length(codes, fmt, dim, along)
    values, grid = decode(codes, fmt, dim, values_shape(codes, fmt, dim, along, outer)), scale_inv
    if along != ROWWISE:
        values, grid = values.t(), grid.t()
    exponents = grid.int().repeat_interleave(fmt.scale_block(dim)[0 if along == ROWWISE else 1], 0)[:outer]
    high, wide = -(-outer // TILE), -(-length // TILE)
    per_tile = TILE // BLOCK
    values = torch.nn.functional.pad(values, (0, wide * TILE - length, 0, high * TILE - outer))
    blocks = values.view(high, TILE, wide, per_tile, BLOCK)
    padding = (0, wide * per_tile - exponents.shape[1], 0, high * TILE - outer)
    exponents = torch.nn.functional.pad(exponents, padding).view(high, TILE, wide, per_tile)
    used = (blocks != 0).any(-1)
    highest = torch.where(used, exponents, -1).amax((1, 3), keepdim=True)
    base = torch.where(highest < 0, 127, (highest - HIGHEST).clamp(min=LEAST))
    shift = exponents - base
    bad = ((used & (shift < LOWEST)) | (exponents == 255)).any(3, keepdim=True).any(1, keepdim=True)
    factor = torch.where(used & ~bad, ((shift + 127) << 23).view(torch.float32), 0.0)
    folded = E4M3.encode((blocks * factor[..., None]).reshape(high * TILE, wide * TILE)[:outer])
    scale = torch.where(bad, torch.nan, (base << 23).view(torch.float32))
    return Folded(folded, scale.view(high, wide))
