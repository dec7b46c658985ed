"""Recipes, scales and random bits with which norms and activations are followed by a cast in one operation."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat import recipe
from minifloat.quantizer import Quantizer
from minifloat.recipe import QuantizerRole

RECIPE_NAMES = [*recipe.NAMES, "row_scaled"]
SCALE = 56.0
SEED_AND_OFFSET = torch.tensor([1, 2])


def quantizers(name: str) -> list[Quantizer]:
    """Those of a layer's input and of its output's gradient."""
    chosen = recipe.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
    of = chosen if name == "row_scaled" else recipe.named(name)
    return [of.quantizer(QuantizerRole("linear", role)) for role in ("input", "grad_output")]


def amaxes_for(quantizer: Quantizer, value: Tensor) -> tuple[Tensor | None, ...]:
    """The scale for delayed scaling, else the value's own."""
    scale = torch.tensor([SCALE], device=value.device)
    return tuple(
        scale if fmt.scale_rule == "given" else amax
        for (fmt, _), amax in zip(quantizer.casts, quantizer.amax(value), strict=True)
    )
