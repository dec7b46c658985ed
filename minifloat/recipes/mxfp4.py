"""4-bit elements with a power-of-two scale for each 32."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.arguments import checked
from minifloat.formats import Format
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import BackwardOverride, QuantizerRole, Recipe

_STRIPS = Format("e2m1", 32, scale_rule="e8m0")


@checked
@dataclass(frozen=True)
class MXFP4BlockScaling(Recipe):
    """E2M1 with a power-of-two scale for each 32 elements: OCP Microscaling Formats v1.0, scales rounded up.

    Args:
        enable_2d_quantization: weights share a scale in 32 x 32 tiles, so that both orientations are the same values.
    """

    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    pairs = (("MXFP4", _STRIPS, _STRIPS),)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        return Quantizer(Format("e2m1", 32, tile, "e8m0"))
