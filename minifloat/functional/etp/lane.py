"""What one group gathers ahead of its use and reduces behind it: the same calls in the same order on all ranks.

PyTorch's handles are the one place that crosses streams. A collective starts after what its stream has been given, and
``wait`` holds back what the stream is given next; meanwhile the handle keeps what is sent and received. So no buffer is
read too early or reused too soon, whatever is predicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from minifloat.backward_pass import BackwardPass, running
from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group
from minifloat.operand import Quantized

_MOST_SUCCESSORS = 64  # of one weight; contexts that never repeat must not fill the memory


class Source(Protocol):
    """A weight, or those of all experts of a layer: what is gathered at once."""

    successors: dict[tuple[Step | None, Step], Step]

    def parts(self) -> Sequence[Quantized] | None:
        """This rank's rows as they were cast last; None if the parameters have changed since."""

    def start(self, dim: int, parts: Sequence[Quantized]) -> Pending[list[Quantized]]:
        """Gathers ``parts``, for products that contract ``dim``."""

    def nbytes(self, parts: Sequence[Quantized]) -> int:
        """How much memory the whole takes."""


class Step(NamedTuple):
    """A gather: of what, for which dim, and whether its caller records gradients."""

    source: Source
    dim: int
    grad: bool


class Ahead(NamedTuple):
    """A gather that was started because it is likely to be the next."""

    step: Step
    parts: Sequence[Quantized]
    pending: Pending[list[Quantized]]


class Lane:
    """The gathers and reductions of one group.

    The order of gathers is a prediction (what followed the two latest ones last time); a wrong one costs a gather.
    Nothing that was started outlives the backward in which it was not used, and no prediction crosses its end, where
    an optimizer may follow.

    Attributes:
        depth: how many gathers are started ahead; 0: none.
        most_bytes: of them; one is always started. None: no limit.
        gathered, wasted: gathers so far, and those of them that were started and not used.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.depth = 1
        self.most_bytes: int | None = None
        self.gathered = self.wasted = 0
        self._ahead: deque[Ahead] = deque()
        self._before: Step | None = None
        self._latest: Step | None = None
        self._used: dict[Source, None] = {}  # since the last backward ended, and before, in the order of first use
        self._used_before: dict[Source, None] = {}
        self._reducing: deque[tuple[Pending[Tensor], Callable[[Tensor], None]]] = deque()
        self._backward: BackwardPass | None = None

    def used(self) -> list[Source]:
        """What was gathered in the latest pass over the model: what is likely to be gathered in the next."""
        return list(self._used_before | self._used)

    # ---- gathers ----

    def take(self, source: Source, dim: int, parts: Sequence[Quantized], *, saved: bool = False) -> list[Quantized]:
        """The wholes of ``parts``; what is likely to follow is started, to be gathered while they are multiplied.

        ``saved``: a forward has saved the parts, which autograd has given back as other objects.
        """
        self._watch_backward()
        step = Step(source, dim, torch.is_grad_enabled())
        self._used[source] = None
        pending = self._find(step, parts, saved)
        if pending is None:
            pending = self._start(step, parts)
        self._learn(step)
        self._look_ahead()
        return pending.wait()

    def _find(self, step: Step, parts: Sequence[Quantized], saved: bool) -> Pending[list[Quantized]] | None:
        """What was started for this step; what was to be used before it is dropped."""
        while self._ahead:
            guess = self._ahead.popleft()
            alike = guess.step.source is step.source and guess.step.dim == step.dim
            if alike and (guess.parts is parts or (saved and _share_memory(guess.parts, parts, step.dim))):
                return guess.pending
            self._drop(guess)
        return None

    def _start(self, step: Step, parts: Sequence[Quantized]) -> Pending[list[Quantized]]:
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
            known[self._before, self._latest] = step
        self._before, self._latest = self._latest, step

    def _look_ahead(self) -> None:
        before, latest = self._before, self._latest
        nbytes = 0
        for place in range(self.depth):
            step = None if latest is None else latest.source.successors.get((before, latest))
            parts = None if step is None else step.source.parts()
            if step is None or parts is None or not _holds(parts, step.dim):
                return
            nbytes += step.source.nbytes(parts)
            if place and self.most_bytes is not None and nbytes > self.most_bytes:
                return
            if place == len(self._ahead):
                self._ahead.append(Ahead(step, parts, self._start(step, parts)))
            elif self._ahead[place].step != step:
                return
            before, latest = latest, step

    # ---- reductions ----

    def reduce(self, pending: Pending[Tensor], finish: Callable[[Tensor], None]) -> None:
        """Gives the result of ``pending`` to ``finish`` when the next one has started, or at the end of backward."""
        self._reducing.append((pending, finish))
        self._watch_backward()
        waiting = 0 if self._backward is None else 1
        while len(self._reducing) > waiting:
            self._finish_oldest()

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
            backward.on_failure.append(self._fail)
        self._backward = backward

    def _end(self, early: bool) -> None:
        while self._reducing:
            self._finish_oldest()
        self._forget()

    def _fail(self) -> None:
        """Nothing is added to gradients of a backward that has raised."""
        self._reducing.clear()  # unwaited: a rank that has raised earlier may never take part
        self._ahead.clear()
        self._forget()

    def _forget(self) -> None:
        while self._ahead:
            self._drop(self._ahead.popleft())
        self._before = self._latest = self._backward = None
        self._used_before, self._used = self._used, {}


_lanes: WeakValueDictionary[Group, Lane] = WeakValueDictionary()


def lane_of(group: Group) -> Lane:
    """The one of a group: whoever gathers over it does so in one order."""
    return _lanes.setdefault(group, Lane(group))


def _holds(parts: Sequence[Quantized], dim: int) -> bool:
    """There is an operand for products that contract ``dim``."""
    return all(any(each is not None and each.serves(dim) for each in part) for part in parts)


def _share_memory(some: Sequence[Quantized], others: Sequence[Quantized], dim: int) -> bool:
    """The operands for ``dim`` are the same."""
    pairs = zip(some, others, strict=True)
    return all(a.along(dim).codes.data_ptr() == b.along(dim).codes.data_ptr() for a, b in pairs)
