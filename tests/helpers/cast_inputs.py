"""What casts are tested on: numbers that reach each branch of docs/numerics.md."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _with(values: list[float], x: Tensor, share: float = 0.02) -> Tensor:
    """``x`` with some of ``values`` at so many places, the first in the first place."""
    chosen = torch.rand(x.shape) < share
    chosen.view(-1)[:1] = True
    x[chosen] = torch.tensor(values).repeat(x.numel())[: int(chosen.sum())]
    return x


def _blank(x: Tensor, value: float) -> Tensor:
    """``x`` with whole strips and a whole tile of ``value``."""
    x[1::5], x[:, 1::5] = value, value
    x[:128, 128:256] = value
    return x


def _mixed(x: Tensor) -> Tensor:
    """Columns of different kinds beside each other."""
    x[:, 1::3] *= torch.exp(2.5 * torch.randn_like(x[:, 1::3]))  # heavy tails
    x[:, 16:32] = torch.randint(-24, 25, x[:, 16:32].shape) / 4  # ties of the rounding
    x[:, 32:48] *= 1e-4  # block scales near zero
    x[torch.rand(x.shape) < 0.1] = 0.0
    x[:, 48:64] = torch.copysign(torch.zeros(()), torch.randn_like(x[:, 48:64]))
    return x


INFINITIES, NANS = [torch.inf, -torch.inf], [torch.nan, -torch.nan]
DATA: dict[str, Callable[[tuple[int, int], torch.dtype], Tensor]] = {
    "normal": lambda shape, dtype: torch.randn(shape),
    "heavy_tailed": lambda shape, dtype: torch.randn(shape) * torch.exp(2.5 * torch.randn(shape)),
    "mixed": lambda shape, dtype: _mixed(torch.randn(shape)),
    "tiny": lambda shape, dtype: torch.randn(shape) * 0.125 * torch.finfo(dtype).tiny,
    "denormal_rows": lambda shape, dtype: torch.randn(shape) * 2.0**-120 * 4.0 ** torch.randint(-3, 3, (shape[0], 1)),
    "huge": lambda shape, dtype: (torch.rand(shape) * 0.5 + 0.5) * torch.finfo(dtype).max * torch.randn(shape).sign(),
    "zeros": lambda shape, dtype: torch.zeros(shape) * torch.randn(shape).sign(),
    "zero_blocks": lambda shape, dtype: _blank(torch.randn(shape), 0.0),
    "infinite": lambda shape, dtype: _with(INFINITIES, torch.randn(shape)),
    "nan": lambda shape, dtype: _with(NANS, torch.randn(shape)),
    "nan_blocks": lambda shape, dtype: _blank(_with(NANS + INFINITIES, torch.randn(shape)), torch.nan),
    "special": lambda shape, dtype: _with(
        [*NANS, *INFINITIES, -0.0, torch.finfo(dtype).max], _mixed(torch.randn(shape)), 0.06
    ),
    "all_nan": lambda shape, dtype: torch.full(shape, torch.nan),
    # Halfway between neighbours of every element type, at a scale of a power of two.
    "ties": lambda shape, dtype: torch.randint(-128, 129, shape) / 16,
    # Block scales that underflow beside some that are large.
    "uneven": lambda shape, dtype: (
        torch.randn(shape) * 2.0 ** torch.randint(-9, 6, (shape[0], 1)) * 2.0 ** torch.randint(-9, 6, (1, shape[1]))
    ),
    # Amaxes next to MAX and its powers of two, where the scale changes: one step of the dtype around them.
    "edges": lambda shape, dtype: (
        torch.tensor([448.0, 57344.0, 1.0])[torch.randint(3, shape)] * (1 + torch.randint(-1, 2, shape) * 2.0**-7)
    ),
}


def data(kind: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A matrix of one of `DATA`."""
    return DATA[kind](shape, dtype).to(dtype).to(device)
