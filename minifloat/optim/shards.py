"""What an optimizer steps of a DTensor: the rows that this rank has of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def own_rows(p: Tensor) -> Tensor:
    """What this rank has of a DTensor, the very tensor; any other is its own."""
    local: Tensor = getattr(p, "_local_tensor", p)
    return local


def sharded_like(p: Tensor, own: Tensor, shape: Sequence[int]) -> Tensor:
    """This rank's rows ``own`` of a tensor of ``shape``, as a DTensor where ``p`` is one, sharded as that is."""
    if own_rows(p) is p:
        return own
    from torch.distributed.tensor import DTensor  # slow to import

    mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    sharded: Tensor = DTensor.from_local(own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return sharded
