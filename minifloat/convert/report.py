"""What :func:`minifloat.convert` did, as values and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from minifloat.recipe import Recipe


@dataclass(frozen=True)
class Converted:
    """A layer that was converted.

    Attributes:
        names: its dotted names in the model, more than one where the module is shared.
        shape: (out_features, in_features).
        recipe: its own recipe; None: it takes that of ``autocast``.
        quantized_weight: its weight was replaced by a quantized parameter.
        num_experts: how many experts it is a projection of, each of that shape; None: it is one linear.
    """

    names: tuple[str, ...]
    shape: tuple[int, int]
    recipe: Recipe | None
    quantized_weight: bool = False
    num_experts: int | None = None


@dataclass(frozen=True)
class LeftAlone:
    """A layer, or another module that holds matrices, that stays as it was.

    Attributes:
        names: as of :class:`Converted`.
        kind: the name of its class.
        shape: (out_features, in_features); None if it is not a linear.
        reason: why, in words.
        num_experts: as of :class:`Converted`.
    """

    names: tuple[str, ...]
    kind: str
    shape: tuple[int, int] | None
    reason: str
    num_experts: int | None = None


@dataclass(frozen=True)
class ConversionReport:
    """What became of each linear of a model and each projection of its experts.

    ``print`` shows it as a table, layers of equal blocks in one line.

    Attributes:
        converted, left_alone: the layers, in the order of the model.
        warnings: rules that decided nothing, layers that PyTorch does not always call, and weights that
            ``quantize_weights`` left in high precision.
        fraction: the part of the model's parameter elements that is in converted layers, 0 to 1.
    """

    converted: tuple[Converted, ...]
    left_alone: tuple[LeftAlone, ...]
    warnings: tuple[str, ...]
    fraction: float

    def __str__(self) -> str:
        linears = len(self.converted) + sum(layer.shape is not None for layer in self.left_alone)
        lines = [
            f"converted {len(self.converted)} of {linears} linear layers, "
            f"with {100 * self.fraction:.1f} % of the model's parameters"
        ]
        lines += _table((_place(layer.names), _size(layer), _recipe_name(layer)) for layer in self.converted)
        if self.left_alone:
            lines.append("left alone")
            lines += _table((_place(layer.names), _size(layer), layer.reason) for layer in self.left_alone)
        return "\n".join([*lines, *(f"warning: {warning}" for warning in self.warnings)])


def _recipe_name(layer: Converted) -> str:
    name = "the recipe of autocast" if layer.recipe is None else type(layer.recipe).__name__
    return name + ", quantized weight" * layer.quantized_weight


def _size(layer: Converted | LeftAlone) -> str:
    """The shape, or the class of what is not a linear."""
    if layer.shape is None:
        return layer.kind if isinstance(layer, LeftAlone) else ""
    return " x ".join(str(size) for size in (layer.num_experts, *layer.shape) if size is not None)


def _place(names: tuple[str, ...]) -> str:
    """The names, with ``*`` for the numbers of blocks."""
    shown = (".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names)
    return ", ".join(name or "(the model itself)" for name in shown)


def _table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Aligned lines, one for all equal rows, with their number."""
    cells = [(name, f"{n} times" if n > 1 else "", size, last) for (name, size, last), n in Counter(rows).items()]
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(4)]
    shown = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width] for row in cells]
    return [("  " + "  ".join(row)).rstrip() for row in shown]
