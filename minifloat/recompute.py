"""``checkpoint``: backward recomputes a forward with the recipes, scales and ranks that it ran under.

Inside of :func:`checkpoint`, or of PyTorch's with :func:`checkpoint_context_fn`, a :class:`Tape` records the recipe and
scales of every linear and how sharded modules communicate; a recomputation reads it, under the forward's ``autocast``.
Without a tape a forward with gradients inside of a backward is taken for a recomputation: exact for a layer with its
own recipe, but for delayed scaling. What cannot be known then raises: see ``_check_recipe``. Compiled graphs recompute
operations, not modules: nothing here reaches them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from minifloat.arguments import checked, label_of
from minifloat.autocast import autocast, restore_contexts, surrounding_contexts
from minifloat.recipe import Recipe

_USE = "use minifloat.checkpoint, or pass it context_fn=minifloat.checkpoint_context_fn"
_graph_task = torch._C._current_graph_task_id
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Layer(Protocol):
    """Linear; ``_ran_under`` has the first two recipes that it may have run a checkpoint's first forward under."""

    _ran_under: tuple[Recipe | None, ...]

    @property
    def _label(self) -> str: ...


class Parallel(Protocol):
    """Exchange of a sharded module; ``regrouped``: maybe over another group than in an earlier forward."""

    @property
    def regrouped(self) -> bool: ...


P_co = TypeVar("P_co", bound=Parallel, covariant=True)


class Sharded(Protocol[P_co]):
    """Module that is split over ranks."""

    @property
    def _exchange(self) -> P_co: ...


class Step(NamedTuple):
    """Recipe that one linear of a checkpointed region ran under; ``scale``: the delayed one then, fp32 [slots].

    ``weight``: codes that it read, which are kept for several microbatches.
    """

    recipe: Recipe | None
    scale: Tensor | None
    weight: Any = None


class Tape:
    """Steps of one checkpointed region in their order, and what surrounds it.

    ``exchanges``: how its sharded modules communicate.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.exchanges: dict[Any, Any] = {}
        self.contexts: list[autocast] = surrounding_contexts()


class _Forward(AbstractContextManager[None]):
    """Context of the first forward of a region in this thread, which writes ``tape``."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        _local.regions.append(self)
        _count_regions(1)

    def __exit__(self, *error: object) -> None:
        _count_regions(-1)
        _local.regions.pop()


class _Recomputation(_Forward):
    """Context of a recomputation, which reads ``tape``; entered for each backward of a graph that is retained."""

    step: Step | None

    def __enter__(self) -> None:
        self.outside = restore_contexts(self.tape.contexts)
        self.steps, self.step = iter(self.tape.steps), None
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__()
        restore_contexts(self.outside)


class _Local(threading.local):
    """Regions that this thread is inside of, innermost last."""

    def __init__(self) -> None:
        self.regions: list[_Forward] = []


_local = _Local()
_inside = False
"""Some thread is inside of a region; a bool, for compiled code to guard."""
_regions = 0
_lock = threading.Lock()


@checked
def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Calls ``function(*args, **kwargs)`` without saving its activations, which backward recomputes.

    Like ``torch.utils.checkpoint.checkpoint``, with its other options, but exact under every recipe: the recomputation
    runs under the ``autocast`` of the forward, reads the forward's delayed scales and records no amax twice. Stochastic
    rounding draws the same bits unless ``preserve_rng_state=False``. Compiled code, around or inside, is exact under
    every recipe but delayed scaling, whose layers raise under ``fullgraph=True`` and else run uncompiled, with a
    warning.

    Raises:
        ValueError: ``use_reentrant=True``, or a ``context_fn``, of which there can be one.
        RuntimeError: a layer with delayed scaling is compiled inside with ``fullgraph=True``, or is inside of PyTorch's
            own checkpoint around this one without ``context_fn=minifloat.checkpoint_context_fn``; code that was
            compiled before PyTorch's checkpoint is around it; a CUDA graph is captured without
            ``preserve_rng_state=False``.
    """
    if use_reentrant:
        raise ValueError("minifloat.checkpoint is the non-reentrant form only; leave out use_reentrant=True")
    if "context_fn" in kwargs:
        raise ValueError(
            "minifloat.checkpoint has a context_fn of its own; call torch.utils.checkpoint.checkpoint with one that "
            "enters yours and those of minifloat.checkpoint_context_fn()"
        )
    if not torch.compiler.is_compiling():
        kwargs["context_fn"] = checkpoint_context_fn
        if kwargs.get("preserve_rng_state", True) and capturing():
            raise RuntimeError(
                "minifloat.checkpoint: a CUDA graph that is captured draws other random numbers in the recomputation; "
                "pass preserve_rng_state=False if nothing in it is random, as without dropout"
            )
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def checkpoint_without_dropout(function: Callable[..., Any], *args: Any) -> Any:
    """:func:`checkpoint` of what draws no random numbers, which a CUDA graph may hold."""
    return checkpoint(function, *args, preserve_rng_state=torch.compiler.is_compiling() or not capturing())


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def checkpoint_context_fn() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Makes PyTorch's checkpoint exact: ``checkpoint(..., use_reentrant=False, context_fn=...)``."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:  # AOTAutograd asks
        policy = torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE  # what a checkpoint without one does
        return torch_checkpoint.create_selective_checkpoint_contexts(lambda *args, **kwargs: policy)
    tape = Tape()
    return _Forward(tape), _Recomputation(tape)


# ---- what modules ask in forward ----


def replayed_scale(layer: Layer, recipe: Recipe | None, scale: Tensor | None) -> Tensor | None:
    """Returns the delayed scales that the forward of this recomputation read; called in each eager forward of a linear.

    Args:
        layer, recipe: the linear and the recipe in force.
        scale: delayed scaling's forward scales as they are now, fp32 [slots].

    Returns:
        fp32 [slots], to be read in place of ``scale``, with no amax recorded; None: go on as usual.

    Raises:
        RuntimeError: a recomputation that cannot be what the forward was.
    """
    if not _inside and _graph_task() == -1 and torch.is_grad_enabled() and _top_hooks(True) is None:
        return None
    replay, tapes = _surroundings()
    step = None if replay is None else next(replay.steps, None)
    if replay is not None:
        replay.step = step
    _check_recipe(layer, recipe, scale, step)
    if tapes:
        step = step or Step(recipe, None if scale is None else scale.clone())
        for tape in tapes:
            tape.steps.append(step)
    return None if step is None or replay is None else step.scale


def replayed_weight() -> Any:
    """Returns the kept codes that the forward of this recomputation read; asked after :func:`replayed_scale`."""
    replay = _surroundings()[0] if _inside else None
    return None if replay is None or replay.step is None else replay.step.weight


def note_weight(kept: Any) -> None:
    """Notes the kept codes that a linear reads, for recomputations; called after :func:`replayed_scale`."""
    for tape in _surroundings()[1] if _inside else ():
        tape.steps[-1] = tape.steps[-1]._replace(weight=kept)


def recomputes() -> bool:
    """Whether this forward may be a recomputation, which calibration does not count."""
    return not torch.compiler.is_compiling() and (_graph_task() != -1 or _surroundings()[0] is not None)


def exchange_of(module: Sharded[P_co]) -> P_co:
    """Returns the exchange of a sharded module in this forward: in a recomputation, that of the forward.

    Raises:
        RuntimeError: a recomputation without a tape, of a module that ``set_tensor_parallel_group`` has been called of.
    """
    own = module._exchange
    if torch.compiler.is_dynamo_compiling() or (not _inside and _graph_task() == -1):
        return own
    replay, tapes = _surroundings()
    if replay is None and own.regrouped and _graph_task() != -1 and torch.is_grad_enabled():
        raise RuntimeError(
            f"{label_of(module)}: set_tensor_parallel_group was called, and a "
            f"torch.utils.checkpoint without a tape does not know the group of its forward; {_USE}"
        )
    found: P_co = own if replay is None else replay.tape.exchanges.get(module, own)
    for tape in tapes:
        tape.exchanges.setdefault(module, found)
    return found


def hooks_read() -> bool:
    """Whether hooks copy tensors when autograd saves them: ``save_on_cpu`` does, a checkpoint does not."""
    return _top_hooks(True) is not None and not _in_checkpoint()


def _surroundings() -> tuple[_Recomputation | None, list[Tape]]:
    """Finds the innermost recomputation with a tape, or None, and the tapes that are written inside of it."""
    tapes: list[Tape] = []
    for region in reversed(_local.regions):
        if isinstance(region, _Recomputation):
            return region, tapes
        tapes.append(region.tape)
    return None, tapes


def _check_recipe(layer: Layer, recipe: Recipe | None, scale: Tensor | None, step: Step | None) -> None:
    """Raises if this may be a recomputation whose recipe or, without a tape, delayed scales are not the forward's.

    A forward without gradients may be that of a reentrant checkpoint, one under hooks that of the other: recipes of
    both are remembered. Delayed scaling raises as soon as PyTorch's checkpoint alone is seen.
    """
    grad, in_backward = torch.is_grad_enabled(), _graph_task() != -1
    before: tuple[Recipe | None, ...] = ()
    if step is not None:
        before = (step.recipe,)
    elif in_backward and grad:
        before = layer._ran_under
    elif recipe not in layer._ran_under:
        layer._ran_under = (*layer._ran_under[:1], recipe)
    untaped = grad and (in_backward or (_in_checkpoint() and not _local.regions))
    if any(each != recipe for each in before) or (step is None and scale is not None and untaped):
        name = "no recipe" if recipe is None else type(recipe).__name__
        raise RuntimeError(
            f"{layer._label} runs under {name} inside of {'a backward' if in_backward else 'torch.utils.checkpoint'}, "
            "and torch.utils.checkpoint brings back neither the recipe nor the delayed scales that it ran under in "
            f"forward; {_USE}"
        )


def _in_checkpoint() -> bool:
    """Whether the innermost saved-tensor hooks are those of PyTorch's checkpoint without reentrance."""
    hooks = _top_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", None) == torch_checkpoint.__name__


def _count_regions(number: int) -> None:
    global _inside, _regions
    with _lock:
        _regions += number
        _inside = _regions > 0


# ---- compiled code ----


def refuse_compiled(layer: Layer, scaled: bool = True) -> None:
    """Raises a RuntimeError in a linear with delayed scaling that is compiled inside of a checkpoint, also PyTorch's.

    With ``fullgraph=True`` the caller sees it, else the compiler runs the code uncompiled. Compiled code guards
    ``_inside``: what was compiled before :func:`checkpoint` is around it is recompiled there.

    ``scaled``: in this call too; else it has been before, and no recipe is in force: in a recomputation, no longer.
    """
    if torch.compiler.is_dynamo_compiling() and warns_of_compiled(_inside if scaled else None):  # not in an export
        raise RuntimeError(
            f"{layer._label}: a compiled graph recomputes delayed scaling's casts with scales that have moved on; "
            "leave what is checkpointed uncompiled, with torch.compiler.disable, or use another recipe"
        )


def warns_of_compiled(inside: bool | None) -> bool:
    """Warns if a checkpoint is around what is being compiled; the compiler calls this, and does not trace it.

    ``inside``: None: only where it is being recomputed.
    """
    around = _graph_task() != -1 and torch.is_grad_enabled()  # it runs inside of a backward, and has gradients
    if inside is not None:
        around = around or inside or _traces_inside() or bool(_local.regions) or _in_checkpoint()
    if around:
        _warn()
    return around


@cache
def _warn() -> None:
    """Warns once: while it compiles, the compiler resets what ``warnings`` knows of earlier ones."""
    warnings.warn(
        "delayed scaling inside of a checkpoint is not compiled: it raises under fullgraph=True, else the code around "
        "it runs uncompiled; leave what is checkpointed uncompiled, with torch.compiler.disable, or use another recipe",
        stacklevel=3,
    )


warns_of_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


def _traces_inside() -> bool:
    """Whether a compiler traces the inside of a checkpoint.

    What the compiler traces as a subgraph of its own is in ``parent`` tracers, each of which says which higher-order
    operator it is for.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import; loaded by now

    tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if "checkpoint" in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return False


def drops_side_effects() -> bool:
    """Whether a compiler traces the inside of a checkpoint, where no attribute may be set; it calls this itself.

    PyTorch's option lets them be set, by the forward alone.
    """
    return _traces_inside() and not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


drops_side_effects._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does
