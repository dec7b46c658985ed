"""Helpers of autograd functions: how they are called, in which dtype, what they return, how they save inputs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from minifloat.ops.tape import taping, watching

_PLAIN = {Tensor, torch.nn.Parameter, type(None)}
_is_batch, _is_older_batch = torch._C._functorch.is_batchedtensor, torch._C._functorch.is_legacy_batchedtensor
_unsafe_view = torch.ops.aten._unsafe_view.default


def apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    """Calls ``function.apply(*args)``; eager code skips ten Python calls that ``torch.func`` needs."""
    if torch.compiler.is_dynamo_compiling():
        return function.apply(*args)
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(f"{function.__name__}: torch.func cannot transform it; use torch.autograd.grad, a batch dim")
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def replayed(
    recorder: Any, key: Any, tensors: list[Tensor | None], function: Callable[[], tuple[Sequence[Any], Any]],
    held: list[Any] | None = None,
) -> tuple[Sequence[Any], Any]:  # fmt: skip
    """``function()``, a pass of an autograd function, or a replay of it; see :class:`~minifloat.ops.tape.Recorder`.

    Args:
        key: what decides beside the layouts of ``tensors`` what the pass does.
        tensors: all that it reads and writes; emptied, so that it may free what it has read.
        held: of the same tensors, for ``function``; emptied as well where that is not called.
    """
    watched = torch._C._len_torch_dispatch_stack() > taping.modes or watching
    if watched or not {*map(type, tensors)} <= _PLAIN:
        tensors.clear()
        return function()
    with torch._C._DisableAutocast():  # as products run that are not replayed
        return (recorder.again(key, tensors) if held is None else None) or recorder(key, tensors, function, held)


def exporting() -> bool:
    """Whether ``torch.compiler.is_exporting()``, which Dynamo of PyTorch 2.11 takes for True in every graph."""
    return torch.compiler._is_exporting_flag


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward without a derivative: under ``create_graph=True`` its results raise when differentiated.

    The node that raises has edges to all leaves of the forward, or ``torch.autograd.grad`` would not come by it: with
    PyTorch's ``once_differentiable`` a gradient penalty would train without the penalty.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        try:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            with torch.no_grad():
                results = backward(ctx, *gradients)
            read = [*_leaves(ctx), *[dy for dy in gradients if isinstance(dy, Tensor) and dy.requires_grad]]
            raising = torch._C._functions.DelayedError(b"trying to differentiate twice", len(results) + len(read))
            return raising(*map(_with_gradient, results), *read)[: len(results)]
        except RuntimeError as error:
            if any(isinstance(dy, Tensor) and (_is_batch(dy) or _is_older_batch(dy)) for dy in gradients):
                raise RuntimeError(f"{type(ctx).__name__}: vmap cannot run it; use a loop, vectorize=False") from error
            raise

    return run


def _leaves(node: Any) -> list[Tensor]:
    """Lists what has gradients and the forward of ``node`` was computed from."""
    nodes, seen = [node], {None, node}
    for each in nodes:
        for before, _ in each.next_functions:
            if before not in seen:
                seen.add(before)
                nodes.append(before)
    return [each.variable for each in nodes if hasattr(each, "variable")]


def _with_gradient(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def as_output(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Gives ``y`` its ``shape``, not as a view: autograd refuses in-place operations on views that functions return.

    The result has a version counter of its own, so that nothing else that backward reads may share its memory: what
    backward reads of an output is saved as that output.
    """
    result: Tensor = _unsafe_view(y.contiguous(), shape)
    return result


def guarded(x: Tensor) -> Tensor:
    """Guards ``x`` for ``save_for_backward``, of a function whose caller may change ``x`` in place before backward.

    Autograd then raises in eager code. Compiled code does not: its backward would read the changed values (PyTorch 2.11
    to 2.15), so there a copy is saved. Inductor removes copies that change nothing; other backends keep them.
    """
    if torch.compiler.is_dynamo_compiling():
        return x.clone()
    return x.detach() if x._is_view() else x  # a node that saves a view of its own output is never freed


def is_wanted(leaf: Tensor) -> bool:
    """Whether the backward that runs gives ``leaf`` its gradient: ``torch.autograd.grad(y, x)`` does not."""
    if not leaf.requires_grad or torch._C._current_graph_task_id() == -1:
        return leaf.requires_grad
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch.autograd.grad is to return it
        return True


# ---- torch.autocast, on any device: it does not know ``meta`` ----


def autocast_enabled(x: Tensor) -> bool:
    """Whether ``torch.autocast`` is on for the device of ``x``."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of ``torch.autocast`` where that is on for the device of ``x``; else the dtype of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else x.dtype


def autocast_to(x: Tensor) -> Tensor:
    """Casts ``x`` to its :func:`autocast_dtype`; ``x`` itself where it has that already."""
    return x.to(autocast_dtype(x))


def autocast_off(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Lets operations inside, on the device of ``x``, take the dtypes that they are given."""
    return contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
