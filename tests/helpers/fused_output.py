"""Outputs of norms and activations, cast in one call; recipes, scales and random bits with which they are cast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat import recipe
from minifloat.functional.norm_activation import FusedOutput, act_value, dact_value, norm_value, reads_fp32
from minifloat.quantizer import Quantizer
from minifloat.recipe import QuantizerRole

RECIPE_NAMES = [*recipe.NAMES, "row_scaled"]
SCALE = 56.0
SEED_AND_OFFSET = torch.tensor([1, 2])


def _cast(value: Callable[..., FusedOutput], inputs: int, *args: Any, return_value: bool = False) -> FusedOutput:
    """``value`` of so many inputs, and its operands, as a layer without other ranks calls it.

    The inputs are followed by a quantizer, by amaxes (``(scale,)`` for delayed scaling), and by seed and offset.
    """
    quantizer: Quantizer = args[inputs]
    amaxes, rng = (*args[inputs + 1 :], None, None)[:2]
    scale = amaxes[0] if amaxes is not None and reads_fp32(quantizer) else None
    fused = all(amax is None for amax in amaxes or ())
    output = value(*args[: inputs + 1], scale=scale, fused=fused, return_value=return_value)
    return output._replace(quantized=output.cast(quantizer, amaxes, rng))


norm_quantize = partial(_cast, norm_value, 4)
act_quantize = partial(_cast, act_value, 2)
dact_quantize = partial(_cast, dact_value, 3)


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
