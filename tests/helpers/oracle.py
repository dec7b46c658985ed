"""The test oracle: docs/numerics.md transcribed to numpy, independently of the package.

Nothing here imports `minifloat` or torch. Every float32 formula is a sequence of single numpy float32 operations, each
rounded to nearest even, in the order in which numerics.md writes it. Casts come from first principles: a float32 is
exact in float64, where dividing by a power of two is exact too, so `np.rint` there is the only rounding.

Layout (docs/architecture.md, D7): codes stay in [M, K]. Rowwise (`dim=-1`) blocks run along K, columnwise (`dim=0`) M.
NVFP4 codes are packed two a byte along the scaled dim, the even index in the low nibble.

Arrays `x` are float32 and hold float32, bfloat16 or float16 values exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Dim = Literal[0, -1]
ErrMode = Literal["MAE", "MSE"]
Tile = tuple[int, int]
AmaxAlgo = Literal["max", "most_recent"] | Callable[[F32], F32]

FLT_MAX = np.float32(np.finfo(np.float32).max)
BF16_MAX = np.float32(3.3895313892515355e38)
FP16_MAX = np.float32(65504)
SIXTH = np.float32(1 / 6)
HADAMARD_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


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


@np.errstate(all="ignore")
def cast_e2m1_stochastic(x: F32, random: U8) -> U8:
    """numerics.md 1.5, SR, with one random byte an element. NaN gives 7, as in `cast_e2m1`.

    `t` is one fused multiply-add. Its float64 form is exact enough: `u * step` has 8 significant bits, so where the sum
    does not fit float64, x is far below half a float32 step of `u * step` and no float32 tie is near.
    """
    magnitude = np.abs(x)
    u = random.astype(np.float32) / np.float32(256)
    t = (u.astype(np.float64) * _e2m1_step(magnitude) + magnitude).astype(np.float32)
    step = _e2m1_step(t)
    rounded = np.fmin(np.floor(t / step) * step, np.float32(6))
    return cast_e2m1(np.where(np.isnan(x), x, np.copysign(rounded, x)))


def _e2m1_step(magnitude: F32) -> F32:
    """Distance to the next larger E2M1 value."""
    one, two = np.float32(1), np.float32(2)
    return np.where(magnitude < 2, np.float32(0.5), np.where(magnitude < 4, one, two))


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
    code = np.where(np.isinf(v), 254, code)
    return np.where(np.isnan(v), 255, code).astype(np.uint8)


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
    return np.where(np.isinf(amax) | (amax == 0) | np.isnan(amax), np.float32(1), scale)


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


def amax_of_tiles(x: F32, tile: Tile) -> F32:
    """One amax a tile. The zero fill cannot change a largest magnitude, so edge tiles see their elements only."""
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
    return _scaled_cast(x, given, fmt), reciprocal(given), amax_of(x)


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
    fused: bool = True,
    reduced_amax: F32 | None = None,
) -> tuple[F32, F32]:
    """numerics.md 1.1: history [L, n] and scale [n] after one step; entry 0 is the step's amax. Inputs are not written.

    `reduced_amax` [n] is the amax reduced over a group; where it is 0 the fused form falls back to history[0].
    A callable `algo` (history -> amax [n]) belongs to the unfused form.
    """
    current = history[0] if reduced_amax is None else reduced_amax
    if fused:
        return _delayed_update_fused(history, scale, max_fmt, margin, algo, np.where(current != 0, current, history[0]))
    history = np.concatenate((current[None], history[1:]))
    if callable(algo):
        amax = np.asarray(algo(history), np.float32)
    else:
        amax = amax_of(history, axis=0) if algo == "max" else history[0]
    rolled = np.roll(history, -1, axis=0)
    rolled[0] = 0
    with np.errstate(all="ignore"):
        fresh = np.float32(max_fmt) / amax / np.float32(2.0**margin)
    return rolled, _usable_scale(fresh, amax, scale)


def _delayed_update_fused(
    history: F32, scale: F32, max_fmt: float, margin: int, algo: AmaxAlgo, last: F32
) -> tuple[F32, F32]:
    """The fused form: a slot whose amax is 0 keeps its history and scale; what is not finite counts as 0."""
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
    scale = scale_from_amax(amax_of_tiles(x, tile), ELEMENTS[fmt].max, pow2, eps, max_finite)
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
    scales = float_to_e8m0(amax_of_tiles(x, tile) * per_max)
    return _scaled_cast(x, spread(e8m0_recip(scales), tile, x.shape), fmt), scales


def dequantize_mxfp8(codes: U8, scales: U8, fmt: str, dim: Dim, two_d: bool = False) -> F32:
    """value * 2^(c-127) in float32."""
    return dequantize_per_tensor(codes, spread(e8m0_value(scales), tile_of(dim, 32, two_d), codes.shape), fmt)


# ---- NVFP4 (numerics.md 1.5) ---------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def hadamard16(x: F32, signs: F32 = HADAMARD_SIGNS) -> F32:
    """Rotate groups of 16 along M; returns [M rounded up to 16, K] rounded to bfloat16 ("Ours", numerics.md 1.5).

    Signs first, float32 butterflies of strides 1, 2, 4, 8, the factor 0.25 last, then bfloat16.
    """
    v = to_tiles(x, (16, 1))[..., 0] * signs[:, None]
    index = np.arange(16)
    for stride in (1, 2, 4, 8):
        low = index[index & stride == 0]
        a, b = v[:, low], v[:, low + stride]
        v = np.empty_like(v)
        v[:, low], v[:, low + stride] = a + b, a - b
    return to_bf16(v * np.float32(0.25)).reshape(-1, x.shape[1])


@np.errstate(all="ignore")
def nvfp4_encode_scale(amax: F32, e4m3_max: float = 448) -> F32:
    """S_enc: the float32 factor that takes a tensor of this amax to the range of E2M1 times E4M3."""
    scale = np.minimum(np.float32(e4m3_max * 6) / amax, FLT_MAX)
    return np.where((amax == 0) | (scale == 0), np.float32(1), scale)


def nvfp4(
    x: F32,
    dim: Dim,
    two_d: bool = False,
    hadamard: bool = False,
    stochastic: U8 | None = None,
    four_over_six: ErrMode | None = None,
    e4m3_max: float = 448,
    row_scaled: bool = False,
    amax: F32 | float | None = None,
) -> tuple[U8, U8, F32]:
    """numerics.md 1.5: packed codes, E4M3 scales and amax.

    Codes are [M, cdiv(K, 2)] for dim=-1 and [cdiv(M, 2), K] for dim=0, scales [M, cdiv(K, 16)] and [cdiv(M, 16), K], or
    [cdiv(M, 16), cdiv(K, 16)] where `two_d`. With `hadamard` (dim=0 only) M is rounded up to 16. amax is [1], or [M]
    (dim=-1) and [K] (dim=0) where `row_scaled`. `stochastic` holds a random byte for each element of the input (of the
    rotated one with `hadamard`). A 2D tile is one tile for both orientations (numerics.md 2.2): its codes and its
    4-over-6 choice, errors summed along K first, are those of [M, K].
    """
    assert not (hadamard and (dim == -1 or two_d)) and not (row_scaled and two_d)
    assert four_over_six is None or (stochastic is None and not hadamard)
    x = hadamard16(x) if hadamard else x
    transposed = dim == 0 and not two_d
    rows = x.T if transposed else x
    random = stochastic.T if stochastic is not None and transposed else stochastic
    if amax is None:
        largest = amax_of(rows, axis=1) if row_scaled else amax_of(rows)
    else:
        largest = np.asarray(amax, np.float32).reshape(-1)
    tile = tile_of(-1, 16, two_d)
    if four_over_six is None:
        codes, scales = _nvfp4_plain(rows, tile, largest[:, None], e4m3_max, random)
    else:
        codes, scales = _nvfp4_four_over_six(rows, tile, largest[:, None], e4m3_max, four_over_six)
    if transposed:
        codes, scales = codes.T, np.ascontiguousarray(scales.T)
    return pack(codes, dim), scales, largest


@np.errstate(all="ignore")
def _nvfp4_plain(x: F32, tile: Tile, amax: F32, e4m3_max: float, random: U8 | None) -> tuple[U8, U8]:
    """Codes (not packed) and block scales; `amax` is [1, 1] or [rows, 1]."""
    encode = nvfp4_encode_scale(amax, e4m3_max)
    scales = cast_fp8(np.minimum(amax_of_tiles(x, tile) * (encode * SIXTH), FLT_MAX), "e4m3")
    return _nvfp4_codes(x, scales, tile, encode, random), scales


@np.errstate(all="ignore")
def _nvfp4_codes(x: F32, scales: U8, tile: Tile, encode: F32, random: U8 | None = None) -> U8:
    """code = cast(x * mult), with mult the clamped reciprocal of the block's decoding scale."""
    decode = np.float32(1) / encode
    mult = np.minimum(np.float32(1) / (decode_fp8(scales, "e4m3") * decode), FLT_MAX)
    scaled = x * spread(mult, tile, x.shape)
    return cast_e2m1(scaled) if random is None else cast_e2m1_stochastic(scaled, random)


@np.errstate(all="ignore")
def _nvfp4_four_over_six(x: F32, tile: Tile, amax: F32, e4m3_max: float, err_mode: ErrMode) -> tuple[U8, U8]:
    """Map each block's amax to 4 or to 6, whichever reconstructs it better; 6 on a tie."""
    encode = nvfp4_encode_scale(amax, e4m3_max)
    base = amax_of_tiles(x, tile) / np.float32(6) * encode
    candidates = []
    for factor in (np.float32(1.5), np.float32(1)):
        scales = cast_fp8(np.minimum(base * factor, np.float32(448)), "e4m3")
        codes = _nvfp4_codes(x, scales, tile, encode)
        block_scale = spread(decode_fp8(scales, "e4m3"), tile, x.shape)
        value = decode_e2m1(codes) * block_scale * amax / np.float32(6 * e4m3_max)
        candidates.append((codes, scales, _tile_error(value - x, tile, err_mode)))
    (codes4, scales4, error4), (codes6, scales6, error6) = candidates
    four = error4 < error6
    return np.where(spread(four, tile, x.shape), codes4, codes6), np.where(four, scales4, scales6)


def _tile_error(difference: F32, tile: Tile, err_mode: ErrMode) -> F32:
    """Error of each tile: 16 elements of a row in order, then a tile's 16 rows in a tree of strides 8, 4, 2, 1."""
    terms = to_tiles(np.abs(difference) if err_mode == "MAE" else difference * difference, tile)
    rows: F32 = np.zeros(terms.shape[:3], np.float32)
    for k in range(16):
        rows = rows + terms[..., k]
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


@np.errstate(all="ignore")
def dequantize_nvfp4(
    codes: U8, scales: U8, amax: F32, dim: Dim, size: int, two_d: bool = False, e4m3_max: float = 448
) -> F32:
    """value * RN32(RN32(sb * A) * fp32(1 / (6 * e4m3_max))), numerics.md 1.5.

    `size` counts the codes along `dim`. A rotated input comes back rotated.
    """
    values = decode_e2m1(unpack(codes, dim, size))
    amax = amax[:, None] if dim == -1 else amax[None, :]
    block_scale = spread(decode_fp8(scales, "e4m3"), tile_of(dim, 16, two_d), values.shape)
    return values * (block_scale * amax * np.float32(1 / (6 * e4m3_max)))


# ---- Random bits (numerics.md 1.5, "Ours") -------------------------------------------------------------------------


def philox4x32_10(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32 with ten rounds (Salmon et al. 2011). counter [..., 4], key [..., 2] -> [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & word, (first >> shift) ^ c3 ^ k1, first & word
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & word, (k1 + np.uint64(0xBB67AE85)) & word
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def random_bytes(seed: int, offset: int, M: int, K: int, orientation: Literal[0, 1]) -> U8:
    """The random byte of each element of [M, K]; orientation 0 is rowwise, 1 columnwise.

    Element i = m*K + k, of the logical unrotated [M, K] or of the zero-filled rotated [M', K] (pass M' as M), belongs
    to the block counter c = i // 16.
    Counter words: (c & 0xFFFFFFFF, (c >> 32) & 0xFFFFFFFF | (orientation << 31), offset & 0xFFFFFFFF,
    (offset >> 32) & 0xFFFFFFFF). Key words: (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF).
    The four output words are 16 bytes in little-endian order, of which byte i % 16 is the element's.
    """
    blocks = np.arange(-(-M * K // 16), dtype=np.uint64)
    counter = np.empty((blocks.size, 4), np.uint32)
    counter[:, 0] = (blocks & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    counter[:, 1] = (blocks >> np.uint64(32)).astype(np.uint32) | np.uint32(orientation << 31)
    counter[:, 2] = offset & 0xFFFFFFFF
    counter[:, 3] = (offset >> 32) & 0xFFFFFFFF
    key = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32)
    return philox4x32_10(counter, key).astype("<u4").view(np.uint8).reshape(-1)[: M * K].reshape(M, K)


# ---- The scaled product (numerics.md 1.7) --------------------------------------------------------------------------


@np.errstate(all="ignore")
def segment_matmul(
    a_values: F32, b_values: F32, a_scales: F32, b_scales: F32, segment: int, alpha: float | None = None
) -> F32:
    """D [M, N] of a_values [M, K] and b_values [N, K] with scales [M, S] and [N, S], S = cdiv(K, segment).

    In order of the segments acc = RN32(acc + RN32(RN32(S) * RN32(sa * sb))), where S is the exact sum of products over
    the segment, rounded once. Last, where given, RN32(acc * alpha).
    """
    acc = np.zeros((a_values.shape[0], b_values.shape[0]), np.float32)
    for index, start in enumerate(range(0, a_values.shape[1], segment)):
        part = slice(start, start + segment)
        total = exact_matmul(a_values[:, part], b_values[:, part])
        acc = acc + total * (a_scales[:, index, None] * b_scales[None, :, index])
    return acc if alpha is None else acc * np.float32(alpha)


def exact_matmul(a: F32, b: F32) -> F32:
    """a [M, K] times b [N, K] transposed: exact sums of products, each rounded once to float32. Finite values only."""
    a_ints, a_unit = _as_integers(a)
    b_ints, b_unit = _as_integers(b)
    bound = np.abs(a_ints).max(initial=0) * np.abs(b_ints).max(initial=0) * a.shape[1]
    if bound < 2**53:  # integers that float64 sums exactly in any order
        product = a_ints.astype(np.float64) @ b_ints.astype(np.float64).T
        return np.ldexp(product, a_unit + b_unit).astype(np.float32)
    product = a_ints @ b_ints.T
    rounded = [_round_integer(int(n), a_unit + b_unit) for n in product.reshape(-1)]
    return np.array(rounded, np.float32).reshape(product.shape)


def _as_integers(values: F32) -> tuple[NDArray[np.object_], int]:
    """Python integers n and one exponent u with values == n * 2^u."""
    assert np.isfinite(values).all()
    fraction, exponent = np.frexp(values.astype(np.float64))
    whole = np.ldexp(fraction, 24).astype(np.int64)
    lowest = exponent - 24 + np.frexp((whole & -whole).astype(np.float64))[1] - 1
    unit = int(np.min(lowest, where=whole != 0, initial=0))
    integers = np.array([int(v) for v in np.ldexp(values.astype(np.float64), -unit).reshape(-1)], object)
    return integers.reshape(values.shape), unit


def _round_integer(n: int, unit: int) -> np.float32:
    """RN32(n * 2^unit), to nearest even, in integers: a float64 on the way would round twice."""
    magnitude = abs(n)
    shift = max(magnitude.bit_length() - 24, -149 - unit, 0)
    kept, rest = magnitude >> shift, magnitude & ((1 << shift) - 1)
    if 2 * rest > 1 << shift or (2 * rest == 1 << shift and kept & 1):
        kept += 1
    return np.float32(math.copysign(math.ldexp(kept, shift + unit), n))
