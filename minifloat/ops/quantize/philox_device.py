"""Random bits for stochastic rounding in Triton: those of reference.py, for groups as nvfp4_device.py has them."""

from __future__ import annotations

import triton
import triton.language as tl

from minifloat.ops.quantize.device import append
from minifloat.ops.quantize.nvfp4_device import GROUP, columns_of_16, stack_4


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
