"""Amax, cast and dequantize in plain PyTorch: the definition that every kernel is held to, bit for bit.

All arithmetic is fp32, one rounding an operation, in the order of ``docs/numerics.md``. Three habits keep PyTorch to
that on every device: no Python number divides or is divided by a tensor (``2.0 / x`` is two roundings, and CUDA turns
``x / 3.0`` into a multiplication), FP8 casts are clamped first (PyTorch 2.11 gives NaN where 2.13 saturates), and
exponents are read from bits, never from ``log2``.

A tensor of [M, K] is viewed as [M/r, r, K/c, c] blocks of r x c elements that share a scale, zero-padded at the edges.
The random Hadamard transform rotates groups of 16 tokens, both operands of wgrad alike, so that it cancels, by four
butterfly stages in a fixed order. Random bits of stochastic rounding are Philox4x32-10 (Salmon et al. 2011) of (seed,
offset, element index, orientation), so the same in a kernel, here, and on whatever rank an element lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.formats.elements import E2M1, E4M3, FLT_MAX, fp32
from minifloat.ops import new

WHOLE = Format("e4m3")
"""Any format with one scale for the tensor, to measure its amax."""
GROUP = 16
# The fixed random signs of NVFP4 training recipes, bit i set where sign i is -1. Not drawn anew: both operands of
# wgrad, and every rank of a sharded one, must be rotated alike.
NEGATIVE = 0xD7E8


def rotated_rows(rows: int) -> int:
    """Rows after the last group is filled up with zeros."""
    return rows + -rows % GROUP


def rotated(x: Tensor, fmt: Format, dim: int) -> Tensor:
    """``x`` [M, K] as the cast along ``dim`` sees it: itself, or rotated and rounded to bf16, M rounded up to 16."""
    if fmt.transform == "none":
        return x
    if dim != COLUMNWISE:
        raise ValueError("the Hadamard transform rotates groups of tokens: columnwise casts only")
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[0] % GROUP))
    return (_butterflies(_signed(x)) * 0.25).to(torch.bfloat16)


def unrotated(x: Tensor) -> Tensor:
    """Rotates back what :func:`rotated` rotated, [16 n, K] fp32."""
    return _signed(_butterflies(x) * 0.25)


def _signed(x: Tensor) -> Tensor:
    # Computed where it is used: copying a constant to the device would break CUDA graph capture.
    negative = (NEGATIVE >> (torch.arange(x.shape[0], device=x.device) % GROUP)) & 1
    return x * (1 - 2 * negative)[:, None].float()


def _butterflies(x: Tensor) -> Tensor:
    """v @ H16 for each group, strides 1, 2, 4, 8; H16[i, j] = (-1)^popcount(i & j)."""
    for stride in (1, 2, 4, 8):
        pairs = x.reshape(x.shape[0] // (2 * stride), 2, stride, x.shape[1])
        upper, lower = pairs[:, :1], pairs[:, 1:]
        x = torch.cat([upper + lower, upper - lower], dim=1).reshape(x.shape)
    return x


_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def random_bytes(rng: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """uint8 [M, K]: byte ``i % 16`` of Philox block ``i // 16`` for element ``i = m * K + k``.

    Args:
        rng: int64 [2], seed and offset, or [3], with the number of the first of these rows in the whole of a tensor
            that is sharded along M. They stay on the device: reading them would stall it.
    """
    count = shape.numel()
    block = torch.arange((count + 15) // 16 + rng.numel() - 2, dtype=torch.int64, device=rng.device)
    first = rng[2:] * shape[1]  # element of the whole, [0] or [1]
    if first.numel():
        block = block + first // 16
    orientation = 0 if dim == ROWWISE else 1 << 31
    high, low = (rng[:2] >> 32) & _LOW, rng[:2] & _LOW  # of seed and offset
    counter = [block & _LOW, (block >> 32) | orientation, low[1].expand_as(block), high[1].expand_as(block)]
    words = philox4x32_10(torch.stack(counter), torch.stack([low[0], high[0]]))
    # The low four of an int64's eight bytes, which every device that PyTorch runs on stores lowest first.
    found = words.t().contiguous().view(torch.uint8).reshape(-1, 4, 8)[..., :4].reshape(-1)
    if first.numel():  # which need not begin a block
        found = found[torch.arange(count, device=rng.device) + first % 16]
    return found[:count].reshape(shape)


def philox4x32_10(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds on ``counter`` [4, blocks] with ``key`` [2]: 32-bit words in int64, for all 64 bits of a product.

    Words 0 and 2 are multiplied and words 1 and 3 are not: two pairs, so that an operation serves two words.
    """
    multiplier = _constant(_MULTIPLIERS, key)[:, None]
    weyl = _constant(_WEYL, key)
    even, odd = counter[0::2], counter[1::2]
    for turn in range(10):
        product = even * multiplier
        keys = (key + turn * weyl) & _LOW
        even, odd = ((product >> 32) & _LOW).flip(0) ^ odd ^ keys[:, None], (product & _LOW).flip(0)
    return torch.stack([even, odd], 1).flatten(0, 1)


def _constant(pair: tuple[int, int], like: Tensor) -> Tensor:
    """int64 [2] made on the device: copying it there would break a CUDA graph's capture."""
    return torch.arange(2, dtype=torch.int64, device=like.device) * (pair[1] - pair[0]) + pair[0]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantized."""

Output = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Results of a cast: codes, scales, the measured amax under delayed scaling, and the amax or scale it was given."""


class CastRequest(NamedTuple):
    """Amaxes and casts that a call asks for, the same in every call of a layer.

    Args:
        amax_of, amax_formats, amax_dims: which tensor each amax is of, and for which format along which dim.
        cast_of, formats, dims, k_major: which tensor each cast is of, and the arguments of the operation.
        own_level: the amax that each cast takes, or -1 if it is given one or needs none.
    """

    amax_of: list[int]
    amax_formats: list[str]
    amax_dims: list[int]
    cast_of: list[int]
    formats: list[str]
    dims: list[int]
    k_major: list[bool]
    own_level: list[int]


def as_matrix(x: Tensor) -> Tensor:
    """``x`` as [M, K]: leading dims flattened.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: it has a dtype that no format is defined for, or no dims at all.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"only floating-point tensors can be quantized, got {x.dtype}; cast it first, as in x.bfloat16()"
        )
    if x.dtype not in DTYPES:
        raise ValueError(
            f"cannot quantize {x.dtype}; bf16, fp16 and fp32 are supported: cast it first, as in x.float()"
        )
    if x.dim() == 0:
        raise ValueError("cannot quantize a tensor of no dims; reshape it to [1, 1]")
    return x.flatten(0, -2) if x.dim() > 2 else x if x.dim() == 2 else x[None]


# ---- one tensor ----


class CastResult(NamedTuple):
    """Result of a cast: uint8 codes, scales, and the tensor's own amax (fp32 [1]) where the scale was given."""

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor


def amax(x: Tensor, fmt: Format, dim: int) -> Tensor:
    """Finds the amax of the whole tensor or, where blocks are all there is, of each block.

    Args:
        x: [M, K], bf16, fp16 or fp32.

    Returns:
        fp32: [1]; [M] or [K] with ``amax_per_row``; the grid of blocks for a format with only block scales.
        NaNs are dropped, so the amax of nothing but NaN is 0, as of an empty tensor. They count as infinities in a
        block whose element has no NaN, and in a rotated tensor, where infinities become NaN.
    """
    if fmt.transform != "none":
        x = rotated(x, fmt, dim)
    if not fmt.amax_per_row:
        if fmt.block and fmt.scale_rule != "two_level":
            return _block_amax(_blocks(x.float(), *fmt.scale_block(dim)), fmt)[:, 0, :, 0]
        x, dim = x.reshape(1, -1), ROWWISE
    if isinstance(x, FakeTensor) or x.shape[dim] == 0:  # a compiler's number of rows must not be asked for
        return x.new_zeros(x.shape[:dim] if dim == ROWWISE else x.shape[1:], dtype=torch.float32)
    return x.abs().nan_to_num(0.0 if fmt.transform == "none" else torch.inf, posinf=torch.inf).amax(dim).float()


def cast(x: Tensor, given: Tensor | None, rng: Tensor | None, fmt: Format, dim: int) -> CastResult:
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
        # A scale of earlier amaxes saturates what is finite; an infinity must not look like that.
        codes = fmt.encoding.encode((x.float() * given).masked_fill_(x.isinf(), torch.nan))
        return new(CastResult, (codes, given.reciprocal(), amax(x, WHOLE, dim)))
    source = x if fmt.transform == "none" else rotated(x, fmt, dim)
    if given is not None and not fmt.grid:
        multiplier, scale_inv = fmt.scaling.scale(given.reshape(1), fmt, largest)
        codes = fmt.encoding.encode(source.float() * multiplier)
        return new(CastResult, (codes, scale_inv, x.new_empty(0, dtype=torch.float32)))
    blocks = _blocks(source.float(), *fmt.scale_block(dim))
    if fmt.scale_rule == "two_level":
        assert given is not None
        codes, scale_inv = _cast_two_level(blocks, _per_block(given, fmt, dim), rng, source.shape, fmt, dim)
    else:
        given = _block_amax(blocks, fmt) if given is None else given.reshape(blocks.shape[0], 1, blocks.shape[2], 1)
        multiplier, scale_inv = fmt.scaling.scale(given, fmt, largest)
        codes = fmt.encoding.encode(blocks * multiplier)
        scale_inv = scale_inv[:, 0, :, 0] if fmt.grid else scale_inv.reshape(-1)
    codes = _unblock(codes, source.shape)
    codes = _pack(codes, dim) if fmt.packed else codes
    return new(CastResult, (codes, scale_inv.contiguous(), x.new_empty(0, dtype=torch.float32)))


class RequestedCasts:
    """Casts that a request asks for, by the reference; :class:`gpu.RecordedCasts` are those by kernels."""

    def __init__(self, request: CastRequest) -> None:
        self.request = request

    def __call__(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], noop: Tensor | None
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        """The casts of ``xs``, and the amaxes that were found.

        Args:
            given, rngs: for each cast its amax or scale, if known, and its random seed.
            noop: as of :func:`quantize.cast`.
        """
        request = self.request
        amaxes: list[Tensor] = []
        outputs: list[Output] = []
        xs = list(xs)
        for i, x in enumerate(xs):
            xs[i] = x if x.dim() == 2 and x.dtype in DTYPES else as_matrix(x)
        with torch._C._DisableAutocast():  # it would run fp32 products in bf16
            for i, spec, dim in zip(request.amax_of, request.amax_formats, request.amax_dims, strict=True):
                amaxes.append(amax(xs[i], parse(spec), dim))
            for j, own in enumerate(request.own_level):  # in row-major order: the GEMMs of a CPU read any strides
                level = given[j] if own < 0 else amaxes[own]
                fmt, dim = parse(request.formats[j]), request.dims[j]
                codes, scale_inv, measured = cast(xs[request.cast_of[j]], level, rngs[j], fmt, dim)
                outputs.append((codes.contiguous(), scale_inv, measured, level))
        return outputs, amaxes


def dequantize(
    codes: Tensor, scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int, rows: int, cols: int
) -> Tensor:
    """The fp32 values [rows, cols] that codes and scales stand for, rotated back where the format rotates.

    ``codes`` of bf16 are what a cast gave in lieu of them: times the scales of their blocks.
    """
    shape = torch.Size((rotated_rows(rows) if fmt.transform == "hadamard16" else rows, cols))
    if codes.dtype == torch.bfloat16:
        scales = fmt.scaling.values(scale_inv)[:, None, :, None]
        values = _blocks(codes.float(), *fmt.scale_block(dim))
        values = torch.where(scales == 0, values, values / scales)
    else:
        values = _blocks(decode(codes, fmt, dim, shape), *fmt.scale_block(dim))
    restored = _unblock(values * _factors(scale_inv, amax, fmt, dim), shape)
    return unrotated(restored)[:rows] if fmt.transform == "hadamard16" else restored


def _factors(scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int) -> Tensor:
    """Returns what codes in blocks are multiplied by, fp32."""
    factor = scale_inv[:, None, :, None] if fmt.grid else scale_inv
    values = fmt.scaling.values(factor)
    if fmt.scale_rule != "two_level":
        return values
    assert amax is not None
    return values * _per_block(amax, fmt, dim) * fp32(1.0 / (6 * fmt.block_scale_max), scale_inv.device)


def scale_values(scale_inv: Tensor, amax: Tensor | None, fmt: Format, dim: int) -> Tensor:
    """Computes the factors of scales in the shape of ``scale_inv``."""
    factors = _factors(scale_inv, amax, fmt, dim)
    return factors[:, 0, :, 0].clone() if fmt.grid else factors.clone()


def decode(codes: Tensor, fmt: Format, dim: int, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """The [M, K] values of codes, unpacked but not scaled."""
    return fmt.encoding.decode(_unpack(codes, dim, shape) if fmt.packed else codes, dtype)


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


# ---- NVFP4 ----


def _cast_two_level(
    blocks: Tensor, amax: Tensor, rng: Tensor | None, shape: torch.Size, fmt: Format, dim: int
) -> tuple[Tensor, Tensor]:
    """NVFP4: E4M3 block scales under the fp32 scale that ``amax`` gives, numerics 1.5. Returns codes and scales."""
    block_amax = _block_amax(blocks, fmt)
    encode = (fp32(fmt.block_scale_max * 6, amax.device) / amax).clamp(max=FLT_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    if fmt.rounding.startswith("four_over_six"):
        codes, scales = _four_over_six(blocks, block_amax, amax, encode, fmt, dim)
    else:
        sixth = fp32(1.0 / 6.0, amax.device)
        scales = E4M3.encode((block_amax * (encode * sixth)).masked_fill_(block_amax.isinf(), torch.nan))
        scaled = blocks * _two_level_multiplier(scales, encode)
        if fmt.rounding == "stochastic":
            assert rng is not None
            bits = _blocks(random_bytes(rng, shape, dim), blocks.shape[1], blocks.shape[3])
            codes = E2M1.encode_stochastic(scaled, bits)
        else:
            codes = E2M1.encode(scaled)
    return codes, scales[:, 0, :, 0]


def _two_level_multiplier(scales: Tensor, encode: Tensor) -> Tensor:
    return (E4M3.decode(scales) * encode.reciprocal()).reciprocal().nan_to_num(FLT_MAX)


def _four_over_six(
    blocks: Tensor, block_amax: Tensor, amax: Tensor, encode: Tensor, fmt: Format, dim: int
) -> tuple[Tensor, Tensor]:
    """Scales each block so that its amax lands on 6 or on 4, whichever leaves the smaller error."""
    base = ((block_amax / fp32(6.0, amax.device)) * encode).masked_fill_(block_amax.isinf(), torch.nan)
    tries = []
    for stretch in (1.5, 1.0):
        scales = E4M3.encode(base * stretch)
        codes = E2M1.encode(blocks * _two_level_multiplier(scales, encode))
        value = E2M1.decode(codes) * E4M3.decode(scales) * amax
        value = value / fp32(6 * fmt.block_scale_max, amax.device)
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


def _block_amax(blocks: Tensor, fmt: Format) -> Tensor:
    return blocks.abs().nan_to_num(0.0 if fmt.encoding.nan else torch.inf, posinf=torch.inf).amax((1, 3), keepdim=True)


def _blocks(x: Tensor, rows: int, cols: int) -> Tensor:
    """[M, K] as [M/rows, rows, K/cols, cols], zero-padded; 0 stands for all rows or columns, at least one."""
    if rows == cols == 0:
        return x[None, :, None, :]
    pad_rows = -x.shape[0] % rows if rows else int(x.shape[0] == 0)
    pad_cols = -x.shape[1] % cols if cols else int(x.shape[1] == 0)
    if pad_rows or pad_cols:
        x = torch.nn.functional.pad(x, (0, pad_cols, 0, pad_rows))
    rows, cols = rows or x.shape[0], cols or x.shape[1]
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // cols, cols)


def _unblock(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`_blocks`."""
    rows, cols = blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3]
    matrix = blocks.reshape(rows, cols)
    if (rows, cols) == tuple(shape):
        return matrix
    return matrix[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)  # lets go of the padding
