"""What sm_100's products of blocks are handed: PyTorch accepts it, and read back it gives the reference's bits.

No machine with such a GPU is at hand. ``torch._scaled_mm_v2`` is replaced by a library that holds its arguments to
PyTorch's own checks of shapes, to those that its CUDA code adds, and computes what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as ways

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat import Linear, backends
from minifloat.formats import Format
from minifloat.formats.elements import E2M1
from minifloat.ops import matmul, tape
from minifloat.ops.matmul import CONTRACTED, Product, _Matrix, native, reference
from minifloat.quantizer import Quantizer
from minifloat.recipe import named
from tests.helpers.compare import assert_same_bits
from tests.helpers.sample import each_twice

MX, E5M2, MX4, E3M2, E2M3 = (Format(e, 32, scale_rule="e8m0") for e in ("e4m3", "e5m2", "e2m1", "e3m2", "e2m3"))
MX_TILE, MX4_TILE = (Format(e, 32, tile=True, scale_rule="e8m0") for e in ("e4m3", "e2m1"))
STRIP, TILE = (Format(block=128, tile=tile, scale_rule="pow2") for tile in (False, True))
NV, NV_TILE = (Format("e2m1", 16, tile=tile, scale_rule="two_level") for tile in (False, True))
NV_256 = Format("e2m1", 16, scale_rule="two_level", block_scale_max=256.0)
NV_ROWS = Format("e2m1", 16, scale_rule="two_level", amax_per_row=True)
PAIRS = {
    "MXFP8": (MX, MX), "MXFP8 tiles": (MX, MX_TILE), "E5M2 by E4M3": (E5M2, MX), "MXFP4": (MX4, MX4_TILE),
    "MXFP6": (E3M2, E2M3), "NVFP4": (NV, NV_TILE), "NVFP4, 256": (NV_256, NV), "NVFP4 by rows": (NV_ROWS, NV),
    "block": (STRIP, TILE), "blocks": (STRIP, STRIP), "tiles": (TILE, TILE), "block by MXFP8": (STRIP, MX),
    "w4a8": (STRIP, MX4), "w4a8 tiles": (STRIP, MX4_TILE),
}  # fmt: skip
SIZES = {"whole": (32, 48, 256), "ragged": (145, 19, 150), "odd": (1, 3, 37)}
OUTPUTS = [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False), (torch.float16, True)]
"""dtype, and whether there is a bias."""


def unswizzle(flat: Tensor, outer: int, blocks: int) -> Tensor:
    """Scales [outer, blocks] from the layout that cuBLAS documents, element by element."""
    across = -(-blocks // 4)
    assert flat.is_contiguous() and flat.numel() == -(-outer // 128) * across * 512
    i, j = torch.arange(outer)[:, None], torch.arange(blocks)[None, :]
    return flat.reshape(-1)[(i // 128 * across + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4]


class Library:
    """Stands for ``torch._scaled_mm_v2`` on sm_100; ``segment``: elements whose products it sums before it scales."""

    def __init__(self, segment: int) -> None:
        self.segment, self.calls = segment, 0

    def __call__(
        self, a: Tensor, b: Tensor, scale_a: Sequence[Tensor], recipe_a: list[int], swizzle_a: list[int],
        scale_b: Sequence[Tensor], recipe_b: list[int], swizzle_b: list[int], bias: Tensor | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        self.calls += 1
        if self.calls in (1, 3):  # with one dtype, and with another
            self.check(a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, dtype)
        values = self.read(a, scale_a[0]), self.read(b.t(), scale_b[0])
        total = reference.scaled_product(*values, self.segment, (a.dtype == b.dtype, False))
        if len(scale_a) > 1:
            total = total * (scale_a[1] * scale_b[1])
        return total.to(dtype)

    @staticmethod
    def check(a: Tensor, b: Tensor, *rest: object) -> None:
        """PyTorch's checks of shapes and strides; then those of ScaledBlas.cpp that it has on a GPU alone."""
        scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, dtype = rest
        with FakeTensorMode():
            a_fake, b_fake, *scales = (
                torch.empty_strided(x.shape, x.stride(), dtype=torch.uint8, device="cuda").view(x.dtype)
                if x.dtype != torch.float32
                else torch.empty(x.shape, device="cuda")
                for x in (a, b, *scale_a, *scale_b)
            )
            levels = len(scale_a)
            result = torch.ops.aten._scaled_mm_v2(
                a_fake, b_fake, scales[:levels], recipe_a, swizzle_a, scales[levels:], recipe_b, swizzle_b, None, dtype
            )
        assert (result.shape, result.dtype) == ((a.shape[0], b.shape[1]), dtype)
        fp4 = a.dtype == torch.float4_e2m1fn_x2
        assert levels == len(recipe_a) == len(recipe_b) == len(swizzle_a) == len(swizzle_b) == len(scale_b)
        assert (a.dtype, b.dtype) != (torch.float8_e5m2,) * 2 and fp4 == (b.dtype == torch.float4_e2m1fn_x2)
        assert (recipe_a[0], scale_a[0].dtype) == ((2, torch.float8_e4m3fn) if fp4 else (3, torch.float8_e8m0fnu))
        assert recipe_a == recipe_b and swizzle_a == swizzle_b == [1, 0][:levels] and recipe_a[1:] == [0][: levels - 1]
        assert not any(size % 16 for size in (*a.shape, *b.shape)) and bias is None
        assert a.is_contiguous() and b.t().is_contiguous() and dtype in (torch.bfloat16, torch.float32)

    def read(self, codes: Tensor, scale: Tensor) -> reference.Values:
        """The operand that codes and swizzled scales are of."""
        one, stored = torch.ones(1), scale.view(torch.uint8)
        if codes.dtype == torch.float4_e2m1fn_x2:
            packed = codes.view(torch.uint8)
            values = E2M1.decode(torch.stack((packed & 0xF, packed >> 4), 2).flatten(1)).double()
            grid = unswizzle(stored, values.shape[0], values.shape[1] // 16).view(torch.float8_e4m3fn)
            return reference.Values(values * grid.double().repeat_interleave(16, 1), None, one, 1.0)
        blocks = codes.shape[1] // 32
        grid = torch.exp2(unswizzle(stored, codes.shape[0], blocks).float() - 127)
        group = self.segment // 32
        for each in grid.split(group, 1):
            assert (each == each[:, :1]).all(), "blocks of a segment differ"
        return reference.Values(codes.float().double(), grid[:, ::group].contiguous(), one, 1.0)


def matrices(gemm: str, pair: tuple[Format, Format], size: tuple[int, int, int]) -> list[_Matrix]:
    """Operands of a product of ``size`` (m, n, depth)."""
    made = []
    for fmt, outer, along in zip(pair, size[:2], CONTRACTED[gemm], strict=True):
        x = torch.randn((outer, size[2]) if along == -1 else (size[2], outer))
        operand = Quantizer(fmt).with_usage(rowwise=along == -1, columnwise=along != -1)(x * torch.randn_like(x).exp())
        codes, scale, amax = operand.any.tensors
        assert scale is not None
        made.append(_Matrix(codes, scale, amax, fmt, operand.any.dim, along, outer))
    return made


def segment_of(pair: tuple[Format, Format]) -> int:
    return min(fmt.segment for fmt in pair)


@each_twice
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gemm", CONTRACTED)
@pytest.mark.parametrize("name", PAIRS)
def test_products(name: str, gemm: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format, orientation, size and output: the reference's bits from what the library is handed."""
    torch.manual_seed(0)
    pair, library = PAIRS[name], Library(segment_of(PAIRS[name]))
    monkeypatch.setattr(torch, "_scaled_mm_v2", library)
    a, b = matrices(gemm, pair, SIZES[size])
    made = Product(gemm, (pair[0].spec, a.dim, a.along), (pair[1].spec, b.dim, b.along), "native", False, True)
    for dtype, biased in OUTPUTS:
        bias = torch.randn(b.outer).to(dtype) if biased else None
        with torch.no_grad():
            got = made(*a[:3], a.outer, *b[:3], b.outer, dtype, bias)
        assert_same_bits(got, matmul._reference(a, b, dtype, bias, False, None))
    out = torch.randn(a.outer, b.outer, dtype=dtype)
    with torch.no_grad():
        added = made(*a[:3], a.outer, *b[:3], b.outer, dtype, bias, out=out.clone(), accumulate=True)
    assert_same_bits(added, out + got)
    assert library.calls == len(OUTPUTS) + 1


@pytest.mark.parametrize("name", ["MXFP8", "MXFP8 tiles", "MXFP6", "NVFP4", "NVFP4 by rows", "block", "w4a8"])
def test_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels hand over the very same; the second call of a shape is a replay."""
    pytest.importorskip("triton")
    from tests.helpers.replay_on_cpu import nothing_else, replay_on_cpu

    pair = PAIRS[name]
    for size, gemm in (("ragged", "wgrad"), ("whole", "dgrad")):
        made = matmul.stepped("native", *pair, True, True)
        for call, (dtype, biased) in ways(range(2), OUTPUTS[:2]):
            a, b = matrices(gemm, pair, SIZES[size])
            bias = torch.randn(b.outer).to(dtype) if biased else None
            with monkeypatch.context() as patch:
                library = Library(segment_of(pair))
                patch.setattr(torch, "_scaled_mm_v2", lambda *args, of=library: tape.opaque(lambda x: of(*x), args))
                want = matmul.stepped("native", *pair, False, True)(a, b, dtype, bias, False, None)
                replay_on_cpu(patch)
                patch.setattr(native, "has_kernels", lambda x: True)
                if call and size == "whole":
                    nothing_else(patch)
                got = made(a, b, dtype, bias, False, None)
            assert_same_bits(got, want)


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4", "mxfp4", "mxfp6", "w4a8"])
def test_linear(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and accumulation of a layer, as the table of backends of such a GPU has them multiplied."""

    def step() -> list[Tensor]:
        torch.manual_seed(0)
        layer = Linear(83, 61, fuse_wgrad_accumulation=True, recipe=named(recipe))
        layer.weight.main_grad = torch.randn(61, 83)
        x = torch.randn(37, 83, requires_grad=True)
        y = layer(x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None and layer.bias is not None and layer.bias.grad is not None
        return [y, x.grad, layer.weight.main_grad, layer.bias.grad]

    want = step()
    assert {backends.backend(*pair, torch.device("cpu")) for _, *pair in named(recipe).pairs} == {"reference"}
    library = Library(128 if recipe in ("block", "nvfp4") else 32)
    monkeypatch.setattr(torch, "_scaled_mm_v2", library)
    monkeypatch.setattr(backends, "_device_facts", lambda device: ((10, 0), (13, 0)))
    monkeypatch.setattr(backends, "choose", backends.choose.__wrapped__)
    monkeypatch.setattr(matmul, "product", matmul.product.__wrapped__)  # none that was prepared before
    if recipe == "w4a8":  # whose wgrad is of strips of 128
        monkeypatch.setattr(library, "segment", 32)
    got = step()
    assert library.calls == 3
    for ours, theirs in zip(got, want, strict=True):
        if recipe == "w4a8":
            torch.testing.assert_close(ours, theirs)
        else:
            assert_same_bits(ours, theirs)
