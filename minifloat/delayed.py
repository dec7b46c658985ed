"""Delayed scaling between steps: amaxes of all layers agreed on in one reduction, then their next scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import formats
from minifloat.comm.collectives import max_of_all
from minifloat.comm.ddp_forward import check_no_join, keep_histories
from minifloat.comm.group import Group
from minifloat.ops import delayed as kernels
from minifloat.recipe import DelayedScaling


class History(NamedTuple):
    """One direction of one layer: scales fp32 [n], amaxes fp32 [L, n], and the rule from these to those.

    Row 0 is of the step in progress, the last row of the newest finished one.
    ``rule``: as :func:`rule` gives it; ``recipe``: for algorithms of the user's own.
    """

    scale: Tensor
    amax_history: Tensor
    recipe: DelayedScaling
    rule: str


def rule(recipe: DelayedScaling, forward: bool) -> str:
    """How a direction's scales follow from its amaxes, as ``kernels.delayed`` reads it: ``"e4m3/margin=0/max"``.

    A string for the same reason as a format's spec: a compiler takes it for the constant that it is.
    """
    element = recipe.fp8_format.forward if forward else recipe.fp8_format.backward
    algorithm = "custom" if is_custom(recipe) else recipe.amax_compute_algo
    return f"{element}/margin={recipe.margin}/{algorithm}"


def is_custom(recipe: DelayedScaling) -> bool:
    """Some step is a callable of the user's."""
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def reduction_group(recipe: DelayedScaling, group: dist.ProcessGroup | None) -> Group | None:
    """The group that amaxes are reduced over, all ranks by default; None where ranks do not reduce.

    One of a single rank is a group, too: a module may be used under it and under a larger one.

    Raises:
        ValueError: this is the forward of a ``DistributedDataParallel`` inside of its ``join()``, where ranks that have
            no more data take part in DDP's collectives alone.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    keep_histories()
    if not recipe.reduce_amax:
        return None
    found = Group.of(group if group is not None else dist.group.WORLD)
    if found.size > 1:
        check_no_join()
    return found if dist.get_world_size() > 1 else None


def reduce(histories: Sequence[History], group: Group) -> None:
    """Makes the newest amaxes the largest of all ranks: one MAX all-reduce for all of them."""
    newest = [history.amax_history[0] for history in histories]
    if group.size > 1:
        for amaxes, largest in zip(newest, max_of_all(newest, group), strict=True):
            amaxes.copy_(largest)


def update(histories: Sequence[History], group: Group | None = None) -> None:
    """Reduces the newest amaxes over a group, rolls the histories and computes the next scales."""
    if group is not None:
        reduce(histories, group)
    fused = [history for history in histories if not is_custom(history.recipe)]
    if fused:
        kernels.update_scales_([h.amax_history for h in fused], [h.scale for h in fused], [h.rule for h in fused])
    for history in histories:
        if is_custom(history.recipe):
            _update_by_callables(history)


@torch.no_grad()
def _update_by_callables(history: History) -> None:
    """The user's own algorithms, numerics 1.1 "unfused": always rolls, also when nothing was recorded."""
    recipe, amaxes = history.recipe, history.amax_history
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(amaxes)
    else:
        amax = amaxes[0].clone() if recipe.amax_compute_algo == "most_recent" else amaxes.amax(0)
    amaxes.copy_(amaxes.roll(-1, 0))
    amaxes[0] = 0
    fp8_max = formats.ELEMENTS[history.rule.partition("/")[0]].max
    if recipe.scaling_factor_compute_algo is not None:
        history.scale.copy_(recipe.scaling_factor_compute_algo(amax, history.scale, fp8_max, recipe))
        return
    fresh = (torch.full_like(amax, fp8_max) / amax * 2.0**-recipe.margin).clamp(max=kernels.FLT_MAX)
    history.scale.copy_(torch.where((amax > 0) & amax.isfinite(), fresh, history.scale))
