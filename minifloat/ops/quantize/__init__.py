"""Amax, cast and dequantize as ``torch.library`` operations over lists of tensors: one launch a phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops.library import register
from minifloat.ops.quantize import hadamard, reference


def _amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    return [reference.amax(x, parse(spec), dim) for x, spec, dim in zip(xs, formats, dims, strict=True)]


def _cast(
    xs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    rngs: Sequence[Tensor | None],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
    noop: Tensor | None,
) -> list[Tensor]:
    outputs: list[Tensor] = []
    for x, amax, rng, spec, dim, transposed in zip(xs, given, rngs, formats, dims, k_major, strict=True):
        fmt = parse(spec)
        codes, scale_inv, measured = reference.cast(x, amax, rng, fmt, dim)
        codes = _transposed(codes) if transposed and dim == COLUMNWISE else codes.contiguous()
        if transposed and dim == ROWWISE and fmt.block and not fmt.tile:
            scale_inv = _transposed(scale_inv)
        outputs += codes, scale_inv, measured
    return outputs


def _transposed(x: Tensor) -> Tensor:
    """``x`` [M, K] with M consecutive in memory."""
    return x.t().contiguous().t()


def _dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, spec: str, dim: int, rows: int, cols: int, dtype: torch.dtype
) -> Tensor:
    return reference.dequantize(codes, scale_inv, amax, parse(spec), dim, rows, cols).to(dtype)


def _dequantize_on_gpu(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, spec: str, dim: int, rows: int, cols: int, dtype: torch.dtype
) -> Tensor:
    from minifloat.ops.quantize import decode

    return decode.dequantize(codes, scale_inv, amax, parse(spec), dim, rows, cols, dtype)


def _draw_seed(like: Tensor) -> Tensor:
    return torch.randint(2**62, (2,), dtype=torch.int64, device=like.device)


def amax_shape(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the amax of an [rows, cols] tensor."""
    if fmt.amax_per_row:
        return (rows,) if dim == ROWWISE else (cols,)
    return _grid(fmt, dim, rows, cols) if fmt.block and fmt.scale_rule != "two_level" else (1,)


def code_shape(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, int]:
    """Shape of the codes: [M, K], halved along ``dim`` if packed; M rounded up to 16 by a Hadamard transform."""
    rows = hadamard.padded(rows) if fmt.transform == "hadamard16" else rows
    if fmt.packed and dim == ROWWISE:
        return rows, (cols + 1) // 2
    return ((rows + 1) // 2, cols) if fmt.packed else (rows, cols)


def scale_shape(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, ...]:
    """Shape of the scales: [1], or one an element of the grid of blocks."""
    rows = hadamard.padded(rows) if fmt.transform == "hadamard16" else rows
    return _grid(fmt, dim, rows, cols) if fmt.block else (1,)


def _grid(fmt: Format, dim: int, rows: int, cols: int) -> tuple[int, int]:
    block_rows, block_cols = fmt.scale_block(dim)
    return (rows + block_rows - 1) // block_rows, (cols + block_cols - 1) // block_cols


def _fake_amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    return [
        x.new_empty(amax_shape(parse(spec), dim, *x.shape), dtype=torch.float32)
        for x, spec, dim in zip(xs, formats, dims, strict=True)
    ]


def _fake_cast(
    xs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    rngs: Sequence[Tensor | None],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
    noop: Tensor | None,
) -> list[Tensor]:
    outputs: list[Tensor] = []
    for x, spec, dim, transposed in zip(xs, formats, dims, k_major, strict=True):
        fmt = parse(spec)
        outputs += [
            *empty_cast(x, fmt, dim, transposed),
            x.new_empty(1 if fmt.scale_rule == "given" else 0, dtype=torch.float32),
        ]
    return outputs


def empty_cast(x: Tensor, fmt: Format, dim: int, k_major: bool, columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Memory for the codes and scales of a cast of ``x``; ``k_major`` as in :data:`cast`.

    ``columns``: of the matrix that is cast, where a kernel makes it of ``x`` and it has others.
    """
    rows, columns = x.shape[0], x.shape[1] if columns is None else columns
    codes, scales = code_shape(fmt, dim, rows, columns), scale_shape(fmt, dim, rows, columns)
    transposed = k_major and dim == COLUMNWISE
    scales_transposed = k_major and dim == ROWWISE and fmt.block > 0 and not fmt.tile
    return (
        x.new_empty(codes[::-1] if transposed else codes, dtype=torch.uint8).t()
        if transposed
        else x.new_empty(codes, dtype=torch.uint8),
        x.new_empty(scales[::-1], dtype=fmt.scale_dtype).t()
        if scales_transposed
        else x.new_empty(scales, dtype=fmt.scale_dtype),
    )


class BlockCast(NamedTuple):
    """Codes and scales of a matrix in blocks; those of an orientation that is not wanted are empty, [0]."""

    row_codes: Tensor
    row_scales: Tensor
    column_codes: Tensor
    column_scales: Tensor


def casts_blocks(fmt: Format) -> bool:
    """The cast of a block needs nothing but the block, and there are kernels for it."""
    return fmt.scaling.own and fmt.transform == "none" and 16 <= fmt.block <= 256


def block_cast(y: Tensor, fmt: Format, rowwise: bool, columnwise: bool, k_major: bool) -> BlockCast:
    """The reference's casts of ``y``, with memory orders as of :data:`cast`."""
    dims = [ROWWISE] * rowwise + [COLUMNWISE] * columnwise
    count = len(dims)
    made = _cast([y] * count, [None] * count, [None] * count, [fmt.spec] * count, dims, [k_major] * count, None)
    nothing = _no_cast(y, fmt), _no_cast(y, fmt)
    row = made[0:2] if rowwise else nothing[0]
    return BlockCast(*row, *(made[-3:-1] if columnwise else nothing[1]))


def empty_block_cast(x: Tensor, columns: int, fmt: Format, rowwise: bool, columnwise: bool, k_major: bool) -> BlockCast:
    """Memory for what :func:`block_cast` gives of a matrix with the rows of ``x`` and ``columns`` columns."""
    row = empty_cast(x, fmt, ROWWISE, k_major, columns) if rowwise else _no_cast(x, fmt)
    return BlockCast(*row, *(empty_cast(x, fmt, COLUMNWISE, k_major, columns) if columnwise else _no_cast(x, fmt)))


def _no_cast(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.uint8), x.new_empty(0, dtype=fmt.scale_dtype)


def _fake_dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, spec: str, dim: int, rows: int, cols: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((rows, cols), dtype=dtype)


def _fake_draw_seed(like: Tensor) -> Tensor:
    return like.new_empty(2, dtype=torch.int64)


def _amax_on_gpu(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    from minifloat.ops.quantize import gpu

    kernels = all(gpu.casts(parse(spec)) for spec in formats)
    return (gpu.amax if kernels else _amax)(xs, formats, dims)


def _cast_on_gpu(
    xs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    rngs: Sequence[Tensor | None],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
    noop: Tensor | None,
) -> list[Tensor]:
    from minifloat.ops.quantize import gpu

    kernels = all(gpu.casts(parse(spec)) for spec in formats)
    return (gpu.cast if kernels else _cast)(xs, given, rngs, formats, dims, k_major, noop)


amax = register("amax(Tensor[] xs, str[] formats, int[] dims) -> Tensor[]", _amax, _fake_amax, cuda=_amax_on_gpu)
"""Of each tensor what ``reference.amax`` gives."""

cast = register(
    "cast(Tensor[] xs, Tensor?[] given, Tensor?[] rngs, str[] formats, int[] dims, bool[] k_major, Tensor? noop) "
    "-> Tensor[]",
    _cast,
    _fake_cast,
    cuda=_cast_on_gpu,
)
"""Of each tensor codes, scales and amax, as ``reference.cast`` gives them; one that follows itself is read once.

``k_major``: in memory as a GEMM reads them that wants the contracted dim consecutive: the codes of a columnwise cast
with M consecutive, and so the scales of a rowwise one in strips. ``noop``: fp32 [1] on the device; where it is not 0
nothing need be computed, and the outputs are undefined.
"""

dequantize = register(
    "dequantize(Tensor codes, Tensor scale_inv, Tensor? amax, str format, int dim, SymInt rows, SymInt cols, "
    "ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
    cuda=_dequantize_on_gpu,
)
draw_seed = register("draw_seed(Tensor like) -> Tensor", _draw_seed, _fake_draw_seed, random=True)
"""Seed and offset for stochastic rounding, int64 [2] on the device of ``like``, from PyTorch's generator there."""
