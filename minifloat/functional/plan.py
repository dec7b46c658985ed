"""How a recipe quantizes the tensors of one linear layer."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling, QuantizerRole, Recipe
from minifloat.recipes.base import BackwardOverride

FORWARD_SLOTS = ("input", "weight", "output")
BACKWARD_SLOTS = ("grad_output", "grad_input")


@dataclass(frozen=True)
class LinearConfig:
    """One linear layer under one recipe.

    Args:
        input, weight, output, grad_output, grad_input: how each tensor is quantized.
        delayed: the recipe of the amax histories, where some tensor has one.
        fast_fprop, fast_dgrad, fast_wgrad: accumulate without moving partial sums to fp32 registers (Hopper).
        backward_override: None, or what the unquantized backward computes on.
        save_original_input: keep the input as it came for backward, and quantize it again there.
    """

    input: Quantizer
    weight: Quantizer
    output: Quantizer
    grad_output: Quantizer
    grad_input: Quantizer
    delayed: DelayedScaling | None
    fast_fprop: bool
    fast_dgrad: bool
    fast_wgrad: bool
    backward_override: BackwardOverride
    save_original_input: bool


def linear_config(recipe: Recipe, name: str = "", save_original_input: bool = False) -> LinearConfig:
    """That of a layer called ``name``. A custom recipe's factory is called here, once a role.

    Raises:
        ValueError: a custom recipe asks for delayed scaling with different parameters in one layer.
    """
    quantizers: dict[str, Quantizer] = {}
    delayed: DelayedScaling | None = None
    for kind in FORWARD_SLOTS + BACKWARD_SLOTS:
        role = QuantizerRole("linear", kind, name)
        quantizer, wanted = recipe.resolve(role)
        quantizers[kind] = quantizer
        if wanted is not None and delayed is not None and wanted != delayed:
            raise ValueError(
                f"layer {name or 'linear'!r}: its tensors ask for delayed scaling with different parameters, "
                f"{delayed} and {wanted}; they share one history, so they must agree"
            )
        delayed = wanted or delayed
    return LinearConfig(
        **quantizers,
        delayed=delayed,
        fast_fprop=not recipe.fp8_gemm_fprop.use_split_accumulator,
        fast_dgrad=not recipe.fp8_gemm_dgrad.use_split_accumulator,
        fast_wgrad=not recipe.fp8_gemm_wgrad.use_split_accumulator,
        backward_override=recipe.backward_override,
        save_original_input=save_original_input,
    )
