"""Amax and cast of the tensors of one call, recorded at the first call and replayed at the next ones of equal shapes.

Which kernel does what on how many programs follows from formats and shapes alone. Finding it again costs more than the
GPU takes for a small layer, so that what the first call launched is kept, with a place for each tensor that changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops import launch
from minifloat.ops.launch import Prepared, recorded
from minifloat.ops.quantize import gpu
from minifloat.ops.quantize.reference import Output, Request, Work, as_matrix, read_amaxes

MOST_SHAPES = 256
"""Recordings that a request keeps: a program whose token counts never repeat must not fill the memory."""


_UNKNOWN = object()

MOST_ZEROS = 1024
"""Of one fill."""


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


class Recorded(Work):
    """Does what is requested by kernels, as it did it at the first call of equal shapes.

    Args:
        separate: no outputs share memory, which those of an operation must not.
        returned: so are the amaxes that delayed scaling measures; else the operation reads them and forgets them.
        as_values: as of ``gpu.cast``.
    """

    def __init__(
        self, request: Request, separate: bool = False, as_values: Sequence[bool] = (), returned: bool = True
    ) -> None:
        super().__init__(request)
        self.separate, self.as_values, self.returned = separate, as_values, returned
        read = read_amaxes(request.formats, request.own_level)
        self.readers = [request.own_level.index(own) for own in read]  # of each the first cast that takes it
        self.known: dict[Any, Any] = {}  # a Recording, or None: cannot be replayed

    def __call__(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], noop: Tensor | None
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        # A replay reads addresses alone: what is no view as a matrix is copied before its address is taken.
        xs = [x if x.is_contiguous() else as_matrix(x) for x in xs]
        device = xs[0].get_device()
        key: list[Any] = [device]
        pointers: list[int] = []
        bits = 0
        for x in xs:
            pointer = x.data_ptr()
            pointers.append(pointer)
            bits |= pointer
            key += x.shape, x.dtype, x.is_contiguous()
        if len(xs) > launch.MOST_BY_VALUE:
            key.append(launch.most_matrices(device))
        others = [other for other in (*given, *rngs, noop) if other is not None]
        if others:
            key.append(tuple([other is None for other in (*given, *rngs, noop)]))
        seen: dict[int, int] = {}
        for other in others:
            pointer = other.data_ptr()
            pointers.append(pointer)
            bits |= pointer if other.numel() > 1 else 0
            key += other.shape, other.dtype, other.is_contiguous(), other.get_device()
            key.append(seen.setdefault(id(other), len(seen)))  # which are one and the same is recorded, too
        if bits & 15 or (device >= 0 and device != torch._C._cuda_getDevice()):  # kernels would read copies
            return self._step_by_step([as_matrix(x) for x in xs], given, rngs, noop)
        shapes = tuple(key)
        recording = self.known.get(shapes, _UNKNOWN)  # once: another thread may clear them
        if recording is _UNKNOWN:
            return self._record(shapes, xs, given, rngs, noop)
        if recording is None:
            return self._step_by_step([as_matrix(x) for x in xs], given, rngs, noop)
        result: tuple[Sequence[Output], Sequence[Tensor]] = recording.replay(pointers, given, xs[0].device)
        return result

    def _step_by_step(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], noop: Tensor | None
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        request = self.request
        amaxes: list[Tensor] = []
        if request.amax_of:
            amaxes = gpu.amax([xs[i] for i in request.amax_of], request.amax_formats, request.amax_dims)
        if not request.cast_of:
            return (), amaxes
        levels = [given[j] if own < 0 else amaxes[own] for j, own in enumerate(request.own_level)]
        sources = [xs[i] for i in request.cast_of]
        kinds = request.formats, request.dims, request.k_major
        made = gpu.cast(sources, levels, rngs, *kinds, noop, self.as_values)
        return list(zip(made[0::3], made[1::3], made[2::3], levels, strict=True)), amaxes

    def _record(
        self,
        key: tuple[Any, ...],
        xs: Sequence[Tensor],
        given: Sequence[Tensor | None],
        rngs: Sequence[Tensor | None],
        noop: Tensor | None,
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        if len(self.known) >= MOST_SHAPES:
            self.known.clear()
        # Objects of their own: which of the tensors are the same in this call must not matter to the next.
        xs = [as_matrix(x).detach() for x in xs]
        with recorded() as log:
            outputs, amaxes = self._step_by_step(xs, given, rngs, noop)
        self.known[key] = None
        plain = all(x.is_contiguous() and x.numel() for x in xs) and all(
            level is None or _plain(level, xs[0]) for level in given
        )
        if (
            plain
            and log.launches
            and all(gpu.casts(parse(spec)) for spec in (*self.request.formats, *self.request.amax_formats))
        ):
            arguments = [*xs, *[other for other in (*given, *rngs, noop) if other is not None]]
            self.known[key] = Recording.of(self, log.launches, arguments, outputs, amaxes)
        return outputs, amaxes


MOST_REQUESTS = 256
"""Of operations: recipes that change at each step must not fill the memory."""


@lru_cache(MOST_REQUESTS)
def _requested(of: tuple[int, ...], formats: tuple[str, ...], dims: tuple[int, ...], k_major: Any) -> Recorded:
    each = list(of), list(formats), list(dims)
    if k_major is None:
        return Recorded(Request(*each, [], [], [], [], []), True)
    return Recorded(Request([], [], [], *each, list(k_major), [-1] * len(of)), True)


def _distinct(xs: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Each tensor once, and which of them stands where in ``xs``."""
    places: dict[int, int] = {}
    of = tuple([places.setdefault(id(x), len(places)) for x in xs])
    return [xs[of.index(place)] for place in range(len(places))], of


def amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """As the operation."""
    distinct, of = _distinct(xs)
    return list(_requested(of, tuple(formats), tuple(dims), None)(distinct, (), (), None)[1])


def cast(
    xs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    rngs: Sequence[Tensor | None],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
    noop: Tensor | None,
) -> list[Tensor]:
    """As the operation."""
    distinct, of = _distinct(xs)
    return _flat(_requested(of, tuple(formats), tuple(dims), tuple(k_major))(distinct, given, rngs, noop)[0])


def amax_and_cast(*lists: Sequence[Any]) -> Callable[..., list[Tensor]]:
    """As the operation, prepared for its lists."""
    work = Recorded(Request(*map(list, lists)), True)
    nothing = [None] * len(work.request.cast_of)

    def run(xs: Sequence[Tensor], rngs: Sequence[Tensor | None]) -> list[Tensor]:
        outputs, _ = work(xs, nothing, rngs, None)
        read: list[Any] = [outputs[j][3] for j in work.readers]
        return [*read, *[part for output in outputs for part in output[:2]]]

    return run


def _flat(outputs: Sequence[Output]) -> list[Tensor]:
    flat: list[Tensor] = []
    for codes, scale_inv, measured, _ in outputs:
        nothing = codes.new_empty(0, dtype=torch.float32) if measured is None else measured
        flat += codes, scale_inv, nothing
    return flat


def _plain(level: Tensor, x: Tensor) -> bool:
    """Its address is all that a kernel needs."""
    return level.dtype == torch.float32 and level.is_contiguous() and level.device == x.device


class _Cast(NamedTuple):
    """What one cast allocates, and where its amaxes are among the zeros; -1 where none is shown.

    ``shares``: it takes the scale of the cast before it, of the same tensor in the other orientation.
    """

    codes: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    scales: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    shares: bool
    measured: int
    level: int


class Recording(NamedTuple):
    """The launches of a call, and what it allocates: places in a list of addresses in lieu of tensors.

    The list is that of the tensors of the call, of the zeros, of codes and scales of each cast, and 0.

    Args:
        zeros: elements of each amax that is raised; ``shown`` of them are the result.
        alone: which amaxes an operation returns, so that each has memory of its own.
        places: addresses of the others after the first one; ``room`` elements are needed for all.
        separate: as of :class:`Recorded`.
        views: amaxes are shown as parts of the fill.
    """

    launches: list[Prepared]
    casts: list[_Cast]
    zeros: list[int]
    alone: list[bool]
    places: list[int]
    room: int
    shown: int
    separate: bool
    views: bool

    @classmethod
    def of(
        cls,
        work: Recorded,
        launches: Sequence[launch.Launch],
        arguments: Sequence[Tensor],
        outputs: Sequence[Output],
        amaxes: Sequence[Tensor],
    ) -> Recording | None:
        """None if it cannot be replayed, as a launch that writes to memory which is no part of the result."""
        request, separate = work.request, work.separate
        formats = [parse(spec) for spec in request.formats]
        casts = []
        zeros = [*amaxes]
        for j, ((codes, scale_inv, measured, _), fmt) in enumerate(zip(outputs, formats, strict=True)):
            twins = j > 0 and request.cast_of[j] == request.cast_of[j - 1] and formats[j - 1] == fmt
            shares = twins and fmt.symmetric and not separate
            place = -1
            if measured is not None and measured.numel():
                place = len(zeros)
                zeros.append(measured)
            level = request.own_level[j] if fmt.scale_rule == "two_level" else -1
            scales = tuple(scale_inv.shape), scale_inv.stride(), scale_inv.dtype
            casts.append(_Cast((tuple(codes.shape), codes.stride(), codes.dtype), scales, shares, place, level))
        made = [part for output in outputs for part in output[:2]]
        nothing = [output[2] for output in outputs if output[2] is not None and not output[2].numel()]
        slots: dict[int, int] = {}  # of a tensor, by its identity, its place in the list of addresses
        for slot, tensor in enumerate((*arguments, *zeros, *made)):
            slots.setdefault(id(tensor), slot)
        for tensor in nothing:  # needs an address and has none
            slots.setdefault(id(tensor), len(arguments) + len(made) + len(zeros))
        prepared = [each for each in (one.prepare(slots) for one in launches) if each is not None]
        if len(prepared) < len(launches):
            return None
        shown = 0 if outputs else len(amaxes)
        shows = shown > 0 or any(each.measured >= 0 or each.level >= 0 for each in casts)
        sizes = [amax.numel() for amax in zeros]
        unit = 1 if max(sizes, default=1) == 1 else 4  # kernels read 16 bytes at a time of what is no single element
        part = {place for each in casts for place in (each.measured, each.level)}
        outputs_too = separate and work.returned
        alone = [outputs_too and (place < shown or place in part) for place in range(len(zeros))]
        rooms = [0 if own else size + -size % unit for size, own in zip(sizes, alone, strict=True)]
        *starts, room = accumulate(rooms, initial=0)
        return cls(
            prepared,
            casts,
            sizes,
            alone,
            [4 * start for start in starts],
            room,
            shown,
            separate,
            shows and not outputs_too,
        )

    def replay(
        self, pointers: list[int], given: Sequence[Tensor | None], device: torch.device
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        """Allocates, launches, and gives what was made."""
        empty = launch.empty_strided
        outputs: list[Output] = []
        zeros: Any = ()
        scale_inv: Any = None
        if self.room:
            # Held until the launches have been made. Inductor runs a graph that it is about to capture on a stream and
            # in a pool of its own, where nothing may be left: there an operation has a fill of its own, too.
            alone = self.separate and not _zeros.of_graph and torch._C._cuda_getCurrentRawStream(device.index) != 0
            whole, taken = (_filled(self.room, device), 0) if alone else _zeros.take(self.room, device)
            first = whole.data_ptr() + 4 * taken
            pointers.extend([first + place for place in self.places])
            if self.views:
                zeros = self._parts(whole[taken : taken + self.room])
        if any(self.alone):
            zeros = self._alone(pointers, device)
        for j, (layout, scales, shares, measured, level) in enumerate(self.casts):
            codes = empty(*layout)
            scale_inv = scale_inv if shares else empty(*scales)
            own = zeros[measured] if measured >= 0 else None
            outputs.append((codes, scale_inv, own, zeros[level] if level >= 0 else given[j]))
            pointers += codes.data_ptr(), scale_inv.data_ptr()
        pointers.append(0)
        for each in self.launches:
            each.run(pointers)
        return outputs, list(zeros[: self.shown])

    def _alone(self, pointers: list[int], device: torch.device) -> Sequence[Any]:
        """Zeros for each amax that is part of the result, whose addresses become those of ``pointers``."""
        if not self.room:
            pointers.extend(self.places)
        made = []
        for place, (size, own) in enumerate(zip(self.zeros, self.alone, strict=True), len(pointers) - len(self.zeros)):
            made.append(_filled(size, device) if own else None)
            if made[-1] is not None:
                pointers[place] = made[-1].data_ptr()
        return made

    def _parts(self, zeros: Tensor) -> Sequence[Tensor]:
        """Each amax, with a version counter of its own: autograd need not know that they were filled together."""
        if self.room == len(self.zeros):
            return zeros.unsafe_split(1)
        parts = zeros.unsafe_split_with_sizes([size + -size % 4 for size in self.zeros])
        return [part[:size] for part, size in zip(parts, self.zeros, strict=True)]
