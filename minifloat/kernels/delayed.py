"""Delayed scaling's bookkeeping: recording amaxes and turning a history of them into the next scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.formats import ELEMENTS
from minifloat.kernels.library import register

FLT_MAX = torch.finfo(torch.float32).max


def _record(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    for slot, amax in zip(slots, amaxes, strict=True):
        newest = history[0, slot]
        newest.copy_(torch.fmax(newest, amax.reshape(())))


def _update(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    for history, scale, rule in zip(histories, scales, rules, strict=True):
        element, margin, algorithm = rule.split("/")
        largest = ELEMENTS[element].max * 2.0 ** -int(margin.removeprefix("margin="))
        newest = history[0].clone()
        seen = newest != 0
        rolled = torch.cat([history[1:], newest[None]])
        amax = newest if algorithm == "most_recent" else rolled.nan_to_num(0.0, posinf=torch.inf).amax(0)
        rolled[0] = 0
        history.copy_(torch.where(seen, rolled, history))
        amax = torch.where(seen, amax, 0.0)
        fresh = (torch.full_like(amax, largest) / amax).clamp(max=FLT_MAX)
        scale.copy_(torch.where(amax.isfinite() & (amax > 0), fresh, scale))


def _read_scale(scale: Tensor, slot: int) -> Tensor:
    return scale[slot : slot + 1].clone()


def _fake_read_scale(scale: Tensor, slot: int) -> Tensor:
    return scale.new_empty(1)


def _fake_record(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None: ...


def _fake_update(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None: ...


record = register("record_amax_(Tensor(a!) history, int[] slots, Tensor[] amaxes) -> ()", _record, _fake_record)
"""Max-accumulates ``amaxes`` (fp32 [1] each) into the newest row of ``history`` [L, n]; a NaN is dropped."""

update = register(
    "update_scales_(Tensor(a!)[] histories, Tensor(b!)[] scales, str[] rules) -> ()", _update, _fake_update
)
"""Rolls each history [L, n] and computes each scale [n] anew, ``max * 2^-margin / amax``: ``docs/numerics.md``.

``rules`` are those of ``minifloat.delayed.rule``.
A slot that has recorded nothing keeps history and scale; one whose amax is not finite keeps its scale.
"""

read_scale = register("read_scale(Tensor scale, int slot) -> Tensor", _read_scale, _fake_read_scale)
"""The scale of a slot as it is now, fp32 [1]: a compiler may read a mere slice of the buffer again in backward."""
