"""Where dW goes: to autograd, into ``main_grad``, or into a list of tasks to run later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat.backward_pass import running
from minifloat.ops import matmul

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
    parameters = parameters_of(weight)
    if parameters[0] is weight:
        old = _is_old(overwrite, weight)
        product(weight.main_grad.dtype, weight.main_grad, not old)
        asked = _written(weight, old)
    else:
        asked = _into_each(overwrite, parameters, product)
    return torch.zeros_like(weight) if asked else None


def _into_each(overwrite: bool, parameters: Sequence[Any], product: Product) -> bool:
    """The same of experts' weights, those that want a gradient, in one launch; whether one asks for zeros."""
    dtype = next(own.main_grad.dtype for own in parameters if own.requires_grad)
    parts = [(own, part) for own, part in _parts_of(product(dtype), parameters) if own.requires_grad]
    if len({id(own.main_grad) for own, _ in parts}) < len(parts):  # some share one: in turn
        given = [into_main_grad(overwrite, own, partial(computed, part)) for own, part in parts]
        return any(each is not None for each in given)
    new: tuple[list[Tensor], list[Tensor]] = [], []
    held: tuple[list[Tensor], list[Tensor]] = [], []
    asked = False
    for own, part in parts:
        old = _is_old(overwrite, own)
        held[old].append(own.main_grad)
        new[old].append(part.to(own.main_grad.dtype))
        asked |= _written(own, old)
    if held[False]:
        torch._foreach_add_(held[False], new[False])
    if held[True]:
        torch._foreach_copy_(held[True], new[True])
    return asked


def _is_old(overwrite: bool, weight: Any) -> bool:
    """What is in ``main_grad`` is of the previous step."""
    # A weight may be used several times in a microbatch: only the first dW replaces what the previous step left.
    old = overwrite and getattr(weight, "main_grad_is_old", True)
    return bool(old or getattr(weight, "overwrite_main_grad", False))


def _written(weight: Any, old: bool) -> bool:
    """Says on the weight that dW is in ``main_grad``; returns whether hooks on the weight are to run."""
    if old:
        weight.main_grad_is_old = False
    weight.grad_added_to_main_grad = True
    return bool(getattr(weight, "zero_out_wgrad", False))


def into_grad(weight: Any, product: Product) -> None:
    """Adds dW to ``weight.grad``, which autograd does not see, with the hooks of tensors that it would run."""
    dw = product(weight.dtype)
    for hook in (weight._backward_hooks or {}).values():
        replaced = hook(dw)
        dw = dw if replaced is None else replaced
    with torch.no_grad():
        weight.grad = dw if weight.grad is None else weight.grad.add_(dw)


def accumulated(weight: Any) -> None:
    """Runs what is to happen after a gradient has been added to, as autograd runs it after its own additions."""
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)


def computed(dw: Tensor, dtype: torch.dtype, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    """A product that is there already."""
    return matmul.written(dw.to(dtype), out, accumulate)


def parameters_of(weight: Tensor) -> Sequence[Any]:
    """The parameters that a weight was made of: itself, one in another dtype, or those of experts."""
    return getattr(weight, "made_of", None) or (weight,)


def _parts_of(dw: Tensor, parameters: Sequence[Any]) -> Iterable[tuple[Any, Tensor]]:
    """Each of a weight's parameters with its part of dW."""
    return zip(parameters, dw.unbind() if parameters[0].dim() < dw.dim() else (dw,), strict=True)


def into_main_grad_in_graph(weight: Any, product: Product) -> None:
    """The same in traced code, which sets no attribute in backward: the forward has set it.

    ``weight``: the parameter, or a tuple of those that the weight was made of.
    """
    if not isinstance(weight, tuple):
        product(weight.main_grad.dtype, weight.main_grad, True)
        return
    dtype = next(own.main_grad.dtype for own in weight if own.requires_grad)
    for own, part in _parts_of(product(dtype), weight):
        if own.requires_grad:
            own.main_grad.add_(part)


def asks_in_backward(weight: Tensor, overwrite: bool) -> bool:
    """What :func:`into_main_grad` does depends on attributes that the weight has in backward."""
    return overwrite or getattr(weight, "overwrite_main_grad", False) or getattr(weight, "zero_out_wgrad", False)


def left_for_later(tasks: list[Callable[[], None]], sink: Sink, weight: Tensor | None, product: Product) -> None:
    """Appends to ``tasks`` what computes dW and gives it to ``sink``; autograd gets nothing."""

    @torch.no_grad()  # as a backward runs: what it saved may have a graph
    def later() -> None:
        dw = sink(weight, product)
        if dw is not None and weight is not None:
            for parameter, own in _parts_of(dw, parameters_of(weight)):
                if parameter.requires_grad:
                    own = own.to(parameter.dtype)
                    parameter.grad = own if parameter.grad is None else parameter.grad + own

    tasks.append(later)
    backward = None if torch.compiler.is_compiling() else running()
    if backward is not None:  # nothing is computed of a step that fails
        backward.on_failure.append(lambda: tasks.remove(later) if later in tasks else None)
