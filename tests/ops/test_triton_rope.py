"""The rotation's kernel equals its reference bit for bit, in tensors of any strides: interpreted, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.functional.rope import apply_rotary_pos_emb, split_rotated
from minifloat.nn.attention import RotaryPositionEmbedding
from minifloat.ops.launch import count_launches
from minifloat.ops.rope import kernels, rotate_into, rotated
from tests.helpers import triton_interpreter
from tests.helpers.compare import DTYPES, assert_same_bits, assert_same_bits_or_nan
from tests.helpers.sample import each_once

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])


def angles(device: torch.device, a: int, b: int, r: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of unrelated angles, [a, b, r], of which the second dim is one in memory."""
    angle = torch.randn(a, 1, r, device=device).mul(100).expand(a, b, r)
    return angle[:, :1].cos().expand(a, b, r), angle[:, :1].sin().expand(a, b, r)


def check(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, same: Any = assert_same_bits) -> None:
    """Forward and back, to a tensor of its own and to the middle heads of another, whose others stay as they are."""
    for back in (False, True):
        want = rotated(x, cos[:, :, None], sin[:, :, None], interleaved, back)
        around = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), torch.nan, dtype=x.dtype, device=x.device)
        for out in (torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device), around[:, :, 2:-1]):
            kernels.rotate_into(x, cos, sin, out, interleaved, back)
            same(out, want)
        assert around[:, :, :2].isnan().all() and around[:, :, -1].isnan().all()


@each_once
@INTERLEAVED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 2, 5, 32, 32), (2, 3, 2, 64, 32), (1, 7, 3, 20, 14), (2, 2, 40, 6, 2)], ids=str)
def test_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool, device: torch.device) -> None:
    *sizes, d, r = shape
    cos, sin = angles(device, *sizes[:2], r)
    x = torch.randn(*sizes, d, device=device).to(dtype)
    check(x, cos, sin, interleaved)
    check(x.transpose(0, 1).contiguous().transpose(0, 1), cos, sin, interleaved)
    check(x.transpose(2, 3).contiguous().transpose(2, 3), cos, sin, interleaved)  # channels that lie apart
    wider = torch.randn(sizes[0], sizes[1], sizes[2] + 1, d + 1, device=device).to(dtype)
    check(wider[:, :, 1:, 1:], cos, sin, interleaved)  # at no multiple of 16 bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype, device: torch.device) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, 1e-40])
    cos, sin = angles(device, 4, 3, 16)
    x = special[torch.randint(9, (4, 3, 5, 16))].to(device).to(dtype)
    check(x, cos, sin, False, assert_same_bits_or_nan)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_nothing_to_turn(shape: tuple[int, ...], device: torch.device) -> None:
    x, out = torch.empty(shape, device=device), torch.empty(shape, device=device)
    table = torch.ones(*shape[:2], 8, device=device)
    with count_launches() as launches:
        kernels.rotate_into(x, table, table, out, False, False)
    assert not launches


@pytest.mark.parametrize("interleaved", [False, True])
def test_compiled_for_sm_90(interleaved: bool) -> None:
    """Accesses of halves of heads are 16 bytes wide; nothing spills or is contracted."""
    half = (interleaved, False, not interleaved, 16, 64, 0)
    compiled = triton_interpreter.compile_for(
        kernels.rotate_kernel, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, *[7] * 12, *half,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert compiled.spills == 0 and "fma.rn.f32" not in compiled.ptx
    assert interleaved or ("ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx)


@pytest.mark.gpu
@INTERLEAVED
def test_large_on_a_gpu(interleaved: bool) -> None:
    """Through autograd, with the launches of each direction counted, and beyond 2^31 elements."""
    freqs = RotaryPositionEmbedding(128, interleaved=interleaved, device="cuda")(4096)
    heads = torch.randn(4, 4096, 48, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with count_launches() as launches:
        q, k, v = split_rotated(heads, (32, 8, 8), (freqs, freqs), "bshd", interleaved, (None, None))
    assert launches == {"rotate_kernel": 2}
    want = [rotated(heads[..., a:b, :], *tables(freqs), interleaved) for a, b in ((0, 32), (32, 40))]
    assert_same_bits(q, want[0])
    assert_same_bits(k, want[1])
    dy = [torch.randn_like(each) for each in (q, k, v)]
    (got,) = torch.autograd.grad((q, k, v), heads, dy)
    (expected,) = torch.autograd.grad((*want, heads[..., 40:, :]), heads, dy)
    assert_same_bits(got, expected)
    long = torch.randn(40, 4096, 128, 128, device="cuda", dtype=torch.bfloat16)
    turned = apply_rotary_pos_emb(long, freqs, "bshd", None, interleaved)
    assert_same_bits(turned[-1:], rotated(long[-1:], *tables(freqs), interleaved))


def tables(freqs: Tensor) -> tuple[Tensor, Tensor]:
    angle = freqs.flatten(1)[:, None]
    return angle.cos(), angle.sin()


def test_operation(device: torch.device) -> None:
    cos, sin = angles(device, 2, 3, 8)
    x = torch.randn(2, 3, 2, 8, device=device)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(rotate_into.overload, (x, cos, sin, torch.empty_like(x), True, False), test_utils=utils)
