"""Gives the operands of a linear's weight and takes its gradient dW: one class for each way to keep a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat.backward_pass import running
from minifloat.formats import COLUMNWISE
from minifloat.functional.quantize import values_of
from minifloat.functional.spec import Spec
from minifloat.operand import Quantized
from minifloat.ops import matmul

Product = Callable[..., Tensor]
"""``(dtype, out=None, accumulate=False)``: computes dW, written to ``out`` if that is given, or added to it."""


class LocalWeight:
    """A weight that this rank has whole: cast for each forward, unless its operands exist.

    W [N, K] -> rowwise for fprop, columnwise for dgrad -> dW to autograd, into ``main_grad``, or left for later.

    Args:
        parameters: that backward writes to by itself: the weight, or those of experts.
        tasks: what computes dW is appended to, where that is left for later.
        separate: W is [G, N, K], of as many parameters.
    """

    gathers = False  # operands are gathered in each call

    def __init__(
        self, parameters: Sequence[Any] = (), tasks: list[Callable[[], None]] | None = None, separate: bool = False
    ) -> None:
        self.parameters, self.tasks, self.separate = parameters, tasks, separate

    def gather(self) -> Quantized:
        """W for fprop, if it is gathered."""
        raise NotImplementedError

    def save(self, spec: Spec, weight: Tensor, w: Quantized) -> Any:
        """Chooses what dgrad needs of W."""
        if spec.override == "high_precision":
            return values_of(weight)
        return (w.columnwise if spec.along == COLUMNWISE else w.rowwise) or w.along(spec.along)

    def for_dgrad(self, spec: Spec, saved: Any) -> Any:
        """W for dgrad, from what was saved."""
        return saved

    def accumulate(self, spec: Spec, product: Product) -> Tensor | None:
        """Lets dW be computed, now or later; returns what autograd gets."""
        if self.tasks is None:
            return self._add(spec, product)
        computed_later = copy(self)
        computed_later.tasks = None  # a task that holds its list would live, with what it multiplies, after the layer
        left_for_later(self.tasks, partial(computed_later._add, spec), self.parameters, product)
        return None

    def _add(self, spec: Spec, product: Product) -> Tensor | None:
        """Computes dW for autograd, or adds it to ``main_grad``."""
        options = spec.options
        if not options.main_grad:
            return product(options.weight_dtype if options.wgrad_in_weight_dtype else options.dtype)
        if not spec.eager:
            into_main_grad_in_graph(self.parameters, product, self.separate)
            return None
        if self.separate:
            return _into_each(options.overwrite_main_grad, self.parameters, product)
        return into_main_grad(options.overwrite_main_grad, self.parameters[0], product)


LOCAL_WEIGHT = LocalWeight()


def into_main_grad(overwrite: bool, weight: Any, product: Product) -> Tensor | None:
    """Adds dW to ``weight.main_grad`` and says so on ``weight.grad_added_to_main_grad``.

    Returns:
        The gradient to hand to autograd: None, or zeros where ``weight.zero_out_wgrad`` asks for one so that hooks on
        the parameter run.
    """
    old = _is_old(overwrite, weight)
    product(weight.main_grad.dtype, weight.main_grad, not old)
    return torch.zeros_like(weight) if _written(weight, old) else None


def _into_each(overwrite: bool, parameters: Sequence[Any], product: Product) -> Tensor | None:
    """The same of experts' weights, those that want a gradient, in one launch."""
    dtype = next(own.main_grad.dtype for own in parameters if own.requires_grad)
    parts = [(own, part) for own, part in _parts_of(product(dtype), parameters) if own.requires_grad]
    asked = False
    if len({id(own.main_grad) for own, _ in parts}) < len(parts):  # some share one: in turn
        for own, part in parts:
            asked |= into_main_grad(overwrite, own, partial(computed, part)) is not None
    else:
        new: tuple[list[Tensor], list[Tensor]] = [], []
        held: tuple[list[Tensor], list[Tensor]] = [], []
        for own, part in parts:
            old = _is_old(overwrite, own)
            held[old].append(own.main_grad)
            new[old].append(part.to(own.main_grad.dtype))
            asked |= _written(own, old)
        if held[False]:
            torch._foreach_add_(held[False], new[False])
        if held[True]:
            torch._foreach_copy_(held[True], new[True])
    first = parameters[0]
    shape = (len(parameters), *first.shape)
    return torch.zeros(shape, dtype=first.dtype, device=first.device) if asked else None


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


def _parts_of(dw: Tensor, parameters: Sequence[Any]) -> Iterable[tuple[Any, Tensor]]:
    """Each of a weight's parameters with its part of dW."""
    return zip(parameters, dw.unbind() if parameters[0].dim() < dw.dim() else (dw,), strict=True)


def into_main_grad_in_graph(parameters: Sequence[Any], product: Product, separate: bool) -> None:
    """The same in traced code, which sets no attribute in backward: the forward has set it."""
    if not separate:
        product(parameters[0].main_grad.dtype, parameters[0].main_grad, True)
        return
    dtype = next(own.main_grad.dtype for own in parameters if own.requires_grad)
    for own, part in _parts_of(product(dtype), parameters):
        if own.requires_grad:
            own.main_grad.add_(part)


def asks_in_backward(weight: Tensor, overwrite: bool) -> bool:
    """What :func:`into_main_grad` does depends on attributes that the weight has in backward."""
    return overwrite or getattr(weight, "overwrite_main_grad", False) or getattr(weight, "zero_out_wgrad", False)


def left_for_later(
    tasks: list[Callable[[], None]],
    sink: Callable[[Product], Tensor | None],
    parameters: Sequence[Any],
    product: Product,
) -> None:
    """Appends to ``tasks`` what computes dW and gives it to ``sink``; autograd gets nothing."""

    @torch.no_grad()  # as a backward runs: what it saved may have a graph
    def later() -> None:
        dw = sink(product)
        if dw is not None:
            for parameter, own in _parts_of(dw, parameters):
                if parameter.requires_grad:
                    own = own.to(parameter.dtype)
                    parameter.grad = own if parameter.grad is None else parameter.grad + own

    tasks.append(later)
    backward = None if torch.compiler.is_compiling() else running()
    if backward is not None:  # nothing is computed of a step that fails
        backward.on_failure.append(lambda: tasks.remove(later) if later in tasks else None)
