"""What recipes make of one layer: how its tensors are quantized under each, and the specs that followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from minifloat.functional.linear_config import LinearConfig, Options
from minifloat.functional.spec import Spec
from minifloat.recipe import CustomRecipe, Recipe
from minifloat.recipe.base import equal_in_graph

_MOST_CUSTOM = 8  # a program that makes a recipe for each step must not fill the memory


class Configured(NamedTuple):
    """A recipe, how it quantizes a layer's tensors, and the specs that follow; read at once: threads take turns."""

    recipe: Recipe
    config: LinearConfig
    specs: dict[Options, Spec]


class LinearConfigs:
    """The configs of a layer, each asked of its recipe at the first use, and kept.

    Attributes:
        latest: what was asked for last.
        custom: those of the latest few custom recipes, which may take turns: a factory is asked once.
    """

    def __init__(self) -> None:
        self.latest: Configured | None = None
        self.custom: list[tuple[Recipe, LinearConfig]] = []

    def under(self, recipe: Recipe, make: Callable[[Recipe], LinearConfig]) -> Configured:
        """That of ``recipe``; ``make``: asks it."""
        if torch.compiler.is_compiling():
            return Configured(recipe, self._in_graph(recipe, make), {})
        latest = self.latest
        if latest is None or latest.recipe is not recipe:
            config = self._of_custom(recipe, make) if isinstance(recipe, CustomRecipe) else make(recipe)
            latest = self.latest = Configured(recipe, config, {})
        return latest

    def _in_graph(self, recipe: Recipe, make: Callable[[Recipe], LinearConfig]) -> LinearConfig:
        """The same in traced code: an equal recipe is the same one, or a loop that makes its recipe would recompile.

        To keep what is found changes the layer, for which the graph is compiled once more. So it is kept where it is
        asked for later: a factory is called once, and checkpoints ask how histories are reduced. Of factories that are
        made anew the first is kept, and the others are traced: their code and what it reads are guarded.
        """
        latest = self.latest
        if latest is not None and equal_in_graph(latest.recipe, recipe):
            return latest.config
        custom = isinstance(recipe, CustomRecipe)
        for known, config in self.custom if custom else ():
            if equal_in_graph(known, recipe):
                return config
        config = make(recipe)
        if custom and not self.custom:
            self.custom = [(recipe, config)]
        if config.delayed is not None:
            self.latest = Configured(recipe, config, {})
        return config

    def _of_custom(self, recipe: Recipe, make: Callable[[Recipe], LinearConfig]) -> LinearConfig:
        for known, config in self.custom:
            if known is recipe:
                return config
        config = make(recipe)
        self.custom = [*self.custom[1 - _MOST_CUSTOM :], (recipe, config)]
        return config

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no specs: what is prepared in them is the original's."""
        return self.__dict__ | {"latest": self.latest and self.latest._replace(specs={})}
