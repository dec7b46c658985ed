"""``autocast``, the recipe of modules without one of their own, and one forward of them under delayed scaling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import delayed
from minifloat.arguments import checked
from minifloat.comm.dtensor_ddp import pipelines, watch_pipelines
from minifloat.delayed import AmaxHistory, Member, Region, in_order
from minifloat.quantizer import as_matrix
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    RecipeLike,
    as_recipe,
)


class _Stack(threading.local):
    """Stack of the ``autocast`` contexts that this thread is inside of, outermost first."""

    def __init__(self) -> None:
        self.contexts: list[autocast] = []


_stack = _Stack()


class _Used:
    """Options that some context was made or entered with: they cost nothing where none was."""

    def __init__(self) -> None:  # attributes of an object, which compiled code guards; of a class it may not
        self.batch_invariant = self.check_finite = False
        self.inspection: Any = None  # the open one, of ``nn/inspect.py``


used = _Used()


class autocast:  # noqa: N801 - the name that torch.autocast and Transformer Engine taught
    """Sets the recipe of modules called inside that have no recipe of their own.

    The exit of the outermost context updates the delayed scaling state of every module that ran forward with gradients
    inside, with one all-reduce a group; after an exception the state is unchanged. A context may be entered again after
    its exit, but not inside of itself.

    Args:
        enabled: False leaves those modules in high precision.
        calibrating: with ``enabled=False``, records amaxes for delayed scaling while computing in high precision.
        recipe: a recipe or its short name; default :func:`get_default_recipe`.
        amax_reduction_group: the ranks that reduce delayed scaling's amaxes; default all ranks.
        check_finite: for debugging: eager linears inside, also of nested contexts, check that input, weight and
            ``grad_output`` are finite. Each waits for the device; parts of fused modules are called in turn.
        batch_invariant: a row's result in the forward of linears, grouped linears and routers inside, also of nested
            contexts, has the same bits for any number of rows, any order and any grouping (``docs/numerics.md`` 3.7).

    Raises:
        TypeError: ``recipe`` is neither a recipe nor a name.
        ValueError: there is no recipe of this name; inside, with ``batch_invariant``: a row of a layer depends on
            others by the recipe's scales, or by sums over ranks.
        FloatingPointError: inside, with ``check_finite``: naming the layer and the tensor.
    """

    @checked
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: RecipeLike | None = None,
        amax_reduction_group: dist.ProcessGroup | None = None,
        check_finite: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.enabled, self.calibrating = enabled, calibrating
        self.recipe: Recipe = first_equal(get_default_recipe() if recipe is None else as_recipe(recipe))
        self.amax_reduction_group = amax_reduction_group
        self.check_finite, self.batch_invariant = check_finite, batch_invariant
        if batch_invariant:
            used.batch_invariant = True
        if not torch.compiler.is_compiling():
            watch_pipelines()
        self.region = Region()

    def __enter__(self) -> autocast:
        if self.check_finite:
            if torch.compiler.is_compiling():
                raise RuntimeError(_NOT_COMPILED)
            used.check_finite = True
        if self in _stack.contexts:
            raise RuntimeError("autocast: this context is entered inside of itself; make another one")
        # The outermost context owns the region, so that nested ones do not update what is still in use.
        self.region = _stack.contexts[0].region if _stack.contexts else Region()
        _stack.contexts.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        contexts, ordered = _stack.contexts, _stack.contexts[-1:] == [self]
        if ordered:
            contexts.pop()
        elif self in contexts:
            del contexts[contexts.index(self) :]  # or what is refused would stay in force
        region, self.region = self.region, Region()  # which would keep the modules alive as long as the context
        if not contexts and kind is None and ordered:
            region.update(forward=True)
        elif not contexts:
            region.forget()
        if not ordered:
            raise RuntimeError(
                "autocast: contexts are left in the reverse order of entering, and each once; use with statements "
                "that do not interleave, as two generators do. This context and those entered after it have ended"
            )


def first_equal(recipe: Recipe) -> Recipe:
    """Returns the first of equal recipes: layers cache by identity, and a loop may make its recipe in each step."""
    ours = type(recipe).__module__.startswith("minifloat.") and not isinstance(recipe, CustomRecipe)
    if not ours or torch.compiler.is_compiling():
        return recipe
    if len(_recipes) >= _MAX_RECIPES:
        _recipes.clear()
    return _recipes.setdefault(recipe, recipe)


_recipes: dict[Recipe, Recipe] = {}
_MAX_RECIPES = 64


def current() -> autocast | None:
    """Returns the innermost ``autocast`` that this thread is inside of."""
    return _stack.contexts[-1] if _stack.contexts else None


def surrounding_recipe() -> Recipe | None:
    """Returns the recipe that the innermost ``autocast`` gives to layers without one."""
    contexts = _stack.contexts  # of current(), whose call would cost as much as the rest
    return contexts[-1].recipe if contexts and contexts[-1].enabled else None


def surrounding_contexts() -> list[autocast]:
    """Lists the contexts that this thread is inside of, outermost first."""
    return list(_stack.contexts)


def restore_contexts(contexts: list[autocast]) -> list[autocast]:
    """Puts this thread inside of ``contexts``, for a recomputation: no histories are updated. Returns the replaced."""
    replaced, _stack.contexts = _stack.contexts, contexts
    return replaced


@contextmanager
def captured(context: autocast) -> Iterator[list[Any]]:
    """Puts this thread inside of ``context`` alone, for the capture of a CUDA graph.

    Yields:
        A list that gets each module's forward under delayed scaling, a ``DelayedCall``: amaxes are recorded, and no
        history is updated. Who replays the graph makes such calls anew.
    """
    calls: list[Any] = []
    context.region = Region(calls)
    outside = restore_contexts([context])
    try:
        yield calls
    finally:
        restore_contexts(outside)
        context.region = Region()


def checks_finite() -> bool:
    """Whether some context of this thread has ``check_finite``; asked if ``used.check_finite``."""
    return any(context.check_finite for context in _stack.contexts)


_NOT_COMPILED = "autocast(check_finite=True) looks at values, which compiled code cannot; run eager"


def check_can_wait(label: str) -> None:
    """Raises RuntimeError where nothing waits for the device: while the layer is compiled, or a CUDA graph captured."""
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{label}: {_NOT_COMPILED}")
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{label}: autocast(check_finite=True) looks at values, which the capture of a CUDA graph cannot; capture "
            "without it"
        )


def check_finite(label: str, x: Tensor, weight: Tensor, y: Tensor, offsets: Tensor | None = None) -> None:
    """Waits for the device, and raises a FloatingPointError if X, W or, in backward, the gradient of Y is not finite.

    ``offsets``: of groups, outside of which rows of X and Y may hold anything.
    """
    check_can_wait(label)
    rows = None if offsets is None else int(offsets[-1])

    def check(what: str, tensor: Tensor) -> None:
        check_can_wait(label)
        values = tensor.detach()
        found = ~values.isfinite()
        if values.is_meta or not bool(found.any()):
            return
        first, nan = found.nonzero()[0].tolist(), int(values.isnan().sum())
        raise FloatingPointError(
            f"{label}: {what} of shape {tuple(values.shape)} is not finite: {int(found.sum()) - nan} infinite and "
            f"{nan} NaN, the first at {first}"
        )

    def checked_rows(of: Tensor) -> Tensor:
        return of if rows is None else as_matrix(of)[:rows]

    check("input", checked_rows(x))
    check("weight", weight)
    if y.requires_grad:
        y.register_hook(lambda dy: check("grad_output", checked_rows(dy)))


def is_batch_invariant() -> bool:
    """Whether some context of this thread has ``batch_invariant``; asked if ``used.batch_invariant``."""
    for context in _stack.contexts:  # noqa: SIM110 - a generator costs as much as the rest
        if context.batch_invariant:
            return True
    return False


def get_default_recipe() -> Recipe:
    """Returns MXFP8 where tensor cores multiply it (sm_100), current scaling from sm_120 on, else delayed scaling."""
    if torch.cuda.is_available() and torch.version.cuda is not None:
        major, _ = torch.cuda.get_device_capability()
        if major >= 12:
            return Float8CurrentScaling()
        if major >= 10:
            return MXFP8BlockScaling()
    return DelayedScaling()


class DelayedCall:
    """One forward through a module with delayed scaling: the histories it reads its scales from and records to.

    A module's backward history is complete when the backward of its first use in the region ends, and is updated when
    the whole backward ends well, or before another region reads the scale. Where ranks reduce, the first module that is
    complete has the histories of all modules of the region updated by then, in one all-reduce, so that ranks may differ
    in which modules have a backward. A compiled backward updates its own at once.

    Args:
        states: what keeps the forward and the backward history.
        recipe: their recipe.
        records: whether the forward records its amaxes; scales are read in any case.
        backward: whether there will be a backward that records its own.
        context: the innermost ``autocast``; None outside of any, where the module is a region of its own.
        scale: what a recomputation reads in place of the forward scales, which have moved on.
    """

    def __init__(
        self, states: tuple[AmaxHistory, AmaxHistory], recipe: DelayedScaling, records: bool, backward: bool,
        context: autocast | None, scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        compiling = self.compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
        if pipelines.learn_shapes:
            records = backward = False
        first, second = self.states = states
        region = None if context is None else context.region
        forward = first.history(recipe, True, compiling, records)
        if scale is not None:  # spelled out: torch.compile of PyTorch 2.11 does not trace _replace of what it returns
            forward = delayed.History(scale, forward.amax_history, recipe, forward.rule)
        self.histories = forward, second.history(recipe, False, compiling, backward)
        self.records, self.region = (records, backward), region
        group = self.group = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
        self.shared = region is not None and group is not None and not compiling
        calls = None if region is None else region.calls
        self.captured, self.first = calls is not None, calls is None
        if calls is not None:  # in a CUDA graph's capture amaxes are recorded; each replay has calls for all else
            if records or backward:
                calls.append(self)
            return
        if region is not None and records:
            region.forward = Member(first, recipe, group, region.forward)
        if records and not compiling:
            if first.progress.recording:
                first.forget_newest()
            first.progress.recording = region is None
        if region is not None and backward:
            self.first, second.progress.region = second.progress.region is not region, region
            if compiling:
                region.add_compiled(Member(second, recipe, group, region.compiled), self.first)
            else:
                region.latest[second] = recipe
                if self.shared:
                    region.backward = Member(second, recipe, group, region.backward)

    def forward_finished(self) -> None:
        """Updates the forward history now if no ``autocast`` will do it at its end."""
        if self.region is None and self.records[0]:
            delayed.update([self.histories[0]], self.group)
            if not self.compiling:
                self.states[0].progress.recording = False

    def backward_begins(self) -> None:
        """Updates, before a backward reads its scale, what an earlier region's backward has completed.

        A checkpoint, or another recipe, may have replaced the buffers since the forward.
        """
        if self.captured or not self.records[1] or torch.compiler.is_compiling():
            return
        state, (forward, backward) = self.states[1], self.histories
        if state.progress.complete is not None:
            self._update_others([state])
        if backward[1] is not state._buffers["amax_history"]:
            self.histories = forward, state.history(backward.recipe, False, False)

    def backward_finished(self) -> None:
        """Leaves what the end of this backward completes to the end of the whole."""
        if not self.records[1] or not self.first:
            return
        task = -1 if torch.compiler.is_compiling() else _graph_task()
        if task == -1:
            delayed.update([self.histories[1]], self.group)
            return
        region, complete, states = self.region, self.states[1].progress.complete, [self.states[1]]
        if self.shared and region is not None:
            if complete is not None and complete[0] is region and complete[1]() is not None:
                return  # another module of the region has seen to all
            states = [member.state for member in in_order(region.backward)]
        if complete is not None or self.shared:
            self._update_others(states)
        end = _End.latest()
        if end is None or end.task != task:
            end = _End(task)
        end.calls.append((self, states))
        for state in states:
            state.progress.complete = region, ref(end)

    def _update_others(self, states: Sequence[AmaxHistory]) -> None:
        """Updates now what this backward has completed in other regions."""
        for state in states:
            complete = state.progress.complete
            if complete is None or (self.shared and complete[0] is self.region):
                continue
            if (end := complete[1]()) is not None:
                end()


class _End:
    """Updates what a backward has completed: called by the engine at its end, or dropped by it where it raises."""

    latest: Callable[[], _End | None] = staticmethod(lambda: None)  # the one that was made last

    def __init__(self, task: int) -> None:
        self.task, self.calls = task, list[tuple[DelayedCall, Sequence[AmaxHistory]]]()
        _End.latest = ref(self)
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        calls, self.calls = self.calls, []
        alone = []
        for call, states in calls:
            for state in states:
                state.progress.complete = None
            own = call.histories[1]
            if call.region is not None:
                if call.shared:
                    call.region.update(forward=False)
                    continue
                recipe = call.region.latest.get(states[0], own[2])
                own = own if recipe is own[2] else states[0].history(recipe, False, False)
            alone.append(own)
            if call.group is not None:
                delayed.reduce(alone[-1:], call.group)
        delayed.update(alone)


_graph_task = torch._C._current_graph_task_id
