"""Delayed scaling's bookkeeping: recording amaxes and turning a history of them into the next scales."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.formats import ELEMENTS
from minifloat.formats.elements import FLT_MAX
from minifloat.ops.library import operation


class Rule(NamedTuple):
    """``largest``: what the scale of an amax of 1 is; ``most_recent``: the newest amax counts, not the largest."""

    largest: float
    most_recent: bool

    @classmethod
    @lru_cache(256)
    def parse(cls, rule: str) -> Rule:
        """Reads what ``DelayedScaling.rules`` spells: ``"e4m3/margin=0/max"``."""
        element, margin, algorithm = rule.split("/")
        return cls(ELEMENTS[element].max * 2.0 ** -int(margin.removeprefix("margin=")), algorithm == "most_recent")


@operation("delayed.gpu:record", mutates=["history"])
def record_amax_(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """Max-accumulates ``amaxes`` (fp32 [1] each), but infinity and NaN, into the newest row of ``history`` [L, n]."""
    for slot, amax in zip(slots, amaxes, strict=True):
        newest = history[0, slot]
        newest.copy_(torch.maximum(_finite(newest), _finite(amax.reshape(()))))


@torch.no_grad()
def record_all_(newest: Sequence[Tensor], amaxes: Sequence[Tensor]) -> None:
    """:data:`record_amax_` in many histories: ``newest`` are views of their slots, fp32 [1] each, all on one device."""
    finite = [torch.cat(list(each)).nan_to_num_(0.0, 0.0, 0.0) for each in (newest, amaxes)]
    torch._foreach_copy_(list(newest), torch.maximum(*finite).split(1))


@operation("delayed.gpu:record_forward", mutates=["history"])
def record_forward_amax_(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """``record_amax_`` of a compiled forward. A graph does not see that it runs in a checkpoint, so this looks for one.

    Raises:
        RuntimeError: PyTorch's checkpoint is around the graph, or this is inside of a backward.
    """
    refuse_recomputation()
    record_amax_.reference(history, slots, amaxes)


def refuse_recomputation() -> None:
    """Raises where PyTorch's checkpoint runs a forward, or runs it again: its scales would be those of another time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    module = None if hooks is None else getattr(hooks[0], "__module__", None)
    if module == "torch.utils.checkpoint" or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "a compiled layer with delayed scaling runs inside of torch.utils.checkpoint or of a backward, which does "
            "not bring the scales of its forward back; leave what is checkpointed uncompiled, with "
            "torch.compiler.disable, and use minifloat.checkpoint, or use another recipe"
        )


@operation("delayed.gpu:update", mutates=["histories", "scales"])
def update_scales_(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    """Rolls each history [L, n] and computes each scale [n] anew, ``max * 2^-margin / amax``: ``docs/numerics.md``.

    ``rules`` are of ``DelayedScaling.rules``. A slot that has recorded nothing keeps history and scale.
    """
    for history, scale, rule in zip(histories, scales, map(Rule.parse, rules), strict=True):
        finite = _finite(history)  # an older checkpoint may have infinity
        newest = finite[0]
        seen = newest != 0
        rolled = torch.cat([finite[1:], newest[None]])
        amax = newest if rule.most_recent else rolled.amax(0)
        rolled[0] = 0
        fresh = (torch.full_like(amax, rule.largest) / amax).clamp(max=FLT_MAX)
        scale.copy_(torch.where(seen & (amax > 0), fresh, scale))
        history.copy_(torch.where(seen, rolled, history))


@record_amax_.fake
@record_forward_amax_.fake
@update_scales_.fake
def _(*_: object) -> None: ...


@operation()
def read_scale(scale: Tensor, slot: int) -> Tensor:
    """The scale of a slot as it is now, fp32 [1]: a compiler may read a mere slice of the buffer again in backward."""
    return scale[slot : slot + 1].clone()


def _finite(amax: Tensor) -> Tensor:
    """0, which is no information, for infinity and NaN."""
    return torch.where(amax.isfinite(), amax, 0.0)
