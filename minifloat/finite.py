"""Which layer meets a number that is not finite: what ``autocast(check_finite=True)`` looks for."""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor

active = False
"""Some thread has contexts that look: what costs nothing where none has. No count, which compiled code would guard."""
_contexts = 0
_lock = threading.Lock()


def add(contexts: int) -> None:
    """Counts contexts that are entered, or left if negative."""
    global active, _contexts
    with _lock:
        _contexts += contexts
        active = _contexts > 0


def check(label: str, what: str, tensor: Tensor) -> None:
    """Waits for the device.

    Raises:
        FloatingPointError: some element is infinite or NaN; it names the layer ``label`` and ``what`` the tensor is.
        RuntimeError: the layer is being compiled.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{label}: autocast(check_finite=True) looks at values, which compiled code cannot; run eager"
        )
    with torch.no_grad():
        values = tensor.detach()
        found = ~values.isfinite()
        if values.is_meta or not bool(found.any()):
            return
        first, nan = found.nonzero()[0].tolist(), int(values.isnan().sum())
        infinite = int(found.sum()) - nan
        raise FloatingPointError(
            f"{label}: {what} of shape {tuple(values.shape)} is not finite: {infinite} infinite and {nan} NaN, the "
            f"first at {first}"
        )


def watch_gradient(label: str, y: Tensor) -> None:
    """Checks the gradient of a layer's result when backward brings it."""
    if y.requires_grad:
        y.register_hook(partial(check, label, "grad_output"))
