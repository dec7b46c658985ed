"""Amax, cast and dequantize in plain PyTorch: the definition that every kernel is held to, bit for bit.

All arithmetic is fp32, one rounding an operation, in the order of ``docs/numerics.md``. Three habits keep PyTorch to
that on every device: no Python number divides or is divided by a tensor (``2.0 / x`` is ``x.reciprocal() * 2.0``, two
roundings, and CUDA turns ``x / 3.0`` into a multiplication), FP8 casts are clamped first (PyTorch 2.11 gives NaN where
2.13 saturates), and exponents are read from bits, never from ``log2``.

A tensor of [M, K] is viewed as [M/r, r, K/c, c] blocks of r x c elements that share a scale, zero-padded at the edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ELEMENTS, ROWWISE, Format
from minifloat.ops.quantize import hadamard, philox

FLT_MAX = torch.finfo(torch.float32).max


class Cast(NamedTuple):
    """What a cast returns: uint8 codes, scales, and the tensor's own amax (fp32 [1]) where the scale was given."""

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor


def amax(x: Tensor, fmt: Format, dim: int) -> Tensor:
    """The amax that the scale of the whole tensor comes from, or, where blocks are all there is, that of each block.

    Args:
        x: [M, K], bf16, fp16 or fp32.

    Returns:
        fp32: [1]; [M] or [K] with ``amax_per_row``; the grid of blocks for a format with only block scales.
        NaNs are dropped, so the amax of nothing but NaN is 0, as of an empty tensor.
    """
    x = hadamard.prepare(x, fmt, dim)
    if fmt.amax_per_row:
        return _amax_of(x, dim)
    if fmt.block and fmt.scale_rule != "two_level":
        return _block_amax(_blocks(x.float(), *fmt.scale_block(dim)))[:, 0, :, 0]
    return _amax_of(x.reshape(-1), 0).reshape(1)


def cast(x: Tensor, given: Tensor | None, rng: Tensor | None, fmt: Format, dim: int) -> Cast:
    """Quantizes ``x`` along ``dim``.

    Args:
        x: [M, K], bf16, fp16 or fp32.
        given: the amax as :func:`amax` returns it, reduced over a group or not; the scale itself, fp32 [1], for the
            rule ``"given"``; None where blocks find their own.
        rng: int64 [2], seed and offset of the random bits, or [3], see ``philox``; stochastic rounding only.

    Returns:
        Codes [M, K], or packed two a byte along ``dim``; with a Hadamard transform its zero-filled rows are kept, so
        that M is rounded up to 16. Scales: [1], or one for each block in the [M, K] layout.
    """
    largest = torch.finfo(x.dtype).max
    if fmt.scale_rule == "given":
        assert given is not None
        given = given.float()
        codes = cast_element(x.float() * given, fmt.element)
        return Cast(codes, given.reciprocal(), _amax_of(x.reshape(-1), 0).reshape(1))
    source = hadamard.prepare(x, fmt, dim)
    blocks = _blocks(source.float(), *fmt.scale_block(dim))
    if fmt.scale_rule == "two_level":
        assert given is not None
        codes, scale_inv = _cast_two_level(blocks, _per_block(given, fmt, dim), rng, source.shape, fmt, dim)
    else:
        block_amax = _block_amax(blocks) if given is None else given.reshape(blocks.shape[0], 1, blocks.shape[2], 1)
        multiplier, scale_inv = _SCALE_RULES[fmt.scale_rule](block_amax, fmt, largest)
        codes = cast_element(blocks * multiplier, fmt.element)
        scale_inv = scale_inv.reshape(-1) if fmt.block == 0 else scale_inv[:, 0, :, 0]
    codes = _unblock(codes, source.shape)
    return Cast(_pack(codes, dim) if fmt.packed else codes, scale_inv.contiguous(), x.new_empty(0, dtype=torch.float32))


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, rows: int, cols: int
) -> Tensor:
    """The fp32 values [rows, cols] that codes and scales stand for, rotated back where the format rotates."""
    shape = torch.Size((hadamard.padded(rows) if fmt.transform == "hadamard16" else rows, cols))
    values = _blocks(decode(codes, fmt, dim, shape), *fmt.scale_block(dim))
    restored = _unblock(values * _factors(scale_inv, amax, fmt, dim), shape)
    return hadamard.inverse(restored)[:rows] if fmt.transform == "hadamard16" else restored


def _factors(scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int) -> Tensor:
    """What codes in blocks are multiplied by, fp32."""
    factor = scale_inv if fmt.block == 0 else scale_inv[:, None, :, None]
    if fmt.scale_rule == "e8m0":
        return e8m0_value(factor)
    if fmt.scale_rule != "two_level":
        return factor
    assert amax is not None
    level = _fp32(1.0 / (6 * fmt.block_scale_max), scale_inv.device)
    return look_up(factor, "e4m3") * _per_block(amax, fmt, dim) * level


def scale_values(scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int) -> Tensor:
    """The same in the shape of ``scale_inv``."""
    factors = _factors(scale_inv, amax, fmt, dim)
    return factors.clone() if fmt.block == 0 else factors[:, 0, :, 0].clone()


# ---- elements ----


def cast_element(x: Tensor, element: str) -> Tensor:
    """fp32 to codes, one a byte: to nearest, ties to even, saturating; NaN to 0x7F (FP8) or +6 (E2M1)."""
    if element == "e2m1":
        return _encode_e2m1(_round_e2m1(x), x)
    fp8 = ELEMENTS[element]
    assert fp8.dtype is not None
    codes = x.clamp(-fp8.max, fp8.max).to(fp8.dtype).view(torch.uint8)
    return codes.masked_fill_(codes == 0xFF, 0x7F)  # a negative NaN loses its sign; nothing else has this code


def _step_e2m1(a: Tensor) -> Tensor:
    """Distance to the next larger E2M1 value: 0.5 below 2, 1 below 4, else 2."""
    return torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))


def _round_e2m1(x: Tensor) -> Tensor:
    a = x.abs()
    step = _step_e2m1(a)
    return (torch.round(a / step) * step).clamp(max=6.0)  # steps are powers of two: the division is exact


def _round_e2m1_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds up with the probability of the remainder, in 1/256ths: ``bits`` is one random byte an element."""
    a = x.abs()
    # One rounding, as fma(u, step, a): the sum of eight bits and a float is exact in float64 where it can matter.
    dither = bits.double() / 256 * _step_e2m1(a).double()
    t = (a.double() + dither).float()
    step = _step_e2m1(t)
    return (torch.floor(t / step) * step).clamp(max=6.0)


def _encode_e2m1(magnitude: Tensor, x: Tensor) -> Tensor:
    """Codes 0..15 of grid values 0, .5, 1, 1.5, 2, 3, 4, 6 with the sign of ``x``."""
    index = torch.where(magnitude <= 2, magnitude * 2, magnitude * 0.5 + 4).nan_to_num(7.0)  # 3 gives 5.5, cut to 5
    sign = (x.signbit() & ~x.isnan()).to(torch.uint8) << 3
    return index.to(torch.uint8) | sign


def code_values(element: str, device: torch.device) -> Tensor:
    """fp32 [256] or [16]: the value of each code."""
    if element == "e2m1":
        codes = torch.arange(16, device=device)
        index = (codes & 7).float()
        magnitude = torch.where(index <= 4, index * 0.5, index - 2) + (index == 7).float()
        return torch.where(codes >= 8, -magnitude, magnitude)
    fp8 = ELEMENTS[element].dtype
    assert fp8 is not None
    return torch.arange(256, dtype=torch.uint8, device=device).view(fp8).float()


def look_up(codes: Tensor, element: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes, one a byte: from a table, which on a CPU is three times faster than PyTorch's conversion."""
    values = code_values(element, codes.device).to(dtype)
    return values.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)


def decode(codes: Tensor, fmt: Format, dim: int, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """The [M, K] values of codes, unpacked but not scaled."""
    return look_up(_unpack(codes, dim, shape) if fmt.packed else codes, fmt.element, dtype)


def _pack(codes: Tensor, dim: int) -> Tensor:
    """Two neighbours along ``dim`` in a byte, the even one in the low half; an odd tail is followed by a zero."""
    if codes.shape[dim] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1) if dim == ROWWISE else (0, 0, 0, 1))
    even, odd = (codes[:, 0::2], codes[:, 1::2]) if dim == ROWWISE else (codes[0::2], codes[1::2])
    return (even | (odd << 4)).contiguous()


def _unpack(packed: Tensor, dim: int, shape: torch.Size) -> Tensor:
    halves = packed & 0xF, packed >> 4
    unpacked = torch.stack(halves, dim=2).flatten(1) if dim == ROWWISE else torch.stack(halves, dim=1).flatten(0, 1)
    return unpacked[: shape[0], : shape[1]]


# ---- scales: each rule returns (what a value is multiplied by, what is stored) ----


def _fp32(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


def _scale_fp32(amax: Tensor, fmt: Format, largest: float) -> tuple[Tensor, Tensor]:
    amax = torch.where(amax < fmt.amax_epsilon, _fp32(fmt.amax_epsilon, amax.device), amax)
    scale = _fp32(fmt.max, amax.device) / amax
    scale = torch.where(scale.isinf(), _fp32(largest if fmt.block else FLT_MAX, amax.device), scale)
    if fmt.scale_rule == "pow2":
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # clears the mantissa: rounds down
    scale = torch.where(amax.isinf() | (amax == 0) | amax.isnan(), 1.0, scale)
    return scale, scale.reciprocal()


def _scale_e8m0(amax: Tensor, fmt: Format, largest: float) -> tuple[Tensor, Tensor]:
    codes = e8m0_from_float(amax * _fp32(1.0 / fmt.max, amax.device))
    # 2^(127 - c): c = 254 is the denormal 2^-127, which has no exponent field of its own.
    exponent = 254 - codes.int()
    bits = torch.where(exponent > 0, exponent << 23, 0x00400000)
    return torch.where(codes == 255, torch.nan, bits.view(torch.float32)), codes


_SCALE_RULES: dict[str, Callable[[Tensor, Format, float], tuple[Tensor, Tensor]]] = {
    "fp32": _scale_fp32,
    "pow2": _scale_fp32,
    "e8m0": _scale_e8m0,
}


def e8m0_from_float(x: Tensor) -> Tensor:
    """The smallest power of two that is at least ``x`` >= 0, as its exponent byte; NaN to 255, infinity to 254."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    raised = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    codes = (exponent + raised.int()).masked_fill(x.isinf(), 254).masked_fill(x.isnan(), 255)
    return codes.to(torch.uint8)


def e8m0_value(codes: Tensor) -> Tensor:
    """2^(c - 127); c = 0 is the fp32 denormal 2^-127, 255 is NaN."""
    exponent = codes.int()
    bits = torch.where(exponent > 0, exponent << 23, 0x00400000)
    return torch.where(codes == 255, torch.nan, bits.view(torch.float32))


def _cast_two_level(
    blocks: Tensor, amax: Tensor, rng: Tensor | None, shape: torch.Size, fmt: Format, dim: int
) -> tuple[Tensor, Tensor]:
    """NVFP4: E4M3 block scales under the fp32 scale that ``amax`` gives, numerics 1.5. Returns codes and scales."""
    block_amax = _block_amax(blocks)
    encode = (_fp32(fmt.block_scale_max * 6, amax.device) / amax).clamp(max=FLT_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    if fmt.rounding.startswith("four_over_six"):
        codes, scales = _four_over_six(blocks, block_amax, amax, encode, fmt, dim)
    else:
        sixth = _fp32(1.0 / 6.0, amax.device)
        scales = cast_element((block_amax * (encode * sixth)).clamp(max=FLT_MAX), "e4m3")
        scaled = blocks * _two_level_multiplier(scales, encode)
        if fmt.rounding == "stochastic":
            assert rng is not None
            bits = _blocks(philox.random_bytes(rng, shape, dim), blocks.shape[1], blocks.shape[3])
            codes = _encode_e2m1(_round_e2m1_stochastic(scaled, bits), scaled)
        else:
            codes = cast_element(scaled, "e2m1")
    return codes, scales[:, 0, :, 0]


def _two_level_multiplier(scales: Tensor, encode: Tensor) -> Tensor:
    return (look_up(scales, "e4m3") * encode.reciprocal()).reciprocal().clamp(max=FLT_MAX)


def _four_over_six(
    blocks: Tensor, block_amax: Tensor, amax: Tensor, encode: Tensor, fmt: Format, dim: int
) -> tuple[Tensor, Tensor]:
    """Scales each block so that its amax lands on 6 or on 4, whichever leaves the smaller error."""
    base = (block_amax / _fp32(6.0, amax.device)) * encode
    tries = []
    for stretch in (1.5, 1.0):
        scales = cast_element((base * stretch).clamp(max=448.0), "e4m3")
        codes = cast_element(blocks * _two_level_multiplier(scales, encode), "e2m1")
        value = look_up(codes, "e2m1") * look_up(scales, "e4m3") * amax
        value = value / _fp32(6 * fmt.block_scale_max, amax.device)
        error = (value - blocks).abs() if fmt.rounding.endswith("mae") else (value - blocks).square()
        tries.append((codes, scales, _block_error(error, dim)))
    (codes4, scales4, error4), (codes6, scales6, error6) = tries
    four = error4 < error6
    return torch.where(four, codes4, codes6), torch.where(four, scales4, scales6)


def _block_error(error: Tensor, dim: int) -> Tensor:
    """The sum over a block in the order the specification fixes: along ``dim`` one by one, then rows pairwise."""
    if dim == COLUMNWISE:
        return _block_error(error.transpose(0, 2).transpose(1, 3), ROWWISE).transpose(0, 2).transpose(1, 3)
    total = torch.zeros_like(error[..., :1])
    for column in error.split(1, dim=-1):
        total = total + column
    while total.shape[1] > 1:
        upper, lower = total.chunk(2, dim=1)
        total = upper + lower
    return total


def _per_block(amax: Tensor, fmt: Format, dim: int) -> Tensor:
    """An amax of [1], [M] or [K] so that it broadcasts over [M/r, r, K/c, c] blocks."""
    if not fmt.amax_per_row:
        return amax
    return amax[:, None, None, None] if dim == ROWWISE else amax[None, None, :, None]


# ---- blocks ----


def _amax_of(x: Tensor, dim: int) -> Tensor:
    if x.shape[dim] == 0:
        return x.new_zeros(x.shape[:dim] if dim == ROWWISE else x.shape[1:], dtype=torch.float32)
    return x.abs().nan_to_num(0.0, posinf=torch.inf).amax(dim).float()


def _block_amax(blocks: Tensor) -> Tensor:
    if blocks.numel() == 0:
        return blocks.new_zeros(blocks.shape[0], 1, blocks.shape[2], 1)
    return blocks.abs().nan_to_num(0.0, posinf=torch.inf).amax((1, 3), keepdim=True)


def _blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """[M, K] as [M/rows, rows, K/cols, cols], zero-padded; (0, 0) is one block of everything."""
    if rows == 0:
        return x[None, :, None, :]
    pad_rows, pad_cols = -x.shape[0] % rows, -x.shape[1] % cols
    if pad_rows or pad_cols:
        x = torch.nn.functional.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_blocks`."""
    rows, cols = blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3]
    matrix = blocks.reshape(rows, cols)
    if (rows, cols) == tuple(shape):
        return matrix
    return matrix[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)  # lets go of the padding
