"""Which recipe is in force: a module's own, else that of the surrounding ``autocast``, else none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import delayed, finite
from minifloat.arguments import checked
from minifloat.backward_pass import BackwardPass, running
from minifloat.delayed import AmaxHistory, Member, Region, in_order
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
    """The ``autocast`` contexts that this thread is inside of, outermost first."""

    def __init__(self) -> None:
        self.contexts: list[autocast] = []


_stack = _Stack()


class autocast:  # noqa: N801 - the name that torch.autocast and Transformer Engine taught
    """Gives a recipe to the modules inside that have none of their own.

    Args:
        enabled: False leaves those modules in high precision.
        calibrating: with ``enabled=False``, records amaxes for delayed scaling while computing in high precision.
        recipe: a recipe or its short name; default :func:`get_default_recipe`.
        amax_reduction_group: the ranks that agree on delayed scaling's amaxes; default all ranks.
        check_finite: for debugging: linears of eager code inside, also of nested contexts, look whether input, weight
            and ``grad_output`` are finite. Waits for the device in each; parts of fused modules run one by one.

    On leaving the outermost context, the delayed scaling state of every module that ran forward with gradients inside
    is brought up to date, with one all-reduce for all; an exception leaves it as it was. A module that ran under
    several groups is reduced over each of them in turn. A context may be entered again after it was left, not nested
    into itself.

    Raises:
        TypeError: ``recipe`` is neither a recipe nor a name.
        ValueError: there is no recipe of this name.
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
    ) -> None:
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe: Recipe = first_equal(get_default_recipe() if recipe is None else as_recipe(recipe))
        self.amax_reduction_group = amax_reduction_group
        self.check_finite = check_finite
        self.region = Region()

    def __enter__(self) -> autocast:
        # The outermost context owns the region, so that nested ones do not update what is still in use.
        self.region = _stack.contexts[0].region if _stack.contexts else Region()
        _stack.contexts.append(self)
        if self.check_finite:
            finite.add(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _stack.contexts[-1:] != [self]:
            raise RuntimeError("autocast: contexts are left in the reverse order of entering; use with statements")
        _stack.contexts.pop()
        if self.check_finite:
            finite.add(-1)
        region, self.region = self.region, Region()  # which would keep the modules alive as long as the context
        if not _stack.contexts and kind is None:
            region.update(forward=True)
        elif not _stack.contexts:
            region.forget()


def first_equal(recipe: Recipe) -> Recipe:
    """The first of equal recipes: layers cache by identity, and a loop may make its recipe anew in each step."""
    ours = type(recipe).__module__.startswith("minifloat.") and not isinstance(recipe, CustomRecipe)
    if not ours or torch.compiler.is_compiling():
        return recipe
    if len(_recipes) >= _MAX_RECIPES:
        _recipes.clear()
    return _recipes.setdefault(recipe, recipe)


_recipes: dict[Recipe, Recipe] = {}
_MAX_RECIPES = 64


class Use:
    """One forward through a module with delayed scaling: the histories it reads its scales from and records to.

    A module's backward history is complete when the backward of its first use in the region ends: backward runs in
    reverse, so that is its last. It is updated when the whole backward ends well, or before another region reads the
    scale. Where ranks reduce, the first module that is complete has the histories of all modules of the region updated
    by then, in one all-reduce: ranks may differ in which modules have a backward, as long as each has one. But a
    compiled backward, which is traced before the region's later modules are known, updates its own at once.

    Args:
        states: what keeps the forward and the backward history.
        recipe: their recipe.
        records: whether the forward records its amaxes; scales are read in any case.
        backward: whether there will be a backward that records its own.
        context: the innermost ``autocast``; None outside of any, where the module is a region of its own.
        scale: what a recomputation reads in place of the forward scales, which have moved on.
    """

    def __init__(
        self,
        states: tuple[AmaxHistory, AmaxHistory],
        recipe: DelayedScaling,
        records: bool,
        backward: bool,
        context: autocast | None,
        scale: Tensor | None = None,
    ) -> None:
        compiling = self.compiling = torch.compiler.is_compiling()
        forward = states[0].history(recipe, True, compiling)
        self.states = states
        self.histories = (
            # Spelled out: torch.compile of PyTorch 2.11 does not trace _replace of what it returns.
            forward if scale is None else delayed.History(scale, forward.amax_history, recipe, forward.rule),
            states[1].history(recipe, False, compiling),
        )
        self.records = records, backward
        self.region = None if context is None else context.region
        self.group = delayed.reduction_group(recipe, None if context is None else context.amax_reduction_group)
        self.shared = self.region is not None and self.group is not None and not compiling
        self.first = True
        if self.region is not None and records:
            self.region.forward = Member(states[0], recipe, self.group, self.region.forward)
        if records and not compiling:
            if states[0].progress.recording:
                states[0].forget_newest()
            states[0].progress.recording = self.region is None
        if self.region is not None and backward:
            self.first = states[1].progress.region is not self.region
            states[1].progress.region = self.region
            if compiling:
                self.region.add_compiled(Member(states[1], recipe, self.group, self.region.compiled), self.first)
            if self.shared:
                self.region.backward = Member(states[1], recipe, self.group, self.region.backward)

    def forward_finished(self) -> None:
        """Updates the forward history now if no ``autocast`` will do it at its end."""
        if self.region is None and self.records[0]:
            delayed.update([self.histories[0]], self.group)
            if not self.compiling:
                self.states[0].progress.recording = False

    def backward_begins(self) -> None:
        """To be called before a backward reads its scale, which an earlier region's backward may have completed."""
        state = self.states[1]
        if torch.compiler.is_compiling() or not self.records[1]:
            return
        pending = state.progress.pending
        if pending is not None and not (self.shared and pending[1] is self.region):
            pending[0].finish(early=True)
        backward = running()
        if backward is not None:
            state.progress.incomplete |= not self.first
            undo = state.restorer(newest=True) if state.progress.incomplete else state.forget_newest
            backward.on_failure.append(undo)

    def backward_finished(self) -> None:
        """Leaves what the end of this backward completes to the end of the whole."""
        if not self.records[1] or not self.first:
            return
        pending = self.states[1].progress.pending
        if self.shared and pending is not None and pending[1] is self.region:
            return  # another module of the region has seen to all
        backward = None if torch.compiler.is_compiling() else running()
        if backward is None:
            self._update()
            return
        states = [self.states[1]]
        if self.region is not None and self.shared:
            states = [member.state for member in in_order(self.region.backward)]
        for state in states:
            if state.progress.pending is not None:
                state.progress.pending[0].finish(early=True)
        for state in states:
            state.progress.pending = backward, self.region
        backward.at_end.append(partial(self._update_pending, states, backward))
        backward.on_failure.append(partial(_drop_pending, states))

    def _update_pending(self, states: Sequence[AmaxHistory], backward: BackwardPass, early: bool) -> None:
        for state in states:
            if early:
                backward.on_failure.append(state.restorer())
            else:
                state.progress.incomplete = False
        _drop_pending(states)
        self._update()

    def _update(self) -> None:
        if self.region is not None and self.shared:
            self.region.update(forward=False)
        else:
            delayed.update([self.histories[1]], self.group)


def _drop_pending(states: Sequence[AmaxHistory]) -> None:
    for state in states:
        state.progress.pending = None


def current() -> autocast | None:
    """The innermost ``autocast`` that this thread is inside of."""
    return _stack.contexts[-1] if _stack.contexts else None


def surrounding_contexts() -> list[autocast]:
    """All that this thread is inside of, outermost first."""
    return list(_stack.contexts)


def restore_contexts(contexts: list[autocast]) -> list[autocast]:
    """Puts this thread inside of ``contexts``, for a recomputation: no histories are updated. Returns the replaced."""
    replaced, _stack.contexts = _stack.contexts, contexts
    finite.add(sum(context.check_finite for context in contexts) - sum(c.check_finite for c in replaced))
    return replaced


def checks_finite() -> bool:
    """Some context that this thread is inside of has ``check_finite``; to be asked where ``finite.active``."""
    return any(context.check_finite for context in _stack.contexts)


def get_default_recipe() -> Recipe:
    """MXFP8 where tensor cores multiply it (sm_100), current scaling from sm_120 on, else delayed scaling."""
    if torch.cuda.is_available() and torch.version.cuda is not None:
        major, _ = torch.cuda.get_device_capability()
        if major >= 12:
            return Float8CurrentScaling()
        if major >= 10:
            return MXFP8BlockScaling()
    return DelayedScaling()
