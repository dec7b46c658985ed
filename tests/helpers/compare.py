"""Comparisons of tensors: the same bytes, or within a bound before the last rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.operand import Operand, Quantized

U = 2.0**-24
"""Half an ulp of 1 in fp32: the relative error of one rounding."""

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def assert_within(got: Tensor, exact: Tensor, bound: Tensor, dtype: torch.dtype) -> None:
    """|got - exact| is at most ``bound`` before the last rounding, which adds half an ulp of ``dtype``."""
    info = torch.finfo(dtype)
    rounding = (exact.abs() + bound) * info.eps / 2 + info.smallest_normal * info.eps
    error = (got.double() - exact).abs()
    assert (error <= bound + rounding).all(), f"{(error / (bound + rounding)).max()} times the bound"


def assert_same_operands(got: Quantized, want: Quantized) -> None:
    """The same bytes in every operand."""
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.format, a.dim, a.shape) == (b.format, b.dim, b.shape)
            for x, y in zip(_tensors(a), _tensors(b), strict=True):
                assert (x is None) == (y is None)
                assert x is None or y is None or torch.equal(x, y)


def _tensors(operand: Operand) -> list[Tensor | None]:
    return [operand.codes, operand.scale_inv, operand.amax]
