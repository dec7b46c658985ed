"""One forward through a module under delayed scaling: which scales it reads, and when its histories are updated."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from minifloat import delayed
from minifloat.autocast import autocast
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
        if self.records[1] and not self.captured and not torch.compiler.is_compiling():
            self._update_others([self.states[1]])

    def backward_finished(self) -> None:
        """Leaves what the end of this backward completes to the end of the whole."""
        if not self.records[1] or not self.first:
            return
        task = -1 if torch.compiler.is_compiling() else _graph_task()
        if task == -1:
            delayed.update([self.histories[1]], self.group)
            return
        complete, states = self.states[1].progress.complete, [self.states[1]]
        if self.shared and self.region is not None:
            if complete is not None and complete[0] is self.region and complete[1]() is not None:
                return  # another module of the region has seen to all
            states = [member.state for member in in_order(self.region.backward)]
        self._update_others(states)
        end = _ends.get(task) or _End(task)
        end.calls.append((self, states))
        for state in states:
            state.progress.complete = self.region, ref(end)

    def _update_others(self, states: Sequence[AmaxHistory]) -> None:
        """Updates now what this backward has completed in other regions."""
        for state in states:
            complete = state.progress.complete
            if complete is None or (self.shared and complete[0] is self.region):
                continue
            end = complete[1]()
            if end is not None:
                end()


class _End:
    """Updates what a backward has completed: called by the engine at its end, or dropped by it where it raises."""

    def __init__(self, task: int) -> None:
        self.calls: list[tuple[DelayedCall, Sequence[AmaxHistory]]] = []
        _ends[task] = self
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        calls, self.calls = self.calls, []
        alone = []
        for call, states in calls:
            for state in states:
                state.progress.complete = None
            if call.shared and call.region is not None:
                call.region.update(forward=False)
                continue
            alone.append(call.histories[1])
            if call.group is not None:
                delayed.reduce(alone[-1:], call.group)
        delayed.update(alone)


_graph_task = torch._C._current_graph_task_id
_ends: WeakValueDictionary[int, _End] = WeakValueDictionary()
"""By the engine's number of the backward."""
