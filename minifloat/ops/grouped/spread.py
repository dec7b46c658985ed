"""Operands of groups written out as bf16 for the product, as ``matmul/spread.py`` writes those of one matrix.

The values lie where the codes do. What is between groups, and beyond them, stays undefined.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Element, Format
from minifloat.ops.grouped import layout
from minifloat.ops.grouped.gemm import begin, grid_row, group_of, rows_of
from minifloat.ops.launch import Kernel, allocate
from minifloat.ops.matmul.spread import LARGEST, largest_scale
from minifloat.ops.quantize import hadamard
from minifloat.ops.quantize.decode import TILE, at_16_bytes, block_factor, consecutive, load_elements
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
    """Of each group the largest scale over the contracted dim: [G, K] of its columns, or [M] of its rows."""
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
    M, K, groups, code_cols, code_stride, out_stride, scale_row, scale_col, level_row, level_col,
    K_MAJOR: tl.constexpr, OUT_K_MAJOR: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_STRIDE: tl.constexpr,
    ELEMENT: tl.constexpr, PACKED_M: tl.constexpr, RULE: tl.constexpr, LEVEL: tl.constexpr,
    LEVEL_OF_GROUP: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    SEARCH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``decode_kernel`` for each group, whose levels begin at its row of [G, K] or at its first row of [M]."""
    K = extent(K, ALIGNED_K)
    code_cols = extent(code_cols, ALIGNED_K)
    code_stride = extent(code_stride, ALIGNED_STRIDE)
    out_stride = extent(out_stride, ALIGNED_STRIDE)
    columns = tl.cdiv(K, BLOCK_K)
    tile = tl.program_id(0) // columns
    group = group_of(offsets, tile, groups, BLOCK_M, SEARCH)
    first, end = rows_of(offsets, group, groups, M)
    rows = (end - first + PADDED - 1) // PADDED * PADDED
    first_m = (tile - first // BLOCK_M - group) * BLOCK_M
    first_k = tl.program_id(0) % columns * BLOCK_K
    if (group == groups) | (first_m >= rows):
        return
    start = begin(first, group, UNIT).to(tl.int64)
    values = load_elements(
        codes + (start // 2 if PACKED_M else start) * (1 if K_MAJOR else code_stride), first_m, first_k,
        (rows + 1) // 2 if PACKED_M else rows, code_cols, code_stride, K_MAJOR, ELEMENT, PACKED_M, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if RULE is not None:
        ROWS: tl.constexpr = min(SCALE_ROWS, BLOCK_M)
        COLS: tl.constexpr = min(SCALE_COLS, BLOCK_K)
        row = first_m + tl.arange(0, BLOCK_M // ROWS) * ROWS
        col = first_k + tl.arange(0, BLOCK_K // COLS) * COLS
        factor = block_factor(
            scales + grid_row(first, group, UNIT, BLOCK, TILE).to(tl.int64) * scale_row,
            levels + (group.to(tl.int64) * K if LEVEL_OF_GROUP else first), row, col, rows, K,
            scale_row, scale_col, level_row, level_col, RULE, LEVEL, 1.0, SCALE_ROWS, SCALE_COLS,
        )  # fmt: skip
        blocks = tl.reshape(values, (BLOCK_M // ROWS, ROWS, BLOCK_K // COLS, COLS)) * factor[:, None, :, None]
        values = tl.reshape(blocks, (BLOCK_M, BLOCK_K))
    m = (first_m + tl.arange(0, BLOCK_M))[:, None]
    k = (first_k + tl.arange(0, BLOCK_K))[None, :]
    where = start * (1 if OUT_K_MAJOR else out_stride)
    where += k.to(tl.int64) * out_stride + m if OUT_K_MAJOR else m.to(tl.int64) * out_stride + k
    tl.store(out + where, values.to(out.dtype.element_ty), mask=(m < rows) & (k < K))


_largest = Kernel(grouped_largest_kernel)
_decode = Kernel(grouped_decode_kernel)


class Written(NamedTuple):
    """bf16 values where the codes were, and what they are to be multiplied by: fp32 factors over ``divisor``.

    ``step``: 1 for a factor of each row that is not contracted, 0 for one a group.
    """

    values: Tensor
    factor: Tensor
    step: int
    divisor: float


def fits(fmt: Format) -> bool:
    """Codes of the format times their scales fit bf16, and there are Triton functions for both."""
    rule = fmt.scaling
    decodes = type(fmt.encoding).kernels is not Element.kernels
    if fmt.block == 0:
        return decodes and fmt.scale_dtype == torch.float32
    return decodes and (fmt.scale_rule == "two_level" or (rule.own and rule.power_of_two))


def spread(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, offsets: Tensor, along: int
) -> Written:
    """``emulated.spread`` of each group; the rows of a group that is rotated go on to a multiple of 16."""
    codes, scale_inv = consecutive(codes), at_16_bytes(scale_inv)
    groups, unit = offsets.numel() - 1, layout.unit(fmt) if dim == COLUMNWISE else 0
    rows, cols = codes.shape[0], codes.shape[1]
    if fmt.packed:
        rows, cols = (2 * rows, cols) if dim == COLUMNWISE else (rows, 2 * cols)
    # No more rows than these have room in the storage.
    most = rows if dim == ROWWISE else max(unit * (rows // unit - groups + 1) - 1, 0)
    padded = hadamard.GROUP if fmt.transform == "hadamard16" else 1
    where = padded, unit, max(fmt.block, 1), fmt.tile
    search = triton.next_power_of_2(groups + 1)
    offsets = at_16_bytes(offsets)
    rule, level, factor, strides = None, "none", scale_inv, (0, 0)
    step, divisor = int(fmt.amax_per_row), 1.0
    if fmt.scale_rule == "two_level":
        assert amax is not None
        rule, factor, divisor = fmt.scaling, amax, 6.0 * fmt.block_scale_max
    elif fmt.block:
        rule, level, step = fmt.scaling, "largest", 1
        factor = allocate(
            (groups if along == COLUMNWISE else 1, cols if along == COLUMNWISE else most), torch.float32, codes.device
        )
        programs = groups * triton.cdiv(cols, LARGEST.rows) if along == COLUMNWISE else most // LARGEST.rows + groups
        _largest(
            programs, (scale_inv, factor, offsets), (most, cols, groups, *scale_inv.stride()),
            (rule, along == COLUMNWISE, *where, search, LARGEST.rows, LARGEST.cols), LARGEST.warps,
        )  # fmt: skip
        outer = fmt.scale_block(dim)
        strides = (outer[0], 0) if along == ROWWISE else (0, outer[1])
    k_major = codes.stride(1) != 1
    values = allocate((rows, cols), torch.bfloat16, codes.device, transposed=k_major and not fmt.packed)
    scale_rows, scale_cols = fmt.scale_block(dim)
    out_k_major = k_major and not fmt.packed
    lines = codes.stride(1 if k_major else 0), values.stride(1 if out_k_major else 0)
    _decode(
        (most // TILE.rows + groups) * triton.cdiv(cols, TILE.cols),
        (codes, scale_inv, at_16_bytes(factor), values, offsets),
        (most, cols, groups, codes.shape[1], *lines, *(scale_inv.stride() if fmt.block else (0, 0)), *strides),
        (
            k_major, out_k_major, aligned([cols, codes.shape[1]]), aligned(lines), fmt.encoding,
            fmt.packed and dim == COLUMNWISE, rule, level, along == COLUMNWISE, *where,
            scale_rows or TILE.rows, scale_cols or TILE.cols, search, TILE.rows, TILE.cols,
        ),
        TILE.warps,
    )  # fmt: skip
    return Written(values, at_16_bytes(factor.contiguous()), step, divisor)
