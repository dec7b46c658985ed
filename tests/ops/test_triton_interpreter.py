"""What the interpreter of kernels refuses, and what it leaves alone; how it computes, tests of kernels show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need Triton")

import triton
import triton.language as tl

from tests.helpers import triton_interpreter  # noqa: F401

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there kernels are compiled")


@triton.jit
def add_bf16(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(x + i))


def test_arithmetic_on_bf16_is_refused() -> None:
    x = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="convert to tl"):
        add_bf16[(1,)](x, x, BLOCK=16)


@triton.jit
def scaled(x, out, scale, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) * scale)


@triton.jit
def copy_unmasked(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i), mask=i < n)


def test_access_outside_tensors_is_refused() -> None:
    x, out = torch.zeros(64), torch.full((64,), torch.nan)
    copy_unmasked[(1,)](x, out, 64, BLOCK=64)
    for source, target, count in ((x[:63], out, 63), (x[1:], out, 63), (x, out[:63], 64)):
        with pytest.raises(triton.runtime.errors.InterpreterError, match="1 of 64 addresses are outside"):
            copy_unmasked[(1,)](source, target, count, BLOCK=64)


def test_inductor_still_compiles() -> None:
    """In this process, whose kernels were interpreted, and where Triton's library must be as it was."""

    def layer(x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:]).relu().sum(0)

    before = tl.load, tl.core.load, tl.tensor.__add__, triton.JITFunction.__call__
    x = torch.randn(8, 16)
    scaled[(1,)](x, torch.empty(16), 2.0, BLOCK=16)
    assert before == (tl.load, tl.core.load, tl.tensor.__add__, triton.JITFunction.__call__)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x))
