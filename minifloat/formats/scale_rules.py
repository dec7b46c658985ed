"""Scale rules: how the scale of a block or a tensor follows from its amax, and how it is stored.

As in ``elements.py``, PyTorch's functions are the definition, and kernels are handed the Triton ones of ``device.py``:
``RULE.kernels.scale(amax, MAX, EPSILON, LARGEST)``. All arithmetic is fp32, one rounding an operation, and no Python
number divides a tensor (``2.0 / x`` is ``x.reciprocal() * 2.0``, two roundings).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minifloat.formats.elements import E4M3, check_name

if TYPE_CHECKING:
    from minifloat.formats import Format

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


@dataclass(frozen=True, eq=False)
class ScaleRule:
    """How scales are found and stored.

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

    def scale(self, amax: Tensor, fmt: Format, largest: float) -> tuple[Tensor, Tensor]:
        """What values with this ``amax`` are multiplied by, and what is stored.

        Args:
            largest: finite value of the dtype that is cast.
        """
        raise NotImplementedError(f"scale rule {self.name!r} finds no scale from an amax alone")

    def values(self, stored: Tensor) -> Tensor:
        """What codes are multiplied by, fp32."""
        return stored

    @property
    def kernels(self) -> RuleKernels:
        """Its Triton functions; needs Triton."""
        from minifloat.formats import device  # which needs Triton

        return device.RULES[self.name]

    @property
    def cache_key(self) -> str:
        """Tells Triton's cache of compiled kernels when these functions have changed."""
        return f"{self}{[function.cache_key for function in self.kernels if function is not None]}"


class Quotient(ScaleRule):
    """``max / amax``; for ``"pow2"`` floored to a power of two."""

    def scale(self, amax: Tensor, fmt: Format, largest: float) -> tuple[Tensor, Tensor]:
        amax = torch.where(amax < fmt.amax_epsilon, fmt.amax_epsilon, amax)
        scale = amax.new_full((), fmt.encoding.max) / amax
        scale = torch.where(scale.isinf(), largest if fmt.block else FLT_MAX, scale)
        if self.power_of_two:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # clears the mantissa: rounds down
        scale = torch.where(amax.isinf() | (amax == 0) | amax.isnan(), 1.0, scale)
        return scale, scale.reciprocal()


class E8M0(ScaleRule):
    """``amax / max``, raised to a power of two whose exponent is stored (OCP Microscaling Formats v1.0, 5.4.1)."""

    def scale(self, amax: Tensor, fmt: Format, largest: float) -> tuple[Tensor, Tensor]:
        codes = e8m0_from_float(amax * fp32(1.0 / fmt.max, amax.device))
        # 2^(127 - c): c = 254 is the denormal 2^-127, which has no exponent field of its own.
        return torch.where(codes == 255, torch.nan, _power_of_two(254 - codes.int())), codes

    def values(self, stored: Tensor) -> Tensor:
        """2^(c - 127); c = 0 is the fp32 denormal 2^-127, 255 is NaN."""
        return torch.where(stored == 255, torch.nan, _power_of_two(stored.int()))


class TwoLevel(ScaleRule):
    """E4M3 block scales under an fp32 scale of the whole tensor, or of its rows (NVFP4)."""

    def values(self, stored: Tensor) -> Tensor:
        return E4M3.decode(stored)


def fp32(value: float, device: torch.device) -> Tensor:
    """A number as a tensor of no dims."""
    return torch.full((), value, dtype=torch.float32, device=device)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 127); 0 gives the denormal 2^-127."""
    return torch.where(exponent > 0, exponent << 23, 0x00400000).view(torch.float32)


def e8m0_from_float(x: Tensor) -> Tensor:
    """The smallest power of two that is at least ``x`` >= 0, as its exponent byte; NaN to 255, infinity to 254."""
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    raised = (mantissa > 0) & (exponent != 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    codes = (exponent + raised.int()).masked_fill(x.isinf(), 254).masked_fill(x.isnan(), 255)
    return codes.to(torch.uint8)


SCALE_RULES: dict[str, ScaleRule] = {}


def define_scale_rule(rule: ScaleRule) -> ScaleRule:
    """Makes the rule known by its name to ``Format``; raises as :func:`define_element` does."""
    check_name("scale rule", rule.name, SCALE_RULES)
    SCALE_RULES[rule.name] = rule
    return rule


define_scale_rule(Quotient("fp32", own=True))
define_scale_rule(Quotient("pow2", own=True, power_of_two=True))
define_scale_rule(E8M0("e8m0", torch.uint8, needs_block=True, own=True, power_of_two=True))
define_scale_rule(TwoLevel("two_level", torch.uint8, needs_block=True, element="e2m1"))
define_scale_rule(ScaleRule("given"))
define_scale_rule(ScaleRule("none"))
