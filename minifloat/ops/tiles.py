"""The pinned table of tiles: how much of a matrix one program works on, and with how many warps.

Nothing is timed while training: ranks that time kernels choose differently, and a choice can change the order of sums.
``benchmarks/tune_tiles.py`` times candidates on a machine and prints the lines of this table. The casts give the same
bits with every tile; kernels that sum (the norms) have one tile for each width, which is part of their definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows and columns of one program, and its warps of 32 threads.

    ``registers``: at most so many in a thread, where Gluon compiles the kernel; None for as many as the compiler takes.
    """

    rows: int
    cols: int
    warps: int
    registers: int | None = None

    def count(self, shape: Sequence[int]) -> int:
        """Tiles of a matrix of ``shape``."""
        return -(-shape[0] // self.rows) * -(-shape[1] // self.cols)


class GemmTile(NamedTuple):
    """Rows and columns of a program's part of a product, elements of the contracted dim that it loads at a time, warps.

    ``stages``: loads that are in flight.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


SM_90: dict[str, Tile] = {
    "amax": Tile(1, 16384, 8),
    "cast_tensor": Tile(64, 128, 4),
    "cast_block": Tile(32, 128, 4),
    "cast_block_columnwise": Tile(128, 128, 4),
    "cast_block_shared": Tile(128, 128, 8),  # through shared memory, see quantize/job.py
    "cast_mx": Tile(16, 256, 4),
    "cast_mx_columnwise": Tile(32, 128, 2),
    "cast_mx_shared": Tile(32, 256, 4),
    "cast_nvfp4": Tile(16, 512, 4),
    "cast_nvfp4_search": Tile(16, 256, 4),  # 4-over-6
    "cast_nvfp4_unaligned": Tile(16, 128, 4),  # stochastic, where rows do not begin at 16 bytes
    "activation": Tile(16, 256, 8),
    "activation_columnwise": Tile(64, 128, 8),
    "activation_backward": Tile(4, 512, 4),
    "grouped_activation_backward": Tile(4, 256, 4),  # a probability gradient's order of sums is that of its columns
    "grouped_activation_block_shared": Tile(128, 128, 8),
    "grouped_activation_backward_block_shared": Tile(128, 128, 16, 64),
    "activation_backward_bias": Tile(64, 64, 8),  # a bias gradient's order of sums is that of its tile
    "activation_backward_columnwise": Tile(32, 64, 4),
    "activation_block": Tile(32, 128, 4),
    "activation_block_columnwise": Tile(128, 128, 8),
    "activation_block_shared": Tile(128, 128, 8, 64),
    "activation_mx": Tile(32, 128, 2),
    "activation_mx_columnwise": Tile(32, 128, 2),
    "activation_mx_shared": Tile(32, 128, 2),
    "activation_backward_block": Tile(16, 256, 4),
    "activation_backward_block_columnwise": Tile(128, 128, 8),
    "activation_backward_block_shared": Tile(128, 128, 8),
    "activation_backward_mx": Tile(32, 64, 2),
    "activation_backward_mx_columnwise": Tile(32, 64, 2),
    "activation_backward_mx_shared": Tile(64, 128, 4),
    "norm": Tile(32, 256, 4),  # behind statistics, with a given scale
    "norm_columnwise": Tile(32, 128, 4),
    "norm_block": Tile(32, 128, 2),
    "norm_block_columnwise": Tile(128, 128, 8),
    "norm_block_shared": Tile(128, 128, 4),
    "norm_mx": Tile(32, 64, 1),
    "norm_mx_columnwise": Tile(32, 64, 1),
    "norm_mx_shared": Tile(32, 256, 4),
    "amax_nvfp4": Tile(16, 512, 4),
    "amax_nvfp4_lines": Tile(128, 64, 4),
    "grouped_sum": Tile(64, 64, 8),  # the order of sums is that of its rows
}
"""Tiles; those of casts were measured on an H200 (``benchmarks/results/``), and other devices use them until measured.

Kernels that are alone of their kind, or whose tile depends on the width (the norms), have theirs beside them.
"""

GEMM_SM_90: dict[str, GemmTile] = {
    "grouped_fp8": GemmTile(128, 128, 128, 8, 4),  # sums leave the tensor core after 128 elements
    "grouped_fp8_fast": GemmTile(128, 256, 128, 8, 3),
    "grouped_block": GemmTile(128, 128, 128, 8, 4),
    "grouped_half": GemmTile(128, 256, 64, 8, 3),  # bf16 and fp16
    "grouped_float": GemmTile(64, 64, 32, 4, 2),  # fp32, without tensor cores
    "grouped_fp8_fast_few": GemmTile(64, 64, 128, 4, 6),
    "grouped_half_few": GemmTile(64, 64, 64, 4, 6),
}
"""Tiles of products, chosen by what fits registers and shared memory.

A sum adds up ``depth`` elements after ``depth`` elements whatever ``rows`` and ``cols`` are: tiles for few rows, which
keep more multiprocessors busy, give the same bits.
"""

FEW_ROWS = 128


@cache
def gemm_tile(kernel: str, device: torch.device, few: bool = False) -> GemmTile:
    """The tile of a product on a device; ``few``: of at most FEW_ROWS rows."""
    return GEMM_SM_90.get(f"{kernel}_few" if few else kernel, GEMM_SM_90[kernel])


@cache
def tile(kernel: str, device: torch.device) -> Tile:
    """The tile of a kernel on a device."""
    return SM_90[kernel]
