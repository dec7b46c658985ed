"""Gives the operands of a linear's weight and takes its gradient dW: one class for each way to keep a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE
from minifloat.functional.autograd import is_wanted
from minifloat.functional.quantize import Options, values_of
from minifloat.functional.spec import Spec
from minifloat.operand import Quantized
from minifloat.ops import matmul

Product = Callable[..., Tensor]
"""``(dtype, out=None, accumulate=False)``: computes dW, written to ``out`` if that is given, or added to it."""


class WeightSource:
    """Source of W's operands and target of dW; here a weight that this rank has whole, cast for each forward.

    W [N, K] -> rowwise for fprop, columnwise for dgrad -> dW to autograd, into ``main_grad``, or left for later.

    Args:
        parameters: that backward writes to by itself: the weight, or those of experts; none if one is computed.
        tasks: what computes dW is appended to, where that is left for later.
        dtype: of the dW that autograd gets; default: that of the activations.
        main_grad: dW is added to ``main_grad``; autograd gets none.
    """

    def __init__(
        self, parameters: Sequence[Any] = (), tasks: list[Callable[[], None]] | None = None,
        dtype: torch.dtype | None = None, main_grad: bool = False,
    ) -> None:  # fmt: skip
        self.parameters, self.tasks, self.dtype, self.main_grad = parameters, tasks, dtype, main_grad

    def operands(self, existing: Quantized | None) -> Quantized | None:
        """W for fprop, unless it is still to be cast; ``existing``: what there is of it before the call."""
        return existing

    def save(self, spec: Spec, weight: Tensor, w: Quantized) -> Any:
        """Chooses what dgrad needs of W."""
        if spec.override == "high_precision":
            return values_of(weight)
        return (w.columnwise if spec.along == COLUMNWISE else w.rowwise) or w.along(spec.along)

    def for_dgrad(self, spec: Spec, saved: Any) -> Any:
        """W for dgrad, from what was saved."""
        return saved

    def accumulate(self, spec: Spec, product: Product) -> Tensor | None:
        """Lets dW be computed, now or later, where this backward is to give it; returns what autograd gets."""
        source = self._wanted() if self.parameters and spec.eager else self
        if source is None or self.tasks is None:
            return None if source is None else source._add(spec, product)
        compute = partial(source._add, spec, product)
        if not self.parameters:
            self._leave(self.tasks, lambda: None)  # for its ``backward_dw``, which has nothing to add
            return compute()
        source.tasks = None  # a task that holds its list would live, with what it multiplies, after the layer
        source._leave(self.tasks, compute)
        return None

    def _wanted(self) -> Self | None:
        """Returns the same for the parameters whose gradients this backward is to give; None: there are none."""
        source = copy(self)
        source.parameters = [own if is_wanted(own) else own.detach() for own in self.parameters]
        return source if any(own.requires_grad for own in source.parameters) else None

    def _add(self, spec: Spec, product: Product) -> Tensor | None:
        """Computes dW for autograd, or adds it to ``main_grad``; in a graph the forward has said that."""
        if not self.main_grad:
            return product(self.dtype or spec.options.dtype)
        if spec.eager:
            return into_main_grad(self.parameters[0], product)
        product(self.parameters[0].main_grad.dtype, self.parameters[0].main_grad, True)
        return None

    def memory(self, options: Options) -> Tensor | None:
        """Returns what a graph adds dW to."""
        memory: Tensor | None = self.parameters[0].main_grad if self.main_grad and options.needs_w else None
        return memory

    def _parts(self, dw: Tensor) -> Iterable[tuple[Any, Tensor]]:
        """Each parameter with its part of dW."""
        return zip(self.parameters, (dw,), strict=True)

    def _leave(self, tasks: list[Callable[[], None]], compute: Callable[[], Tensor | None]) -> None:
        """Appends to ``tasks`` what computes dW, and adds to the parameters' gradients what autograd would get."""

        @torch.no_grad()  # as a backward runs: what it saved may have a graph
        def later() -> None:
            dw = compute()
            for parameter, own in () if dw is None else self._parts(dw):
                if parameter.requires_grad:
                    own = own.to(parameter.dtype)
                    parameter.grad = own if parameter.grad is None else parameter.grad + own

        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
            tasks.append(later)
        else:  # at the end: nothing is computed of a backward that raises
            torch.autograd.Variable._execution_engine.queue_callback(partial(tasks.append, later))


class IntoMemory(WeightSource):
    """Adds dW to memory that an operation was given; None: nothing wants dW."""

    def __init__(self, memory: Tensor | None) -> None:
        super().__init__(main_grad=True)
        self._target = memory

    def accumulate(self, spec: Spec, product: Product) -> None:
        if self._target is not None:
            product(self._target.dtype, self._target, True)


LOCAL_WEIGHT = WeightSource()


def into_main_grad(weight: Any, product: Product) -> Tensor | None:
    """Adds dW to ``weight.main_grad`` and says so on ``weight.grad_added_to_main_grad``.

    Returns:
        The gradient to hand to autograd: None, or zeros where ``weight.zero_out_wgrad`` asks for one so that hooks on
        the parameter run.
    """
    old = is_old(weight)
    product(weight.main_grad.dtype, weight.main_grad, not old)
    return torch.zeros_like(weight) if written(weight, old) else None


def is_old(weight: Any) -> bool:
    """Whether what is in ``main_grad`` is of the previous step: the first dW of this one replaces it, of any use."""
    return bool(getattr(weight, "main_grad_is_old", False) or getattr(weight, "overwrite_main_grad", False))


def written(weight: Any, old: bool) -> bool:
    """Sets ``grad_added_to_main_grad``; returns whether autograd gets zeros, so that hooks on the weight run."""
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


def asks_in_backward(weight: Tensor, overwrite: bool) -> bool:
    """Whether :func:`into_main_grad` depends on attributes that the weight has in backward."""
    return overwrite or is_old(weight) or getattr(weight, "zero_out_wgrad", False)
