"""FP8 with a scale for each strip of 128 elements, or tile of 128 x 128."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from minifloat.arguments import NonNegativeFloat, checked
from minifloat.formats import Format
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import (
    GRADIENTS,
    BackwardOverride,
    ElementPair,
    MMParams,
    QParams,
    QuantizerRole,
    Recipe,
    split,
)


@checked
@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each 1 x 128 strip of activations and gradients and each 128 x 128 tile of weights.

    DeepSeek-V3 Technical Report (2024), section 3.3. A dim of 1 is strips, of 2 tiles; no GEMM takes two of tiles.
    """

    use_f32_scales: bool = False
    fp8_format: ElementPair = ElementPair.E4M3
    x_block_scaling_dim: Literal[1, 2] = 1
    w_block_scaling_dim: Literal[1, 2] = 2
    grad_block_scaling_dim: Literal[1, 2] = 1
    fp8_gemm_fprop: MMParams = field(default_factory=split)
    fp8_gemm_dgrad: MMParams = field(default_factory=split)
    fp8_gemm_wgrad: MMParams = field(default_factory=split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    amax_epsilon: NonNegativeFloat = 0.0
    kinds = frozenset({"float8_block_scaling"})
    pairs = (
        ("FP8 1x128 by 128x128", Format(block=128, scale_rule="pow2"), Format(block=128, tile=True, scale_rule="pow2")),
        ("FP8 1x128 by 1x128", Format(block=128, scale_rule="pow2"), Format(block=128, scale_rule="pow2")),
    )

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        dims = {
            "x_block_scaling_dim": self.x_block_scaling_dim,
            "w_block_scaling_dim": self.w_block_scaling_dim,
            "grad_block_scaling_dim": self.grad_block_scaling_dim,
        }
        if list(dims.values()).count(2) > 1:
            raise ValueError(f"two of {dims} are 2: each pair of them meets in a GEMM, which takes one tiled operand")
        if not all(
            gemm.use_split_accumulator for gemm in (self.fp8_gemm_fprop, self.fp8_gemm_dgrad, self.fp8_gemm_wgrad)
        ):
            raise ValueError("block scaling applies its scales in fp32: use_split_accumulator must be True")

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=not self.use_f32_scales, amax_epsilon=self.amax_epsilon)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type in GRADIENTS:
            dim = self.grad_block_scaling_dim
        else:
            dim = self.w_block_scaling_dim if role.tensor_type == "weight" else self.x_block_scaling_dim
        rule = "fp32" if self.use_f32_scales else "pow2"
        element = self.fp8_format.element(role)
        return Quantizer(Format(element, 128, dim == 2, scale_rule=rule, amax_epsilon=self.amax_epsilon))
