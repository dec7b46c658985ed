"""Steps of optimizers, whose writes PyTorch does not always count."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from minifloat.tensor.base import count_writes

_hooks: list[Any] = []


def count_steps() -> None:
    """From now on a step of any optimizer raises the versions of the rows that it has: fused kernels do not."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count))


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    count_writes(parameter for parameter in held if hasattr(parameter, "etp_group"))
