"""Recipes, frozen values: which format each tensor of a layer takes, and how its GEMMs accumulate.

Names, fields and defaults are those of Transformer Engine; what it reads from environment variables are arguments here.
A recipe answers one question, :meth:`Recipe.quantizer`: how is the tensor of this role quantized?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from minifloat import backends
from minifloat.arguments import Accepts
from minifloat.recipe.base import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    ElementPair,
    MMParams,
    QParams,
    QuantizerRole,
    Recipe,
)
from minifloat.recipe.scaling import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    W4A8BlockScaling,
)

Format = ElementPair  # as Transformer Engine spells it

_NAMED: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "mxfp4": MXFP4BlockScaling(),
    "mxfp6": MXFP6BlockScaling(),
    "rowwise": Float8RowwiseScaling(),
    "w4a8": W4A8BlockScaling(),
}
NAMES = tuple(_NAMED)
backends.PAIRS.extend(pair for each in _NAMED.values() for pair in each.pairs)
RecipeLike = Annotated[Recipe | str, Accepts(f"a minifloat recipe or one of the names {', '.join(NAMES)}")]
"""Recipe, or its short name."""
OwnRecipe = Recipe | Literal["none"] | None
"""Recipe of a layer's own: None takes what ``autocast`` gives."""


def named(name: str) -> Recipe:
    """Returns the recipe of this short name with its default options.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in _NAMED:
        raise ValueError(f"no recipe is called {name!r}; there are {', '.join(NAMES)}")
    return _NAMED[name]


def from_dict(values: Mapping[str, Any], callables: Mapping[str, Callable[..., Any]] | None = None) -> Recipe:
    """Reads a recipe from the dict of :meth:`Recipe.to_dict`, from which nothing is imported or run.

    Args:
        callables: the functions that the dict may name, by those names: ``{"factories:by_role": by_role}``.

    Raises:
        ValueError: the dict names no recipe, a field that it does not have, or a function that was not given.
    """
    classes = {cls.__name__: cls for cls in (*map(type, _NAMED.values()), CustomRecipe)}
    if not isinstance(values, Mapping):
        raise ValueError(f"a {type(values).__name__} does not describe a recipe; a dict of Recipe.to_dict() does")
    arguments = dict(values)
    name = arguments.pop("recipe", "")
    cls = classes.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ValueError(f"{name!r} is not a recipe; 'recipe' is one of {', '.join(classes)}")
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(arguments) - known, key=str):
        raise ValueError(
            f"{cls.__name__} has no field {', '.join(map(str, unknown))}; it has {', '.join(sorted(known))}"
        )
    given = {} if callables is None else callables
    try:
        return cls(**{field: _read(field, value, given) for field, value in arguments.items()})
    except (KeyError, TypeError) as error:
        raise ValueError(f"{dict(values)} does not describe a {cls.__name__}: {error!r}") from error


def _read(field: str, value: Any, callables: Mapping[str, Callable[..., Any]]) -> Any:
    if field.endswith("_format") and isinstance(value, str):
        return ElementPair[value]
    if isinstance(value, dict):
        return MMParams(**value)
    if field == "qfactory" and isinstance(value, str) and ":" in value:
        if value not in callables:
            raise ValueError(
                f"{field} is the function {value!r}, and nothing is imported for a dict: give it to "
                f"from_dict(values, callables={{{value!r}: function}})"
            )
        return callables[value]
    return value


def own_recipe(recipe: RecipeLike | None) -> OwnRecipe:
    """Looks up a layer's own recipe, if it is a short name.

    Raises:
        TypeError: it is not one.
        ValueError: an unknown name.
    """
    if recipe is None or recipe == "none":
        return recipe  # type: ignore[return-value]
    return as_recipe(recipe)


def as_recipe(recipe: RecipeLike) -> Recipe:
    """Returns ``recipe``, looked up by :func:`named` if it is a string.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(recipe, str):
        return named(recipe)
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe must be a minifloat recipe or one of the names {', '.join(NAMES)}, got {type(recipe).__name__}"
        )
    return recipe


__all__ = [
    "NAMES", "CustomRecipe", "DelayedScaling", "DelayedScalingRequest", "ElementPair", "Float8BlockScaling",
    "Float8CurrentScaling", "Float8RowwiseScaling", "MMParams", "MXFP4BlockScaling", "MXFP6BlockScaling",
    "MXFP8BlockScaling", "NVFP4BlockScaling", "OwnRecipe", "QParams", "QuantizerRole", "Recipe", "RecipeLike",
    "W4A8BlockScaling", "as_recipe", "from_dict", "named", "own_recipe",
]  # fmt: skip
