"""Variants that a study can run beside the plain recipes: ``RECIPE+OPTION+...``, such as ``nvfp4+no-rht``.

=================  =====================================================================================
``no-rht``         NVFP4 without the Hadamard transform of the wgrad operands
``no-sr``          NVFP4 with gradients rounded to nearest
``no-2d``          NVFP4 with weights in strips
``4over6``         NVFP4 whose blocks are scaled to 4 or 6: of weights, with ``no-rht`` of activations too
``2d``             MXFP4 and W4A8 with weights in tiles
``last-bf16``      the last quarter of the layers in bf16
``tail15``         the last 15 % of the layers in bf16, to the nearest number, at least one
``parameters``     weights kept as codes, under fp32 masters in the optimizer
=================  =====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from minifloat import quantized_model_init
from minifloat.optim import MasterWeights
from minifloat.recipe import NAMES, Recipe, named
from minifloat.recipe.scaling import MXFP4BlockScaling, NVFP4BlockScaling, W4A8BlockScaling
from minifloat.tensor import QuantizedTensor
from minifloat.tools.train.model import ModelConfig, Transformer
from minifloat.tools.train.run import TrainConfig
from minifloat.tools.train.step import make_optimizer, parameter_groups

NVFP4 = "no-rht", "no-sr", "no-2d", "4over6"
TAILS = {"last-bf16": 0.25, "tail15": 0.15}  # which share of the layers is in bf16
OPTIONS = (*NVFP4, "2d", *TAILS, "parameters")


@dataclass(frozen=True)
class Variant:
    """A recipe and what is done beside it."""

    recipe: Recipe
    options: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Raises ValueError for a name that is none."""
        base, *options = name.split("+")
        if base not in NAMES:
            raise ValueError(f"--recipes: there is no recipe {base!r}; choose from {', '.join(NAMES)}")
        if unknown := [option for option in options if option not in OPTIONS]:
            raise ValueError(f"--recipes: {name} has no option {unknown[0]!r}; choose from {', '.join(OPTIONS)}")
        recipe = named(base)
        if of_nvfp4 := [option for option in options if option in NVFP4]:
            if not isinstance(recipe, NVFP4BlockScaling):
                raise ValueError(f"--recipes: {name}: {of_nvfp4[0]} is an option of nvfp4; leave it out")
            rht, sr, tiles, search = (option in options for option in NVFP4)
            recipe = replace(
                recipe, disable_rht=rht, disable_stochastic_rounding=sr, disable_2d_quantization=tiles,
                nvfp4_4over6=("all" if rht else "weights") if search else "none",
            )  # fmt: skip
        if "2d" in options:
            if not isinstance(recipe, MXFP4BlockScaling | W4A8BlockScaling):
                raise ValueError(f"--recipes: {name}: 2d is an option of mxfp4 and w4a8; leave it out")
            recipe = replace(recipe, enable_2d_quantization=True)
        if len(set(options)) < len(options):
            raise ValueError(f"--recipes: {name}: name each option once")
        return cls(recipe, frozenset(options))

    def quantized_layers(self, sizes: ModelConfig) -> int:
        """Number of layers of the model that compute in the recipe."""
        share = max((TAILS.get(option, 0.0) for option in self.options), default=0.0)
        return sizes.layers - (max(1, round(share * sizes.layers)) if share else 0)

    @property
    def can_stop(self) -> bool:
        """Checkpoints hold what its optimizer has; otherwise a run that was stopped starts anew."""
        return "parameters" not in self.options

    def model(self, sizes: ModelConfig, seed: int) -> nn.Module:
        """The model, whose initial values are those of a plain one, rounded where weights are codes."""
        model = sizes.make(self.recipe, seed)
        if "parameters" in self.options:
            with quantized_model_init(recipe=self.recipe):
                kept = Transformer(sizes, self.recipe, seed=seed)
            with torch.no_grad():
                for ours, plain in zip(kept.parameters(), model.parameters(), strict=True):
                    ours.copy_(plain)
                    if isinstance(ours, QuantizedTensor):
                        ours.set_high_precision_init_val(plain)
            model = kept
        blocks = model.get_submodule("blocks")
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks[self.quantized_layers(sizes) :]:
            for module in block.modules():
                if getattr(module, "recipe", None) is not None:
                    module.recipe = "none"  # type: ignore[assignment]
        return model

    def optimizer(self, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        """Steps what :meth:`model` gave."""
        groups, rate, betas = parameter_groups(model, config), config.learning_rate, (0.9, 0.95)
        if "parameters" in self.options:
            return MasterWeights(groups, torch.optim.AdamW, lr=rate, betas=betas, fused=True)
        return make_optimizer(model, config)
