"""The scaled product: the reference against the oracle bit for bit, the native backends against derived bounds.

Sizes are given as (m, n, depth): the result is [m, n] and ``depth`` elements are contracted, whichever GEMM it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from minifloat import backends
from minifloat.formats import COLUMNWISE, ELEMENTS, IDENTITY, ROWWISE, Format
from minifloat.functional.gemm import dgrad, fprop, wgrad
from minifloat.operand import Operand, Quantized
from minifloat.ops import delayed, matmul
from minifloat.ops.matmul import Gemm, count_gemms, emulated
from minifloat.ops.quantize import scale_shape
from minifloat.quantizer import Quantizer
from tests.helpers import linear_model as model
from tests.helpers import oracle, oracle_matmul
from tests.helpers.oracle import F32
from tests.helpers.sample import each_once, each_pair, each_twice
from tests.helpers.tensor_core import tensor_core_error

pytestmark = pytest.mark.usefixtures("one_thread")

E4 = Format("e4m3")
E5 = Format("e5m2")
STRIP = Format(block=128, scale_rule="pow2")
STRIP32 = Format(block=128, scale_rule="fp32")
STRIP5 = replace(STRIP, element="e5m2")
TILE = replace(STRIP, tile=True)
TILE32 = replace(STRIP32, tile=True)
MX = Format(block=32, scale_rule="e8m0")
MX5 = replace(MX, element="e5m2")
MX_TILE = replace(MX, tile=True)
ROWS, ROWS_POW2 = (Format(amax_per_row=True, scale_rule=rule) for rule in ("fp32", "pow2"))
MX4, MX6, MX6_WIDE = (Format(element, 32, scale_rule="e8m0") for element in ("e2m1", "e2m3", "e3m2"))
NV = Format("e2m1", 16, scale_rule="two_level")
NV_TILE = replace(NV, tile=True)
NV_STOCHASTIC = replace(NV, rounding="stochastic")
NV_ROTATED = replace(NV, transform="hadamard16")
NV_ROTATED_STOCHASTIC = replace(NV_ROTATED, rounding="stochastic")
NV_46 = replace(NV, rounding="four_over_six_mae", block_scale_max=256.0)
NV_46_TILE = replace(NV_46, tile=True, rounding="four_over_six_mse")
NV_ROWS = replace(NV, amax_per_row=True)
NV_46_ROWS = replace(NV_46, amax_per_row=True)


GEMMS: dict[str, tuple[int, int]] = {
    "fprop": (ROWWISE, ROWWISE),
    "dgrad": (ROWWISE, COLUMNWISE),
    "wgrad": (COLUMNWISE, COLUMNWISE),
}
"""The dims that each GEMM contracts."""

PAIRS = [
    (E4, E4), (E5, E4), (E4, E5), (E5, E5), (STRIP, TILE), (TILE, STRIP), (STRIP32, TILE32), (STRIP, STRIP),
    (STRIP32, STRIP32), (STRIP5, TILE), (MX, MX), (MX5, MX), (MX5, MX5), (MX, MX_TILE), (NV, NV_TILE), (NV, NV),
    (NV_STOCHASTIC, NV_TILE), (NV_46, NV_46_TILE), (NV, NV_46), (NV_ROWS, NV_TILE), (NV, NV_ROWS), (NV_ROWS, NV_ROWS),
    (NV_46_ROWS, NV_46_TILE), (STRIP, MX), (MX5, TILE32), (E4, NV), (NV_TILE, E5), (MX, NV_TILE), (NV, STRIP32),
    (E4, STRIP), (MX, E5), (NV_ROWS, E4), (MX4, MX4), (MX4, replace(MX4, tile=True)), (MX6, MX6), (MX6_WIDE, MX6),
    (ROWS, ROWS), (ROWS_POW2, ROWS), (ROWS, E4), (ROWS, MX),
]  # fmt: skip
ROTATED = [(NV_ROTATED, NV_ROTATED), (NV_ROTATED_STOCHASTIC, NV_ROTATED)]


def for_each_case(
    pairs: list[tuple[Format, Format]], of_three: int, rotated: list[tuple[Format, Format]] = ROTATED
) -> pytest.MarkDecorator:
    """Parametrises a test over pairs, each in ``of_three`` of the GEMMs."""
    cases = [(gemm, *pair) for i, pair in enumerate(pairs) for j, gemm in enumerate(GEMMS) if (i + j) % 3 < of_three]
    cases += [("wgrad", *pair) for pair in rotated]
    ids = [f"{gemm}-{a.spec}-by-{b.spec}" for gemm, a, b in cases]
    return pytest.mark.parametrize(("gemm", "a_fmt", "b_fmt"), cases, ids=ids)


SIZES = [(17, 19, 300), (3, 5, 33), (1, 1, 1), (16, 8, 256)]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PER_TENSOR = [(E4, E4), (E5, E4), (E4, E5), (E5, E5)]
FP8 = [E4, E5, STRIP, STRIP32, TILE, MX, MX5, MX_TILE]


def ids(value: object) -> str | None:
    """Names a format, or a dtype, in the id of a test."""
    return value.spec if isinstance(value, Format) else str(value).removeprefix("torch.") if value in FLOATS else None


def shape_along(outer: int, depth: int, along: int) -> tuple[int, int]:
    """[M, K] of an operand that a GEMM contracts along ``along``."""
    return (outer, depth) if along == ROWWISE else (depth, outer)


def cast(x: Tensor, fmt: Format, along: int) -> Operand:
    """``x`` quantized to be contracted along ``along``."""
    return Quantizer(fmt).with_usage(rowwise=along == ROWWISE, columnwise=along == COLUMNWISE)(x).along(along)


def heavy_tailed(shape: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    """Magnitudes over several octaves, and some zeros."""
    x = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    return x.masked_fill(torch.rand(shape) < 0.1, 0.0).to(device)


def normal(shape: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normal."""
    return torch.randn(shape).to(device)


def operands(
    gemm: str,
    a_fmt: Format,
    b_fmt: Format,
    size: tuple[int, int, int],
    draw: Callable[[tuple[int, int], torch.device | str], Tensor] = heavy_tailed,
    device: torch.device | str = "cpu",
) -> tuple[Operand, Operand]:
    """Random operands of a GEMM of ``size`` (m, n, depth)."""
    m, n, depth = size
    a_along, b_along = GEMMS[gemm]
    a, b = draw(shape_along(m, depth, a_along), device), draw(shape_along(n, depth, b_along), device)
    return cast(a, a_fmt, a_along), cast(b, b_fmt, b_along)


def outer(operand: Operand, along: int) -> int:
    """Size of the dim that is not contracted."""
    return operand.shape[0] if along == ROWWISE else operand.shape[1]


def scaled_mm_args(
    gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None, fast: bool, backend: str
) -> tuple[object, ...]:
    """Arguments of ``minifloat::scaled_mm``."""
    a_along, b_along = GEMMS[gemm]
    return (
        gemm, a.codes, a.scale_inv, a.amax, a.format.spec, a.dim, a_along, outer(a, a_along),
        b.codes, b.scale_inv, b.amax, b.format.spec, b.dim, b_along, outer(b, b_along),
        out_dtype, bias, fast, backend,
    )  # fmt: skip


def multiply(
    gemm: str,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype = torch.float32,
    bias: Tensor | None = None,
    fast: bool = False,
    backend: str = "reference",
) -> Tensor:
    """The product on a backend of the caller's choice."""
    result: Tensor = matmul.scaled_mm(*scaled_mm_args(gemm, a, b, out_dtype, bias, fast, backend))
    return result


def quantized(operand: Operand, along: int) -> Quantized:
    """A value that holds one orientation."""
    return Quantized(operand, None) if along == ROWWISE else Quantized(None, operand)


def call(
    gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype = torch.float32, bias: Tensor | None = None
) -> Tensor:
    """The product through the public function of this GEMM, on the backend that the table of backends chooses."""
    left, right = quantized(a, GEMMS[gemm][0]), quantized(b, GEMMS[gemm][1])
    if gemm == "fprop":
        return fprop(left, right, bias, out_dtype=out_dtype)
    assert bias is None
    return (dgrad if gemm == "dgrad" else wgrad)(left, right, out_dtype=out_dtype)


def oracle_product(gemm: str, a: Operand, b: Operand) -> F32:
    """docs/numerics.md 1.7 by the oracle: segments of 128, of 32 where an operand has MX blocks.

    What scales the whole contraction is one factor, scale_a * scale_b (/ the ranges of two-level scales), multiplied in
    last; of a row-scaled operand it is one factor a row.
    """
    a_along, b_along = GEMMS[gemm]
    segment = 32 if "e8m0" in (a.format.scale_rule, b.format.scale_rule) else 128
    two_level = [x.format.scale_rule == "two_level" for x in (a, b)]
    spread = []
    for operand, along, folds in ((a, a_along, two_level[0]), (b, b_along, two_level[1])):
        codes = model.contracted(model.code_values(operand), along)
        scales = model.contracted(model.block_scales(operand), along)
        spread += [codes * scales, np.ones_like(scales)] if folds else [codes, scales]  # six bits: exact in fp32
    a_values, a_scales, b_values, b_scales = spread
    total = oracle_matmul.segment_matmul(a_values, b_values, a_scales[:, ::segment], b_scales[:, ::segment], segment)
    (a_factor, a_divisor), (b_factor, b_divisor) = model.whole_scale(a), model.whole_scale(b)
    factor = a_factor[:, None] * b_factor
    if a_divisor * b_divisor != 1:
        factor = factor * np.float32(1 / (a_divisor * b_divisor))
    result: F32 = total * factor
    return result


def assert_same_bits(y: Tensor, expected: F32, what: str = "") -> None:
    """Bit for bit the same, zeros' signs included; any NaN equals any other."""
    found = y.cpu().numpy()
    assert found.shape == expected.shape and expected.dtype == np.float32
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), f"{what}: {(~same).sum()} of {same.size} differ, as {found[~same][:3]} and {expected[~same][:3]}"


# ---- The reference is the oracle ------------------------------------------------------------------------------------


@for_each_case(PAIRS, 2)
def test_reference_is_the_oracle(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    for size in SIZES:
        a, b = operands(gemm, a_fmt, b_fmt, size)
        assert_same_bits(multiply(gemm, a, b), oracle_product(gemm, a, b), str(size))


@for_each_case(PAIRS, 1)
def test_public_functions_choose_these_operands(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """``fprop``, ``dgrad`` and ``wgrad`` are the same product, on the backend of the table of backends."""
    a, b = operands(gemm, a_fmt, b_fmt, (9, 7, 50))
    backend = backends.backend(a_fmt, b_fmt, torch.device("cpu"))
    with count_gemms() as counts:
        y = call(gemm, a, b)
    assert counts == {Gemm(gemm, a_fmt.spec, b_fmt.spec, backend): 1}
    assert torch.equal(y, multiply(gemm, a, b, backend=backend))


@each_twice
@pytest.mark.parametrize("dtype", FLOATS, ids=ids)
@pytest.mark.parametrize(
    ("backend", "pair"),
    [("reference", (E4, E4)), *[(of, pair) for of in ("reference", "emulated") for pair in
     ((STRIP, TILE), (MX, MX), (NV, NV_TILE), (NV_ROWS, NV))]],
    ids=lambda each: each if isinstance(each, str) else each[0].spec,
)  # fmt: skip
def test_output_is_rounded_once(backend: str, pair: tuple[Format, Format], dtype: torch.dtype) -> None:
    """Output dtype: the fp32 result plus the bias, in fp32, rounded once; the bias is one of the output dtype."""
    a, b = operands("fprop", *pair, (17, 19, 300), normal)
    bias = torch.randn(19)
    exact = multiply("fprop", a, b, backend=backend)
    assert torch.equal(multiply("fprop", a, b, dtype, backend=backend), exact.to(dtype))
    biased = multiply("fprop", a, b, dtype, bias, backend=backend)
    assert torch.equal(biased, (exact + bias.to(dtype).float()).to(dtype))


def _outs(like: Tensor) -> list[Tensor]:
    """Memory for a result, NaN as yet: contiguous, at odd places, transposed, and rows of a wider matrix."""
    m, n = like.shape
    nan = partial(torch.full, fill_value=torch.nan, dtype=like.dtype, device=like.device)
    odd = nan((m * n + 1,))[1:].view(m, n)
    return [nan((m, n)), odd, nan((n, m)).t(), nan((m, n + 3))[:, 1:-2]]


@each_twice
@pytest.mark.parametrize("size", [(48, 64, 32), (17, 19, 50), (4, 5, 0), (0, 3, 8)])
@pytest.mark.parametrize(
    ("a_fmt", "b_fmt"), [(E5, E4), (STRIP, STRIP), (ROWS, ROWS), (MX, MX), (NV, NV), (IDENTITY, E4)], ids=ids
)
def test_results_are_written_and_added(
    a_fmt: Format, b_fmt: Format, size: tuple[int, int, int], device: torch.device
) -> None:
    """``out`` holds the bits that a product without it returns, or what it held plus them."""
    for gemm, function in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad)):
        a, b = operands(gemm, a_fmt, b_fmt, size, device=device)
        left, right = quantized(a, GEMMS[gemm][0]), quantized(b, GEMMS[gemm][1])
        for dtype, grad in ((torch.float32, False), (torch.bfloat16, False), (torch.float32, True)):
            with torch.set_grad_enabled(grad):
                expected = function(left, right, out_dtype=dtype)
                for out in _outs(expected):
                    assert function(left, right, out_dtype=dtype, out=out) is out
                    assert torch.equal(out, expected)
                    out.normal_()
                    total = out + expected
                    assert function(left, right, out_dtype=dtype, out=out, accumulate=True) is out
                    assert torch.equal(out, total)


def test_results_are_written_and_added_in_compiled_code(fresh_compiler: None) -> None:
    a, b = operands("wgrad", E5, E4, (17, 19, 50))
    dy, x = Quantized(None, a), Quantized(None, b)
    expected = wgrad(dy, x, out_dtype=torch.float32)
    for accumulate in (False, True):
        out = torch.randn(17, 19)
        wanted = out + expected if accumulate else expected
        run = torch.compile(partial(wgrad, out_dtype=torch.float32), fullgraph=True, backend="aot_eager")
        assert torch.equal(run(dy, x, out=out, accumulate=accumulate), wanted)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("wrong", [{"size": (18, 19)}, {"dtype": torch.bfloat16}, {"device": "meta"}])
def test_wrong_memory_for_a_result(wrong: dict[str, Any]) -> None:
    a, b = operands("wgrad", E5, E4, (17, 19, 50))
    out = torch.zeros(**({"size": (17, 19)} | wrong))
    with pytest.raises(ValueError, match=r"wgrad: out is torch.* the result is torch.float32 \(17, 19\) on cpu"):
        wgrad(Quantized(None, a), Quantized(None, b), out_dtype=torch.float32, out=out)
    with pytest.raises(ValueError, match="accumulate=True adds to out; give it"):
        wgrad(Quantized(None, a), Quantized(None, b), out_dtype=torch.float32, accumulate=True)


@for_each_case(PAIRS[::2], 1)
def test_empty_product_is_zero_or_the_bias(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    for size in [(0, 5, 32), (4, 0, 32), (4, 5, 0), (0, 0, 0)]:
        a, b = operands(gemm, a_fmt, b_fmt, size)
        assert torch.equal(call(gemm, a, b), torch.zeros(size[:2]))
        if gemm == "fprop":
            bias = torch.randn(size[1])
            assert torch.equal(call(gemm, a, b, torch.bfloat16, bias), bias.bfloat16().expand(size[:2]))
        if backends.emulates(a_fmt, b_fmt, torch.device("cpu"))[0]:
            bias = torch.randn(size[1])
            assert torch.equal(multiply(gemm, a, b, backend="emulated"), torch.zeros(size[:2]))
            assert torch.equal(multiply(gemm, a, b, bias=bias, backend="emulated"), bias.expand(size[:2]))


def of_values(values: list[list[float]], element: str, scale: float = 1.0) -> Operand:
    """A per tensor operand of values that the element represents."""
    exact = torch.tensor(values)
    codes = exact.to(ELEMENTS[element].dtype)
    assert torch.equal(codes.float(), exact)
    shape = (exact.shape[0], exact.shape[1])
    return Operand(codes.view(torch.uint8), torch.tensor([scale]), None, Format(element), ROWWISE, shape, torch.float32)


@pytest.mark.parametrize(
    ("elements", "a", "b", "expected"),
    [
        # 2^22 + 2^-2 lies halfway between two fp32 numbers, and 2^-32 more decides; float64 cannot hold the sum.
        (("e5m2", "e5m2"), [2.0**11, 0.5, 2.0**-16], [2.0**11, 0.5, 2.0**-16], 2.0**22 + 0.5),
        (("e5m2", "e5m2"), [2.0**11, 0.5, -(2.0**-16)], [2.0**11, 0.5, 2.0**-16], 2.0**22),
        (("e5m2", "e4m3"), [2.0**15] * 32 + [2.0, 2.0**-16], [2.0**8] * 32 + [8.0, 2.0**-9], 2.0**28 + 32),
        (("e4m3", "e4m3"), [448.0] * 127 + [2.0**-9], [448.0] * 127 + [2.0**-9], 448.0 * 448 * 127),
    ],
)
def test_a_segment_is_rounded_once(elements: tuple[str, str], a: list[float], b: list[float], expected: float) -> None:
    """A sum that is just off the middle between two fp32 numbers goes to the nearer: sums of a segment are exact."""
    y = multiply("fprop", of_values([a], elements[0]), of_values([b], elements[1]))
    assert y.item() == expected


# ---- Native against the reference -----------------------------------------------------------------------------------


def small_integers(shape: tuple[int, int], largest: int, element: str, device: torch.device | str = "cpu") -> Operand:
    """Integers under a scale of a power of two, in the codes of a per tensor format."""
    x = torch.randint(-largest, largest + 1, shape, device=device).float()
    scale = torch.tensor([2.0 ** int(torch.randint(-3, 4, ()))], device=device)
    codes = x.to(ELEMENTS[element].dtype).view(torch.uint8)
    return Operand(codes, scale, None, Format(element), ROWWISE, shape, torch.float32)


NATIVE_SIZES = [(1, 1, 1), (7, 13, 33), (16, 32, 64), (33, 17, 130)]


def test_a_sum_that_float64_does_not_hold_is_rounded_once() -> None:
    """What is lost decides a tie of fp32: halfway between two of its numbers, a little above or below."""
    half, little = 2.0**-24, 2.0**-80
    large = torch.tensor([1 + half, 1 + half, 1 + 3 * half, 1 + half], dtype=torch.float64)
    small = torch.tensor([little, -little, -little, 0.0], dtype=torch.float64)
    found = matmul.reference._rounded_sum([large, small])
    assert found.tolist() == [1 + 2 * half, 1.0, 1 + 2 * half, 1.0]


@each_pair
@pytest.mark.parametrize("dtype", FLOATS, ids=ids)
@pytest.mark.parametrize("pair", PER_TENSOR, ids=lambda pair: f"{pair[0].element}-{pair[1].element}")
@pytest.mark.parametrize("gemm", GEMMS)
def test_native_is_exact_on_integers(gemm: str, pair: tuple[Format, Format], dtype: torch.dtype) -> None:
    """Products and sums of small integers under scales of powers of two lose nothing on the native backend of a CPU.

    Up to 7 * 7 * 130 and a bias of 7: each partial sum is an integer of at most 13 bits times a power of two. Only the
    output rounds, once.
    """
    for m, n, depth in NATIVE_SIZES:
        a_along, b_along = GEMMS[gemm]
        a = small_integers(shape_along(m, depth, a_along), 7, pair[0].element)
        b = small_integers(shape_along(n, depth, b_along), 7, pair[1].element)
        for bias in (None, torch.randint(-7, 8, (n,)).to(dtype)):
            native = multiply(gemm, a, b, dtype, bias, backend="native")
            assert torch.equal(native, multiply(gemm, a, b, dtype, bias)), (m, n, depth, bias is not None)


@each_pair
@pytest.mark.parametrize("dtype", FLOATS, ids=ids)
@pytest.mark.parametrize("pair", PER_TENSOR, ids=lambda pair: f"{pair[0].element}-{pair[1].element}")
@pytest.mark.parametrize("gemm", GEMMS)
def test_native_is_within_fp32_accumulation(gemm: str, pair: tuple[Format, Format], dtype: torch.dtype) -> None:
    """On random operands the native backend of a CPU is as near as fp32 accumulation is (``linear_model.bound``).

    A library may round before it adds the bias, so a biased result may be off by one more rounding of the product.
    """
    for size in NATIVE_SIZES:
        a, b = operands(gemm, *pair, size, normal)
        a64, b64 = (model.values(x, along) for x, along in zip((a, b), GEMMS[gemm], strict=True))
        for bias in (None, torch.randn(size[1]).to(dtype)):
            product = model.product(a64, b64, None if bias is None else bias.double().numpy())
            native = multiply(gemm, a, b, dtype, bias, backend="native")
            model.assert_within(native, product, model.bound(product, dtype), f"{size} bias={bias is not None}")


@each_twice
@pytest.mark.parametrize("pair", [(E4, E4), (E5, E4), (STRIP, TILE), (NV, NV_TILE)], ids=lambda pair: pair[0].spec)
@pytest.mark.parametrize("dtype", FLOATS, ids=ids)
def test_torch_autocast_does_not_reach_inside(dtype: torch.dtype, pair: tuple[Format, Format]) -> None:
    """Under ``torch.autocast`` the product has the bits that it has outside: nothing in it is cast on the way."""
    a, b = operands("fprop", *pair, (30, 40, 48), normal)
    bias = torch.randn(40).to(dtype)
    outside = call("fprop", a, b, dtype, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call("fprop", a, b, dtype, bias), outside)


# ---- Emulated: bf16 products, fp32 sums ------------------------------------------------------------------------------

EMULATED = [pair for pair in [*PAIRS, (STRIP5, STRIP), (STRIP, STRIP5)] if not {STRIP32, TILE32} & set(pair)]


def random_codes(
    fmt: Format, along: int, shape: tuple[int, int], exponents: tuple[int, int], device: torch.device | str = "cpu"
) -> Operand:
    """Small integers as codes, under block scales 2^k with k of the range ``exponents``, amaxes of a power of two."""
    if fmt.packed:  # codes 2, 4 and 6 are the integers 1, 2 and 4, 8 more is the sign
        stored = [-(-size // 2) if dim == along % 2 else size for dim, size in enumerate(shape)]
        halves = [torch.tensor([0, 2, 4, 6, 10, 12])[torch.randint(6, stored)] for _ in range(2)]
        codes = (halves[0] | halves[1] << 4).byte()
        if shape[along] % 2:
            codes.select(along, -1).bitwise_and_(0xF)  # an odd tail is followed by a zero
    else:
        codes = ELEMENTS[fmt.element].encode(torch.randint(-3, 4, shape).float())
    grid = scale_shape(fmt, along, *shape)
    powers = torch.randint(exponents[0], exponents[1] + 1, grid)
    scales = torch.exp2(powers.double()).float()
    amax = None
    if fmt.scale_rule == "e8m0":
        scales = (powers + 127).byte()
    elif fmt.scale_rule == "two_level":
        scales = scales.to(torch.float8_e4m3fn).view(torch.uint8)
        amax = torch.exp2(torch.randint(-3, 4, (shape[1 - along % 2],) if fmt.amax_per_row else (1,)).float())
        amax = amax.to(device)
    return Operand(codes.to(device), scales.to(device), amax, fmt, along, shape, torch.float32)


@for_each_case(EMULATED, 1)
def test_emulated_is_exact_on_integers(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """Integers under powers of two: fp32 holds every partial sum, so emulated and reference have the same bits."""
    for m, n, depth in [(17, 19, 300), (3, 5, 33), (1, 1, 1), (16, 8, 256)]:
        a, b = (
            random_codes(fmt, along, shape_along(size, depth, along), (-2, 2))
            for fmt, along, size in zip((a_fmt, b_fmt), GEMMS[gemm], (m, n), strict=True)
        )
        for dtype in FLOATS:
            assert torch.equal(multiply(gemm, a, b, dtype, backend="emulated"), multiply(gemm, a, b, dtype))


@for_each_case(EMULATED, 1)
def test_emulated_is_within_fp32_accumulation(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """On random operands, aligned and ragged, what it is off the float64 product is what fp32 sums may be off."""
    for size in SIZES:
        a, b = operands(gemm, a_fmt, b_fmt, size)
        a64, b64 = (model.values(x, along) for x, along in zip((a, b), GEMMS[gemm], strict=True))
        for bias in (None, torch.randn(size[1])):
            product = model.product(a64, b64, None if bias is None else bias.double().numpy())
            y = multiply(gemm, a, b, bias=bias, backend="emulated")
            model.assert_within(y, product, model.bound(product, torch.float32), f"{size} bias={bias is not None}")


@each_pair
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("pair", [(MX, MX), (MX, MX_TILE), (MX5, MX), (STRIP, TILE)], ids=lambda pair: pair[0].spec)
@pytest.mark.parametrize("exponents", [(-127, -127), (-127, -117), (110, 118), (124, 127), (-127, -20)], ids=str)
def test_emulated_scales_at_the_ends_of_their_range(
    gemm: str, pair: tuple[Format, Format], exponents: tuple[int, int]
) -> None:
    """Scales that would leave bf16's range, from 2^-127 to 2^127, give what the reference gives; 2^107 apart too.

    The other operand's scales are the inverse, so that the result is of ordinary size.
    """
    inverse = (-min(exponents[1], 126), -min(exponents[1], 126))
    a, b = (
        random_codes(fmt, along, shape_along(size, 70, along), k)
        for fmt, along, size, k in zip(pair, GEMMS[gemm], (9, 11), (exponents, inverse), strict=True)
    )
    if exponents == (-127, -20):  # sums of numbers so far apart are rounded
        product = model.product(*(model.values(x, along) for x, along in zip((a, b), GEMMS[gemm], strict=True)))
        y = multiply(gemm, a, b, backend="emulated")
        model.assert_within(y, product, model.bound(product, torch.float32), str(exponents))
    else:
        y = multiply(gemm, a, b, backend="emulated")
        assert torch.equal(y, multiply(gemm, a, b)) and y.isfinite().all() and y.count_nonzero() > 0


@each_once
@pytest.mark.parametrize("along", [ROWWISE, COLUMNWISE], ids=["row", "column"])
@pytest.mark.parametrize("fmt", [MX, MX5, MX_TILE, STRIP, STRIP5, TILE, MX4, MX6, MX6_WIDE], ids=ids)
def test_bf16_holds_what_is_cast_from_it(fmt: Format, along: int) -> None:
    """Any bits of bf16, NaN, infinities and denormals too: the values of the codes, but for what is beyond bf16."""
    bits = torch.randint(-(2**15), 2**15, (64, 256)).to(torch.int16).view(torch.bfloat16)
    low = torch.randn(64, 256).bfloat16() * torch.randint(-133, -110, (64, 256)).float().exp2()
    for x in (bits, low.bfloat16(), torch.full((33, 70), torch.finfo(torch.bfloat16).max).bfloat16()):
        operand = cast(x, fmt, along)
        outer = x.shape[0] if along == ROWWISE else x.shape[1]
        assert operand.scale_inv is not None
        found = emulated.values(*operand.tensors[:2], None, fmt, operand.dim, along, outer)
        exact = operand.dequantize(torch.float32)
        exact = exact if along == ROWWISE else exact.t()
        found = found[:, : exact.shape[1]]  # a packed operand may end with a zero
        exact = exact.clamp(-emulated.LARGEST, emulated.LARGEST)
        assert torch.equal(found.float().nan_to_num(7.0), exact.nan_to_num(7.0))


def test_emulated_flushes_what_is_2_to_the_124_below_its_row() -> None:
    """Under a scale 2^k below its row's largest, a code c is exact while c 2^-k is a multiple of 2^-133, else flushed.

    The largest scale stands over zeros, so nothing hides the loss; a row without such a scale loses nothing.
    """
    a, b = cast(torch.zeros(2, 64), MX, ROWWISE), cast(torch.eye(64), MX, ROWWISE)
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[:, 32] = 0x01  # 2^-9
    codes[:, 33] = 0x38  # 1
    for below, smallest in [(124, 2.0**-9), (125, 0.0), (133, 0.0)]:
        scales = torch.tensor([[227, 227 - below], [0, 227 - below]], dtype=torch.uint8)  # 227 is 2^100
        a = a._replace(codes=codes, scale_inv=scales)
        y = multiply("fprop", a, b, backend="emulated") * 2.0 ** (below - 100)
        assert y[0, 32] == smallest and y[0, 33] == 1.0, below
        assert y[1, 32] == 2.0**-9 and y[1, 33] == 1.0, below


# ---- Which backend --------------------------------------------------------------------------------------------------

ON_CPU = dict.fromkeys(("FP8 per tensor", "FP8 per tensor, E5M2 gradient", "FP8 rowwise"), "native")


@pytest.mark.parametrize(("name", "a_fmt", "b_fmt"), backends.PAIRS, ids=[name for name, _, _ in backends.PAIRS])
def test_backend_is_that_of_the_capability_table(name: str, a_fmt: Format, b_fmt: Format, device: torch.device) -> None:
    """What runs is what ``supports``, ``emulates`` and ``table`` say, and on a CPU what is written here."""
    a, b = operands("fprop", a_fmt, b_fmt, (16, 32, 256), device=device)
    native, reason = backends.supports(a_fmt, b_fmt, a.codes.device)
    emulates, _ = backends.emulates(a_fmt, b_fmt, a.codes.device)
    chosen = backends.backend(a_fmt, b_fmt, a.codes.device)
    rows = {row.formats: row for row in backends.table(a.codes.device) if row.operation == "scaled product"}
    with count_gemms() as counts:
        call("fprop", a, b)
    assert counts == {Gemm("fprop", a_fmt.spec, b_fmt.spec, chosen): 1}
    assert chosen == ("native" if native else "emulated" if emulates else "reference") == rows[name].backend
    assert reason and reason in rows[name].reason
    if device.type == "cpu":
        assert chosen == ON_CPU.get(name, "reference")


def test_counters_nest_and_stop() -> None:
    a, b = operands("fprop", MX, MX, (2, 3, 32))
    with count_gemms() as outside:
        call("fprop", a, b)
        with count_gemms() as inside:
            call("fprop", a, b)
    call("fprop", a, b)
    assert (outside.total(), inside.total()) == (2, 1)


# ---- What a GEMM refuses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [STRIP, STRIP32, MX, NV, NV_46, NV_ROWS, NV_STOCHASTIC], ids=ids)
def test_wrong_orientation_of_a_square_operand(fmt: Format) -> None:
    """Shapes agree, numbers would not: each GEMM refuses a square operand of strips along the other dim, by name."""
    x = heavy_tailed((64, 64))
    row, column = cast(x, fmt, ROWWISE), cast(x, fmt, COLUMNWISE)
    rowwise, columnwise = Quantized(row, None), Quantized(None, column)
    for left, right, wanted in [(columnwise, rowwise, "rowwise"), (rowwise, columnwise, "rowwise")]:
        with pytest.raises(ValueError, match=f"needs a {wanted} operand"):
            fprop(left, right, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="needs a columnwise operand"):
        dgrad(rowwise, rowwise, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="needs a columnwise operand"):
        wgrad(columnwise, rowwise, out_dtype=torch.float32)
    with pytest.raises(ValueError, match="needs a rowwise operand"):  # the place in the pair does not decide
        fprop(Quantized(column, column), rowwise, out_dtype=torch.float32)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("pair", [(E4, E4), (STRIP, TILE), (NV, NV_TILE)], ids=lambda pair: pair[0].spec)
def test_contracted_dims_must_agree(gemm: str, pair: tuple[Format, Format]) -> None:
    a, _ = operands(gemm, *pair, (4, 6, 32))
    _, b = operands(gemm, *pair, (4, 6, 48))
    with pytest.raises(ValueError, match=rf"{gemm}.*32.*48"):
        call(gemm, a, b)


@pytest.mark.parametrize("pair", [(NV_ROTATED, NV), (NV, NV_ROTATED), (E4, NV_ROTATED)], ids=lambda pair: pair[0].spec)
def test_a_rotation_on_one_side_is_refused(pair: tuple[Format, Format]) -> None:
    """A rotated operand with one that is not would give other numbers, not an error: it raises."""
    a, b = operands("wgrad", *pair, (4, 6, 32))
    with pytest.raises(ValueError, match="rotation"):
        call("wgrad", a, b)


def test_a_rotation_cancels() -> None:
    """A product of rotated operands is that of the matrices: one token in each group survives the rotation exactly."""
    x, dy = torch.zeros(48, 5), torch.zeros(48, 3)
    tokens = torch.tensor([3, 20, 47])  # one in each group of 16
    x[tokens] = torch.tensor([1.0, -2.0, 4.0])[:, None] * 5.25  # 5.25 = 2688 / 512: scales without rounding
    dy[tokens] = torch.tensor([2.0, 4.0, -1.0])[:, None] * 5.25
    y = call("wgrad", cast(dy, NV_ROTATED, COLUMNWISE), cast(x, NV_ROTATED, COLUMNWISE))
    assert torch.equal(y, dy.t() @ x)


# ---- NaN and infinity -----------------------------------------------------------------------------------------------

POISON = {"nan": 0x7F, "negative nan": 0xFF, "inf": 0x7C, "negative inf": 0xFC}


def _poison_cases() -> Iterator[tuple[str, str, Format, Format]]:
    for a, b in [(E4, E4), (E5, E4), (E5, E5), (STRIP, TILE), (MX, MX), (MX5, MX), (E4, NV)]:
        yield from ((backend, gemm, a, b) for backend in ("reference", "emulated") for gemm in ("fprop", "dgrad"))
        if backends.supports(a, b, torch.device("cpu"))[0]:
            yield "native", "fprop", a, b


@pytest.mark.parametrize(("backend", "gemm", "a_fmt", "b_fmt"), list(_poison_cases()), ids=ids)
def test_a_poisoned_code_reaches_its_row_only(backend: str, gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """NaN in one row of A makes that row of the result NaN, infinity not finite; other rows keep their bits."""
    a, b = operands(gemm, a_fmt, b_fmt, (9, 11, 150), normal)
    clean = multiply(gemm, a, b, backend=backend)
    others = torch.arange(9) != 4
    for kind, code in POISON.items():
        if "inf" in kind and a_fmt.element != "e5m2":
            continue
        codes = a.codes.clone()
        codes[4, 137] = code
        dirty = multiply(gemm, a._replace(codes=codes), b, backend=backend)
        assert torch.equal(dirty[others], clean[others]) and clean.isfinite().all()
        assert dirty[4].isnan().all() if "nan" in kind else not dirty[4].isfinite().any(), kind


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("pair", PER_TENSOR, ids=lambda pair: f"{pair[0].element}-{pair[1].element}")
def test_a_poisoned_code_of_the_right_operand_reaches_its_column_only(
    backend: str, pair: tuple[Format, Format]
) -> None:
    """NaN in one row of B makes that column of the result NaN."""
    a, b = operands("fprop", *pair, (9, 11, 150), normal)
    clean = multiply("fprop", a, b, backend=backend)
    codes = b.codes.clone()
    codes[3, 0] = 0x7F
    dirty = multiply("fprop", a, b._replace(codes=codes), backend=backend)
    others = torch.arange(11) != 3
    assert torch.equal(dirty[:, others], clean[:, others]) and dirty[:, 3].isnan().all()


@each_twice
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(
    ("backend", "fmt"),
    [*[("reference", fmt) for fmt in (STRIP32, MX, NV)], *[("emulated", fmt) for fmt in (STRIP, MX, MX5, NV)]],
    ids=ids,
)
def test_a_nan_scale_reaches_its_row_only(backend: str, fmt: Format, gemm: str) -> None:
    """NaN as the scale of one strip (E8M0: code 255) makes its row NaN; other rows keep their bits."""
    a, b = operands(gemm, fmt, fmt, (9, 11, 150), normal)
    clean = multiply(gemm, a, b, backend=backend)
    assert a.scale_inv is not None
    scales = a.scale_inv.clone()
    strip = scales[4] if GEMMS[gemm][0] == ROWWISE else scales[:, 4]
    strip[1] = {"e8m0": 255, "two_level": 0x7F}.get(fmt.scale_rule, float("nan"))
    dirty = multiply(gemm, a._replace(scale_inv=scales), b, backend=backend)
    others = torch.arange(9) != 4
    assert torch.equal(dirty[others], clean[others]) and dirty[4].isnan().all()


# ---- Delayed scaling ------------------------------------------------------------------------------------------------

AMAXES = [0.0, 0.0, float("inf"), float("nan"), 1e-45, 1e-40, 1.2e-38, 3.4028234663852886e38, 1e-3, 2.0, 448.0, 7e4]


class Step(NamedTuple):
    """One of ``DelayedScaling.rules`` and what it says."""

    element: str
    margin: int
    algo: oracle.AmaxAlgo

    @property
    def rule(self) -> str:
        return f"{self.element}/margin={self.margin}/{self.algo}"


@each_twice
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize(
    "step",
    [Step(e, margin, algo) for e in ("e4m3", "e5m2") for margin in (0, 3, -2) for algo in ("max", "most_recent")],  # type: ignore[arg-type]
    ids=lambda step: step.rule,
)
def test_update_is_the_oracle(step: Step, length: int) -> None:
    """Twenty steps of every kind of amax, two histories a call: histories and scales are the oracle's, bit for bit."""
    generator = np.random.default_rng(length)
    histories = [torch.zeros(length, n) for n in (7, 3)]
    scales = [torch.ones(n) for n in (7, 3)]
    for _ in range(20):
        expected = []
        for history, scale in zip(histories, scales, strict=True):
            history[0] = torch.from_numpy(generator.choice(np.float32(AMAXES), history.shape[1]))
            arguments = (history.numpy().copy(), scale.numpy().copy(), oracle.ELEMENTS[step.element].max)
            expected.append(oracle.delayed_update(*arguments, margin=step.margin, algo=step.algo))
        delayed.update_scales_(histories, scales, [step.rule] * 2)
        for history, scale, (rolled, fresh) in zip(histories, scales, expected, strict=True):
            assert_same_bits(history, rolled.astype(np.float32), "history")
            assert_same_bits(scale, fresh.astype(np.float32), "scale")


def test_record_accumulates_the_largest() -> None:
    """Records are the largest finite ones since the update, in the newest row of the named slots and nowhere else."""
    generator = np.random.default_rng(0)
    history = torch.zeros(3, 5)
    history[1:] = 9.0
    expected = np.zeros(5, np.float32)
    for _ in range(30):
        slots = generator.permutation(5)[: generator.integers(1, 6)]
        amaxes = generator.choice(np.float32(AMAXES), len(slots))
        expected[slots] = np.fmax(expected[slots], np.where(np.isfinite(amaxes), amaxes, 0))
        delayed.record_amax_(history, slots.tolist(), [torch.tensor([amax]) for amax in amaxes])
        assert_same_bits(history[0], expected)
    history[0, 2] = float("inf")  # as an older checkpoint may have it
    delayed.record_amax_(history, [2, 2], [torch.tensor([float("inf")]), torch.tensor([1.0])])
    assert history[0, 2] == 1.0 and torch.equal(history[1:], torch.full((2, 5), 9.0))


def test_the_table_of_the_specification() -> None:
    """The worked sequence of docs/numerics.md 6: four steps of history, E4M3, a zero and an infinity on the way."""
    history, scale, inf = torch.zeros(4, 1), torch.ones(1), float("inf")
    steps = [
        (2.0, [0, 0, 0, 2], 224), (8.0, [0, 0, 2, 8], 56), (1.0, [0, 2, 8, 1], 56), (0.0, [0, 2, 8, 1], 56),
        (inf, [0, 2, 8, 1], 56), (4.0, [0, 8, 1, 4], 56),
    ]  # fmt: skip
    for amax, rolled, fresh in steps:
        delayed.record_amax_(history, [0], [torch.tensor([amax])])
        delayed.update_scales_([history], [scale], ["e4m3/margin=0/max"])
        assert history[:, 0].tolist() == rolled and scale.item() == fresh, amax


# ---- The operations as PyTorch sees them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gemm", "a_fmt", "b_fmt"),
    [("fprop", E4, E4), ("dgrad", STRIP, TILE), ("wgrad", NV_ROTATED, NV_ROTATED), ("fprop", MX, MX)],
    ids=ids,
)
def test_opcheck_scaled_mm(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """Schema, fake and AOT dispatch of ``minifloat::scaled_mm`` agree with what it does, with a bias and without."""
    a, b = operands(gemm, a_fmt, b_fmt, (9, 7, 33))
    for bias in (None, torch.randn(7)):
        arguments = matmul.scaled_mm.spelled(*scaled_mm_args(gemm, a, b, torch.bfloat16, bias, False, ""))
        torch.library.opcheck(matmul.scaled_mm.overload, arguments)


def test_opcheck_delayed() -> None:
    """Schemas, mutations included, and fakes of ``record_amax_`` and ``update_scales_`` agree with what they do."""
    recorded = torch.rand(4, 3), [0, 2], [torch.rand(1), torch.rand(1)]
    histories, scales = [torch.rand(4, 3), torch.rand(1, 2)], [torch.rand(3), torch.rand(2)]
    updated = histories, scales, ["e4m3/margin=0/max", "e5m2/margin=1/most_recent"]
    torch.library.opcheck(delayed.record_amax_.overload, delayed.record_amax_.spelled(*recorded))
    torch.library.opcheck(delayed.update_scales_.overload, delayed.update_scales_.spelled(*updated))


# ---- On a GPU -------------------------------------------------------------------------------------------------------

GPU_ROWS = [1, 7, 127, 128, 129, 1000]
GPU_SIDES = [(128, 256), (72, 200), (33, 417)]
GPU_PER_TENSOR = [("fprop", E4, E4), ("dgrad", E5, E4), ("wgrad", E5, E4), ("wgrad", E4, E4), ("fprop", E4, E5)]
GPU_BLOCK = [
    ("fprop", STRIP, TILE), ("dgrad", STRIP, TILE), ("wgrad", STRIP, STRIP), ("fprop", TILE, STRIP),
    ("fprop", STRIP32, TILE32), ("dgrad", STRIP32, TILE32), ("wgrad", STRIP32, STRIP32),
]  # fmt: skip
GPU_NATIVE = [(*case, fast) for case in GPU_PER_TENSOR for fast in (False, True)] + [
    (*case, False) for case in GPU_BLOCK
]
EMULATED_ON_A_GPU = [
    ("fprop", MX, MX), ("dgrad", MX5, MX), ("wgrad", MX, MX), ("fprop", MX, MX_TILE), ("dgrad", MX, MX_TILE),
    ("fprop", NV, NV_TILE), ("dgrad", NV_46, NV_46_TILE), ("wgrad", NV_ROTATED, NV_ROTATED),
    ("fprop", NV_ROWS, NV_TILE), ("dgrad", E4, NV_TILE), ("fprop", E5, E5), ("wgrad", STRIP, MX),
    ("fprop", STRIP5, TILE), ("wgrad", STRIP5, STRIP),
]  # fmt: skip


def needs_native(a: Format, b: Format) -> None:
    """Skips where the GPU does not multiply these natively."""
    supported, reason = backends.supports(a, b, torch.device("cuda", torch.cuda.current_device()))
    if not supported:
        pytest.skip(reason)


def assert_near_reference(
    gemm: str, a: Operand, b: Operand, dtype: torch.dtype, bias: Tensor | None, fast: bool, promote: int | None
) -> None:
    """Native and reference on the same device, within the tensor core's error, fp32 accumulation and one rounding."""
    native = multiply(gemm, a, b, dtype, bias, fast, "native").double()
    exact = multiply(gemm, a, b, torch.float32, None if bias is None else bias.to(dtype)).double()
    a64, b64 = (
        torch.from_numpy(model.values(x, along)).to(native.device) for x, along in zip((a, b), GEMMS[gemm], strict=True)
    )
    depth = a64.shape[1]
    error = tensor_core_error(a64, b64, promote)
    error += (depth + 8) * 2.0**-24 * (a64.abs() @ b64.abs().t() + (0 if bias is None else bias.double().abs()))
    info = torch.finfo(dtype)
    error += 1.01 * ((exact.abs() + error) * info.eps / 2).clamp(min=info.smallest_normal * info.eps)
    worst = ((native - exact).abs() / error).max().item()
    assert worst <= 1, f"{worst:.3g} times the bound"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "gemm", "a_fmt", "b_fmt", "fast"),
    [*[("native", *case) for case in GPU_NATIVE], *[("emulated", *case, False) for case in EMULATED_ON_A_GPU]],
    ids=ids,
)
def test_gpu_is_exact_on_integers(backend: str, gemm: str, a_fmt: Format, b_fmt: Format, fast: bool) -> None:
    """Small integers under powers of two: a scale in the wrong place would show; bias and output round once.

    Sums of at most 3 * 3 * 417 fit the 13 bits that even fast accumulation keeps.
    """
    if backend == "native":
        needs_native(a_fmt, b_fmt)
    for rows in GPU_ROWS:
        for n, depth in GPU_SIDES:
            a, b = (
                random_codes(fmt, along, shape_along(size, depth, along), (-2, 2), "cuda")
                for fmt, along, size in zip((a_fmt, b_fmt), GEMMS[gemm], (rows, n), strict=True)
            )
            for dtype in FLOATS:
                for bias in (None, torch.randint(-7, 8, (n,), device="cuda").to(dtype)):
                    y = multiply(gemm, a, b, dtype, bias, fast, backend)
                    assert torch.equal(y, multiply(gemm, a, b, dtype, bias)), (rows, n, depth, dtype, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("gemm", "a_fmt", "b_fmt", "fast"), GPU_NATIVE, ids=ids)
def test_gpu_native_is_within_its_bound(gemm: str, a_fmt: Format, b_fmt: Format, fast: bool) -> None:
    """Aligned and ragged, within what the accumulator of the tensor cores keeps, of blocks in a segment of 128."""
    needs_native(a_fmt, b_fmt)
    for rows in GPU_ROWS:
        for n, depth in GPU_SIDES:
            a, b = operands(gemm, a_fmt, b_fmt, (rows, n, depth), normal, "cuda")
            for dtype in FLOATS:
                for bias in (None, torch.randn(n, device="cuda").to(dtype)):
                    assert_near_reference(gemm, a, b, dtype, bias, fast, None if fast else 128)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16, 4096, 8192), (256, 256, 16384)], ids=str)
def test_gpu_rows_with_a_bias_of_few_tiles(shape: tuple[int, int, int]) -> None:
    """cuBLASLt has no kernel for these with a bias and fast accumulation."""
    needs_native(ROWS, ROWS)
    a, b = operands("fprop", ROWS, ROWS, shape, normal, "cuda")
    bias = torch.randn(shape[1], device="cuda").bfloat16()
    assert_near_reference("fprop", a, b, torch.bfloat16, bias, True, 128)


@pytest.mark.gpu
@for_each_case([pair for pair in PAIRS if "stochastic" not in pair[0].rounding], 1, ROTATED[:1])
def test_gpu_reference_is_the_oracle(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """The reference gives the same bits on a GPU as the oracle does: the numerics do not depend on the device."""
    for size in SIZES:
        a, b = operands(gemm, a_fmt, b_fmt, size, device="cuda")
        assert_same_bits(multiply(gemm, a, b), oracle_product(gemm, a, b), str(size))


@pytest.mark.gpu
@pytest.mark.parametrize(("a_fmt", "b_fmt"), [(E4, E4), (E5, E4), (STRIP, TILE)], ids=ids)
def test_gpu_poisoned_code_reaches_its_row_only(a_fmt: Format, b_fmt: Format) -> None:
    """NaN in one row of A makes that row NaN on the tensor cores too, and leaves the bits of the others."""
    needs_native(a_fmt, b_fmt)
    a, b = operands("fprop", a_fmt, b_fmt, (129, 72, 200), normal, "cuda")
    clean = multiply("fprop", a, b, backend="native")
    codes = a.codes.clone()
    codes[4, 137] = 0x7F
    dirty = multiply("fprop", a._replace(codes=codes), b, backend="native")
    others = torch.arange(129, device="cuda") != 4
    assert torch.equal(dirty[others], clean[others]) and dirty[4].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("gemm", "a_fmt", "b_fmt"), EMULATED_ON_A_GPU, ids=ids)
def test_gpu_emulated_is_within_its_bound(gemm: str, a_fmt: Format, b_fmt: Format) -> None:
    """Sums in fp32 that the tensor cores may cut off, not round: up to 2^-22 of the magnitude for each addition.

    A tensor core aligns the products of a step and the sum so far to the largest of them and keeps at least 24 bits.
    """
    for rows in GPU_ROWS:
        for n, depth in GPU_SIDES:
            a, b = operands(gemm, a_fmt, b_fmt, (rows, n, depth), heavy_tailed, "cuda")
            product = model.product(*(model.values(x, along) for x, along in zip((a, b), GEMMS[gemm], strict=True)))
            y = multiply(gemm, a, b, backend="emulated")
            model.assert_within(y, product, (depth + 16) * 2.0**-22 * product.magnitude + 1e-38, str((rows, n, depth)))
            limit = (depth + 16) * 2.0**-22 * product.magnitude + 1e-38
            limit = limit + 1.01 * model.rounding(np.abs(product.exact) + limit, torch.bfloat16)
            y = multiply(gemm, a, b, torch.bfloat16, backend="emulated")
            model.assert_within(y, product, limit, f"bf16 {(rows, n, depth)}")


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", GEMMS)
def test_gpu_emulated_rounds_long_sums_once(gemm: str) -> None:
    """Integers whose sums fp32 holds: a library that split the sums and rounded the parts to bf16 would give others."""
    for m, n, depth in ((64, 64, 16384), (128, 256, 65536), (1000, 72, 32768), (16, 4096, 16384)):
        a, b = (
            random_codes(MX, along, shape_along(size, depth, along), (0, 0), "cuda")
            for along, size in zip(GEMMS[gemm], (m, n), strict=True)
        )
        exact = multiply(gemm, a, b, backend="emulated")
        assert torch.equal(multiply(gemm, a, b, torch.bfloat16, backend="emulated"), exact.bfloat16()), (m, n, depth)


@pytest.mark.gpu
@pytest.mark.parametrize("exponents", [(-127, -117), (110, 118), (124, 127)], ids=str)
def test_gpu_emulated_scales_at_the_ends_of_their_range(exponents: tuple[int, int]) -> None:
    """Block scales that bf16 could not hold times their codes: the reference's bits."""
    inverse = (-min(exponents[1], 126), -min(exponents[1], 126))
    a = random_codes(MX, ROWWISE, (129, 256), exponents, "cuda")
    b = random_codes(MX, ROWWISE, (72, 256), inverse, "cuda")
    y = multiply("fprop", a, b, backend="emulated")
    assert torch.equal(y, multiply("fprop", a, b)) and y.isfinite().all() and y.count_nonzero() > 0
