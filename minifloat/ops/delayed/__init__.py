"""Delayed scaling's bookkeeping: recording amaxes and turning a history of them into the next scales."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minifloat.ops.delayed import reference
from minifloat.ops.delayed.reference import FLT_MAX
from minifloat.ops.library import directly, register

__all__ = ["FLT_MAX", "read_scale", "record", "update"]


def _record_on_gpu(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    from minifloat.ops.delayed import gpu

    gpu.record(history, slots, amaxes)


def _update(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    for history, scale, rule in zip(histories, scales, rules, strict=True):
        reference.update(history, scale, reference.Rule.parse(rule))


def _update_on_gpu(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    from minifloat.ops.delayed import gpu

    gpu.update(histories, scales, rules)


def _read_scale(scale: Tensor, slot: int) -> Tensor:
    return scale[slot : slot + 1].clone()


def _fake_read_scale(scale: Tensor, slot: int) -> Tensor:
    return scale.new_empty(1)


def _fake_record(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None: ...


def _fake_update(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None: ...


_record = register(
    "record_amax_(Tensor(a!) history, int[] slots, Tensor[] amaxes) -> ()",
    reference.record,
    _fake_record,
    cuda=_record_on_gpu,
)

_update_scales = register(
    "update_scales_(Tensor(a!)[] histories, Tensor(b!)[] scales, str[] rules) -> ()",
    _update,
    _fake_update,
    cuda=_update_on_gpu,
)


def record(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """Max-accumulates ``amaxes`` (fp32 [1] each), but infinity and NaN, into the newest row of ``history`` [L, n]."""
    (_record_on_gpu if directly(history) else _record)(history, slots, amaxes)


def update(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    """Rolls each history [L, n] and computes each scale [n] anew, ``max * 2^-margin / amax``: ``docs/numerics.md``.

    ``rules`` are those of ``minifloat.delayed.rule``.
    A slot that has recorded nothing keeps history and scale.
    """
    (_update_on_gpu if directly(histories[0]) else _update_scales)(histories, scales, rules)


read_scale = register("read_scale(Tensor scale, int slot) -> Tensor", _read_scale, _fake_read_scale)
"""The scale of a slot as it is now, fp32 [1]: a compiler may read a mere slice of the buffer again in backward."""
