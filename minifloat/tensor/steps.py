"""Steps of optimizers, whose writes PyTorch does not always count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from minifloat.tensor.base import count_writes

_counted: Any = WeakTensorKeyDictionary()
_hooks: list[Any] = []


def count_steps(parameters: Iterable[Any]) -> None:
    """Raise the versions of ``parameters`` at each later step of an optimizer: PyTorch's fused kernels do not.

    Whoever keeps what was cast of a parameter reads its version. An optimizer that counts what it writes has a true
    ``counts_its_writes``.
    """
    if torch.compiler.is_compiling():
        return
    for parameter in parameters:
        _counted[parameter] = True
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count))


def stop_counting(parameters: Iterable[Any]) -> None:
    """Of ``parameters`` that are about to be replaced: PyTorch swaps no tensor that has a weak reference."""
    for parameter in parameters:
        _counted.pop(parameter, None)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "counts_its_writes", False):
        return
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    count_writes(parameter for parameter in held if parameter in _counted)
