"""Launches Triton kernels: past the JIT's binder, and counted.

Triton's own ``kernel[grid](...)`` looks at every argument anew, which costs more host time than a small kernel takes.
Here the place of an argument says what it is (tensors, then integers, then compile-time constants), so that finding the
compiled kernel is one look-up. No integer is compiled in: another number of tokens is not another kernel.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon

from minifloat.ops import tape

Tensors = Sequence[Tensor | tuple[Tensor, ...]]
Integers = Sequence[int | tuple[int, ...]]

MOST_COMPILED = 1024
"""Handles that a kernel keeps: formats whose numbers change at each step are constants of it, each compiled."""

MOST_BY_VALUE = 8
"""Matrices whose arguments are arguments of the launch; those of more are in a table on the device."""

counters: list[Counter[str]] = []


# How a compiled kernel is called is private to Triton; with versions that were not tried, the JIT does it.
KNOWN = triton.__version__.startswith("3.6.")
# Stands for every integer when a kernel is compiled: neither 1 nor a multiple of 16, which Triton would compile in.
_NEUTRAL = 7


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Counts the Triton kernels that are launched inside, by name: how a test knows that a kernel ran.

    A captured CUDA graph runs without Python and is counted once, at its capture.
    """
    counter: Counter[str] = Counter()
    counters.append(counter)
    try:
        yield counter
    finally:
        counters[:] = [each for each in counters if each is not counter]


def count(*names: str) -> None:
    """Counts launches for :func:`count_launches`."""
    for counter in counters:
        counter.update(names)


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


class _ByTable(NamedTuple):
    """A launcher that takes addresses, tuples of which go to the kernel by way of a table, see :func:`in_table`.

    ``sizes``: bytes of an element for each argument that is a tuple, else 0; ``integers``: what else is in the table.
    """

    compiled: _Compiled
    sizes: tuple[int, ...]
    integers: Integers
    device: torch.device

    def __call__(self, programs: int, y: int, z: int, stream: int, *rest: Any) -> None:
        addresses, constants = rest[: len(self.sizes)], rest[len(self.sizes) :]
        lists = [each for each, size in zip(addresses, self.sizes, strict=True) if size]
        table = _table(lists, [size for size in self.sizes if size], self.integers, self.device)
        begin, step = table.data_ptr(), table.stride(0) * table.element_size()
        rows = iter(range(begin, begin + step * table.shape[0], step))
        arguments = [(each[0], next(rows)) if size else each for each, size in zip(addresses, self.sizes, strict=True)]
        launch, function, head = self.compiled
        launch(programs, y, z, stream, function, *head, *arguments, *[(row,) for row in rows], *constants)


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
        for counter in counters:
            counter[self.name] += 1
        taped = tape.current()
        if taped is None:
            self._run(programs, tensors, integers, constants, warps)
            return
        with taped.hidden():
            self._run(programs, tensors, integers, constants, warps)
            prepared = self._prepared(tensors, integers, constants, warps)
        if prepared is None:
            taped.refuse(f"{self.name} is launched by Triton's JIT")
        launcher, head, rest = prepared or (None, (), ())
        language = "Triton" if self.function_for(constants) is self.function else "Gluon"
        taped.launched(self.name, launcher, head, programs, [*tensors, *rest], language)

    def _run(self, programs: int, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int) -> None:
        if self.by_table(tensors):
            tensors, integers = in_table(tensors, integers)
        device = _device_of(tensors).index
        if device is None:  # Triton's interpreter, in tests
            self._through_jit(programs, tensors, integers, constants, warps)
        elif device == torch.cuda.current_device():
            self._launch(device, programs, tensors, integers, constants, warps)
        else:
            with torch.cuda.device(device):
                self._launch(device, programs, tensors, integers, constants, warps)

    def _prepared(
        self, tensors: Tensors, integers: Integers, constants: tuple[Any, ...], warps: int
    ) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]] | None:
        """A launcher of addresses, and its arguments before and after those; None where the JIT launches."""
        by_table = self.by_table(tensors)
        compiled = self.compiled(*(in_table(tensors, integers) if by_table else (tensors, integers)), constants, warps)
        if compiled is None:
            return None
        if not by_table:
            return compiled[0], (compiled[1], *compiled[2]), (*integers, *constants)
        sizes = tuple([t[0].element_size() if isinstance(t, tuple) else 0 for t in tensors])
        return _ByTable(compiled, sizes, tuple(integers), _device_of(tensors)), (), constants

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
        _, types, _ = _look_at(tensors)
        return self._compiled.get((_device_of(tensors).index, warps, constants, *types))

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


def by_jit(kernel: Any, programs: int, device: torch.device, *args: Any, **options: Any) -> None:
    """Launches a Gluon kernel, whose arguments may be TMA descriptors, by Triton's JIT; replays go past it."""
    count(kernel.__name__)
    taped = tape.current()
    with torch.cuda.device(device):
        if taped is None:
            kernel[(programs,)](*args, **options)
            return
        with taped.hidden():
            compiled = kernel[(programs,)](*args, **options)
    head = compiled.function, compiled.packed_metadata, None, None, None
    taped.launched(kernel.__name__, compiled.run, head, programs, args, "Gluon")


def _device_of(tensors: Tensors) -> torch.device:
    first = tensors[0]
    return (first[0] if isinstance(first, tuple) else first).device


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
