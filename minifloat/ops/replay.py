"""Records what a function allocates, launches and calls at its first call, and replays it at others of equal layouts.

Which kernel does what on how many programs follows from formats, shapes and strides alone. Finding it again costs more
than the GPU takes for a small layer, so that it is kept, with a place in a list of addresses for each tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.ops import launch, log
from minifloat.ops.launch import Prepared
from minifloat.ops.log import Call, Log, recorded

MOST_RECORDINGS = 256
"""Recordings that a function keeps: a program whose token counts never repeat must not fill the memory."""

MOST_ZEROS = 1024
"""Zeros of one fill."""

_UNKNOWN = object()

MOST_BYTES = 1 << 27
"""Memory of a pass that is replayed: a larger one frees in between what it needs no more, and the host has time."""

Results = Sequence[Tensor | None]


class Recorder:
    """Runs functions of tensors, each as at its first call of an equal key and equal layouts.

    Args:
        of_operation: a graph may call it that Inductor is about to capture, in whose memory nothing may be left.
        apart: no results share memory, which those of an operation must not.
        most_bytes: a function that reads or makes more is called each time; the list of its tensors is emptied then.
    """

    def __init__(self, of_operation: bool = False, apart: bool = False, most_bytes: float = inf) -> None:
        self.of_operation, self.apart, self.most_bytes = of_operation, apart, most_bytes
        self.known: dict[Any, Recording | None] = {}  # None: cannot be replayed

    def __call__(self, key: Any, tensors: Results, function: Callable[[], tuple[Results, Any]]) -> tuple[Results, Any]:
        """Returns the results of ``function()``, which is called if nothing is known: tensors, and what else follows.

        Args:
            key: what decides with the tensors' layouts what the function does.
            tensors: what it reads and writes, but for memory that it makes by ``launch``; the first is not None.
        """
        layouts, arguments, pointers, aligned = [key], [], [], True
        for x in tensors:
            if x is None:
                layouts.append(None)
                continue
            pointer = x.data_ptr()
            arguments.append(x)
            pointers.append(pointer)
            aligned = aligned and (not pointer & 15 or x.numel() == 1)
            layouts += x.shape, x.stride(), x.dtype, x.get_device()
        device = arguments[0].get_device()
        # Of other addresses kernels read copies; what is empty has none; a function inside of another is a part of it.
        here = device < 0 or device == torch._C._cuda_getDevice()
        if not aligned or not here or 0 in pointers or log.recording():
            return function()
        if len({*pointers}) < len(pointers):
            layouts.append(tuple(map(pointers.index, pointers)))  # which are one and the same is recorded, too
        known = tuple(layouts)
        recording = self.known.get(known, _UNKNOWN)  # once: another thread may clear them
        if isinstance(recording, Recording):
            return recording.replay(arguments, pointers, self.of_operation)
        if recording is _UNKNOWN and len(self.known) >= MOST_RECORDINGS:
            self.known.clear()
        if recording is _UNKNOWN and sum(each.nbytes for each in arguments) > self.most_bytes:
            recording = self.known[known] = None
        if recording is None:
            arguments.clear()  # what the function frees is free
            if isinstance(tensors, list):
                tensors.clear()
            return function()
        with recorded() as logged:
            results, rest = function()
        small = sum(each.nbytes for each in logged.made) <= self.most_bytes
        self.known[known] = Recording.of(logged, arguments, results, rest, self.apart) if small else None
        return results, rest


class Recording(NamedTuple):
    """Steps with places in a list in lieu of tensors: arguments, zeros, what is made, nothing, results of calls.

    Args:
        steps: launches and calls, in order.
        sizes, places: elements of each matrix of zeros, and bytes from the first one's to its own.
        room: elements of one fill for all that need no memory of their own.
        alone: which zeros do, as results that share no memory.
        shown: the rest of them are results.
        made: what is allocated.
        results: the place of each, and its layout where that is another than the tensor's there.
        rest: what the function returned beside them.
    """

    steps: list[Prepared | _Called]
    sizes: list[int]
    places: list[int]
    room: int
    alone: list[bool]
    shown: bool
    made: list[_Layout]
    results: list[tuple[int, _Layout | None]]
    rest: Any

    @classmethod
    def of(cls, log: Log, arguments: Sequence[Tensor], results: Results, rest: Any, apart: bool) -> Recording | None:
        """Makes one of a log; None if it cannot be replayed, as where a step reads a copy that nobody logged."""
        if any([step is None for step in log.steps]):
            return None
        everything = [*arguments, *log.zeros, *log.made]
        layouts = list(map(_layout, everything))
        slots = {each.data_ptr(): slot for slot, each in enumerate(everything)}
        slots[0] = nothing = len(everything)  # what is empty has no address
        first, last, sizes = len(arguments), nothing - len(log.made), [each.numel() for each in log.zeros]
        layouts[first:last] = [((size,), (1,), torch.float32) for size in sizes]
        calls = [step for step in log.steps if isinstance(step, Call)]
        _make_as_read(calls, slots, layouts, log.made, last)
        layouts += _NOTHING, *[_layout(step.result) for step in calls]
        steps: list[Prepared | _Called] = []
        for step in log.steps:
            prepared = _Called.of(step, slots, layouts) if isinstance(step, Call) else step.prepare(slots)
            if prepared is None:
                return None
            steps.append(prepared)
            if isinstance(step, Call):  # from here on its result is at that address, be it an argument's
                slots[step.result.data_ptr()] = nothing + sum(isinstance(each, _Called) for each in steps)
        kept: list[tuple[int, _Layout | None]] = []
        for result in results:
            slot = nothing if result is None else slots.get(result.data_ptr(), -1)
            if slot < 0:
                return None
            layout = layouts[slot] if result is None or slot == nothing else _layout(result)
            kept.append((slot, None if layout == layouts[slot] else layout))
        if not steps:
            return None
        of_results = {slot for slot, _ in kept}
        alone = [apart and first + i in of_results for i in range(len(sizes))]
        unit = 1 if max(sizes, default=1) == 1 else 4  # kernels read 16 bytes at a time of what is no single element
        rooms = [0 if own else size + -size % unit for size, own in zip(sizes, alone, strict=True)]
        *starts, room = accumulate(rooms, initial=0)
        shown = not apart and any(first <= slot < last for slot in of_results)
        made = layouts[last:nothing]
        return cls(steps, sizes, [4 * start for start in starts], room, alone, shown, made, kept, rest)

    def replay(self, tensors: list[Any], pointers: list[int], of_operation: bool) -> tuple[Results, Any]:
        """Allocates, launches and calls, and gives what the function would."""
        empty = launch.empty_strided
        if self.sizes:
            self._fill(tensors, pointers, tensors[0].device, of_operation)
        for layout in self.made:
            memory = empty(*layout)
            tensors.append(memory)
            pointers.append(memory.data_ptr())
        tensors.append(None)
        pointers.append(0)
        for step in self.steps:
            step.run(pointers, tensors)
        results = [tensors[slot] if layout is None else _as(tensors[slot], layout) for slot, layout in self.results]
        return results, self.rest

    def _fill(self, tensors: list[Any], pointers: list[int], device: torch.device, of_operation: bool) -> None:
        """Appends the zeros: addresses in one fill, and tensors of those that are results."""
        whole: Any = None
        taken = first = 0
        if self.room:
            # Inductor runs a graph that it is about to capture on a stream and in a pool of its own.
            alone = of_operation and not _zeros.of_graph and torch._C._cuda_getCurrentRawStream(device.index) != 0
            whole, taken = (_filled(self.room, device), 0) if alone else _zeros.take(self.room, device)
            first = whole.data_ptr() + 4 * taken
        pointers.extend([first + place for place in self.places])
        if self.shown:
            tensors.extend(self._parts(whole[taken : taken + self.room]))
            return
        for place, (size, own) in enumerate(zip(self.sizes, self.alone, strict=True), len(pointers) - len(self.sizes)):
            tensors.append(_filled(size, device) if own else whole)  # which must last until all is launched
            if own:
                pointers[place] = tensors[-1].data_ptr()

    def _parts(self, zeros: Tensor) -> Sequence[Tensor]:
        """Each matrix, with a version counter of its own: autograd need not know that they were filled together."""
        if self.room == len(self.sizes):
            return zeros.unsafe_split(1)
        parts = zeros.unsafe_split_with_sizes([size + -size % 4 for size in self.sizes])
        return [part[:size] for part, size in zip(parts, self.sizes, strict=True)]


class _Called(NamedTuple):
    """A call of PyTorch's, with places in a list and layouts in lieu of its tensors."""

    function: Callable[..., Tensor]
    reads: list[tuple[int, _Layout | None]]
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, step: Call, slots: dict[int, int], layouts: list[_Layout]) -> _Called | None:
        """Prepares a call; None if a tensor has no place."""
        reads: list[tuple[int, _Layout | None]] = []
        for tensor in step.tensors:
            slot, layout = slots.get(tensor.data_ptr(), -1), _layout(tensor)
            if slot < 0:
                return None
            reads.append((slot, None if layout == layouts[slot] else layout))
        return cls(step.function, reads, step.rest)

    def run(self, pointers: list[int], tensors: list[Any]) -> None:
        """Calls, and appends the result."""
        read = [tensors[slot] if layout is None else _as(tensors[slot], layout) for slot, layout in self.reads]
        result = self.function(read, *self.rest)
        tensors.append(result)
        pointers.append(result.data_ptr())


def _make_as_read(
    calls: list[Call], slots: dict[int, int], layouts: list[_Layout], made: list[Tensor], first: int
) -> None:
    """Gives memory that is made the one layout that PyTorch reads it in, if that has no gaps: replays view nothing."""
    read: dict[int, set[_Layout]] = {}
    for tensor in [tensor for each in calls for tensor in each.tensors]:
        read.setdefault(slots.get(tensor.data_ptr(), -1), set()).add(_layout(tensor))
    for slot, memory in enumerate(made, first):
        if len(read.get(slot, ())) == 1:
            (layout,) = read[slot]
            if torch.Size(layout[0]).numel() * layout[2].itemsize == memory.nbytes:
                layouts[slot] = layout


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype."""

_NOTHING: _Layout = (), (), torch.uint8


def _layout(x: Tensor) -> _Layout:
    return tuple(x.shape), x.stride(), x.dtype


def _as(x: Tensor, layout: _Layout) -> Tensor:
    """``x`` with another layout, of the same memory."""
    shape, stride, dtype = layout
    x = x if x.dtype == dtype else x.view(dtype)
    return x if x.shape == shape and x.stride() == stride else x.as_strided(shape, stride)


# ---- zeros ----


def _filled(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)


class _Zeros(threading.local):
    """Zeros that kernels raise to amaxes, of this thread: one fill serves the calls of many layers."""

    def __init__(self) -> None:
        self.filled: dict[tuple[int, int], tuple[Tensor, int]] = {}  # by device and stream, and how many are taken
        self.of_graph = False

    def take(self, count: int, device: torch.device) -> tuple[Tensor, int]:
        """fp32 zeros, and where in them, at a multiple of 16 bytes, the next ``count`` are nobody else's."""
        if torch.cuda.is_current_stream_capturing() != self.of_graph or count > MOST_ZEROS:
            return _filled(count, device), 0  # replays of a graph fill again
        key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
        whole, taken = self.filled.get(key, (None, MOST_ZEROS))
        if whole is None or taken + count > MOST_ZEROS:
            with torch.inference_mode(False):  # autograd may save some of them
                whole, taken = _filled(MOST_ZEROS, device), 0
        self.filled[key] = whole, taken + count + -count % 4
        return whole, taken


_zeros = _Zeros()


@contextmanager
def zeros_of_graph() -> Iterator[None]:
    """Inside, this thread captures one CUDA graph, which has fills of its own: each serves many calls, in any replay.

    Without it each captured call fills zeros of its own: nothing tells one graph from the next.
    """
    outside = _zeros.filled, _zeros.of_graph
    _zeros.filled, _zeros.of_graph = {}, True
    try:
        yield
    finally:
        _zeros.filled, _zeros.of_graph = outside
