"""Weight gradients that backward has left for ``backward_dw``: no optimizer steps while one waits."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from minifloat.nn.linear_state import LinearState

_layers: WeakSet[LinearState] = WeakSet()
_hooks: list[Any] = []


def watch(layer: LinearState) -> None:
    """Make each later step of an optimizer raise while a weight gradient of ``layer`` waits that it would miss."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse_waiting))
    _layers.add(layer)


def waiting(optimizer: Optimizer) -> list[LinearState]:
    """The layers whose weight gradients wait, and whose weights ``optimizer`` steps."""
    layers = [layer for layer in list(_layers) if layer._wgrad_tasks]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if layers else set()
    return [layer for layer in layers if any(id(layer._weight(name)) in stepped for name in layer._weight_names)]


def _refuse_waiting(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for layer in waiting(optimizer):
        count = len(layer._wgrad_tasks)
        raise ValueError(
            f"{layer._label}: an optimizer steps while weight gradients wait for backward_dw ({count}); call it once "
            "for each backward, or zero_grad of the layer to drop those of a step that was given up"
        )
