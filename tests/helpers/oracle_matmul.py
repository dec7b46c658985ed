"""The scaled product by the oracle: docs/numerics.md 1.7 in numpy, and products in exact integers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tests.helpers.oracle import F32


@np.errstate(all="ignore")
def segment_matmul(
    a_values: F32, b_values: F32, a_scales: F32, b_scales: F32, segment: int, alpha: float | None = None
) -> F32:
    """D [M, N] of a_values [M, K] and b_values [N, K] with scales [M, S] and [N, S], S = cdiv(K, segment).

    In order of the segments acc = RN32(acc + RN32(RN32(S) * RN32(sa * sb))), where S is the exact sum of products over
    the segment, rounded once. Last, where given, RN32(acc * alpha).
    """
    acc = np.zeros((a_values.shape[0], b_values.shape[0]), np.float32)
    for index, start in enumerate(range(0, a_values.shape[1], segment)):
        part = slice(start, start + segment)
        total = exact_matmul(a_values[:, part], b_values[:, part])
        acc = acc + total * (a_scales[:, index, None] * b_scales[None, :, index])
    return acc if alpha is None else acc * np.float32(alpha)


def exact_matmul(a: F32, b: F32) -> F32:
    """a [M, K] times b [N, K] transposed: exact sums of products, each rounded once to float32. Finite values only."""
    a_ints, a_unit = _as_integers(a)
    b_ints, b_unit = _as_integers(b)
    bound = np.abs(a_ints).max(initial=0) * np.abs(b_ints).max(initial=0) * a.shape[1]
    if bound < 2**53:  # integers that float64 sums exactly in any order
        product = a_ints.astype(np.float64) @ b_ints.astype(np.float64).T
        return np.ldexp(product, a_unit + b_unit).astype(np.float32)
    product = a_ints @ b_ints.T
    rounded = [_round_integer(int(n), a_unit + b_unit) for n in product.reshape(-1)]
    return np.array(rounded, np.float32).reshape(product.shape)


def _as_integers(values: F32) -> tuple[NDArray[np.object_], int]:
    """Python integers n and one exponent u with values == n * 2^u."""
    assert np.isfinite(values).all()
    fraction, exponent = np.frexp(values.astype(np.float64))
    whole = np.ldexp(fraction, 24).astype(np.int64)
    lowest = exponent - 24 + np.frexp((whole & -whole).astype(np.float64))[1] - 1
    unit = int(np.min(lowest, where=whole != 0, initial=0))
    integers = np.array([int(v) for v in np.ldexp(values.astype(np.float64), -unit).reshape(-1)], object)
    return integers.reshape(values.shape), unit


def _round_integer(n: int, unit: int) -> np.float32:
    """RN32(n * 2^unit), to nearest even, in integers: a float64 on the way would round twice."""
    magnitude = abs(n)
    shift = max(magnitude.bit_length() - 24, -149 - unit, 0)
    kept, rest = magnitude >> shift, magnitude & ((1 << shift) - 1)
    if 2 * rest > 1 << shift or (2 * rest == 1 << shift and kept & 1):
        kept += 1
    return np.float32(math.copysign(math.ldexp(kept, shift + unit), n))
