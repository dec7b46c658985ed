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
from minifloat.formats import ROWWISE, Format
from minifloat.ops.log import library
from minifloat.ops.matmul import cublaslt


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


def takes_as_stored(codes: Tensor, along: int, outer: int) -> bool:
    """Whether a GPU's library multiplies FP8 codes as they are in memory, for ``outer`` rows or columns of the product.

    Asked by compilers. False where a size is a symbol that need not fit: a guard on it would compile again for others.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    at = 0 if along == ROWWISE else 1  # the dim that becomes the product's
    (rows, depth), strides = (codes.shape[at], codes.shape[1 - at]), (codes.stride(at), codes.stride(1 - at))
    fits = rows == outer, rows > 0, depth > 0, rows % 16 == 0, depth % 16 == 0, strides[0] == depth, strides[1] == 1
    return all(statically_known_true(fit) for fit in fits)


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
    if out is None:
        return library(_multiply, [a, a_scale, b, b_scale, *([] if bias is None else [bias])], out_dtype, fast)
    return _multiply((a, a_scale, b, b_scale, *([] if bias is None else [bias])), out_dtype, fast, out)


def _multiply(tensors: Sequence[Tensor], out_dtype: torch.dtype, fast: bool, out: Tensor | None = None) -> Tensor:
    a, a_scale, b, b_scale, *bias = tensors
    result: Tensor = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale, bias=bias[0] if bias else None, out_dtype=out_dtype,
        use_fast_accum=fast, out=out,
    )  # fmt: skip
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
