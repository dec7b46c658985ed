"""Lets recorded launches be replayed on a CPU: each runs its kernel in Triton's interpreter, on addresses alone."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.ops import tape
from minifloat.ops.launch import Kernel
from minifloat.ops.matmul import SteppedProduct, native
from minifloat.ops.tape import Recorder
from tests.helpers import triton_interpreter  # noqa: F401


class Interpreted:
    """Stands for a compiled kernel on a CPU: takes addresses, and runs the kernel on what lies there."""

    def __init__(self, kernel: Kernel, tensors: Any, integers: Any, constants: tuple[Any, ...], warps: int) -> None:
        self.kernel, self.integers, self.constants, self.warps = kernel, len(integers), constants, warps
        self.like = [
            tuple(map(self._like, t)) if isinstance(t, tuple) else self._like(t) for t in tensors
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
    def _like(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")  # .to() drops gaps between rows

    @staticmethod
    def _at(like: Tensor, pointer: int) -> Tensor:
        if not like.numel():
            return torch.empty(0, dtype=like.dtype)
        assert pointer and (like.numel() == 1 or pointer % 16 == 0), "no address where a kernel may read"
        extent = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
        memory = (ctypes.c_uint8 * (extent * like.itemsize)).from_address(pointer)
        return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def replay_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on a CPU can be prepared, and what a replay allocates is on the CPU."""
    monkeypatch.setattr(
        tape, "empty_strided", lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    )
    monkeypatch.setattr(Kernel, "compiled", lambda *args: (Interpreted(*args).run, 0, (None,) * 4))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # as get_device() of a CPU's tensor
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def multiply_strided(a_tile: bool, b_tile: bool, operands: Any, out_dtype: torch.dtype) -> Tensor:
    """What cuBLASLt computes, from the operands and scales as they lie in memory."""
    values = []
    for codes, scale, tile in zip(operands[::2], operands[1::2], (a_tile, b_tile), strict=True):
        assert codes.is_contiguous() or not native.has_kernels(codes)
        assert not codes.shape[0] % 16 and not codes.shape[1] % 128
        if tile:  # [blocks, outer blocks], blocks consecutive and in fours
            assert scale.stride() == (1, scale.shape[0]) and scale.shape[0] % 4 == 0
            scale = scale.t().repeat_interleave(128, 0)[: codes.shape[0]]
        else:  # [outer, blocks], outer consecutive
            assert scale.stride() == (1, scale.shape[0]) and scale.shape[0] == codes.shape[0]
        spread = scale.repeat_interleave(128, 1)[:, : codes.shape[1]].double()
        values.append(codes.float().double() * spread.nan_to_num(0.0))
    return (values[0] @ values[1].t()).to(out_dtype)


@contextmanager
def counted_replays() -> Iterator[list[bool]]:
    """Notes of each function that a recorder is given whether it was replayed."""
    notes: list[bool] = []
    record, look = Recorder.__call__, Recorder.again

    def again(self: Recorder, key: Any, tensors: Any) -> Any:
        result = look(self, key, tensors)
        notes.extend([True] * (result is not None))
        return result

    def spy(self: Recorder, key: Any, tensors: Any, function: Any, *held: Any) -> Any:
        called: list[int] = []
        result = record(self, key, tensors, lambda: (called.append(1), function())[1], *held)
        notes.append(not called)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "__call__", spy)
        patch.setattr(Recorder, "again", again)
        yield notes


def nothing_else(patch: pytest.MonkeyPatch) -> None:
    """From here on every product is a replay."""

    def never(*args: Any) -> Any:
        raise AssertionError("a recording should have been replayed")

    patch.setattr(SteppedProduct, "_step_by_step", never)
