"""Launches Triton kernels: past the JIT's binder, and counted.

Triton's own ``kernel[grid](...)`` looks at every argument anew, which costs more host time than a small kernel takes.
Here the place of an argument says what it is (tensors, then integers, then compile-time constants), so that finding the
compiled kernel is one look-up. No integer is compiled in: another number of tokens is not another kernel.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import call, itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon

from minifloat.ops import log

Tensors = Sequence[Tensor | tuple[Tensor, ...]]
Integers = Sequence[int | tuple[int, ...]]

MOST_COMPILED = 1024
"""Handles that a kernel keeps: formats whose numbers change at each step are constants of it, each compiled."""

MOST_BY_VALUE = 8
"""Matrices whose arguments are arguments of the launch; those of more are in a table on the device."""

_counters: list[Counter[str]] = []


# How a compiled kernel is called is private to Triton; with versions that were not tried, the JIT does it.
KNOWN = triton.__version__.startswith("3.6.")
# Past PyTorch's dispatcher, as compiled graphs allocate; on the current device.
empty_strided: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", partial(torch.empty_strided, device="cuda")
)
# Stands for every integer when a kernel is compiled: neither 1 nor a multiple of 16, which Triton would compile in.
_NEUTRAL = 7


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Counts the Triton kernels that are launched inside, by name: how a test knows that a kernel ran.

    A captured CUDA graph runs without Python and is counted once, at its capture.
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [each for each in _counters if each is not counter]


def count(name: str) -> None:
    """Counts a launch for :func:`count_launches`."""
    for counter in _counters:
        counter[name] += 1


def ready(x: Tensor) -> Tensor:
    """``x``, or a copy, contiguous and at a multiple of 16 bytes: kernels read as much at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def most_matrices(device: int) -> int:
    """Matrices that one launch takes: any number, but while a CUDA graph is captured.

    Its replays would read the table again from host memory, which is freed.
    """
    capturing = device >= 0 and torch.cuda.is_current_stream_capturing()
    return MOST_BY_VALUE if capturing else sys.maxsize


def in_table(tensors: Tensors, integers: Integers) -> tuple[Tensors, Integers]:
    """The arguments of a launch on many matrices by way of a table on the device.

    A tuple of tensors becomes the first of them and how many elements after it the others begin, int64; a tuple of
    integers becomes as many in the table. Kernels find theirs with ``device.matrix_of`` and ``device.pick``.
    """
    pointers = [tuple([each.data_ptr() for each in t]) for t in tensors if isinstance(t, tuple)]
    sizes = [t[0].element_size() for t in tensors if isinstance(t, tuple)]
    first = tensors[0]
    assert isinstance(first, tuple) and all(isinstance(each, tuple) for each in integers)
    rows = iter(_table(pointers, sizes, integers, first[0].device))
    by_table = [(t[0], next(rows)) if isinstance(t, tuple) else t for t in tensors]
    return [*by_table, *[(row,) for row in rows]], ()


def _table(
    pointers: Sequence[tuple[int, ...]], sizes: Sequence[int], integers: Integers, device: torch.device
) -> Tensor:
    """int64 [tuples, matrices], rows beginning at multiples of 16 bytes; ``sizes`` of elements that are pointed at."""
    rows = [
        [(each - addresses[0]) // size for each in addresses] for addresses, size in zip(pointers, sizes, strict=True)
    ]
    rows += [list(each) for each in integers if isinstance(each, tuple)]
    rows = [row + [0] * (len(row) % 2) for row in rows]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


class Launch(NamedTuple):
    """One launch of a kernel; the arguments are those of :class:`Kernel`."""

    kernel: Kernel
    programs: int
    tensors: Tensors
    integers: Integers
    constants: tuple[Any, ...]
    warps: int

    def prepare(self, slots: Mapping[int, int]) -> Prepared | None:
        """The launch with places in a list in lieu of its tensors; ``slots`` gives them by address.

        None if a tensor has no place, or nothing can be prepared here.
        """
        places: list[Callable[[Sequence[int]], Any]] = []
        for tensor in self.tensors:
            several = tensor if isinstance(tensor, tuple) else (tensor,)
            found = [slots.get(each.data_ptr(), -1) for each in several]
            if min(found) < 0:
                return None
            alone = isinstance(tensor, tuple) and len(found) == 1
            places.append(itemgetter(slice(found[0], found[0] + 1)) if alone else itemgetter(*found))
        tensors, integers, sizes = self.tensors, self.integers, None
        if self.kernel.by_table(tensors):
            sizes = tuple([t[0].element_size() if isinstance(t, tuple) else 0 for t in tensors])
            tensors, integers = in_table(tensors, integers)
        compiled = self.kernel.compiled(tensors, integers, self.constants, self.warps)
        if compiled is None:
            return None
        first = tensors[0]
        device = (first[0] if isinstance(first, tuple) else first).get_device()
        rest = (*self.integers, *self.constants)
        name, programs, numbers = self.kernel.name, self.programs, tuple(self.integers)
        return Prepared(name, *compiled, programs, device, tuple(places), rest, sizes, numbers)


class Prepared(NamedTuple):
    """A launch that takes addresses.

    ``run``, ``function`` and ``head`` are of the compiled kernel; ``places`` take the argument for each tensor from a
    list of addresses; ``rest`` are the other arguments. Of many matrices ``sizes`` are the bytes of an element for each
    argument that is a tuple, and ``integers`` what else goes to the table.
    """

    name: str
    launch: Callable[..., None]
    function: int
    head: tuple[Any, ...]
    programs: int
    device: int
    places: tuple[Callable[[Sequence[int]], Any], ...]
    rest: tuple[Any, ...]
    sizes: tuple[int, ...] | None
    integers: tuple[Any, ...]

    def run(self, pointers: Sequence[int], _tensors: Any = None) -> None:
        """Launches on the current stream of the device, which must be the current one."""
        name, launch, function, head, programs, device, places, rest, sizes, _ = self
        if sizes is not None:
            self._run_on_many(pointers, sizes)
            return
        for counter in _counters:
            counter[name] += 1
        launch(
            programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), function, *head,
            *map(call, places, repeat(pointers)), *rest,
        )  # fmt: skip

    def _run_on_many(self, pointers: Sequence[int], sizes: Sequence[int]) -> None:
        """Launches by way of a table, see :func:`in_table`."""
        addresses = [place(pointers) for place in self.places]
        lists = [each for each, size in zip(addresses, sizes, strict=True) if size]
        on = torch.device("cuda", self.device) if self.device >= 0 else torch.device("cpu")
        table = _table(lists, [size for size in sizes if size], self.integers, on)
        begin, step = table.data_ptr(), table.stride(0) * table.element_size()
        rows = iter(range(begin, begin + step * table.shape[0], step))
        arguments = [(each[0], next(rows)) if size else each for each, size in zip(addresses, sizes, strict=True)]
        constants = self.rest[len(self.integers) :]
        for counter in _counters:
            counter[self.name] += 1
        self.launch(
            self.programs, 1, 1, torch._C._cuda_getCurrentRawStream(self.device), self.function, *self.head,
            *arguments, *[(row,) for row in rows], *constants,
        )  # fmt: skip


class _Compiled(NamedTuple):
    """A kernel for one choice of dtypes and constants, and how it is launched: ``head`` comes before its arguments."""

    launch: Callable[..., None]
    function: int
    head: tuple[Any, ...]

    @classmethod
    def of(cls, kernel: Any) -> _Compiled:
        """The launcher in C where it is all that a launch needs: with scratch memory Triton's own allocates that."""
        run, metadata = kernel.run, (kernel.packed_metadata, None, None, None)
        if hasattr(run, "launch") and not run.global_scratch_size and not run.profile_scratch_size:
            return cls(
                run.launch, kernel.function, (run.launch_cooperative_grid, run.launch_pdl, None, None, *metadata)
            )
        return cls(run, kernel.function, metadata)


class Kernel:
    """A Triton kernel whose parameters are tensors, then integers below 2^31, then ``tl.constexpr`` constants.

    A tensor or an integer may also be a tuple of them, for a kernel that works on several matrices at a time.

    Args:
        function: the ``triton.jit`` function.
        wide: it reads 16 bytes at a time, so that matrices (anything but single elements) must begin at such places.
        table: of more matrices than MOST_BY_VALUE it takes a table, see :func:`in_table`; else tuples of any length.
        layouts: its last constant is the layouts of a tile (``quantize/job.py``), for which Gluon compiles the same
            function, or None, for Triton.
    """

    def __init__(self, function: Any, *, wide: bool = True, table: bool = True, layouts: bool = False) -> None:
        self.function = function
        self.with_layouts = gluon.jit(function.fn) if layouts else None
        self.wide, self.table = wide, table
        self.name: str = function.__name__
        self.options = {"enable_fp_fusion": False}  # a * b + c is rounded twice: results are defined to the bit
        self._compiled: dict[Any, _Compiled] = {}

    def __call__(
        self, programs: int, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int = 4
    ) -> None:
        """Launches ``programs`` instances, on the current stream of the device of the tensors; none for 0."""
        if programs == 0:
            return
        for counter in _counters:
            counter[self.name] += 1
        if log.recording():
            log.append(Launch(self, programs, tensors, integers, constants, warps))
        if self.by_table(tensors):
            tensors, integers = in_table(tensors, integers)
        first = tensors[0]
        device = (first[0] if isinstance(first, tuple) else first).get_device()
        if device < 0:  # Triton's interpreter, in tests
            self._through_jit(programs, tensors, integers, constants, warps)
        elif device == torch.cuda.current_device():
            self._launch(device, programs, tensors, integers, constants, warps)
        else:
            with torch.cuda.device(device):
                self._launch(device, programs, tensors, integers, constants, warps)

    def by_table(self, tensors: Tensors) -> bool:
        """Whether a launch on these takes its arguments from a table."""
        first = tensors[0]
        return self.table and isinstance(first, tuple) and len(first) > MOST_BY_VALUE

    def _launch(
        self, device: int, programs: int, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int
    ) -> None:
        pointers, types, aligned = _look_at(tensors)
        assert aligned or not self.wide, f"{self.name} reads 16 bytes at a time: pass matrices through launch.ready()"
        if not KNOWN:
            self._through_jit(programs, tensors, integers, constants, warps)
            return
        key = device, warps, constants, *types  # a constant has one type in its place: True would find what 1 compiled
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= MOST_COMPILED:
                self._compiled.clear()
            compiled = self._compiled[key] = self._compile(tensors, integers, constants, warps)
        compiled.launch(
            programs, 1, 1, torch._C._cuda_getCurrentRawStream(device), compiled.function, *compiled.head,
            *pointers, *integers, *constants,
        )  # fmt: skip

    def compiled(
        self, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int
    ) -> _Compiled | None:
        """Kernel that such a launch has compiled; None where the JIT launches."""
        first = tensors[0]
        device = (first[0] if isinstance(first, tuple) else first).get_device()
        _, types, _ = _look_at(tensors)
        return self._compiled.get((device, warps, constants, *types))

    def _compile(self, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int) -> _Compiled:
        everyone = [each for t in tensors for each in (t if isinstance(t, tuple) else (t,))]
        devices = {each.device for each in everyone}
        if len(devices) > 1:
            raise ValueError(f"{self.name} was given tensors on {', '.join(map(str, devices))}; one device at a time")
        typical = [tuple(map(self._typical, t)) if isinstance(t, tuple) else self._typical(t) for t in tensors]
        neutral = [(_NEUTRAL,) * len(i) if isinstance(i, tuple) else _NEUTRAL for i in integers]
        kernel = self.function_for(constants).warmup(
            *typical, *neutral, *constants, grid=(1,), num_warps=warps, **self.options_for(constants)
        )
        return _Compiled.of(kernel)

    def _typical(self, tensor: Tensor) -> _Typical:
        return _Typical(tensor.dtype, 0 if self.wide and tensor.numel() != 1 else 4)

    def _through_jit(
        self, programs: int, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int
    ) -> None:
        options = self.options_for(constants)
        self.function_for(constants)[(programs,)](*tensors, *integers, *constants, num_warps=warps, **options)

    def function_for(self, constants: tuple[Any, ...]) -> Any:
        """Function that is compiled for these constants."""
        return self.function if self.with_layouts is None or constants[-1] is None else self.with_layouts

    def options_for(self, constants: tuple[Any, ...]) -> dict[str, Any]:
        """The compiler's options for them."""
        if self.function_for(constants) is self.function or constants[-1].registers is None:
            return self.options
        return {**self.options, "maxnreg": constants[-1].registers}


def _look_at(tensors: Tensors) -> tuple[list[int | tuple[int, ...]], list[Any], bool]:
    """Addresses, what of the tensors is compiled in, and whether all matrices begin at multiples of 16 bytes."""
    pointers: list[int | tuple[int, ...]] = []
    types: list[Any] = []
    bits = 0
    for tensor in tensors:
        if isinstance(tensor, tuple):
            several = []
            for each in tensor:
                pointer, scalar = each.data_ptr(), each.numel() == 1
                bits |= 0 if scalar else pointer
                several.append(pointer)
                types += each.dtype, scalar
            pointers.append(tuple(several))
        else:
            pointer, scalar = tensor.data_ptr(), tensor.numel() == 1
            bits |= 0 if scalar else pointer
            pointers.append(pointer)
            types += tensor.dtype, scalar
    return pointers, types, not bits & 15


class _Typical:
    """Stands for a tensor when a kernel is compiled: matrices are aligned, a scalar may be a slot of a buffer."""

    def __init__(self, dtype: torch.dtype, pointer: int) -> None:
        self.dtype = dtype
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer
