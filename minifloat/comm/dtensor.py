"""What this rank has of a DTensor. The class itself is slow to import, so that only FSDP2's users pay for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


def is_dtensor(t: Tensor) -> bool:
    """``t`` is a DTensor, as FSDP2 makes them of parameters and gradients."""
    return hasattr(t, "device_mesh")


def own_rows(t: Tensor) -> Tensor:
    """What this rank has of a DTensor, the very tensor; any other is its own."""
    local: Tensor = getattr(t, "_local_tensor", t)
    return local


def own_part(values: Tensor, parameter: Tensor) -> Tensor:
    """Of ``values`` in the whole shape of ``parameter`` what this rank has; all of them unless it is a DTensor."""
    if is_dtensor(parameter):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
            values = values.narrow(dim, min(start, values.shape[dim]), length)
    return values


def sharded_like(p: Tensor, own: Tensor, shape: Sequence[int]) -> Tensor:
    """This rank's rows ``own`` of a tensor of ``shape``, as a DTensor where ``p`` is one, sharded as that is."""
    if not is_dtensor(p):
        return own
    return placed(own, p.device_mesh, p.placements, shape)  # type: ignore[attr-defined]


def placed(own: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> Tensor:
    """A DTensor of ``shape`` of which this rank has ``own``."""
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return made
