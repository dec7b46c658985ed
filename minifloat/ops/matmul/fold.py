"""MXFP4 operands as E4M3 ones with a scale for each 128 x 128 tile, without rounding.

An E2M1 value has two significant bits. Times a power of two from 2^-8 to 2^6 it is an E4M3 value: 6 times 2^6 is 384,
and 0.5 times 2^-8 is 2^-9, the smallest. So a tile of many MX blocks has one scale, and what the scale of a block has
beyond that goes into its codes, wherever the scales of the blocks that are not zero are at most 2^14 apart. The largest
of them is put at 2^6, so that codes are as far from the denormals of E4M3 as they can be.

Where they are further apart, or a scale is NaN, the scale of the tile is NaN: a product that took it anyway would not
be wrong in silence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.formats.elements import E4M3
from minifloat.ops.matmul.reference import contracted_length
from minifloat.ops.quantize.reference import decode

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
    shape = torch.Size((outer, length) if along == ROWWISE else (length, outer))
    values, grid = decode(codes, fmt, dim, shape), scale_inv
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
