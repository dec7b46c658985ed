"""The products of groups on a GPU: which kernel multiplies which formats, and how its operands are laid out.

======================================  ==========================================================================
operands                                multiplied
======================================  ==========================================================================
FP8, one scale a group or a row         as they are, on FP8 tensor cores; scales are multiplied in last
FP8, blocks of 128 on both sides        the same, 128 elements at a time, each partial sum scaled
                                        (both on sm_90 by ``hopper.py``, but under ``fast_accum``)
values on one side, or both             as bf16, fp16 or fp32; the other side is dequantized first
other blocks of powers of two, NVFP4    written out as bf16, see ``spread.py``; one more factor a row or a group
everything else                         by the reference, which waits for the device
======================================  ==========================================================================

Loads are wide where rows are multiples of 16 elements, and two bytes or fewer at a time elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops import allocate, grouped, matmul
from minifloat.ops.grouped import gemm as kernels
from minifloat.ops.grouped import hopper, spread
from minifloat.ops.grouped.gemm import Cast, Side
from minifloat.ops.launch import ready
from minifloat.ops.quantize.decode import at_16_bytes, consecutive
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import FEW_ROWS, GemmTile, gemm_tile, tile

SWEEP = 8
"""Rows of tiles that consecutive programs work on."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def multiply(
    gemm: str,
    a: Tensor, a_scale: Tensor | None, a_amax: Tensor | None, a_format: str, a_dim: int, a_offsets: Tensor,
    b: Tensor, b_scale: Tensor | None, b_amax: Tensor | None, b_format: str, b_dim: int, b_offsets: Tensor,
    rows: int, cols: int, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``grouped_mm``; the result is in the memory of ``into`` if that is given, or in its own."""
    a_along, b_along = matmul.CONTRACTED[gemm]
    left = Cast(a, a_scale, a_amax, parse(a_format), a_dim, a_offsets, a_along)
    right = Cast(b, b_scale, b_amax, parse(b_format), b_dim, b_offsets, b_along)
    kind = _kind(left.format, right.format)
    if kind == "reference":
        return grouped.grouped_mm.reference(
            gemm, a, a_scale, a_amax, a_format, a_dim, a_offsets, b, b_scale, b_amax, b_format, b_dim, b_offsets,
            rows, cols, out_dtype, bias, fast_accum,
        )  # fmt: skip
    if kind == "values":
        sides = _values(gemm, left, right, rows, cols, out_dtype)
    else:
        matmul.record(gemm, a_format, b_format, "emulated" if kind == "half" else "native")
        prepare = {"fp8": _whole, "block": _blocks, "half": spread.spread}[kind]
        sides = prepare(left), prepare(right)
    kind += "_fast" if kind == "fp8" and fast_accum else ""
    kind = {torch.bfloat16: "half", torch.float16: "half", torch.float32: "float"}.get(sides[0].matrix.dtype, kind)
    tile = gemm_tile(f"grouped_{kind}", a.device, gemm != "wgrad" and rows <= FEW_ROWS)
    shape = (left.groups * rows, cols) if gemm == "wgrad" else (rows, cols)
    out = allocate(shape, out_dtype, a.device) if into is None else into.view(shape)
    factors = left.format.quantized and right.format.quantized and kind != "block"
    if kind in ("fp8", "block") and hopper.takes(*sides):
        depth = 0 if gemm == "wgrad" else sides[0].matrix.shape[1]
        hopper.multiply(*sides, rows, bias, out, depth, kind == "block", SWEEP)
    else:
        _launch(*sides, left.format, bias, out, gemm == "wgrad", kind, factors, tile)
    return out.view(left.groups, rows, cols) if gemm == "wgrad" else out


def multiply_values(
    x: Tensor, x_offsets: Tensor, w: Tensor, w_offsets: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """``rowwise_mm``."""
    sides = (x, None, None, "identity", ROWWISE, x_offsets), (w, None, None, "identity", ROWWISE, w_offsets)
    cols = w.shape[0] // max(w_offsets.numel() - 1, 1)
    return multiply("fprop", *sides[0], *sides[1], x.shape[0], cols, out_dtype, bias, False)


def multiply_into(out: Tensor, *arguments: Any) -> None:
    """``grouped_mm_into``."""
    run: Any = multiply  # whose arguments no type checker can count here
    result = run(*arguments, out)
    if result.data_ptr() != out.data_ptr():  # the reference's
        out.copy_(result)


def _kind(a: Format, b: Format) -> str:
    """The line of the table above."""
    if not (a.quantized and b.quantized):
        return "values"
    if a.encoding.dtype in _FP8 and b.encoding.dtype in _FP8:
        if a.block == b.block == 0:
            return "fp8"
        if a.block == b.block == 128 and {a.scale_rule, b.scale_rule} <= {"fp32", "pow2"}:
            return "block"
    return "half" if spread.fits(a) and spread.fits(b) else "reference"


def _whole(cast: Cast) -> Side:
    """FP8 codes with one scale a group, or a row."""
    codes, scale, _, fmt, _, offsets, along = cast
    assert scale is not None and fmt.encoding.dtype is not None
    matrix = consecutive(codes.view(fmt.encoding.dtype))
    return Side(matrix, offsets, along, cast.unit, at_16_bytes(scale.contiguous()), step=int(fmt.amax_per_row))


def _blocks(cast: Cast) -> Side:
    """FP8 codes with a scale for each strip or tile of 128."""
    scale = cast.scale_inv
    assert scale is not None
    side = _whole(cast)
    row, col = scale.stride()
    outer, segment = (row, col) if cast.along == ROWWISE else (col, row)
    return side._replace(scale=at_16_bytes(scale), strides=(row, outer, segment), tile=cast.format.tile)


def _values(gemm: str, a: Cast, b: Cast, rows: int, cols: int, out_dtype: torch.dtype) -> tuple[Side, Side]:
    """Both operands in one dtype: their own where a wider result holds it, else that of the result."""
    dtypes = {cast.codes.dtype for cast in (a, b) if not cast.format.quantized}
    dtype = dtypes.pop()
    if dtypes or dtype.itemsize >= out_dtype.itemsize or a.format.quantized != b.format.quantized:
        dtype = out_dtype

    def side(cast: Cast, shape: tuple[int, int]) -> Side:
        codes, scale_inv, amax, fmt, dim, offsets, along = cast
        if fmt.quantized:
            assert scale_inv is not None
            codes = grouped.grouped_dequantize(codes, scale_inv, amax, offsets, fmt.spec, dim, *shape, dtype)
        codes = ready(codes.to(dtype))
        return Side(codes, offsets, along, 0, codes)

    if gemm == "wgrad":
        tokens = b.codes.shape[0] if a.format.quantized else a.codes.shape[0]
        return side(a, (tokens, rows)), side(b, (tokens, cols))
    other = b if a.format.quantized else a
    depth = other.codes.shape[1]
    if gemm == "fprop":
        return side(a, (rows, depth)), side(b, (b.groups * cols, depth))
    if a.format.quantized:
        depth = b.codes.shape[0] // max(b.groups, 1)
    return side(a, (rows, depth)), side(b, (b.groups * depth, cols))


def _launch(
    a: Side, b: Side, codes: Format, bias: Tensor | None, out: Tensor, groups_deep: bool, kind: str, factors: bool,
    tile: GemmTile,
) -> None:  # fmt: skip
    """The kernel of ``gemm.py``; ``codes``: the format of the left operand; ``groups_deep``: rows are contracted."""
    groups, (M, N), depth, b_rows = a.offsets.numel() - 1, out.shape, a.matrix.shape[1], b.along == COLUMNWISE
    if groups_deep:
        M, depth = M // max(groups, 1), 0
        programs = groups * triton.cdiv(M, tile.rows)
    else:
        depth = depth if b_rows else min(depth, b.matrix.shape[1])
        programs = M // tile.rows + groups + 1
    # The left operand's packed codes may be one more than are contracted.
    aligned_depth = not groups_deep and aligned([depth]) and not (b_rows and codes.packed)
    assert not b.tile or tile.cols == kernels.BLOCK.value
    kernels.multiply(
        programs * triton.cdiv(N, tile.cols),
        (
            a.matrix, b.matrix, a.scale, b.scale, out if bias is None else ready(bias), out,
            at_16_bytes(a.offsets), at_16_bytes(b.offsets),
        ),
        (M, N, depth, groups, a.stride, b.stride, *a.strides, *b.strides),
        (
            aligned([a.stride]), aligned([b.stride]), aligned([M]) and groups_deep, aligned([N]), aligned_depth,
            a.unit, b.unit, a.consecutive, b.consecutive, groups_deep, b_rows,
            groups_deep and codes.transform == "hadamard16", kind == "fp8", kind == "block",
            a.tile, b.tile, factors, a.step, b.step, 1.0 / (a.divisor * b.divisor), bias is not None,
            1 if groups_deep else triton.next_power_of_2(groups + 1), SWEEP,
            tile.rows, tile.cols, tile.depth, tile.stages,
        ),
        tile.warps,
    )  # fmt: skip


def add_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """``grouped_sum``: fp32, in an order that follows from a group's own rows alone."""
    x, groups = ready(x), offsets.numel() - 1
    rows, cols, warps, _ = tile("grouped_sum", x.device)
    out = allocate((groups, x.shape[1]), x.dtype, x.device)
    kernels.sum_rows(
        groups * triton.cdiv(x.shape[1], cols), (x, out, at_16_bytes(offsets)), (x.shape[1],),
        (aligned([x.shape[1]]), rows, cols), warps,
    )  # fmt: skip
    return out
