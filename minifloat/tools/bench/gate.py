"""The correctness gates: how far a result may be from the same in float32 for its speed to be reported.

Rounding to nearest with m bits after the point has a relative error of at most 2^-(m+1), so of root mean square at most
``2^-(m+1) / sqrt(3)``; stochastic rounding has sqrt(2) times that. The errors of a product's two operands are
independent and add in quadrature, and so do those of products that follow each other. Random data stay at about 0.7 of
these bounds on the relative L2 error of a tensor; a wrong scale, orientation or stale amax is far above them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.tools.bench.registry import Outputs

CHUNK = 2**26  # elements compared at a time: a whole gradient in fp32, several times over, would not fit everywhere


def rounding(bits: int, stochastic: bool = False) -> float:
    """Root mean square of the relative error of rounding to ``bits`` after the point, at most."""
    return 2.0 ** -(bits + 1) / math.sqrt(3) * (math.sqrt(2) if stochastic else 1)


_E4M3 = _E2M3 = rounding(3)
_E5M2 = _E3M2 = rounding(2)
_E2M1 = rounding(1)

BOUNDS = {
    "bf16": 0.01,  # one rounding of the result is 0.0023 at most; intermediate results are rounded too
    "delayed": math.hypot(_E4M3, _E5M2),  # dgrad and wgrad, whose E5M2 gradients are the coarsest operands
    "current": math.hypot(_E4M3, _E5M2),
    "block": math.hypot(_E4M3, _E4M3),
    "mxfp8": math.hypot(_E4M3, _E4M3),
    "nvfp4": math.hypot(_E2M1, rounding(1, stochastic=True)),
    "mxfp4": math.hypot(_E2M1, _E2M1),
    "mxfp6": math.hypot(_E2M3, _E3M2),
    "rowwise": math.hypot(_E4M3, _E4M3),
    "w4a8": math.hypot(_E2M1, _E4M3),
}
"""Largest relative L2 error of output and gradients of one linear, by recipe."""


def bound(recipe: str, products: int = 1) -> float:
    """Bound for results that lie behind ``products`` quantized products."""
    return BOUNDS[recipe] * math.sqrt(products)


def relative_error(outputs: Outputs, expected: Outputs) -> float:
    """The largest relative L2 error of the outputs; infinite where one has another shape or holds NaN."""
    if len(outputs) != len(expected):
        return math.inf
    return max(_relative(got, want) for got, want in zip(outputs, expected, strict=True))


def _relative(got: Tensor, want: Tensor) -> float:
    return _error_and_gain(got, want)[0]


def _error_and_gain(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The relative L2 error, and by how much the part of ``got`` along ``want``, which may lie elsewhere, is too large.

    Infinite where ``got`` has another shape or holds NaN.
    """
    if got.shape != want.shape:
        return math.inf, math.inf
    error = along = size = torch.zeros((), dtype=torch.float64, device=got.device)
    for part, right in zip(got.reshape(-1).split(CHUNK), want.reshape(-1).split(CHUNK), strict=True):
        part, right = part.float(), right.to(got.device).float()
        error = error + (part - right).square().sum(dtype=torch.float64)
        along = along + ((part - right) * right).sum(dtype=torch.float64)
        size = size + right.square().sum(dtype=torch.float64)
    ratio, gain = float((error / size).sqrt()), float(along / size)
    return (math.inf, math.inf) if math.isnan(ratio) else (ratio, gain)


class StepBounds(NamedTuple):
    """Largest relative L2 errors of a training step against the same one in bf16, and largest gain of any of them.

    Errors of rounding hardly point along the value. A factor (a gradient that is counted twice, a wrong scale, a mean
    in place of a sum) lies along it whole, and would hide below the bound on the whole error.
    """

    output: float
    dx: float
    gradients: float
    """Bound for the gradient of each parameter."""
    gain: float = 0.05
    """Twice what one layer showed on a CPU."""

    def of(self, layers: int) -> StepBounds:
        """Bounds of so many layers, from those of one: independent errors add as the root of their number."""
        return StepBounds(*(bound * math.sqrt(layers) for bound in self))


def check_step(name: str, found: Sequence[Tensor], expected: Sequence[Tensor], bounds: StepBounds) -> float:
    """The largest relative L2 error among output, dX and the gradients of parameters, in this order.

    Raises:
        AssertionError: one of them is too far from what is expected.
    """
    assert len(found) == len(expected) > 2, (len(found), len(expected))
    largest = 0.0
    for i, (got, want) in enumerate(zip(found, expected, strict=True)):
        what = ("output", "dX")[i] if i < 2 else f"the gradient of parameter {i - 2}, {list(want.shape)},"
        (error, gain), allowed = _error_and_gain(got, want), bounds[min(i, 2)]
        if not error <= allowed:
            raise AssertionError(f"{name}: {what} is {error:.3f} off bf16's, and {allowed:.3f} is allowed")
        if not abs(gain) <= bounds.gain:
            allowed = bounds.gain
            raise AssertionError(f"{name}: {what} is bf16's times {1 + gain:.3f}, and 1 -+ {allowed:.3f} is allowed")
        largest = max(largest, error)
    return largest


def against(expected: Outputs) -> Callable[[Outputs], float]:
    """A contender's ``error``: relative to these outputs."""
    return lambda outputs: relative_error(outputs, expected)


def differing(outputs: Outputs, expected: Outputs) -> float:
    """The largest fraction of elements, over the outputs, that are not equal to the bit."""
    if len(outputs) != len(expected):
        return math.inf
    return max(_differing(got, want) for got, want in zip(outputs, expected, strict=True))


def _differing(got: Tensor, want: Tensor) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        return math.inf
    if want.dtype == torch.float32:
        got, want = got.contiguous().view(torch.int32), want.contiguous().view(torch.int32)
    return float((got != want).sum()) / max(want.numel(), 1)
