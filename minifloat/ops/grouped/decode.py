"""The values of groups of rows on a GPU: ``decode_kernel`` of ``ops/quantize``, a tile at a time, for every group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, parse
from minifloat.ops import grouped
from minifloat.ops.grouped import layout, table
from minifloat.ops.grouped.layout import of_rows
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import gpu, hadamard
from minifloat.ops.quantize.decode import TILE, consecutive, decode_tile, level_strides
from minifloat.ops.quantize.device import corner, extent, first_program, matrix_of, pick, pick_wide
from minifloat.ops.quantize.job import aligned


@triton.jit
def decode_groups_kernel(
    codes, scales, levels, out, starts, Ms,
    K, code_cols, code_stride, scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
    K_MAJOR: tl.constexpr, COLUMN: tl.constexpr, ALIGNED_K: tl.constexpr, ALIGNED_STRIDE: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLS: tl.constexpr,
    RULE: tl.constexpr, LEVEL: tl.constexpr, INVERSE: tl.constexpr, NEGATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    group = matrix_of(starts, program, 0)
    M = pick(Ms, starts, group, 0)
    K = extent(K, ALIGNED_K)
    first_m, first_k = corner(program - first_program(starts, group, 0), K, BLOCK_M, BLOCK_K)
    if first_m >= M:
        return
    code_rows = M
    if COLUMN:  # whose memory goes on to a multiple of 16 rows, which those that are rotated fill
        code_rows = tl.cdiv(M, 16) * 8 if ELEMENT.packed else tl.cdiv(M, 16) * 16
    decode_tile(
        pick_wide(codes, starts, group, 0, ALIGNED_STRIDE), pick(scales, starts, group, 0),
        pick(levels, starts, group, 0), pick_wide(out, starts, group, 0, ALIGNED_K), first_m, first_k,
        M, K, code_rows, extent(code_cols, ALIGNED_K), extent(code_stride, ALIGNED_STRIDE),
        scale_stride_m, scale_stride_k, level_stride_m, level_stride_k,
        K_MAJOR, False, ELEMENT, ELEMENT.packed and COLUMN, SCALE_ROWS, SCALE_COLS, RULE, LEVEL, INVERSE, NEGATIVE,
        BLOCK_M, BLOCK_K,
    )  # fmt: skip


_decode = Kernel(decode_groups_kernel)


def dequantize(
    codes: Tensor,
    scale_inv: Tensor,
    amax: Tensor | None,
    offsets: Tensor,
    format: str,
    dim: int,
    rows: int,
    cols: int,
    dtype: torch.dtype,
) -> Tensor:
    """As the operation; codes of any strides."""
    fmt, groups = parse(format), offsets.numel() - 1
    if not gpu.casts(fmt):
        return grouped.grouped_dequantize.reference(
            codes, scale_inv, amax, offsets, format, dim, rows, cols, dtype
        )  # fmt: skip
    out = torch.zeros(rows, cols, dtype=dtype, device=codes.device)
    if not out.numel() or not groups:
        return out
    codes, scale_inv, levels, inverse = consecutive(codes), ready(scale_inv), None, 1.0
    if fmt.scale_rule == "two_level":
        assert amax is not None
        levels, inverse = ready(amax), 1.0 / (6 * fmt.block_scale_max)
    k_major = codes.stride(1) != 1
    stride = codes.stride(1 if k_major else 0)
    whole = codes.shape[1] * (2 if fmt.packed and dim == ROWWISE else 1)  # columns that have codes
    of_scales, of_levels = (layout.elements(name, fmt, dim, whole) for name in ("scale_inv", "amax"))
    at = layout.place("codes", fmt, dim).times(1 if k_major else stride)
    wide = aligned([stride]) and not (k_major and fmt.packed)  # of which a unit may have 8 rows of bytes
    (scale_rows, scale_cols), between = fmt.scale_block(dim), level_strides(fmt, dim)
    table.launch(
        _decode, offsets.contiguous(), rows, TILE.rows, triton.cdiv(cols, TILE.cols),
        [
            (codes, at), (scale_inv, of_scales),
            (scale_inv if levels is None else levels, of_levels), (out, of_rows(cols)),
        ],
        [],
        (
            k_major, dim == COLUMNWISE, aligned([cols, codes.shape[1]]), wide, fmt.encoding,
            scale_rows or TILE.rows, scale_cols or TILE.cols, fmt.scaling, "none" if levels is None else "amax",
            inverse, hadamard.NEGATIVE if fmt.transform == "hadamard16" else 0, TILE.rows, TILE.cols,
        ),
        TILE.warps,
        (cols, codes.shape[1], stride, *(scale_inv.stride() if fmt.block else between), *between),
    )  # fmt: skip
    return out
