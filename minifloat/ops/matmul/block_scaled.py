"""Products of blocks as GPUs from sm_100 on multiply them: MXFP8 and NVFP4, their scales in cuBLASLt's order.

``torch.nn.functional.scaled_mm`` takes FP8 in 1 x 32 blocks under E8M0 scales there, and E2M1 in 1 x 16 blocks under
E4M3 scales. Whatever else has powers of two for scales is written as the former, without rounding: a block of 128 is
four of 32 with one scale, a tile is rows with equal scales, and each value of 4 or 6 bits is one of E4M3.

No such GPU has run this. Tests hold what PyTorch is handed to its own checks, and read the product back from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.elements import E4M3, e8m0_from_float
from minifloat.ops.matmul.native import has_kernels, k_major
from minifloat.ops.matmul.reference import UNSCALED, Scales, Values, tensor_factor, values_shape
from minifloat.ops.quantize.reference import _pack, _unpack, decode

MX_BLOCK = 32
TILE_ROWS, TILE_COLS = 128, 4
"""Scales that lie together in memory; both dims are padded to whole tiles."""
ALIGN = 16, 32
"""What the sizes of a product are padded to, in elements: 16 bytes of codes along either dim."""

_SWIZZLED, _PLAIN = SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value


def operands(a: Any, b: Any, direct: bool) -> tuple[Sequence[Tensor], Scales]:
    """Prepares what the library reads of two operands, and the factors left: left, right, divisor.

    uint8 codes [outer, contracted] and swizzled scales of each, and, where NVFP4's product is the result
    (``direct``), fp32 [2]: the factor of both amaxes, and one.
    """
    read = *_operand(a), *_operand(b)
    if a.format.scale_rule != "two_level":
        return read, UNSCALED
    divisor = 36.0 * a.format.block_scale_max * b.format.block_scale_max
    if not direct:
        return read, Scales(a.amax, b.amax, divisor)
    return (*read, _writers(a.amax).alpha(a.amax, b.amax, divisor)), UNSCALED


def is_direct(a: Format, b: Format, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the library gives the result; else fp32, to be multiplied by factors of rows, added to, rounded once."""
    return bias is None and out_dtype != torch.float16 and not (a.amax_per_row or b.amax_per_row)


def multiply(a: Format, b: Format, read: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed; ``read``: of :func:`operands`."""
    left, left_scale, right, right_scale, *alpha = read
    if a.scale_rule == "two_level":
        codes, scales, recipe = [torch.float4_e2m1fn_x2] * 2, torch.float8_e4m3fn, ScalingType.BlockWise1x16
    else:
        codes = [fmt.encoding.dtype or torch.float8_e4m3fn for fmt in (a, b)]
        scales, recipe = torch.float8_e8m0fnu, ScalingType.BlockWise1x32
    levels = [[alpha[0][:1]], [alpha[0][1:]]] if alpha else [[], []]
    recipes = [recipe.value, *[ScalingType.TensorWise.value] * len(alpha)]
    swizzles = [_SWIZZLED, *[_PLAIN] * len(alpha)]
    result: Tensor = torch._scaled_mm_v2(
        left.view(codes[0]), right.view(codes[1]).t(),
        [left_scale.view(scales), *levels[0]], recipes, swizzles,
        [right_scale.view(scales), *levels[1]], recipes, swizzles,
        None, out_dtype,
    )  # fmt: skip
    return result


def swizzle(grid: Tensor) -> Tensor:
    """Bytes [outer, blocks] in cuBLASLt's order, zeros around them: tiles of 128 x 4, of which each 16 bytes hold the
    scales of four rows that are 32 apart."""
    rows, cols = grid.shape
    padded = torch.nn.functional.pad(grid, (0, -cols % TILE_COLS, 0, -rows % TILE_ROWS))
    tiles = padded.view(-1, 4, TILE_ROWS // 4, padded.shape[1] // TILE_COLS, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _operand(x: Any) -> tuple[Tensor, Tensor]:
    """Codes [outer, contracted], both dims padded, and swizzled scales."""
    fmt: Format = x.format
    two_level = fmt.scale_rule == "two_level"
    codes, written, shape = x.codes, _writers(x.codes), values_shape(x.codes, x.format, x.dim, x.along, x.outer)
    if two_level and x.dim != x.along:
        codes = written.repacked(codes, x.dim, shape)
    elif not two_level and fmt.encoding.dtype is None:
        codes = written.as_e4m3(codes, fmt, x.dim, shape, x.along)
    align = ALIGN[0], ALIGN[1] // 2 if two_level else ALIGN[1]  # in bytes
    scale = x.scale_inv if x.along == ROWWISE else x.scale_inv.t()
    outer_block = fmt.scale_block(x.dim)[0 if x.along == ROWWISE else 1]
    repeat = 1 if two_level else fmt.block // MX_BLOCK
    return k_major(codes, fmt, x.along, align).contiguous(), written.swizzle(scale, x.outer, outer_block, repeat)


class _Plain:
    """Does in plain PyTorch what ``kernels.py`` does."""

    @staticmethod
    def swizzle(scale: Tensor, outer: int, outer_block: int, repeat: int) -> Tensor:
        grid = scale if scale.dtype == torch.uint8 else e8m0_from_float(scale)
        return swizzle(grid.repeat_interleave(outer_block, 0)[:outer].repeat_interleave(repeat, 1))

    @staticmethod
    def repacked(codes: Tensor, dim: int, shape: torch.Size) -> Tensor:
        return _pack(_unpack(codes, dim, shape), COLUMNWISE if dim == ROWWISE else ROWWISE)

    @staticmethod
    def as_e4m3(codes: Tensor, fmt: Format, dim: int, shape: torch.Size, along: int) -> Tensor:
        return E4M3.encode(decode(codes, fmt, dim, shape))

    @staticmethod
    def alpha(left: Tensor, right: Tensor, divisor: float) -> Tensor:
        factor = tensor_factor(Values(left, None, left, divisor), Values(right, None, right, 1.0))
        return torch.cat([factor.reshape(1), torch.ones_like(left)])


def _writers(x: Tensor) -> Any:
    """The functions that write what the library reads: kernels where they run."""
    if not has_kernels(x):
        return _Plain
    from minifloat.ops.matmul import kernels

    return kernels
