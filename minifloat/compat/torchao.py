"""Names of torchao's FP8 training: ``from minifloat.compat.torchao import convert_to_float8_training``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minifloat.arguments import checked
from minifloat.compat import find
from minifloat.convert import convert
from minifloat.convert.select import is_sharded_by_fsdp
from minifloat.distributed import sharded_weights
from minifloat.recipe import Float8CurrentScaling, Float8RowwiseScaling, MMParams, Recipe

WAYS_OUT = {
    "CastConfig": "use a minifloat recipe, as minifloat.CustomRecipe",
    "ScalingType": "use a minifloat recipe, as minifloat.DelayedScaling",
    "ScalingGranularity": "use a minifloat recipe, as minifloat.Float8RowwiseScaling",
    "DelayedScalingConfig": "use minifloat.DelayedScaling",
    "sync_float8_amax_and_scale_history": "leave it out, minifloat.autocast updates scales",
    "linear_requires_sync": "leave it out, minifloat.autocast updates scales",
    "Float8Linear": "use minifloat.Linear",
    "quantize_": "use minifloat.convert(quantize_weights=True)",
}
"""Names that minifloat has nothing for, and what to do."""


@checked
@dataclass(frozen=True)
class Float8GemmConfig:
    """Accumulation of a product; ``use_fast_accum`` is the negation of ``MMParams.use_split_accumulator``."""

    use_fast_accum: bool = False


@checked
@dataclass(frozen=True)
class Float8LinearConfig:
    """Options of a conversion, from which its recipe follows.

    ``enable_fsdp_float8_all_gather``: :func:`minifloat.distributed.fully_shard` does it; the first forward after
    PyTorch's, which does not, warns.
    ``pad_inner_dim``, ``emulate`` and ``force_recompute_fp8_weight_in_bwd`` have no effect.
    """

    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False
    rowwise: bool = False

    @staticmethod
    def from_recipe_name(recipe_name: Any) -> Float8LinearConfig:
        """Makes the options of ``"tensorwise"`` or ``"rowwise"``.

        Raises:
            ValueError: another name.
        """
        name = getattr(recipe_name, "value", recipe_name)
        if name not in ("tensorwise", "rowwise"):
            raise ValueError(
                f"Float8LinearConfig: recipe_name is {name!r}; 'tensorwise' or 'rowwise' is needed, or give "
                'minifloat.convert a recipe: backward_override="high_precision" is what comes nearest to gw_hp'
            )
        return Float8LinearConfig(rowwise=name == "rowwise", round_scales_to_power_of_2=name == "rowwise")

    @property
    def recipe(self) -> Recipe:
        """The recipe of these options."""
        gemms = self.gemm_config_output, self.gemm_config_grad_input, self.gemm_config_grad_weight
        fprop, dgrad, wgrad = (MMParams(use_split_accumulator=not gemm.use_fast_accum) for gemm in gemms)
        kind = Float8RowwiseScaling if self.rowwise else Float8CurrentScaling
        return kind(
            use_power_2_scales=self.round_scales_to_power_of_2,
            fp8_gemm_fprop=fprop, fp8_gemm_dgrad=dgrad, fp8_gemm_wgrad=wgrad,
        )  # fmt: skip


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:
    """Calls :func:`minifloat.convert` and returns the module; without a filter all linears are converted."""
    config = config or Float8LinearConfig()
    convert(module, config.recipe, module_filter_fn or (lambda linear, name: True))
    if config.enable_fsdp_float8_all_gather:
        module.register_forward_pre_hook(_check_gathers)
    return module


def _check_gathers(module: nn.Module, args: Any) -> None:
    """Warns at the first forward where PyTorch's own ``fully_shard`` gathers weights, in high precision."""
    if torch.compiler.is_compiling():
        return
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _check_gathers:
            del module._forward_pre_hooks[key]
    if any(is_sharded_by_fsdp(each) for each in module.modules()) and not sharded_weights(module):
        warnings.warn(
            "enable_fsdp_float8_all_gather=True, but PyTorch's own fully_shard gathers the weights in high precision; "
            "shard with the other one: from minifloat.distributed import fully_shard",
            stacklevel=2,
        )


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Does nothing: :func:`minifloat.distributed.fully_shard` finds the scales of all shards at once."""


__all__ = [
    "Float8GemmConfig", "Float8LinearConfig", "convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp",
]  # fmt: skip

if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        return find(name, __name__)
