"""How the norm kernels split a matrix: one configuration for each width, as the order of a row's sums depends on it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class NormTile(NamedTuple):
    """What one program holds at a time.

    Args:
        rows, block: of the tile; a row wider than ``block`` is read in chunks of it.
        one_chunk: no row is wider, so that the tile stays in registers.
        warps: of 32 threads.
    """

    rows: int
    block: int
    one_chunk: bool
    warps: int


WIDEST_BLOCK = 16384
CHUNK = 4096  # of a row wider than that
MOST_ROWS = 64


@lru_cache(1024)
def forward_tile(width: int) -> NormTile:
    """The tile for rows of ``width`` elements, the same on every device and for every number of rows.

    It is part of the definition of a result: element ``i`` of a chunk is summed over the chunks first, then those sums
    over the chunk, in an order that only ``block``, ``warps`` and the dtypes decide.
    """
    return _tile(width, elements=8192, of_warp=1024)


@lru_cache(1024)
def backward_tile(width: int) -> NormTile:
    """As :func:`forward_tile`, but smaller: the backward holds two tensors and sums over the rows."""
    return _tile(width, elements=4096, of_warp=512)


def _tile(width: int, elements: int, of_warp: int) -> NormTile:
    block = max(1 << (width - 1).bit_length(), 16) if width <= WIDEST_BLOCK else CHUNK
    rows = min(max(elements // block, 1), MOST_ROWS)
    return NormTile(rows, block, width <= block, min(max(rows * block // of_warp, 4), 16))
