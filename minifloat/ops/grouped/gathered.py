"""Casts of rows in the order of experts, read from tokens: what ``permute`` and a cast of groups give, in one.

Row r of the matrix [M, K] that is cast is row ``rows[r]`` of ``x`` [T, K]; it never stands in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.ops import grouped
from minifloat.ops.library import operation


@operation("grouped.cast_kernels:gathered_amax")
def gathered_amax(x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """The amax of each group, fp32 [G]; ``rows``: int32 [M], ``offsets``: as of :data:`grouped.grouped_amax`."""
    return grouped.grouped_amax.reference(x[rows.long()], offsets, [Format().spec], [ROWWISE])[0]


@gathered_amax.fake
def _(x: Tensor, _rows: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0] - 1, dtype=torch.float32)


@operation("grouped.cast_kernels:gathered_cast")
def gathered_cast(
    x: Tensor,
    rows: Tensor,
    offsets: Tensor,
    level: Tensor | None,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """What :data:`grouped.grouped_cast` gives, with the same ``level`` for each cast: amaxes or scales, fp32 [G].

    The formats are one format: of one scale a group, with columnwise codes ``k_major``, or of
    ``quantize.casts_blocks``.
    """
    matrix = x[rows.long()]
    return grouped.grouped_cast.reference(matrix, offsets, [level] * len(formats), None, formats, dims, k_major)


@gathered_cast.fake
def _(x: Tensor, rows: Tensor, offsets: Tensor, _level: Any, *how: Any) -> list[Tensor]:
    matrix = x.new_empty(1, 1).expand(rows.shape[0], x.shape[1])
    return grouped.empty_casts(matrix, offsets, *how)


__all__ = ["gathered_amax", "gathered_cast"]
