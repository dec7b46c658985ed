"""Tests that the kernels which read codes back give the bits of the reference: values, bf16 operands, transposes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need Triton")

from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, SCALE_RULES, Format
from minifloat.ops.launch import count_launches
from minifloat.ops.matmul import emulated, native
from minifloat.ops.matmul.kernels import TILE as COPY_TILE
from minifloat.ops.matmul.kernels import (
    copy_bytes_kernel,
    copy_scales,
    finish,
    finish_kernel,
    k_major_copy,
    largest_scale_kernel,
    spread,
    values,
)
from minifloat.ops.matmul.reference import UNSCALED, Scales, Values, tensor_factor
from minifloat.ops.quantize import amax_shape, code_shape, reference, scale_shape
from minifloat.ops.quantize.decode import TILE, decode_kernel, dequantize
from tests.helpers.compare import assert_same_bits_or_nan
from tests.helpers.sample import each_once, each_twice
from tests.helpers.triton_interpreter import compile_for

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(1, 1), (17, 129), (130, 70), (64, 128)]
LARGE = [(515, 771), (1024, 2048), (4100, 4112)]
EMPTY = [(0, 64), (5, 0), (0, 0)]
HARD_SCALES = [0.0, 1e-45, 2.0**-149, 2.0**-127, 1.17549435e-38, 3.4028235e38, 2.0**127, torch.inf, torch.nan]


def _formats() -> Iterator[Format]:
    yield from (Format("e4m3"), Format("e5m2", scale_rule="given"))
    for tile in (False, True):
        yield from (Format("e4m3", 32, tile, "e8m0"), Format("e5m2", 128, tile, "pow2"))
    # Blocks that are larger than a program's tile, and small ones.
    yield from (Format("e4m3", 256, scale_rule="pow2"), Format("e4m3", 512, True, "e8m0"), Format("e4m3", 2, True))
    yield from (Format("e4m3", 128), Format("e4m3", 128, True), Format("e4m3", 32, False, "e8m0", "hadamard16"))
    yield from (Format("e4m3", 4, scale_rule="e8m0"), Format("e5m2", 256, scale_rule="fp32", transform="hadamard16"))
    for element in ("e2m1", "e2m3", "e3m2"):
        yield Format(element, 32, scale_rule="e8m0")
    yield Format(amax_per_row=True)
    for block in (2, 16):
        yield Format("e2m1", block, scale_rule="two_level")
        yield Format("e2m1", block, True, "two_level", block_scale_max=256.0)
        yield Format("e2m1", block, scale_rule="two_level", amax_per_row=True)
    yield Format("e2m1", 16, scale_rule="two_level", transform="hadamard16")
    yield Format("e2m1", 128, True, scale_rule="two_level")


CASTS = [
    (fmt, dim)
    for fmt in _formats()
    for dim in (ROWWISE, COLUMNWISE)
    if not (dim == ROWWISE and fmt.transform == "hadamard16")
]
FOR_EACH_CAST = pytest.mark.parametrize(
    ("fmt", "dim"), CASTS, ids=[f"{fmt.spec}-{'row' if dim else 'column'}" for fmt, dim in CASTS]
)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is tested")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """The GPU, or Triton's interpreter where there is none."""
    return torch.device(request.param)


def shapes(device: torch.device) -> list[tuple[int, int]]:
    return [*SHAPES, *(LARGE if device.type == "cuda" else [])]


# ---- operands ----


def hard_floats(shape: tuple[int, ...], spread_out: int) -> Tensor:
    """fp32 of at least 0: powers of two and others from 2^-``spread_out`` to 2^``spread_out``, and a few hard ones."""
    values = torch.randint(-spread_out, spread_out + 1, shape).float().exp2()
    values = torch.where(torch.rand(shape) < 0.5, values, values * (1 + torch.rand(shape)))
    hard = torch.tensor(HARD_SCALES)[torch.randint(len(HARD_SCALES), shape)]
    return torch.where(torch.rand(shape) < 0.05, hard, values)


def operand(fmt: Format, dim: int, rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and amax of which no cast made sense: all codes, scale bytes 0 and 255, denormals, infinities."""
    codes = torch.randint(0, 256, code_shape(fmt, dim, rows, cols), dtype=torch.uint8)
    codes.view(-1)[: min(256, codes.numel())] = torch.arange(256, dtype=torch.uint8)[: codes.numel()]
    codes &= 0xFF if fmt.packed else (1 << fmt.encoding.bits) - 1
    shape = scale_shape(fmt, dim, rows, cols)
    if fmt.scale_dtype == torch.float32:
        return codes, hard_floats(shape, 126 if torch.rand(()) < 0.5 else 6), None
    scales = torch.randint(0, 256, shape, dtype=torch.uint8)
    if fmt.scale_rule == "e8m0":
        scales = torch.where(torch.rand(shape) < 0.9, scales.clamp(100, 160), scales)
        scales.view(-1)[: min(2, scales.numel())] = torch.tensor([0, 255], dtype=torch.uint8)[: scales.numel()]
        return codes, scales, None
    return codes, scales, hard_floats(amax_shape(fmt, dim, rows, cols), 20)


def usual(fmt: Format, scales: Tensor) -> Tensor:
    """Scales without NaN and infinity, which would make NaN or zero of all the rows that they are in."""
    if fmt.scale_rule == "e8m0":
        return scales.clamp(1, 253)
    return scales.nan_to_num(1.0, 1.0).clamp(1e-45, 1e38) if scales.dtype == torch.float32 else scales


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t() if x.dim() == 2 else x


def in_a_larger_one(x: Tensor) -> Tensor:
    """A view whose rows and first element lie at no multiple of anything."""
    if x.dim() == 1:
        return torch.cat([x.new_zeros(1), x])[1:]
    return torch.nn.functional.pad(x, (3, 4, 1, 0))[1:, 3 : 3 + x.shape[1]]


def scattered(x: Tensor) -> Tensor:
    """A view with no dim consecutive."""
    return x.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2] if x.dim() == 2 else x


def assert_dequantizes(
    codes: Tensor, scales: Tensor, amax: Tensor | None, fmt: Format, dim: int, shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    with count_launches() as launches:
        actual = dequantize(codes, scales, amax, fmt.spec, dim, *shape, dtype)
    assert launches == ({"decode_kernel": 1} if actual.numel() else {})
    assert actual.is_contiguous() and actual.device == codes.device
    on_cpu = codes.cpu().contiguous(), scales.cpu().contiguous(), None if amax is None else amax.cpu()
    assert_same_bits_or_nan(actual, reference.dequantize(*on_cpu, fmt, dim, *shape).to(dtype))


# ---- dequantize ----


@FOR_EACH_CAST
def test_dequantize(fmt: Format, dim: int, device: torch.device) -> None:
    for i, (rows, cols) in enumerate(shapes(device)):
        codes, scales, amax = operand(fmt, dim, rows, cols)
        codes, scales, amax = codes.to(device), scales.to(device), None if amax is None else amax.to(device)
        assert_dequantizes(codes, scales, amax, fmt, dim, (rows, cols), DTYPES[i % 3])
        k_major = transposed(codes), transposed(scales)
        assert_dequantizes(*k_major, amax, fmt, dim, (rows, cols), DTYPES[(i + 1) % 3])


@pytest.mark.parametrize("view", [in_a_larger_one, scattered], ids=lambda view: view.__name__)
@pytest.mark.parametrize("fmt", [Format(), Format("e4m3", 32, False, "e8m0"), Format("e2m1", 16, False, "two_level")])
def test_dequantize_of_views(fmt: Format, view: type[Tensor], device: torch.device) -> None:
    for dim in (ROWWISE, COLUMNWISE):
        codes, scales, amax = operand(fmt, dim, 80, 96)
        codes, scales, amax = codes.to(device), scales.to(device), None if amax is None else amax.to(device)
        assert_dequantizes(view(codes), view(scales), amax, fmt, dim, (80, 96), torch.bfloat16)
        k_major = view(codes.t().contiguous()).t(), view(scales.t().contiguous()).t() if fmt.block else scales
        assert_dequantizes(*k_major, amax, fmt, dim, (80, 96), torch.float32)


def test_dequantize_rows_under_amaxes_of_a_view(device: torch.device) -> None:
    fmt = Format("e2m1", 16, scale_rule="two_level", amax_per_row=True)
    codes, scales, amax = operand(fmt, ROWWISE, 20, 64)
    assert amax is not None
    strided = torch.stack([amax, amax * 3], dim=1).to(device)[:, 0]
    assert_dequantizes(codes.to(device), scales.to(device), strided, fmt, ROWWISE, (20, 64), torch.float32)


@pytest.mark.parametrize("rule", ["e8m0", "two_level"])
def test_dequantize_every_code_under_every_scale(rule: str, device: torch.device) -> None:
    fmt = Format("e4m3", 256, False, "e8m0") if rule == "e8m0" else Format("e2m1", 512, False, "two_level")
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    amax = None if rule == "e8m0" else torch.tensor([3.7e-3], device=device)
    assert_dequantizes(codes, scales, amax, fmt, ROWWISE, (256, 256 * (2 if fmt.packed else 1)), torch.float32)


# ---- operands of the emulated product ----


def assert_spreads(
    codes: Tensor, scales: Tensor, amax: Tensor | None, fmt: Format, dim: int, along: int, outer: int
) -> Values:
    with count_launches() as launches:
        actual = spread(codes, scales, amax, fmt, dim, along, outer)
    two = fmt.block and fmt.scale_rule != "two_level"
    assert launches == ({"largest_scale_kernel": 1, "decode_kernel": 1} if two else {"decode_kernel": 1})
    on_cpu = codes.cpu().contiguous(), scales.cpu().contiguous(), None if amax is None else amax.cpu()
    expected = emulated.spread(*on_cpu, fmt, dim, along, outer)
    assert_same_bits_or_nan(actual.codes, expected.codes)
    assert_same_bits_or_nan(actual.factor, expected.factor)
    assert actual.scales is None and actual.divisor == expected.divisor
    return actual


@FOR_EACH_CAST
def test_spread(fmt: Format, dim: int, device: torch.device) -> None:
    for rows, cols in shapes(device):
        codes, scales, amax = operand(fmt, dim, rows, cols)
        amax = None if amax is None else amax.to(device)
        for along in (ROWWISE, COLUMNWISE) if fmt.symmetric else (dim,):
            outer = rows if along == ROWWISE else cols
            assert_spreads(codes.to(device), scales.to(device), amax, fmt, dim, along, outer)
            k_major = transposed(codes).to(device), transposed(usual(fmt, scales)).to(device)
            values = assert_spreads(*k_major, amax, fmt, dim, along, outer).codes
            assert 1 in values.stride()


@pytest.mark.parametrize(
    ("fmt", "dim"), [cast for cast in CASTS if cast[0].block and cast[0].scaling.power_of_two], ids=str
)
def test_values(fmt: Format, dim: int, device: torch.device) -> None:
    """Under scales of powers of two: one pass gives ``emulated.values``, NaN and what is cut included."""
    for rows, cols in shapes(device):
        codes, scales, _ = operand(fmt, dim, rows, cols)
        if scales.dtype == torch.float32:
            scales = torch.randint(-127, 128, scales.shape).float().exp2()
            scales.view(-1)[::5] = torch.nan
        for along in (ROWWISE, COLUMNWISE) if fmt.symmetric else (dim,):
            layout = fmt, dim, along, rows if along == ROWWISE else cols
            expected = emulated.values(codes, scales, None, *layout)
            for given in (codes, scales), (transposed(codes), transposed(scales)):
                with count_launches() as launches:
                    actual = values(given[0].to(device), given[1].to(device), None, *layout)
                assert launches == {"decode_kernel": 1} and 1 in actual.stride()
                assert_same_bits_or_nan(actual, expected)


def test_spread_looks_at_many_scales(device: torch.device) -> None:
    """More than a program looks at in one turn; the largest is in a later one, and NaN in the last of a row."""
    fmt = Format("e4m3", 2, False, "e8m0")
    codes, scales, _ = operand(fmt, ROWWISE, 3, 700)
    scales = scales.clamp(100, 120)
    scales[0, 300], scales[1, 349] = 200, 255
    assert_spreads(codes.to(device), scales.to(device), None, fmt, ROWWISE, ROWWISE, 3)


# ---- the epilogue ----


@each_twice
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_row", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_finish(per_row: tuple[bool, bool], out_dtype: torch.dtype, device: torch.device) -> None:
    for (m, n), divisors in zip(shapes(device), [(1.0, 1.0), (2688.0, 1.0), (1536.0, 2688.0)] * 3, strict=False):
        product = torch.randn(m, n) * torch.randint(-40, 40, (m, n)).float().exp2()
        product.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, 1e-45])[: m * n]
        factors = [hard_floats((size if rows else 1,), 20) for size, rows in zip((m, n), per_row, strict=True)]
        left, right = (Values(product, None, f, d) for f, d in zip(factors, divisors, strict=True))
        for bias in (None, torch.randn(n) * 1e5):
            scaled = product * tensor_factor(left, right)
            expected = (scaled if bias is None else scaled + bias.to(out_dtype).float()).to(out_dtype)
            a, b = (factor.to(device) for factor in factors)
            with count_launches() as launches:
                given = None if bias is None else bias.to(device)
                scales = Scales(a, b, divisors[0] * divisors[1])
                actual = finish(product.to(device), scales, given, out_dtype)
            assert launches == {"finish_kernel": 1} and actual.is_contiguous()
            assert_same_bits_or_nan(actual, expected)
            unscaled = (product if bias is None else product + bias.to(out_dtype).float()).to(out_dtype)
            assert_same_bits_or_nan(finish(product.to(device), UNSCALED, given, out_dtype), unscaled)


def test_finish_nothing(device: torch.device) -> None:
    one = torch.ones(1, device=device)
    for shape in EMPTY:
        actual = finish(torch.empty(shape, device=device), Scales(one, one, 1.0), None, torch.bfloat16)
        assert actual.shape == shape and actual.dtype == torch.bfloat16


# ---- bytes and scales ----


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_copy_scales(fill: float, device: torch.device) -> None:
    """Of any strides, to the beginning of a larger grid; NaN and infinity too."""
    for M, K in ((1, 1), (3, 5), (33, 70), (64, 4)):
        scales = torch.randn(M, K).exp()
        scales.view(-1)[::7] = torch.inf
        for source in (scales.to(device), scales.to(device).t(), scales.to(device)[:, ::2]):
            rows, cols = source.shape[0] + 3, source.shape[1] + 2
            want = torch.full((rows, cols), fill)
            want[: source.shape[0], : source.shape[1]] = source.cpu()
            got = copy_scales(source, rows, cols, fill)
            assert got.is_contiguous() and torch.equal(got.cpu(), want)


@pytest.mark.parametrize("align", [(1, 1), (16, 16), (16, 128)], ids=str)
@pytest.mark.parametrize("along", [ROWWISE, COLUMNWISE], ids=["row", "column"])
def test_k_major_copy(along: int, align: tuple[int, int], device: torch.device) -> None:
    for shape in [*shapes(device), *EMPTY]:
        codes = torch.randint(0, 256, shape, dtype=torch.uint8)
        expected = native.k_major(codes, Format(), along, align).view(torch.uint8)
        for view in (codes, transposed(codes), in_a_larger_one(codes), scattered(codes)):
            with count_launches() as launches:
                actual = k_major_copy(view.to(device), along == COLUMNWISE, align)
            assert launches == ({"copy_bytes_kernel": 1} if actual.numel() else {})
            assert actual.is_contiguous()
            assert_same_bits_or_nan(actual, expected)


# ---- what the compiler makes of them ----


@each_once
@pytest.mark.parametrize("k_major", [False, True], ids=["row_major", "k_major"])
@pytest.mark.parametrize("level", ["none", "largest", "saturated"])
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_decode_compiles_to_wide_accesses(out: torch.dtype, level: str, k_major: bool) -> None:
    compiled = compile_for(
        decode_kernel, torch.uint8, torch.uint8, torch.float32, out, *[7] * 9,
        k_major, False, True, True, ELEMENTS["e4m3"], False, 32, 1, SCALE_RULES["e8m0"], level, 1.0, 0,
        TILE.rows, TILE.cols,
        num_warps=TILE.warps, enable_fp_fusion=False,
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert compiled.spills == 0
    assert not any(inexact in compiled.ptx for inexact in (".ftz", "div.full", "div.approx", "fma."))


@pytest.mark.parametrize(("packed_m", "signs"), [(False, 0), (True, 0), (True, 0xD7E8)])
def test_e2m1_compiles_to_wide_accesses(packed_m: bool, signs: int) -> None:
    block = (16, 1) if packed_m else (1, 16)
    compiled = compile_for(
        decode_kernel, torch.uint8, torch.uint8, torch.float32, torch.bfloat16, *[7] * 9,
        False, False, False, True, ELEMENTS["e2m1"], packed_m, *block,
        SCALE_RULES["two_level"], "amax", 1 / 2688, signs, TILE.rows, TILE.cols,
        num_warps=TILE.warps, enable_fp_fusion=False,
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert compiled.spills == 0 and not any(inexact in compiled.ptx for inexact in (".ftz", "fma."))


@pytest.mark.parametrize("k_major", [False, True], ids=["copy", "transpose"])
def test_copies_of_bytes_compile_to_wide_accesses(k_major: bool) -> None:
    compiled = compile_for(
        copy_bytes_kernel, torch.uint8, torch.uint8, *[7] * 5, k_major, k_major, not k_major, True,
        COPY_TILE.rows, COPY_TILE.cols, num_warps=COPY_TILE.warps,
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert compiled.spills == 0


def test_epilogue_compiles_without_contraction() -> None:
    compiled = compile_for(
        finish_kernel, torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, 7, 7,
        1, 1, 1 / 2688, True, True, 16, 256, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert compiled.spills == 0 and not any(inexact in compiled.ptx for inexact in (".ftz", "fma."))


@pytest.mark.parametrize("scale", ["e8m0", "fp32"])
def test_largest_scale_compiles(scale: str) -> None:
    dtype = torch.uint8 if scale == "e8m0" else torch.float32
    compiled = compile_for(
        largest_scale_kernel, dtype, torch.float32, *[7] * 4, SCALE_RULES[scale], 1, 16, 128, num_warps=4
    )
    assert compiled.spills == 0 and ".ftz" not in compiled.ptx
