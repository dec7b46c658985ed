"""The sum of each group's rows, in Triton: fp32, in an order that follows from the group's own rows alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.launch import Kernel, allocate, ready
from minifloat.ops.quantize.decode import at_16_bytes
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import tile


@triton.jit
def grouped_sum_kernel(
    x, out, offsets, N, ALIGNED_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Every BLOCK_M-th row in turn, then the BLOCK_M sums in pairs; rounded once."""
    N = extent(N, ALIGNED_N)
    tiles = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    first, end = tl.load(offsets + group), tl.load(offsets + group + 1)
    at = x + (first + m)[:, None].to(tl.int64) * N + n[None, :]
    step = BLOCK_M * N.to(tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in tl.range(first, end, BLOCK_M, num_stages=3):
        total += tl.load(at, mask=(done + m < end)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        at += step
    found = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + group.to(tl.int64) * N + n, found, mask=n < N)


_sum = Kernel(grouped_sum_kernel)


def add_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """``grouped_sum``."""
    x, groups = ready(x), offsets.numel() - 1
    rows, cols, warps, _ = tile("grouped_sum", x.device)
    out = allocate((groups, x.shape[1]), x.dtype, x.device)
    _sum(
        groups * triton.cdiv(x.shape[1], cols), (x, out, at_16_bytes(offsets)), (x.shape[1],),
        (aligned([x.shape[1]]), rows, cols), warps,
    )  # fmt: skip
    return out
