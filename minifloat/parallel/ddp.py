"""``data_parallel``: PyTorch's DistributedDataParallel around a model with minifloat's layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from minifloat.arguments import checked
from minifloat.comm.ddp import MARK, history_names, unreduced
from minifloat.nn.etp import check_not_replicated
from minifloat.nn.linear_state import LinearState
from minifloat.tensor import QuantizedTensor


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
