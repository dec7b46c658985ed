"""Where dW goes: to autograd, into ``main_grad``, or into a list of tasks to run later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minifloat.backward_pass import running

Product = Callable[..., Tensor]
"""``(dtype, out=None, accumulate=False)``: computes dW, written to ``out`` if that is given, or added to it."""
Sink = Callable[[Tensor | None, Product], Tensor | None]
"""Takes the weight, if it writes to it, and what computes dW; returns the gradient to hand to autograd."""


def to_autograd(dtype: torch.dtype, weight: Tensor | None, product: Product) -> Tensor:
    """dW in the dtype of the activations."""
    return product(dtype)


def into_main_grad(overwrite: bool, weight: Any, product: Product) -> Tensor | None:
    """Adds dW to ``weight.main_grad`` and says so on ``weight.grad_added_to_main_grad``.

    Returns:
        The gradient to hand to autograd: None, or zeros where ``weight.zero_out_wgrad`` asks for one so that hooks on
        the parameter run.
    """
    # A weight may be used several times in a microbatch: only the first dW replaces what the previous step left.
    old = overwrite and getattr(weight, "main_grad_is_old", True)
    old = old or getattr(weight, "overwrite_main_grad", False)
    product(weight.main_grad.dtype, weight.main_grad, not old)
    if old:
        weight.main_grad_is_old = False
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else None


def left_for_later(tasks: list[Callable[[], None]], sink: Sink, weight: Tensor | None, product: Product) -> None:
    """Appends to ``tasks`` what computes dW and gives it to ``sink``; autograd gets nothing."""

    def later() -> None:
        dw = sink(weight, product)
        if dw is not None and weight is not None:
            dw = dw.to(weight.dtype)
            weight.grad = dw if weight.grad is None else weight.grad + dw

    tasks.append(later)
    backward = None if torch.compiler.is_compiling() else running()
    if backward is not None:  # nothing is computed of a step that fails
        backward.on_failure.append(lambda: tasks.remove(later) if later in tasks else None)
