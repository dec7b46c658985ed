"""Gradients of parameters that ranks with different data, or different rows of it, all have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import checked
from minifloat.comm.collectives import all_reduce
from minifloat.comm.dtensor import is_dtensor
from minifloat.comm.group import Group
from minifloat.functional.etp.lane import lane_of
from minifloat.functional.etp.rows import Reduction
from minifloat.nn.etp import etp_parameters
from minifloat.parallel.fsdp import pytorch

Ranks = dist.ProcessGroup | DeviceMesh | Group


class ReducedGradients:
    """A forward pre-hook of a module: ``reduce`` sees each gradient of its parameters before it is accumulated.

    It watches the parameters that the module has by then, which ``to_empty`` and the like may have made anew; neither
    rows of a weight, whose gradients are reduced as they are computed, nor DTensors; with ``recurse`` none that FSDP2
    reduces, be it gathered or not.
    """

    def __init__(self, reduce: Callable[[Tensor], Tensor | None], *, recurse: bool) -> None:
        self._reduce, self.recurse = reduce, recurse
        self._watched: dict[str, ReferenceType[Tensor]] = {}

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        elsewhere = pytorch.managed_below(module) if self.recurse else ()
        rows = etp_parameters(module)  # not by their marks, which a parameter that was put in their place lacks
        for name, parameter in module.named_parameters(recurse=self.recurse):
            path, _, own_name = name.rpartition(".")
            if elsewhere and (module.get_submodule(path), own_name) in elsewhere:
                continue
            known = self._watched.get(name)
            own = parameter not in rows and not is_dtensor(parameter)
            if own and parameter.requires_grad and (known is None or known() is not parameter):
                parameter.register_hook(self._reduce)
                self._watched[name] = ref(parameter)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_watched": {}}


@checked
def reduce_replicated(model: nn.Module, groups: Ranks | Sequence[Ranks], reduction: Reduction = "mean") -> None:
    """Reduces the gradients of parameters that ranks with other data all have, each before it is accumulated.

    For models whose layers were made with ``etp_group``; :func:`~minifloat.distributed.parallelize` sees to it itself.
    Weights that those layers share out reduce their own gradients and are left alone. Call it once, on the module whose
    forward runs first. What goes past autograd, into ``main_grad`` or to ``backward_dw``, is left to you.

    Args:
        groups: the ranks: ``etp_group``, and those of data parallelism where it is not ``DistributedDataParallel``'s.
        reduction: of the gradients of all of these ranks.
    """
    each = [groups] if isinstance(groups, Ranks) else groups
    ranks = [group for group in map(Group.of, each) if group.size > 1]
    if ranks:
        model.register_forward_pre_hook(ReducedGradients(partial(_reduced, ranks, reduction), recurse=True))


def _reduced(groups: Sequence[Group], reduction: Reduction, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:  # it goes past autograd
        return None
    total, size = gradient.clone(), 1
    for group in groups:
        total = lane_of(group).sum_at_once(partial(all_reduce, total, group))
        size *= group.size
    return total.div_(size) if reduction == "mean" else total
