"""How far products on tensor cores may be from exact ones."""

from __future__ import annotations

import torch
from torch import Tensor


def tensor_core_error(a: Tensor, b: Tensor, promote: int | None) -> Tensor:
    """How far Hopper's FP8 tensor cores may be from the exact product of ``a`` [m, k] and ``b`` [n, k], both float64.

    A step multiplies 32 elements, aligns the products and the sum so far to the largest of the 33 and cuts them off 13
    bits below it (DeepSeek-V3, arXiv 2412.19437, section 3.3.2: about 14 bits are kept). So it loses at most 33 * 2^-13
    of that largest, which is no more than max(amax(a_row) * amax(b_row), |sum|). The sum moves to an fp32 register each
    ``promote`` elements, or only at the end (fast accumulation). Sums are taken in order of the contracted dim.
    """
    total = a.new_zeros(a.shape[0], b.shape[0])
    error = torch.zeros_like(total)
    for start in range(0, a.shape[1], 32):
        if promote is not None and start % promote == 0:
            total = torch.zeros_like(total)
        x, y = a[:, start : start + 32], b[:, start : start + 32]
        after = total + x @ y.t()
        peak = x.abs().amax(1)[:, None] * y.abs().amax(1)
        error += 33 * 2.0**-13 * torch.maximum(peak, torch.maximum(total.abs(), after.abs()))
        total = after
    return error
