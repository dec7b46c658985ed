"""Recipes that layers are tested with: the five named ones, and what the tests of linears and of fused modules add."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minifloat.formats import Format
from minifloat.functional.quantize import linear_config
from minifloat.quantizer import Quantizer
from minifloat.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
    Recipe,
    W4A8BlockScaling,
    named,
)
from minifloat.recipe import ElementPair as Elements


def named_recipes(amax_history_len: int) -> dict[str, Recipe]:
    """The five recipes that have names in Transformer Engine, by name."""
    delayed = DelayedScaling(amax_history_len=amax_history_len)
    return {"delayed": delayed} | {name: named(name) for name in ("current", "block", "mxfp8", "nvfp4")}


NAMED = named_recipes(amax_history_len=3)
LINEAR_NAMED = named_recipes(amax_history_len=4)
DELAYED = LINEAR_NAMED["delayed"]


def for_each(recipes: dict[str, Recipe]) -> pytest.MarkDecorator:
    """Parametrises a test over recipes."""
    return pytest.mark.parametrize("recipe", recipes.values(), ids=recipes.keys())


def batch_scales(recipe: Recipe) -> tuple[float, ...]:
    """Sizes of the batches of a test: delayed scaling needs some to have scales of its own."""
    return (1.0, 4.0, 0.25) if isinstance(recipe, DelayedScaling) or "delayed" in repr(recipe) else (1.0,)


def stochastic(recipe: Recipe) -> bool:
    """Gradients round at random."""
    return linear_config(recipe).grad_output.row_format.rounding == "stochastic"


STRIP = Format(block=128, scale_rule="pow2")
MX = Format(block=32, scale_rule="e8m0")
NV = Format("e2m1", 16, scale_rule="two_level")


def quantized_forward(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward, high precision backward."""
    if role.tensor_type in ("input", "weight"):
        return Quantizer.hybrid(rowwise_quantizer=Quantizer(MX), columnwise_quantizer=Quantizer.identity())
    return Quantizer.identity()


def quantized_backward(role: QuantizerRole) -> Quantizer:
    """High precision forward, 128-blocks backward."""
    if role.tensor_type in ("input", "weight"):
        return Quantizer.hybrid(rowwise_quantizer=Quantizer.identity(), columnwise_quantizer=Quantizer(STRIP))
    return Quantizer(STRIP)


def mxfp8_then_nvfp4(role: QuantizerRole) -> Quantizer:
    """MXFP8 forward, NVFP4 backward, the columnwise operands cast from what the rowwise ones stand for."""
    if role.tensor_type in ("input", "weight"):
        return Quantizer.hybrid(
            rowwise_quantizer=Quantizer(MX), columnwise_quantizer=Quantizer(NV), columnwise_source="rowwise_dequantized"
        )
    return Quantizer(NV)


def weight_stays(role: QuantizerRole) -> Quantizer:
    """The weight in high precision, the rest per tensor."""
    return Quantizer.identity() if role.tensor_type == "weight" else Quantizer(Format("e4m3"))


def all_stay(role: QuantizerRole) -> Quantizer:
    """Everything in high precision."""
    return Quantizer.identity()


def delayed_weight(role: QuantizerRole) -> Quantizer | DelayedScalingRequest:
    """Delayed scaling of the weight alone, beside NVFP4 inputs and MXFP8 gradients."""
    if role.tensor_type == "weight":
        return DelayedScalingRequest(amax_history_len=4)
    return Quantizer(NV if role.tensor_type == "input" else MX)


LINEAR_RECIPES: dict[str, Recipe] = {
    **LINEAR_NAMED,
    "delayed margin e4m3": DelayedScaling(
        margin=2, fp8_format=Elements.E4M3, amax_history_len=3, amax_compute_algo="most_recent"
    ),
    "current pow2": Float8CurrentScaling(use_power_2_scales=True),
    "current e4m3": Float8CurrentScaling(fp8_format=Elements.E4M3, amax_epsilon=1e-3),
    "block f32": Float8BlockScaling(use_f32_scales=True),
    "block f32 hybrid": Float8BlockScaling(use_f32_scales=True, fp8_format=Elements.HYBRID),
    "block x 2d": Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "block dy 2d": Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
    "block 1d": Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8 2d hybrid": MXFP8BlockScaling(enable_2d_quantization=True, fp8_format=Elements.HYBRID),
    "nvfp4 no rht": NVFP4BlockScaling(disable_rht=True),
    "nvfp4 nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 1d": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4 plain": NVFP4BlockScaling(True, True, True),
    "nvfp4 4over6 weights": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "nvfp4 4over6 all": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all", nvfp4_4over6_err_mode="MSE"),
    "nvfp4 4over6 448": NVFP4BlockScaling(True, True, nvfp4_4over6="activations", nvfp4_4over6_e4m3_use_256="none"),
    "nvfp4 rows": NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
    "nvfp4 rows 4over6": NVFP4BlockScaling(True, True, row_scaled_activation=True, nvfp4_4over6="activations"),
    "rowwise": named("rowwise"),
    "rowwise pow2": Float8RowwiseScaling(use_power_2_scales=True),
    "mxfp4": named("mxfp4"),
    "mxfp4 2d": MXFP4BlockScaling(enable_2d_quantization=True),
    "mxfp6": named("mxfp6"),
    "w4a8": named("w4a8"),
    "w4a8 2d": W4A8BlockScaling(enable_2d_quantization=True),
    "mxfp6 e3m2": MXFP6BlockScaling("e3m2"),
    "custom quantized forward": CustomRecipe(quantized_forward),
    "custom quantized backward": CustomRecipe(quantized_backward),
    "custom mxfp8 then nvfp4": CustomRecipe(mxfp8_then_nvfp4),
    "custom weight stays": CustomRecipe(weight_stays),
    "custom all stay": CustomRecipe(all_stay),
    "custom delayed weight": CustomRecipe(delayed_weight),
}
SOME_LINEAR = LINEAR_NAMED | {
    name: LINEAR_RECIPES[name]
    for name in LINEAR_RECIPES
    if name in ("rowwise", "block 1d", "nvfp4 rows 4over6", "mxfp4", "mxfp6", "w4a8") or name.startswith("custom")
}
"""One for each way that operands take; what other options change is the casts' own business."""
STATELESS_LINEAR = {name: recipe for name, recipe in LINEAR_RECIPES.items() if linear_config(recipe).delayed is None}
SOME_STATELESS = {name: recipe for name, recipe in SOME_LINEAR.items() if name in STATELESS_LINEAR}


FUSED_RECIPES: dict[str, Recipe] = NAMED | {
    "delayed most recent": DelayedScaling(amax_history_len=2, margin=1, amax_compute_algo="most_recent"),
    "nvfp4 nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "mxfp8 dequantized": replace(named("mxfp8"), backward_override="dequantized"),  # type: ignore[type-var]
    "current high precision": replace(named("current"), backward_override="high_precision"),  # type: ignore[type-var]
    "nvfp4 high precision": replace(named("nvfp4"), backward_override="high_precision"),  # type: ignore[type-var]
    "hybrid": CustomRecipe(mxfp8_then_nvfp4),
    "hybrid delayed weight": CustomRecipe(delayed_weight),
}
STATELESS_FUSED = {name: recipe for name, recipe in FUSED_RECIPES.items() if "delayed" not in name}
