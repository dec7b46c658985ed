"""Casts that give bf16 values in lieu of codes: those of the reference's codes, bit for bit, and products of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need Triton")

from minifloat import casts, quantizer
from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, SCALE_RULES, Format
from minifloat.ops import matmul
from minifloat.ops.launch import count_launches
from minifloat.ops.matmul import emulated
from minifloat.ops.quantize import gpu, reference
from minifloat.ops.quantize.blocks import CAST
from minifloat.ops.quantize.job import layouts
from minifloat.ops.tiles import SM_90
from minifloat.quantizer import Quantizer
from tests.helpers.compare import assert_same_bits_or_nan
from tests.helpers.replay_on_cpu import replay_on_cpu
from tests.helpers.sample import each_twice
from tests.helpers.triton_interpreter import compile_for

FORMATS = [Format(element, 32, scale_rule="e8m0") for element in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")]
FORMATS.append(Format("e4m3", 64, scale_rule="pow2"))
MX = FORMATS[0]
NV = Format("e2m1", 16, scale_rule="two_level")
ROTATED = replace(NV, transform="hadamard16")
SHAPES = [(1, 1), (33, 70), (64, 128)]
LARGE = [(1000, 520), (4096, 2048)]


@pytest.fixture(autouse=True)
def _kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU take the way of a GPU."""
    monkeypatch.setattr(quantizer, "_casts", {})
    if device.type == "cuda":
        return
    if torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested here, not the interpreted ones")
    monkeypatch.setattr(casts, "can_skip_dispatcher", lambda xs: True)
    replay_on_cpu(monkeypatch)


def any_bits(shape: tuple[int, int], device: torch.device) -> Tensor:
    """bf16 of all exponents, NaN, infinities and denormals too; below them blocks of ordinary numbers."""
    x = torch.randint(-(2**15), 2**15, shape).to(torch.int16).view(torch.bfloat16)
    x[shape[0] // 2 :] = torch.randn(x[shape[0] // 2 :].shape).bfloat16()
    return x.to(device)


def wanted(x: Tensor, fmt: Format, dim: int, value: bool) -> tuple[Tensor, Tensor]:
    """Codes or values, and scales."""
    codes, scales, _ = reference.cast(x.cpu(), None, None, fmt, dim)
    if not value:
        return codes, scales
    values = reference.dequantize(codes, scales, None, fmt, dim, *x.shape)
    return values.clamp(-emulated.LARGEST, emulated.LARGEST).bfloat16(), scales


@each_twice
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.spec)
@pytest.mark.parametrize("as_values", [(True, True), (True, False), (False, True)], ids=str)
def test_values_are_those_of_the_codes(as_values: tuple[bool, bool], fmt: Format, device: torch.device) -> None:
    """Both orientations in one launch, either as values or as codes; each alone; fp16 too, fp32 as codes."""
    for shape in [*SHAPES, *(LARGE if device.type == "cuda" else [])]:
        others = [torch.randn(shape, device=device).to(dtype) for dtype in (torch.float16, torch.float32)]
        for x in (any_bits(shape, device), *(others if shape == SHAPES[1] else [])):
            for dims in ((ROWWISE, COLUMNWISE), *([(ROWWISE,), (COLUMNWISE,)] if all(as_values) else [])):
                chosen = as_values[: len(dims)]
                nothing: list[Any] = [None] * len(dims)
                kinds = [fmt.spec] * len(dims), dims, [False] * len(dims)
                with count_launches() as launches:
                    made = gpu.cast([x] * len(dims), nothing, nothing, *kinds, None, chosen)
                assert launches == {"cast_block_kernel": 1}
                for place, (dim, value) in enumerate(zip(dims, chosen, strict=True)):
                    codes, scales = wanted(x, fmt, dim, value and x.dtype != torch.float32)
                    assert_same_bits_or_nan(made[3 * place], codes)
                    assert_same_bits_or_nan(made[3 * place + 1], scales)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("as_values", [(True, True), (True, False), (False, True)], ids=str)
def test_values_of_nvfp4(as_values: tuple[bool, bool], rounding: Any, device: torch.device) -> None:
    """Codes times the scales of their blocks, of both orientations of one launch; other sizes stay codes."""
    formats = [replace(fmt, rounding=rounding) for fmt in (NV, ROTATED)]
    rng = torch.tensor([12345, 678]) if rounding == "stochastic" else None
    for shape in [(32, 48), (48, 528), (33, 48), (32, 40), *([(1024, 2064)] if device.type == "cuda" else [])]:
        x = any_bits(shape, device)
        specs, dims = [fmt.spec for fmt in formats], (ROWWISE, COLUMNWISE)
        amaxes = gpu.amax([x, x], specs, dims)
        seed = None if rng is None else rng.to(device)
        made = gpu.cast([x, x], amaxes, [seed] * 2, specs, dims, [False] * 2, None, as_values)
        whole = not (shape[0] % 16 or shape[1] % 16)
        for place, (fmt, dim, value) in enumerate(zip(formats, dims, as_values, strict=True)):
            codes, scales, _ = reference.cast(x.cpu(), amaxes[place].cpu(), rng, fmt, dim)
            assert_same_bits_or_nan(made[3 * place + 1], scales)
            if value and whole:
                product = emulated.spread(codes, scales, amaxes[place].cpu(), fmt, dim, dim, shape[dim + 1])
                values = product.codes if dim == ROWWISE else product.codes.t()
                assert_same_bits_or_nan(made[3 * place], values)
                parts = made[3 * place].cpu(), scales, amaxes[place].cpu(), fmt, dim, *shape
                assert_same_bits_or_nan(reference.dequantize(*parts), reference.dequantize(codes, *parts[1:]))
            else:
                assert_same_bits_or_nan(made[3 * place], codes)


def test_what_passes_is_values_what_is_kept_codes(device: torch.device) -> None:
    """Replayed as recorded; other formats, and casts that serve both orientations, are codes as ever."""
    tile = Format("e4m3", 32, tile=True, scale_rule="e8m0")
    quantizers = [Quantizer(MX), Quantizer(FORMATS[2]), Quantizer(tile), Quantizer(Format())]
    for passing in ((), (ROWWISE,), (ROWWISE, COLUMNWISE)):
        prepared = quantizer.casts(quantizers, "cuda" if device.type == "cuda" else "", passing)
        if device.type == "cpu":
            prepared._works[False, None] = gpu.RecordedCasts(prepared.request, as_values=prepared._as_values)
        for _ in range(3):
            xs = [torch.randn(64, 96, device=device).bfloat16() for _ in quantizers]
            for x, own, made in zip(xs, quantizers, prepared(xs), strict=True):
                for dim, operand in zip((ROWWISE, COLUMNWISE), made, strict=True):
                    assert operand is not None
                    value = dim in passing and own.row_format in FORMATS
                    assert operand.codes.dtype == (torch.bfloat16 if value else torch.uint8)
                    assert_same_bits_or_nan(operand.dequantize(), own(x.cpu()).along(dim).dequantize())


@pytest.mark.parametrize("gemm", matmul.CONTRACTED)
@pytest.mark.parametrize("fmt", [MX, FORMATS[2]], ids=lambda fmt: fmt.spec)
def test_products_of_values_are_those_of_codes(fmt: Format, gemm: str, device: torch.device) -> None:
    """In every dtype, with a bias, beside codes of another format; the second call is a replay."""
    contracted = matmul.CONTRACTED[gemm]
    large = [(512, 256, 1024), (2048, 4096, 2048)]  # the latter by the kernel in Gluon
    for m, n, depth in ((17, 19, 70), (16, 32, 48), *(large if device.type == "cuda" else [])):
        for right, both in ((fmt, True), (fmt, False), (NV, False), (NV, True)):
            product: Any = matmul.stepped("emulated", fmt, right, True)
            values: list[Any] = []
            codes: list[Any] = []
            for kind, size, along, value in zip((fmt, right), (m, n), contracted, (True, both), strict=True):
                x = torch.randn((size, depth) if along == ROWWISE else (depth, size), device=device).bfloat16()
                amax = gpu.amax([x], [kind.spec], [along])[0] if kind is NV else None
                for operands, chosen in ((values, value), (codes, False)):
                    made = gpu.cast([x], [amax], [None], [kind.spec], [along], [False], None, [chosen])
                    operands.append(matmul._Matrix(made[0], made[1], amax, kind, along, along, size))
            for dtype, biased in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
                bias = torch.randn(n, device=device) if biased else None
                want = product(*codes, dtype, bias, False, None)
                for _ in range(2):
                    assert torch.equal(product(*values, dtype, bias, False, None), want)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "mxfp6", "nvfp4"])
def test_a_linear_computes_the_same_from_values(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Y, dX and dW have the bits that codes give, and backward saves codes, half of bf16's bytes at most."""
    import minifloat

    weight = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(4, 40, k, device="cuda", dtype=torch.bfloat16) for k in (256, 384))
    results = []
    for values in (True, False):
        monkeypatch.setattr(quantizer, "_casts", {})
        if not values:
            monkeypatch.setattr(gpu, "gives_values", lambda *_: False)
        layer = minifloat.Linear(256, 384, bias=False, recipe=recipe, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            layer.weight.copy_(weight)
        for _ in range(2):
            saved: list[torch.dtype] = []
            own, layer.weight.grad = x.clone().requires_grad_(), None
            torch.manual_seed(0)  # of stochastic rounding

            def pack(each: Tensor, saved: list[torch.dtype] = saved) -> Tensor:
                saved.append(each.dtype)
                return each

            with count_launches() as launches, torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
                y = layer(own)
                y.backward(dy)
            assert torch.bfloat16 not in saved
            kept = 3 if recipe == "nvfp4" else 2  # X and W for backward; NVFP4 casts W once for both orientations
            assert launches["decode_kernel"] == (kept if values else 6)
            results.append((y.detach(), own.grad, layer.weight.grad))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert got is not None and want is not None and torch.equal(got, want)


@pytest.mark.parametrize("as_values", [(True, True), (True, False)], ids=str)
@pytest.mark.parametrize(("element", "shared"), [("e4m3", True), ("e4m3", False), ("e2m1", False)])
def test_compiles_to_wide_stores(element: str, shared: bool, as_values: tuple[bool, bool]) -> None:
    tile = SM_90["cast_mx_shared" if shared else "cast_mx_columnwise"]
    codes = [torch.bfloat16 if value else torch.uint8 for value in as_values]
    tensors = torch.bfloat16, torch.float32, codes[0], torch.uint8, torch.float32, codes[1], torch.uint8
    chosen = layouts(tile, 32, False, as_values) if shared else None
    compiled = compile_for(
        CAST.function_for((chosen,)), *[(each,) * 2 for each in tensors], torch.float32, *[(7, 7)] * 8,
        2, True, True, False, False, 32, False, ELEMENTS[element], Format(element, 32, scale_rule="e8m0").max,
        SCALE_RULES["e8m0"], 0.0, 3.3895313892515355e38, False, *[True] * 3, *tile[:2], chosen,
        num_warps=tile.warps, enable_fp_fusion=False,
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert compiled.spills == 0
    assert not any(inexact in compiled.ptx for inexact in (".ftz", "div.full", "div.approx", "fma."))
