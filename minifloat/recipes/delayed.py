"""FP8 with one scale a tensor, from the amaxes of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

from torch import Tensor

from minifloat.arguments import Size, checked
from minifloat.formats import Format
from minifloat.quantizer import Quantizer
from minifloat.recipes.base import BackwardOverride, ElementPair, Margin, QuantizerRole, Recipe

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]
ScaleAlgorithm = Callable[[Tensor, Tensor, float, "DelayedScaling"], Tensor]


@checked
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one scale a tensor, taken from the amaxes of earlier steps.

    Args:
        margin: the scale is divided by ``2 ** margin``.
        fp8_format: elements, forward and backward.
        amax_history_len: steps remembered.
        amax_compute_algo: ``"max"`` or ``"most_recent"`` of the history, or a callable on it ([L, n] to [n]).
        scaling_factor_compute_algo: callable ``(amax, scale, fp8_max, recipe) -> scale``; None is ``fp8_max / amax``.
        reduce_amax: reduce amaxes over the group given to ``autocast``, all ranks by default.
    """

    margin: Margin = 0
    fp8_format: ElementPair = ElementPair.HYBRID
    amax_history_len: Size = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: BackwardOverride = None
    kinds = frozenset({"delayed", "float8_per_tensor_scaling"})
    rules = "", ""
    """How the scales of forward and of backward follow from amaxes, ``"e4m3/margin=0/max"``; ``/custom``: by callables.

    Strings for the same reason as a format's spec: a compiler takes them for the constants that they are.
    """

    def __post_init__(self) -> None:
        self._check(self.fp8_format)
        if self.backward_override is not None:
            raise ValueError("DelayedScaling has no backward_override; use Float8CurrentScaling for one")
        custom = callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None
        how = f"margin={self.margin}/{'custom' if custom else self.amax_compute_algo}"
        # Spelled here: where shapes are dynamic, a compiler takes the margin for a symbol, which cannot be spelled.
        object.__setattr__(self, "rules", (f"{self.fp8_format.forward}/{how}", f"{self.fp8_format.backward}/{how}"))

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        return Quantizer(Format(self.fp8_format.element(role), scale_rule="given"))

    def resolve(self, role: QuantizerRole) -> tuple[Quantizer, DelayedScaling | None]:
        return self.quantizer(role), self


@checked
@dataclass(frozen=True)
class DelayedScalingRequest:
    """What a :class:`CustomRecipe` factory returns for a role that wants delayed scaling."""

    fp8_format: ElementPair = ElementPair.HYBRID
    margin: Margin = 0
    amax_history_len: Size = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: ScaleAlgorithm | None = None
    reduce_amax: bool = True

    def recipe(self) -> DelayedScaling:
        return DelayedScaling(**{field.name: getattr(self, field.name) for field in fields(self)})
