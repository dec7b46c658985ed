"""Routing written as loops over Python's lists, and cases of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """Tokens, choices of each, columns, experts."""

    tokens: int
    k: int
    columns: int
    experts: int


CASES = [
    Case(0, 2, 8, 3),
    Case(1, 1, 1, 1),
    Case(5, 2, 8, 4),
    Case(7, 3, 17, 3),  # k = E
    Case(9, 1, 33, 300),  # most experts are empty
    Case(40, 3, 48, 7),
]


def some_indices(case: Case, kind: str = "random") -> Tensor:
    """int64 [T, k]: without -1 the experts of a token differ."""
    if kind == "one expert":
        return torch.full((case.tokens, case.k), case.experts - 1)
    scores = torch.rand(case.tokens, case.experts)
    indices = scores.argsort(dim=1)[:, : case.k]
    if kind == "dropped":
        indices = torch.where(torch.rand(indices.shape) < 0.3, -1, indices)
    return torch.full_like(indices, -1) if kind == "all dropped" else indices


KINDS = ["random", "one expert", "dropped", "all dropped"]


def sorted_slots(indices: Tensor, experts: int) -> list[list[int]]:
    """The slots of each expert in the order of tokens, and last the dropped ones."""
    found: list[list[int]] = [[] for _ in range(experts + 1)]
    for slot, expert in enumerate(indices.flatten().tolist()):
        found[expert if 0 <= expert < experts else experts].append(slot)
    return found


def loop_permute(x: Tensor, indices: Tensor, experts: int) -> Tensor:
    """Rows by expert, then zeros."""
    *used, dropped = sorted_slots(indices, experts)
    rows = [x[slot // indices.shape[1]] for slots in used for slot in slots]
    zeros = [(x[slot // indices.shape[1]] * 0).abs() for slot in dropped]  # which autograd knows
    return torch.stack([*rows, *zeros]) if indices.numel() else x[:0] * 1


def loop_unpermute(y: Tensor, indices: Tensor, experts: int, probabilities: Tensor | None) -> Tensor:
    """Tokens, as differentiable sums in the dtype of ``y``."""
    k, zero = indices.shape[1], y.sum(0) * 0  # which autograd knows, though all be dropped
    if probabilities is not None:
        zero = zero + probabilities.sum() * 0
    *used, _ = sorted_slots(indices, experts)
    row_of = {slot: row for row, slot in enumerate(slot for slots in used for slot in slots)}
    tokens = []
    for token in range(indices.shape[0]):
        total = zero
        for choice in range(k):
            if (row := row_of.get(token * k + choice)) is not None:
                total = total + (y[row] if probabilities is None else y[row] * probabilities[token, choice])
        tokens.append(total)
    return torch.stack(tokens) if tokens else zero.expand(0, -1)
