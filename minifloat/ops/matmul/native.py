"""``torch``'s own matmuls: the scaled ones of cuBLASLt on a GPU, that of fp64 on a CPU.

Codes are stored in the [M, K] layout. What a library wants beyond that, K-major operands and sizes in multiples of 16,
is prepared here: a byte transpose, and zero codes as padding, which add nothing to a product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from minifloat import backends
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.elements import E4M3, e8m0_from_float
from minifloat.ops.matmul import cublaslt
from minifloat.ops.matmul.reference import UNSCALED, Scales, Values, tensor_factor, values_shape
from minifloat.ops.quantize.reference import _pack, _unpack, decode


def has_kernels(x: Tensor) -> bool:
    """Whether our own kernels run where ``x`` is."""
    return x.is_cuda and backends.kernels(x.get_device())[0]


def k_major(codes: Tensor, fmt: Format, along: int, align: tuple[int, int]) -> Tensor:
    """Codes as [outer, contracted], both dims rounded up to ``align`` with zero bytes; row-major on a GPU.

    FP8 codes in PyTorch's dtype; bytes of others, which are packed along the contracted dim if they are.
    """
    codes = codes if along == ROWWISE else codes.t()
    pad_outer, pad_inner = -codes.shape[0] % align[0], -codes.shape[1] % align[1]
    dtype = fmt.encoding.dtype or torch.uint8
    if not pad_outer and not pad_inner and codes.is_contiguous():
        return codes.view(dtype)
    ours = has_kernels(codes)
    if not pad_outer and not pad_inner and not (codes.is_cuda or ours):
        return codes.view(dtype)  # a CPU takes any strides
    if ours:
        from minifloat.ops.matmul import kernels

        return kernels.k_major_copy(codes, False, align).view(dtype)
    if pad_outer or pad_inner:
        codes = torch.nn.functional.pad(codes, (0, pad_inner, 0, pad_outer))
    return codes.contiguous().view(dtype)


def cut(product: Tensor, m: int, n: int) -> Tensor:
    """``product`` without the rows and columns of padding, contiguous."""
    return product.contiguous() if product.shape == (m, n) else product[:m, :n].contiguous()


def per_tensor(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out_dtype: torch.dtype, bias: Tensor | None, fast: bool,
    out: Tensor | None = None, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """``a`` [m, k] times ``b`` [n, k] transposed, one scale each, or [m, 1] and [1, n].

    A GPU writes it to ``out``, if that is a plain contiguous tensor at a multiple of 256 bytes, as the allocator gives
    memory: cuBLASLt chooses its kernel for that. With ``accumulate`` it may add it to an ``out`` of fp32.

    On a CPU the codes are multiplied as fp64, whose sums of E4M3 products are exact: the result depends neither on the
    number of threads nor on how a product is split. ``torch._scaled_mm`` takes hundreds of times as long there, where
    oneDNN has no FP8 instructions (575 ms for 128 x 256 x 256 on Sapphire Rapids).
    """
    if not a.is_cuda:
        product = (a.double() @ b.double().t()).float() * (a_scale * b_scale)
        return (product if bias is None else product + bias.float()).to(out_dtype)
    if accumulate:
        if out is not None and cublaslt.add(a, a_scale, b, b_scale, cublaslt.ONE, fast, out):
            return out
        out = None
    if type(out) is not Tensor or not out.is_contiguous() or out.data_ptr() % 256:
        out = None
    result: Tensor = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast, out=out
    )
    return result


def block128_operands(a: Any, b: Any, direct: bool = True) -> tuple[Sequence[Tensor], Any]:
    """Codes and scales of ``a`` and of ``b``, in blocks of 1 x 128 or 128 x 128, as the library reads them.

    Codes are [outer, contracted] with both dims padded. The product is not to be scaled any more.
    """
    return (*block128_operand(a), *block128_operand(b)), (None, None, 1.0)


def block128_operand(x: Any) -> tuple[Tensor, Tensor]:
    """Codes and scales of one operand."""
    codes = k_major(x.codes, x.format, x.along, (16, 128))
    scale = x.scale_inv if x.along == ROWWISE else x.scale_inv.t()  # [outer, contracted] in units of blocks
    return codes, _tile_scale(scale) if x.format.tile else _strip_scale(scale, codes.shape[0])


def block128_is_direct(bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the library gives the result; else it gives fp32, to be rounded once."""
    return bias is None and out_dtype != torch.float16


def block128(a_tile: bool, b_tile: bool, operands: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed; ``operands``: of :func:`block128_operands`.

    It may be added to an fp32 tensor after them, which is returned then: the weight gradient, whose operands have no
    tiles.
    """
    a, a_scale, b, b_scale, *out = operands
    if a_tile:  # the library wants the tiles on the right: a b^T = (b a^T)^T
        return block128(b_tile, a_tile, (b, b_scale, a, a_scale), out_dtype).t()
    if out and not b_tile and cublaslt.add(a, a_scale, b, b_scale, cublaslt.STRIPS, False, *out):
        return out[0]
    # What torch.nn.functional.scaled_mm calls, after it has made lists of integers of its enums.
    result: Tensor = torch._scaled_mm_v2(
        a, b.t(), [a_scale], _STRIPS, _NO_SWIZZLE, [b_scale], _TILES if b_tile else _STRIPS, _NO_SWIZZLE,
        None, out_dtype,
    )  # fmt: skip
    return result


_STRIPS, _TILES = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]
_NO_SWIZZLE = [SwizzleType.NO_SWIZZLE.value]


def _strip_scale(scale: Tensor, outer: int) -> Tensor:
    """[outer, blocks], outer-major in memory, rows of padding scaled by one."""
    rows, blocks = scale.shape
    by_block = scale.t()
    if rows < outer or not by_block.is_contiguous():
        by_block = _copy(by_block, blocks, outer, 1.0)
    # Strides spelled out: those of a dim of 1 are anything, and the library reads them.
    return by_block.as_strided((outer, blocks), (1, outer))


def _tile_scale(scale: Tensor) -> Tensor:
    """[blocks, outer blocks] with the contracted dim consecutive in memory, in whole groups of four."""
    rows, cols = scale.shape[0], scale.shape[1] + -scale.shape[1] % 4
    if cols > scale.shape[1] or not scale.is_contiguous():
        scale = _copy(scale, rows, cols, 0.0)
    return scale.as_strided((cols, rows), (1, cols))


def _copy(scale: Tensor, rows: int, cols: int, fill: float) -> Tensor:
    if has_kernels(scale):
        from minifloat.ops.matmul import kernels

        return kernels.copy_scales(scale, rows, cols, fill)
    padding = (0, cols - scale.shape[1], 0, rows - scale.shape[0])
    return torch.nn.functional.pad(scale, padding, value=fill).contiguous()


# ---- blocks as GPUs from sm_100 on multiply them: MXFP8 and NVFP4, their scales in cuBLASLt's order ----

# ``torch.nn.functional.scaled_mm`` takes FP8 in 1 x 32 blocks under E8M0 scales there, and E2M1 in 1 x 16 blocks under
# E4M3 scales. Whatever else has powers of two for scales is written as the former, without rounding: a block of 128 is
# four of 32 with one scale, a tile is rows with equal scales, and each value of 4 or 6 bits is one of E4M3. No such GPU
# has run this: tests hold what PyTorch is handed to its own checks, and read the product back from it.

MX_BLOCK = 32
TILE_ROWS, TILE_COLS = 128, 4
"""Scales that lie together in memory; both dims are padded to whole tiles."""
ALIGN = 16, 32
"""Padding of the sizes of a product, in elements: 16 bytes of codes along either dim."""


def swizzled_operands(a: Any, b: Any, direct: bool) -> tuple[Sequence[Tensor], Scales]:
    """Prepares what the library reads of two operands of MXFP8 or NVFP4, and the factors left.

    uint8 codes [outer, contracted] and swizzled scales of each, and, where NVFP4's product is the result
    (``direct``), fp32 [2]: the factor of both amaxes, and one.
    """
    read = *_swizzled_operand(a), *_swizzled_operand(b)
    if a.format.scale_rule != "two_level":
        return read, UNSCALED
    divisor = 36.0 * a.format.block_scale_max * b.format.block_scale_max
    if not direct:
        return read, Scales(a.amax, b.amax, divisor)
    return (*read, _writers(a.amax).alpha(a.amax, b.amax, divisor)), UNSCALED


def swizzled_is_direct(a: Format, b: Format, bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the library gives the result; else fp32, to be multiplied by factors of rows, added to, rounded once."""
    return bias is None and out_dtype != torch.float16 and not (a.amax_per_row or b.amax_per_row)


def swizzled(a: Format, b: Format, read: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed; ``read``: of :func:`swizzled_operands`."""
    left, left_scale, right, right_scale, *alpha = read
    if a.scale_rule == "two_level":
        codes, scales, recipe = [torch.float4_e2m1fn_x2] * 2, torch.float8_e4m3fn, ScalingType.BlockWise1x16
    else:
        codes = [fmt.encoding.dtype or torch.float8_e4m3fn for fmt in (a, b)]
        scales, recipe = torch.float8_e8m0fnu, ScalingType.BlockWise1x32
    levels = [[alpha[0][:1]], [alpha[0][1:]]] if alpha else [[], []]
    recipes = [recipe.value, *[ScalingType.TensorWise.value] * len(alpha)]
    swizzles = [SwizzleType.SWIZZLE_32_4_4.value, *_NO_SWIZZLE * len(alpha)]
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


def _swizzled_operand(x: Any) -> tuple[Tensor, Tensor]:
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


class _PlainWriters:
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
        return _PlainWriters
    from minifloat.ops.matmul import kernels

    return kernels
