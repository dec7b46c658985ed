"""A factory decides for each role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from minifloat.arguments import checked
from minifloat.formats import COLUMNWISE
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import BackwardOverride, ElementPair, QuantizerRole, Recipe
from minifloat.recipes.delayed import DelayedScaling, DelayedScalingRequest


@checked
@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """A factory decides for each role: one layer or one operand gets another format, or none.

    Args:
        qfactory: called with a :class:`QuantizerRole`, once for each role of a module and recipe object (in compiled
            code, where equal recipes are one, it is traced); returns a ``Quantizer`` (``Quantizer.identity()`` for high
            precision, ``Quantizer.hybrid(...)`` for a format for each orientation) or a :class:`DelayedScalingRequest`.
            A module-level function, if the recipe is to be pickled.
        fp8_format, quantization_alignment: as Transformer Engine's, and unused: the factory decides on the formats, and
            no layer pads groups of rows yet. They keep their defaults.
    """

    qfactory: Callable[[QuantizerRole], Quantizer | DelayedScalingRequest]
    fp8_format: ElementPair = ElementPair.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    quantization_alignment: int = 128
    kinds = frozenset({"custom"})

    def __post_init__(self) -> None:
        self._check(fp8_format="qfactory decides on the formats", quantization_alignment="no layer pads groups of rows")

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return self.resolve(role)[0]

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        """Calls the factory: the quantizer and, if it asked for delayed scaling, that recipe.

        Raises:
            ValueError: the factory returned neither a ``Quantizer`` nor a ``DelayedScalingRequest``.
        """
        answer = self.qfactory(role)
        if isinstance(answer, DelayedScalingRequest):
            delayed = answer.recipe()
            return delayed.quantizer(role), delayed
        if not isinstance(answer, Quantizer):
            raise ValueError(
                f"qfactory returned {answer!r} for {role}; return a Quantizer, a DelayedScalingRequest, "
                "or Quantizer.identity() for high precision"
            )
        if any(fmt.scale_rule == "given" for fmt in (answer.row_format, answer.format(COLUMNWISE))):
            raise ValueError(
                f"qfactory returned a quantizer of a given scale for {role}; return DelayedScalingRequest()"
            )
        return answer, None


def equal_in_graph(known: Recipe, recipe: Recipe) -> bool:
    """``known == recipe`` in traced code, where factories have no ``==``, and those of ``partial`` not even ``is``."""
    if known is recipe or not (isinstance(known, CustomRecipe) and isinstance(recipe, CustomRecipe)):
        return known is recipe or known == recipe
    if isinstance(known.qfactory, partial) or isinstance(recipe.qfactory, partial):
        return False
    return known.qfactory is recipe.qfactory and known.backward_override == recipe.backward_override
