"""A cuBLASLt on a CPU: C functions of its signatures, which check what they are told and add what is in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CFUNCTYPE, c_float, c_int, c_int64, c_size_t, c_uint64, c_void_p
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minifloat import backends
from minifloat.ops.matmul import cublaslt

OK, INVALID, NOT_SUPPORTED = 0, 7, 15
HANDLE, STREAM, WORKSPACE = 0xB1A5, 0x57E4, 32 << 20
DTYPES = {0: torch.float32, 28: torch.float8_e4m3fn, 29: torch.float8_e5m2}
# Bytes of each attribute, cublasLt.h.
DESC = {3: 4, 17: 8, 18: 8, 25: 1, 31: 4, 32: 4}
SIZES = {"MatmulDesc": DESC, "MatrixLayout": {}, "MatmulPreference": {1: 8}}
ALGO = tuple(range(0xA1, 0xA9))


class Call(NamedTuple):
    """One product that was added."""

    description: int
    attributes: dict[int, int]
    layouts: tuple[tuple[int, ...], ...]
    workspace: int
    stream: int


class Library:
    """What ``cublaslt.library()`` gives.

    Attributes:
        live: attributes of each object that was not destroyed, by its kind and what it was created with.
        asked, calls, settings: kernels that were asked for, sums, and attributes that were set.
        workspace: bytes that a kernel needs.
        kernels: how many there are for a product.
        status: of the next calls.
    """

    def __init__(self) -> None:
        self.live: dict[int, tuple[str, tuple[int, ...], dict[int, int]]] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.calls: list[Call] = []
        self.settings: list[int] = []
        self.workspace, self.kernels, self.status = 0, 1, OK
        self._numbers = count(0x1000, 16)
        handle, size = c_void_p, c_size_t
        creators: dict[str, Sequence[Any]] = {
            "MatmulDesc": (c_int, c_int), "MatrixLayout": (c_int, c_uint64, c_uint64, c_int64), "MatmulPreference": (),
        }  # fmt: skip
        for name, arguments in creators.items():
            self._define(f"{name}Create", lambda out, *how, name=name: self._create(name, out, how), handle, *arguments)
            self._define(
                f"{name}SetAttribute", lambda *args, name=name: self._set(name, *args), handle, c_int, handle, size
            )
            self._define(f"{name}Destroy", lambda which: self.live.pop(which) and OK, handle)
        self._define("MatmulAlgoGetHeuristic", self._choose, *[handle] * 7, c_int, handle, handle)
        self._define("Matmul", self._add, *[handle] * 14, size, handle)
        setattr(self, cublaslt._WORKSPACE_SIZE, lambda: WORKSPACE)

    def _define(self, name: str, function: Any, *arguments: Any) -> None:
        setattr(self, f"cublasLt{name}", CFUNCTYPE(c_int, *arguments)(function))

    def _create(self, name: str, out: int, how: tuple[int, ...]) -> int:
        number = next(self._numbers)
        self.live[number] = name, how, {}
        c_void_p.from_address(out).value = number
        return OK

    def _set(self, name: str, which: int, attribute: int, value: int, size: int) -> int:
        kind, _, attributes = self.live[which]
        if kind != name or SIZES[name].get(attribute) != size:
            return INVALID
        attributes[attribute] = int.from_bytes(ctypes.string_at(value, size), "little")
        self.settings.append(attribute)
        return OK

    def _choose(
        self, handle: int, description: int, a: int, b: int, c: int, d: int, preference: int, most: int, found: int,
        count: int,
    ) -> int:  # fmt: skip
        told = self.live[preference][2], dict(self.live[description][2]), *(self.live[x][1] for x in (a, b, c, d))
        self.asked.append((handle, self.live[description][1], most, *told))
        c_int.from_address(count).value = self.kernels
        cublaslt._KERNEL.from_address(found)[:9] = (*ALGO, self.workspace)
        return OK if self.kernels else NOT_SUPPORTED

    def _add(
        self, handle: int, description: int, alpha: int, a: int, a_layout: int, b: int, b_layout: int, beta: int,
        c: int, c_layout: int, d: int, d_layout: int, algo: int, workspace: int | None, bytes_: int, stream: int,
    ) -> int:  # fmt: skip
        if self.status:
            return self.status
        attributes = self.live[description][2]
        layouts = [self.live[x][1] for x in (a_layout, b_layout, c_layout, d_layout)]
        assert handle == HANDLE and tuple((c_uint64 * 8).from_address(algo)) == ALGO
        assert bytes_ == self.workspace and bool(workspace) == bool(bytes_)
        assert (c, c_layout) == (d, d_layout) and attributes[3] == 1
        assert c_float.from_address(alpha).value == c_float.from_address(beta).value == 1
        left = _operand(a, layouts[0], attributes[17], attributes.get(31, 0))
        right = _operand(b, layouts[1], attributes[18], attributes.get(32, 0))
        out = _matrix(d, layouts[3])
        out += (right @ left.t()).float()
        self.calls.append(Call(description, dict(attributes), tuple(layouts), bytes_, stream))
        return OK


def _matrix(address: int, layout: tuple[int, ...]) -> Tensor:
    """[columns, rows] of a layout, whose columns are consecutive."""
    dtype, rows, columns, stride = layout
    assert address and stride == rows
    memory = (ctypes.c_uint8 * (rows * columns * DTYPES[dtype].itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=DTYPES[dtype]).view(columns, rows)


def _operand(address: int, layout: tuple[int, ...], scales: int, each: int) -> Tensor:
    """What an operand stands for, [outer, contracted], fp64."""
    values = _matrix(address, layout).float().double()
    outer, depth = values.shape
    blocks = -(-depth // 128)
    if each == cublaslt.STRIPS:  # outer first
        factors = _matrix(scales, (0, outer, blocks, outer)).t().repeat_interleave(128, 1)[:, :depth]
    else:
        factors = _matrix(scales, (0, 1, 1, 1))
    return values * factors.double()


def cublaslt_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Lets a CPU take the way of a GPU to the library; no sum is known yet."""
    library = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: library)
    monkeypatch.setattr(cublaslt, "_local", cublaslt._Local())
    monkeypatch.setattr(backends, "cublaslt", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: HANDLE)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return library
