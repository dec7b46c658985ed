"""4-bit weights, 8-bit activations and gradients: MXFP4 by FP8 in strips of 128."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.arguments import checked
from minifloat.formats import Format
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import BackwardOverride, QuantizerRole, Recipe

_STRIPS = Format(block=128, scale_rule="pow2")


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
    pairs = (("FP8 1x128 by MXFP4", _STRIPS, Format("e2m1", 32, scale_rule="e8m0")),)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "weight":
            return Quantizer(Format("e2m1", 32, self.enable_2d_quantization, "e8m0"))
        return Quantizer(_STRIPS)
