"""Writes out operands of groups: as bf16 for the product, as ``matmul/kernels.py`` does of one matrix, or read.

For the product the values lie where the codes do. What is between groups, and beyond them, stays undefined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Element, Format, parse
from minifloat.ops import allocate, grouped
from minifloat.ops.grouped.gemm import Cast, Side, begin, grid_row, group_of, rows_of, unit_of
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.matmul.kernels import LARGEST, largest_scale
from minifloat.ops.quantize import gpu, reference
from minifloat.ops.quantize.decode import TILE, Factors, at_16_bytes, consecutive, decode_tile, restoring
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned


@triton.jit
def grouped_largest_kernel(
    scales, largest, offsets,
    M, K, groups, row_stride, col_stride,
    RULE: tl.constexpr, CONTRACTS_ROWS: tl.constexpr, PADDED: tl.constexpr,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SEARCH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Finds each group's largest scale over the contracted dim: [G, K] of its columns, or [M] of its rows."""
    OUTER_BLOCK: tl.constexpr = BLOCK if TILE else 1
    if CONTRACTS_ROWS:
        tiles = tl.cdiv(K, ROWS)
        group = tl.program_id(0) // tiles
        first, end = rows_of(offsets, group, groups, M)
        blocks = tl.cdiv((end - first + PADDED - 1) // PADDED * PADDED, BLOCK)
        at = scales + grid_row(first, group, UNIT, BLOCK, TILE).to(tl.int64) * row_stride
        outer = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
        found = largest_scale(at, outer, K, blocks, col_stride, row_stride, RULE, OUTER_BLOCK, COLS)
        tl.store(largest + group.to(tl.int64) * K + outer, found, mask=outer < K)
    else:
        group = group_of(offsets, tl.program_id(0), groups, ROWS, SEARCH)
        first, end = rows_of(offsets, group, groups, M)
        outer = (tl.program_id(0) - first // ROWS - group) * ROWS + tl.arange(0, ROWS)
        if group < groups:
            at = scales + grid_row(first, group, UNIT, BLOCK, TILE).to(tl.int64) * row_stride
            blocks = tl.cdiv(K, BLOCK)
            found = largest_scale(at, outer, end - first, blocks, row_stride, col_stride, RULE, OUTER_BLOCK, COLS)
            tl.store(largest + first + outer, found, mask=outer < end - first)


@triton.jit
def grouped_decode_kernel(
    codes, scales, levels, out, offsets,
    M, K, groups, code_cols, code_stride, out_stride, scale_row, scale_col, level_row, level_col, level_width,
    K_MAJOR: tl.constexpr, OUT_K_MAJOR: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_STRIDE: tl.constexpr,
    ELEMENT: tl.constexpr, PACKED_M: tl.constexpr, RULE: tl.constexpr, LEVEL: tl.constexpr, INVERSE: tl.constexpr,
    NEGATIVE: tl.constexpr, LEVEL_OF_GROUP: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, OUT_UNIT: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    SEARCH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``decode_kernel`` for each group, whose levels begin at its row of ``level_width``, or at its first row of [M].

    So do scales where there are no blocks. Rows that pad a group for a rotation are written unless it is undone.
    """
    K = extent(K, ALIGNED_K)
    code_cols = extent(code_cols, ALIGNED_K)
    code_stride = extent(code_stride, ALIGNED_STRIDE)
    out_stride = extent(out_stride, ALIGNED_STRIDE)
    columns = tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0) // columns
    group = tl.maximum(group_of(offsets, tile, groups, BLOCK_M, SEARCH), 0)
    first, end = rows_of(offsets, group, groups, M)
    rows = (end - first + PADDED - 1) // PADDED * PADDED
    first_m = (tile - first // BLOCK_M - group) * BLOCK_M
    if (group == groups) | (first_m < 0) | (first_m >= rows):  # below 0 before the first group
        return
    start = begin(first, group, UNIT).to(tl.int64)
    out_row = begin(first, group, OUT_UNIT).to(tl.int64)
    level = group.to(tl.int64) * level_width if LEVEL_OF_GROUP else first.to(tl.int64)
    scale = level if BLOCK == 0 else grid_row(first, group, UNIT, BLOCK, TILE).to(tl.int64) * scale_row
    decode_tile(
        codes + (start // 2 if PACKED_M else start) * (1 if K_MAJOR else code_stride), scales + scale, levels + level,
        out + out_row * (1 if OUT_K_MAJOR else out_stride), first_m, tl.program_id(0) % columns * BLOCK_K,
        end - first if NEGATIVE != 0 else rows, K, (rows + 1) // 2 if PACKED_M else rows, code_cols, code_stride,
        out_stride, scale_row, scale_col, level_row, level_col,
        K_MAJOR, OUT_K_MAJOR, ELEMENT, PACKED_M, SCALE_ROWS, SCALE_COLS, RULE, LEVEL, INVERSE, NEGATIVE,
        BLOCK_M, BLOCK_K,
    )  # fmt: skip


_largest = Kernel(grouped_largest_kernel)
_decode = Kernel(grouped_decode_kernel)


def fits(fmt: Format) -> bool:
    """Codes of the format times their scales fit bf16, and there are Triton functions for both."""
    rule = fmt.scaling
    decodes = type(fmt.encoding).kernels is not Element.kernels
    if fmt.block == 0:
        return decodes and fmt.scale_dtype == torch.float32
    return decodes and (fmt.scale_rule == "two_level" or (rule.own and rule.power_of_two))


def spread(cast: Cast) -> Side:
    """``emulated.spread`` of each group, and what each row, or group, is to be multiplied by.

    The rows of a group that is rotated go on to a multiple of 16.
    """
    fmt, dim, offsets, amax = cast.format, cast.dim, cast.offsets, cast.amax
    assert cast.scale_inv is not None
    codes, scale_inv = consecutive(cast.codes), at_16_bytes(cast.scale_inv)
    groups, cols = cast.groups, sizes(codes, fmt, dim)[1]
    of_groups, most = cast.along == COLUMNWISE, most_rows(codes, fmt, dim, groups)
    factors, step = Factors(None, scale_inv, "none", scale_inv, (0, 0), 1.0, 0), int(fmt.amax_per_row)
    divisor = 1.0
    if fmt.scale_rule == "two_level":
        assert amax is not None
        factors, divisor = factors._replace(rule=fmt.scaling, levels=amax), 6.0 * fmt.block_scale_max
    elif fmt.block:
        largest = allocate((groups if of_groups else 1, cols if of_groups else most), torch.float32, codes.device)
        programs = groups * triton.cdiv(cols, LARGEST.rows) if of_groups else most // LARGEST.rows + groups
        padded = reference.GROUP if fmt.transform == "hadamard16" else 1
        _largest(
            programs, (scale_inv, largest, at_16_bytes(offsets)), (most, cols, groups, *scale_inv.stride()),
            (
                fmt.scaling, of_groups, padded, cast.unit, fmt.block, fmt.tile,
                triton.next_power_of_2(groups + 1), LARGEST.rows, LARGEST.cols,
            ),
            LARGEST.warps,
        )  # fmt: skip
        outer = fmt.scale_block(dim)
        strides = (0, outer[1]) if of_groups else (outer[0], 0)
        factors, step = Factors(fmt.scaling, scale_inv, "largest", largest, strides, 1.0, 0), 1
    transposed = codes.stride(1) != 1 and not fmt.packed
    values = allocate(sizes(codes, fmt, dim), torch.bfloat16, codes.device, transposed=transposed)
    _decode_to(values, codes, fmt, dim, offsets, factors, of_groups, cols, cast.unit)
    factor = at_16_bytes(factors.levels.contiguous())
    return Side(values, offsets, cast.along, cast.unit, factor, step=step, divisor=divisor)


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, offsets: Tensor, format: str, dim: int, rows: int, cols: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``grouped_dequantize``; codes of any strides."""
    fmt = parse(format)
    if not gpu.casts(fmt):
        return grouped.grouped_dequantize.reference(
            codes, scale_inv, amax, offsets, format, dim, rows, cols, dtype
        )  # fmt: skip
    out = torch.zeros(rows, cols, dtype=dtype, device=codes.device)
    if not out.numel() or offsets.numel() < 2:
        return out
    factors = restoring(ready(scale_inv), amax, fmt, dim)
    of_groups = not (fmt.amax_per_row and dim == ROWWISE)
    width = sizes(codes, fmt, dim)[1] if fmt.amax_per_row else 1
    _decode_to(out, consecutive(codes), fmt, dim, offsets, factors, of_groups, width, 0)
    return out


def _decode_to(
    out: Tensor, codes: Tensor, fmt: Format, dim: int, offsets: Tensor, factors: Factors, of_groups: bool, width: int,
    unit: int,
) -> None:  # fmt: skip
    """Writes the values of codes to ``out``, where groups begin at multiples of ``unit`` as in ``layout.py``, or not.

    Args:
        of_groups, width: levels are as many for each group; else one for each row.
    """
    groups, cols, k_major, out_k_major = offsets.numel() - 1, out.shape[1], codes.stride(1) != 1, out.stride(1) != 1
    lines = codes.stride(1 if k_major else 0), out.stride(1 if out_k_major else 0)
    scale_rows, scale_cols = fmt.scale_block(dim)
    most = most_rows(codes, fmt, dim, groups)
    _decode(
        (most // TILE.rows + groups) * triton.cdiv(cols, TILE.cols),
        (codes, factors.scale_inv, at_16_bytes(factors.levels), out, at_16_bytes(offsets)),
        (
            most, cols, groups, codes.shape[1], *lines,
            *(factors.scale_inv.stride() if fmt.block else factors.level_strides), *factors.level_strides, width,
        ),
        (
            k_major, out_k_major, aligned([cols, codes.shape[1]]), aligned(lines), fmt.encoding,
            fmt.packed and dim == COLUMNWISE, factors.rule, factors.level, factors.inverse, factors.signs, of_groups,
            reference.GROUP if fmt.transform == "hadamard16" and dim == COLUMNWISE else 1, unit_of(fmt, dim), fmt.block,
            fmt.tile, unit, scale_rows or TILE.rows, scale_cols or TILE.cols, triton.next_power_of_2(groups + 1),
            TILE.rows, TILE.cols,
        ),
        TILE.warps,
    )  # fmt: skip


def sizes(codes: Tensor, fmt: Format, dim: int) -> tuple[int, int]:
    """Rows and columns that codes have room for."""
    rows, cols = codes.shape
    return (2 * rows if fmt.packed and dim == COLUMNWISE else rows), (
        2 * cols if fmt.packed and dim == ROWWISE else cols
    )


def most_rows(codes: Tensor, fmt: Format, dim: int, groups: int) -> int:
    """No group ends behind this row: more have no room in the storage."""
    rows, unit = sizes(codes, fmt, dim)[0], unit_of(fmt, dim)
    return max(unit * (rows // unit - groups + 1) - 1, 0) if unit else rows
