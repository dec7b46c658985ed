"""Recipes whose scales follow from the tensor itself: one a tensor, one a row, or one a block of 128, 32 or 16."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from minifloat.arguments import NonNegativeFloat, checked
from minifloat.formats import Format, Rounding, define_element
from minifloat.formats.elements import SmallFloat
from minifloat.quantizer import ColumnwiseSource, Quantizer
from minifloat.recipe.base import (
    GRADIENTS,
    BackwardOverride,
    ElementPair,
    Margin,
    MMParams,
    QParams,
    QuantizerRole,
    Recipe,
    Selection,
    fast,
    split,
)


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
    fp8_quant_fwd_inp = fp8_quant_fwd_weight = fp8_quant_bwd_grad = Float8CurrentScaling.fp8_quant_fwd_inp

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        rule = "pow2" if self.use_power_2_scales else "fp32"
        return Quantizer(Format("e4m3", scale_rule=rule, amax_epsilon=self.amax_epsilon, amax_per_row=True))


# ---- blocks of 128 ----


def source_of(role: QuantizerRole, chosen: ColumnwiseSource) -> ColumnwiseSource:
    """The source of a columnwise operand: weights are where they are cast, in both orientations."""
    return "original" if role.tensor_type == "weight" else chosen


@checked
@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with a scale for each 1 x 128 strip of activations and gradients and each 128 x 128 tile of weights.

    DeepSeek-V3 Technical Report (2024), section 3.3. Dims of 1 mean strips, of 2 tiles; no GEMM takes two tiled
    operands.

    Args:
        columnwise_source: ``"rowwise_dequantized"`` casts wgrad's operands of X and dY from the dequantized rowwise
            codes. With ``ep_group``, ranks then send codes instead of values.
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
    columnwise_source: ColumnwiseSource = "original"
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
        row = Format(element, 128, dim == 2, scale_rule=rule, amax_epsilon=self.amax_epsilon)
        return Quantizer(row, columnwise_source=source_of(role, self.columnwise_source))


# ---- blocks of 32, and a 4-bit one by FP8 ----


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
        columnwise_source: as in :class:`Float8BlockScaling`.
    """

    margin: Margin = 0
    fp8_format: ElementPair = ElementPair.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    columnwise_source: ColumnwiseSource = "original"
    kinds = frozenset({"mxfp8"})
    pairs = (("MXFP8", _E4M3, _E4M3),)

    def __post_init__(self) -> None:
        self._check(self.fp8_format, margin="scales of blocks have no margin")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        tile = self.enable_2d_quantization and role.tensor_type == "weight"
        row = Format(self.fp8_format.element(role), 32, tile, scale_rule="e8m0")
        return Quantizer(row, columnwise_source=source_of(role, self.columnwise_source))


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
        enable_rht: the wgrad operands take NVFP4's Hadamard transform, whose signs are fixed.
    """

    backward_override: BackwardOverride = None
    enable_2d_quantization: bool = False
    enable_rht: bool = False
    pairs = (("MXFP4", _E2M1, _E2M1),)

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        if role.tensor_type == "weight":
            return Quantizer(replace(_E2M1, tile=self.enable_2d_quantization))
        return Quantizer(_E2M1, replace(_E2M1, transform="hadamard16") if self.enable_rht else None)


@checked
@dataclass(frozen=True)
class W4A8BlockScaling(Recipe):
    """Weights in MXFP4, activations and gradients in E4M3 with a power-of-two scale for each 1 x 128 strip.

    FP8 tensor cores of sm_90 multiply them: an MXFP4 weight becomes an FP8 weight with tile scales, without rounding.

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


# ---- blocks of 16 below an amax ----


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
        columnwise_source: as in :class:`Float8BlockScaling`.
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
    columnwise_source: ColumnwiseSource = "original"
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
        rotated = Format("e2m1", 16, scale_rule="two_level", transform="hadamard16", rounding=row.rounding)
        return Quantizer(row, None if self.disable_rht else rotated, columnwise_source=self.columnwise_source)

    def _format(self, tensors: str, tile: bool = False, amax_per_row: bool = False) -> Format:
        if self.nvfp4_4over6 not in (tensors, "all"):
            return Format("e2m1", 16, tile, scale_rule="two_level", amax_per_row=amax_per_row)
        rounding: Rounding = "four_over_six_mae" if self.nvfp4_4over6_err_mode == "MAE" else "four_over_six_mse"
        largest = 256.0 if self.nvfp4_4over6_e4m3_use_256 in (tensors, "all") else 448.0
        return Format(
            "e2m1", 16, tile, "two_level", rounding=rounding, block_scale_max=largest, amax_per_row=amax_per_row
        )
