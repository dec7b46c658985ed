"""Products whose operands kernels prepare: recorded at the first call of equal shapes, replayed at the next ones.

Preparing is a pass over codes and scales (a transpose, padding, bf16 values), finishing one over the product (factors,
a bias); in between a library multiplies. Which kernels that takes, and how much memory, follows from shapes, strides
and formats; finding it again costs more than a small product, as it does for casts (``quantize/pipeline.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.ops import launch
from minifloat.ops.launch import Log, Prepared, recorded
from minifloat.ops.matmul.native import cut

MOST_SHAPES = 256
"""Recordings that a product keeps: a program whose token counts never repeat must not fill the memory."""


_UNKNOWN = object()


class Steps(NamedTuple):
    """A product in three steps; the first and the last launch kernels, or do nothing to tensors.

    Args:
        prepare: (a, b, direct) -> the tensors that the library reads, and what ``finish`` needs of the operands.
        multiply: (those tensors, dtype) -> the library's product. One that ``adds`` takes memory as well, and returns
            that if it added the product to it.
        direct: (bias, dtype) -> whether the library's product in that dtype is the result already.
        finish: (fp32 product, what ``prepare`` left, bias, dtype) -> the result, where it is not.
        repair: (library's product, what ``prepare`` left) -> nothing; launches kernels that write parts of the product.
        whole: (a, b, bias, dtype) -> the result where it is not direct and another way than these steps is faster, else
            None; so much work that finding its launches anew costs nothing.
    """

    prepare: Callable[[Any, Any, bool], tuple[Sequence[Tensor], Any]]
    multiply: Callable[..., Tensor]
    direct: Callable[[Tensor | None, torch.dtype], bool]
    finish: Callable[[Tensor, Any, Tensor | None, torch.dtype], Tensor]
    repair: Callable[[Tensor, Any], None] | None = None
    whole: Callable[[Any, Any, Tensor | None, torch.dtype], Tensor | None] | None = None
    adds: bool = False


class RecordedProduct:
    """[m, n] = a b^T in three steps; see :class:`Steps`. Called as a backend of ``matmul.Product``."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.known: dict[Any, Any] = {}  # a _Recording, or None: cannot be replayed

    def __call__(
        self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
        out: Tensor | None = None, accumulate: bool = False,
    ) -> Tensor:  # fmt: skip
        direct = self.steps.direct(bias, out_dtype)
        into = (out,) if accumulate and direct and self.steps.adds else ()
        if not direct and self.steps.whole is not None:
            whole = self.steps.whole(a, b, bias, out_dtype)
            if whole is not None:
                return whole
        key: list[Any] = [out_dtype, a.outer, b.outer]
        pointers, arguments, bits = [], [], 0
        for x in (*a[:3], *b[:3], bias):
            if x is None:
                key.append(None)
                continue
            pointer = x.data_ptr()
            arguments.append(x)
            pointers.append(pointer)
            bits |= pointer if x.numel() > 1 else 0
            key += x.shape, x.stride(), x.dtype, x.get_device()
        device = a.codes.get_device()
        if bits & 15 or device != torch._C._cuda_getDevice():  # kernels would read copies
            return self._step_by_step(a, b, out_dtype, bias, direct, into)[-1]
        shapes = (device, *key)
        recording = self.known.get(shapes, _UNKNOWN)  # once: another thread may clear them
        if recording is _UNKNOWN:
            return self._record(shapes, a, b, out_dtype, bias, direct, into, arguments)
        if recording is None:
            return self._step_by_step(a, b, out_dtype, bias, direct, into)[-1]
        result: Tensor = recording.replay(self.steps, arguments, pointers, out_dtype, a.outer, b.outer, into)
        return result

    def _step_by_step(
        self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, direct: bool, into: tuple[Any, ...],
        log: Log | None = None,
    ) -> tuple[Sequence[Tensor], int, Tensor, Tensor]:  # fmt: skip
        """What the library reads, how many launches of ``log`` prepared it, its product, and the result."""
        operands, left = self.steps.prepare(a, b, direct)
        before = 0 if log is None else len(log.launches)
        product = self.steps.multiply(operands, out_dtype if direct else torch.float32, *into)
        if self.steps.repair is not None:
            self.steps.repair(product, left)
        result = cut(product, a.outer, b.outer)
        if not direct:
            result = self.steps.finish(result, left, bias, out_dtype)
        return operands, before, product, result

    def _record(
        self, key: Any, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, direct: bool,
        into: tuple[Any, ...], arguments: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        if len(self.known) >= MOST_SHAPES:
            self.known.clear()
        with recorded() as log:
            operands, before, product, result = self._step_by_step(a, b, out_dtype, bias, direct, into, log)
        self.known[key] = _Recording.of(log, before, arguments, operands, product, None if direct else result)
        return result


class _Recording(NamedTuple):
    """The launches of a call: places in a list of addresses in lieu of tensors.

    The list is that of the tensors of the call, of what ``made`` says, of the product, and of the result.

    Args:
        before, after: the launches of the first and of the last step.
        made: what is allocated.
        operands: what the library reads: a place in the list, and shape, stride and dtype.
        result: what the last step fills; None if there is none.
    """

    before: list[Prepared]
    after: list[Prepared]
    made: list[_Layout]
    operands: list[tuple[int, _Layout]]
    result: _Layout | None

    @classmethod
    def of(
        cls, log: Log, before: int, arguments: Sequence[Tensor], operands: Sequence[Tensor], product: Tensor,
        result: Tensor | None,
    ) -> _Recording | None:  # fmt: skip
        """None if it cannot be replayed, as where a step made a copy, or two tensors of this call are the same."""
        made = [each for each in log.made if each is not result]
        everything = [*arguments, *made, product, *(() if result is None else (result,))]
        slots = {tensor.data_ptr(): slot for slot, tensor in enumerate(everything)}
        places = [slots.get(operand.data_ptr(), -1) for operand in operands]
        if len(slots) < len(everything) or any(not 0 <= place < len(arguments) + len(made) for place in places):
            return None
        launches = [each.prepare(slots, Tensor.data_ptr) for each in log.launches]
        prepared = [each for each in launches if each is not None]
        if len(prepared) < len(launches):
            return None
        layouts = list(map(_layout, made))
        reads = list(zip(places, map(_layout, operands), strict=True))
        for place, layout in reads:  # allocated as it is read, if it has no gaps
            own = place - len(arguments)
            if own >= 0 and made[own].nbytes == _bytes(layout):
                layouts[own] = layout
        return cls(prepared[:before], prepared[before:], layouts, reads, None if result is None else _layout(result))

    def replay(
        self, steps: Steps, arguments: list[Tensor], pointers: list[int], out_dtype: torch.dtype, m: int, n: int,
        into: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        """Allocates, launches and multiplies."""
        empty = launch.empty_strided
        tensors = arguments
        for layout in self.made:
            tensors.append(made := empty(*layout))
            pointers.append(made.data_ptr())
        for each in self.before:
            each.run(pointers)
        operands = [_as(tensors[place], layout) for place, layout in self.operands]
        direct = self.result is None
        product = steps.multiply(operands, out_dtype if direct else torch.float32, *into)
        pointers.append(product.data_ptr())
        result = product if self.result is None else empty(*self.result)
        pointers.append(result.data_ptr())
        for each in self.after:
            each.run(pointers)
        return cut(result, m, n) if direct else result


_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, stride and dtype."""


def _layout(x: Tensor) -> _Layout:
    return tuple(x.shape), x.stride(), x.dtype


def _bytes(layout: _Layout) -> int:
    shape, _, dtype = layout
    return torch.Size(shape).numel() * dtype.itemsize


def _as(x: Tensor, layout: _Layout) -> Tensor:
    """``x`` with another layout, of the same memory."""
    shape, stride, dtype = layout
    x = x if x.dtype == dtype else x.view(dtype)
    return x if x.shape == shape and x.stride() == stride else x.as_strided(shape, stride)
