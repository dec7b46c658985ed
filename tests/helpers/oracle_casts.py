"""What the oracle says of a cast to a ``Format``, and how a cast differs from it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minifloat.formats import Format
from tests.helpers import oracle, oracle_nvfp4

SEED = (0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)
"""Seed and offset of stochastic rounding, with bits in all four words."""


class OracleCast(NamedTuple):
    codes: oracle.U8
    scales: np.ndarray[Any, Any]
    amax: oracle.F32 | None


def oracle_cast(
    x: Tensor, fmt: Format, dim: int, level: float | oracle.F32 | None = None, seed: tuple[int, int] = SEED
) -> OracleCast:
    """The oracle's cast of ``x`` [M, K]. ``level`` is an amax from outside, or the scale for delayed scaling."""
    values, largest = to_numpy(x.float()), torch.finfo(x.dtype).max
    eps, pow2 = fmt.amax_epsilon, fmt.scale_rule == "pow2"
    if fmt.scale_rule == "given":
        assert level is not None
        return OracleCast(*oracle.per_tensor_given(values, fmt.element, level))
    if fmt.scale_rule == "two_level":
        return OracleCast(*_oracle_nvfp4(values, fmt, dim, level, seed))
    if fmt.scale_rule == "e8m0":
        codes, scales = oracle.mxfp8(values, fmt.element, dim, fmt.tile)
        return OracleCast(oracle.pack(codes, dim) if fmt.packed else codes, scales, None)
    if fmt.block == 0 and fmt.amax_per_row:
        return OracleCast(*oracle.per_row(values, fmt.element, pow2, eps, dim, level), None)  # type: ignore[arg-type]
    if fmt.block == 0:
        return OracleCast(*oracle.per_tensor_current(values, fmt.element, pow2, eps, level), None)
    if fmt.tile:
        return OracleCast(*oracle.block_2d(values, fmt.element, pow2, eps, largest, fmt.block), None)
    return OracleCast(*oracle.block_1d(values, fmt.element, pow2, eps, largest, dim, fmt.block), None)


def _oracle_nvfp4(
    values: oracle.F32, fmt: Format, dim: int, level: float | oracle.F32 | None, seed: tuple[int, int]
) -> tuple[oracle.U8, oracle.U8, oracle.F32]:
    hadamard = fmt.transform == "hadamard16"
    rows = -(-values.shape[0] // 16) * 16 if hadamard else values.shape[0]
    if values.size == 0:  # nothing to rotate
        values, hadamard = np.zeros((rows, values.shape[1]), np.float32), False
    stochastic = fmt.rounding == "stochastic"
    return oracle_nvfp4.nvfp4(
        values,
        dim,
        two_d=fmt.tile,
        hadamard=hadamard,
        stochastic=oracle_nvfp4.random_bytes(*seed, rows, values.shape[1], 0 if dim else 1) if stochastic else None,
        four_over_six={"mae": "MAE", "mse": "MSE"}.get(fmt.rounding[-3:]),
        e4m3_max=fmt.block_scale_max,
        row_scaled=fmt.amax_per_row,
        amax=level,
    )


def oracle_values(cast: OracleCast, fmt: Format, dim: int, shape: tuple[int, ...]) -> oracle.F32:
    """The fp32 values that the oracle says a cast stands for, not rotated back."""
    if cast.codes.size == 0:
        return np.zeros(shape, np.float32)
    if fmt.scale_rule == "two_level":
        assert cast.amax is not None
        size = cast.codes.shape[0] * 2 if fmt.transform == "hadamard16" else shape[dim]
        return oracle_nvfp4.dequantize_nvfp4(
            cast.codes, cast.scales, cast.amax, dim, size, fmt.tile, fmt.block_scale_max
        )
    if fmt.scale_rule == "e8m0":
        codes = oracle.unpack(cast.codes, dim, shape[dim]) if fmt.packed else cast.codes
        return oracle.dequantize_mxfp8(codes, cast.scales, fmt.element, dim, fmt.tile)
    if fmt.block == 0:
        return oracle.dequantize_per_tensor(cast.codes, cast.scales, fmt.element)
    if fmt.tile:
        return oracle.dequantize_block_2d(cast.codes, cast.scales, fmt.element, fmt.block)
    return oracle.dequantize_block_1d(cast.codes, cast.scales, fmt.element, dim, fmt.block)


def to_numpy(x: Tensor) -> np.ndarray[Any, Any]:
    return x.detach().cpu().contiguous().numpy()


def same(a: np.ndarray[Any, Any] | None, b: np.ndarray[Any, Any] | None) -> bool:
    """Equal bits, shapes and dtypes, but that one NaN is as good as another."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    nan = np.isnan(a) & np.isnan(b) if a.dtype.kind == "f" else np.zeros(a.shape, np.bool_)
    unsigned = f"u{a.dtype.itemsize}"
    bits_a, bits_b = (np.ascontiguousarray(each).view(unsigned) for each in (a, b))
    return bool(((bits_a == bits_b) | nan).all())


def differences(label: str, got: OracleCast, want: OracleCast) -> list[str]:
    """What differs, in words; empty if nothing does."""
    return [f"{label}: {field}" for field, a, b in zip(OracleCast._fields, got, want, strict=True) if not same(a, b)]
