"""Queue of one group's gathers and reductions, ahead of and behind their use: the same calls in order on all ranks.

PyTorch's handles are the one place that crosses streams. A collective starts after what its stream has been given, and
``wait`` holds back what the stream is given next; meanwhile the handle keeps what is sent and received. So no buffer is
read too early or reused too soon, whatever is predicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from minifloat.arguments import label_of
from minifloat.comm.collectives import Pending
from minifloat.comm.group import Group
from minifloat.functional.etp.rows import Parts
from minifloat.operand import Quantized
from minifloat.recompute import capturing

if TYPE_CHECKING:
    from minifloat.functional.etp.weight import EtpWeight

_graph_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_MOST_SUCCESSORS = 64  # of one weight; contexts that never repeat must not fill the memory

Key = tuple[int, int, bool, bool]
"""A step without its source, which a table would keep alive."""


class Step(NamedTuple):
    """A gather: of what, for which dim, of values or of what they were cast to; does its caller want gradients?"""

    source: EtpWeight
    dim: int
    values: bool
    grad: bool

    @property
    def key(self) -> Key:
        return self.source.number, self.dim, self.values, self.grad


class Prefetched(NamedTuple):
    """A gather that was started because it is likely to be the next."""

    key: Key
    cast: int  # which of its source's
    nbytes: int
    pending: Pending[list[Quantized]]


class PrefetchQueue:
    """The gathers and reductions of one group.

    A pass is a forward and its backward, or several forwards and the first backward that ends after them; of an
    evaluation, which has none, it ends where a weight is used again. Weights may change between passes in a way that
    PyTorch does not see.

    The order of gathers is a prediction (what followed the two latest ones last time); a wrong one costs a gather.
    Nothing that was started outlives the backward in which it was not used, and no prediction crosses the end of a
    pass. A queue outlives models and keeps none of their weights. Nothing that it does depends on which of those are
    still in memory, which ranks need not agree on: what is cast or gathered for a weight, that weight keeps.

    Attributes:
        gathered, wasted: gathers so far, and those of them that were started and not used.
        in_graph: what a CUDA graph has still to cast, where one is being captured, or warmed up, that begins and ends
            with :meth:`drain`; else None.
        collected: likewise the gradients of parameters that the graph of a backward gives to autograd.
        cast: what was cast in this pass; ``recast_this_step``: before its layer was told that it may have changed.
        sums: what has been reduced so far of a weight that a backward may use several times, and who is given the sum.
    """

    def __init__(self) -> None:
        self.gathered = self.wasted = 0
        self.in_graph: dict[EtpWeight, None] | None = None
        self.collected: dict[Tensor, Tensor] | None = None
        self.cast: WeakSet[EtpWeight] = WeakSet()
        self.recast_this_step: WeakSet[EtpWeight] = WeakSet()
        self.sums: dict[EtpWeight, tuple[Callable[[Tensor], None], Tensor]] = {}
        self._prefetched: deque[Prefetched] = deque()
        self._before: Key | None = None
        self._latest: tuple[Key, ref[EtpWeight]] | None = None
        self._used: WeakKeyDictionary[EtpWeight, bool] = WeakKeyDictionary()  # in this pass; latest in grad mode?
        self._newest: ref[EtpWeight] | None = None  # of those
        self._reducing: deque[tuple[int, Callable[[], object]]] = deque()  # bytes sent, and what is done in its turn
        self._to_start: tuple[Callable[[], object], object] | None = None  # the last of them, which is not yet
        self._reduced: EtpWeight | None = None  # of which gradient that is, until the next gather
        self._sums = 0  # since then
        self._end_of_backward: ref[Callable[[], None]] | None = None  # which the engine calls, or drops if that raises

    # ---- passes ----

    def begin_use(self, source: EtpWeight) -> None:
        """Notes that a forward uses ``source``: in a new pass, if it was used in this one and no gradient follows."""
        if self._in_backward():
            return
        grad = torch.is_grad_enabled()
        if source in self._used and not (grad and self._used[source]):
            self._end_pass()
        newest = None if self._newest is None else self._newest()
        if source not in self._used:
            if newest is not None:
                newest.following = source
            self._newest = ref(source)
        self._used[source] = grad

    def _end_pass(self) -> None:
        self._end_prediction()
        for each in self.cast:
            each.end_pass()
        self.cast, self.recast_this_step = WeakSet(), WeakSet()
        if self._newest is not None and (newest := self._newest()) is not None:
            newest.following = None
        self._used, self._newest = WeakKeyDictionary(), None

    # ---- gathers ----

    def take(
        self, source: EtpWeight, dim: int, parts: Callable[[], Parts], cast: int, *, values: bool = False
    ) -> list[Quantized]:
        """Gathers ``parts``; starts what is likely to follow, to be gathered while the result is multiplied.

        Args:
            source: the weight.
            dim: that the product contracts.
            parts: gives this rank's rows, or what a backward saved of them.
            cast: the number of the cast that they are of. Not their memory, which hooks of autograd may have moved, and
                which a rank without rows has none of: all ranks must find the same.
            values: they are those that were cast, in high precision.
        """
        self._in_backward()
        step = Step(source, dim, values, torch.is_grad_enabled())
        if get_debug_level() == DebugLevel.DETAIL and not capturing():
            _check_same(step)
        pending = self._find(step.key, cast)
        if pending is None:
            pending = source.start(dim, parts())
        self._learn(step)
        self._look_ahead(step)
        self._next_reduction()
        return pending.wait()

    def _find(self, key: Key, cast: int) -> Pending[list[Quantized]] | None:
        """Finds what was started for this step; drops what was to be used before it."""
        if capturing() and self.in_graph is None:
            self._prefetched.clear()  # started outside of the graph, which cannot wait for it
        while self._prefetched:
            guess = self._prefetched.popleft()
            if guess.key[:3] == key[:3] and guess.cast == cast:
                return guess.pending
            self._drop(guess)
        return None

    def _drop(self, guess: Prefetched) -> None:
        self.wasted += 1
        guess.pending.wait()  # its memory is free for what follows in the stream

    def _learn(self, step: Step) -> None:
        latest = None
        if self._latest is not None:
            latest, source = self._latest[0], self._latest[1]()
            if source is not None:
                if len(source.successors) >= _MOST_SUCCESSORS:
                    source.successors.clear()
                source.successors[self._before, latest] = step
        self._before, self._latest = latest, (step.key, ref(step.source))

    def _look_ahead(self, latest: Step) -> None:
        if capturing() and self.in_graph is None:  # a graph must wait for what it starts
            return
        depth, most_bytes = latest.source.sharding.prefetch
        before, nbytes = self._before, 0
        for place in range(depth):
            step = latest.source.successors.get((before, latest.key))
            if step is None:
                return
            before, latest = latest.key, step
            if place < len(self._prefetched):
                nbytes += self._prefetched[place].nbytes
                if self._prefetched[place].key != step.key:
                    return
                continue
            parts = step.source.parts(step.dim, step.values)
            if parts is None or not parts.serve(step.dim):
                return
            own = 0 if most_bytes is None else step.source.nbytes(step.dim, parts)
            nbytes += own
            if place and most_bytes is not None and nbytes > most_bytes:
                return
            self._prefetched.append(Prefetched(step.key, step.source.casts, own, step.source.start(step.dim, parts)))

    # ---- reductions ----

    def make_room(self, nbytes: int) -> None:
        """Finishes reductions of fewer bytes before as many are allocated; dgrad had the time to hide those."""
        self._next_reduction()
        while self._reducing and 0 < self._reducing[0][0] < nbytes:
            self._reducing.popleft()[1]()

    def reduce(
        self, source: EtpWeight, start: Callable[[], Pending[Tensor]], finish: Callable[[Tensor], None], nbytes: int = 0
    ) -> None:
        """Calls ``start``, which sends ``nbytes``, after as many :meth:`sum_at_once` as followed the last time.

        These would queue behind it. Its result is given to ``finish`` when the next one has started, both at the latest
        at the end of backward.
        """
        self._next_reduction()
        self._reduced, self._sums = source, 0
        started: list[Pending[Tensor]] = []
        later = nbytes, lambda: finish(started.pop().wait())
        self._to_start = lambda: started.append(start()), later
        self._reducing.append(later)
        if source.sums_after == 0:
            self._start_reduction()
        if not self._in_backward():
            self._finish_all()

    def sum_at_once(self, run: Callable[[], Tensor]) -> Tensor:
        """Runs a short collective over the group, which the backward waits for, as of the gradient of a norm."""
        total = run()
        self._sums += 1
        if self._reduced is not None and self._sums >= self._reduced.sums_after:
            self._start_reduction()
        return total

    def _next_reduction(self) -> None:
        """Starts the one before at the latest here."""
        self._start_reduction()
        if self._reduced is not None:
            self._reduced.sums_after, self._reduced = self._sums, None

    def later(self, call: Callable[[], object]) -> None:
        """Calls it after what has been given so far has arrived; it makes nothing arrive sooner."""
        self._reducing.append((0, call))
        self._in_backward()

    def _start_reduction(self) -> None:
        given, self._to_start = self._to_start, None
        if given is not None:
            given[0]()
            while self._reducing[0] is not given[1]:
                self._reducing.popleft()[1]()

    def _finish_all(self) -> None:
        self._next_reduction()
        while self._reducing:
            self._reducing.popleft()[1]()

    # ---- the end of a pass ----

    def _in_backward(self) -> bool:
        """Whether a backward is running; the outermost one that the queue knows of ends the pass."""
        self._drop_failed()
        if self._end_of_backward is None and _graph_task() != -1:
            callback = partial(self._end)
            _queue_callback(callback)
            self._end_of_backward = ref(callback)
        return self._end_of_backward is not None

    def _drop_failed(self) -> None:
        if self._end_of_backward is not None and self._end_of_backward() is None:
            self.fail()

    def _end(self) -> None:
        self._finish_all()
        self._forget()

    def drain(self) -> None:
        """Ends what is in flight, and predicts no gather across: here a CUDA graph begins or ends.

        Collectives of a graph and of eager code are then never in flight together.
        """
        self._drop_failed()
        self._finish_all()
        self._end_prediction()

    def fail(self) -> None:
        """Drops what a backward that has raised would add to gradients."""
        self._to_start = self._reduced = None
        self._reducing.clear()  # unwaited: a rank that has raised earlier may never take part
        self._prefetched.clear()
        self._forget()

    def _forget(self) -> None:
        self._end_pass()
        self._end_of_backward = None
        self.sums.clear()  # of a backward that does not accumulate them, as torch.autograd.grad

    def _end_prediction(self) -> None:
        """Forgets what followed the latest gather, and predicts nothing after it."""
        while self._prefetched:
            self._drop(self._prefetched.popleft())
        if self._latest is not None and (source := self._latest[1]()) is not None:
            source.successors.pop((self._before, self._latest[0]), None)
        self._before = self._latest = None


def _check_same(step: Step) -> None:
    """Raises where ranks gather different weights, whose sizes may be the same; a collective."""
    group, own = step.source.sharding.group.process_group, (label_of(step.source.rows.layer), *step.key[:3])
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group)
    if len(set(found)) > 1:
        raise RuntimeError(
            f"{own[0]}: ranks of etp_group gather different weights, {found}; run the same layers on all"
        )


_queues: WeakKeyDictionary[dist.ProcessGroup, PrefetchQueue] = WeakKeyDictionary()


def queue_of(group: Group) -> PrefetchQueue:
    """Returns the one of a group, as long as that exists: whoever gathers over it does so in one order."""
    return _queues.setdefault(group.process_group, PrefetchQueue())
