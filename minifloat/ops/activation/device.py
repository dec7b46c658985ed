"""The activations in Triton, in fp32: values and derivatives that neither overflow nor cancel.

A sigmoid is all that the smooth ones need, for ``0.5 + 0.5 * tanh(z) = sigmoid(2 * z)``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logistic(x):
    """``sigmoid(x)`` and its derivative: with f = exp(-abs(x)) they are 1 / (1 + f) or f / (1 + f), and f / (1 + f)^2.

    ``exp2`` and ``rsqrt`` are one instruction each, good to 2 ulp; ``exp`` takes four and a division nine.
    """
    f = tl.exp2(-1.4426950408889634 * tl.abs(x))
    root = tl.rsqrt(1.0 + f)
    r = root * root
    return tl.where(x < 0, f * r, r), f * r * r


@triton.jit
def larger(x, bound):
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, bound):
    return tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pointwise(x, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """A function of one number and its derivative; ``"swish"`` is ``x * sigmoid(SLOPE * x)``."""
    if NAME == "relu":
        return larger(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    elif NAME == "srelu":
        positive = larger(x, 0.0)
        return positive * positive, 2 * positive
    elif NAME == "sigmoid":
        return logistic(x)
    elif NAME == "gelu":
        s, slope = logistic(x * (2 * 0.79788456 + 2 * 0.03567741 * x * x))
        # Beyond 12 the slope is 0, but x * x may overflow, and 0 * inf is not 0.
        near = smaller(larger(x, -12.0), 12.0)
        return x * s, s + near * slope * (2 * 0.79788456 + 6 * 0.03567741 * near * near)
    else:
        tl.static_assert(NAME == "swish")
        s, slope = logistic(SLOPE * x)
        return x * s, s + x * slope * SLOPE  # in this order: SLOPE * x may overflow, and the slope is 0 there


@triton.jit
def halves(a, b, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """What the gate's function is applied to and what its value multiplies; ``LIMIT`` is None where nothing clamps."""
    if LIMIT is not None:
        a = smaller(a, LIMIT)
        b = smaller(larger(b, -LIMIT), LIMIT) + OFFSET
    return a, b


@triton.jit
def gated_value(a, b, NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """The product of two halves of a row, the first through the gate's function."""
    inner, factor = halves(a, b, LIMIT, OFFSET)
    value, _ = pointwise(inner, NAME, SLOPE)
    return value * factor


@triton.jit
def gated_gradients(dy, a, b, NAME: tl.constexpr, SLOPE: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Gradients with respect to both halves; 0 where they were clamped."""
    inner, factor = halves(a, b, LIMIT, OFFSET)
    value, derivative = pointwise(inner, NAME, SLOPE)
    da, db = dy * factor * derivative, dy * value
    if LIMIT is not None:
        da = tl.where(a > LIMIT, 0.0, da)
        db = tl.where(tl.abs(b) > LIMIT, 0.0, db)
    return da, db
