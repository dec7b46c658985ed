"""Search for the layer that made a number that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

FINITE = "repeated, the step is finite: look for what is not deterministic"


def find_non_finite(model: nn.Module, compute_loss: Callable[[], Tensor]) -> str:
    """Repeats a step's forward, and its backward if need be, and says in words what was not finite first.

    That is the first module, in the order in which they finish, whose output is not finite; if all are finite and the
    loss too, the first parameter, in backward's order, whose gradient is not. Leaves gradients behind.
    """
    with _watched_outputs(model) as outputs, torch.enable_grad():
        loss = compute_loss()
    if outputs:
        return outputs[0]
    if not _finite(loss):
        return "the outputs of all modules are finite, the loss computed from them is not"
    model.zero_grad(set_to_none=True)
    with _watched_gradients(model) as gradients:
        loss.backward()
    return gradients[0] if gradients else FINITE


@contextmanager
def _watched_outputs(model: nn.Module) -> Iterator[list[str]]:
    found: list[str] = []

    def check(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if not found and not _finite(output):
            found.append(f"the output of {name or 'the model'} is the first that is not finite{_broken(module)}")

    hooks = [module.register_forward_hook(partial(check, name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched_gradients(model: nn.Module) -> Iterator[list[str]]:
    found: list[str] = []

    def check(name: str, parameter: Tensor) -> None:
        if not found and not _finite(parameter.grad):
            found.append(f"the gradient of {name} is the first that is not finite")

    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [parameter.register_post_accumulate_grad_hook(partial(check, name)) for name, parameter in trained]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _broken(module: nn.Module) -> str:
    names = [name for name, parameter in module.named_parameters(recurse=False) if not _finite(parameter)]
    return f", for its {' and '.join(names)} is not" if names else ""


def _finite(value: Any) -> bool:
    """Whether a tensor, or every tensor in a tuple or list, is finite."""
    if isinstance(value, tuple | list):
        return all(map(_finite, value))
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(value.isfinite().all())
