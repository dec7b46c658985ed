"""Where dW goes: to autograd, into ``main_grad``, or into a list of what is left to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minifloat.backward_pass import running
from minifloat.functional.call import LinearCall


def weight_gradient(call: LinearCall, weight: Tensor | None, product: Callable[[torch.dtype], Tensor]) -> Tensor | None:
    """dW, or None where it goes into ``main_grad`` or is computed later; ``product`` computes it in a dtype."""

    def compute() -> Tensor | None:
        if call.main_grad:
            assert weight is not None
            return _into_main_grad(weight, product(weight.main_grad.dtype), call.overwrite_main_grad)  # type: ignore[attr-defined]
        return product(call.dtype)

    if call.wgrad_tasks is None:
        return compute()

    def later() -> None:
        dw = compute()
        if dw is not None and weight is not None:
            dw = dw.to(weight.dtype)
            weight.grad = dw if weight.grad is None else weight.grad + dw

    tasks = call.wgrad_tasks
    tasks.append(later)
    backward = None if torch.compiler.is_compiling() else running()
    if backward is not None:  # of a step that is given up nothing is to be computed
        backward.on_failure.append(lambda: tasks.remove(later) if later in tasks else None)
    return None


def _into_main_grad(weight: Tensor, dw: Tensor, overwrite: bool) -> Tensor | None:
    """Adds dW to ``weight.main_grad`` and says so on ``weight.grad_added_to_main_grad``.

    Returns:
        The gradient to hand to autograd: None, or zeros where ``weight.zero_out_wgrad`` asks for one so that hooks on
        the parameter run.
    """
    # A weight may be used several times in a microbatch: what is there is the previous step's for the first dW only.
    old = overwrite and getattr(weight, "main_grad_is_old", True)
    if old or getattr(weight, "overwrite_main_grad", False):
        weight.main_grad.copy_(dw)  # type: ignore[attr-defined]
        weight.main_grad_is_old = False  # type: ignore[attr-defined]
    else:
        weight.main_grad.add_(dw)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else None
