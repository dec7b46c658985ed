"""What ``torch.autocast`` asks for, on any device: it does not know ``meta``."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def autocast_enabled(x: Tensor) -> bool:
    """``torch.autocast`` is on for the device of ``x``."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of ``torch.autocast`` where that is on for the device of ``x``; else the dtype of ``x``."""
    return torch.get_autocast_dtype(x.device.type) if autocast_enabled(x) else x.dtype


def autocast_to(x: Tensor) -> Tensor:
    """``x`` in its :func:`autocast_dtype`; ``x`` itself where it has that already."""
    return x.to(autocast_dtype(x))


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Inside, operations on the device of ``x`` take the dtypes that they are given."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
