"""6-bit elements with a power-of-two scale for each 32, a code a byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minifloat.arguments import checked
from minifloat.formats import Format, define_element
from minifloat.formats.elements import SmallFloat
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import GRADIENTS, BackwardOverride, QuantizerRole, Recipe

define_element(SmallFloat("e2m3", 6, 7.5, mantissa=3, bias=1))
define_element(SmallFloat("e3m2", 6, 28.0, mantissa=2, bias=3))

_E2M3, _E3M2 = (Format(element, 32, scale_rule="e8m0") for element in ("e2m3", "e3m2"))


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
