"""The scaled product of two operands: prepared once for each kind, one ``torch.library`` operation, a count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import backends
from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops import new, tape
from minifloat.ops.library import SymInt, operation
from minifloat.ops.matmul import emulated, native, reference
from minifloat.ops.matmul.native import cut
from minifloat.ops.matmul.reference import finish, scaled
from minifloat.ops.tape import watching

CONTRACTED = {"fprop": (ROWWISE, ROWWISE), "dgrad": (ROWWISE, COLUMNWISE), "wgrad": (COLUMNWISE, COLUMNWISE)}
"""The dims of the left and of the right operand that a GEMM contracts."""


class Gemm(NamedTuple):
    """Kind of a GEMM: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``, its operands' formats, and who ran it."""

    gemm: str
    a: str
    b: str
    backend: str


@contextmanager
def count_gemms() -> Iterator[Counter[Gemm]]:
    """Counts the GEMMs executed inside, by kind, operand formats and backend.

    A CUDA graph is counted once, at its capture. Products in high precision count in eager layers alone. Compiled
    graphs also omit products that are PyTorch's own: on a GPU, unpadded ones with one scale a tensor or a row.
    """
    counter: Counter[Gemm] = Counter()
    watching.append(counter)
    try:
        yield counter
    finally:
        watching[:] = [each for each in watching if each is not counter]


def record(gemm: str, a: str, b: str, backend: str) -> None:
    """Counts one GEMM."""
    for counter in watching:
        counter[Gemm(gemm, a, b, backend)] += 1


class _Matrix(NamedTuple):
    """An operand as it is multiplied; ``along`` is the dim that is contracted, ``outer`` the other's size."""

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor | None
    format: Format
    dim: int
    along: int
    outer: int


_Backend = Callable[..., Tensor]
"""``(a, b, out_dtype, bias, fast_accum, out, accumulate)``; most ignore the last two."""

MOST_PRODUCTS = 1024
"""Kinds of GEMMs that are kept: recipes that change at each step must not fill the memory."""


class Product:
    """One kind of GEMM, prepared: [m, n] = a b^T of operands of two formats, each contracted along one of its dims.

    Args:
        gemm: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``.
        a, b: ``Format.spec`` of the operands, the dim that each was cast along, and the dim that is contracted.
        backend: of the table of backends.
        kernels: our own run on the device.
        swizzled: the native product is ``native.swizzled``.
    """

    def __init__(
        self, gemm: str, a: tuple[str, int, int], b: tuple[str, int, int], backend: str, kernels: bool,
        swizzled: bool = False,
    ) -> None:  # fmt: skip
        self.gemm, self.a, self.b, self.backend = gemm, a, b, backend
        self._a, self._b = (parse(a[0]), *a[1:]), (parse(b[0]), *b[1:])
        self._backend: _Backend = _reference
        if backend == "emulated" or (backend == "native" and self._a[0].block):
            self._backend = stepped(backend, self._a[0], self._b[0], kernels, swizzled)
        elif backend == "native":
            rows = self._a[0].amax_per_row or self._b[0].amax_per_row
            self._backend = _native_rows if rows else _native_per_tensor

    def __call__(
        self, a: Tensor, a_scale: Tensor, a_amax: Tensor | None, m: int,
        b: Tensor, b_scale: Tensor, b_amax: Tensor | None, n: int,
        out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False,
        out: Tensor | None = None, accumulate: bool = False,
    ) -> Tensor:  # fmt: skip
        """[m, n] in ``out_dtype``; ``bias`` [n] is added in fp32. ``out``, ``accumulate``: as of :func:`written`.

        An operation where autograd or a dispatch mode are to see one, else :meth:`run`.
        """
        if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > tape.taping.modes:
            result = scaled_mm(
                self.gemm, a, a_scale, a_amax, *self.a, m, b, b_scale, b_amax, *self.b, n,
                out_dtype, bias, fast_accum, self.backend,
            )  # fmt: skip
            return written(result, out, accumulate)
        with torch._C._DisableAutocast():
            result = self.run(
                a, a_scale, a_amax, m, b, b_scale, b_amax, n, out_dtype, bias, fast_accum, out, accumulate
            )
            return result if out is None else written(result, out, accumulate)

    def run(
        self, a: Tensor, a_scale: Tensor, a_amax: Tensor | None, m: int,
        b: Tensor, b_scale: Tensor, b_amax: Tensor | None, n: int,
        out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False, out: Tensor | None = None,
        accumulate: bool = False, counted: bool = True,
    ) -> Tensor:  # fmt: skip
        """Multiplies past the dispatcher, where no graph, autocast or dispatch mode is active.

        ``out``: [m, n] of ``out_dtype``, returned where the backend wrote or added to it; most do neither. ``counted``:
        by :func:`count_gemms`, of which a part of another one is not.
        """
        if counted and watching:
            record(self.gemm, self.a[0], self.b[0], self.backend)
        if not a.numel() or not b.numel():
            return finish(a.new_zeros(m, n, dtype=torch.float32), bias, out_dtype)
        left, right = new(_Matrix, (a, a_scale, a_amax, *self._a, m)), new(_Matrix, (b, b_scale, b_amax, *self._b, n))
        return self._backend(left, right, out_dtype, bias, fast_accum, out, accumulate)


@lru_cache(MOST_PRODUCTS)
def product(
    gemm: str, a: str, a_dim: int, a_along: int, b: str, b_dim: int, b_along: int, device: torch.device,
    backend: str = "",
) -> Product:  # fmt: skip
    """The GEMM of such operands on a device; ``backend`` "" lets the table of backends choose."""
    formats = parse(a), parse(b)
    chosen = backend or backends.backend(*formats, device)
    kernels = device.type == "cuda" and backends.kernels(device.index or 0)[0]
    swizzled = chosen == "native" and backends.swizzled(*formats, device)[0]
    return Product(gemm, (a, a_dim, a_along), (b, b_dim, b_along), chosen, kernels, swizzled)


def written(result: Tensor, out: Tensor | None, accumulate: bool) -> Tensor:
    """``result``, or ``out``, to which it is added (``accumulate``) or copied, unless it is there already."""
    if out is None or result is out:
        return result
    return out.add_(result) if accumulate else out.copy_(result)


def _reference(
    a: _Matrix, b: _Matrix, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool, *_: Any
) -> Tensor:
    segment = min(a.format.segment, b.format.segment)
    left, right = reference.spread(*a, segment=segment), reference.spread(*b, segment=segment)
    split = a.format.encoding.split, b.format.encoding.split
    product = reference.scaled_product(left, right, segment, split) * reference.tensor_factor(left, right)
    return finish(product, bias, out_dtype)


def _native_per_tensor(
    a: _Matrix, b: _Matrix, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
    out: Tensor | None = None, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    align = (16, 16) if a.codes.is_cuda else (1, 1)
    left = native.k_major(a.codes, a.format, a.along, align)
    right = native.k_major(b.codes, b.format, b.along, align)
    if bias is None and left.shape[0] == a.outer and right.shape[0] == b.outer:
        return native.per_tensor(left, a.scale_inv, right, b.scale_inv, out_dtype, None, fast_accum, out, accumulate)
    # The epilogue adds a bias of the output's dtype to an output of 16 bits, so long as no padding widened it.
    fuses = bias is not None and out_dtype != torch.float32 and right.shape[0] == b.outer
    if bias is None or fuses:
        epilogue = None if bias is None else bias.to(out_dtype)
        product = native.per_tensor(left, a.scale_inv, right, b.scale_inv, out_dtype, epilogue, fast_accum)
        return product if product.shape == (a.outer, b.outer) else cut(product, a.outer, b.outer)
    product = native.per_tensor(left, a.scale_inv, right, b.scale_inv, torch.float32, None, fast_accum)
    return finish(cut(product, a.outer, b.outer), bias, out_dtype)


def _native_rows(
    a: _Matrix, b: _Matrix, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool, *_: Any
) -> Tensor:
    """One scale a row of ``a`` and of ``b``; on a GPU the library takes them where the output is bf16."""
    align = (16, 16) if a.codes.is_cuda else (1, 1)
    left = native.k_major(a.codes, a.format, a.along, align)
    right = native.k_major(b.codes, b.format, b.along, align)
    scales = a.scale_inv.reshape(-1, 1), b.scale_inv.reshape(1, -1)
    if not a.codes.is_cuda:
        return finish(native.per_tensor(left, scales[0], right, scales[1], torch.float32, None, False), bias, out_dtype)
    if out_dtype == torch.bfloat16 and (left.shape[0], right.shape[0]) == (a.outer, b.outer):
        epilogue = None if bias is None else bias.bfloat16()
        # With a bias and fast accumulation cuBLASLt has no kernel for some deep products of few tiles.
        fast = fast_accum and bias is None
        return native.per_tensor(left, scales[0], right, scales[1], out_dtype, epilogue, fast)
    one = torch.ones(1, dtype=torch.float32, device=left.device)
    product = native.per_tensor(left, one, right, one, torch.float32, None, fast_accum)
    product = cut(product, a.outer, b.outer)
    return finish(product * (scales[0] * scales[1]), bias, out_dtype)


class Steps(NamedTuple):
    """A product in three steps; the first and the last launch kernels, or do nothing to tensors.

    Args:
        prepare: (a, b, direct) -> the tensors that the library reads, and what ``finish`` needs of the operands.
        multiply: (those tensors, dtype) -> the library's product. One that ``adds`` takes memory as one more tensor,
            and returns that if it added the product to it.
        direct: (bias, dtype) -> whether the library's product in that dtype is the result already.
        finish: (fp32 product, what ``prepare`` left, bias, dtype) -> the result, where it is not.
        repair: (library's product, what ``prepare`` left) -> nothing; launches kernels that write parts of the product.
    """

    prepare: Callable[[Any, Any, bool], tuple[Sequence[Tensor], Any]]
    multiply: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    direct: Callable[[Tensor | None, torch.dtype], bool]
    finish: Callable[[Tensor, Any, Tensor | None, torch.dtype], Tensor]
    repair: Callable[[Tensor, Any], None] | None = None
    adds: bool = False


class SteppedProduct:
    """[m, n] = a b^T in three steps; see :class:`Steps`. ``recorded``: kernels of our own do the first and the last."""

    def __init__(self, steps: Steps, recorded: bool) -> None:
        self.steps, self.recorder = steps, tape.Recorder() if recorded else None

    def __call__(
        self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool,
        out: Tensor | None = None, accumulate: bool = False,
    ) -> Tensor:  # fmt: skip
        direct = self.steps.direct(bias, out_dtype)
        into = out if accumulate and direct and self.steps.adds else None
        if self.recorder is None:
            return self._step_by_step(a, b, out_dtype, bias, direct, into)
        results, _ = self.recorder(
            (out_dtype, a.outer, b.outer), (*a[:3], *b[:3], bias, into),
            lambda: ((self._step_by_step(a, b, out_dtype, bias, direct, into),), None),
        )  # fmt: skip
        assert results[0] is not None
        return results[0]

    def _step_by_step(
        self, a: Any, b: Any, out_dtype: torch.dtype, bias: Tensor | None, direct: bool, into: Tensor | None
    ) -> Tensor:
        operands, left = self.steps.prepare(a, b, direct)
        dtype = out_dtype if direct else torch.float32
        if into is None:
            product = self.steps.multiply(operands, dtype)
        else:
            product = tape.opaque(self.steps.multiply, [*operands, into], dtype)
        if self.steps.repair is not None:
            self.steps.repair(product, left)
        if product.shape != (a.outer, b.outer) or not product.is_contiguous():
            product = cut(product, a.outer, b.outer)
        return product if direct else self.steps.finish(product, left, bias, out_dtype)


def stepped(backend: str, a: Format, b: Format, kernels: bool, swizzled: bool = False) -> SteppedProduct:
    """The emulated product, or the native one of blocks, with ``kernels`` of our own before and after it or without."""
    writer: Any = emulated
    finishing: Any = scaled
    if kernels:
        from minifloat.ops.matmul import fold_kernels  # which needs Triton
        from minifloat.ops.matmul import kernels as written_by

        writer, finishing = written_by, written_by.finish
    if backend == "emulated":
        direct, prepare = partial(emulated.is_direct, a, b), partial(emulated.prepare, writer)
        steps = Steps(prepare, emulated.multiply, direct, finishing)
    elif swizzled:
        direct, multiply = partial(native.swizzled_is_direct, a, b), partial(native.swizzled, a, b)
        steps = Steps(native.swizzled_operands, multiply, direct, finishing)
    elif kernels and backends.is_mxfp4(b):
        steps = fold_kernels.STEPS
    else:
        tiles = partial(native.block128, a.tile, b.tile)
        steps = Steps(native.block128_operands, tiles, native.block128_is_direct, finishing, adds=True)
    return SteppedProduct(steps, kernels)


@operation()
def scaled_mm(
    gemm: str, a: Tensor, a_scale: Tensor, a_amax: Tensor | None, a_format: str, a_dim: int, a_along: int, m: SymInt,
    b: Tensor, b_scale: Tensor, b_amax: Tensor | None, b_format: str, b_dim: int, b_along: int, n: SymInt,
    out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool, backend: str,
) -> Tensor:  # fmt: skip
    """[m, n] = a b^T with both operands contracted along ``*_along``; ``backend`` "": the table of backends chooses."""
    prepared = product(gemm, a_format, a_dim, a_along, b_format, b_dim, b_along, a.device, backend)
    return prepared.run(a, a_scale, a_amax, m, b, b_scale, b_amax, n, out_dtype, bias, fast_accum)


@scaled_mm.fake
def _(gemm: str, a: Tensor, *rest: Any) -> Tensor:
    m, n, out_dtype = rest[5], rest[12], rest[13]
    return a.new_empty((m, n), dtype=out_dtype)
