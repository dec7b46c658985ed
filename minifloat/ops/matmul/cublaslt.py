"""FP8 products that are added to fp32 memory, by the cuBLASLt that PyTorch has loaded, through ctypes.

``torch._scaled_mm`` writes its product, so adding it to a ``main_grad`` is another pass over three matrices; the
library adds at no cost. What it is told is what PyTorch tells it, in a handle of PyTorch's own, so that it chooses the
same kernel. Describing a product and asking for that takes longer than a small one: both are kept.

Whatever does not fit is left to PyTorch's call, which says what is wrong if something is.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from minifloat import backends
from minifloat.ops import tape

ONE, STRIPS = 0, 4
"""Extent of each fp32 scale of both operands, in the library's numbers: all of it, or 1 x 128 codes."""

MOST_KINDS = 1024
"""Sums that a thread keeps: a program whose token counts never repeat must not fill the memory."""

# Of cublasLt.h and library_types.h, the same in 12 and 13.
_FP32, _FP8 = 0, {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_COMPUTE_32F, _TRANSPOSED = 68, 1
_TRANSA, _FAST_ACCUM, _A_SCALE_MODE, _B_SCALE_MODE = 3, 25, 31, 32
_SCALES = 17, 18  # the addresses of those of the library's A and B
_MAX_WORKSPACE_BYTES = 1
_KERNEL = c_uint64 * 12  # cublasLtMatmulHeuristicResult_t: eight words for the library, the bytes of workspace, others
_WORKSPACE_SIZE = "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv"  # at::cuda::getCUDABlasLtWorkspaceSize()
_UNKNOWN: Any = object()


@lru_cache(1)
def library() -> Any:
    """PyTorch's CUDA library with those that it is linked to, one of them a cuBLASLt that is known; else None."""
    try:
        found = ctypes.CDLL("libtorch_cuda.so", mode=os.RTLD_NOLOAD)  # what is loaded, never a second copy
        for function in (found.cublasLtGetVersion, getattr(found, _WORKSPACE_SIZE)):
            function.restype = c_size_t
    except (OSError, AttributeError):  # a build without CUDA, with cuBLASLt inside, or of another system
        return None
    return found if found.cublasLtGetVersion() // 10000 in (12, 13) else None


class _Local(threading.local):
    """The sums of this thread: what describes one holds the addresses of a call."""

    def __init__(self) -> None:
        self.sums: dict[Any, _Sum | None] = {}


_local = _Local()


def add(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, scaled: int, fast: bool, out: Tensor) -> bool:
    """Adds ``a`` [m, k] times ``b`` [n, k] transposed to ``out``; False, and nothing, where PyTorch is to multiply.

    ``scaled``: ``ONE`` or ``STRIPS``, in memory as PyTorch's call takes them. To the bits of PyTorch's product and an
    addition in fp32; an ``out`` of 16 bits would be rounded once, not twice.
    """
    tape.refuse("cuBLASLt adds past PyTorch")
    lib, device = library(), a.get_device()
    if (
        lib is None or type(a) is not Tensor or type(out) is not Tensor or out.dtype != torch.float32
        or torch._C._len_torch_dispatch_stack() > tape.taping.modes  # a graph that is traced is to see an operation
        or device != torch._C._cuda_getDevice() or torch._C._get_sm_carveout_experimental() is not None
    ):  # fmt: skip
        return False
    scales = b_scale.data_ptr(), a_scale.data_ptr()
    # 256 as the allocator gives memory: the library chooses its kernel for that.
    if out.data_ptr() & 255 or (scaled != ONE and (scales[0] | scales[1]) & 15):
        return False
    kind = scaled, fast, *((x.dtype, x.shape, x.stride(), x.get_device()) for x in (a, a_scale, b, b_scale, out))
    sums = _local.sums
    found = sums.get(kind, _UNKNOWN)
    try:
        if found is _UNKNOWN:
            if len(sums) >= MOST_KINDS:
                sums.clear()
            fits = _fits(a, a_scale, b, b_scale, scaled, out)
            found = sums[kind] = _Sum(lib, a, b, scales, scaled, fast) if fits else None
        if found is not None:
            found.run(a, b, out, scales)
            torch.autograd.graph.increment_version(out)
    except _RefusedError:
        found = sums[kind] = None
    return found is not None


def _fits(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, scaled: int, out: Tensor) -> bool:
    """PyTorch's call would give such a product to cuBLASLt, on this device and without an error of its own."""
    (m, depth), n = a.shape, b.shape[0]
    return (
        len({x.get_device() for x in (a, a_scale, b, b_scale, out)}) == 1
        and backends.cublaslt(a.get_device())
        and {a.dtype, b.dtype} <= set(_FP8) and (a.dtype, b.dtype) != (torch.float8_e5m2, torch.float8_e5m2)
        and m > 0 and n > 0 and depth > 0 and b.shape[1] == depth and depth % 16 == 0 and n % 16 == 0
        and out.shape == (m, n) and a.is_contiguous() and b.is_contiguous() and out.is_contiguous()
        and _are_scales(a_scale, scaled, m, depth) and _are_scales(b_scale, scaled, n, depth)
    )  # fmt: skip


def _are_scales(scales: Tensor, scaled: int, outer: int, depth: int) -> bool:
    """Whether they are those of an operand [outer, depth]; of strips those of all rows are adjacent in memory."""
    if scaled == ONE:
        return scales.dtype == torch.float32 and scales.numel() == 1
    return scales.dtype == torch.float32 and scales.shape == (outer, -(-depth // 128)) and scales.t().is_contiguous()


class _RefusedError(Exception):
    """The library does not do what it was asked for."""


def _succeed(status: int) -> None:
    if status:
        raise _RefusedError(f"cuBLASLt: status {status}")


class _Object:
    """Something of the library's, destroyed with this: a ``MatmulDesc``, ``MatrixLayout`` or ``MatmulPreference``."""

    def __init__(self, lib: Any, name: str, *args: Any) -> None:
        self.lib, self.name, self.handle = lib, f"cublasLt{name}", c_void_p()
        _succeed(getattr(lib, f"{self.name}Create")(byref(self.handle), *args))

    def set(self, attribute: int, value: Any) -> None:
        """Sets an attribute; the type of ``value`` is the C type that it has."""
        setter = getattr(self.lib, f"{self.name}SetAttribute")
        _succeed(setter(self.handle, attribute, byref(value), c_size_t(sizeof(value))))

    def __del__(self) -> None:
        if self.handle:
            getattr(self.lib, f"{self.name}Destroy")(self.handle)


class _Sum:
    """One kind of product and addition, on one device and in one thread.

    The library counts columns first: what it computes is D^T [n, m] += b a^T, its A is ``b`` and its B is ``a``.
    """

    def __init__(self, lib: Any, a: Tensor, b: Tensor, scales: tuple[int, int], scaled: int, fast: bool) -> None:
        (m, k), n = a.shape, b.shape[0]
        self.description = _Object(lib, "MatmulDesc", _COMPUTE_32F, _FP32)
        self.description.set(_TRANSA, c_int32(_TRANSPOSED))
        self.description.set(_FAST_ACCUM, c_int8(fast))
        if scaled != ONE:
            for mode in (_A_SCALE_MODE, _B_SCALE_MODE):
                self.description.set(mode, c_int32(scaled))
        self.scales = c_uint64(), c_uint64()
        self.point_at(scales)
        self.layouts = [
            _Object(lib, "MatrixLayout", dtype, c_uint64(rows), c_uint64(columns), c_int64(rows))
            for dtype, rows, columns in ((_FP8[b.dtype], k, n), (_FP8[a.dtype], k, m), (_FP32, n, m))
        ]
        left, right, result = [layout.handle for layout in self.layouts]
        preference = _Object(lib, "MatmulPreference")
        preference.set(_MAX_WORKSPACE_BYTES, c_size_t(getattr(lib, _WORKSPACE_SIZE)()))
        handle, found, count = c_void_p(torch.cuda.current_blas_handle()), _KERNEL(), c_int()
        _succeed(
            lib.cublasLtMatmulAlgoGetHeuristic(
                handle, self.description.handle, left, right, result, result, preference.handle, 1, found, byref(count)
            )
        )
        if not count.value:
            raise _RefusedError("cuBLASLt has no kernel for this product")
        self.workspace_bytes, one = found[8], c_float(1)
        self.a, self.b, self.out, self.workspace, self.stream = [c_void_p() for _ in range(5)]
        self.launch = partial(
            lib.cublasLtMatmul, handle, self.description.handle, byref(one), self.b, left, self.a, right, byref(one),
            self.out, result, self.out, result, found, self.workspace, c_size_t(found[8]), self.stream,
        )  # fmt: skip

    def point_at(self, scales: tuple[int, int]) -> None:
        """Says where the scales are, if they are elsewhere than at the last call."""
        for attribute, place, address in zip(_SCALES, self.scales, scales, strict=True):
            if place.value != address:
                place.value = address
                self.description.set(attribute, place)

    def run(self, a: Tensor, b: Tensor, out: Tensor, scales: tuple[int, int]) -> None:
        """Launches it on the current stream."""
        self.point_at(scales)
        self.a.value, self.b.value, self.out.value = a.data_ptr(), b.data_ptr(), out.data_ptr()
        self.stream.value = torch._C._cuda_getCurrentRawStream(a.get_device())
        if self.workspace_bytes:  # freed on return, for what comes later on the stream: a graph keeps its place
            workspace = a.new_empty(self.workspace_bytes, dtype=torch.uint8)
            self.workspace.value = workspace.data_ptr()
        _succeed(self.launch())
