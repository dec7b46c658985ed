"""Casts of rows that are read by index, in Triton: a token's row goes to each of its experts without a copy between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.grouped import cast_kernels, gathered
from minifloat.ops.grouped.fused import as_declared, casts_to
from minifloat.ops.launch import Kernel, ready
from minifloat.ops.quantize import gpu
from minifloat.ops.quantize.decode import at_16_bytes
from minifloat.ops.quantize.device import extent
from minifloat.ops.quantize.job import aligned
from minifloat.ops.tiles import Tile

_TOKENS = Tile(4, 512, 4)
_ROWS = 1024


@triton.jit
def token_amax_kernel(x, amaxes, T, K, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The amax of each row of ``x`` [T, K]."""
    K = extent(K, ALIGNED)
    t, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLS)
    largest = tl.zeros((ROWS, COLS), tl.float32)
    at = x + t[:, None].to(tl.int64) * K + k[None, :]
    for first in tl.range(0, K, COLS, num_stages=3):
        inside = (t[:, None] < T) & (first + k[None, :] < K)
        values = tl.load(at + first, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))  # which drops NaN
    tl.store(amaxes + t, tl.max(largest, axis=1), mask=t < T)


@triton.jit
def gathered_amax_kernel(amaxes, rows, offsets, found, BLOCK: tl.constexpr):
    """The largest amax of the tokens of each group."""
    group = tl.program_id(0)
    end = tl.load(offsets + group + 1)
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(offsets + group), end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        token = tl.load(rows + row, mask=row < end, other=0)
        largest = tl.maximum(largest, tl.load(amaxes + token, mask=row < end, other=0.0))
    tl.store(found + group, tl.max(largest, axis=0))


_of_tokens, _of_groups = Kernel(token_amax_kernel), Kernel(gathered_amax_kernel, wide=False)


def amax(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """``gathered_amax``: of each token, and then of each group's; tokens are read once, however many experts."""
    x, (T, K), groups = ready(x), x.shape, offsets.numel() - 1
    of_tokens = torch.empty(T, dtype=torch.float32, device=x.device)
    found = torch.empty(groups, dtype=torch.float32, device=x.device)
    count, cols, warps, _ = _TOKENS
    _of_tokens(triton.cdiv(T, count), (x, of_tokens), (T, K), (aligned([K]), count, cols), warps)
    _of_groups(groups, (of_tokens, ready(rows), at_16_bytes(offsets), found), (), (_ROWS,), 4)
    return found


def cast(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    level: Tensor | None,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """``gathered_cast``."""
    fmt, K = parse(formats[0]), x.shape[1]
    if not gpu.casts(fmt):
        return gathered.gathered_cast.reference(x, rows, offsets, level, formats, dims, k_major)
    x = ready(x)
    matrix = x.new_empty(1, 1).expand(rows.shape[0], K)
    out, made = casts_to(matrix, offsets, formats, dims, k_major)
    cast_kernels.cast(out, x, rows, offsets, level)
    return as_declared(made, formats, dims, k_major)
