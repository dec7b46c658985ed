"""Groups of rows of FP8 strips by MXFP4 weights: ``matmul/fold_kernels.py`` for groups.

The weight becomes one in E4M3 with 128 x 128 tiles, as ``layout.py`` lays those out, for the product of blocks; columns
of a group's result that have a tile that could not be folded are computed again after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE
from minifloat.formats.elements import E4M3
from minifloat.ops import allocate
from minifloat.ops.grouped.gemm import Cast, Side, begin, grid_row, group_of, rows_of
from minifloat.ops.grouped.spread import most_rows, sizes
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.matmul import fold_kernels, kernels
from minifloat.ops.matmul.fold_kernels import any_nan, common_scale, encoded, load_packed, unpacked, used_blocks
from minifloat.ops.matmul.reference import BLOCK, HIGHEST, LEAST, LOWEST, TILE
from minifloat.ops.quantize.decode import at_16_bytes, load_elements
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned

PARTS = 16
"""Programs of the repair that share the rows of a group."""


@triton.jit
def tile_of(offsets, tile, groups, M, TILE: tl.constexpr, SEARCH: tl.constexpr):
    """The group of a tile of rows, its first row and number of rows, and the first row of the tile in the group."""
    group = group_of(offsets, tile, groups, TILE, SEARCH)
    first, end = rows_of(offsets, group, groups, M)
    return group, first, tl.where(group < groups, end - first, 0), (tile - first // TILE - group) * TILE


@triton.jit
def load_weight(
    codes, first, group, row, col, rows, code_cols, code_stride,
    ELEMENT: tl.constexpr, PACKED_ROWS: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The values, not scaled, of a part [BLOCK_M, BLOCK_K] of a group's rows; see :class:`FoldedWeight`."""
    start = begin(first, group, UNIT).to(tl.int64)
    if PACKED_ROWS:
        found = tl.trans(
            load_elements(
                codes + start // 2, col, row, code_cols, (rows + 1) // 2, code_stride, False, ELEMENT, False, BLOCK_K,
                BLOCK_M,
            )
        )  # fmt: skip
    else:
        found = load_elements(
            codes + start * code_stride, row, col, rows, code_cols, code_stride, False, ELEMENT, False, BLOCK_M, BLOCK_K
        )
    return found


@triton.jit
def grouped_fold_kernel(
    codes, scales, target, folded, offsets,
    M, K, groups, code_cols, code_stride, row_stride, col_stride, target_stride, scale_cols,
    CONTRACTS_ROWS: tl.constexpr, PACKED_ROWS: tl.constexpr, ALIGNED: tl.constexpr, ALIGNED_TARGET: tl.constexpr,
    ELEMENT: tl.constexpr, OUT: tl.constexpr, UNIT: tl.constexpr, SQUARES: tl.constexpr,
    HIGHEST: tl.constexpr, LOWEST: tl.constexpr, LEAST: tl.constexpr,
    SEARCH: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of rows of a group and of columns; where rows are contracted they are consecutive in the target."""
    code_cols = extent(code_cols, ALIGNED)
    code_stride = extent(code_stride, ALIGNED)
    target_stride = extent(target_stride, ALIGNED_TARGET)
    columns = tl.cdiv(K, TILE)
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    group, first, rows, row = tile_of(offsets, tile, groups, M, TILE, SEARCH)
    scale = 0.0
    if row < rows:
        start = begin(first, group, UNIT).to(tl.int64)
        grid = scales + grid_row(first, group, UNIT, BLOCK, SQUARES).to(tl.int64) * row_stride
        OUTER: tl.constexpr = BLOCK if SQUARES else 1
        each = tl.arange(0, TILE)
        block = tl.arange(0, TILE // BLOCK)
        if CONTRACTS_ROWS:
            o = column * TILE + each
            j = row // BLOCK + block
            at = grid + (o // OUTER)[:, None] * col_stride + j[None, :].to(tl.int64) * row_stride
            inside = (o < K)[:, None] & (j * BLOCK < rows)[None, :]
        else:
            o = row + each
            j = column * (TILE // BLOCK) + block
            at = grid + (o // OUTER)[:, None].to(tl.int64) * row_stride + j[None, :] * col_stride
            inside = (o < rows)[:, None] & (j * BLOCK < K)[None, :]
        exponent = tl.load(at, mask=inside, other=0).to(tl.int32)
        if PACKED_ROWS == CONTRACTS_ROWS:
            if CONTRACTS_ROWS:
                packed = load_packed(
                    codes + start // 2, column * TILE, row // 2, code_cols, (rows + 1) // 2, code_stride, TILE
                )
            else:
                packed = load_packed(
                    codes + start * code_stride, row, column * (TILE // 2), rows, code_cols, code_stride, TILE
                )
            scale, factor = common_scale(used_blocks(packed, TILE, BLOCK), exponent, HIGHEST, LOWEST, LEAST)
            values = unpacked(packed, ELEMENT)
        else:
            values = load_weight(
                codes, first, group, row, column * TILE, rows, code_cols, code_stride, ELEMENT, PACKED_ROWS, UNIT,
                TILE, TILE,
            )  # fmt: skip
            values = tl.trans(values)
            used = tl.max(tl.reshape(tl.abs(values), (TILE, TILE // BLOCK, BLOCK)), axis=2) > 0
            scale, factor = common_scale(used, exponent, HIGHEST, LOWEST, LEAST)
        made = encoded(values, factor, OUT, TILE, BLOCK)
        if CONTRACTS_ROWS:
            where = target + o[:, None].to(tl.int64) * target_stride + tile * TILE + each[None, :]
            tl.store(where, made, mask=(o < K)[:, None])
        else:
            k = column * TILE + each
            where = target + (first + o)[:, None].to(tl.int64) * target_stride + k[None, :]
            tl.store(where, made, mask=(o < rows)[:, None] & (k < extent(K, ALIGNED_TARGET))[None, :])
    tl.store(folded + tile * scale_cols + column, scale)


@triton.jit
def grouped_repair_kernel(
    a, a_scale, codes, scales, folded, bias, out, a_offsets, b_offsets,
    M, K, N, depth, groups, high, a_stride, a_scale_row, a_scale_col, code_cols, code_stride, row_stride, col_stride,
    scale_cols, programs,
    CONTRACTS_ROWS: tl.constexpr, PACKED_ROWS: tl.constexpr, ELEMENT: tl.constexpr, RULE: tl.constexpr,
    UNIT: tl.constexpr, SQUARES: tl.constexpr, BIAS: tl.constexpr, STEP: tl.constexpr, SCALES: tl.constexpr,
    SEARCH: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``reference.scaled_product`` to those TILE columns of a group's result that have a NaN among their scales.

    [M, K] are the sizes of the weights of all groups; ``out`` has N columns, and ``a`` ``depth``.
    """
    tiles = groups * scale_cols if CONTRACTS_ROWS else high
    items = tl.where(any_nan(folded, high * scale_cols, STEP) > 0, tiles * PARTS, 0)
    for item in range(tl.program_id(0), items, programs):
        which = item // PARTS
        if CONTRACTS_ROWS:
            group = which // scale_cols
            first, end = rows_of(b_offsets, group, groups, M)
            rows = end - first
            column = which % scale_cols
            col = column * TILE
            bad = 0
            for i in range(0, tl.cdiv(rows, TILE)):
                scale = tl.load(folded + (first // TILE + group + i) * scale_cols + column)
                bad = tl.where(scale == scale, bad, 1)
            blocks = tl.cdiv(rows, BLOCK)
        else:
            group, first, rows, col = tile_of(b_offsets, which, groups, M, TILE, SEARCH)
            bad = tl.where(col < rows, any_nan(folded + which * scale_cols, scale_cols, SCALES), 0)
            blocks = tl.cdiv(K, BLOCK)
        if bad > 0:
            OUTER: tl.constexpr = BLOCK if SQUARES else 1
            n = col + tl.arange(0, TILE)
            k = tl.arange(0, BLOCK)
            a_first = tl.load(a_offsets + group)
            a_rows = tl.load(a_offsets + group + 1) - a_first
            grid = scales + grid_row(first, group, UNIT, BLOCK, SQUARES).to(tl.int64) * row_stride
            for start in range(item % PARTS * BLOCK_M, a_rows, PARTS * BLOCK_M):
                m = start + tl.arange(0, BLOCK_M)
                row = (a_first + m).to(tl.int64)
                total = tl.zeros((BLOCK_M, TILE), tl.float32)
                for i in range(0, blocks):
                    inside = (m < a_rows)[:, None] & (i * BLOCK + k < depth)[None, :]
                    x = tl.load(a + row[:, None] * a_stride + (i * BLOCK + k)[None, :], mask=inside, other=0.0)
                    if CONTRACTS_ROWS:
                        w = load_weight(
                            codes, first, group, i * BLOCK, col, rows, code_cols, code_stride, ELEMENT, PACKED_ROWS,
                            UNIT, BLOCK, TILE,
                        )  # fmt: skip
                        at = grid + (n // OUTER) * col_stride + i * row_stride
                    else:
                        w = tl.trans(
                            load_weight(
                                codes, first, group, col, i * BLOCK, rows, code_cols, code_stride, ELEMENT,
                                PACKED_ROWS, UNIT, TILE, BLOCK,
                            )
                        )  # fmt: skip
                        at = grid + (n // OUTER).to(tl.int64) * row_stride + i * col_stride
                    product = tl.dot(x.to(tl.float32).to(tl.bfloat16), w.to(tl.bfloat16))
                    segment = a_scale + row * a_scale_row + i * BLOCK // TILE * a_scale_col
                    left = tl.load(segment, mask=m < a_rows, other=0.0)
                    right = RULE.kernels.value(tl.load(at, mask=n < N, other=0))
                    total += product * (left[:, None] * right[None, :])
                if BIAS:
                    addend = tl.load(bias + group * N + n, mask=n < N, other=0.0)
                    total += addend.to(out.dtype.element_ty).to(tl.float32)[None, :]
                where = out + row[:, None] * N + n[None, :]
                tl.store(where, total.to(out.dtype.element_ty), mask=(m < a_rows)[:, None] & (n < N)[None, :])


_fold = Kernel(grouped_fold_kernel)
_repair = Kernel(grouped_repair_kernel)


class FoldedWeight:
    """The weights of groups [G N, K] in MXFP4, of which ``cast`` is what ``grouped_mm`` was given, and their fold.

    Codes that are packed along rows are transposed first, so that all are packed along the dim that is consecutive.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        packed_rows, groups = cast.dim == COLUMNWISE, cast.groups
        self.codes = kernels.k_major_copy(cast.codes, True, (1, 1)) if packed_rows else ready(cast.codes)
        assert cast.scale_inv is not None
        self.scales = at_16_bytes(cast.scale_inv)
        self.contracts_rows = cast.along == COLUMNWISE
        self.cols = cols = sizes(cast.codes, cast.format, cast.dim)[1]
        self.rows = most_rows(cast.codes, cast.format, cast.dim, groups)
        self.high = self.rows // TILE + groups
        self.folded = allocate((self.high, triton.cdiv(cols, TILE)), torch.float32, self.codes.device)
        self.ways = self.contracts_rows, packed_rows
        # Columns of the codes in bytes, or in elements where bytes hold two rows.
        self.strides = cols if packed_rows else self.codes.shape[1], self.codes.stride(0), *self.scales.stride()
        self.search = triton.next_power_of_2(groups + 1)

    def side(self) -> Side:
        """The operand of the product of blocks."""
        shape = (self.cols, self.high * TILE) if self.contracts_rows else (self.rows, self.cols)
        target = allocate(shape, torch.uint8, self.codes.device)
        cast, scale = self.cast, self.folded
        offsets = at_16_bytes(cast.offsets)
        _fold(
            scale.numel(),
            (self.codes, self.scales, target, scale, offsets),
            (self.rows, self.cols, cast.groups, *self.strides, target.stride(0), scale.stride(0)),
            (
                *self.ways, aligned(self.strides[:2]), aligned([shape[1]]), cast.format.encoding, E4M3, cast.unit,
                cast.format.tile, HIGHEST, LOWEST, LEAST, self.search, TILE, BLOCK,
            ),
            8,
        )  # fmt: skip
        row, col = scale.stride()
        outer, segment = (col, row) if self.contracts_rows else (row, col)
        codes = target.view(torch.float8_e4m3fn)
        matrix, unit = (codes.t(), TILE) if self.contracts_rows else (codes, 0)
        return Side(matrix, offsets, cast.along, unit, scale, (row, outer, segment), tile=True)

    def repair(self, a: Side, bias: Tensor | None, out: Tensor) -> None:
        """Computes again what of ``out`` has a tile that could not be folded; ``a``: the left side of the product."""
        cast, folded = self.cast, self.folded
        _repair(
            fold_kernels.PROGRAMS,
            (
                a.matrix, a.scale, self.codes, self.scales, folded, out if bias is None else ready(bias), out,
                at_16_bytes(a.offsets), at_16_bytes(cast.offsets),
            ),
            (
                self.rows, self.cols, out.shape[1], a.matrix.shape[1], cast.groups, self.high, a.stride, *a.strides[1:],
                *self.strides, folded.stride(0), fold_kernels.PROGRAMS,
            ),
            (
                *self.ways, cast.format.encoding, cast.format.scaling, cast.unit, cast.format.tile, bias is not None,
                fold_kernels.STEP, triton.next_power_of_2(folded.shape[1]), self.search, PARTS, fold_kernels.REPAIRED,
                TILE, BLOCK,
            ),
            8,
        )  # fmt: skip
