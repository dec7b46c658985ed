"""Amax, cast and dequantize as ``torch.library`` operations over lists of tensors: one launch a phase."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format, parse
from minifloat.kernels.library import register
from minifloat.kernels.quantize import hadamard, reference


def _amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    return [reference.amax(x, parse(spec), dim) for x, spec, dim in zip(xs, formats, dims, strict=True)]


def _cast(
    xs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    rngs: Sequence[Tensor | None],
    formats: Sequence[str],
    dims: Sequence[int],
) -> list[Tensor]:
    outputs: list[Tensor] = []
    for x, amax, rng, spec, dim in zip(xs, given, rngs, formats, dims, strict=True):
        outputs += reference.cast(x, amax, rng, parse(spec), dim)
    return outputs


def _dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, spec: str, dim: int, rows: int, cols: int, dtype: torch.dtype
) -> Tensor:
    return reference.dequantize(codes, scale_inv, amax, parse(spec), dim, rows, cols).to(dtype)


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
) -> list[Tensor]:
    outputs: list[Tensor] = []
    for x, spec, dim in zip(xs, formats, dims, strict=True):
        fmt = parse(spec)
        outputs += [
            x.new_empty(code_shape(fmt, dim, *x.shape), dtype=torch.uint8),
            x.new_empty(scale_shape(fmt, dim, *x.shape), dtype=fmt.scale_dtype),
            x.new_empty(1 if fmt.scale_rule == "given" else 0, dtype=torch.float32),
        ]
    return outputs


def _fake_dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, spec: str, dim: int, rows: int, cols: int, dtype: torch.dtype
) -> Tensor:
    return codes.new_empty((rows, cols), dtype=dtype)


def _fake_draw_seed(like: Tensor) -> Tensor:
    return like.new_empty(2, dtype=torch.int64)


amax = register("amax(Tensor[] xs, str[] formats, int[] dims) -> Tensor[]", _amax, _fake_amax)
cast = register(
    "cast(Tensor[] xs, Tensor?[] given, Tensor?[] rngs, str[] formats, int[] dims) -> Tensor[]", _cast, _fake_cast
)
dequantize = register(
    "dequantize(Tensor codes, Tensor scale_inv, Tensor? amax, str format, int dim, SymInt rows, SymInt cols, "
    "ScalarType dtype) -> Tensor",
    _dequantize,
    _fake_dequantize,
)
draw_seed = register("draw_seed(Tensor like) -> Tensor", _draw_seed, _fake_draw_seed, random=True)
"""Seed and offset for stochastic rounding, int64 [2] on the device of ``like``, from PyTorch's generator there."""
