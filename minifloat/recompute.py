"""Activation checkpointing: a forward that backward runs a second time computes what the first one did.

Every linear says what it is about to compute under (:func:`follow`). Inside a checkpointed region that is written to a
:class:`Tape`; a recomputation plays the tape back, so that a delayed scale which has moved on since is the old one, and
amaxes that were recorded are not recorded again. :func:`checkpoint` brings the surrounding ``autocast`` back too. Under
plain ``torch.utils.checkpoint`` nobody does: layers with a recipe of their own need no help, others raise.

Which region of PyTorch's own checkpoint a linear is in, PyTorch does not say: ``_frame_of`` and ``_reentrant_regions``
look for it where PyTorch keeps it, and a test holds them to that.

A compiled graph recomputes operations and not modules: nothing here reaches it.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from minifloat.arguments import checked
from minifloat.autocast import autocast, restore_contexts, surrounding_contexts
from minifloat.backward_pass import BackwardPass, running
from minifloat.recipe import Recipe

P_co = TypeVar("P_co", covariant=True)


class Step(NamedTuple):
    """What one linear of a checkpointed region computed under.

    ``scale``: delayed scaling's forward scales by then, fp32 [slots]; else None.
    """

    recipe: Recipe | None
    scale: Tensor | None


class Pass(NamedTuple):
    """What a forward is to delayed scaling.

    Args:
        scale: the forward scales to read, fp32 [slots]; None: the layer's own, as they are now.
        forward: its amaxes are recorded.
        backward: those of its backward are.
        outer: the backward that it runs in, where a reentrant checkpoint recomputes it for a backward inside of that.
    """

    scale: Tensor | None
    forward: bool
    backward: bool
    outer: BackwardPass | None = None


class Tape:
    """The steps of one checkpointed region in their order, and the ``autocast`` contexts around it.

    ``parallel``: how its sharded modules communicate.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.parallel: dict[Any, Any] = {}
        self.contexts: list[autocast] = surrounding_contexts()
        self._recomputation: object = None
        self._position = 0

    def next(self, recomputation: object) -> Step | None:
        """The next step of this recomputation, a new one starting over; None after the last."""
        if self._recomputation != recomputation:
            self._recomputation, self._position = recomputation, 0
        self._position += 1
        return self.steps[self._position - 1] if self._position <= len(self.steps) else None


_ORDINARY = Pass(None, True, True)
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_graph_task = torch._C._current_graph_task_id


class _Playing(NamedTuple):
    """A tape that a recomputation plays."""

    tape: Tape
    recomputation: object

    def next(self) -> Step | None:
        return self.tape.next(self.recomputation)


class _Local(threading.local):
    """Of this thread: the tapes that are written to, and what is played, innermost last."""

    def __init__(self) -> None:
        self.recording: list[Tape] = []
        self.playing: list[_Playing] = []


_local = _Local()
_inside = False
"""Some thread is inside of a checkpoint that is recorded or replayed here; a bool, for compiled code to guard."""
_regions = 0
_lock = threading.Lock()
_plain: WeakKeyDictionary[Any, Tape] = WeakKeyDictionary()  # by the frame of torch's own checkpoint


@checked
def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, whose activations backward computes again instead of keeping them.

    As ``torch.utils.checkpoint.checkpoint``, whose other options (``preserve_rng_state``, ``determinism_check``,
    ``debug``, ``early_stop``) it takes, and exact under every recipe: the recomputation runs under the ``autocast`` of
    the forward, reads the forward's delayed scales and records no amax twice. Stochastic rounding draws the same bits
    unless ``preserve_rng_state=False``.

    Compiled code, around the checkpoint or inside of it, is exact under every recipe but delayed scaling: a graph that
    is run again reads the scales after the step has updated them. A layer with delayed scaling that is compiled inside,
    or was before, raises under ``fullgraph=True``; else the compiler warns, and runs it uncompiled: exact, and slower.
    Leave such parts uncompiled. Code that was compiled before PyTorch's own checkpoint is around it is not noticed.

    Raises:
        ValueError: ``use_reentrant=True``, or a ``context_fn``, of which there can be one.
        RuntimeError: a layer with delayed scaling is being compiled inside, with ``fullgraph=True``.
    """
    if use_reentrant:
        raise ValueError("minifloat.checkpoint is the non-reentrant form only; leave out use_reentrant=True")
    if "context_fn" in kwargs:
        raise ValueError(
            "minifloat.checkpoint has a context_fn of its own; call torch.utils.checkpoint.checkpoint with one that "
            "enters yours and those of minifloat.checkpoint_context_fn()"
        )
    if not torch.compiler.is_compiling():
        return torch_checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=checkpoint_context_fn, **kwargs
        )
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def refuse_compiled(label: str) -> None:
    """Called by each linear with delayed scaling that is being compiled.

    Compiled code guards ``_inside``: what was compiled before :func:`checkpoint` is around it is compiled anew there.

    Raises:
        RuntimeError: it is inside of a checkpoint, :func:`checkpoint` or PyTorch's own. With ``fullgraph=True`` the
            caller sees it, else the compiler runs the code uncompiled.
    """
    if _refuses(_inside):
        raise RuntimeError(
            f"{label}: a compiled graph recomputes delayed scaling's casts with scales that have moved on; leave what "
            "is checkpointed uncompiled, with torch.compiler.disable, or use another recipe"
        )


def _refuses(inside: bool) -> bool:
    """Warns if a checkpoint is around what is being compiled; the compiler calls this, and does not trace it."""
    if not (inside or _traces_checkpoint()):
        return False
    _warn()
    return True


@cache
def _warn() -> None:
    """Once: while it compiles, the compiler resets what ``warnings`` knows of earlier ones."""
    warnings.warn(
        "delayed scaling inside of a checkpoint is not compiled: it raises under fullgraph=True, else the code around "
        "it runs uncompiled; leave what is checkpointed uncompiled, with torch.compiler.disable, or use another recipe",
        stacklevel=3,
    )


_refuses._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


def _traces_checkpoint() -> bool:
    """A compiler traces the inside of a checkpoint, or a checkpoint runs what it traces.

    What the compiler traces as a subgraph of its own is in ``parent`` tracers, each of which says which higher-order
    operator it is for.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import; loaded by now

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if "checkpoint" in str(tracer.source_target):
            return True
        tracer = tracer.parent
    hooked = _hooked()
    return bool(_local.recording or _local.playing or hooked.recording or hooked.playing)


def checkpoint_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...)``: makes it exact, too."""
    tape = Tape()
    return _record(tape, _hooked()), _Replay(tape)


def follow(recipe: Recipe | None, scale: Tensor | None, before: Recipe | None, label: str) -> Pass:
    """Called by each linear in each eager forward: notes what it computes under, and says what it did if it is again.

    Args:
        recipe: the recipe in force.
        scale: delayed scaling's forward scales, fp32 [slots].
        before: the recipe of the linear's latest forward.
        label: what errors call the linear.

    Raises:
        RuntimeError: a recomputation that cannot be what the forward was.
    """
    grad = torch.is_grad_enabled()
    in_backward = _graph_task() != -1
    if grad and not in_backward and _top_hooks(True) is None and not _local.recording and not _local.playing:
        return _ORDINARY
    hooked, regions, rerun = _surroundings(grad and not in_backward)
    playing = _playing(hooked, rerun)
    step = None if playing is None else playing.next()
    if step is not None and step.recipe != recipe:
        raise _different(step.recipe, recipe, label)
    if step is None and in_backward:
        _check_unknown(recipe, scale, before, hooked.hooks, label)
    if scale is not None and any(tape.contexts for tape in regions):
        raise RuntimeError(
            f"{label} has delayed scaling in a reentrant checkpoint inside autocast, enabled or not: the recomputation "
            "would record its amaxes elsewhere; use minifloat.checkpoint"
        )
    tapes = [*_local.recording, *hooked.recording, *regions]
    if tapes:
        noted = step or Step(recipe, None if scale is None else scale.clone())
        for tape in tapes:
            tape.steps.append(noted)
    outer = _outer_pass() if in_backward and scale is not None and playing is rerun else None
    if step is not None:
        return Pass(step.scale, False, grad and playing is rerun, outer)
    return Pass(None, grad or bool(regions), grad, outer)


class _Sharded(Protocol[P_co]):
    """A module that is split over ranks; ``_parallel`` says how it communicates."""

    @property
    def _parallel(self) -> P_co: ...


def parallel_of(module: _Sharded[P_co]) -> P_co:
    """How a sharded module communicates in this forward: in a recomputation, as it did in the forward.

    ``set_tensor_parallel_group`` may have been called since.
    """
    own = module._parallel
    if torch.compiler.is_compiling():
        return own
    hooked, regions, rerun = _surroundings(torch.is_grad_enabled() and _graph_task() == -1)
    playing = _playing(hooked, rerun)
    found: P_co = own if playing is None else playing.tape.parallel.get(module, own)
    for tape in (*_local.recording, *hooked.recording, *regions):
        tape.parallel.setdefault(module, found)
    return found


def _check_unknown(
    recipe: Recipe | None, scale: Tensor | None, before: Recipe | None, hidden: bool, label: str
) -> None:
    """A forward inside backward that no tape knows: a checkpoint of somebody's own, or one that other hooks hide."""
    if before is not None and recipe != before and torch.is_grad_enabled():  # as it is in every recomputation
        raise _different(before, recipe, label)
    if hidden and scale is not None:
        raise RuntimeError(
            f"{label} has delayed scaling inside torch.utils.checkpoint with another one, or other saved-tensor hooks, "
            "inside of it: the recomputation cannot know the scales of the forward; use minifloat.checkpoint"
        )


def _different(first: Recipe | None, now: Recipe | None, label: str) -> RuntimeError:
    return RuntimeError(
        f"{label} ran under {_name(first)} and is recomputed under {_name(now)}: torch.utils.checkpoint does not bring "
        "autocast back; use minifloat.checkpoint, or pass it context_fn=minifloat.checkpoint_context_fn"
    )


# ---- which checkpoint a forward is in: what PyTorch knows and does not say ----


def _surroundings(ordinary: bool) -> tuple[_Hooked, list[Tape], _Playing | None]:
    """What saved-tensor hooks tell, and :func:`_reentrant`.

    Without gradients (or in backward: not ``ordinary``) this may be the first forward of a reentrant checkpoint, whose
    every linear has its step.
    """
    return _hooked(), *(([], None) if ordinary else _reentrant())


def _playing(hooked: _Hooked, rerun: _Playing | None) -> _Playing | None:
    """The recomputation that this forward belongs to."""
    return _local.playing[-1] if _local.playing else hooked.playing or rerun


class _Hooked(NamedTuple):
    """What the innermost saved-tensor hooks tell of PyTorch's checkpoint without reentrance."""

    hooks: bool
    recording: tuple[Tape, ...] = ()
    playing: _Playing | None = None


def _hooked() -> _Hooked:
    hooks = _top_hooks(True)
    if hooks is None:
        return _Hooked(False)
    frame, again = _frame_of(hooks[0])
    if frame is None:
        return _Hooked(True)
    if not again:
        return _Hooked(True, recording=(_plain.setdefault(frame, Tape()),))
    return _Hooked(True, playing=_Playing(_plain[frame], hooks[0]) if frame in _plain else None)


def hooks_read() -> bool:
    """Hooks read now what autograd saves, as those of ``save_on_cpu`` do; those of a checkpoint do not."""
    hooks = _top_hooks(True)
    return hooks is not None and _frame_of(hooks[0])[0] is None


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


def _reentrant() -> tuple[list[Tape], _Playing | None]:
    """The tapes of reentrant checkpoints whose first forward this is, and what the innermost recomputation plays.

    That first forward runs without gradients like any evaluation: only the stack tells them apart. It is none if no
    backward can follow.
    """
    tapes: list[Tape] = []
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        if caller.f_code is _REENTRANT_FORWARD:
            ctx = caller.f_locals["ctx"]
            if ctx.next_functions:
                tapes.append(ctx.__dict__.setdefault("_minifloat_tape", Tape()))
        elif caller.f_code is _REENTRANT_BACKWARD:
            tape = caller.f_locals["ctx"].__dict__.get("_minifloat_tape")
            return tapes, None if tape is None else _Playing(tape, _graph_task())
        caller = caller.f_back
    return tapes, None


def _outer_pass() -> BackwardPass | None:
    """The backward that the outermost reentrant checkpoint recomputes in, which those inside of it are a part of."""
    outermost: Any = None
    caller: FrameType | None = sys._getframe(1)
    while caller is not None:
        if caller.f_code is _REENTRANT_BACKWARD:
            outermost = caller.f_locals["ctx"].__dict__
        caller = caller.f_back
    if outermost is None:
        return running()
    known: BackwardPass | None = outermost.get("_minifloat_pass")
    if known is None or known.ended:
        known = outermost["_minifloat_pass"] = running()
    return known


_REENTRANT_FORWARD = torch_checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_BACKWARD = torch_checkpoint.CheckpointFunction.backward.__code__


# ---- contexts of minifloat's own ----


@contextmanager
def _record(tape: Tape, around: _Hooked) -> Iterator[None]:
    """Writes ``tape``, and what a checkpoint of PyTorch around this one would write or play: our hooks hide its own."""
    tapes, playing = [*around.recording, tape], [around.playing] if around.playing else []
    _local.recording += tapes
    _local.playing += playing
    _count_regions(1)
    try:
        yield
    finally:
        _count_regions(-1)
        del _local.recording[len(_local.recording) - len(tapes) :]
        del _local.playing[len(_local.playing) - len(playing) :]


def _count_regions(number: int) -> None:
    global _inside, _regions
    with _lock:
        _regions += number
        _inside = _regions > 0


class _Replay(AbstractContextManager[None]):
    """Entered once for each recomputation, of which there are several where the graph is retained."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.outside = restore_contexts(self.tape.contexts)
        _local.playing.append(_Playing(self.tape, object()))
        _count_regions(1)

    def __exit__(self, *error: object) -> None:
        _count_regions(-1)
        _local.playing.pop()
        restore_contexts(self.outside)


def _name(recipe: Recipe | None) -> str:
    return "no recipe" if recipe is None else type(recipe).__name__
