"""NVFP4 by the oracle: docs/numerics.md 1.5 in numpy, with the rotation and the random bits of stochastic rounding."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tests.helpers.oracle import (
    F32,
    FLT_MAX,
    U8,
    Dim,
    Tile,
    amax_of,
    amax_of_tiles,
    cast_e2m1,
    cast_fp8,
    decode_e2m1,
    decode_fp8,
    nan_as_infinity,
    pack,
    spread,
    tile_of,
    to_bf16,
    to_tiles,
    unpack,
)

ErrMode = Literal["MAE", "MSE"]
SIXTH = np.float32(1 / 6)
HADAMARD_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)


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
        largest = amax_of(rows, axis=1) if row_scaled else amax_of(nan_as_infinity(rows) if hadamard else rows)
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
    largest = amax_of_tiles(x, tile, "e2m1")
    scaled = np.minimum(largest * (encode * SIXTH), FLT_MAX)
    scales = cast_fp8(np.where(np.isinf(largest), np.float32(np.nan), scaled), "e4m3")
    return _nvfp4_codes(x, scales, tile, encode, random), scales


@np.errstate(all="ignore")
def _nvfp4_codes(x: F32, scales: U8, tile: Tile, encode: F32, random: U8 | None = None) -> U8:
    """code = cast(x * mult), with mult the clamped reciprocal of the block's decoding scale."""
    decode = np.float32(1) / encode
    mult = np.fmin(np.float32(1) / (decode_fp8(scales, "e4m3") * decode), FLT_MAX)
    scaled = x * spread(mult, tile, x.shape)
    return cast_e2m1(scaled) if random is None else cast_e2m1_stochastic(scaled, random)


@np.errstate(all="ignore")
def _nvfp4_four_over_six(x: F32, tile: Tile, amax: F32, e4m3_max: float, err_mode: ErrMode) -> tuple[U8, U8]:
    """Map each block's amax to 4 or to 6, whichever reconstructs it better; 6 on a tie."""
    encode = nvfp4_encode_scale(amax, e4m3_max)
    largest = amax_of_tiles(x, tile, "e2m1")
    base = np.where(np.isinf(largest), np.float32(np.nan), largest / np.float32(6) * encode)
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
