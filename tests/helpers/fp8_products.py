"""Operands of FP8 products as PyTorch's calls take them, and what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.ops.matmul.cublaslt import ONE, STRIPS

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = {"e4m3": (E4M3, E4M3), "e5m2 left": (E5M2, E4M3), "e5m2 right": (E4M3, E5M2)}


def operands(
    m: int, n: int, k: int, scaled: int = ONE, pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Of a product [m, n]: random codes and scales of both sides."""
    made = []
    for outer, dtype in zip((m, n), pair, strict=True):
        shape = (-(-k // 128), outer) if scaled == STRIPS else (1,)
        scale = torch.exp2(torch.randint(-3, 4, shape, device=device).float()) * (1 if scaled == STRIPS else 1.37)
        made += [torch.randn(outer, k, device=device).to(dtype), scale.t()]
    return made[0], made[1], made[2], made[3]


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """What codes and scales stand for, fp64."""
    scale = scale.repeat_interleave(128, 1)[:, : codes.shape[1]] if scale.numel() > 1 else scale
    return codes.float().double() * scale.double()
