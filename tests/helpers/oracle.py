"""The test oracle: docs/numerics.md transcribed to numpy, independently of the package.

Element types, scales, blocks and FP8 formats are here, NVFP4 in `oracle_nvfp4`, products in `oracle_matmul`.

Nothing here imports `minifloat` or torch. Every float32 formula is a sequence of single numpy float32 operations, each
rounded to nearest even, in the order in which numerics.md writes it. Casts come from first principles: a float32 is
exact in float64, where dividing by a power of two is exact too, so `np.rint` there is the only rounding.

Layout (docs/architecture.md, D7): codes stay in [M, K]. Rowwise (`dim=-1`) blocks run along K, columnwise (`dim=0`) M.
NVFP4 codes are packed two a byte along the scaled dim, the even index in the low nibble.

Arrays `x` are float32 and hold float32, bfloat16 or float16 values exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Dim = Literal[0, -1]
Tile = tuple[int, int]
AmaxAlgo = Literal["max", "most_recent"]

FLT_MAX = np.float32(np.finfo(np.float32).max)
BF16_MAX = np.float32(3.3895313892515355e38)


@dataclass(frozen=True)
class Element:
    """One row of the table in numerics.md 0.1."""

    mantissa_bits: int
    bias: int
    max: float
    max_code: int


ELEMENTS = {
    "e4m3": Element(mantissa_bits=3, bias=7, max=448.0, max_code=0x7E),
    "e5m2": Element(mantissa_bits=2, bias=15, max=57344.0, max_code=0x7B),
    "e2m1": Element(mantissa_bits=1, bias=1, max=6.0, max_code=7),
    "e2m3": Element(mantissa_bits=3, bias=1, max=7.5, max_code=31),
    "e3m2": Element(mantissa_bits=2, bias=3, max=28.0, max_code=31),
}


# ---- Casts (numerics.md 0.2) ---------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def _magnitude_code(x: F32, element: Element) -> U8:
    """Nearest-even, saturating code of |x| without its sign bit; a NaN gives 0 and is the caller's to replace.

    Codes are consecutive on the number line, so `(exponent << mantissa_bits) + significand` is right also where
    rounding carries into the next exponent (significand 2^(m+1)) and for subnormals (exponent 0, below 2^m).
    """
    assert x.dtype == np.float32, "a formula left float32"
    magnitude = np.nan_to_num(np.abs(x.astype(np.float64)), nan=0.0, posinf=2.0 * float(FLT_MAX))
    least = 1 - element.bias
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, least), least)
    significand = np.rint(np.ldexp(magnitude, element.mantissa_bits - exponent)).astype(np.int64)
    code: NDArray[np.int64] = ((exponent.astype(np.int64) - least) << element.mantissa_bits) + significand
    return np.minimum(code, element.max_code).astype(np.uint8)


def _magnitude_value(code: U8, element: Element) -> F32:
    """Value of a finite code whose sign bit is cleared."""
    field = code.astype(np.int64) >> element.mantissa_bits
    fraction = code.astype(np.int64) & ((1 << element.mantissa_bits) - 1)
    significand = np.where(field > 0, fraction + (1 << element.mantissa_bits), fraction).astype(np.float64)
    value: F64 = np.ldexp(significand, np.maximum(field, 1) - element.bias - element.mantissa_bits)
    return value.astype(np.float32)


def cast_fp8(x: F32, fmt: str) -> U8:
    """numerics.md 0.2: nearest even, saturating (infinity too), sign of zero kept, every NaN to 0x7F."""
    code = _magnitude_code(x, ELEMENTS[fmt]) | np.where(np.signbit(x), np.uint8(0x80), np.uint8(0))
    return np.where(np.isnan(x), np.uint8(0x7F), code)


def decode_fp8(codes: U8, fmt: str) -> F32:
    """numerics.md 0.1. Above the largest finite code lie NaN (E4M3) or infinity and then NaN (E5M2)."""
    element = ELEMENTS[fmt]
    magnitude = codes & np.uint8(0x7F)
    value = _magnitude_value(magnitude, element)
    value = np.where(magnitude > element.max_code, np.float32(np.nan), value)
    if fmt == "e5m2":
        value = np.where(magnitude == 0x7C, np.float32(np.inf), value)
    return np.where(codes & 0x80, -value, value)


def cast_small(x: F32, fmt: str) -> U8:
    """numerics.md 0.2: nearest even, saturating, sign kept also on zero, NaN to the largest code. Not packed."""
    largest = ELEMENTS[fmt].max_code
    code = _magnitude_code(x, ELEMENTS[fmt]) | np.where(np.signbit(x), np.uint8(largest + 1), np.uint8(0))
    return np.where(np.isnan(x), np.uint8(largest), code)


def decode_small(codes: U8, fmt: str) -> F32:
    """Values of unpacked codes of 4 or 6 bits."""
    largest = np.uint8(ELEMENTS[fmt].max_code)
    value = _magnitude_value(codes & largest, ELEMENTS[fmt])
    return np.where(codes > largest, -value, value)


def cast_e2m1(x: F32) -> U8:
    """numerics.md 0.2: nearest even, saturating, sign kept also on zero, NaN to 7. Codes 0..15, not packed."""
    return cast_small(x, "e2m1")


def decode_e2m1(codes: U8) -> F32:
    """Values of unpacked codes 0..15."""
    return decode_small(codes, "e2m1")


def to_bf16(x: F32) -> F32:
    """Round to the nearest bfloat16, ties to even, kept as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))


# ---- Scales (numerics.md 0.2, 0.3) ---------------------------------------------------------------------------------


def float_to_e8m0(v: F32) -> U8:
    """numerics.md 0.2: the exponent byte of v rounded up to a power of two; v >= 0."""
    assert v.dtype == np.float32, "a formula left float32"
    bits = np.ascontiguousarray(v).view(np.uint32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    stays = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    code = np.where(stays, exponent, exponent + 1)
    return np.where(np.isfinite(v), code, 255).astype(np.uint8)


def e8m0_value(codes: U8) -> F32:
    """2^(c-127); 255 is NaN."""
    return _power_of_two(codes.astype(np.int64) - 127, codes)


def e8m0_recip(codes: U8) -> F32:
    """2^(127-c); 255 is NaN."""
    return _power_of_two(127 - codes.astype(np.int64), codes)


@np.errstate(all="ignore")
def _power_of_two(exponent: NDArray[np.int64], codes: U8) -> F32:
    return np.where(codes == 255, np.float32(np.nan), np.ldexp(1.0, exponent).astype(np.float32))


@np.errstate(all="ignore")
def scale_from_amax(amax: F32, max_fmt: float, pow2: bool, eps: float, value_for_inf: float) -> F32:
    """numerics.md 0.3, elementwise."""
    amax = np.asarray(amax, np.float32)
    amax = np.where(amax < np.float32(eps), np.float32(eps), amax)
    scale = np.asarray(np.float32(max_fmt) / amax)
    scale = np.where(np.isinf(scale), np.float32(value_for_inf), scale)
    if pow2:
        scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    return np.where(np.isfinite(amax), np.where(amax == 0, np.float32(1), scale), np.float32(np.nan))


@np.errstate(all="ignore")
def reciprocal(scale: F32) -> F32:
    """scale_inv = RN32(1 / scale), numerics.md 0.3."""
    return np.float32(1) / scale


# ---- Blocks --------------------------------------------------------------------------------------------------------


def amax_of(x: F32, axis: int | None = None) -> F32:
    """Largest |x| with fmax semantics (numerics.md 0): NaN is dropped, all NaN gives 0. Shape [1] without an axis."""
    rows, axis = (x.reshape(1, -1), 1) if axis is None else (x, axis)
    largest: F32 = np.fmax.reduce(np.abs(rows), axis=axis, initial=np.float32(0))
    return largest


def to_tiles(x: F32, tile: Tile) -> F32:
    """[M, K] as [tiles down, rows a tile, tiles across, columns a tile], zero-filled at the edges."""
    rows, columns = tile
    down, across = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    padded = np.pad(x, ((0, down * rows - x.shape[0]), (0, across * columns - x.shape[1])))
    return padded.reshape(down, rows, across, columns)


def nan_as_infinity(x: F32) -> F32:
    """numerics.md 0: before an amax of what shall not drop NaN."""
    return np.where(np.isnan(x), np.float32(np.inf), x)


def amax_of_tiles(x: F32, tile: Tile, fmt: str) -> F32:
    """One amax a tile. The zero fill cannot change a largest magnitude, so edge tiles see their elements only."""
    x = x if fmt in ("e4m3", "e5m2") else nan_as_infinity(x)
    largest: F32 = np.fmax.reduce(np.abs(to_tiles(x, tile)), axis=(1, 3), initial=np.float32(0))
    return largest


def spread(scales: NDArray[Any], tile: Tile, shape: tuple[int, ...]) -> NDArray[Any]:
    """Repeat one entry a tile to one entry an element of `shape`."""
    return scales.repeat(tile[0], axis=0).repeat(tile[1], axis=1)[: shape[0], : shape[1]]


def tile_of(dim: Dim, block: int, two_d: bool = False) -> Tile:
    """The tile that shares a scale."""
    if two_d:
        return block, block
    return (1, block) if dim == -1 else (block, 1)


def pack(codes: U8, dim: Dim) -> U8:
    """Two 4-bit codes a byte along `dim`, the even index in the low nibble; an odd tail's high nibble is 0."""
    last = np.moveaxis(codes, dim, -1)
    last = np.pad(last, ((0, 0), (0, last.shape[-1] % 2)))
    return np.ascontiguousarray(np.moveaxis(last[:, 0::2] | last[:, 1::2] << 4, -1, dim))


def unpack(packed: U8, dim: Dim, size: int) -> U8:
    """Inverse of `pack`; `size` is the number of codes along `dim`."""
    last = np.moveaxis(packed, dim, -1)
    codes = np.stack((last & 0xF, last >> 4), axis=-1).reshape(last.shape[0], -1)[:, :size]
    return np.ascontiguousarray(np.moveaxis(codes, -1, dim))


# ---- FP8 with one scale a tensor (numerics.md 1.1, 1.2) ------------------------------------------------------------


def per_tensor_current(
    x: F32, fmt: str, pow2: bool = False, eps: float = 0.0, amax: F32 | float | None = None
) -> tuple[U8, F32]:
    """numerics.md 1.2: codes [M, K] and scale_inv [1]. `amax`, where given, is the one reduced over a group."""
    largest = amax_of(x) if amax is None else np.asarray(amax, np.float32).reshape(1)
    scale = scale_from_amax(largest, ELEMENTS[fmt].max, pow2, eps, float(FLT_MAX))
    return _scaled_cast(x, scale, fmt), reciprocal(scale)


def per_row(x: F32, fmt: str, pow2: bool, eps: float, dim: Dim, amax: F32 | None = None) -> tuple[U8, F32]:
    """numerics.md 1.9: codes [M, K]; scale_inv [M, 1] for dim=-1, [1, K] for dim=0, by the amax of each line."""
    largest = amax_of(x, 1 if dim else 0) if amax is None else amax
    scale = scale_from_amax(np.expand_dims(largest, dim), ELEMENTS[fmt].max, pow2, eps, float(FLT_MAX))
    return _scaled_cast(x, scale, fmt), reciprocal(scale)


def per_tensor_given(x: F32, fmt: str, scale: F32 | float) -> tuple[U8, F32, F32]:
    """numerics.md 1.1 (delayed): codes [M, K], scale_inv [1] and the amax [1] of the unscaled x."""
    given = np.asarray(scale, np.float32).reshape(1)
    finite = np.where(np.isinf(x), np.float32(np.nan), x)
    return _scaled_cast(finite, given, fmt), reciprocal(given), amax_of(x)


@np.errstate(all="ignore")
def _scaled_cast(x: F32, scale: F32, fmt: str) -> U8:
    return cast_fp8(x * scale, fmt) if fmt in ("e4m3", "e5m2") else cast_small(x * scale, fmt)


@np.errstate(all="ignore")
def dequantize_per_tensor(codes: U8, scale_inv: F32, fmt: str) -> F32:
    """value * scale_inv in float32."""
    return (decode_fp8 if fmt in ("e4m3", "e5m2") else decode_small)(codes, fmt) * scale_inv


def delayed_update(
    history: F32,
    scale: F32,
    max_fmt: float,
    margin: int = 0,
    algo: AmaxAlgo = "max",
    reduced_amax: F32 | None = None,
) -> tuple[F32, F32]:
    """numerics.md 1.1: history [L, n] and scale [n] after one step; entry 0 is the step's amax. Inputs are not written.

    A slot whose amax is 0 keeps its history and scale; what is not finite counts as 0. `reduced_amax` [n] is the amax
    reduced over a group; where it is 0, history[0] counts.
    """
    current = history[0] if reduced_amax is None else reduced_amax
    last = np.where(current != 0, current, history[0])
    last = np.where(np.isfinite(last), last, 0)
    rolled = np.concatenate((np.where(np.isfinite(history[1:]), history[1:], 0), last[None]))
    amax = amax_of(rolled, axis=0) if algo == "max" else last
    rolled[0] = 0
    with np.errstate(all="ignore"):
        fresh = np.float32(max_fmt * 2.0**-margin) / amax
    used = last != 0
    return np.where(used, rolled, history), np.where(used, _usable_scale(fresh, amax, scale), scale)


def _usable_scale(fresh: F32, amax: F32, old: F32) -> F32:
    """The old scale where amax is no positive finite number; FLT_MAX for infinity."""
    kept = np.where(np.isfinite(amax) & (amax > 0), fresh, old)
    return np.where(np.isinf(kept), FLT_MAX, kept)


# ---- FP8 in blocks with float32 scales (numerics.md 1.3) -----------------------------------------------------------


def block_1d(x: F32, fmt: str, pow2: bool, eps: float, max_finite: float, dim: Dim, block: int = 128) -> tuple[U8, F32]:
    """numerics.md 1.3, 1D: codes [M, K]; scale_inv [M, cdiv(K, block)] for dim=-1, [cdiv(M, block), K] for dim=0.

    `max_finite` is the largest finite value of the input's dtype.
    """
    return _block(x, fmt, pow2, eps, max_finite, tile_of(dim, block))


def block_2d(x: F32, fmt: str, pow2: bool, eps: float, max_finite: float, block: int = 128) -> tuple[U8, F32]:
    """numerics.md 1.3, 2D: codes [M, K] and scale_inv [cdiv(M, block), cdiv(K, block)]; shared by both orientations."""
    return _block(x, fmt, pow2, eps, max_finite, (block, block))


def _block(x: F32, fmt: str, pow2: bool, eps: float, max_finite: float, tile: Tile) -> tuple[U8, F32]:
    scale = scale_from_amax(amax_of_tiles(x, tile, fmt), ELEMENTS[fmt].max, pow2, eps, max_finite)
    return _scaled_cast(x, spread(scale, tile, x.shape), fmt), reciprocal(scale)


def dequantize_block_1d(codes: U8, scale_inv: F32, fmt: str, dim: Dim, block: int = 128) -> F32:
    """value * scale_inv in float32."""
    return dequantize_per_tensor(codes, spread(scale_inv, tile_of(dim, block), codes.shape), fmt)


def dequantize_block_2d(codes: U8, scale_inv: F32, fmt: str, block: int = 128) -> F32:
    """value * scale_inv in float32."""
    return dequantize_per_tensor(codes, spread(scale_inv, (block, block), codes.shape), fmt)


# ---- MXFP8 (numerics.md 1.4) ---------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def mxfp8(x: F32, fmt: str, dim: Dim, two_d: bool = False) -> tuple[U8, U8]:
    """numerics.md 1.4: codes [M, K]; E8M0 scales [M, cdiv(K, 32)] or [cdiv(M, 32), K], both cdiv where `two_d`."""
    tile = tile_of(dim, 32, two_d)
    per_max = np.float32(1) / np.float32(ELEMENTS[fmt].max)
    scales = float_to_e8m0(amax_of_tiles(x, tile, fmt) * per_max)
    return _scaled_cast(x, spread(e8m0_recip(scales), tile, x.shape), fmt), scales


def dequantize_mxfp8(codes: U8, scales: U8, fmt: str, dim: Dim, two_d: bool = False) -> F32:
    """value * 2^(c-127) in float32."""
    return dequantize_per_tensor(codes, spread(e8m0_value(scales), tile_of(dim, 32, two_d), codes.shape), fmt)
