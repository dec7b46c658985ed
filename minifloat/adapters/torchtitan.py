"""torchtitan: an override that builds the linears of its models as quantized ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.config.override import derive, override
from torchtitan.models.common import linear as titan
from torchtitan.protocols.module import Module

from minifloat.nn.linear import Linear


class QuantizedLinear(Linear, Module):
    """A :class:`minifloat.Linear` that torchtitan builds and initializes.

    Raises:
        ValueError: tensor parallelism: its weights are DTensors, which torchtitan redistributes by itself.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.Linear.Config):
        """Adds the short name of a recipe to the config of torchtitan's linear."""

        recipe: str = "current"

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, config.bias, recipe=config.recipe)

    def parallelize(self, parallel_dims: Any) -> None:
        """Leaves the weight to FSDP2."""
        if parallel_dims.tp_enabled:
            raise ValueError(
                f"{self._label}: torchtitan's tensor parallelism is not supported; set its degree to 1, or build "
                "minifloat.Linear(parallel_mode=...) and minifloat.distributed.parallelize instead"
            )
        super().parallelize(parallel_dims)


@override(
    target=titan.Linear.Config,
    exact=True,
    fqns=["layers.*.attention.*", "layers.*.feed_forward.*", "layers.*.shared_experts.*"],
    description="linears of the layers in FP8 or FP4",
)
def linears(config: titan.Linear.Config, recipe: str = "current") -> QuantizedLinear.Config:
    """Replaces attention's and the MLPs' linears; embedding, routers and the head stay in high precision.

    --override.imports 'minifloat.adapters.torchtitan.linears={"recipe": "mxfp8"}'
    """
    return derive(config, QuantizedLinear.Config, recipe=recipe)
