"""The oracle against ml_dtypes and exact fractions; the vectors of docs/numerics.md are run in ops/test_quantize.py."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.helpers import oracle, oracle_matmul, oracle_nvfp4, vectors

ML_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
FP8 = ["e4m3", "e5m2"]


def f32(values: Any) -> oracle.F32:
    return np.asarray(values, np.float32)


def all_bf16() -> oracle.F32:
    """Every bfloat16 bit pattern as float32: NaNs, infinities and denormals too."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def hard_floats(fmt: str) -> oracle.F32:
    """Every value of the format, every tie, their float32 neighbours, and random bit patterns near the range."""
    rng = np.random.default_rng(0)
    codes = np.arange(oracle.ELEMENTS[fmt].max_code + 1, dtype=np.uint8)
    grid = codes.view(ML_DTYPES[fmt]).astype(np.float32)
    exact = np.concatenate((grid, (grid[1:] + grid[:-1]) / 2))
    near = np.concatenate((exact, np.nextafter(exact, f32(np.inf)), np.nextafter(exact, f32(0))))
    random = rng.standard_normal(20000).astype(np.float32) * np.exp2(rng.integers(-30, 20, 20000)).astype(np.float32)
    every = np.concatenate((near, random, rng.integers(0, 1 << 32, 20000, np.uint32).view(np.float32)))
    return np.concatenate((every, -every))


def random_input(shape: tuple[int, int], seed: int = 0, wild: bool = False) -> oracle.F32:
    """Heavy-tailed bfloat16 values; where `wild` with zeros, a zero block, NaN, infinity and denormals among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 6, shape))
    if wild:
        x[rng.random(shape) < 0.05] = 0
        x[:16, :32] = 0
        x[-1, -1], x[0, -1], x[-1, 0] = np.nan, 1e-40, np.inf
    return oracle.to_bf16(x.astype(np.float32))


def assert_same(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Equal dtype, shape and bits; floats compare as numbers but for the sign of zero, and NaN equals NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)
    if actual.dtype == np.float32:
        np.testing.assert_array_equal(
            np.signbit(actual) & ~np.isnan(actual), np.signbit(expected) & ~np.isnan(expected)
        )


def exact(value: np.float32) -> Fraction:
    """A float32 as a fraction."""
    return Fraction(float(value))


def rn32(value: Fraction) -> np.float32:
    """Nearest-even float32 of a fraction, by comparing the neighbours of a first guess."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    return min(around, key=lambda c: (abs(exact(c) - value), int(c.view(np.uint32)) & 1))


def test_encode_scales_and_rotations() -> None:
    amaxes, scales = zip(*vectors.NVFP4_ENCODE_SCALES, strict=True)
    assert_same(oracle_nvfp4.nvfp4_encode_scale(f32(amaxes)), f32(scales))
    assert_same(oracle_nvfp4.nvfp4_encode_scale(f32([np.inf, 1e-40])), f32([1, vectors.FLT_MAX]))
    assert_same(oracle_nvfp4.hadamard16(vectors.RHT_COLUMN[:, None])[:, 0], vectors.RHT_ROTATED)
    assert_same(oracle_nvfp4.hadamard16(np.eye(16, dtype=np.float32)[:, 3:4])[:, 0], vectors.RHT_E3)


def test_delayed_variants() -> None:
    history, scale = f32([[2, 0, np.nan], [8, 3, 1], [0, 0, 0]]), f32([5, 6, 7])
    after, fresh = oracle.delayed_update(history, scale, 448, margin=1, algo="most_recent")
    assert_same(fresh, f32([112, 6, 7]))
    assert_same(after, f32([[0, 0, np.nan], [0, 3, 1], [2, 0, 0]]))
    after, fresh = oracle.delayed_update(history, scale, 448, reduced_amax=f32([4, 0, 2]), algo="most_recent")
    assert_same(fresh, f32([112, 6, 224]))
    assert_same(after[-1], f32([4, 0, 2]))
    tiny = oracle.delayed_update(f32([[1e-40]]), f32([1]), 448)
    assert_same(tiny[1], f32([vectors.FLT_MAX]))
    assert_same(tiny[0], f32([[0]]))


# ---- Casts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("source", ["bf16", "fp32"])
def test_cast_fp8_against_ml_dtypes(fmt: str, source: str) -> None:
    x = all_bf16() if source == "bf16" else hard_floats(fmt)
    element, codes = oracle.ELEMENTS[fmt], oracle.cast_fp8(x, fmt)
    inside, nan = np.abs(x) <= element.max, np.isnan(x)
    assert_same(codes[inside], x[inside].astype(ML_DTYPES[fmt]).view(np.uint8))
    assert (codes[nan] == 0x7F).all()
    outside = ~inside & ~nan
    saturated = np.where(np.signbit(x[outside]), 0x80, 0) | element.max_code
    assert_same(codes[outside], saturated.astype(np.uint8))


@pytest.mark.parametrize("fmt", FP8)
def test_decode_fp8_against_ml_dtypes(fmt: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = oracle.decode_fp8(codes, fmt)
    assert_same(values, codes.view(ML_DTYPES[fmt]).astype(np.float32))
    finite = np.isfinite(values)
    assert_same(oracle.cast_fp8(values[finite], fmt), codes[finite])


@pytest.mark.parametrize("source", ["bf16", "fp32"])
def test_e2m1_against_ml_dtypes(source: str) -> None:
    x = all_bf16() if source == "bf16" else hard_floats("e2m1")
    x = x[~np.isnan(x)]
    clipped = np.clip(x, f32(-6), f32(6))
    assert_same(oracle.cast_e2m1(x), clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF)
    codes = np.arange(16, dtype=np.uint8)
    assert_same(oracle.decode_e2m1(codes), codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_to_bf16_against_ml_dtypes() -> None:
    x = np.concatenate((all_bf16(), hard_floats("e5m2"), f32([vectors.FLT_MAX, 3.4e38, 1 + 2.0**-8, 1 + 3 * 2.0**-8])))
    with np.errstate(all="ignore"):
        assert_same(oracle.to_bf16(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))


# ---- Scales --------------------------------------------------------------------------------------------------------


def test_e8m0_values() -> None:
    codes = np.arange(256, dtype=np.uint8)
    values, recips = oracle.e8m0_value(codes), oracle.e8m0_recip(codes)
    assert_same(values, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert (values[:255] * recips[:255] == 1).all() and np.isnan(recips[255])
    assert values.view(np.uint32)[0] == recips.view(np.uint32)[254] == 0x00400000
    assert_same(oracle.float_to_e8m0(values), codes)


# ---- NVFP4 in detail -----------------------------------------------------------------------------------------------


def test_hadamard_against_the_matrix() -> None:
    """The butterflies are v @ diag(s) H / 4, exactly on small integers; tails are zero-filled."""
    index = np.arange(16)
    parity = np.array([[bin(i & j).count("1") % 2 for j in index] for i in index])
    rotation = np.diag(oracle_nvfp4.HADAMARD_SIGNS) @ (1.0 - 2 * parity) / 4
    assert sum(1 << i for i in index if oracle_nvfp4.HADAMARD_SIGNS[i] < 0) == 0xD7E8
    np.testing.assert_array_equal(rotation @ rotation.T, np.eye(16))
    x = np.random.default_rng(1).integers(-8, 9, (37, 5)).astype(np.float32)
    padded = np.pad(x, ((0, 11), (0, 0)))
    expected = np.concatenate([(padded[i : i + 16].T @ rotation).T for i in (0, 16, 32)])
    np.testing.assert_array_equal(oracle_nvfp4.hadamard16(x), oracle.to_bf16(expected.astype(np.float32)))


def ties_of_e4m3(seed: int) -> tuple[oracle.F32, oracle.F32]:
    """Global amaxes A [n] and block amaxes b [n, m] whose scales lie within a few float32 steps of an E4M3 tie."""
    grid = oracle.decode_fp8(np.arange(0x30, 0x7F, dtype=np.uint8), "e4m3")
    ties = (grid[1:] + grid[:-1]) / 2
    amax = np.random.default_rng(seed).uniform(1, 8, 20).astype(np.float32)
    block = ties[None] * np.float32(6) / (np.float32(2688) / amax)[:, None]
    return amax, np.concatenate([(block.view(np.int32) + k).view(np.float32) for k in (-1, 0, 1)], axis=1)


@pytest.mark.parametrize("four_over_six", [None, "MAE"])
def test_nvfp4_block_scale_by_fractions(four_over_six: oracle_nvfp4.ErrMode | None) -> None:
    """The order of the roundings of sb (numerics.md 1.5), where it decides: at E4M3 ties, with every RN32 a fraction.

    With 4-over-6 the scale is that of either candidate; which one is chosen is tested elsewhere.
    """
    for a, blocks in zip(*ties_of_e4m3(5), strict=True):
        encode = rn32(Fraction(2688) / exact(a))
        x = np.zeros((blocks.size, 16), np.float32)
        x[:, 0] = blocks
        _, scales, _ = oracle_nvfp4.nvfp4(x, -1, four_over_six=four_over_six, amax=a)
        for b, scale in zip(blocks, scales[:, 0], strict=True):
            if four_over_six is None:
                product = rn32(exact(b) * exact(rn32(exact(encode) * exact(oracle_nvfp4.SIXTH))))
            else:
                product = rn32(exact(rn32(exact(b) / 6)) * exact(encode))
            expected = np.asarray(product).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            larger = np.asarray(product * np.float32(1.5)).clip(0, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            assert scale == expected or (four_over_six is not None and scale == larger)


def test_dequantize_nvfp4_by_fractions() -> None:
    x = random_input((8, 32), seed=6)
    for e4m3_max in (256, 448):
        packed, scales, amax = oracle_nvfp4.nvfp4(x, -1, e4m3_max=e4m3_max)
        values = oracle_nvfp4.dequantize_nvfp4(packed, scales, amax, -1, 32, e4m3_max=e4m3_max)
        per_max = rn32(Fraction(1, 6 * e4m3_max))
        for (m, k), code in np.ndenumerate(oracle.decode_e2m1(oracle.unpack(packed, -1, 32))):
            scaled = rn32(exact(oracle.decode_fp8(scales, "e4m3")[m, k // 16]) * exact(amax[0]))
            assert values[m, k] == rn32(exact(code) * exact(rn32(exact(scaled) * exact(per_max))))


@pytest.mark.parametrize("err_mode", ["MAE", "MSE"])
def test_four_over_six_error_order(err_mode: oracle_nvfp4.ErrMode) -> None:
    """Rows are summed in order from 0, then a tile's rows in strides 8, 4, 2, 1, each sum rounded."""
    difference = random_input((32, 32), seed=7) * np.float32(1.1)
    terms = np.abs(difference) if err_mode == "MAE" else difference * difference
    tiles: list[oracle.Tile] = [(1, 16), (16, 16)]
    for tile in tiles:
        errors = oracle_nvfp4._tile_error(difference, tile, err_mode)
        for (down, across), actual in np.ndenumerate(errors):
            rows = []
            for row in terms[down * tile[0] : (down + 1) * tile[0], across * 16 : across * 16 + 16]:
                total = np.float32(0)
                for term in row:
                    total = total + term
                rows.append(total)
            for stride in (8, 4, 2, 1) if tile[0] == 16 else ():
                rows = [rows[r] + rows[r + stride] for r in range(stride)]
            assert actual == rows[0]


# ---- Random bits ---------------------------------------------------------------------------------------------------


def test_random_bytes_convention() -> None:
    seed, offset, shape = 0x123456789ABCDEF0, 0xFEDCBA9876543210, (5, 7)
    for orientation in (0, 1):
        data = oracle_nvfp4.random_bytes(seed, offset, *shape, orientation)
        assert data.dtype == np.uint8 and data.shape == shape
        for i in range(35):
            counter = np.array([i // 16, orientation << 31, 0x76543210, 0xFEDCBA98], np.uint32)
            words = oracle_nvfp4.philox4x32_10(counter, np.array([0x9ABCDEF0, 0x12345678], np.uint32))
            assert data.reshape(-1)[i] == int(words[i % 16 // 4]) >> 8 * (i % 4) & 0xFF
    zero = oracle_nvfp4.random_bytes(0, 0, 1, 4, 0)
    assert_same(zero, np.array([[0xD5, 0xE8, 0x27, 0x66]], np.uint8))


# ---- The scaled product --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt_a", "fmt_b"), [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
def test_segment_matmul_against_fractions(fmt_a: str, fmt_b: str) -> None:
    """Both sides of the exactness bound: E5M2 products need the integers."""
    rng = np.random.default_rng(2)
    finite = [
        np.array([c for c in range(256) if c & 0x7F <= oracle.ELEMENTS[f].max_code], np.uint8) for f in (fmt_a, fmt_b)
    ]
    a = oracle.decode_fp8(rng.choice(finite[0], (3, 40)), fmt_a)
    b = oracle.decode_fp8(rng.choice(finite[1], (4, 40)), fmt_b)
    a_scales, b_scales = (rng.random((n, 3)).astype(np.float32) for n in (3, 4))
    alpha = np.float32(0.3)
    actual = oracle_matmul.segment_matmul(a, b, a_scales, b_scales, 16, alpha=0.3)
    for m in range(3):
        for n in range(4):
            acc = np.float32(0)
            for s, part in enumerate((slice(0, 16), slice(16, 32), slice(32, 40))):
                pairs = zip(a[m, part], b[n, part], strict=True)
                total = sum((exact(p) * exact(q) for p, q in pairs), Fraction(0))
                acc = acc + rn32(total) * (a_scales[m, s] * b_scales[n, s])
            assert actual[m, n] == acc * alpha
