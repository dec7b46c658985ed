"""The scaled product of two operands, as one ``torch.library`` operation, and a count of what ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import capability
from minifloat.formats import Format, parse
from minifloat.ops.library import directly, register
from minifloat.ops.matmul import emulated, native, reference


class Gemm(NamedTuple):
    """What a GEMM was: ``"fprop"``, ``"dgrad"`` or ``"wgrad"``, its operands' formats, and who ran it."""

    gemm: str
    a: str
    b: str
    backend: str


_counters: list[Counter[Gemm]] = []


@contextmanager
def count_gemms() -> Iterator[Counter[Gemm]]:
    """Counts the GEMMs executed inside, by kind, operand formats and backend.

    A captured CUDA graph runs without Python and is counted once, at its capture. A product that a layer leaves in
    high precision is counted where the layer calls it, which a compiled graph does not.
    """
    counter: Counter[Gemm] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [each for each in _counters if each is not counter]


def record(gemm: str, a: str, b: str, backend: str) -> None:
    """Counts one GEMM."""
    for counter in _counters:
        counter[Gemm(gemm, a, b, backend)] += 1


class _Matrix(NamedTuple):
    """An operand as the operation receives it; ``along`` is the dim that is contracted, ``outer`` the other's size."""

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor | None
    format: Format
    dim: int
    along: int
    outer: int


def _scaled_mm(
    gemm: str, a: Tensor, a_scale: Tensor, a_amax: Tensor | None, a_spec: str, a_dim: int, a_along: int, m: int,
    b: Tensor, b_scale: Tensor, b_amax: Tensor | None, b_spec: str, b_dim: int, b_along: int, n: int,
    out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool, backend: str,
) -> Tensor:  # fmt: skip
    left = _Matrix(a, a_scale, a_amax, parse(a_spec), a_dim, a_along, m)
    right = _Matrix(b, b_scale, b_amax, parse(b_spec), b_dim, b_along, n)
    chosen = backend or capability.backend(left.format, right.format, a.device)
    record(gemm, a_spec, b_spec, chosen)
    if a.numel() == 0 or b.numel() == 0:
        return _finish(a.new_zeros(m, n, dtype=torch.float32), bias, out_dtype)
    if chosen == "reference":
        return _finish(_reference(left, right), bias, out_dtype)
    if chosen == "emulated":
        return _emulated(left, right, out_dtype, bias)
    if left.format.block == 0:
        return _native_per_tensor(left, right, out_dtype, bias, fast_accum)
    return _native_block(left, right, out_dtype, bias)


def _finish(product: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Adds the bias in fp32 and rounds once."""
    return (product if bias is None else product + bias.to(out_dtype).float()).to(out_dtype).contiguous()


def _reference(a: _Matrix, b: _Matrix) -> Tensor:
    segment = min(a.format.segment, b.format.segment)
    left, right = reference.spread(*a, segment=segment), reference.spread(*b, segment=segment)
    split = (a.format.element == "e5m2", b.format.element == "e5m2")
    return reference.scaled_product(left, right, segment, split) * reference.tensor_factor(left, right)


def _emulated(a: _Matrix, b: _Matrix, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    if a.codes.is_cuda and capability.kernels(a.codes.get_device())[0]:
        from minifloat.ops.matmul import spread

        left, right = spread.spread(*a), spread.spread(*b)
        factors = left.factor, left.divisor, right.factor, right.divisor
        return spread.finish(emulated.product(left, right), *factors, bias, out_dtype)
    left, right = emulated.spread(*a), emulated.spread(*b)
    return _finish(emulated.product(left, right) * reference.tensor_factor(left, right), bias, out_dtype)


def _native_per_tensor(a: _Matrix, b: _Matrix, out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool) -> Tensor:
    align = (16, 16) if a.codes.is_cuda else (1, 1)
    left, right = (native.k_major(x.codes, x.format, x.along, align) for x in (a, b))
    # The epilogue adds a bias of the output's dtype to an output of 16 bits, so long as no padding widened it.
    fuses = bias is not None and out_dtype != torch.float32 and right.shape[0] == b.outer
    if bias is None or fuses:
        epilogue = None if bias is None else bias.to(out_dtype)
        product = native.per_tensor(left, a.scale_inv, right, b.scale_inv, out_dtype, epilogue, fast_accum)
        return _cut(product, a, b)
    product = native.per_tensor(left, a.scale_inv, right, b.scale_inv, torch.float32, None, fast_accum)
    return _finish(_cut(product, a, b), bias, out_dtype)


def _cut(product: Tensor, a: _Matrix, b: _Matrix) -> Tensor:
    """``product`` without the rows and columns of padding."""
    if product.shape == (a.outer, b.outer):
        return product.contiguous()
    return product[: a.outer, : b.outer].contiguous()


def _native_block(a: _Matrix, b: _Matrix, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    direct = bias is None and out_dtype != torch.float16  # else in fp32, to round once
    left, right = (
        (
            native.k_major(x.codes, x.format, x.along, (16, 128)),
            native.outer_major_scale(x.scale_inv, x.along),
            x.format.tile,
        )
        for x in (a, b)
    )
    product = _cut(native.block128(*left, *right, out_dtype if direct else torch.float32), a, b)
    return product if direct else _finish(product, bias, out_dtype)


def _fake_scaled_mm(
    gemm: str, a: Tensor, a_scale: Tensor, a_amax: Tensor | None, a_spec: str, a_dim: int, a_along: int, m: int,
    b: Tensor, b_scale: Tensor, b_amax: Tensor | None, b_spec: str, b_dim: int, b_along: int, n: int,
    out_dtype: torch.dtype, bias: Tensor | None, fast_accum: bool, backend: str,
) -> Tensor:  # fmt: skip
    return a.new_empty((m, n), dtype=out_dtype)


scaled_mm = register(
    "scaled_mm(str gemm, "
    "Tensor a, Tensor a_scale, Tensor? a_amax, str a_format, int a_dim, int a_along, SymInt m, "
    "Tensor b, Tensor b_scale, Tensor? b_amax, str b_format, int b_dim, int b_along, SymInt n, "
    "ScalarType out_dtype, Tensor? bias, bool fast_accum, str backend) -> Tensor",
    _scaled_mm,
    _fake_scaled_mm,
)
"""[m, n] = a b^T with both operands contracted along ``*_along``; ``backend`` "" lets the capability table choose."""


def multiply(gemm: str, a: Tensor, *rest: Any) -> Tensor:
    """:data:`scaled_mm`, past the dispatcher where nobody listens to it."""
    if directly(a):
        with torch._C._DisableAutocast():
            return _scaled_mm(gemm, a, *rest)
    return scaled_mm(gemm, a, *rest)
