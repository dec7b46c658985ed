"""What one group gathers ahead of its use and reduces behind it: the same calls in the same order on all ranks.

PyTorch's handles are the one place that crosses streams. A collective starts after what its stream has been given, and
``wait`` holds back what the stream is given next; meanwhile the handle keeps what is sent and received. So no buffer is
read too early or reused too soon, whatever is predicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minifloat.backward_pass import BackwardPass, running
from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group
from minifloat.functional.etp.rows import Parts
from minifloat.operand import Quantized

_MOST_SUCCESSORS = 64  # of one weight; contexts that never repeat must not fill the memory


class Source(Protocol):
    """A weight, or those of all experts of a layer: what is gathered at once."""

    number: int  # that no other has
    casts: int  # how many casts there have been of it, equal on all ranks
    successors: dict[tuple[Key | None, Key], Step]

    def parts(self, values: bool) -> Parts | None:
        """This rank's rows as they were cast last, or their ``values``; None if the parameters have changed since."""

    def start(self, dim: int, parts: Parts) -> Pending[list[Quantized]]:
        """Gathers ``parts``, for products that contract ``dim``."""

    def nbytes(self, dim: int, parts: Parts) -> int:
        """How much memory the wholes of ``parts`` take, for products that contract ``dim``: the same on all ranks."""


Key = tuple[int, int, bool, bool]
"""A step without its source, which a table would keep alive."""


class Step(NamedTuple):
    """A gather: of what, for which dim, of values or of what they were cast to; does its caller want gradients?"""

    source: Source
    dim: int
    values: bool
    grad: bool

    @property
    def key(self) -> Key:
        return self.source.number, self.dim, self.values, self.grad


class Ahead(NamedTuple):
    """A gather that was started because it is likely to be the next."""

    step: Step
    cast: int  # which of its source's
    pending: Pending[list[Quantized]]


class Gradient:
    """Of a weight in one backward, which may use it several times: what has been reduced so far.

    Args:
        deliver: is given the sum, once: hooks on parameters see no part of it.
        complete: no further one is to come.
    """

    def __init__(self, deliver: Callable[[Tensor], None], complete: bool = False) -> None:
        self.deliver, self.complete = deliver, complete
        self.awaited = 0
        self.total: Tensor | None = None

    def add(self, own: Tensor) -> None:
        """One that was awaited."""
        self.total = own if self.total is None else self.total.add_(own)
        self.awaited -= 1
        self.deliver_complete()

    def deliver_complete(self) -> None:
        """Delivers the sum if none is awaited any more."""
        if self.complete and not self.awaited and self.total is not None:
            total, self.total = self.total, None
            self.deliver(total)


class Lane:
    """The gathers and reductions of one group.

    The order of gathers is a prediction (what followed the two latest ones last time); a wrong one costs a gather.
    Nothing that was started outlives the backward in which it was not used, and no prediction crosses its end, where
    an optimizer may follow.

    Attributes:
        depth: how many gathers are started ahead; 0: none.
        most_bytes: of them; one is always started. None: no limit.
        gathered, wasted: gathers so far, and those of them that were started and not used.
        in_graph: what a CUDA graph has still to cast, where one is being captured, or warmed up, that begins and ends
            with :meth:`settle`; else None.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.depth = 1
        self.most_bytes: int | None = None
        self.gathered = self.wasted = 0
        self.in_graph: dict[Source, None] | None = None
        self._ahead: deque[Ahead] = deque()
        self._before: Step | None = None
        self._latest: Step | None = None
        self._used: dict[Source, None] = {}  # since the latest pass ended, and before, in the order of first use
        self._used_before: dict[Source, None] = {}
        self._renewed: set[Source] = set()
        self._gradients: dict[Source, Gradient] = {}
        self._reducing: deque[tuple[Pending[Tensor], Callable[[Tensor], None]]] = deque()
        self._backward: BackwardPass | None = None

    def used_with(self, source: Source) -> list[Source]:
        """What was gathered in the latest pass over a model, ``source`` among it: likely to be gathered in the next.

        Nothing else: of another model, which may have been deleted, some ranks may have collected the garbage.
        """
        used = self._used_before | self._used
        return [each for each in used if each is not source] if source in used else []

    def renew(self, sources: Sequence[Source]) -> None:
        """They are cast though nothing was seen to change, before each is told to be in this pass."""
        self._renewed.update(sources)

    def renewed(self, source: Source) -> bool:
        """It was, since it was last used."""
        known = source in self._renewed
        self._renewed.discard(source)
        return known

    def has_renewed(self) -> bool:
        """Some are still to be used."""
        return len(self._renewed) > 0

    # ---- gathers ----

    def take(self, source: Source, dim: int, parts: Parts, cast: int, *, values: bool = False) -> list[Quantized]:
        """The wholes of ``parts``; what is likely to follow is started, to be gathered while they are multiplied.

        Args:
            source: the weight.
            dim: that the product contracts.
            parts: this rank's rows, or what a backward saved of them.
            cast: the number of the cast that they are of. Not their memory, which hooks of autograd may have moved, and
                which a rank without rows has none of: all ranks must find the same.
            values: they are those that were cast, in high precision.
        """
        self._watch_backward()
        step = Step(source, dim, values, torch.is_grad_enabled())
        if source in self._used and not step.grad and self._backward is None:
            self._end_pass()  # of an evaluation, which no backward ends
        self._used[source] = None
        pending = self._find(step, cast)
        if pending is None:
            pending = self._start(step, parts)
        self._learn(step)
        self._look_ahead()
        return pending.wait()

    def _find(self, step: Step, cast: int) -> Pending[list[Quantized]] | None:
        """What was started for this step; what was to be used before it is dropped."""
        if capturing() and self.in_graph is None:
            self._ahead.clear()  # started outside of the graph, which cannot wait for it
        while self._ahead:
            guess = self._ahead.popleft()
            if guess.step[:3] == step[:3] and guess.cast == cast:
                return guess.pending
            self._drop(guess)
        return None

    def _start(self, step: Step, parts: Parts) -> Pending[list[Quantized]]:
        self.gathered += 1
        return step.source.start(step.dim, parts)

    def _drop(self, guess: Ahead) -> None:
        self.wasted += 1
        guess.pending.wait()  # its memory is free for what follows in the stream

    def _learn(self, step: Step) -> None:
        if self._latest is not None:
            known = self._latest.source.successors
            if len(known) >= _MOST_SUCCESSORS:
                known.clear()
            known[None if self._before is None else self._before.key, self._latest.key] = step
        self._before, self._latest = self._latest, step

    def _look_ahead(self) -> None:
        before, latest = self._before, self._latest
        nbytes = 0
        waited = self.in_graph is not None or not capturing()  # a graph must wait for what it starts
        for place in range(self.depth if waited else 0):
            step = latest and latest.source.successors.get((before and before.key, latest.key))
            parts = step and step.source.parts(step.values)
            if step is None or parts is None or not _holds(parts, step.dim):
                return
            nbytes += step.source.nbytes(step.dim, parts)
            if place and self.most_bytes is not None and nbytes > self.most_bytes:
                return
            if place == len(self._ahead):
                self._ahead.append(Ahead(step, step.source.casts, self._start(step, parts)))
            elif self._ahead[place].step != step:
                return
            before, latest = latest, step

    # ---- reductions ----

    def gradient(self, source: Source, deliver: Callable[[Tensor], None], at_once: bool) -> Gradient:
        """What the gradients of ``source`` in this backward are added up in; ``at_once``: there is no other."""
        if at_once:
            return Gradient(deliver, complete=True)
        return self._gradients.setdefault(source, Gradient(deliver))

    def complete(self, source: Source) -> None:
        """All uses of ``source`` in this backward have started to reduce their gradients."""
        gradient = self._gradients.pop(source, None)
        if gradient is not None:
            gradient.complete = True
            gradient.deliver_complete()

    def reduce(self, pending: Pending[Tensor], finish: Callable[[Tensor], None]) -> None:
        """Gives the result of ``pending`` to ``finish`` when the next one has started, or at the end of backward."""
        earlier = len(self._reducing)
        self._reducing.append((pending, finish))
        self._watch_backward()
        for _ in range(earlier):
            self._finish_oldest()
        while self._reducing and self._backward is None:
            self._finish_oldest()

    def reduce_further(self, pending: Pending[Tensor], finish: Callable[[Tensor], None]) -> None:
        """The same of what another ``finish`` has started, which must not wait for what began just before."""
        self._reducing.append((pending, finish))

    def _finish_oldest(self) -> None:
        pending, finish = self._reducing.popleft()
        finish(pending.wait())

    # ---- the end of a pass ----

    def _watch_backward(self) -> None:
        """Lets the outermost backward that is running end the pass."""
        backward = running()
        while backward is not None and backward.outer is not None and not backward.outer.ended:
            backward = backward.outer
        if backward is not None and backward is not self._backward:
            backward.at_end.append(self._end)
            backward.on_failure.append(self.fail)
        self._backward = backward

    def _end(self, early: bool) -> None:
        while self._reducing:
            self._finish_oldest()
        if early and self._backward is not None:
            self._backward.at_end.append(self._end)
        else:
            self._forget()

    def settle(self) -> None:
        """Ends what is in flight, and predicts no gather across: here a CUDA graph begins or ends.

        Collectives of a graph and of eager code are then never in flight together.
        """
        while self._reducing:
            self._finish_oldest()
        self._end_prediction()

    def fail(self) -> None:
        """Nothing is added to gradients of a backward that has raised."""
        self._reducing.clear()  # unwaited: a rank that has raised earlier may never take part
        self._ahead.clear()
        self._forget()

    def _forget(self) -> None:
        self._end_prediction()
        self._backward = None
        self._renewed.clear()
        self._gradients.clear()  # of a backward that does not accumulate them, as torch.autograd.grad
        self._end_pass()

    def _end_prediction(self) -> None:
        """Nothing follows what was gathered last, be it that something once did."""
        while self._ahead:
            self._drop(self._ahead.popleft())
        if self._latest is not None:
            self._latest.source.successors.pop((self._before and self._before.key, self._latest.key), None)
        self._before = self._latest = None

    def _end_pass(self) -> None:
        self._used_before, self._used = self._used, {}


_lanes: dict[Group, Lane] = {}  # not weakly: ranks collect garbage at different times, and then decide differently


def lane_of(group: Group) -> Lane:
    """The one of a group: whoever gathers over it does so in one order."""
    found = _lanes.get(group)
    if found is None:
        found = _lanes[group] = Lane(group)
    return found


def capturing() -> bool:
    """A CUDA graph is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _holds(parts: Parts, dim: int) -> bool:
    """There is an operand for products that contract ``dim``."""
    return all(any(each is not None and each.serves(dim) for each in part) for part in parts.matrices)
