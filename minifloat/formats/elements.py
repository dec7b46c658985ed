"""Elements, which give codes their values, and scale rules, by which scales follow from amaxes.

PyTorch's functions are the definition, held to bit for bit by the Triton ones of ``device.py``, which a kernel is
handed as compile-time constants: ``ELEMENT.kernels.encode(x, ELEMENT)``, ``RULE.kernels.scale(amax, MAX, EPSILON,
LARGEST)``. Arithmetic of scales is fp32, one rounding an operation, and no Python number divides a tensor
(``2.0 / x`` is ``x.reciprocal() * 2.0``, two roundings).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ElementKernels(NamedTuple):
    """Triton functions: ``encode(x, ELEMENT)``, fp32 to codes as bytes, and ``decode(code, ELEMENT)`` back to fp32."""

    encode: Any
    decode: Any


@dataclass(frozen=True, eq=False)
class Element:
    """Stored number, ``bits`` wide, finite up to ``max``; ``dtype`` is PyTorch's name for it, where it has one.

    ``split``: sums of 128 products of its values do not fit float64 exactly. ``nan``: a code is NaN; else a NaN counts
    as an infinity in the amax of its block.
    """

    name: str
    bits: int
    max: float
    dtype: torch.dtype | None = None
    split: bool = False
    nan: bool = True

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4

    def encode(self, x: Tensor) -> Tensor:
        """Rounds fp32 to codes, a byte each: to nearest, ties to even, saturating; NaN to the largest code."""
        raise NotImplementedError(f"{self.name} has no codes")

    def values(self, device: torch.device) -> Tensor:
        """Lists the value of each code, fp32 [2**bits]."""
        raise NotImplementedError(f"{self.name} has no codes")

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Reads the values of codes, one a byte, in a table, which on a CPU is three times faster than a conversion."""
        values = self.values(codes.device).to(dtype)
        return values.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)

    @property
    def kernels(self) -> ElementKernels:
        """Triton functions of the element; needs Triton."""
        raise NotImplementedError(f"{self.name} has no Triton functions")

    @property
    def cache_key(self) -> str:
        """Tells Triton's cache of compiled kernels when these functions have changed."""
        return f"{self}{[function.cache_key for function in self.kernels]}"


@dataclass(frozen=True, eq=False)
class TorchFloat(Element):
    """Element of 8 bits that PyTorch and the GPU convert to; NaN is the code 0x7F."""

    def encode(self, x: Tensor) -> Tensor:
        assert self.dtype is not None
        codes = x.clamp(-self.max, self.max).to(self.dtype).view(torch.uint8)
        return codes.masked_fill_(codes == 0xFF, 0x7F)  # a negative NaN loses its sign; nothing else has this code

    def values(self, device: torch.device) -> Tensor:
        assert self.dtype is not None
        return torch.arange(256, dtype=torch.uint8, device=device).view(self.dtype).float()

    @property
    def kernels(self) -> ElementKernels:
        from minifloat.formats import device  # which needs Triton

        return device.FP8[self.name]


@dataclass(frozen=True, eq=False)
class SmallFloat(Element):
    """Element of 4 or 6 bits (OCP Microscaling Formats v1.0, 5.3), all codes of which are finite.

    NaN becomes ``max``. ``mantissa`` is its bits, ``bias`` that of the exponent.
    """

    nan: bool = False
    mantissa: int = 1
    bias: int = 1

    @property
    def normal(self) -> float:
        """Smallest value with an exponent of its own; below, values are multiples of ``smallest``."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        """Smallest value above 0."""
        return self.normal * 2.0**-self.mantissa

    @property
    def unit(self) -> float:
        """Factor from an fp32 number with the code's exponent and mantissa to the code's value."""
        return 2.0 ** (127 - self.bias)

    def step(self, magnitude: Tensor) -> Tensor:
        """Computes the distance to the next larger value."""
        powers = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32)
        return powers.clamp(self.normal, 2.0 ** math.floor(math.log2(self.max))) * 2.0**-self.mantissa

    def codes(self, magnitude: Tensor, x: Tensor) -> Tensor:
        """Finds the codes of magnitudes that are values of the element, with the sign of ``x``."""
        exact = magnitude.nan_to_num(self.max)
        normal = (exact.view(torch.int32) >> (23 - self.mantissa)) - ((127 - self.bias) << self.mantissa)
        index = torch.where(exact < self.normal, (exact / self.smallest).int(), normal)
        sign = (x.signbit() & ~x.isnan()).to(torch.uint8) << (self.bits - 1)
        return index.to(torch.uint8) | sign

    def encode(self, x: Tensor) -> Tensor:
        magnitude = x.abs()
        step = self.step(magnitude)  # a power of two: the division is exact
        return self.codes((torch.round(magnitude / step) * step).clamp(max=self.max), x)

    def encode_stochastic(self, x: Tensor, bits: Tensor) -> Tensor:
        """Rounds up with the probability of the remainder, in 1/256ths: ``bits`` is one random byte an element."""
        magnitude = x.abs()
        # One rounding, as fma(u, step, a): the sum of eight bits and a float is exact in float64 where it can matter.
        dither = bits.double() / 256 * self.step(magnitude).double()
        dithered = (magnitude.double() + dither).float()
        step = self.step(dithered)
        return self.codes((torch.floor(dithered / step) * step).clamp(max=self.max), x)

    def values(self, device: torch.device) -> Tensor:
        codes = torch.arange(1 << self.bits, dtype=torch.int32, device=device)
        index = codes & ((1 << (self.bits - 1)) - 1)
        normal = ((index + ((127 - self.bias) << self.mantissa)) << (23 - self.mantissa)).view(torch.float32)
        magnitude = torch.where(index < 1 << self.mantissa, index * self.smallest, normal)
        return torch.where(codes == index, magnitude, -magnitude)

    @property
    def kernels(self) -> ElementKernels:
        from minifloat.formats import device  # which needs Triton

        return device.SMALL


ELEMENTS: dict[str, Element] = {}


def define_element(element: Element) -> Element:
    """Registers an element for ``Format`` by its name.

    Raises:
        ValueError: the name is no identifier, or that of another element, whose formats would not change.
    """
    check_name("element", element.name, ELEMENTS)
    ELEMENTS[element.name] = element
    return element


def check_name(kind: str, name: str, known: Mapping[str, object]) -> None:
    """Checks the name of a new element or scale rule."""
    if not name.isidentifier() or name in known:
        raise ValueError(f"{kind} {name!r}: its name must be an identifier, and none of {', '.join(known)}")


E4M3 = define_element(TorchFloat("e4m3", 8, 448.0, torch.float8_e4m3fn))
define_element(TorchFloat("e5m2", 8, 57344.0, torch.float8_e5m2, split=True))
E2M1 = SmallFloat("e2m1", 4, 6.0)
define_element(E2M1)
# The values themselves, unscaled: the format of an operand that a recipe leaves in high precision.
define_element(Element("identity", 16, float("inf")))


FLT_MAX = torch.finfo(torch.float32).max


class RuleKernels(NamedTuple):
    """Triton functions.

    Args:
        scale: ``(amax, MAX, EPSILON, LARGEST)`` to what elements are multiplied by and what is stored, as
            :meth:`ScaleRule.scale`; None where the amax of a block alone does not say.
        value: what is stored to fp32.
    """

    scale: Any
    value: Any


class FormatFacts:
    """Facts that follow from the fields of a ``Format``, found once; and two fields that scale rules read."""

    block: int
    amax_epsilon: float

    encoding: Element
    """Element that ``element`` names."""
    scaling: ScaleRule
    """Rule that ``scale_rule`` names."""
    max: float
    """Largest finite value of a code."""
    packed: bool
    """Whether two codes share a byte."""
    quantized: bool
    """Whether there are codes and scales, rather than the values themselves."""
    scale_dtype: torch.dtype
    """Dtype of stored scales."""
    needs_amax: bool
    """Whether the cast needs an amax over more than one block, so over a group where the tensor is sharded."""
    grid: bool
    """Whether scales lie in a grid of blocks in the [M, K] layout, rather than being one."""
    segment: int
    """Elements along the contracted dim that the scaled product sums before it applies their scale."""
    symmetric: bool
    """Whether one cast serves both orientations: nothing in it depends on which dim is contracted."""
    spec: str
    """The format as a short string, which :func:`parse` reads back: ``"e2m1/1x16/two_level/hadamard16"``."""


@dataclass(frozen=True, eq=False)
class ScaleRule:
    """Rule that computes scales from amaxes and stores them.

    Args:
        name: what ``Format`` calls it.
        dtype: of stored scales. Bytes for E8M0 and E4M3 ones, since gloo, pickle and safetensors know no others.
        needs_block: it is no rule for one scale of a whole tensor.
        element: the one element that it takes, if not any.
        own: the scale follows from the amax alone, and a Triton function says how.
        power_of_two: a code times its scale fits bf16.
    """

    name: str
    dtype: torch.dtype = torch.float32
    needs_block: bool = False
    element: str = ""
    own: bool = False
    power_of_two: bool = False

    def scale(self, amax: Tensor, fmt: FormatFacts, largest: float) -> tuple[Tensor, Tensor]:
        """Returns the multiplier of values with this ``amax``, and the stored scale.

        Args:
            largest: finite value of the dtype that is cast.
        """
        raise NotImplementedError(f"scale rule {self.name!r} finds no scale from an amax alone")

    def values(self, stored: Tensor) -> Tensor:
        """Returns what codes are multiplied by, fp32."""
        return stored

    @property
    def kernels(self) -> RuleKernels:
        """Triton functions of the rule; needs Triton."""
        from minifloat.formats import device  # which needs Triton

        return device.RULES[self.name]

    @property
    def cache_key(self) -> str:
        """Tells Triton's cache of compiled kernels when these functions have changed."""
        return f"{self}{[function.cache_key for function in self.kernels if function is not None]}"


class Quotient(ScaleRule):
    """Rule ``max / amax``; for ``"pow2"`` floored to a power of two. An infinite amax gives NaN."""

    def scale(self, amax: Tensor, fmt: FormatFacts, largest: float) -> tuple[Tensor, Tensor]:
        amax = torch.where(amax < fmt.amax_epsilon, fmt.amax_epsilon, amax)
        scale = amax.new_full((), fmt.encoding.max) / amax
        scale = torch.where(scale.isinf(), largest if fmt.block else FLT_MAX, scale)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # clears the mantissa: rounds down
        scale = torch.where(amax.isfinite(), torch.where(amax == 0, 1.0, scale), torch.nan)
        return scale, scale.reciprocal()


class E8M0(ScaleRule):
    """Rule ``amax / max``, raised to a power of two whose exponent is stored (OCP Microscaling Formats v1.0, 5.4.1)."""

    def scale(self, amax: Tensor, fmt: FormatFacts, largest: float) -> tuple[Tensor, Tensor]:
        codes = e8m0_from_float(amax * fp32(1.0 / fmt.max, amax.device))
        # 2^(127 - c): c = 254 is the denormal 2^-127, which has no exponent field of its own.
        return torch.where(codes == 255, torch.nan, _power_of_two(254 - codes.int())), codes

    def values(self, stored: Tensor) -> Tensor:
        """Computes 2^(c - 127); c = 0 is the fp32 denormal 2^-127, 255 is NaN."""
        return torch.where(stored == 255, torch.nan, _power_of_two(stored.int()))


class TwoLevel(ScaleRule):
    """Rule of E4M3 block scales under an fp32 scale of the whole tensor, or of its rows (NVFP4)."""

    def values(self, stored: Tensor) -> Tensor:
        return E4M3.decode(stored)


def fp32(value: float, device: torch.device) -> Tensor:
    """Makes a number a tensor of no dims."""
    return torch.full((), value, dtype=torch.float32, device=device)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Computes 2^(exponent - 127); 0 gives the denormal 2^-127."""
    return torch.where(exponent > 0, exponent << 23, 0x00400000).view(torch.float32)


def e8m0_from_float(x: Tensor) -> Tensor:
    """Finds the smallest power of two of at least ``x`` >= 0, as its exponent byte; NaN and infinity are 255, NaN."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    raised = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + raised.int()).masked_fill(~x.isfinite(), 255).to(torch.uint8)


SCALE_RULES: dict[str, ScaleRule] = {}


def define_scale_rule(rule: ScaleRule) -> ScaleRule:
    """Registers a scale rule for ``Format`` by its name; raises like :func:`define_element`."""
    check_name("scale rule", rule.name, SCALE_RULES)
    SCALE_RULES[rule.name] = rule
    return rule


define_scale_rule(Quotient("fp32", own=True))
define_scale_rule(Quotient("pow2", own=True, power_of_two=True))
define_scale_rule(E8M0("e8m0", torch.uint8, needs_block=True, own=True, power_of_two=True))
define_scale_rule(TwoLevel("two_level", torch.uint8, needs_block=True, element="e2m1"))
define_scale_rule(ScaleRule("given"))
define_scale_rule(ScaleRule("none"))
