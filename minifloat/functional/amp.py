"""What ``torch.autocast`` asks for, on any device: it does not know ``meta``."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast_to(x: Tensor) -> Tensor:
    """``x`` in the dtype of ``torch.autocast`` where that is on for its device; else ``x`` itself."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, operations on the device of ``x`` take the dtypes that they are given."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
