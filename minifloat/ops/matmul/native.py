"""``torch``'s own matmuls: the scaled ones of cuBLASLt on a GPU, that of fp64 on a CPU.

Codes are stored in the [M, K] layout. What a library wants beyond that, K-major operands and sizes in multiples of 16,
is prepared here: a byte transpose, and zero codes as padding, which add nothing to a product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat import capability
from minifloat.formats import ROWWISE, Format


def k_major(codes: Tensor, fmt: Format, along: int, align: tuple[int, int]) -> Tensor:
    """FP8 codes as [outer, contracted], both dims rounded up to ``align`` with zero codes; row-major on a GPU."""
    codes = codes if along == ROWWISE else codes.t()
    pad_outer, pad_inner = -codes.shape[0] % align[0], -codes.shape[1] % align[1]
    dtype = fmt.encoding.dtype
    assert dtype is not None
    if not pad_outer and not pad_inner and (codes.is_contiguous() or not codes.is_cuda):
        return codes.view(dtype)  # a CPU takes any strides
    if codes.is_cuda and capability.kernels(codes.get_device())[0]:
        from minifloat.ops.matmul import transpose

        return transpose.k_major_copy(codes, False, align).view(dtype)
    if pad_outer or pad_inner:
        codes = torch.nn.functional.pad(codes, (0, pad_inner, 0, pad_outer))
    return codes.contiguous().view(dtype)


def per_tensor(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    fast: bool,
    out: Tensor | None = None,
) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed, one scale each, or [m, 1] and [1, n].

    A GPU writes it to ``out``, if that is a plain contiguous tensor at a multiple of 256 bytes, as the allocator gives
    memory: cuBLASLt chooses its kernel for that.

    On a CPU the codes are multiplied as fp64, whose sums of E4M3 products are exact: the result depends neither on the
    number of threads nor on how a product is split. ``torch._scaled_mm`` takes hundreds of times as long there, where
    oneDNN has no FP8 instructions (575 ms for 128 x 256 x 256 on Sapphire Rapids).
    """
    if not a.is_cuda:
        product = (a.double() @ b.double().t()).float() * (a_scale * b_scale)
        return (product if bias is None else product + bias.float()).to(out_dtype)
    if type(out) is not Tensor or not out.is_contiguous() or out.data_ptr() % 256:
        out = None
    result: Tensor = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias, out_dtype=out_dtype, use_fast_accum=fast, out=out
    )
    return result


def outer_major_scale(scale: Tensor, along: int) -> Tensor:
    """The grid of block scales as [outer, contracted] in units of blocks."""
    return scale if along == ROWWISE else scale.t()


def block128(
    a: Tensor, a_scale: Tensor, a_tile: bool, b: Tensor, b_scale: Tensor, b_tile: bool, out_dtype: torch.dtype
) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed, one fp32 scale for 1 x 128 or 128 x 128 codes."""
    from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

    if a_tile:  # the library wants the tiles on the right: a b^T = (b a^T)^T
        return block128(b, b_scale, b_tile, a, a_scale, a_tile, out_dtype).t()
    recipe_b = ScalingType.BlockWise128x128 if b_tile else ScalingType.BlockWise1x128
    result: Tensor = scaled_mm(
        a, b.t(), scale_a=_strip_scale(a_scale, a.shape[0]), scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=_tile_scale(b_scale) if b_tile else _strip_scale(b_scale, b.shape[0]), scale_recipe_b=recipe_b,
        swizzle_a=SwizzleType.NO_SWIZZLE, swizzle_b=SwizzleType.NO_SWIZZLE, output_dtype=out_dtype,
    )  # fmt: skip
    return result


def _strip_scale(scale: Tensor, outer: int) -> Tensor:
    """[outer, blocks], outer-major in memory, rows of padding scaled by one."""
    if scale.shape[0] < outer:
        scale = torch.nn.functional.pad(scale, (0, 0, 0, outer - scale.shape[0]), value=1.0)
    # Strides spelled out: those of a dim of 1 are anything, and the library reads them.
    return scale.t().contiguous().as_strided(scale.shape, (1, outer))


def _tile_scale(scale: Tensor) -> Tensor:
    """[blocks, outer blocks] with the contracted dim consecutive in memory, in whole groups of four."""
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return padded.as_strided((padded.shape[1], padded.shape[0]), (1, padded.shape[1]))
