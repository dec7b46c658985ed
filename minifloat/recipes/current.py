"""FP8 scaled by a tensor's own amaxes: with one scale, or one for each token and each output channel."""

from __future__ import annotations

from dataclasses import dataclass, field

from minifloat.arguments import NonNegativeFloat, checked
from minifloat.formats import Format
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import BackwardOverride, ElementPair, MMParams, QParams, QuantizerRole, Recipe, fast, split


@checked
@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one scale a tensor, from its own amax."""

    use_power_2_scales: bool = False
    fp8_format: ElementPair = ElementPair.HYBRID
    fp8_gemm_fprop: MMParams = field(default_factory=fast)
    fp8_gemm_dgrad: MMParams = field(default_factory=split)
    fp8_gemm_wgrad: MMParams = field(default_factory=split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    amax_epsilon: NonNegativeFloat = 0.0
    kinds = frozenset({"float8_current_scaling", "float8_per_tensor_scaling"})
    pairs = (
        ("FP8 per tensor", Format("e4m3"), Format("e4m3")),
        ("FP8 per tensor, E5M2 gradient", Format("e5m2"), Format("e4m3")),
    )

    def __post_init__(self) -> None:
        self._check(self.fp8_format)

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=self.use_power_2_scales, amax_epsilon=self.amax_epsilon)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        rule = "pow2" if self.use_power_2_scales else "fp32"
        element = self.fp8_format.element(role)
        return Quantizer(Format(element, scale_rule=rule, amax_epsilon=self.amax_epsilon))


@checked
@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """E4M3 with one scale along the whole contracted dim: a row of X or dY, an output channel of W; torchao's rowwise.

    Columnwise operands have one scale a column, so that every GEMM finds its scales outside of the contraction.

    Args:
        use_power_2_scales: scales are rounded down to powers of two.
    """

    use_power_2_scales: bool = False
    fp8_gemm_fprop: MMParams = field(default_factory=fast)
    fp8_gemm_dgrad: MMParams = field(default_factory=split)
    fp8_gemm_wgrad: MMParams = field(default_factory=split)
    backward_override: BackwardOverride = None
    amax_epsilon: NonNegativeFloat = 0.0
    pairs = (("FP8 rowwise", Format(amax_per_row=True), Format(amax_per_row=True)),)

    @property
    def fp8_quant_fwd_inp(self) -> QParams:
        return QParams(power_2_scale=self.use_power_2_scales, amax_epsilon=self.amax_epsilon)

    fp8_quant_fwd_weight = fp8_quant_bwd_grad = fp8_quant_fwd_inp

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        rule = "pow2" if self.use_power_2_scales else "fp32"
        return Quantizer(Format("e4m3", scale_rule=rule, amax_epsilon=self.amax_epsilon, amax_per_row=True))
