"""Elements and scale rules in Triton: what kernels are handed as compile-time constants. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from minifloat.formats.elements import ElementKernels, RuleKernels

MINUS_INFINITY_BITS = tl.constexpr(-0x800000)


@triton.jit
def reciprocal(x):
    return tl.div_rn(1.0, x)


# ---- elements ----


@triton.jit
def _encode_e4m3(x, ELEMENT: tl.constexpr):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the hardware saturates and makes NaN 0x7F


@triton.jit
def decode_e4m3(code, ELEMENT: tl.constexpr = None):
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _encode_e5m2(x, ELEMENT: tl.constexpr):
    return x.to(tl.float8e5).to(tl.uint8, bitcast=True)


@triton.jit
def _decode_e5m2(code, ELEMENT: tl.constexpr):
    return code.to(tl.float8e5, bitcast=True).to(tl.float32)


@triton.jit
def _encode_small(x, ELEMENT: tl.constexpr):
    """``SmallFloat.encode``: adding 2^23 steps rounds to a multiple of the step, to even when halfway, once."""
    SHIFT: tl.constexpr = 23 - ELEMENT.mantissa
    a = tl.minimum(tl.abs(x), ELEMENT.max)  # also of NaN
    power = (a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    steps = tl.maximum(power, ELEMENT.normal) * (1 << SHIFT)
    rounded = (a + steps) - steps
    normal = (rounded.to(tl.int32, bitcast=True) >> SHIFT) - ((127 - ELEMENT.bias) << ELEMENT.mantissa)
    code = tl.where(rounded < ELEMENT.normal, (rounded * (1.0 / ELEMENT.smallest)).to(tl.int32), normal)
    # As integers, -0 to minus infinity are the smallest floats; a NaN has no sign here.
    sign = tl.where(x.to(tl.int32, bitcast=True) <= MINUS_INFINITY_BITS, 1 << (ELEMENT.bits - 1), 0)
    return (code | sign).to(tl.uint8)


@triton.jit
def _decode_small(code, ELEMENT: tl.constexpr):
    """Exponent and mantissa where fp32 has them make the value times a power of two, exactly."""
    SIGN: tl.constexpr = ELEMENT.bits - 1
    code = code.to(tl.int32)
    bits = ((code & ((1 << SIGN) - 1)) << (23 - ELEMENT.mantissa)) | ((code >> SIGN) << 31)
    return bits.to(tl.float32, bitcast=True) * ELEMENT.unit


FP8 = {"e4m3": ElementKernels(_encode_e4m3, decode_e4m3), "e5m2": ElementKernels(_encode_e5m2, _decode_e5m2)}
SMALL = ElementKernels(_encode_small, _decode_small)


# ---- scale rules ----


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) in fp32 for 0 <= exponent < 255; 0 gives the denormal 2^-127."""
    return tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def if_finite(amax, x):
    return tl.where(amax < float("inf"), x, float("nan"))  # one NaN on every device


@triton.jit
def _scale_fp32(amax, MAX: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr):
    """numerics 0.3: ``MAX / amax``, ``LARGEST`` where that overflows, 1 for 0, NaN for infinity."""
    amax = tl.where(amax < EPSILON, EPSILON, amax)
    scale = tl.div_rn(MAX, amax)
    scale = tl.where(scale == float("inf"), LARGEST, scale)
    scale = tl.where(amax == 0, 1.0, scale)
    return if_finite(amax, scale), if_finite(amax, reciprocal(scale))


@triton.jit
def _scale_pow2(amax, MAX: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr):
    """numerics 0.3 with powers of two: ``MAX / amax`` rounded down to one.

    Needs no division: the difference of the bits of two floats has, above the mantissa, the exponent of their quotient.
    A quotient just below a power of two does not round up to it: of floats with c as their mantissa, it is at most
    1 - (2 / c) * 2^-24, and c is less than 2.
    """
    if EPSILON > 0:
        amax = tl.where(amax < EPSILON, EPSILON, amax)
    bits = amax.to(tl.int32, bitcast=True)
    max_bits = tl.cast(MAX, tl.float32).to(tl.int32, bitcast=True)
    largest_bits = tl.cast(LARGEST, tl.float32).to(tl.int32, bitcast=True)
    exponent = 127 + ((max_bits - bits) >> 23)
    exponent = tl.where(exponent > 254, largest_bits >> 23, exponent)
    exponent = tl.where(bits == 0, 127, exponent)
    return if_finite(amax, power_of_two(exponent)), if_finite(amax, power_of_two(254 - exponent))


@triton.jit
def e8m0_from_float(x):
    """Finds the exponent byte, int32, of the smallest power of two of at least ``x`` >= 0; infinity and NaN are 255."""
    bits = x.to(tl.int32, bitcast=True)
    raised = tl.minimum((bits + 0x7FFFFF) >> 23, 254)
    return tl.where(bits >= 0x7F800000, 255, tl.where(bits <= 0x400000, 0, raised))


@triton.jit
def _scale_e8m0(amax, MAX: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr):
    """numerics 1.4."""
    code = e8m0_from_float(amax * (1.0 / MAX))
    return tl.where(code == 255, float("nan"), power_of_two(254 - code)), code.to(tl.uint8)


@triton.jit
def _e8m0_value(code):
    exponent = code.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _same(scale):
    return scale


@triton.jit
def _given(scale, MAX: tl.constexpr, EPSILON: tl.constexpr, LARGEST: tl.constexpr):
    return scale, reciprocal(scale)


RULES = {
    "fp32": RuleKernels(_scale_fp32, _same),
    "pow2": RuleKernels(_scale_pow2, _same),
    "e8m0": RuleKernels(_scale_e8m0, _e8m0_value),
    "two_level": RuleKernels(None, decode_e4m3),
    "given": RuleKernels(_given, _same),
}
