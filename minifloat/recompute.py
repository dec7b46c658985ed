"""Activation checkpointing: a forward that backward runs a second time computes what the first one did.

Every linear says what it is about to compute under (:func:`follow`). Inside a checkpointed region that is written to a
:class:`Tape`; a recomputation plays the tape back, so that a delayed scale which has moved on since is the old one, and
amaxes that were recorded are not recorded again. :func:`checkpoint` brings the surrounding ``autocast`` back too. Under
plain ``torch.utils.checkpoint`` nobody does: layers with a recipe of their own need no help, others raise.

A compiled graph recomputes operations and not modules: nothing here concerns it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from minifloat.autocast import autocast, restore_contexts, surrounding_contexts
from minifloat.recipe import Recipe


class Step(NamedTuple):
    """What one linear of a checkpointed region computed under.

    ``scale``: delayed scaling's forward scales by then, fp32 [slots]; else None.
    """

    recipe: Recipe | None
    scale: Tensor | None


class Tape:
    """The steps of one checkpointed region in their order, and the ``autocast`` contexts around it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.contexts: list[autocast] = surrounding_contexts()
        self._played: dict[int, int] = {}

    def next(self, recomputation: int) -> Step | None:
        """The next step of the recomputation of that number; None after the last."""
        position = self._played.get(recomputation, 0)
        self._played[recomputation] = position + 1
        return self.steps[position] if position < len(self.steps) else None

    def rewind(self, recomputation: int) -> None:
        self._played.pop(recomputation, None)


class _Local(threading.local):
    """Of this thread: the tapes that are written to, and those that are played, innermost last."""

    def __init__(self) -> None:
        self.recording: list[Tape] = []
        self.playing: list[Tape] = []


_local = _Local()
_plain: WeakKeyDictionary[Any, Tape] = WeakKeyDictionary()  # by the frame of torch's own checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose activations backward computes again instead of keeping them.

    As ``torch.utils.checkpoint.checkpoint``, whose other options (``preserve_rng_state``, ``determinism_check``,
    ``debug``, ``early_stop``) it takes, and exact under every recipe: the recomputation runs under the ``autocast`` of
    the forward, reads the forward's delayed scales and records no amax twice. Stochastic rounding draws the same bits
    unless ``preserve_rng_state=False``.

    Raises:
        ValueError: ``use_reentrant=True``.
    """
    if use_reentrant:
        raise ValueError("minifloat.checkpoint is the non-reentrant form only; leave out use_reentrant=True")
    if not torch.compiler.is_compiling():
        kwargs["context_fn"] = checkpoint_context_fn
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def checkpoint_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...)``: makes it exact, too."""
    tape = Tape()
    return _record(tape), _Replay(tape)


def follow(recipe: Recipe | None, scale: Tensor | None, before: Recipe | None, label: str) -> Step | None:
    """Called by each linear in each eager forward: notes what it computes under, or says what it computed under.

    Args:
        recipe: the recipe in force.
        scale: delayed scaling's forward scales, fp32 [slots].
        before: the recipe of the linear's latest forward.
        label: what errors call the linear.

    Returns:
        The step to repeat in a recomputation, else None.

    Raises:
        RuntimeError: a recomputation that cannot be what the forward was.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    frame, in_recomputation = (None, False) if hooks is None else _frame_of(hooks[0])
    step = _played_step(frame, in_recomputation)
    if step is None and torch._C._current_graph_task_id() != -1:
        nested = in_recomputation or frame is not None
        _check_unknown(recipe, scale, before, nested, label)
    if step is not None and step.recipe != recipe:
        raise _different(step.recipe, recipe, label)
    tapes = list(_local.recording)
    if frame is not None and not in_recomputation:
        tapes.append(_plain.setdefault(frame, Tape()))
    if tapes:
        noted = step or Step(recipe, None if scale is None else scale.clone())
        for tape in tapes:
            tape.steps.append(noted)
    return step


def _played_step(frame: Any, in_recomputation: bool) -> Step | None:
    if _local.playing:
        return _local.playing[-1].next(0)
    if in_recomputation and frame in _plain:
        return _plain[frame].next(torch._C._current_graph_task_id())
    return None


def _check_unknown(
    recipe: Recipe | None, scale: Tensor | None, before: Recipe | None, nested: bool, label: str
) -> None:
    """A forward inside backward that no tape knows: torch's reentrant checkpoint, or one inside another.

    The former's first forward ran without gradients, so that nothing was recorded and no scale has moved on.
    """
    if recipe is None and before is not None:
        raise _different(before, None, label)
    if nested and scale is not None:
        raise RuntimeError(
            f"{label} has delayed scaling inside nested torch.utils.checkpoint calls, whose recomputation cannot know "
            "the scales of the forward; use minifloat.checkpoint"
        )


def _different(first: Recipe | None, now: Recipe | None, label: str) -> RuntimeError:
    return RuntimeError(
        f"{label} ran under {_name(first)} and is recomputed under {_name(now)}: torch.utils.checkpoint does not bring "
        "autocast back; use minifloat.checkpoint, or pass it context_fn=minifloat.checkpoint_context_fn"
    )


def _frame_of(hook: Any, depth: int = 2) -> tuple[Any, bool]:
    """The frame of torch's checkpoint that saved tensors go to, and whether it is being recomputed.

    The hooks of a forward hold their frame, those of a recomputation a weak reference to it; newer versions of PyTorch
    wrap the latter once more. Other hooks hold neither.
    """
    for cell in getattr(hook, "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, ReferenceType) and isinstance(held(), torch_checkpoint._CheckpointFrame):
            return held(), True
        if isinstance(held, torch_checkpoint._CheckpointFrame):
            return held, False
        if depth and callable(held):
            frame, again = _frame_of(held, depth - 1)
            if frame is not None:
                return frame, again
    return None, False


@contextmanager
def _record(tape: Tape) -> Iterator[None]:
    _local.recording.append(tape)
    try:
        yield
    finally:
        _local.recording.pop()


class _Replay(AbstractContextManager[None]):
    """Entered once for each recomputation, of which there are several where the graph is retained."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.tape.rewind(0)
        self.outside = restore_contexts(self.tape.contexts)
        _local.playing.append(self.tape)

    def __exit__(self, *error: object) -> None:
        _local.playing.pop()
        restore_contexts(self.outside)


def _name(recipe: Recipe | None) -> str:
    return "no recipe" if recipe is None else type(recipe).__name__
