"""FP8 with a power-of-two scale for each 32 elements."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.arguments import checked
from minifloat.formats import Format
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import BackwardOverride, ElementPair, Margin, QuantizerRole, Recipe


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
    pairs = (("MXFP8", Format(block=32, scale_rule="e8m0"), Format(block=32, scale_rule="e8m0")),)

    def __post_init__(self) -> None:
        self._check(self.fp8_format, margin="scales of blocks have no margin")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        return Quantizer(Format(self.fp8_format.element(role), 32, tile, scale_rule="e8m0"))
