"""Gradients of parameters that ranks with different data, or different rows of it, all have; and PyTorch's DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from minifloat.arguments import checked
from minifloat.comm.collectives import all_reduce
from minifloat.comm.group import Group
from minifloat.comm.pytorch import MARK, history_names, is_dtensor, unreduced
from minifloat.functional.etp.lane import lane_of
from minifloat.functional.etp.rows import Reduction
from minifloat.nn.etp import check_not_replicated, etp_parameters
from minifloat.nn.linear_state import LinearState
from minifloat.parallel.fsdp import pytorch
from minifloat.tensor import QuantizedTensor

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


@checked
def data_parallel(module: nn.Module, **options: Any) -> DistributedDataParallel:
    """Wraps ``module`` in ``DistributedDataParallel``, so that ranks compute what one process would with all data.

    Three things differ from wrapping it oneself:

    - Quantized parameters are sent to the other ranks as codes and scales, and with them the values before the first
      cast. DDP sends what they stand for, and each rank casts it again.
    - Delayed scaling's buffers are left alone from the start, and not only after a first forward that is not compiled.
    - A linear whose weight gradient would never be reduced is refused at once.

    Make optimizers afterwards: masters then start from the first rank's values.

    Args:
        module: the same one on all ranks, on its device; the values of the first rank count.
        options: of ``DistributedDataParallel``. ``init_sync=False`` broadcasts nothing, also here.

    Raises:
        ValueError: a linear has ``fuse_wgrad_accumulation`` or ``delay_wgrad_compute``, and DDP does not ignore its
            weight; or a weight is sharded over ``etp_group``.
    """
    check_not_replicated(module)
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, linear in module.named_modules():
        if not isinstance(linear, LinearState) or not (linear.fuse_wgrad_accumulation or linear.delay_wgrad_compute):
            continue
        # As PyTorch asks it, with a dot also where a module has no name.
        if linear._etp is None and not ignored.issuperset(f"{name}.{weight}" for weight in linear._weight_names):
            raise unreduced(linear._label)
    histories = history_names(module)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored | histories)
    quantized = [
        (parameter, parameter.detach().clone(), parameter.get_high_precision_init_val())
        for name, parameter in module.named_parameters()
        if isinstance(parameter, QuantizedTensor) and name not in ignored
    ]
    wrapped = DistributedDataParallel(module, **options)
    setattr(wrapped, MARK, True)
    if options.get("init_sync", True):
        _synchronize(quantized, [b for n, b in module.named_buffers() if n in histories], wrapped.process_group)
    return wrapped


@torch.no_grad()
def _synchronize(
    quantized: Iterable[tuple[QuantizedTensor, Tensor, Tensor | None]],
    buffers: Iterable[Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Gives all ranks what the first one has.

    Each parameter comes with a copy of it, and its values before the first cast, as they were before DDP took it.
    """
    _broadcast(buffers, group)
    for parameter, codes, initial in quantized:
        assert isinstance(codes, QuantizedTensor)
        held = codes.__tensor_flatten__()[0]
        _broadcast((getattr(codes, name) for name in held if name != "scale"), group)
        parameter.copy_(codes)
        if initial is not None:
            values = initial.to(parameter.device)
            _broadcast([values], group)
            parameter.set_high_precision_init_val(values)


def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(torch.uint8), group=group, group_src=0)  # bytes: not all backends have float8
