"""Sequences of different lengths packed one behind the other along one dim of tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Which sequence each of ``tokens`` tokens belongs to, int64 [tokens]; those behind the last one get ``b``.

    Args:
        cu_seqlens: int [b + 1], where sequence ``i`` is tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1


def positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The position of each token in its own sequence, in the dtype of ``cu_seqlens``, [tokens]."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return token - cu_seqlens[sequence_ids(cu_seqlens, tokens)]


def check_cu_seqlens(label: str, name: str, cu_seqlens: Tensor | None) -> Tensor:
    """``cu_seqlens``, or raises ValueError where it is missing or is not int [b + 1]."""
    if cu_seqlens is None:
        raise ValueError(
            f"{label}: packed sequences need {name}, int32 [sequences + 1]; "
            "as torch.tensor([0, 3, 8]) for sequences of 3 and 5 tokens"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{label}: {name} is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; "
            "int32 or int64 [sequences + 1] is needed"
        )
    return cu_seqlens
