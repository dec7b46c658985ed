"""Tapes what a function does at its first call, and writes a straight-line function that does it to other tensors.

Which kernel does what on how many programs follows from formats, shapes and strides alone. Finding it again costs more
than the GPU takes for a small layer. A dispatch mode sees what PyTorch allocates and computes, and kernels tell what
they launch, so that nothing else is written to be taped. What no step reads is left out, zeros are parts of one fill,
and memory is freed after its last reader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, reduce
from math import isfinite
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

MOST_TAPES = 256
"""Tapes that a function keeps: a program whose token counts never repeat must not fill the memory."""

MOST_ZEROS = 1024
"""Zeros of one fill."""

Results = Sequence[Tensor | None]
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype."""

_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
}  # fmt: skip
_ZEROS = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default}
_REFUSED = {
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.equal.default,
    _aten.record_stream.default,
}
# Bindings of their own cost less than calls of the operations.
_BOUND = {_aten._scaled_mm.default: torch._scaled_mm, _aten._scaled_mm_v2.default: torch._scaled_mm_v2}
_PLAIN = (Tensor, torch.nn.Parameter)
_NOTHING = -1

# Past PyTorch's dispatcher, as compiled graphs allocate; on the current device.
empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", partial(torch.empty_strided, device="cuda")
)
_guards: Any = torch._C._dynamo.guards
_reinterpreted: Callable[..., Tensor] = _guards._reinterpret_tensor
_modes, _autocast, _address = torch._C._len_torch_dispatch_stack, torch._C._is_any_autocast_enabled, Tensor.data_ptr


class _Taping(threading.local):
    """The tape that this thread writes, and its dispatch modes for that. Autograd has a thread for each device."""

    def __init__(self) -> None:
        self.tape: Tape | None = None
        self.modes = 0


taping = _Taping()
"""A test, a profiler or a fake tensor is to see operations where there are more modes than ``taping.modes``."""
watching: list[Any] = []
"""Counters of products: passes run as they are where there is one."""


def current() -> Tape | None:
    """The tape that this thread writes, but inside of what is a step as a whole."""
    tape = taping.tape
    return None if tape is None or tape.hiding else tape


def refuse(why: str) -> None:
    """Lets what is taped now, if anything is, be called each time."""
    tape = current()
    if tape is not None:
        tape.refuse(why)


def opaque(function: Callable[..., Tensor], tensors: Sequence[Tensor], *rest: Any) -> Tensor:
    """Calls ``function(tensors, *rest)``, which a tape calls again: a library that PyTorch does not see does the work.

    It reads and writes no other tensors, and may return one of them.
    """
    tape = current()
    if tape is None:
        return function(tensors, *rest)
    with tape.hidden():
        result = function(tensors, *rest)
    tape.called(function, (tensors, *rest), {}, [result], True)
    return result


# ---- what is taped ----


class Place(NamedTuple):
    """A tensor as a step reads it: bytes from the beginning of a slot's memory, and its layout."""

    slot: int
    offset: int
    layout: Layout


class Described(NamedTuple):
    """A TMA descriptor of what lies at a place; ``like``: its other attributes."""

    place: Place
    like: dict[str, Any]


class Step(NamedTuple):
    """An allocation, a call or a launch.

    Args:
        kind: ``"allocate"``, ``"zeros"``, ``"call"`` or ``"launch"``.
        made: slots of the memory that it makes.
        arguments: of a call, flat, or of a launch: places, tuples of them, descriptors, constants.
        function: what is called, or launches. ``tree``: how the arguments of a call are nested.
        head: of a launch what comes before the arguments and after the stream. ``name``, ``programs``: its kernel's.
        several: a call returns a sequence. ``kept``: it does more than to make its results.
    """

    kind: str
    made: tuple[int, ...] = ()
    arguments: Sequence[Any] = ()
    function: Any = None
    tree: TreeSpec | None = None
    head: tuple[Any, ...] = ()
    name: str = ""
    programs: int = 0
    several: bool = False
    kept: bool = False

    @property
    def places(self) -> list[Place]:
        """Places that it reads or writes; empty tensors have none."""
        leaves = tree_leaves([*self.arguments], is_leaf=lambda x: isinstance(x, Place))
        return [x for x in leaves if isinstance(x, Place) and x.slot != _NOTHING]

    @property
    def touched(self) -> list[int]:
        return [*[place.slot for place in self.places], *self.made]


class Tape(TorchDispatchMode):
    """Steps that a function of ``inputs`` takes.

    Attributes:
        memory: a tensor of each slot; the first are the inputs.
        refused: why it cannot be done again by these steps, if so.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory, self.steps, self.refused = list(inputs), list[Step](), ""
        self._given, self._slots, self.hiding = len(inputs), dict[int, int](), False
        self._alive: list[Any] = []  # no address is another tensor's before the end
        self._ends = [x.data_ptr() + _extent(x) for x in inputs]
        self._stream = self._current_stream()

    def refuse(self, why: str) -> None:
        """Says why these steps would not do the same."""
        self.refused = self.refused or why

    def recorded(self, replay: Any, function: Callable[[], tuple[Results, Any]]) -> tuple[Results, Any]:
        """Calls a function that a recorder inside was given; ``replay``: what that knows of it."""
        return function()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside, what PyTorch does is a part of a step that is told."""
        outer, self.hiding = self.hiding, True
        try:
            yield
        finally:
            self.hiding = outer

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.hiding:
            return function(*args, **kwargs)
        with self.hidden():
            result = function(*args, **kwargs)
        if function in _EMPTY or function in _ZEROS:
            if result.numel():
                self.steps.append(Step("zeros" if function in _ZEROS else "allocate", (self._slot(result),)))
            return result
        given, made = [[x for x in tree_leaves(of) if isinstance(x, Tensor)] for of in ((args, kwargs), result)]
        if function in _REFUSED or function.namespace not in ("aten", "minifloat"):
            self.refuse(f"{function} is no operation on memory alone")
        elif not {type(x) for x in (*given, *made)} <= {*_PLAIN}:
            self.refuse(f"{function} is called on no plain tensors")
        known = {x.untyped_storage()._cdata for x in given}
        fresh = [x for x in made if x.untyped_storage()._cdata not in known]
        writes = function._schema.is_mutable and any(x.numel() for x in given)
        random = torch.Tag.nondeterministic_seeded in function.tags
        if fresh or writes:  # else a view, of which places tell
            call, alone = _BOUND.get(function, function), isinstance(result, Tensor)
            self.called(call, args, kwargs, fresh, writes or random, alone)
        self._alive.append(result)
        return result

    def called(
        self, function: Any, args: Any, kwargs: Any, made: Sequence[Tensor], kept: bool, alone: bool = True
    ) -> None:
        """Notes a call that made the tensors ``made``."""
        flat, tree = tree_flatten((args, kwargs))
        arguments = [self._place(x) if isinstance(x, Tensor) else x for x in flat]
        if len({x.device for x in (*flat, *made, *self.memory[:1]) if isinstance(x, Tensor)}) > 1:
            self.refuse(f"{function} is called on several devices")
        self._here()
        slots = tuple([self._slot(x) for x in made])
        self.steps.append(Step("call", slots, arguments, function, tree, several=not alone, kept=kept))
        self._alive.append(flat)

    def launched(
        self, name: str, function: Any, head: tuple[Any, ...], programs: int, arguments: Sequence[Any],
        language: str = "Triton",
    ) -> None:  # fmt: skip
        """Notes ``function(programs, 1, 1, stream, *head, *arguments)``, where tensors are addresses."""
        self._here()
        places = [self._seen(x) for x in arguments]
        self.steps.append(Step("launch", (), places, function, None, head, name, programs, kept=True))
        self._alive.append(arguments)

    def _here(self) -> None:
        if self._current_stream() != self._stream:
            self.refuse("a part runs on another stream")

    def _current_stream(self) -> int:
        device = self.memory[0].get_device()
        return -1 if device < 0 else torch._C._cuda_getCurrentRawStream(device)

    def _seen(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return self._place(argument)
        if isinstance(argument, tuple) and argument and isinstance(argument[0], Tensor):
            return tuple(map(self._place, argument))
        if not hasattr(argument, "base"):
            return argument
        like = {name: getattr(argument, name) for name in _DESCRIBED if hasattr(argument, name)}
        return Described(self._place(argument.base), like)

    def _slot(self, x: Tensor) -> int:
        """Notes memory that was made, or that a call gave anew."""
        slot = self._slots[x.untyped_storage()._cdata] = len(self.memory)
        self.memory.append(x)
        self._ends.append(x.data_ptr() + _extent(x))
        return slot

    def _place(self, x: Tensor) -> Place:
        """Finds what ``x`` is a part of: what was made, else an input that begins there, else one that it lies in."""
        layout = layout_of(x)
        if not x.numel():
            return Place(_NOTHING, 0, layout)
        first = x.data_ptr()
        last = first + _extent(x)
        slot = self._slots.get(x.untyped_storage()._cdata)
        for slots in ([] if slot is None else [slot], range(self._given)):
            begins = [(i, self.memory[i].data_ptr()) for i in slots]
            within = [(first - at, i) for i, at in begins if at <= first and last <= self._ends[i]]
            exact = [i for offset, i in within if offset == 0]
            if exact or len(within) == 1:
                offset, i = (0, exact[0]) if exact else within[0]
                return Place(i, offset, layout)
        self.refuse(f"it reads {x.dtype} {tuple(x.shape)}, which it was not given")
        return Place(_NOTHING, 0, layout)

    # ---- the function ----

    def written(self, results: Results, rest: Any, of_operation: bool, apart: bool) -> Replay | None:
        """Writes the function; None where it is refused."""
        shown = [None if x is None or not x.numel() else self._place(x) for x in results]
        if self.refused or not self.steps:
            return None
        self._drop_unread(shown)
        self._allocate_as_read(shown)
        return _Writer(self, shown, apart).write(rest, of_operation)

    def _drop_unread(self, shown: Sequence[Place | None]) -> None:
        """Leaves out what nobody reads."""
        read = {place.slot for place in shown if place is not None}
        needed = []
        for step in reversed(self.steps):
            if step.kept or read & {*step.made}:
                read.update(place.slot for place in step.places)
                needed.append(step)
        self.steps = needed[::-1]

    def _allocate_as_read(self, shown: Sequence[Place | None]) -> None:
        """Gives memory the one layout that PyTorch reads it in, if that has no gaps: replays view nothing."""
        read: dict[int, set[tuple[int, Layout]]] = {}
        called = [place for step in self.steps if step.kind == "call" for place in step.places]
        for slot, offset, layout in [*called, *[place for place in shown if place is not None]]:
            read.setdefault(slot, set()).add((offset, layout))
        for step in self.steps:
            layouts = read.get(step.made[0], set()) if step.kind in ("allocate", "zeros") else set()
            if len(layouts) == 1:
                ((offset, (shape, stride, dtype)),) = layouts
                if not offset and torch.Size(shape).numel() * dtype.itemsize == self.memory[step.made[0]].nbytes:
                    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                    self.memory[step.made[0]] = like


def layout_of(x: Tensor) -> Layout:
    return tuple(x.shape), x.stride(), x.dtype


def _extent(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * (1 + sum([(size - 1) * stride for size, stride in sizes])) if x.numel() else 0


# ---- what is written ----

Replay = Callable[[list[Tensor], list[int]], tuple[Results, Any]]
"""Does it again, to tensors at these addresses; the list of tensors is emptied."""


class _Writer:
    """Writes the source of a function whose names are ``t3`` and ``p3`` of the tensor and the address of slot 3.

    Zeros that only kernels read, or that are shown where results may share memory, are parts of one fill.
    """

    def __init__(self, tape: Tape, shown: Sequence[Place | None], apart: bool) -> None:
        self.tape, self.shown = tape, shown
        self.space: dict[str, Any] = {"torch": torch, "view": _view, "empty": empty_strided}
        called = {slot for step in tape.steps if step.kind == "call" for slot in step.touched}
        self.kept = {place.slot for place in shown if place is not None}
        self.fill: dict[int, int] = {}  # bytes from the first zero to those of a slot
        self.size = 0
        for slot in [step.made[0] for step in tape.steps if step.kind == "zeros"]:
            memory, alone = tape.memory[slot], slot in called or (apart and slot in self.kept)
            if not alone and memory.dtype == torch.float32 and memory.is_contiguous():
                count = memory.numel()
                self.size += -self.size % 4 if count > 1 else 0  # kernels read 16 bytes at a time of what is no scalar
                self.fill[slot], self.size = 4 * self.size, self.size + count

    def write(self, rest: Any, of_operation: bool) -> Replay:
        tape, steps = self.tape, self.tape.steps
        first, inputs = tape.memory[0], range(tape._given)
        launches = [step for step in steps if step.kind == "launch"]
        pointed = {slot for step in launches for slot in step.touched}
        lines = [f"{''.join(f't{i}, ' for i in inputs)}= tensors", f"{''.join(f'p{i}, ' for i in inputs)}= pointers"]
        if self.fill:
            self.space["zeros"] = partial(_zeros.take, self.size, first.device, of_operation)
            lines += ["whole, begin = zeros()", "zero = whole.data_ptr() + begin"]
        lines.append("tensors.clear()")  # what the caller does not hold is freed after its last reader
        if launches:
            self.space["stream_of"] = torch._C._cuda_getCurrentRawStream
            lines.append(f"stream = stream_of({first.get_device()})")
        last = {slot: i for i, step in enumerate(steps) for slot in step.touched}
        for i, step in enumerate(steps):
            lines.append(self._line(step))
            lines += [f"p{slot} = t{slot}.data_ptr()" for slot in step.made if slot in pointed - self.fill.keys()]
            dead = dict.fromkeys(slot for slot in step.touched if last[slot] == i and slot not in self.kept)
            if freed := ", ".join(f"t{slot}" for slot in dead if slot not in self.fill):
                lines.append(f"del {freed}")
        if launches:
            from minifloat.ops import launch

            names = [step.name for step in launches]
            self.space |= {"counters": launch.counters, "count": partial(launch.count, *names)}
            lines.append("if counters: count()")
        self.space["rest"] = rest
        results = ", ".join("None" if place is None else self._tensor(place) for place in self.shown)
        lines.append(f"return [{results}], rest")
        source = "\n    ".join(["def replay(tensors, pointers):", *lines])
        exec(_compiled(source), self.space)
        replay: Any = self.space["replay"]
        replay.source = source
        return replay

    def _line(self, step: Step) -> str:
        if step.kind == "call":
            assert step.tree is not None
            words = [self._tensor(x, step.kept) if isinstance(x, Place) else self._constant(x) for x in step.arguments]
            args, kwargs = tree_unflatten(words, step.tree)
            text = ", ".join([*map(_text, args), *[f"{name}={_text(value)}" for name, value in kwargs.items()]])
            call = f"{self._constant(step.function)}({text})"
            names = ", ".join(f"t{slot}" for slot in step.made) + "," * step.several
            return f"{names} = {call}" if step.made else call
        if step.kind == "launch":
            head = [self._constant(x) for x in step.head]
            words = [*head, *map(self._address, step.arguments)]
            return f"{self._constant(step.function)}({step.programs}, 1, 1, stream, {', '.join(words)})  # {step.name}"
        (slot,) = step.made
        if slot in self.fill:
            return f"p{slot} = zero + {self.fill[slot]}"
        shape, stride, dtype = layout_of(self.tape.memory[slot])
        return f"t{slot} = empty({shape}, {stride}, {dtype})" + ".zero_()" * (step.kind == "zeros")

    def _tensor(self, place: Place, kept: bool = True) -> str:
        """Spells a tensor; one that is neither written to nor ``kept`` may be a view to autograd, in less time."""
        slot, offset, (shape, stride, dtype) = place
        if slot == _NOTHING:
            return f"empty({shape}, {stride}, {dtype})"
        if slot in self.fill:
            return f"view(whole, {shape}, {stride}, {dtype}, begin + {self.fill[slot] + offset})"
        same = not offset and place.layout == layout_of(self.tape.memory[slot])
        *known, held = layout_of(self.tape.memory[slot])
        if not kept and not same and not offset and known == [shape, stride] and held.itemsize == dtype.itemsize:
            return f"t{slot}.view({dtype})"
        return f"t{slot}" if same else f"view(t{slot}, {shape}, {stride}, {dtype}, {offset})"

    def _address(self, x: Any) -> str:
        if isinstance(x, Described):
            return f"{self._constant(partial(_Descriptor, x.like))}({self._address(x.place)})"
        if isinstance(x, Place):
            return "0" if x.slot == _NOTHING else f"p{x.slot}" + f" + {x.offset}" * (x.offset > 0)
        if isinstance(x, tuple) and x and isinstance(x[0], Place):
            return f"({''.join(f'{self._address(each)}, ' for each in x)})"
        return self._constant(x)

    def _constant(self, x: Any) -> str:
        if x is None or isinstance(x, (bool, int, torch.dtype)) or (isinstance(x, float) and isfinite(x)):
            return repr(x)
        self.space[name := f"c{len(self.space)}"] = x
        return name


def _text(words: Any) -> str:
    return f"[{', '.join(map(_text, words))}]" if isinstance(words, (list, tuple)) else words


@lru_cache(1024)
def _compiled(source: str) -> Any:
    """Layers that are alike have one code."""
    return compile(source, "<tape>", "exec")


def _view(memory: Tensor, shape: Any, stride: Any, dtype: torch.dtype, offset: int) -> Tensor:
    """A tensor of the memory from ``offset`` bytes on, no view to autograd, with a version counter of its own."""
    if memory.dtype != dtype:
        first = memory.storage_offset() * memory.element_size() + offset
        return torch.empty(0, dtype=dtype, device=memory.device).set_(
            memory.untyped_storage(), first // dtype.itemsize, shape, stride
        )
    return _reinterpreted(memory, shape, stride, offset // dtype.itemsize)


class _Descriptor:
    """A TMA descriptor at another address, for Triton's launcher."""

    def __init__(self, like: dict[str, Any], address: int) -> None:
        self.__dict__.update(like, base=self)
        self._address = address

    def data_ptr(self) -> int:
        return self._address


_DESCRIBED = ("shape", "strides", "block_shape", "layout", "padding", "round_f32_to_tf32")


class Recorder:
    """Runs functions of tensors, each as at its first call of an equal key and equal layouts.

    A function's results follow from the key and the tensors that it is given; it changes nothing in Python.

    Args:
        of_operation: a graph may call it that Inductor is about to capture, in whose memory nothing may be left.
        apart: no results share memory, which those of an operation must not.
    """

    def __init__(self, of_operation: bool = False, apart: bool = False) -> None:
        self.of_operation, self.apart = of_operation, apart
        self.known: dict[Any, Replay | str] = {}  # or why it is called each time
        self.latest: dict[Any, tuple[int, Any]] = {}  # of a key and a number: device and replay

    def again(self, key: Any, tensors: list[Any]) -> Any:
        """Returns what a call does if one look finds it to be the key's latest replay; else None, with nothing done."""
        latest = self.latest.get((key, len(tensors)))
        if latest is None or taping.tape is not None or watching or _modes() or _autocast():
            return None
        device, replay = latest
        if not replay.fits(*tensors) or (device >= 0 and device != torch._C._cuda_getDevice()):
            return None
        pointers = [*map(_address, tensors)]
        if reduce(or_, pointers) & 15 or 0 in pointers or len({*pointers}) < len(pointers):
            return None
        return replay(tensors, pointers)

    def __call__(
        self, key: Any, tensors: Results, function: Callable[[], tuple[Results, Any]], held: list[Any] | None = None
    ) -> tuple[Results, Any]:
        """Returns the results of ``function()``, which is called if nothing is known: tensors, and what else follows.

        Args:
            key: what decides with the tensors' layouts what the function does.
            tensors: what it reads and writes, but for memory that it makes; the first is not None. A list is emptied,
                so that what the function has read may be freed.
            held: a list of the same tensors, for ``function``; emptied where a replay takes its place.

        A replay gives None for what is empty.
        """
        layouts = [x if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
        arguments = [x for x in tensors if x is not None]
        pointers, device = [*map(_address, arguments)], arguments[0].get_device()
        if isinstance(tensors, list):
            tensors.clear()
        aligned = all([not at & 15 or x.numel() == 1 for at, x in zip(pointers, arguments, strict=True)])
        # Of other addresses kernels read copies; what is empty has none.
        fits = aligned and 0 not in pointers and (device < 0 or device == torch._C._cuda_getDevice())
        distinct = len({*pointers}) == len(pointers)
        known = (key, None if distinct else tuple(map(pointers.index, pointers)), *layouts)  # and which are the same
        replay: Any = self.known.get(known) if fits else ""  # once: another thread may clear them
        if type(replay) is str or taping.tape is not None:
            arguments.clear()
            outer = taping.tape if fits else None  # a function inside of another is a part of it
            return function() if outer is None else outer.recorded(replay, function)
        if replay is not None:
            if held is not None:
                held.clear()
            if distinct and len(arguments) == len(layouts):
                self.latest[key, len(arguments)] = device, replay
            return replay(arguments, pointers)
        if len(self.known) >= MOST_TAPES:
            self.known.clear()
            self.latest.clear()
        taping.tape, taping.modes = tape, _ = Tape(arguments), 1
        try:
            with tape:
                results, rest = function()
            replay = tape.written(results, rest, self.of_operation, self.apart)
            if replay is not None:
                sizes, strides = [[*x.shape] for x in arguments], [[*x.stride()] for x in arguments]
                guards = _guards.TensorGuards(*arguments, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
                replay.fits = guards.check
            self.known[known] = replay or tape.refused or "it does nothing"
        finally:
            taping.tape, taping.modes = None, 0
        return results, rest


# ---- zeros ----


def _filled(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float32, device=device)


class _Zeros(threading.local):
    """Zeros that kernels raise to amaxes, of this thread: one fill serves the calls of many layers."""

    def __init__(self) -> None:
        self.filled: dict[tuple[int, int], tuple[Tensor, int]] = {}  # by device and stream, and how many are taken
        self.of_graph = False

    def take(self, count: int, device: torch.device, of_operation: bool = False) -> tuple[Tensor, int]:
        """fp32 zeros, and from which byte on, a multiple of 16, the next ``count`` are nobody else's."""
        capturing, index = torch.cuda.is_current_stream_capturing(), device.index
        key = index, torch._C._cuda_getCurrentRawStream(index)
        # Replays of a graph fill again; Inductor runs what it is about to capture in a stream and a pool of its own.
        if capturing != self.of_graph or count > MOST_ZEROS or (of_operation and not capturing and key[1] != 0):
            return _filled(count, device), 0
        whole, taken = self.filled.get(key, (None, MOST_ZEROS))
        if whole is None or taken + count > MOST_ZEROS:
            with torch.inference_mode(False):  # autograd may save some of them
                whole, taken = _filled(MOST_ZEROS, device), 0
        self.filled[key] = whole, taken + count + -count % 4
        return whole, 4 * taken


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
