"""Products that cuBLASLt itself adds on a GPU: the bits of PyTorch's calls; graphs, streams, threads, devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat import Linear, backends
from minifloat.ops.matmul import cublaslt, native
from minifloat.ops.matmul.cublaslt import ONE, STRIPS, add
from tests.helpers.compare import assert_same_bits
from tests.helpers.fp8_products import PAIRS, operands

pytestmark = pytest.mark.gpu

SHAPES = [
    (16, 16, 16), (1, 16, 32), (7, 48, 80), (64, 256, 256), (128, 768, 3072), (16, 4096, 8192), (256, 256, 16384),
    (1000, 1008, 1040), (768, 768, 8192), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 2048, 8192),
    (512, 512, 32768), (16, 16, 65536),
]  # fmt: skip
"""Few tiles and many, deep and shallow: kernels of all sizes, some of which split the depth."""


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not backends.cublaslt(torch.cuda.current_device()):
        pytest.skip("PyTorch's call multiplies on this device")


@contextmanager
def pytorch_alone() -> Iterator[None]:
    """Every product is PyTorch's call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda: None)
        yield


def by_pytorch(sides: tuple[Tensor, Tensor, Tensor, Tensor], scaled: int = ONE, fast: bool = False) -> Tensor:
    """The product in fp32."""
    if scaled == ONE:
        return native.per_tensor(*sides, torch.float32, None, fast)
    return native.block128(False, False, sides, torch.float32)


@pytest.mark.parametrize(
    ("scaled", "pair", "fast"),
    [(STRIPS, "e4m3", False), *((ONE, pair, fast) for pair in PAIRS for fast in (False, True))],
)
def test_adds_the_bits_of_product_and_addition(scaled: int, pair: str, fast: bool) -> None:
    """To numbers of every size; by a kernel that is new, then kept. All shapes are tried before any is reported."""
    different = {}
    for m, n, k in SHAPES:
        if scaled == STRIPS and (k % 128 or m % 16):
            continue  # which native.py pads
        sides = operands(m, n, k, scaled, PAIRS[pair], "cuda")
        product = by_pytorch(sides, scaled, fast)
        alike = product.std() * torch.randn_like(product)
        wide = alike * torch.exp2(20 * torch.rand_like(product) - 10)
        for name, held in (("zeros", torch.zeros_like(product)), ("alike", alike), ("wide", wide)):
            want = held + product
            assert add(*sides, scaled, fast, held), (m, n, k)
            if not torch.equal(held, want):
                different[m, n, k, name] = f"{(held != want).float().mean():.2%}"
    assert not different, different


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block"])
def test_main_grad(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches of a layer into ``main_grad``, as by PyTorch's calls; scales of rows are multiplied by after."""
    added: list[bool] = []

    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        layer = Linear(
            768, 512, recipe=recipe, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device="cuda"
        )
        layer.weight.main_grad = torch.randn(512, 768, device="cuda")
        for rows in (1024, 1000):
            x = torch.randn(rows, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            layer(x).backward(torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16))
        assert x.grad is not None and layer.bias.grad is not None
        return [layer.weight.main_grad, x.grad, layer.bias.grad]

    def seen(*args: Any) -> bool:
        added.append(add(*args))
        return added[-1]

    with pytorch_alone():
        want = grads()
    monkeypatch.setattr(cublaslt, "add", seen)
    for got, expected in zip(grads(), want, strict=True):
        assert_same_bits(got, expected)
    assert added == ([] if recipe == "rowwise" else [True, True])


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("shape", [(64, 256, 256), (256, 256, 16384), (16, 4096, 8192), (1024, 1024, 1024)])
def test_graph(shape: tuple[int, int, int], new: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays read what lies where it did, and what eager calls do in between is nothing to them."""
    if new:  # described while the graph is captured
        monkeypatch.setattr(cublaslt, "_local", cublaslt._Local())
    sides = operands(*shape, device="cuda")
    first, second = torch.zeros(2, *shape[:2], device="cuda")
    if not new:
        assert add(*sides, ONE, False, first)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        assert add(*sides, ONE, False, first) and add(*sides, ONE, False, second)
    for _ in range(3):
        fresh = operands(*shape, device="cuda")
        for kept, value in zip(sides, fresh, strict=True):
            kept.copy_(value)
        first.fill_(0.0)
        second.fill_(0.0)
        churn = [torch.full_like(first, float("nan")) for _ in range(4)]
        want = by_pytorch(fresh)
        assert add(*operands(*shape, device="cuda"), ONE, False, torch.zeros_like(first))
        graph.replay()
        assert_same_bits(first, want)
        assert_same_bits(second, want)
        del churn


def test_streams() -> None:
    """Sums of one kind on several streams at a time, which may share no workspace."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    for shape in ((256, 256, 16384), (16, 4096, 8192), (512, 512, 512)):
        sides = [operands(*shape, device="cuda") for _ in streams]
        want = [by_pytorch(each) for each in sides]
        got = [torch.zeros(20, *shape[:2], device="cuda") for _ in streams]
        torch.cuda.synchronize()
        for repeat in range(20):
            for which, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    assert add(*sides[which], ONE, False, got[which][repeat])
        torch.cuda.synchronize()
        for results, expected in zip(got, want, strict=True):
            assert_same_bits(results, expected.expand_as(results))


def test_threads() -> None:
    """Threads add at a time, on streams of their own and on one, and end."""
    shape, wrong = (256, 256, 4096), []
    sides = [operands(*shape, device="cuda") for _ in range(4)]
    want = [by_pytorch(each) for each in sides]
    torch.cuda.synchronize()

    def work(which: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for _ in range(200):
                got = torch.zeros_like(want[which])
                if not add(*sides[which], ONE, False, got) or not torch.equal(got, want[which]):
                    wrong.append(which)

    for one_stream in (True, False):
        threads = [
            threading.Thread(
                target=work, args=(which, torch.cuda.default_stream() if one_stream else torch.cuda.Stream())
            )
            for which in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_memory() -> None:
    """Descriptions and kernels take none of the GPU's, of any number of kinds."""
    out = torch.zeros(cublaslt.MOST_KINDS + 200, 256, device="cuda")
    a, a_scale, b, b_scale = operands(len(out), 256, 512, device="cuda")
    assert add(a, a_scale, b, b_scale, ONE, False, out)
    before = torch.cuda.memory_allocated()
    for m in range(1, len(out)):
        assert add(a[:m], a_scale, b, b_scale, ONE, False, out[:m])
        assert len(cublaslt._local.sums) <= cublaslt.MOST_KINDS
    assert torch.cuda.memory_allocated() <= before


def test_errors_are_pytorchs() -> None:
    """What does not fit is left to PyTorch's call, which says why."""
    (a, a_scale, b, b_scale), out = operands(16, 32, 48, device="cuda"), torch.zeros(16, 32, device="cuda")
    for wrong in ((a, a_scale, b, b_scale.cpu()), (a, a_scale.double(), b, b_scale), (a, a_scale, b[:, :32], b_scale)):
        with pytest.raises((RuntimeError, ValueError)):
            native.per_tensor(*wrong, torch.float32, None, False, out, True)
    assert not out.any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices() -> None:
    """Each in turn; on another device than the current one PyTorch's call multiplies."""
    for index in (1, 0, 1, 0):
        device, other = torch.device("cuda", index), torch.device("cuda", 1 - index)
        a, a_scale, b, b_scale = operands(256, 256, 4096, device=device)
        with torch.cuda.device(device):
            want, out = by_pytorch((a, a_scale, b, b_scale)), torch.zeros(256, 256, device=device)
            assert add(a, a_scale, b, b_scale, ONE, False, out)
            assert_same_bits(out, want)
            assert not add(a, a_scale, b.to(other), b_scale, ONE, False, out)
            assert not add(a, a_scale, b, b_scale, ONE, False, out.to(other))
        with torch.cuda.device(other):
            assert not add(a, a_scale, b, b_scale, ONE, False, out)
            assert_same_bits(native.per_tensor(a, a_scale, b, b_scale, torch.float32, None, False, out, True), want)
        layer = Linear(256, 256, recipe="current", fuse_wgrad_accumulation=True, device=device)
        layer.weight.main_grad = torch.zeros(256, 256, device=device)
        layer(torch.randn(64, 256, device=device)).sum().backward()
        assert layer.weight.main_grad.isfinite().all() and layer.weight.main_grad.any()
