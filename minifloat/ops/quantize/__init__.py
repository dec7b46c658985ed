"""Amax, cast and dequantize as ``torch.library`` operations over lists of tensors: one launch a phase."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops.library import SymInt, operation
from minifloat.ops.quantize import reference


@operation("quantize.gpu:recorded_amax")
def amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """Finds ``reference.amax`` of each tensor."""
    return [reference.amax(x, parse(spec), dim) for x, spec, dim in zip(xs, formats, dims, strict=True)]


@amax.fake
def _(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    return [
        x.new_empty(amax_shape(parse(spec), dim, *x.shape), dtype=torch.float32)
        for x, spec, dim in zip(xs, formats, dims, strict=True)
    ]


@operation("quantize.gpu:recorded_cast")
def cast(
    xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], formats: Sequence[str],
    dims: Sequence[int], k_major: Sequence[bool], noop: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Casts each tensor to codes, scales and amax by ``reference.cast``; one that follows itself is read once.

    ``k_major``: in memory as a GEMM reads them that wants the contracted dim consecutive: the codes of a columnwise
    cast with M consecutive, and so the scales of a rowwise one in strips. ``noop``: fp32 [1] on the device; where it is
    not 0 nothing need be computed, and the outputs are undefined.
    """
    outputs: list[Tensor] = []
    for x, amax, rng, spec, dim, transposed in zip(xs, given, rngs, formats, dims, k_major, strict=True):
        fmt = parse(spec)
        codes, scale_inv, measured = reference.cast(x, amax, rng, fmt, dim)
        codes = _transposed(codes) if transposed and dim == COLUMNWISE else codes.contiguous()
        if transposed and dim == ROWWISE and fmt.block and not fmt.tile:
            scale_inv = _transposed(scale_inv)
        outputs += codes, scale_inv, measured
    return outputs


@cast.fake
def _(
    xs: Sequence[Tensor], _given: Any, _rngs: Any, formats: Sequence[str], dims: Sequence[int], k_major: Sequence[bool],
    _noop: Any,
) -> list[Tensor]:  # fmt: skip
    outputs: list[Tensor] = []
    for x, spec, dim, transposed in zip(xs, formats, dims, k_major, strict=True):
        fmt = parse(spec)
        measured = x.new_empty(1 if fmt.scale_rule == "given" else 0, dtype=torch.float32)
        outputs += *empty_cast(x, fmt, dim, transposed), measured
    return outputs


def _transposed(x: Tensor) -> Tensor:
    """``x`` [M, K] with M consecutive in memory."""
    return x.t().contiguous().t()


@operation("quantize.decode:dequantize")
def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, format: str, dim: int, rows: SymInt, cols: SymInt,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return reference.dequantize(codes, scale_inv, amax, parse(format), dim, rows, cols).to(dtype)


@dequantize.fake
def _(codes: Tensor, *rest: Any) -> Tensor:
    *_, rows, cols, dtype = rest
    return codes.new_empty((rows, cols), dtype=dtype)


class _Seeds(threading.local):
    """Seeds of this thread's casts that were drawn before; None: each cast draws its own."""

    given: list[Tensor] | None = None


_seeds = _Seeds()


@contextmanager
def given_seeds(seeds: list[Tensor]) -> Iterator[None]:
    """Inside, casts take these seeds, in order, and draw none."""
    outer, _seeds.given = _seeds.given, seeds
    try:
        yield
    finally:
        _seeds.given = outer


@operation(random=True)
def draw_seed(like: Tensor) -> Tensor:
    """Seed and offset for stochastic rounding, int64 [2] on the device of ``like``, from PyTorch's generator there."""
    if _seeds.given is not None:
        return _seeds.given.pop(0)
    return torch.randint(2**62, (2,), dtype=torch.int64, device=like.device)


def amax_shape(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the amax of an [rows, cols] tensor."""
    if fmt.amax_per_row:
        return (rows,) if dim == ROWWISE else (cols,)
    return _grid(fmt, dim, rows, cols) if fmt.block and fmt.scale_rule != "two_level" else (1,)


def code_shape(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, int]:
    """Shape of the codes: [M, K], halved along ``dim`` if packed; M rounded up to 16 by a Hadamard transform."""
    rows = reference.rotated_rows(rows) if fmt.transform == "hadamard16" else rows
    if fmt.packed and dim == ROWWISE:
        return rows, (cols + 1) // 2
    return ((rows + 1) // 2, cols) if fmt.packed else (rows, cols)


def scale_shape(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the scales: [1], or one an element of the grid of blocks."""
    rows = reference.rotated_rows(rows) if fmt.transform == "hadamard16" else rows
    return _grid(fmt, dim, rows, cols) if fmt.grid else (1,)


def _grid(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, int]:
    sizes = zip((rows, cols), fmt.scale_block(dim), strict=True)
    grid_rows, grid_cols = [(size + block - 1) // block if block else 1 for size, block in sizes]
    return grid_rows, grid_cols


def empty_cast(x: Tensor, fmt: Format, dim: int, k_major: bool, columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Memory for the codes and scales of a cast of ``x``; ``k_major`` as in :data:`cast`.

    ``columns``: of the matrix that is cast, where a kernel makes it of ``x`` and it has others.
    """
    rows, columns = x.shape[0], x.shape[1] if columns is None else columns
    codes, scales = code_shape(fmt, dim, rows, columns), scale_shape(fmt, dim, rows, columns)
    transposed = k_major and dim == COLUMNWISE
    scales_transposed = k_major and dim == ROWWISE and fmt.block > 0 and not fmt.tile
    return empty(x, codes, torch.uint8, transposed), empty(x, scales, fmt.scale_dtype, scales_transposed)


def empty(x: Tensor, shape: Sequence[int], dtype: torch.dtype, transposed: bool) -> Tensor:
    """Memory of ``shape``; ``transposed``: its columns are consecutive, not its rows."""
    return x.new_empty(shape[::-1], dtype=dtype).t() if transposed else x.new_empty(shape, dtype=dtype)


class FusedCodes(NamedTuple):
    """Codes of a cast that is fused with what computes its value; what is not wanted or not there is empty, [0].

    Args:
        row_codes, column_codes: uint8.
        row_scales, column_scales: of blocks; one scale for the tensor, [1], is ``row_scales`` and serves both.
        amax: of the fp32 value, [1], where the scale was given.
    """

    row_codes: Tensor
    column_codes: Tensor
    row_scales: Tensor
    column_scales: Tensor
    amax: Tensor


def casts_blocks(fmt: Format) -> bool:
    """Whether the cast of a block needs nothing but the block, and there are kernels for it."""
    return fmt.scaling.own and fmt.transform == "none" and 16 <= fmt.block <= 256


def fused_cast(
    y: Tensor, scale: Tensor | None, fmt: Format, rowwise: bool, columnwise: bool, k_major: bool
) -> FusedCodes:
    """The reference's casts of ``y``, with a given scale or in blocks, and memory orders as of :func:`cast`."""
    out = empty_fused_cast(y, y.shape[1], fmt, rowwise, columnwise, k_major)
    if scale is not None:  # the codes are the same in both orientations
        made, scale_inv, amax = reference.cast(y, scale, None, fmt, ROWWISE)
        for codes in [out.row_codes] * rowwise + [out.column_codes] * columnwise:
            codes.copy_(made)
        return out._replace(row_scales=scale_inv, amax=amax)
    row, column = (rowwise, out.row_codes, out.row_scales), (columnwise, out.column_codes, out.column_scales)
    for dim, (wanted, codes, scales) in ((ROWWISE, row), (COLUMNWISE, column)):
        if wanted:
            made, scale_inv, _ = reference.cast(y, None, None, fmt, dim)
            codes.copy_(made), scales.copy_(scale_inv)
    return out


def empty_fused_cast(
    x: Tensor, columns: int, fmt: Format, rowwise: bool, columnwise: bool, k_major: bool
) -> FusedCodes:
    """Memory for the casts of a matrix with the rows of ``x`` and ``columns`` columns; 0 for an amax to raise."""
    given = fmt.scale_rule == "given"
    nothing = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=fmt.scale_dtype)
    row_codes, row_scales = empty_cast(x, fmt, ROWWISE, k_major, columns) if rowwise else nothing
    nothing = x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=fmt.scale_dtype)
    column_codes, column_scales = empty_cast(x, fmt, COLUMNWISE, k_major, columns) if columnwise else nothing
    if given:
        row_scales, column_scales = x.new_empty(1, dtype=torch.float32), x.new_empty(0, dtype=torch.float32)
    amax = torch.zeros((int(given),), dtype=torch.float32, device=x.device)
    return FusedCodes(row_codes, column_codes, row_scales, column_scales, amax)
