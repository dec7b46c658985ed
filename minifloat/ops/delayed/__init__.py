"""Delayed scaling's bookkeeping: recording amaxes and turning a history of them into the next scales."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from minifloat.ops.delayed import reference
from minifloat.ops.delayed.reference import FLT_MAX
from minifloat.ops.library import operation

__all__ = ["FLT_MAX", "read_scale", "record_amax_", "update_scales_"]


def _kernels() -> ModuleType:
    from minifloat.ops.delayed import gpu  # which needs Triton

    return gpu


@operation(lambda: _kernels().record, mutates=["history"])
def record_amax_(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """Max-accumulates ``amaxes`` (fp32 [1] each), but infinity and NaN, into the newest row of ``history`` [L, n]."""
    reference.record(history, slots, amaxes)


@record_amax_.fake
def _(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None: ...


@operation(lambda: _kernels().update, mutates=["histories", "scales"])
def update_scales_(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    """Rolls each history [L, n] and computes each scale [n] anew, ``max * 2^-margin / amax``: ``docs/numerics.md``.

    ``rules`` are those of ``minifloat.delayed.rule``. A slot that has recorded nothing keeps history and scale.
    """
    for history, scale, rule in zip(histories, scales, rules, strict=True):
        reference.update(history, scale, reference.Rule.parse(rule))


@update_scales_.fake
def _(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None: ...


@operation()
def read_scale(scale: Tensor, slot: int) -> Tensor:
    """The scale of a slot as it is now, fp32 [1]: a compiler may read a mere slice of the buffer again in backward."""
    return scale[slot : slot + 1].clone()
