"""Giving modules what a recipe needs before their first step."""

from __future__ import annotations

from torch import nn

from minifloat.arguments import checked
from minifloat.autocast import first_equal
from minifloat.nn.linear_state import LinearState
from minifloat.recipe import RecipeLike, as_recipe


@checked
def prepare(model: nn.Module, recipe: RecipeLike) -> nn.Module:
    """Makes the configurations, and for delayed scaling the buffers, that a first ``autocast(recipe=recipe)`` would.

    Needed where first use comes too late: before ``torch.compile`` of a model under delayed scaling, before an
    optimizer or a checkpoint looks at the buffers. Modules with a recipe of their own have theirs already. Pass the
    very recipe object that ``autocast`` gets, so that a custom recipe's factory is not called again.

    Returns:
        ``model``.
    """
    chosen = first_equal(as_recipe(recipe))  # the object that autocast gives
    for module in model.modules():
        if isinstance(module, LinearState) and module.recipe is None:
            module._config(chosen)
    return model
