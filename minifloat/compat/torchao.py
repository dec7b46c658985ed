"""Names of torchao's FP8 training: ``from minifloat.compat.torchao import convert_to_float8_training``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from minifloat.arguments import checked
from minifloat.compat import find
from minifloat.convert import convert
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

    ``enable_fsdp_float8_all_gather``: :func:`minifloat.distributed.fully_shard` does it, PyTorch's does not.
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
    convert(module, (config or Float8LinearConfig()).recipe, module_filter_fn or (lambda linear, name: True))
    return module


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Does nothing: :func:`minifloat.distributed.fully_shard` finds the scales of all shards at once."""


__all__ = [
    "Float8GemmConfig", "Float8LinearConfig", "convert_to_float8_training", "precompute_float8_dynamic_scale_for_fsdp",
]  # fmt: skip

if not TYPE_CHECKING:  # which would take every name for one that exists

    def __getattr__(name: str) -> Any:
        return find(name, __name__)
