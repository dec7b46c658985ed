"""What autograd functions return, and what they save of tensors that others hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_unsafe_view = torch.ops.aten._unsafe_view.default


def as_output(y: Tensor, shape: Sequence[int]) -> Tensor:
    """``y`` of ``shape``, in its own memory and no view: autograd refuses in-place operations on a function's views.

    The result has a version counter of its own, so that nothing else that backward reads may share its memory: what
    backward reads of an output is saved as that output.
    """
    result: Tensor = _unsafe_view(y.contiguous(), shape)
    return result


def guarded(x: Tensor) -> Tensor:
    """``x`` for ``save_for_backward``, of a function whose caller may change ``x`` in place before backward.

    Autograd then raises in eager code. Compiled code does not: its backward would read the changed values (PyTorch 2.11
    to 2.15), so there a copy is saved. Inductor removes copies that change nothing; other backends keep them.
    """
    if torch.compiler.is_compiling():
        return x.clone()
    return x.detach() if x._is_view() else x  # a node that saves a view of its own output is never freed


__all__ = ["as_output", "guarded"]
