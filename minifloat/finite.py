"""Which layer meets a number that is not finite: what ``autocast(check_finite=True)`` looks for."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from minifloat.quantizer import as_matrix

active = False
"""Some thread has contexts that look: what costs nothing where none has. No count, which compiled code would guard."""
_contexts = 0
_lock = threading.Lock()


_COMPILED = "autocast(check_finite=True) looks at values, which compiled code cannot; run eager"


def add(contexts: int) -> None:
    """Counts contexts that are entered, or left if negative.

    Raises:
        RuntimeError: in code that is being compiled.
    """
    global active, _contexts
    if torch.compiler.is_compiling():
        raise RuntimeError(_COMPILED)
    with _lock:
        _contexts += contexts
        active = _contexts > 0


def check_can_wait(label: str) -> None:
    """Raises RuntimeError where nothing waits for the device: while the layer is compiled, or a CUDA graph captured."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{label}: {_COMPILED}")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{label}: autocast(check_finite=True) looks at values, which the capture of a CUDA graph cannot; capture "
            "without it"
        )


def check(label: str, what: str, tensor: Tensor) -> None:
    """Waits for the device.

    Raises:
        FloatingPointError: some element is infinite or NaN; it names the layer ``label`` and ``what`` the tensor is.
        RuntimeError: of :func:`check_can_wait`.
    """
    check_can_wait(label)
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


def watch_gradient(label: str, y: Tensor, rows: int | None = None) -> None:
    """Checks the gradient of a layer's result [..., N], or of so many of its rows, when backward brings it."""
    if y.requires_grad:
        y.register_hook(lambda dy: check(label, "grad_output", dy if rows is None else as_matrix(dy)[:rows]))
