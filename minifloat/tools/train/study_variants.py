"""Variants that a study can run beside the plain recipes: ``RECIPE+OPTION+...``, such as ``nvfp4+no-rht``.

=================  =====================================================================================
``no-rht``         NVFP4 without the Hadamard transform of the wgrad operands
``rht``            MXFP4 with it
``no-sr``          NVFP4 with gradients rounded to nearest
``no-2d``          NVFP4 with weights in strips
``2d``             MXFP4, MXFP8 and W4A8 with weights in tiles
``4over6``         NVFP4 whose blocks are scaled to 4 or 6: of weights, with ``no-rht`` of activations too
``e4m3``           delayed and current with gradients in E4M3
``split``          current and rowwise with fprop accumulated in fp32, as dgrad and wgrad are
``f32-scales``     block with scales that are no powers of two
``codes``          block and MXFP8 whose wgrad operands are cast from the codes of the others
``forward``        backward in bf16
``last-bf16``      the last quarter of the layers in bf16
``tail15``         the last 15 % of the layers in bf16, to the nearest number, at least one
``finish10``       the last 10 % of the steps in bf16
``finish20``       the last 20 % of the steps in bf16
``parameters``     weights kept as codes, under fp32 masters in the optimizer
``moments8``       moments of the optimizer in FP8, those of torchao's ``AdamWFp8``
=================  =====================================================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from minifloat import quantized_model_init
from minifloat.optim import MasterWeights
from minifloat.recipe import NAMES, Recipe, named
from minifloat.recipe.base import DelayedScaling, ElementPair, split
from minifloat.recipe.scaling import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    W4A8BlockScaling,
)
from minifloat.tensor import QuantizedTensor
from minifloat.tools.train.model import ModelConfig, Transformer
from minifloat.tools.train.run import TrainConfig
from minifloat.tools.train.step import BETAS, compute_unquantized, parameter_groups

_TENSOR = DelayedScaling, Float8CurrentScaling
_BLOCKS = Float8BlockScaling, MXFP8BlockScaling
FIELDS: dict[str, tuple[tuple[type[Recipe], ...], dict[str, Any]]] = {  # recipes that take an option, and what it sets
    "no-rht": ((NVFP4BlockScaling,), {"disable_rht": True}),
    "rht": ((MXFP4BlockScaling,), {"enable_rht": True}),
    "no-sr": ((NVFP4BlockScaling,), {"disable_stochastic_rounding": True}),
    "no-2d": ((NVFP4BlockScaling,), {"disable_2d_quantization": True}),
    "2d": ((MXFP4BlockScaling, MXFP8BlockScaling, W4A8BlockScaling), {"enable_2d_quantization": True}),
    "4over6": ((NVFP4BlockScaling,), {"nvfp4_4over6": "weights"}),
    "e4m3": (_TENSOR, {"fp8_format": ElementPair.E4M3}),
    "split": ((Float8CurrentScaling, Float8RowwiseScaling), {"fp8_gemm_fprop": split()}),
    "f32-scales": ((Float8BlockScaling,), {"use_f32_scales": True}),
    "forward": ((Recipe,), {"backward_override": "high_precision"}),
    "codes": (_BLOCKS, {"columnwise_source": "rowwise_dequantized"}),
}
TAILS = {"last-bf16": 0.25, "tail15": 0.15}  # which share of the layers is in bf16
FINISHES = {"finish10": 0.1, "finish20": 0.2}  # which share of the steps is
OPTIONS = (*FIELDS, *TAILS, *FINISHES, "parameters", "moments8")


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
        changes: dict[str, Any] = {}
        for option in (option for option in FIELDS if option in options):
            taken, fields = FIELDS[option]
            if not isinstance(recipe, taken):
                those = " and ".join(name for name in NAMES if isinstance(named(name), taken))
                raise ValueError(f"--recipes: {name}: {option} is an option of {those}; leave it out")
            changes |= fields
        if {"4over6", "no-rht"} <= set(options):
            changes["nvfp4_4over6"] = "all"  # the search is for what is not rotated
        if "parameters" in options and {*TAILS, *FINISHES} & set(options):
            raise ValueError(f"--recipes: {name}: parameters that are codes stay codes in bf16; leave one of them out")
        recipe = replace(recipe, **changes)  # type: ignore[type-var]  # all recipes are dataclasses
        if len(set(options)) < len(options):
            raise ValueError(f"--recipes: {name}: name each option once")
        return cls(recipe, frozenset(options))

    def quantized_layers(self, sizes: ModelConfig) -> int:
        """Number of layers of the model that compute in the recipe."""
        share = max((TAILS.get(option, 0.0) for option in self.options), default=0.0)
        return sizes.layers - (max(1, round(share * sizes.layers)) if share else 0)

    @property
    def finish(self) -> float:
        """Share of the steps, the last ones, in bf16."""
        return max((FINISHES.get(option, 0.0) for option in self.options), default=0.0)

    @property
    def can_stop(self) -> bool:
        """Whether a run can stop and go on: checkpoints hold what its optimizer has. Otherwise it starts anew."""
        return not {"parameters", "moments8"} & self.options

    @property
    def can_follow_bf16(self) -> bool:
        """Whether a run can go on from a checkpoint of bf16, which has no histories of delayed scaling."""
        return self.can_stop and not isinstance(self.recipe, DelayedScaling)

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold its steps: torchao's optimizer counts them on the host."""
        return "moments8" not in self.options

    def model(self, sizes: ModelConfig, seed: int) -> nn.Module:
        """The model, whose initial values are those of a plain one, rounded where weights are codes."""
        model = sizes.make(self.recipe, seed)
        if "parameters" in self.options:
            with torch.random.fork_rng([]), quantized_model_init(recipe=self.recipe):
                torch.manual_seed(seed)  # delayed scales begin with what layers draw, before the values that they keep
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
            compute_unquantized(block)
        return model

    def optimizer(self, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        """Steps what :meth:`model` gave."""
        chosen: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, fused=True)
        if "moments8" in self.options:
            chosen = importlib.import_module("torchao.optim").AdamWFp8
        options: dict[str, Any] = {"lr": config.learning_rate, "betas": BETAS}
        groups = parameter_groups(model, config)
        return MasterWeights(groups, chosen, **options) if "parameters" in self.options else chosen(groups, **options)
