"""The casts of the package against the oracle, bit for bit: codes, scales, amaxes and the values they stand for.

Each format is cast along each dim that it is defined for, from every dtype, at shapes that are not whole blocks, on
inputs that reach each branch of docs/numerics.md. The oracle is numpy and shares no code with the package.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, Format, elements, parse
from minifloat.operand import Operand
from minifloat.ops import quantize
from minifloat.ops.quantize import reference
from minifloat.quantizer import Quantizer, cast_all, find_amaxes
from tests.helpers import oracle, oracle_nvfp4, vectors
from tests.helpers.cast_inputs import DATA, data
from tests.helpers.oracle_casts import SEED, OracleCast, differences, oracle_cast, oracle_values, same, to_numpy
from tests.helpers.sample import each_once

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (3, 5), (16, 16), (17, 129), (130, 70), (128, 256)]
EMPTY = [(0, 64), (5, 0), (0, 0)]


def _fp8_formats() -> Iterator[Format]:
    for element in ("e4m3", "e5m2"):
        yield Format(element, scale_rule="given")
        for tile in (False, True):
            yield Format(element, 32, tile, "e8m0")
        for rule in ("fp32", "pow2"):
            for eps in (0.0, 1e-3) if element == "e4m3" else (0.0,):
                yield Format(element, scale_rule=rule, amax_epsilon=eps)  # type: ignore[arg-type]
                for tile in (False, True):
                    yield Format(element, 128, tile, rule, amax_epsilon=eps)  # type: ignore[arg-type]


def _mx_formats() -> Iterator[Format]:
    for element in ("e2m1", "e2m3", "e3m2"):
        for tile in (False, True):
            yield Format(element, 32, tile, "e8m0")


def _nvfp4_formats() -> Iterator[Format]:
    plain = Format("e2m1", 16, scale_rule="two_level")
    yield from (plain, replace(plain, tile=True), replace(plain, amax_per_row=True))
    for rounding in ("nearest", "stochastic"):
        yield replace(plain, transform="hadamard16", rounding=rounding)  # type: ignore[arg-type]
    yield replace(plain, rounding="stochastic")
    for rounding in ("four_over_six_mae", "four_over_six_mse"):
        for largest in (448.0, 256.0):
            found = replace(plain, rounding=rounding, block_scale_max=largest)  # type: ignore[arg-type]
            yield from (found, replace(found, tile=True), replace(found, amax_per_row=True))


ROWS = [Format(amax_per_row=True), Format(amax_per_row=True, scale_rule="pow2", amax_epsilon=1e-3)]
FORMATS = [*_fp8_formats(), *_nvfp4_formats(), *_mx_formats(), *ROWS]
CASTS = [
    (fmt, dim)
    for fmt in FORMATS
    for dim in (ROWWISE, COLUMNWISE)
    if not (dim == COLUMNWISE and fmt.symmetric) and not (dim == ROWWISE and fmt.transform == "hadamard16")
]


def for_each(casts: list[tuple[Format, int]]) -> pytest.MarkDecorator:
    """Parametrises a test over casts."""
    return pytest.mark.parametrize(
        ("fmt", "dim"), casts, ids=[f"{fmt.spec}-{'row' if dim else 'column'}" for fmt, dim in casts]
    )


FOR_EACH_CAST = for_each(CASTS)
KINDS_OF_CASTS = [
    (fmt, dim)
    for fmt, dim in CASTS
    if fmt.element not in ("e5m2", "e3m2")
    and not fmt.amax_epsilon
    and fmt.rounding in ("nearest", "four_over_six_mae")
    and fmt.block_scale_max != 256.0
    and not (fmt.transform != "none" and fmt.rounding != "nearest")
]
"""One cast for each element, rule, shape of blocks and dim."""
FOR_EACH_KIND = for_each(KINDS_OF_CASTS)
_NAME = {"ids": lambda dtype: str(dtype).removeprefix("torch.")}
FOR_EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, **_NAME)
FP16_SLOW = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], **_NAME
)


# ---- Inputs ----------------------------------------------------------------------------------------------------------


DENSE = ("normal", "heavy_tailed", "ties")
"""Kinds for the shapes of many whole blocks; the other shapes take every kind."""


class Input(NamedTuple):
    label: str
    tensor: Tensor


@functools.cache
def inputs(dtype: torch.dtype) -> list[Input]:
    """Every kind at every shape, the large ones in three kinds each. Made once: no test writes to its input."""
    torch.manual_seed(0)
    generated = []
    for shape in SHAPES:
        for kind in DATA:
            if shape[0] * shape[1] < 3000 or kind in DENSE or (kind == "uneven" and shape == (130, 70)):
                generated.append(Input(f"{kind} {shape}", data(kind, shape, dtype)))
    return generated


# ---- What the package says -------------------------------------------------------------------------------------------


def quantizer(fmt: Format, dim: int) -> Quantizer:
    """Casts to ``fmt`` along ``dim`` only."""
    return Quantizer(fmt, rowwise=dim == ROWWISE, columnwise=dim == COLUMNWISE)


def actual(x: Tensor, fmt: Format, dim: int, level: Tensor | None = None, seed: tuple[int, int] = SEED) -> OracleCast:
    """The package's cast, in the oracle's form."""
    if fmt.scale_rule == "given" and level is None:
        level = torch.ones(1, device=x.device)
    amaxes = quantizer(fmt, dim).amax(x) if level is None else (level,)
    rng = torch.tensor(seed, device=x.device)
    operand = quantizer(fmt, dim).cast(x, amaxes, rng).any
    assert (operand.format, operand.dim, operand.shape, operand.dtype) == (fmt, dim, tuple(x.shape), x.dtype)
    assert operand.scale_inv is not None
    amax = None if operand.amax is None else to_numpy(operand.amax)
    return OracleCast(to_numpy(operand.codes), to_numpy(operand.scale_inv), amax)


# ---- Worked vectors --------------------------------------------------------------------------------------------------


def _format_of(vector: vectors.Vector) -> tuple[Format, int]:
    """The format and dim that a vector is about; the oracle's keyword arguments translated."""
    kwargs = vector.kwargs
    dim = kwargs.get("dim", ROWWISE)
    rule = "pow2" if kwargs.get("pow2") else "fp32"
    if vector.function == "per_tensor_current":
        return Format(kwargs["fmt"], scale_rule=rule), dim  # type: ignore[arg-type]
    if vector.function.startswith("block"):
        return Format(kwargs["fmt"], 128, vector.function == "block_2d", rule), dim  # type: ignore[arg-type]
    if vector.function == "mxfp8":
        return Format(kwargs["fmt"], 32, kwargs.get("two_d", False), "e8m0"), dim
    assert vector.function == "nvfp4", f"no format for the vectors of oracle.{vector.function}"
    search = kwargs.get("four_over_six")
    fmt = Format(
        "e2m1",
        16,
        kwargs.get("two_d", False),
        "two_level",
        transform="hadamard16" if kwargs.get("hadamard") else "none",
        rounding=f"four_over_six_{search.lower()}" if search else "nearest",  # type: ignore[arg-type]
        block_scale_max=float(kwargs.get("e4m3_max", 448)),
        amax_per_row=kwargs.get("row_scaled", False),
    )
    return fmt, dim


@pytest.mark.parametrize("vector", vectors.VECTORS, ids=lambda vector: vector.name)
def test_worked_vector(vector: vectors.Vector, device: torch.device) -> None:
    fmt, dim = _format_of(vector)
    x = torch.from_numpy(vector.x).to(device, torch.bfloat16)
    got = actual(x, fmt, dim)
    stated = np.ones(vector.codes.shape, np.bool_) if vector.given is None else vector.given
    assert same(got.codes[stated], vector.codes[stated])
    assert same(got.scales, vector.scales)
    if vector.amax is not None:
        assert same(got.amax, vector.amax)
    if vector.dequantized is not None:
        values = to_numpy(quantizer(fmt, dim)(x).dequantize(torch.float32))
        tolerance = 0 if vector.digits is None else 0.5 * 10.0**-vector.digits + 1e-9
        known = ~np.isnan(vector.dequantized)
        np.testing.assert_allclose(values[known], vector.dequantized[known], rtol=1e-7, atol=tolerance)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_fp8_element_casts(element: str, device: torch.device) -> None:
    values, codes = zip(*vectors.CAST_FP8[element], strict=True)
    x = torch.tensor(values, device=device)
    assert ELEMENTS[element].encode(x).tolist() == list(codes)


def test_e2m1_element_casts(device: torch.device) -> None:
    values, codes = map(list, zip(*vectors.CAST_E2M1, strict=True))
    for boundary, below, at, above in vectors.CAST_E2M1_TIES:
        around = [np.nextafter(np.float32(boundary), np.float32(end)) for end in (0, 10)]
        values += [float(around[0]), boundary, float(around[1])]
        codes += [below, at, above]
    assert ELEMENTS["e2m1"].encode(torch.tensor(values, device=device)).tolist() == codes


@pytest.mark.parametrize("element", list(oracle.ELEMENTS))
def test_element_cast_of_every_bf16(element: str, device: torch.device) -> None:
    """All 65536 bf16 numbers, and the fp32 neighbours of each, where a tie is missed or invented."""
    bf16 = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.cat([bf16, bf16 + 1, bf16 - 1]).view(torch.float32)
    cast = oracle.cast_fp8 if ELEMENTS[element].dtype else oracle.cast_small
    assert same(to_numpy(ELEMENTS[element].encode(x.to(device))), cast(to_numpy(x), element))


def test_e8m0_rounds_up(device: torch.device) -> None:
    values, codes = zip(*vectors.FLOAT_TO_E8M0, strict=True)
    assert elements.e8m0_from_float(torch.tensor(values, device=device)).tolist() == list(codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert same(to_numpy(elements.SCALE_RULES["e8m0"].values(every.to(device))), oracle.e8m0_value(to_numpy(every)))


@pytest.mark.parametrize(("largest", "pow2", "scales"), vectors.SCALES)
def test_scale_of_an_amax(largest: float, pow2: bool, scales: list[float], device: torch.device) -> None:
    """The table of numerics.md 0.3, as scale_inv = RN32(1 / s)."""
    fmt = Format("e4m3" if largest == 448 else "e5m2", scale_rule="pow2" if pow2 else "fp32")
    x = torch.ones(1, 1, device=device)
    for amax, scale in zip(vectors.SCALE_AMAXES, scales, strict=True):
        got = actual(x, fmt, ROWWISE, torch.tensor([amax], device=device))
        assert same(got.scales, oracle.reciprocal(np.array([scale], np.float32))), f"amax {amax}"


@pytest.mark.parametrize(("amax", "code"), vectors.MXFP8_EDGES)
def test_mxfp8_scale_of_a_block(amax: float, code: int, device: torch.device) -> None:
    x = torch.tensor([[float(amax)]], device=device)
    assert actual(x, Format("e4m3", 32, scale_rule="e8m0"), ROWWISE).scales.tolist() == [[code]]


def test_stochastic_rounding_of_given_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the amax 448 * 6 and a 6 in the block, both scales are 1 and the numbers meet the grid as they are."""
    fmt = Format("e2m1", 16, scale_rule="two_level", rounding="stochastic")
    bits = torch.from_numpy(vectors.STOCHASTIC_BYTES).repeat(len(vectors.STOCHASTIC), 1)
    monkeypatch.setattr(reference, "random_bytes", lambda *_: torch.nn.functional.pad(bits, (0, 1)))
    x = torch.tensor([[value] * 5 + [6.0] for value, _ in vectors.STOCHASTIC])
    got = quantizer(fmt, ROWWISE).cast(x, (torch.tensor([448.0 * 6]),), torch.zeros(2, dtype=torch.int64))
    assert got.dequantize()[:, :5].tolist() == [values for _, values in vectors.STOCHASTIC]


@pytest.mark.parametrize("dim", [ROWWISE, COLUMNWISE])
def test_stochastic_rounding_is_unbiased(dim: int) -> None:
    """The mean over 16384 draws lies within 5 standard errors, and the 1/256 of a step that eight bits leave."""
    fmt = Format("e2m1", 16, scale_rule="two_level", rounding="stochastic")
    values = torch.tensor([0.1, 0.3, -0.6, 1.1, 1.7, 2.2, -2.9, 3.5, 4.3, -5.9, 0.0, 6.0, 0.5, 1.5, 3.0, 4.0])
    x = values.repeat(16384, 1) if dim == ROWWISE else values[:, None].repeat(1, 16384)
    got = quantizer(fmt, dim).cast(x, (torch.tensor([448.0 * 6]),), torch.tensor(SEED)).dequantize().double()
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    error = got.mean(0 if dim == ROWWISE else 1) - values
    assert (error.abs() <= step * (5 * 0.5 / 128 + 1 / 256)).all()
    exact = [i for i, value in enumerate(values.tolist()) if value in (0.0, 6.0, 0.5, 1.5, 3.0, 4.0)]
    assert not error[exact].any()


def test_philox_known_answers(device: torch.device) -> None:
    for counter, key, answer in vectors.PHILOX:
        words = torch.tensor(counter, device=device)[:, None].expand(-1, 3), torch.tensor(key, device=device)
        assert reference.philox4x32_10(*words).tolist() == [[word] * 3 for word in answer]


@pytest.mark.parametrize("dim", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize("seed", [(0, 0), SEED, (2**62 - 1, 2**62 - 1)])
def test_random_bytes(seed: tuple[int, int], dim: int, device: torch.device) -> None:
    got = reference.random_bytes(torch.tensor(seed, device=device), torch.Size((7, 45)), dim)
    assert same(to_numpy(got), oracle_nvfp4.random_bytes(*seed, 7, 45, 0 if dim == ROWWISE else 1))


@pytest.mark.parametrize("dim", [ROWWISE, COLUMNWISE])
@pytest.mark.parametrize(("first", "rows"), [(0, 7), (1, 6), (3, 2), (16, 5), (5, 0)])
def test_random_bytes_of_rows_of_a_whole(first: int, rows: int, dim: int, device: torch.device) -> None:
    """A rank's rows have the bytes that they have in the whole, also where the first one begins inside of a block."""
    whole = reference.random_bytes(torch.tensor(SEED, device=device), torch.Size((21, 45)), dim)
    for start in (0, 2**33 - 5):  # a row number that exceeds 32 bits
        if start:
            whole = reference.random_bytes(torch.tensor([*SEED, start], device=device), torch.Size((21, 45)), dim)
        part = reference.random_bytes(torch.tensor([*SEED, start + first], device=device), torch.Size((rows, 45)), dim)
        assert torch.equal(part, whole[first : first + rows])


# ---- Every format, input, dtype and shape ----------------------------------------------------------------------------


@each_once
@FP16_SLOW
@FOR_EACH_CAST
def test_cast_and_dequantize_equal_the_oracle(fmt: Format, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    _check(inputs(dtype), fmt, dim, device)


@FOR_EACH_KIND
def test_empty_tensors(fmt: Format, dim: int, device: torch.device) -> None:
    _check([Input(f"empty {shape}", torch.empty(shape, dtype=torch.bfloat16)) for shape in EMPTY], fmt, dim, device)


def _check(generated: list[Input], fmt: Format, dim: int, device: torch.device) -> None:
    wrong = []
    for label, x in generated:
        scale = 0.37 if fmt.scale_rule == "given" else None
        want = oracle_cast(x, fmt, dim, scale)
        got = actual(x.to(device), fmt, dim, None if scale is None else torch.tensor([scale], device=device))
        wrong += differences(label, got, want)
        if fmt.transform == "none":
            values = _dequantize(want, fmt, dim, x.shape, torch.float32, device)
            if not same(values, oracle_values(want, fmt, dim, x.shape)):
                wrong.append(f"{label}: dequantized")
    assert not wrong, "differs from the oracle:\n" + "\n".join(wrong)


def _dequantize(
    cast: OracleCast, fmt: Format, dim: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> oracle.F32:
    """The package's reading of the oracle's codes, as fp32."""
    codes, scales = (torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in cast[:2])
    amax = None if cast.amax is None else torch.from_numpy(np.ascontiguousarray(cast.amax)).to(device)
    return to_numpy(quantize.dequantize(codes, scales, amax, fmt.spec, dim, *shape, dtype).float())


@for_each([cast for cast in CASTS if cast[0].rounding.startswith("four_over_six")])
def test_four_over_six_near_ties(fmt: Format, dim: int, device: torch.device) -> None:
    """Blocks halfway from one that prefers 4 to one that prefers 6, so that the last bit of each sum decides."""
    count, size = 400, 256 if fmt.tile else 16
    level = np.full(count if fmt.amax_per_row else 1, 7.1234567, np.float32)

    def matrix(blocks: oracle.F32) -> oracle.F32:
        return np.ascontiguousarray(blocks.T) if dim == COLUMNWISE else blocks.reshape(-1, 16)

    def scales(blocks: oracle.F32) -> oracle.F32:
        return oracle_cast(torch.from_numpy(matrix(blocks)), fmt, dim, level).scales.reshape(-1)

    rng = np.random.default_rng(0)
    low, high = rng.uniform(-4, 4, (2, count, size)).astype(np.float32) * rng.uniform(0, 1, (2, count, 1)) ** 2
    low, high = low.astype(np.float32), high.astype(np.float32)
    low[:, 0] = high[:, 0] = rng.uniform(4, 7, count)  # the largest, which stays
    start = scales(low)
    assert (start != scales(high)).sum() >= 20
    for _ in range(40):
        middle = (low + high) / 2
        alike = scales(middle) == start
        low[alike], high[~alike] = middle[alike], middle[~alike]
    for ulps in range(-4, 5):
        near = low.copy()
        near[:, 1] = (low[:, 1].view(np.int32) + ulps).view(np.float32)
        x = torch.from_numpy(matrix(near))
        got = actual(x.to(device), fmt, dim, torch.from_numpy(level).to(device))
        assert not differences(f"{ulps} ulps", got, oracle_cast(x, fmt, dim, level))


@pytest.mark.parametrize("scale", [1.0, 56.0, 2.0**-130, float(oracle.FLT_MAX)])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_delayed_scaling_casts_with_any_scale(element: str, scale: float, device: torch.device) -> None:
    fmt = Format(element, scale_rule="given")
    for label, x in inputs(torch.bfloat16):
        got = actual(x.to(device), fmt, ROWWISE, torch.tensor([scale], device=device))
        assert not differences(label, got, oracle_cast(x, fmt, ROWWISE, scale))


@FOR_EACH_KIND
def test_dequantize_rounds_once(fmt: Format, dim: int) -> None:
    """To each dtype as fp32 rounded; by way of bf16 to fp16, say, it would round twice."""
    if fmt.transform == "none":
        cast = oracle_cast(torch.randn((17, 129)), fmt, dim, 0.37 if fmt.scale_rule == "given" else None)
        exact = torch.from_numpy(oracle_values(cast, fmt, dim, (17, 129)))
        for dtype in DTYPES:
            values = _dequantize(cast, fmt, dim, (17, 129), dtype, torch.device("cpu"))
            assert same(values, exact.to(dtype).float().numpy())


@pytest.mark.parametrize("rows", [16, 5, 33])
def test_dequantize_rotates_back(rows: int, device: torch.device) -> None:
    """Within fp32 rounding of the rotation as a matrix, which is its own transpose's inverse."""
    fmt = Format("e2m1", 16, scale_rule="two_level", transform="hadamard16")
    x = torch.randn(rows, 20, dtype=torch.float32)
    cast = oracle_cast(x, fmt, COLUMNWISE)
    rotated = oracle_values(cast, fmt, COLUMNWISE, x.shape).reshape(-1, 16, 20).astype(np.float64)
    index = np.arange(16)
    parity = np.array([[bin(i & j).count("1") % 2 for j in index] for i in index])
    matrix = oracle_nvfp4.HADAMARD_SIGNS[:, None] * np.where(parity, -0.25, 0.25)
    exact = np.einsum("ij,gjk->gik", matrix, rotated).reshape(-1, 20)[:rows]
    values = _dequantize(cast, fmt, COLUMNWISE, (rows, 20), torch.float32, device)
    bound = 4 * 2.0**-24 * np.abs(rotated).sum(1).repeat(16, axis=0)[:rows] * 0.25 + 1e-30
    assert (np.abs(values - exact) <= bound).all()
    # The round trip. A code is within half of the wider gap beside it, a quarter of the scale up to 1.5, a half up to 3
    # and one at 4 and 6 (a block's scale, rounded down by up to 1/16, saturates the largest by 6/16 at most), and what
    # is cast was rounded to bf16. A rotation keeps the Euclidean length of a group's errors; 1e-5 is for fp32.
    codes = oracle.decode_e2m1(oracle.unpack(cast.codes, COLUMNWISE, 16 * -(-rows // 16))).reshape(-1, 16, 20)
    scales = np.divide(rotated, codes, out=np.zeros_like(rotated), where=codes != 0).max(1, keepdims=True)
    half_gap = np.select([np.abs(codes) <= 1.5, np.abs(codes) <= 3], [0.25, 0.5], 1.0)
    errors = half_gap * scales + 2.0**-9 * (np.abs(rotated) + scales)
    limit = np.sqrt((errors**2).sum(1)) * (1 + 1e-5)
    padded = np.pad(values - x.numpy(), ((0, -rows % 16), (0, 0))).reshape(-1, 16, 20)
    assert (np.sqrt((padded.astype(np.float64) ** 2).sum(1)) <= limit).all()


@FOR_EACH_KIND
def test_own_amax(fmt: Format, dim: int, device: torch.device) -> None:
    """The amax phase alone: of the tensor, of each row, or of each block."""
    for shape, kind in product(SHAPES + EMPTY, ("normal", "special", "all_nan")):
        x = data(kind, shape, torch.bfloat16)
        source = (
            oracle_nvfp4.hadamard16(to_numpy(x.float()))
            if fmt.transform == "hadamard16" and x.numel()
            else to_numpy(x.float())
        )
        if fmt.amax_per_row:
            want = oracle.amax_of(source, axis=1 if dim == ROWWISE else 0)
        elif fmt.block and fmt.scale_rule != "two_level":
            want = oracle.amax_of_tiles(source, oracle.tile_of(dim, fmt.block, fmt.tile), fmt.element)
        else:
            want = oracle.amax_of(source if fmt.transform == "none" else oracle.nan_as_infinity(source))
        got = quantize.amax([x.to(device)], [fmt.spec], [dim])[0]
        assert same(to_numpy(got), want), (shape, kind)


@each_once
@pytest.mark.parametrize("factor", [1.0, 3.0, 1000.0])
@for_each([cast for cast in KINDS_OF_CASTS if cast[0].needs_amax])
def test_given_amax(fmt: Format, dim: int, factor: float) -> None:
    """An amax agreed with other ranks, larger than the tensor's own."""
    x = torch.randn((17, 129)).bfloat16()
    (own,) = quantizer(fmt, dim).amax(x)
    assert own is not None
    agreed = own * factor
    assert not differences("", actual(x, fmt, dim, agreed), oracle_cast(x, fmt, dim, to_numpy(agreed)))


@for_each([(fmt, dim) for fmt, dim in CASTS if fmt.block and fmt.scale_rule != "two_level"])
def test_given_block_amaxes(fmt: Format, dim: int) -> None:
    """A cast with the blocks' amaxes from outside: as without, and with larger ones as if an element were larger."""
    x = torch.randn((130, 133)).bfloat16()
    own = quantize.amax([x], [fmt.spec], [dim])[0]
    assert not differences("own", actual(x, fmt, dim, own), oracle_cast(x, fmt, dim))
    rows, columns = fmt.scale_block(dim)
    peaked = x.clone()
    peaked[::rows, ::columns] = own.bfloat16() * 4
    agreed = quantize.amax([peaked], [fmt.spec], [dim])[0]
    others = torch.ones_like(x, dtype=torch.bool)
    others[::rows, ::columns] = False
    got, want = actual(x, fmt, dim, agreed), oracle_cast(peaked, fmt, dim)
    assert same(got.scales, want.scales)
    codes = [oracle.unpack(c.codes, dim, x.shape[dim]) if fmt.packed else c.codes for c in (got, want)]
    assert same(codes[0][others.numpy()], codes[1][others.numpy()])


# ---- Properties ------------------------------------------------------------------------------------------------------

shapes = st.tuples(st.integers(0, 40), st.integers(0, 40))
tensors = st.builds(
    lambda shape, kind, dtype, seed: (torch.manual_seed(seed), data(kind, shape, dtype))[1],
    shapes,
    st.sampled_from(sorted(DATA)),
    st.sampled_from(DTYPES),
    st.integers(0, 2**16),
)
casts = st.sampled_from(CASTS)
PROPERTY = settings(max_examples=60)


def _fields(operand: Operand) -> list[Tensor]:
    return [tensor for tensor in (operand.codes, operand.scale_inv, operand.amax) if tensor is not None]


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(same(to_numpy(x), to_numpy(y)) for x, y in zip(a, b, strict=True))


@PROPERTY
@given(tensors, casts, st.integers(0, 2**62 - 1), st.integers(0, 2**62 - 1))
def test_any_shape_and_seed(x: Tensor, cast: tuple[Format, int], seed: int, offset: int) -> None:
    fmt, dim = cast
    level = 0.37 if fmt.scale_rule == "given" else None
    got = actual(x, fmt, dim, None if level is None else torch.tensor([level]), (seed, offset))
    assert not differences(f"{fmt.spec} {x.shape} {x.dtype}", got, oracle_cast(x, fmt, dim, level, (seed, offset)))


@PROPERTY
@given(tensors, st.sampled_from([fmt for fmt in FORMATS if fmt.symmetric]))
def test_one_cast_of_a_symmetric_format_serves_both(x: Tensor, fmt: Format) -> None:
    level = (torch.tensor([2.0]),) if fmt.scale_rule == "given" else None
    row, column = Quantizer(fmt).cast(x, level)
    assert row is column
    assert row is not None and row.serves(ROWWISE) and row.serves(COLUMNWISE)
    alone = Quantizer(fmt, rowwise=False).cast(x, level)
    assert alone.rowwise is None and alone.columnwise is not None
    assert _equal(_fields(alone.columnwise), _fields(row))


@PROPERTY
@given(st.lists(st.tuples(tensors, casts), max_size=4))
def test_many_tensors_in_one_call(batch: list[tuple[Tensor, tuple[Format, int]]]) -> None:
    """Phases over a list equal one tensor at a time, in order."""
    xs = [x for x, _ in batch]
    quantizers = [quantizer(*cast) for _, cast in batch]
    rngs = [torch.tensor([i, 7]) for i in range(len(batch))]
    levels = [
        (torch.tensor([1.5]),) if fmt.scale_rule == "given" else amaxes
        for amaxes, (_, (fmt, _)) in zip(find_amaxes(xs, quantizers), batch, strict=True)
    ]
    together = cast_all(xs, quantizers, levels, rngs)
    for x, q, level, rng, result in zip(xs, quantizers, levels, rngs, together, strict=True):
        assert _equal(_fields(q.cast(x, level, rng).any), _fields(result.any))


# ---- Layouts, devices, PyTorch's own checks --------------------------------------------------------------------------


@FOR_EACH_KIND
def test_leading_dims_are_flattened(fmt: Format, dim: int) -> None:
    x = torch.randn(2, 3, 4, 20).bfloat16()
    q, level = quantizer(fmt, dim), (torch.ones(1),) if fmt.scale_rule == "given" else None
    rng = torch.tensor(SEED)
    deep, flat = q.cast(x, level, rng).any, q.cast(x.view(24, 20), level, rng).any
    assert deep.shape == flat.shape == (24, 20)
    assert _equal(_fields(deep), _fields(flat))
    assert q.cast(x[0, 0, 0], level, rng).any.shape == (1, 20)


@FOR_EACH_KIND
def test_operations_pass_opcheck(fmt: Format, dim: int, device: torch.device) -> None:
    """Schema, fake, autograd registration; and with symbolic shapes for one format of each scale rule."""
    x = torch.randn(18, 33, device=device).bfloat16()
    rng = quantize.draw_seed(x)
    level = torch.ones(1, device=device) if fmt.scale_rule == "given" else quantize.amax([x], [fmt.spec], [dim])[0]
    codes, scale_inv, _ = quantize.cast([x], [level], [rng], [fmt.spec], [dim], [False], None)
    amax = level if fmt.scale_rule == "two_level" else None
    utils: Any = ("test_schema", "test_autograd_registration", "test_faketensor")
    if fmt in (parse("e4m3/tensor/fp32"), parse("e4m3/1x32/e8m0"), parse("e2m1/1x16/two_level/hadamard16")):
        utils = (*utils, "test_aot_dispatch_dynamic")
    torch.library.opcheck(quantize.amax.overload, quantize.amax.spelled([x], [fmt.spec], [dim]), test_utils=utils)
    for k_major in (False, not fmt.packed):
        arguments = quantize.cast.spelled([x], [level], [rng], [fmt.spec], [dim], [k_major], None)
        torch.library.opcheck(quantize.cast.overload, arguments, test_utils=utils)
    torch.library.opcheck(
        quantize.dequantize.overload,
        quantize.dequantize.spelled(codes, scale_inv, amax, fmt.spec, dim, 18, 33, torch.bfloat16),
        test_utils=utils,
    )


def test_draw_seed_follows_the_generator() -> None:
    x = torch.empty(3)
    torch.manual_seed(5)
    first, second = quantize.draw_seed(x), quantize.draw_seed(x)
    torch.manual_seed(5)
    assert torch.equal(quantize.draw_seed(x), first)
    assert not torch.equal(first, second)
    torch.library.opcheck(quantize.draw_seed.overload, (x,), test_utils=("test_schema", "test_faketensor"))


# ---- Mistakes --------------------------------------------------------------------------------------------------------

CURRENT, ROTATED = Format("e4m3"), Format("e2m1", 16, scale_rule="two_level", transform="hadamard16")
ROWS = Quantizer(Format("e4m3", 128, scale_rule="pow2"), columnwise=False)


@pytest.mark.parametrize(
    ("run", "x", "error", "message"),
    [
        (Quantizer(CURRENT), torch.ones(4, 4, dtype=torch.int32), TypeError, r"torch\.int32.*cast it first"),
        (Quantizer(CURRENT).amax, torch.ones(4, 4).double(), ValueError, r"torch\.float64.*x\.float\(\)"),
        (Quantizer(CURRENT).cast, torch.ones(4, 4).double(), ValueError, r"torch\.float64.*x\.float\(\)"),
        (Quantizer(CURRENT), torch.tensor(1.0), ValueError, r"reshape it to \[1, 1\]"),
        (Quantizer(Format("e4m3", scale_rule="given")), torch.ones(4, 4), ValueError, r"amaxes=\(scale,\)"),
        (Quantizer(ROTATED), torch.ones(16, 16), ValueError, "columnwise casts only"),
        (lambda x: ROWS(x).along(COLUMNWISE), torch.ones(4, 4), ValueError, "columnwise=True"),
    ],
)
def test_mistakes(run: Callable[[Tensor], Any], x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(x)


# ---- Formats and quantizers as values --------------------------------------------------------------------------------


def _quantizers() -> list[Quantizer]:
    nvfp4 = Format("e2m1", 16, scale_rule="two_level")
    plain = [Quantizer(fmt) for fmt in FORMATS if fmt.transform == "none"]
    return [*plain, Quantizer(nvfp4, replace(nvfp4, transform="hadamard16")), Quantizer.identity()]


def test_values_hash_compare_and_pickle() -> None:
    values = [*FORMATS, *_quantizers()]
    assert len(set(values)) == len(values)
    for value in values:
        copy = pickle.loads(pickle.dumps(value))
        assert copy == value and hash(copy) == hash(value) and {value: 1}[copy] == 1


def test_hybrid_takes_one_format_from_each() -> None:
    block, mx = Format("e4m3", 128, scale_rule="pow2"), Format("e4m3", 32, scale_rule="e8m0")
    x = torch.randn((33, 40)).bfloat16()
    both = Quantizer.hybrid(rowwise_quantizer=Quantizer(block), columnwise_quantizer=Quantizer(mx))(x)
    for operand, fmt, dim in ((both.rowwise, block, ROWWISE), (both.columnwise, mx, COLUMNWISE)):
        assert operand is not None and operand.scale_inv is not None
        got = OracleCast(to_numpy(operand.codes), to_numpy(operand.scale_inv), None)
        assert not differences("", got, oracle_cast(x, fmt, dim))


def test_columnwise_from_the_dequantized_rowwise() -> None:
    block, mx = Format("e4m3", 128, scale_rule="fp32"), Format("e4m3", 32, scale_rule="e8m0")
    x = torch.randn((33, 40)).bfloat16()
    first = oracle_cast(x, block, ROWWISE)
    seen = torch.from_numpy(oracle_values(first, block, ROWWISE, x.shape)).bfloat16()
    for rowwise in (True, False):
        q = Quantizer(block, mx, rowwise=rowwise, columnwise_source="rowwise_dequantized")
        result = q(x)
        assert (result.rowwise is not None) == rowwise
        assert result.columnwise is not None and result.columnwise.scale_inv is not None
        got = OracleCast(to_numpy(result.columnwise.codes), to_numpy(result.columnwise.scale_inv), None)
        assert not differences("", got, oracle_cast(seen, mx, COLUMNWISE))
