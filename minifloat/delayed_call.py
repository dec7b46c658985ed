"""One forward through a module under delayed scaling: which scales it reads, and when its histories are updated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from minifloat import delayed
from minifloat.autocast import autocast
from minifloat.backward_pass import BackwardPass, running
from minifloat.delayed import AmaxHistory, Member, in_order
from minifloat.recipe import DelayedScaling


class DelayedCall:
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
        calls = None if self.region is None else self.region.calls
        self.captured = calls is not None
        if calls is not None:  # in a CUDA graph's capture amaxes are recorded; each replay has calls for all else
            self.first = False
            if records or backward:
                calls.append(self)
            return
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
        if torch.compiler.is_compiling() or not self.records[1] or self.captured:
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
        if self.shared or self.group is not None:
            backward.at_end.append(partial(self._update_pending, states, backward))
        else:
            backward.together.setdefault(_update_together, []).append(self)
        backward.on_failure.append(partial(_drop_pending, states))

    def _update_pending(self, states: Sequence[AmaxHistory], backward: BackwardPass, early: bool) -> None:
        _begin_update(states, backward, early)
        self._update()

    def _update(self) -> None:
        if self.region is not None and self.shared:
            self.region.update(forward=False)
        else:
            delayed.update([self.histories[1]], self.group)


def _update_together(backward: BackwardPass, calls: Sequence[DelayedCall], early: bool) -> None:
    """The updates of layers whose ranks do not reduce, in few launches."""
    _begin_update([call.states[1] for call in calls], backward, early)
    delayed.update([call.histories[1] for call in calls])


def _begin_update(states: Sequence[AmaxHistory], backward: BackwardPass, early: bool) -> None:
    for state in states:
        if early:
            backward.on_failure.append(state.restorer())
        else:
            state.progress.incomplete = False
        state.progress.pending = None


def _drop_pending(states: Sequence[AmaxHistory]) -> None:
    for state in states:
        state.progress.pending = None
