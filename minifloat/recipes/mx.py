"""Elements of 8, 6 or 4 bits with a power-of-two scale for each 32: OCP Microscaling Formats; and 4-bit ones by FP8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minifloat.arguments import checked
from minifloat.formats import Format, define_element
from minifloat.formats.elements import SmallFloat
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import GRADIENTS, BackwardOverride, ElementPair, Margin, QuantizerRole, Recipe

define_element(SmallFloat("e2m3", 6, 7.5, mantissa=3, bias=1))
define_element(SmallFloat("e3m2", 6, 28.0, mantissa=2, bias=3))

_E4M3, _E2M3, _E3M2, _E2M1 = (Format(each, 32, scale_rule="e8m0") for each in ("e4m3", "e2m3", "e3m2", "e2m1"))
_STRIPS = Format(block=128, scale_rule="pow2")


@checked
@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale for each 32 elements: OCP Microscaling Formats v1.0, scales rounded up.

    Args:
        enable_2d_quantization: weights share a scale in 32 x 32 tiles.
    """

    margin: Margin = 0
    fp8_format: ElementPair = ElementPair.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    kinds = frozenset({"mxfp8"})
    pairs = (("MXFP8", _E4M3, _E4M3),)

    def __post_init__(self) -> None:
        self._check(self.fp8_format, margin="scales of blocks have no margin")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        return Quantizer(Format(self.fp8_format.element(role), 32, tile, scale_rule="e8m0"))


@checked
@dataclass(frozen=True)
class MXFP6BlockScaling(Recipe):
    """6-bit elements with a power-of-two scale for each 32: OCP Microscaling Formats v1.0, scales rounded up.

    Args:
        forward_element: of inputs and weights: ``"e2m3"``, with more precision, or ``"e3m2"``, with more range.
        gradient_element: likewise of gradients.
        enable_2d_quantization: weights share a scale in 32 x 32 tiles, so that both orientations are the same values.
    """

    forward_element: Literal["e2m3", "e3m2"] = "e2m3"
    gradient_element: Literal["e2m3", "e3m2"] = "e3m2"
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    pairs = (("MXFP6", _E2M3, _E2M3), ("MXFP6, E3M2 gradient", _E3M2, _E2M3))

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        element = self.gradient_element if role.tensor_type in GRADIENTS else self.forward_element
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        return Quantizer(Format(element, 32, tile, "e8m0"))


@checked
@dataclass(frozen=True)
class MXFP4BlockScaling(Recipe):
    """E2M1 with a power-of-two scale for each 32 elements: OCP Microscaling Formats v1.0, scales rounded up.

    Args:
        enable_2d_quantization: weights share a scale in 32 x 32 tiles, so that both orientations are the same values.
    """

    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    pairs = (("MXFP4", _E2M1, _E2M1),)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        return Quantizer(Format("e2m1", 32, tile, "e8m0"))


@checked
@dataclass(frozen=True)
class W4A8BlockScaling(Recipe):
    """Weights in MXFP4, activations and gradients in E4M3 with a power-of-two scale for each 1 x 128 strip.

    FP8 tensor cores of sm_90 multiply them: an MXFP4 weight is an FP8 one with scales of tiles, without rounding.

    Args:
        enable_2d_quantization: weights share a scale in 32 x 32 tiles, so that both orientations are the same values.
    """

    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    pairs = (("FP8 1x128 by MXFP4", _STRIPS, _E2M1),)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "weight":
            return Quantizer(Format("e2m1", 32, self.enable_2d_quantization, "e8m0"))
        return Quantizer(_STRIPS)
