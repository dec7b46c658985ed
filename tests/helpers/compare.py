"""Comparisons of tensors: the same bytes, or within a bound before the last rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.operand import Quantized

U = 2.0**-24
"""Half an ulp of 1 in fp32: the relative error of one rounding."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def assert_within(got: Tensor, exact: Tensor, bound: Tensor, dtype: torch.dtype) -> None:
    """|got - exact| is at most ``bound`` before the last rounding, which adds half an ulp of ``dtype``."""
    info = torch.finfo(dtype)
    rounding = (exact.abs() + bound) * info.eps / 2 + info.smallest_normal * info.eps
    error = (got.double() - exact).abs()
    assert (error <= bound + rounding).all(), f"{(error / (bound + rounding)).max()} times the bound"


def assert_same_bits(got: Tensor | None, want: Tensor | None) -> None:
    """The same bytes on the same device, or no tensor in both places."""
    if got is None or want is None:
        assert got is want
        return
    assert got.shape == want.shape and got.dtype == want.dtype and got.device == want.device
    got, want = (x.flatten().view(torch.uint8) for x in (got, want))
    assert torch.equal(got, want), f"{int((got != want).sum())} of {got.numel()} bytes differ"


def assert_same_bits_or_nan(got: Tensor, want: Tensor) -> None:
    """Bit for bit; one NaN is as good as another."""
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = got.cpu().contiguous(), want.cpu().contiguous()
    bits = BITS.get(got.dtype, got.dtype)
    wrong = (got.view(bits) != want.view(bits)) & ~(got.isnan() & want.isnan())
    assert not wrong.any(), f"{wrong.sum()} differ: {got[wrong][:8]} for {want[wrong][:8]}"


def assert_same_operands(got: Quantized, want: Quantized) -> None:
    """The same bytes in every operand."""
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.format, a.dim, a.shape) == (b.format, b.dim, b.shape)
            for x, y in zip(a[:3], b[:3], strict=True):
                assert_same_bits(x, y)


def strides(x: Tensor) -> list[int]:
    """Those that say where an element is."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel()]


def same_on_all_ranks(results: Sequence[Any]) -> Any:
    """The result of the first rank, which all others equal."""
    for result in results:
        assert torch.equal(result.nan_to_num(7.0), results[0].nan_to_num(7.0))
    return results[0]
