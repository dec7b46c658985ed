"""Number formats as data: what a code means, which elements share a scale, and how that scale is found.

A :class:`Format` is all a kernel needs to know. Its element and its scale rule (``elements.py``) are
objects that bring their code, in PyTorch and in Triton, and are known by name; an unknown name is an error here, so
that kernels have no case for it. The formulas are in ``docs/numerics.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from minifloat.arguments import Count, NonNegativeFloat, PositiveFloat, checked
from minifloat.formats.elements import (
    ELEMENTS,
    SCALE_RULES,
    Element,
    FormatFacts,
    ScaleRule,
    define_element,
    define_scale_rule,
)

ROWWISE = -1
"""Scaled along the last dim, which forward and dgrad contract on the left."""
COLUMNWISE = 0
"""Scaled along the first dim, which wgrad contracts."""


Transform = Literal["none", "hadamard16"]
Rounding = Literal["nearest", "stochastic", "four_over_six_mae", "four_over_six_mse"]


@checked
@dataclass(frozen=True, eq=False)
class Format(FormatFacts):
    """Number format: an element, a block shape, a scale rule, a transform and a rounding.

    Args:
        element: a name in ``ELEMENTS``: ``"e4m3"``, ``"e5m2"``, ``"e2m1"``, or ``"identity"`` for values left as they
            are.
        block: elements along the scaled dim that share a scale; 0 is one scale for the whole tensor, or its rows.
        tile: a ``block x block`` square shares the scale instead of a ``1 x block`` strip.
        scale_rule: ``"fp32"`` (max / amax), ``"pow2"`` (the same, floored to a power of two), ``"e8m0"`` (amax / max,
            raised to a power of two, OCP MX), ``"two_level"`` (E4M3 block scales under an fp32 amax, NVFP4) or
            ``"given"`` (the scale comes from outside: delayed scaling).
        transform: ``"hadamard16"`` rotates groups of 16 along the scaled dim before the cast.
        rounding: ``"nearest"`` (ties to even), ``"stochastic"``, or the 4-over-6 search by absolute or squared error.
        amax_epsilon: lower bound of the amax, ``fp32`` and ``pow2`` rules only.
        block_scale_max: largest E4M3 block scale that ``two_level`` aims at: 448, or 256 with 4-over-6.
        amax_per_row: one amax for each row (column, if columnwise) in lieu of one for the tensor: of ``two_level``
            its second level, of block 0 the only one.
    """

    element: str = "e4m3"
    block: Count = 0
    tile: bool = False
    scale_rule: str = "fp32"
    transform: Transform = "none"
    rounding: Rounding = "nearest"
    amax_epsilon: NonNegativeFloat = 0.0
    block_scale_max: PositiveFloat = 448.0
    amax_per_row: bool = False

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("element", self.element, tuple(ELEMENTS)),
            ("scale_rule", self.scale_rule, tuple(SCALE_RULES)),
            ("transform", self.transform, get_args(Transform)),
            ("rounding", self.rounding, get_args(Rounding)),
        ):
            if name not in known:
                raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}")
        if self.block < 0 or self.block == 1 or self.block & (self.block - 1):
            raise ValueError(f"block is {self.block}; it must be 0 (per tensor) or a power of two from 2 on")
        encoding, scaling = ELEMENTS[self.element], SCALE_RULES[self.scale_rule]
        if self.block == 0 and (self.tile or scaling.needs_block or encoding.packed):
            raise ValueError(f"scale rule {self.scale_rule!r} (tile={self.tile}) needs a block length, got block=0")
        if scaling.element not in ("", self.element):
            raise ValueError(f"scale rule {self.scale_rule!r} takes {scaling.element}, got {self.element!r}")
        if self.rounding != "nearest" and self.scale_rule != "two_level":
            raise ValueError(f"rounding {self.rounding!r} needs scale rule 'two_level'")
        if self.amax_per_row and not (self.scale_rule == "two_level" or (self.block == 0 and scaling.own)):
            raise ValueError(
                f"amax_per_row needs scale rule 'two_level', or a rule that takes an amax and block=0, got "
                f"{self.scale_rule!r}, block={self.block}"
            )
        if self.scale_rule == "given" and self.block:
            raise ValueError(f"a given scale is one for the whole tensor, got block={self.block}")
        if self.amax_per_row and (self.tile or self.transform != "none"):
            raise ValueError("amax_per_row takes strips that are not rotated")
        if self.transform == "hadamard16" and (self.block % 16 or self.tile):
            raise ValueError(f"hadamard16 needs strips of whole groups of 16, got block={self.block} tile={self.tile}")
        two_level, quantized = self.scale_rule == "two_level", self.element != "identity"
        strips = (self.block > 0 and not self.tile) or self.amax_per_row
        derived = {
            "encoding": encoding,
            "scaling": scaling,
            "max": encoding.max,
            "packed": encoding.packed,
            "quantized": quantized,
            "scale_dtype": scaling.dtype,
            "needs_amax": quantized and (two_level or (self.block == 0 and self.scale_rule != "given")),
            "grid": self.block > 0 or self.amax_per_row,
            "segment": 128 if self.block == 0 or two_level else min(self.block, 128),
            "symmetric": not strips and self.transform == "none" and self.rounding != "stochastic",
        }
        # Spelled here: where shapes are dynamic, a compiler takes numbers for symbols, which cannot be spelled.
        for name, value in derived.items():  # one by one: torch.compile of PyTorch 2.11 does not trace dict.update
            object.__setattr__(self, name, value)
        object.__setattr__(self, "spec", _spell(self) if quantized else self.element)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies by the spec: elements and scale rules are no part of it."""
        return parse, (self.spec,)

    def __eq__(self, other: object) -> bool:
        return self.spec == other.spec if isinstance(other, Format) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spec)

    def reduces_amax(self, dim: int) -> bool:
        """Whether an amax of a cast along ``dim`` covers all rows, and so the ranks that share them."""
        return self.needs_amax and not (self.amax_per_row and dim == ROWWISE)

    @property
    def mixes_rows(self) -> bool:
        """Whether, cast rowwise, a row's codes depend on other rows, or on where it is among them."""
        return self.tile or self.reduces_amax(ROWWISE) or self.rounding == "stochastic"

    def owns_scales(self, dim: int) -> bool:
        """Whether, cast along ``dim``, ranks that share the rows have scales of their own; else all have the same."""
        return self.block > 0 or (self.amax_per_row and dim == ROWWISE)

    def scale_block(self, dim: int) -> tuple[int, int]:
        """Returns the rows and columns that share a scale when cast along ``dim``; 0 stands for all of them."""
        if self.tile or not self.grid:
            return self.block, self.block
        return (1, self.block) if dim == ROWWISE else (self.block, 1)


def _spell(fmt: Format) -> str:
    whole = "row" if fmt.amax_per_row else "tensor"
    blocks = whole if fmt.block == 0 else f"{fmt.block if fmt.tile else 1}x{fmt.block}"
    parts = [fmt.element, blocks, fmt.scale_rule]
    parts += [part for part in (fmt.transform, fmt.rounding) if part not in ("none", "nearest")]
    if fmt.amax_epsilon:
        parts.append(f"eps={float(fmt.amax_epsilon)}")  # no "!r", which PyTorch 2.14 does not trace
    if fmt.block_scale_max != 448.0:
        parts.append(f"max={float(fmt.block_scale_max)}")
    return "/".join(parts + ["amax_per_row"] * (fmt.amax_per_row and fmt.block > 0))


MOST_PARSED = 1024  # formats with a new number at each step must not fill the memory

IDENTITY = Format(element="identity", scale_rule="none")
"""High precision: the codes are the values."""


@lru_cache(MOST_PARSED)
def parse(spec: str) -> Format:
    """Reads the format that :attr:`Format.spec` names.

    Raises:
        ValueError: ``spec`` is not such a string.
    """
    element, *rest = spec.split("/")
    if spec == "identity":
        return IDENTITY
    if len(rest) < 2:
        raise ValueError(f"format {spec!r} is not 'element/blocks/scale_rule[/option...]', as in 'e4m3/1x128/pow2'")
    blocks, scale_rule, *options = rest
    rows, _, block = blocks.partition("x")
    values: dict[str, object] = {"element": element, "scale_rule": scale_rule}
    if blocks == "row":
        values["amax_per_row"] = True
    elif blocks != "tensor":
        values |= {"block": int(block), "tile": rows == block}
    for option in options:
        key, _, number = option.partition("=")
        if key in _NUMBERS:
            values[_NUMBERS[key]] = float(number)
        elif key == "amax_per_row":
            values[key] = True
        else:
            values["transform" if key in get_args(Transform) else "rounding"] = option
    fmt = Format(**values)  # type: ignore[arg-type]
    if fmt.spec != spec:
        raise ValueError(f"format {spec!r} is not spelled as Format.spec spells it: {fmt.spec!r}")
    return fmt


_NUMBERS = {"eps": "amax_epsilon", "max": "block_scale_max"}

__all__ = [
    "COLUMNWISE", "ELEMENTS", "IDENTITY", "ROWWISE", "SCALE_RULES", "Element", "Format", "Rounding", "ScaleRule",
    "Transform", "define_element", "define_scale_rule", "parse",
]  # fmt: skip
