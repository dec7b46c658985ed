"""The random Hadamard transform: rotates groups of 16 tokens so that outliers spread before a 4-bit cast.

Both operands of wgrad are rotated by the same orthogonal R, so that it cancels: (R x)^T (R dy) = x^T dy. The product is
four butterfly stages in a fixed order, since a matrix product's order is free and differs in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, Format

GROUP = 16
# The fixed random signs of NVFP4 training recipes, bit i set where sign i is -1. Not drawn anew: both operands of
# wgrad, and every rank of a sharded one, must be rotated alike.
NEGATIVE = 0xD7E8


def padded(rows: int) -> int:
    """Rows after the last group is filled up with zeros."""
    return rows + -rows % GROUP


def prepare(x: Tensor, fmt: Format, dim: int) -> Tensor:
    """``x`` [M, K] as the cast along ``dim`` sees it: itself, or rotated and rounded to bf16, M rounded up to 16."""
    if fmt.transform == "none":
        return x
    if dim != COLUMNWISE:
        raise ValueError("the Hadamard transform rotates groups of tokens: columnwise casts only")
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[0] % GROUP))
    return (_butterflies(_signed(x)) * 0.25).to(torch.bfloat16)


def inverse(x: Tensor) -> Tensor:
    """Rotates back what :func:`prepare` rotated, [16 n, K] fp32."""
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
