"""The arithmetic of NVFP4 in Triton: rotation, random bits, block scales and E2M1 codes of groups of 16 elements.

A group is a Python tuple of its 16 elements, each a vector over many groups ("lines"). So a thread holds whole groups,
the order of sums is the order of the code, and a cast along the rows and one along the columns differ only in where
their elements come from. Random bits are those of ``reference.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minifloat.formats.device import MINUS_INFINITY_BITS, if_finite, reciprocal
from minifloat.ops.quantize.device import FLT_MAX, append

GROUP = tl.constexpr(16)
_NEGATIVE = tl.constexpr(0xD7E8)  # the signs of the rotation, see reference.py
_SIXTH = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)
_INTEGERS = tl.constexpr(8388608.0)  # 2^23: fp32 numbers from here to twice this are the integers
_INTEGER_BITS = tl.constexpr(0x4B000000)  # the bits of 2^23
MINUS_ZERO_BITS = tl.constexpr(-0x80000000)
_UNIT = tl.constexpr(2.0**126)  # times an fp32 number with a code's exponent and mantissa in its own: the code's value


# ---- groups ----


@triton.jit
def _halves(x):
    """[N, G] as two of [N, G / 2]."""
    N: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.split(x.reshape(N, 2, HALF).permute(0, 2, 1))


@triton.jit
def _columns_of_4(x):
    first, second = _halves(x)
    return tl.split(first) + tl.split(second)


@triton.jit
def columns_of_16(x):
    """[N, 16] as a tuple of 16 vectors of [N]."""
    first, second = _halves(x)
    a, b = _halves(first)
    c, d = _halves(second)
    return _columns_of_4(a) + _columns_of_4(b) + _columns_of_4(c) + _columns_of_4(d)


@triton.jit
def stack_4(a, b, c, d):
    """Four of [N] as [N, 4]."""
    N: tl.constexpr = a.shape[0]
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(N, 4)


@triton.jit
def stack_8(x):
    """Eight of [N] as [N, 8]."""
    N: tl.constexpr = x[0].shape[0]
    even, odd = stack_4(x[0], x[2], x[4], x[6]), stack_4(x[1], x[3], x[5], x[7])
    return tl.join(even, odd).reshape(N, 8)


@triton.jit
def stack_16(x):
    """Sixteen of [N] as [N, 16]."""
    N: tl.constexpr = x[0].shape[0]
    even, odd = (
        stack_8((x[0], x[2], x[4], x[6], x[8], x[10], x[12], x[14])),
        stack_8((x[1], x[3], x[5], x[7], x[9], x[11], x[13], x[15])),
    )
    return tl.join(even, odd).reshape(N, 16)


@triton.jit
def load_columns(x, m, k, M, K):
    """16 rows from ``m`` on, columns ``k``, as groups along the columns; 0 outside."""
    values = ()
    for i in tl.static_range(GROUP):
        end = tl.where(m + i < M, K, 0)
        row = tl.load(x + (m + i).to(tl.int64) * K + k, mask=k < end, other=0.0)
        values = append(values, row.to(tl.float32))
    return values


@triton.jit
def load_rows(x, m, k, M, K):
    """16 rows from ``m`` on, columns ``k``, as groups along the rows, row by row; 0 outside."""
    LINES: tl.constexpr = k.shape[0]
    rows = m + tl.arange(0, GROUP)
    inside = (rows[:, None] < M) & (k[None, :] < K)
    values = tl.load(x + rows[:, None].to(tl.int64) * K + k[None, :], mask=inside, other=0.0)
    columns = columns_of_16(values.reshape(LINES, GROUP))
    found = ()
    for i in tl.static_range(GROUP):
        found = append(found, columns[i].to(tl.float32))
    return found


@triton.jit
def largest(values, NAN: tl.constexpr):
    """The largest magnitude of each group; a NaN counts as infinite if ``NAN``, else it is dropped."""
    HOW: tl.constexpr = tl.PropagateNan.ALL if NAN else tl.PropagateNan.NONE
    found = tl.abs(values[0])
    for i in tl.static_range(1, GROUP):
        found = tl.maximum(found, tl.abs(values[i]), propagate_nan=HOW)
    return tl.where(found == found, found, float("inf") if NAN else 0.0)


@triton.jit
def _butterflies(x, STAGE: tl.constexpr):
    turned = ()
    for i in tl.static_range(GROUP):
        if (i >> STAGE) & 1:
            turned = append(turned, x[i - (1 << STAGE)] - x[i])
        else:
            turned = append(turned, x[i] + x[i + (1 << STAGE)])
    return turned


@triton.jit
def rotate(values):
    """``hadamard.prepare``: signs, butterflies of strides 1, 2, 4 and 8, a quarter, bf16."""
    signed = ()
    for i in tl.static_range(GROUP):  # not -x, which Triton takes for 0 - x: it makes 0 of 0, not -0
        signed = append(signed, values[i] * -1.0 if (_NEGATIVE >> i) & 1 else values[i])
    turned = _butterflies(_butterflies(_butterflies(_butterflies(signed, 0), 1), 2), 3)
    rotated = ()
    for i in tl.static_range(GROUP):
        rotated = append(rotated, (turned[i] * 0.25).to(tl.bfloat16).to(tl.float32))
    return rotated


# ---- elements ----


@triton.jit
def _sign(x):
    """8 for what has a sign, which NaN has not. As integers, -0 to minus infinity are the smallest floats."""
    return tl.where(x.to(tl.int32, bitcast=True) <= MINUS_INFINITY_BITS, 8, 0)


@triton.jit
def _nearest(x):
    """The code 0..7 of the magnitude, as an fp32 number 2^23 + code: to nearest, ties to even, saturating; NaN to 7.

    The code as a function of the magnitude has slope 2 up to 2, 1 up to 4, then 1/2: it is the smallest of three lines,
    and rounding keeps that order. Adding 2^23 rounds to an integer, to even when halfway, once.
    """
    a = tl.minimum(tl.abs(x), 6.0)  # also of NaN
    low = tl.fma(a, 2.0, _INTEGERS)
    middle = a + (_INTEGERS + 2.0)
    high = tl.fma(a, 0.5, _INTEGERS + 4.0)
    return tl.minimum(tl.minimum(low, middle), high)


@triton.jit
def _stochastic(x, bits):
    """The code 0..7 of the magnitude, up with the probability of the remainder: ``bits`` is a random byte."""
    a = tl.abs(x)
    # Twice the step is the power of two below `a`; from 8 on it does not matter, since all becomes 6.
    power = (a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    share = (bits | _INTEGER_BITS).to(tl.float32, bitcast=True) - _INTEGERS
    t = tl.minimum(tl.fma(share, tl.maximum(power, 1.0) * (0.5 / 256), a), 6.0)  # also of NaN
    # Exponent and first bit of the mantissa are the code from 1 on; below, it is 1 from a half on.
    code = (t.to(tl.int32, bitcast=True) >> 22) - 252
    return tl.maximum(code, (t >= 0.5).to(tl.int32))


# ---- scales ----


@triton.jit
def encode_scale(amax, LARGEST: tl.constexpr):
    """numerics 1.5, S_enc: what brings ``amax`` to the largest scale times the largest element."""
    scale = tl.minimum(tl.div_rn(tl.full(amax.shape, LARGEST * 6, tl.float32), amax), FLT_MAX)
    return tl.where((amax == 0) | (scale == 0), 1.0, scale)


@triton.jit
def _multiplier(scales, decode_scale):
    return tl.minimum(reciprocal(scales.to(tl.float32) * decode_scale), FLT_MAX)  # of NaN too: 0 outside stays 0


@triton.jit
def _as_tiles(x, COLUMN: tl.constexpr):
    """Lines as [16, tiles]. Lines along rows come row by row; those along columns are columns."""
    TILES: tl.constexpr = x.shape[0] // GROUP
    return x.reshape(TILES, GROUP).trans() if COLUMN else x.reshape(GROUP, TILES)


@triton.jit
def _as_lines(x, COLUMN: tl.constexpr):
    """[16 or 1, tiles] as lines."""
    TILES: tl.constexpr = x.shape[1]
    x = tl.broadcast_to(x, (GROUP, TILES))
    return (x.trans() if COLUMN else x).reshape(GROUP * TILES)


@triton.jit
def tile_max(x, COLUMN: tl.constexpr):
    """The largest of the 16 lines of each tile, for each of them."""
    return _as_lines(tl.max(_as_tiles(x, COLUMN), axis=0, keep_dims=True), COLUMN)


@triton.jit
def _halves_sum(x):
    HALF: tl.constexpr = x.shape[0] // 2
    TILES: tl.constexpr = x.shape[1]
    upper, lower = tl.split(x.reshape(2, HALF, TILES).permute(1, 2, 0))
    return upper + lower


@triton.jit
def _tile_sum(x, COLUMN: tl.constexpr):
    """The sum of the 16 lines of each tile, for each of them: pairwise, 8 apart, then 4, 2 and 1."""
    x = _halves_sum(_halves_sum(_halves_sum(_halves_sum(_as_tiles(x, COLUMN)))))
    return _as_lines(x, COLUMN)


# ---- casts of groups; each returns 8 bytes a group, two codes in each, or 16 values, and E4M3 scales ----


@triton.jit
def _pack(codes):
    packed = ()
    for i in tl.static_range(8):
        packed = append(packed, (codes[2 * i] | (codes[2 * i + 1] << 4)).to(tl.uint8))
    return packed


@triton.jit
def _value(code, x, scales):
    """bf16: the value of a code of magnitude, in the low bits of ``code``, with the sign of ``x``, times its scale."""
    sign = tl.where(_sign(x) != 0, MINUS_ZERO_BITS, 0)
    return (((code << 22) | sign).to(tl.float32, bitcast=True) * _UNIT * scales).to(tl.bfloat16)


@triton.jit
def cast_groups(values, bits, block_amax, amax, FORMAT: tl.constexpr, AS_VALUES: tl.constexpr):
    """Casts groups to nearest, or by ``bits``, 16 random bytes a group; ``AS_VALUES``: to values, not codes."""
    scale = encode_scale(amax, FORMAT.block_scale_max)
    scales = if_finite(block_amax, block_amax * (scale * _SIXTH)).to(tl.float8e4nv)
    multiplier = _multiplier(scales, reciprocal(scale))
    result = ()
    for i in tl.static_range(GROUP):
        x = values[i] * multiplier
        if FORMAT.rounding == "stochastic":
            code = _stochastic(x, bits[i])
        else:
            code = _nearest(x).to(tl.int32, bitcast=True)
        if AS_VALUES:  # exact: bits above those of the code are shifted out
            result = append(result, _value(code, x, scales.to(tl.float32)))
        else:
            result = append(result, (code & 7) | _sign(x))
    if not AS_VALUES:
        result = _pack(result)
    return result, scales.to(tl.uint8, bitcast=True)


@triton.jit
def _attempt(values, wanted, scale, amax, FORMAT: tl.constexpr):
    """A cast with the scales ``wanted``, and the error of each group, summed one by one."""
    scales = wanted.to(tl.float8e4nv)
    multiplier = _multiplier(scales, reciprocal(scale))
    whole = tl.full(wanted.shape, FORMAT.block_scale_max * 6, tl.float32)
    codes = ()
    total = tl.zeros(wanted.shape, tl.float32)
    for i in tl.static_range(GROUP):
        scaled = values[i] * multiplier
        nearest, sign = _nearest(scaled), _sign(scaled)
        codes = append(codes, (nearest.to(tl.int32, bitcast=True) & 7) | sign)
        code = nearest - _INTEGERS
        magnitude = tl.maximum(tl.maximum(code * 0.5, code - 2.0), code * 2.0 - 8.0)  # on the largest of three lines
        value = tl.where(sign != 0, -magnitude, magnitude) * scales.to(tl.float32) * amax
        error = tl.div_rn(value, whole) - values[i]
        total += tl.abs(error) if FORMAT.rounding == "four_over_six_mae" else error * error
    return _pack(codes), scales.to(tl.uint8, bitcast=True), total


@triton.jit
def cast_groups_four_over_six(values, block_amax, amax, FORMAT: tl.constexpr, COLUMN: tl.constexpr):
    """Tries the amax of a block on 4 and on 6, and takes what leaves the smaller error."""
    scale = encode_scale(amax, FORMAT.block_scale_max)
    base = if_finite(block_amax, tl.div_rn(block_amax, tl.full(block_amax.shape, 6.0, tl.float32)) * scale)
    codes_4, scales_4, error_4 = _attempt(values, base * 1.5, scale, amax, FORMAT)
    codes_6, scales_6, error_6 = _attempt(values, base, scale, amax, FORMAT)
    if FORMAT.tile:
        error_4 = _tile_sum(error_4, COLUMN)
        error_6 = _tile_sum(error_6, COLUMN)
    four = error_4 < error_6
    codes = ()
    for i in tl.static_range(8):
        codes = append(codes, tl.where(four, codes_4[i], codes_6[i]))
    return codes, tl.where(four, scales_4, scales_6)


@triton.jit
def _philox(rng, block, COLUMN: tl.constexpr):
    """The four words of Philox blocks (int64), see reference.py."""
    seed, offset = tl.load(rng), tl.load(rng + 1)
    low = block.to(tl.uint32)
    high = (block >> 32).to(tl.uint32)
    if COLUMN:
        high = high | 0x80000000
    zero = low & 0
    return tl.philox(seed, low, high, zero + offset.to(tl.uint32), zero + (offset >> 32).to(tl.uint32))


@triton.jit
def _byte(word, place):
    return ((word >> (8 * place).to(tl.uint32)) & 0xFF).to(tl.int32)


@triton.jit
def _bytes(rng, index, COLUMN: tl.constexpr):
    """The random bits of elements ``index`` [16, N] of 16 rows as groups, each from a Philox block of its own."""
    N: tl.constexpr = index.shape[1]
    a, b, c, d = _philox(rng, index // GROUP, COLUMN)
    place = (index % GROUP).to(tl.int32)
    word = tl.where(place < 8, tl.where(place < 4, a, b), tl.where(place < 12, c, d))
    found = _byte(word, place % 4)
    return columns_of_16(found.trans() if COLUMN else found.reshape(N, GROUP))


@triton.jit
def _row_bytes(rng, block):
    """The random bits of 16 elements along a row that are Philox block ``block``."""
    words = _philox(rng, block, False)
    found = ()
    for i in tl.static_range(GROUP):
        found = append(found, _byte(words[i // 4], tl.full((), i % 4, tl.int32)))
    return found


@triton.jit
def _column_bytes(rng, block):
    """The random bits of 16 rows of N columns. ``block``: [N], those of each row in turn, N / 16 a row."""
    N: tl.constexpr = block.shape[0]
    FOURTH: tl.constexpr = N // 4
    words = _philox(rng, block, True)
    rows = columns_of_16(stack_4(words[0], words[1], words[2], words[3]).reshape(GROUP, FOURTH).trans())
    place = tl.arange(0, 4)[None, :]
    found = ()
    for i in tl.static_range(GROUP):
        found = append(found, _byte(rows[i][:, None], place).reshape(N))
    return found


@triton.jit
def random_bits(
    rng, m, k, K, COLUMN: tl.constexpr, SHARDED: tl.constexpr, ALIGNED_K: tl.constexpr, LINES: tl.constexpr
):
    """16 random bytes for each group of the 16 rows from ``m`` on and the columns from ``k`` on.

    ``SHARDED``: these are rows of a larger tensor, the first of which is the third number of ``rng``.
    """
    if SHARDED:
        m += tl.load(rng + 2)
    GROUPS: tl.constexpr = LINES // GROUP
    line = tl.arange(0, LINES)
    if ALIGNED_K:  # 16 elements along a row share a block of bits
        block = (m + line // GROUPS).to(tl.int64) * (K // GROUP) + k // GROUP + line % GROUPS
        return _column_bytes(rng, block) if COLUMN else _row_bytes(rng, block)
    rows = m + tl.arange(0, GROUP)
    return _bytes(rng, rows[:, None].to(tl.int64) * K + k + line[None, :], COLUMN)
