"""4-bit elements under E4M3 scales of blocks of 16 and an fp32 amax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minifloat.arguments import checked
from minifloat.formats import Format, Rounding
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import GRADIENTS, BackwardOverride, ElementPair, QParams, QuantizerRole, Recipe, Selection


@checked
@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """4-bit elements, E4M3 scales for each 16 of them, an fp32 amax over all: "Pretraining LLMs with NVFP4" (2025).

    Args:
        disable_rht: no Hadamard transform of the wgrad operands.
        disable_stochastic_rounding: gradients round to nearest.
        disable_2d_quantization: weights take strips of 16, not tiles of 16 x 16.
        row_scaled_activation: one amax a row for inputs; needs ``disable_rht``.
        nvfp4_4over6: tensors whose blocks are scaled to 4 where that is closer than to 6; never gradients.
        nvfp4_4over6_e4m3_use_256: which of those aim at block scales up to 256 instead of 448.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: Selection = "none"
    nvfp4_4over6_e4m3_use_256: Selection = "all"
    nvfp4_4over6_err_mode: Literal["MAE", "MSE"] = "MAE"
    fp4_format: ElementPair = ElementPair.E2M1
    fp8_format: ElementPair = ElementPair.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    kinds = frozenset({"nvfp4"})
    pairs = (("NVFP4", Format("e2m1", 16, False, "two_level"), Format("e2m1", 16, True, "two_level")),)

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        if self.fp4_format is not ElementPair.E2M1 or self.fp8_format is not ElementPair.E4M3:
            raise ValueError("NVFP4 is E2M1 elements under E4M3 scales; leave fp4_format and fp8_format as they are")
        if not self.disable_rht:
            if self.row_scaled_activation:
                raise ValueError(
                    "row_scaled_activation scales tokens, which the Hadamard transform mixes: disable_rht=True"
                )
            if self.nvfp4_4over6 in ("activations", "all"):
                raise ValueError(f"nvfp4_4over6={self.nvfp4_4over6!r} of a rotated activation: set disable_rht=True")

    @property
    def fp4_quant_fwd_inp(self) -> QParams:
        return QParams(random_hadamard_transform=not self.disable_rht)

    @property
    def fp4_quant_fwd_weight(self) -> QParams:
        return QParams(fp4_2d_quantization=not self.disable_2d_quantization)

    @property
    def fp4_quant_bwd_grad(self) -> QParams:
        return QParams(
            random_hadamard_transform=not self.disable_rht, stochastic_rounding=not self.disable_stochastic_rounding
        )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "weight":
            return Quantizer(self._format("weights", tile=not self.disable_2d_quantization))
        if role.tensor_type in GRADIENTS:
            rounding: Rounding = "nearest" if self.disable_stochastic_rounding else "stochastic"
            row = Format("e2m1", 16, scale_rule="two_level", rounding=rounding)
        else:
            row = self._format("activations", amax_per_row=self.row_scaled_activation)
        if self.disable_rht:
            return Quantizer(row)
        rotated = Format("e2m1", 16, scale_rule="two_level", transform="hadamard16", rounding=row.rounding)
        return Quantizer(row, rotated)

    def _format(self, tensors: str, tile: bool = False, amax_per_row: bool = False) -> Format:
        if self.nvfp4_4over6 not in (tensors, "all"):
            return Format("e2m1", 16, tile, scale_rule="two_level", amax_per_row=amax_per_row)
        rounding: Rounding = "four_over_six_mae" if self.nvfp4_4over6_err_mode == "MAE" else "four_over_six_mse"
        largest = 256.0 if self.nvfp4_4over6_e4m3_use_256 in (tensors, "all") else 448.0
        return Format(
            "e2m1", 16, tile, "two_level", rounding=rounding, block_scale_max=largest, amax_per_row=amax_per_row
        )
