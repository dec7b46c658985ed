"""Delayed scaling's bookkeeping in plain PyTorch: the definition that the kernels are held to, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import ELEMENTS

FLT_MAX = torch.finfo(torch.float32).max


class Rule(NamedTuple):
    """``largest``: what the scale of an amax of 1 is; ``most_recent``: the newest amax counts, not the largest."""

    largest: float
    most_recent: bool

    @classmethod
    @lru_cache(256)
    def parse(cls, rule: str) -> Rule:
        """As ``minifloat.delayed.rule`` spells it: ``"e4m3/margin=0/max"``."""
        element, margin, algorithm = rule.split("/")
        return cls(ELEMENTS[element].max * 2.0 ** -int(margin.removeprefix("margin=")), algorithm == "most_recent")


def record(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """Max-accumulates ``amaxes`` into row 0 of ``history`` [L, n], but those that are not finite."""
    for slot, amax in zip(slots, amaxes, strict=True):
        newest = history[0, slot]
        newest.copy_(torch.maximum(_finite(newest), _finite(amax.reshape(()))))


def update(history: Tensor, scale: Tensor, rule: Rule) -> None:
    """Rolls ``history`` [L, n] and computes ``scale`` [n] anew; what an older checkpoint has of infinity is dropped."""
    finite = _finite(history)
    newest = finite[0]
    seen = newest != 0
    rolled = torch.cat([finite[1:], newest[None]])
    amax = newest if rule.most_recent else rolled.amax(0)
    rolled[0] = 0
    fresh = (torch.full_like(amax, rule.largest) / amax).clamp(max=FLT_MAX)
    scale.copy_(torch.where(seen & (amax > 0), fresh, scale))
    history.copy_(torch.where(seen, rolled, history))


def _finite(amax: Tensor) -> Tensor:
    """0, which is no information, for infinity and NaN."""
    return torch.where(amax.isfinite(), amax, 0.0)
