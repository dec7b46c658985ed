"""The rotation in Triton: each element is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel
from minifloat.ops.quantize.device import extent

ELEMENTS = 2048
"""Elements of a program, which takes some heads of one token."""


@triton.jit
def begin(base, wide_part, WIDE: tl.constexpr):
    """The address ``wide_part`` elements on, of which the compiler shall know, if ``WIDE``, that 16 bytes begin."""
    return tl.multiple_of(base, 16) + wide_part // 16 * 16 if WIDE else base + wide_part


@triton.jit
def rotate_kernel(
    x, cos, sin, out,
    B, H, D, R, x_a, x_b, x_h, out_a, out_b, out_h, angle_a, angle_b,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    token = tl.program_id(0) // tl.cdiv(H, HEADS)
    a, b = (token // B).to(tl.int64), (token % B).to(tl.int64)
    h = (tl.program_id(0) % tl.cdiv(H, HEADS) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    source = begin(x, a * x_a + b * x_b + h * x_h, WIDE)[:, None]
    target = begin(out, a * out_a + b * out_b + h * out_h, WIDE)[:, None]
    angle = a * angle_a + b * angle_b  # all heads turn by the same: loaded once
    cos, sin = begin(cos, angle, WIDE), begin(sin, angle, WIDE)
    pair, half = tl.arange(0, PAIRS)[None, :], extent(R // 2, WIDE)
    turned, inside = pair < half, (h[:, None] < H) & (pair < half)
    first = pair * STEP
    second = first + (1 if INTERLEAVED else half)
    p = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
    p_cos = tl.load(cos + first, mask=turned, other=0.0)
    q_cos = tl.load(cos + second, mask=turned, other=0.0)
    p_sin = tl.load(sin + first, mask=turned, other=0.0)
    q_sin = tl.load(sin + second, mask=turned, other=0.0)
    if BACK:
        p_turned = p * p_cos + q * q_sin
        q_turned = q * q_cos - p * p_sin
    else:
        p_turned = p * p_cos - q * p_sin
        q_turned = q * q_cos + p * q_sin
    tl.store(target + first, p_turned.to(out.dtype.element_ty), mask=inside)
    tl.store(target + second, q_turned.to(out.dtype.element_ty), mask=inside)
    if REST > 0:
        c = R + tl.arange(0, REST)
        kept = (h[:, None] < H) & (c[None, :] < D)
        tl.store(target + c[None, :], tl.load(source + c[None, :], mask=kept, other=0.0), mask=kept)


_rotate = Kernel(rotate_kernel, wide=False)


def rotate_into(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool, back: bool) -> None:
    """The operation ``rotate_into``."""
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    assert out.stride(-1) == 1 and cos.stride() == sin.stride()
    (A, B, H, D), R = x.shape, cos.shape[-1]
    strides = *x.stride()[:3], *out.stride()[:3], *cos.stride()[:2]
    wide = not any(n % 16 for n in (R // 2, *strides, *[t.data_ptr() for t in (x, cos, sin, out)]))
    pairs, rest = triton.next_power_of_2(R // 2), triton.next_power_of_2(D - R) if D > R else 0
    heads = max(1, min(triton.next_power_of_2(H), ELEMENTS // (2 * max(pairs, rest))))
    constants = interleaved, back, wide, heads, pairs, rest
    _rotate(A * B * triton.cdiv(H, heads), (x, cos, sin, out), (B, H, D, R, *strides), constants)
