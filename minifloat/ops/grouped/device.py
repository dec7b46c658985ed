"""What kernels on groups of rows share, in Triton: the group of a tile, and where a group begins (``layout.py``)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def group_of(offsets, tile, groups, BLOCK: tl.constexpr, SEARCH: tl.constexpr):
    """The group of a tile of BLOCK rows, where group g's begin at tile offsets[g] / BLOCK + g; ``groups`` for the tail.

    SEARCH: a power of two above ``groups``. A group may have one tile more than its rows need.
    """
    group = tl.arange(0, SEARCH)
    first = tl.load(offsets + group, mask=group <= groups, other=0)
    begun = (group <= groups) & (first // BLOCK + group <= tile)
    return tl.sum(begun.to(tl.int32), axis=0) - 1


@triton.jit
def rows_of(offsets, group, groups, M):
    """First row and end of a group; of number ``groups``, the tail, up to M."""
    first = tl.load(offsets + group)
    end = tl.load(offsets + tl.minimum(group + 1, groups))
    return first, tl.where(group < groups, end, M)


@triton.jit
def begin(offset, group, UNIT: tl.constexpr):
    """``layout.start``; UNIT 0 where groups follow each other without a gap."""
    return offset if UNIT == 0 else (offset // UNIT + group) * UNIT


@triton.jit
def grid_row(offset, group, UNIT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The row of the grid of scales at which a group begins: of squares, of blocks of rows, or of rows."""
    if TILE:
        return offset // BLOCK + group
    return begin(offset, group, UNIT) // BLOCK if UNIT > 0 else offset
