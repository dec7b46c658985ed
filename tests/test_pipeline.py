"""Casts that are replayed from a recording give what the reference gives: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat import quantizer
from minifloat.formats import IDENTITY, Format
from minifloat.kernels import quantize
from minifloat.kernels.launch import Kernel, count_launches
from minifloat.kernels.quantize import pipeline
from minifloat.operand import Quantized
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.recipe import QuantizerRole, named
from tests import triton_interpreter  # noqa: F401

E4M3, E5M2 = Quantizer(Format("e4m3")), Quantizer(Format("e5m2"))
GIVEN = Quantizer(Format("e4m3", scale_rule="given"))
MX, STRIPS = Format(block=32, scale_rule="e8m0"), Format(block=128, scale_rule="pow2")
NV, NV_TILES = Format("e2m1", 16, scale_rule="two_level"), Format("e2m1", 16, tile=True, scale_rule="two_level")
NV_STOCHASTIC = Format("e2m1", 16, scale_rule="two_level", rounding="stochastic")


def of_recipe(name: str) -> list[Quantizer]:
    kinds = ("input", "weight", "grad_output")
    return [named(name).resolve(QuantizerRole("linear", kind, ""))[0] for kind in kinds]


CASES = {name: of_recipe(name) for name in ("current", "delayed", "block", "mxfp8", "nvfp4")} | {
    "MXFP8 | current": [Quantizer(MX, E5M2.row_format), E4M3],
    "current | block": [Quantizer(E4M3.row_format, STRIPS), Quantizer(STRIPS, E5M2.row_format)],
    "two elements": [Quantizer(E4M3.row_format, E5M2.row_format), E5M2],
    "delayed | current": [Quantizer(GIVEN.row_format, E5M2.row_format), GIVEN, E4M3],
    "NVFP4 strips | tiles": [Quantizer(NV, NV_TILES), Quantizer(NV_TILES, NV), Quantizer(MX, NV)],
    "stochastic | nearest": [Quantizer(NV_STOCHASTIC, NV_STOCHASTIC), Quantizer(NV, NV_STOCHASTIC)],
    "identity | current": [Quantizer(IDENTITY, E5M2.row_format), Quantizer(E5M2.row_format, IDENTITY), E4M3],
    "chained": [Quantizer(E4M3.row_format, E5M2.row_format, columnwise_source="rowwise_dequantized"), E4M3],
}


class Interpreted:
    """Stands for a compiled kernel on a CPU: takes addresses, and runs the kernel on what lies there."""

    function = metadata = 0

    def __init__(self, kernel: Kernel, tensors: Any, integers: Any, constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.integers, self.constants, self.warps = kernel, len(integers), constants, warps
        self.like = [
            tuple(each.to("meta") for each in t) if isinstance(t, tuple) else t.to("meta") for t in tensors
        ]  # no recording may hold a tensor, so that this may not either

    def run(self, programs: int, *args: Any) -> None:
        rest = args[8:]  # the grid, the stream, and what Triton's launcher wants
        pointers, integers = rest[: len(self.like)], rest[len(self.like) :][: self.integers]
        assert rest[len(self.like) + self.integers :] == self.constants
        tensors = [
            tuple(map(self._at, like, place)) if isinstance(like, tuple) else self._at(like, place)
            for like, place in zip(self.like, pointers, strict=True)
        ]
        self.kernel._through_jit(programs, tensors, integers, self.constants, self.warps)

    @staticmethod
    def _at(like: Tensor, pointer: int) -> Tensor:
        if not like.numel():
            return torch.empty(0, dtype=like.dtype)
        assert pointer, "no address"
        extent = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
        memory = (ctypes.c_uint8 * (extent * like.itemsize)).from_address(pointer)
        return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


@pytest.fixture(autouse=True)
def _kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU take the way of a GPU: the same layouts in memory, the same calls past the dispatcher."""
    monkeypatch.setattr(quantizer, "_batches", {})
    if device.type == "cuda":
        return
    if torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested here, not the interpreted ones")
    batch = quantizer._batch
    monkeypatch.setattr(quantizer, "_batch", lambda quantizers, on: batch(quantizers, on and "cuda"))
    monkeypatch.setattr(quantizer, "directly", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(Kernel, "compiled", Interpreted)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


def values(device: torch.device, *shapes: tuple[int, int], scale: float = 1.0) -> list[Tensor]:
    """Tensors of quite different amaxes, NaN and zeros among them."""
    xs = [torch.randn(shape, device=device) * scale * 7**i for i, shape in enumerate(shapes)]
    for x in xs:
        x.view(-1)[1:2] = torch.nan
        x.view(-1)[2:40] = 0.0
    return [x.bfloat16() for x in xs]


def replayed(xs: list[Tensor], how: list[Quantizer], amaxes: Any = None, scales: Any = None) -> list[Quantized]:
    with torch.no_grad():
        return cast_all(xs, how, amaxes, scales=scales, gemm_ready=True)


def by_reference(
    xs: list[Tensor], how: list[Quantizer], amaxes: Sequence[Amaxes | None] | None = None, scales: Any = None
) -> list[Quantized]:
    """By the definitions in plain PyTorch. With gradients on, nothing is recorded or replayed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize, "amax", quantize._amax)
        patch.setattr(quantize, "cast", quantize._cast)
        patch.setattr(quantize, "dequantize", quantize._dequantize)
        assert torch.is_grad_enabled()
        return cast_all(xs, how, amaxes, scales=scales, gemm_ready=True)


def assert_same(actual: list[Quantized], expected: list[Quantized]) -> None:
    for got, want in zip(actual, expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert a.layout == b.layout
                assert strides(a.codes) == strides(b.codes)
                for part, other in zip(a[:3], b[:3], strict=True):
                    assert_same_bits(part, other)


def assert_same_bits(a: Any, b: Any) -> None:
    if a is None or b is None:
        assert a is b
        return
    assert a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def strides(x: Tensor) -> list[int]:
    """Those that say where an element is."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def known(how: list[Quantizer]) -> list[Any]:
    """What was recorded for these quantizers: None for what cannot be replayed."""
    requests = quantizer._batch(how, "cuda").requests.values()
    return [recording for request in requests for recording in request.known.values()]


@pytest.fixture
def no_recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """``with no_recording.context() as patch: refuse(patch)``: what is inside must be replayed."""
    yield monkeypatch


def refuse(patch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> Any:
        raise AssertionError("a recording should have been replayed")

    patch.setattr(pipeline, "_step_by_step", never)
