"""Products that cuBLASLt itself adds: what it is told, and that all else is left to PyTorch's call; bits on a GPU."""

from __future__ import annotations

import gc
import threading
from ctypes import c_int8, c_int32, c_int64, c_size_t, c_uint64
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat.ops.matmul import cublaslt, native
from minifloat.ops.matmul.cublaslt import ONE, STRIPS, add
from tests.helpers.compare import assert_same_bits
from tests.helpers.cublaslt_on_cpu import DESC, HANDLE, STREAM, WORKSPACE, Library, cublaslt_on_cpu
from tests.helpers.fp8_products import E4M3, E5M2, PAIRS, operands, values


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """On a CPU."""
    return cublaslt_on_cpu(monkeypatch)


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers where the allocator of a GPU would put them."""
    size = torch.Size(shape).numel()
    memory = torch.empty(size + 256, dtype=dtype)
    start = -memory.data_ptr() % 256 // dtype.itemsize
    return memory[start : start + size].view(shape).copy_(torch.randn(shape))


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return (values(a, a_scale) @ values(b, b_scale).t()).float()


@pytest.mark.parametrize(("scaled", "pair"), [(STRIPS, "e4m3"), *((ONE, pair) for pair in PAIRS)])
def test_adds(scaled: int, pair: str, library: Library) -> None:
    """The library finds operands, scales and output where it is told that they are."""
    for m, n, k in ((16, 32, 48), (7, 144, 272)):
        sides, out = operands(m, n, k, scaled, PAIRS[pair]), aligned(m, n)
        want, version = out + product(*sides), out._version
        assert add(*sides, scaled, False, out)
        assert_same_bits(out, want)
        assert out._version > version


def test_what_the_library_is_told(library: Library) -> None:
    """As ``at::cuda::blas::scaled_gemm`` tells it: D^T = b a^T, nothing about alignment, PyTorch's workspace."""
    a, a_scale, b, b_scale = operands(16, 32, 48, pair=(E5M2, E4M3))
    assert add(a, a_scale, b, b_scale, ONE, True, aligned(16, 32))
    told = {3: 1, 25: 1, 17: b_scale.data_ptr(), 18: a_scale.data_ptr()}
    left, right, out = (28, 48, 32, 48), (29, 48, 16, 48), (0, 32, 16, 32)
    assert library.asked == [(HANDLE, (68, 0), 1, {1: WORKSPACE}, told, left, right, out, out)]
    (call,) = library.calls
    assert call[1:] == (told, (left, right, out, out), 0, STREAM)

    a, a_scale, b, b_scale = operands(16, 32, 48, STRIPS)
    assert add(a, a_scale, b, b_scale, STRIPS, False, aligned(16, 32))
    told = {3: 1, 25: 0, 31: 4, 32: 4, 17: b_scale.data_ptr(), 18: a_scale.data_ptr()}
    assert library.calls[1].attributes == told


def test_a_second_sum_asks_nothing(library: Library) -> None:
    """Only the addresses that are others than before are set again; the workspace is the call's own."""
    library.workspace = 4096
    (a, a_scale, b, b_scale), out = operands(16, 32, 48), aligned(16, 32)
    assert add(a, a_scale, b, b_scale, ONE, False, out)
    before = len(library.live)
    for scale, wanted in ((a_scale, []), (torch.tensor([2.0]), [18])):
        library.settings.clear()
        want = out + product(a, scale, b, b_scale)
        assert add(a.clone(), scale, b, b_scale, ONE, False, out)
        assert_same_bits(out, want)
        assert library.settings == wanted
    assert len(library.asked) == 1 and len(library.live) == before
    assert [call.workspace for call in library.calls] == [4096] * 3


def test_left_to_pytorch(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library might read wrongly, or does not multiply, reaches it not at all."""
    (a, a_scale, b, b_scale), out = operands(16, 32, 48), aligned(16, 32)
    narrow = a[:, :32].contiguous(), b[:, :32].contiguous()

    def left(a: Tensor, b: Tensor, *, a_scale: Tensor = a_scale, scaled: int = ONE, out: Tensor = out) -> bool:
        before = out._version
        added = add(a, a_scale, b, b_scale, scaled, False, out)
        return not (added or library.asked or library.live or out._version > before)

    assert left(a[:0], b, out=out[:0])
    assert left(a[:, :40].contiguous(), b[:, :40].contiguous())
    assert left(narrow[0], b)
    assert left(a[:, :32], narrow[1]) and left(narrow[0], b[:, :32])
    assert left(a, b[:24].contiguous(), out=aligned(16, 24))
    assert left(a.bfloat16(), b) and left(a.view(torch.uint8), b)
    assert left(a.to(E5M2), b.to(E5M2))
    assert left(a, b, a_scale=a_scale.expand(2)) and left(a, b, a_scale=a_scale.double())
    assert left(a, b, scaled=STRIPS)
    assert left(a, b, out=aligned(16, 32, dtype=torch.bfloat16))
    assert left(a, b, out=aligned(15, 32)) and left(a, b, out=aligned(16, 64)[:, :32])
    assert left(a, b, out=aligned(17 * 32)[32:].view(16, 32))
    assert left(torch.nn.Parameter(a, requires_grad=False), b)
    assert left(a, b, out=torch.nn.Parameter(out, requires_grad=False))
    with FakeTensorMode():
        assert left(a, b)
    for module, name, value in (
        (torch._C, "_get_sm_carveout_experimental", 8), (torch._C, "_cuda_getDevice", 1), (cublaslt, "library", None),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda value=value: value)
            assert left(a, b)
    assert add(a, a_scale, b, b_scale, ONE, False, out)


def test_what_the_library_refuses_is_left_to_pytorch(library: Library) -> None:
    """Once and for all: no kernel at the first call, an error at a later one."""
    sides, out = operands(16, 32, 48), aligned(16, 32)
    library.kernels = 0
    assert not add(*sides, ONE, False, out)
    library.kernels = 1
    assert not add(*sides, ONE, False, out) and len(library.asked) == 1
    gc.collect()
    assert not library.live
    assert add(*sides, ONE, True, out)
    library.status = 14
    assert not add(*sides, ONE, True, out)
    library.status = 0
    assert not add(*sides, ONE, True, out) and len(library.calls) == 1


def test_sums_are_bounded_and_destroyed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MOST_KINDS", 3)
    for m in range(1, 9):
        assert add(*operands(m, 16, 32), ONE, False, aligned(m, 16))
        assert len(cublaslt._local.sums) <= 3
    gc.collect()
    assert len(library.live) == 4 * len(cublaslt._local.sums) > 0
    cublaslt._local.sums.clear()
    gc.collect()
    assert not library.live


def test_each_thread_describes_its_own(library: Library) -> None:
    """A description holds the addresses of the call that uses it, and goes with its thread."""
    inputs = [operands(16, 32, 48) for _ in range(4)]
    wrong: list[int] = []
    ready = threading.Barrier(4)

    def work(which: int) -> None:
        (a, a_scale, b, b_scale), out = inputs[which], aligned(16, 32)
        ready.wait()
        for _ in range(20):
            want = out + product(a, a_scale, b, b_scale)
            added = add(a, a_scale.clone(), b, b_scale, ONE, False, out)
            wrong.extend([] if added and torch.equal(out, want) else [which])
        ready.wait()

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len({call.description for call in library.calls}) == 4
    gc.collect()
    assert not library.live


def test_what_is_loaded() -> None:
    """That of a CUDA build takes each attribute with its size, without a GPU as well; a CPU build has none."""
    lib = cublaslt.library()
    assert (lib is None) == (torch.version.cuda is None)
    if lib is None:
        return
    description = cublaslt._Object(lib, "MatmulDesc", 68, 0)
    for attribute, size in DESC.items():
        description.set(attribute, {1: c_int8, 4: c_int32, 8: c_uint64}[size]())
    with pytest.raises(cublaslt._RefusedError, match="status 7"):
        description.set(25, c_int32(1))
    cublaslt._Object(lib, "MatmulPreference").set(1, c_size_t(1 << 20))
    cublaslt._Object(lib, "MatrixLayout", 28, c_uint64(64), c_uint64(32), c_int64(64))


@pytest.mark.parametrize("adds", [True, False])
def test_who_adds(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be added goes to the library; all else, and what that leaves, to PyTorch's calls, not over ``out``."""
    asked: list[tuple[Any, ...]] = []
    called: list[Any] = []
    one, x, out = torch.ones(1), mock.Mock(is_cuda=True), aligned(1, 64)
    monkeypatch.setattr(cublaslt, "add", lambda *args: asked.append(args) or adds)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, out, **kwargs: called.append(out))
    monkeypatch.setattr(torch, "_scaled_mm_v2", lambda *args: called.append(None))

    given = x, one, x, one, torch.float32, None, True
    native.per_tensor(*given, out)
    assert called == [out] and not asked
    result = native.per_tensor(*given, out, True)
    assert (result is out) == adds and asked == [(x, one, x, one, ONE, True, out)]
    assert called == ([out] if adds else [out, None])
    native.per_tensor(*given, None, True)
    called.clear()
    asked.clear()

    native.block128(False, False, (x, one, x, one), torch.float32)
    native.block128(False, True, (x, one, x, one, out), torch.float32)
    assert called == [None, None] and not asked
    result = native.block128(False, False, (x, one, x, one, out), torch.float32)
    assert (result is out) == adds and asked == [(x, one, x, one, STRIPS, False, out)]
