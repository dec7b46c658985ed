"""Tests that a kernel on a CPU computes what it computes on a GPU, feature by feature, and compiles for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need Triton")

import triton
import triton.language as tl

from minifloat.formats import ELEMENTS
from tests.helpers.compare import assert_same_bits_or_nan
from tests.helpers.triton_interpreter import compile_for

LARGEST: tl.constexpr = tl.constexpr(448.0)
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1.17549435e-38, 3.4028235e38, 1.0, -2.5]


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, and there it is the GPU that is tested; the interpreter elsewhere."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def every_bf16(device: torch.device) -> Tensor:
    return torch.arange(2**16, device=device, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def hard_floats(device: torch.device) -> Tensor:
    """fp32 [2**18]: the values of float8, ties between them, their neighbours, random bits, special values."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = torch.cat([codes.view(dtype).float() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)])
    values = values[values.isfinite()].unique()
    values = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor(SPECIAL)])
    neighbours = [values.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf)]
    exact = torch.cat([values, *neighbours])
    random = torch.randint(-(2**31), 2**31, (2**17,)).int().view(torch.float32)
    usual = torch.randn(2**17 - len(exact)) * torch.logspace(-6, 3, 2**17 - len(exact))
    return torch.cat([exact, random, usual]).to(device)


def pairs(device: torch.device, count: int = 4096) -> tuple[Tensor, Tensor]:
    """Two fp32 [4096]: each special value against each, then random bits."""
    special = torch.tensor(SPECIAL)
    a, b = torch.randint(-(2**31), 2**31, (2, count)).int().view(torch.float32)
    a[: len(special) ** 2], b[: len(special) ** 2] = torch.cartesian_prod(special, special).unbind(1)
    return a.to(device), b.to(device)


def nan_like(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


# ---- conversions ----


@triton.jit
def convert(source, target, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + i, mask=i < n, other=0.0)
    tl.store(target + i, value.to(target.dtype.element_ty), mask=i < n)


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    target = torch.full(x.shape, torch.nan, device=x.device).to(dtype)
    convert[(triton.cdiv(x.numel(), 4096),)](x, target, x.numel(), BLOCK=4096)
    return target


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["bfloat16", "float32", "float16"])
def test_to_float8(source: str, element: str, device: torch.device) -> None:
    x = every_bf16(device) if source == "bfloat16" else hard_floats(device).to(getattr(torch, source))
    codes = converted(x, torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2).view(torch.uint8)
    assert_same_bits_or_nan(codes, ELEMENTS[element].encode(x.float()))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_from_float8(source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
    x = torch.arange(256, dtype=torch.uint8, device=device).view(source)
    assert_same_bits_or_nan(converted(x, target), x.float().to(target))


@triton.jit
def bitcasts(codes, floats, values, words, signed, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + i, mask=i < n, other=0)
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    tl.store(values + i, value, mask=i < n)
    tl.store(codes + i, value.to(tl.float8e4nv).to(tl.uint8, bitcast=True) ^ 0x80, mask=i < n)
    x = tl.load(floats + i, mask=i < n, other=0.0)
    tl.store(words + i, (x.to(tl.uint32, bitcast=True) >> 23) & 0xFF, mask=i < n)
    tl.store(signed + i, ((x.to(tl.int32, bitcast=True) >> 23) << 23).to(tl.float32, bitcast=True), mask=i < n)


@triton.jit
def add_bf16(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(x + i))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a limit of the interpreter")
def test_arithmetic_on_bf16_is_refused(device: torch.device) -> None:
    x = torch.ones(16, dtype=torch.bfloat16, device=device)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="convert to tl"):
        add_bf16[(1,)](x, x, BLOCK=16)


# ---- arithmetic ----


@triton.jit
def exact(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + i, mask=i < n), tl.load(b + i, mask=i < n)
    tl.store(out + i, tl.div_rn(x, y), mask=i < n)
    tl.store(out + n + i, tl.sqrt_rn(x), mask=i < n)
    tl.store(out + 2 * n + i, x * y, mask=i < n)
    tl.store(out + 3 * n + i, tl.math.div_rn(1.0, y), mask=i < n)
    tl.store(out + 4 * n + i, tl.abs(x) - tl.floor(y), mask=i < n)


def fused(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x * y + z with one rounding, of exact rational numbers."""
    from fractions import Fraction

    def one(a: float, b: float, c: float) -> float:
        exactly = Fraction(a) * Fraction(b) + Fraction(c)
        nearest = np.float32(float(exactly))
        around = [nearest, *(np.nextafter(nearest, np.float32(end)) for end in (-np.inf, np.inf))]
        finite = [each for each in around if np.isfinite(each)]
        key = lambda each: (abs(Fraction(float(each)) - exactly), each.view(np.int32) & 1)  # noqa: E731
        return float(min(finite, key=key))

    return torch.tensor([one(*each) for each in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)])


def test_exact_arithmetic(device: torch.device) -> None:
    a, b = pairs(device)
    out = nan_like(5, len(a), device=device)
    exact[(16,)](a, b, out, len(a), BLOCK=256, enable_fp_fusion=False)
    assert_same_bits_or_nan(out[0], a / b)
    assert_same_bits_or_nan(
        out[1], a.double().sqrt().float()
    )  # PyTorch's fp32 square root on a CPU is not always the nearest
    assert_same_bits_or_nan(out[2], a * b)  # denormals are kept
    assert_same_bits_or_nan(out[3], b.reciprocal())
    denormal = b.abs() < torch.finfo(torch.float32).smallest_normal
    assert_same_bits_or_nan(out[4], a.abs() - b.masked_fill(denormal, 0).floor())


@triton.jit
def multiply_add(a, b, c, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


def test_fma(device: torch.device) -> None:
    """Near-cancellation, where two roundings show, and denormal results, where float64 rounds twice."""
    a, b = (torch.randn(2048) * torch.tensor([1.0, 1e-19]).repeat_interleave(1024) for _ in range(2))
    c = -(a * b) * (1 + torch.randint(-2, 3, (2048,)) * 2**-23)
    c[::4] = 2.0 ** torch.randint(-130, 3, (512,)).float()
    out = nan_like(2048, device=device)
    multiply_add[(1,)](a.to(device), b.to(device), c.to(device), out, BLOCK=2048)
    expected = fused(a, b, c)
    assert_same_bits_or_nan(out, expected.to(device))
    assert (expected != a * b + c).any()


@triton.jit
def orders(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + i, mask=i < n, other=0.0), tl.load(b + i, mask=i < n, other=0.0)
    tl.store(out + i, tl.maximum(x, y), mask=i < n)
    tl.store(out + n + i, tl.minimum(x, y), mask=i < n)
    tl.store(out + 2 * n + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL), mask=i < n)
    tl.store(out + 3 * n + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL), mask=i < n)
    tl.store(out + 4 * n + i, tl.clamp(x, -1.0, LARGEST), mask=i < n)
    tl.store(out + 5 * n + i, tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL), mask=i < n)
    tl.store(out + 6 * n + i, tl.where(x > y, x, y), mask=i < n)
    tl.store(out + 7 * n + i, tl.clamp(x, -LARGEST, LARGEST), mask=i < n)


def test_minimum_and_maximum(device: torch.device) -> None:
    a, b = pairs(device)
    out = nan_like(8, len(a), device=device)
    orders[(4,)](a, b, out, len(a), BLOCK=1024)
    zeros = (a == 0) & (b == 0)  # PyTorch does not order -0 and +0, PTX does
    larger, smaller = torch.where(zeros, a + b, a.maximum(b)), torch.where(zeros, -(-a - b), a.minimum(b))
    assert_same_bits_or_nan(out[0], torch.where(a.isnan(), b, torch.where(b.isnan(), a, larger)))
    assert_same_bits_or_nan(out[1], torch.where(a.isnan(), b, torch.where(b.isnan(), a, smaller)))
    assert_same_bits_or_nan(out[2], larger)
    assert_same_bits_or_nan(out[3], smaller)
    assert_same_bits_or_nan(out[4], a.nan_to_num(-1.0, torch.inf, -torch.inf).clamp(-1, 448))
    assert_same_bits_or_nan(out[5], a.clamp(-448, 448))
    assert_same_bits_or_nan(out[6], torch.where(a > b, a, b))
    assert_same_bits_or_nan(out[7], torch.where(a.isnan(), torch.full_like(a, 448).copysign(a), a.clamp(-448, 448)))


@triton.jit
def integers(a, b, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y = tl.load(a + i, mask=i < n, other=0), tl.load(b + i, mask=i < n, other=0)
    unsigned = x.to(tl.uint32, bitcast=True)
    tl.store(out + i, tl.umulhi(unsigned, y.to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True), mask=i < n)
    tl.store(out + n + i, tl.umulhi(x, y), mask=i < n)
    tl.store(out + 2 * n + i, (unsigned * 0xD2511F53).to(tl.int32, bitcast=True), mask=i < n)
    tl.store(out + 3 * n + i, x + y, mask=i < n)
    tl.store(out + 4 * n + i, x // 7, mask=i < n)
    tl.store(out + 5 * n + i, x % 7, mask=i < n)


@triton.jit
def to_integers(x, words, unsigned, codes, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(words + i, value.to(tl.int32), mask=i < n)
    tl.store(unsigned + i, value.to(tl.uint32).to(tl.int32, bitcast=True), mask=i < n)
    tl.store(codes + i, value.to(tl.uint8), mask=i < n)


def test_to_integers_saturates(device: torch.device) -> None:
    x = torch.cat([torch.tensor([*SPECIAL, 2.7, -2.7, 255.9, 259.5, 4e9, 3e9, -3e9]), torch.randn(50) * 1e9]).to(device)
    words, unsigned = (torch.full((len(x),), -1, dtype=torch.int32, device=device) for _ in range(2))
    codes = torch.full((len(x),), 255, dtype=torch.uint8, device=device)
    to_integers[(1,)](x, words, unsigned, codes, len(x), BLOCK=128)
    whole = x.double().nan_to_num(0.0).trunc()
    assert_same_bits_or_nan(words, whole.clamp(-(2**31), 2**31 - 1).long().int())
    assert_same_bits_or_nan(unsigned, whole.clamp(0, 2**32 - 1).long().int())
    assert_same_bits_or_nan(codes, (whole.clamp(0, 2**16 - 1).long() & 0xFF).to(torch.uint8))


# ---- shapes and reductions ----


@triton.jit
def reductions(x, rows, columns, least, total, everything, index, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    tile = tl.load(x + m[:, None] * N + n[None, :])
    tl.store(rows + m, tl.max(tile, axis=1))
    tl.store(columns + n[None, :], tl.max(tl.abs(tile), axis=0, keep_dims=True))
    tl.store(least + m, tile.min(axis=1))
    tl.store(total + m, tl.sum((tile == tile).to(tl.int32), axis=1))
    tl.store(everything, tl.max(tile))
    tl.store(index + m, tl.argmax(tile, axis=1))


def test_reductions_drop_nan(device: torch.device) -> None:
    x = torch.randn(16, 32, device=device)
    x[torch.rand(16, 32, device=device) < 0.3] = torch.nan
    x[3], x[4, :5] = torch.nan, torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 2.0], device=device)
    rows, least, everything = (nan_like(size, device=device) for size in (16, 16, 1))
    columns = nan_like(32, device=device)
    total, index = (torch.full((16,), -1, dtype=torch.int32, device=device) for _ in range(2))
    reductions[(1,)](x, rows, columns, least, total, everything, index, M=16, N=32)
    high, low = x.nan_to_num(-torch.inf, torch.inf, -torch.inf), x.nan_to_num(torch.inf, torch.inf, -torch.inf)
    none = x.isnan().all(1)
    assert_same_bits_or_nan(rows, high.amax(1).masked_fill(none, torch.nan))  # of nothing but NaN: NaN
    assert_same_bits_or_nan(least, low.amin(1).masked_fill(none, torch.nan))
    assert_same_bits_or_nan(columns, x.abs().nan_to_num(0, torch.inf).amax(0))
    assert_same_bits_or_nan(everything, high.amax().reshape(1))
    assert_same_bits_or_nan(total, (~x.isnan()).sum(1).int())
    whole = ~x.isnan().any(1)
    assert_same_bits_or_nan(index[whole], x[whole].argmax(1).int())


@triton.jit
def shapes(x, halves, packed, blocks, turned, M: tl.constexpr, N: tl.constexpr):
    HALF: tl.constexpr = N // 2
    m, n, h = tl.arange(0, M), tl.arange(0, N), tl.arange(0, HALF)
    tile = tl.load(x + m[:, None] * N + n[None, :])
    even, odd = tl.split(tl.reshape(tile, (M, HALF, 2)))
    tl.store(halves + m[:, None] * HALF + h[None, :], even | (odd << 4))
    tl.store(packed + m[:, None] * N + n[None, :], tl.interleave(odd, even))
    joined = tl.reshape(tl.join(even, odd), (M, N))
    tl.store(turned + n[:, None] * M + m[None, :], tl.trans(joined))
    parts = tl.permute(tl.reshape(joined, (M // 4, 4, HALF, 2)), (0, 2, 1, 3))
    tl.store(blocks + tl.arange(0, M * N), tl.reshape(parts, (M * N,)))


@triton.jit
def dot(a, b, out, K, SIZE: tl.constexpr):
    m, k = tl.arange(0, SIZE), tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), dtype=tl.float32)
    for start in range(0, K, SIZE):  # K is known at run time only
        inside = k + start < K
        left = tl.load(a + m[:, None] * K + (k + start)[None, :], mask=inside[None, :], other=0.0)
        right = tl.load(b + m[:, None] * K + (k + start)[None, :], mask=inside[None, :], other=0.0)
        total = tl.dot(left, tl.trans(right), total)
    tl.store(out + m[:, None] * SIZE + m[None, :], total)


# ---- arguments, pointers, programs ----


@triton.jit(do_not_specialize=["start", "sizes"])
def grouped(sources, targets, sizes, start, scale, flip: tl.int1, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    tl.static_assert(BLOCK % 16 == 0)
    program = tl.program_id(0)
    source, target, size = sources[0], targets[0], sizes[0]
    first = 0
    for k in tl.static_range(1, COUNT):
        first_of_k = start * k
        source = tl.where(program >= first_of_k, sources[k], source)
        target = tl.where(program >= first_of_k, targets[k], target)
        size = tl.where(program >= first_of_k, sizes[k], size)
        first = tl.where(program >= first_of_k, first_of_k, first)
    i = tl.multiple_of((program - first) * BLOCK, 16) + tl.arange(0, BLOCK)
    value = tl.load(source + i, mask=i < size, other=0.0) * scale
    if flip:
        value = -value
    tl.store(target + i, value + tl.num_programs(0) + tl.cdiv(size, BLOCK), mask=i < size)


@triton.jit
def scaled(x, out, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) * scale)


@triton.jit
def atomics(x, floats, integers, counts, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    largest = tl.max(tl.abs(value))
    tl.atomic_max(floats, largest)
    tl.atomic_max(integers, largest.to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_max(floats + 1 + i % 2, value, mask=i < n)
    tl.atomic_add(counts, 1)


@triton.jit
def copy_unmasked(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i), mask=i < n)


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a GPU is not checked")
def test_access_outside_tensors_is_refused(device: torch.device) -> None:
    x, out = torch.zeros(64, device=device), nan_like(64, device=device)
    copy_unmasked[(1,)](x, out, 64, BLOCK=64)
    for source, target, count in ((x[:63], out, 63), (x[1:], out, 63), (x, out[:63], 64)):
        with pytest.raises(triton.runtime.errors.InterpreterError, match="1 of 64 addresses are outside"):
            copy_unmasked[(1,)](source, target, count, BLOCK=64)


# ---- compilation, and everything else in the process ----

F32, I32, U8 = torch.float32, torch.int32, torch.uint8
BLOCKS: dict[str, int] = {"M": 16, "N": 32}
LAUNCHES: list[Any] = [
    (convert, (F32, torch.float8_e4m3fn, 1000), {"BLOCK": 4096}),
    (bitcasts, (U8, F32, F32, I32, F32, 256), {"BLOCK": 256}),
    (exact, (F32, F32, F32, 1000), {"BLOCK": 256, "enable_fp_fusion": False}),
    (multiply_add, (F32, F32, F32, F32), {"BLOCK": 256}),
    (orders, (F32, F32, F32, 1000), {"BLOCK": 256}),
    (to_integers, (F32, I32, I32, U8, 1000), {"BLOCK": 256}),
    (integers, (I32, I32, I32, 1000), {"BLOCK": 256}),
    (reductions, (F32, F32, F32, F32, I32, F32, I32), BLOCKS),
    (shapes, (U8, U8, U8, U8, U8), BLOCKS),
    (dot, (torch.bfloat16, torch.bfloat16, F32, 80), {"SIZE": 32}),
    (dot, (torch.float8_e4m3fn, torch.float8_e5m2, F32, 80), {"SIZE": 32}),
    (scaled, (F32, F32, 0.5), {"BLOCK": 128}),
    (atomics, (F32, F32, I32, I32, 1000), {"BLOCK": 128}),
    (grouped, ((F32, F32), (F32, F32), (5, 7), 4, 0.5, True), {"BLOCK": 16, "COUNT": 2}),
]


@pytest.mark.parametrize(("kernel", "args", "options"), LAUNCHES)
def test_compiles_for_sm90(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    compiled = compile_for(kernel, *args, **options)
    assert compiled.spills == 0 and 0 < compiled.registers < 256 and ".target sm_90a" in compiled.ptx


def test_inductor_still_compiles() -> None:
    """In this process, whose kernels were interpreted, and where Triton's library must be as it was."""

    def layer(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:]).relu().sum(0)

    before = tl.load, tl.core.load, tl.tensor.__add__, triton.JITFunction.__call__
    x = torch.randn(8, 16)
    scaled[(1,)](x, torch.empty(16), 2.0, BLOCK=16)
    assert before == (tl.load, tl.core.load, tl.tensor.__add__, triton.JITFunction.__call__)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))
