"""The libraries beside us, where they are installed: torchao and Transformer Engine.

Neither is a dependency. Where one is missing its contenders stay in the report as not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from minifloat.tools.bench.registry import UnavailableError

TE_RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}


def _import(name: str, device: str) -> Any:
    try:
        found = importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(str(error)) from error
    if device != "cuda":
        raise UnavailableError(f"{name.partition('.')[0]} needs a CUDA device")
    return found


def torchao_converted(make: Callable[[], nn.Module], recipe: str, device: str, fsdp_codes: bool = False) -> nn.Module:
    """The linears of a module as torchao's FP8 linears; ``fsdp_codes``: FSDP2 gathers their weights in FP8.

    Raises:
        UnavailableError: torchao is not installed, or there is no GPU.
    """
    float8 = _import("torchao.float8", device)
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=fsdp_codes)
    converted: nn.Module = float8.convert_to_float8_training(make(), config=config)
    return converted


def fsdp_scales(model: nn.Module) -> None:
    """torchao's scales of all weights that FSDP2 will gather in FP8, after an optimizer step."""
    importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


def transformer_engine(kind: str, recipe: str | None, device: str, *sizes: int, **options: Any) -> UnderRecipe:
    """Transformer Engine's module of that name in FP8, or in bf16 without a recipe; its ``inner`` holds the parameters.

    Raises:
        UnavailableError: it is not installed, or there is no GPU.
    """
    te = _import("transformer_engine.pytorch", device)
    return UnderRecipe(te, getattr(te, kind)(*sizes, **options), recipe)


class UnderRecipe(nn.Module):
    """A module that runs under Transformer Engine's autocast, which ``autocast()`` gives anew."""

    def __init__(self, te: Any, inner: nn.Module, recipe: str | None) -> None:
        super().__init__()
        recipes = importlib.import_module("transformer_engine.common.recipe")
        chosen = None if recipe is None else getattr(recipes, TE_RECIPES[recipe])()
        self.inner = inner
        enabled = chosen is not None
        self.autocast: Callable[[], Any] = (
            partial(te.autocast, enabled=enabled, recipe=chosen)
            if hasattr(te, "autocast")
            else partial(te.fp8_autocast, enabled=enabled, fp8_recipe=chosen)  # its name in older versions
        )

    def forward(self, x: Tensor) -> Any:
        with self.autocast():
            return self.inner(x)
