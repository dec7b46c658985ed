"""Predicts which linears of a model gain from which recipe, from the measured times of single linears.

The table is a result of ``minifloat bench shapes``: forward and backward of one Linear, eager, its weight cast at every
step. The package has one of an H100; measure your own device and give the file. The predicted gain of a shape that was
not measured is off by 5 to 12 % where the device takes longer than the host (each measured one left out in turn). Of
smaller shapes it says no more than that they lose.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from minifloat.convert import convert

Shape = tuple[int, int, int]
"""Tokens, out_features and in_features."""

BASELINE, OURS = "torch bf16", "minifloat "
PACKAGED = Path(__file__).with_name("measured.json")
NEIGHBOURS = 4  # measured shapes that a prediction is made of
SUITES = ("shapes", "linear", "tokens")


@dataclass(frozen=True)
class Measured:
    """Seconds of forward and backward of a Linear on one device: of PyTorch's in bf16, and of ours by recipe."""

    device: str
    date: str
    seconds: Mapping[str, Mapping[Shape, float]]

    @staticmethod
    def read(path: Path = PACKAGED) -> Measured:
        """Reads a result of ``minifloat bench shapes``.

        Raises:
            ValueError: the file is none, or has no linears.
        """
        seconds: dict[str, dict[Shape, float]] = {}
        try:
            result = json.loads(path.read_bytes())
            for row in result["rows"]:
                if row["suite"] not in SUITES:
                    continue
                tokens, out, into = (int(size) for size in row["row"].split(" x "))
                for contender in row["contenders"]:
                    name, found = contender["name"], contender["median_seconds"]
                    if (name == BASELINE or re.fullmatch(OURS + r"\w+", name)) and found.get("sustained"):
                        seconds.setdefault(name.removeprefix(OURS), {})[tokens, out, into] = found["sustained"]
            measured = Measured(result["device"], result["date"], seconds)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no result of minifloat bench: {type(error).__name__} {error}") from error
        if len(seconds) < 2 or BASELINE not in seconds:
            raise ValueError(f"{path} has no linears of PyTorch and of minifloat; make it with: minifloat bench shapes")
        return measured

    @property
    def recipes(self) -> list[str]:
        return [name for name in self.seconds if name != BASELINE]

    def predict(self, name: str, shape: Shape) -> float:
        """Seconds at ``shape``, as measured or at the speed of the nearest shapes, weighted by distance of logarithms.

        More tokens than were measured take longer in proportion.
        """
        known = self.seconds[name]
        tokens = min(shape[0], max(measured[0] for measured in known))
        at = (tokens, *shape[1:])
        if at in known:
            return known[at] * shape[0] / tokens
        distances = sorted((math.dist([*map(math.log, at)], [*map(math.log, other)]), other) for other in known)
        nearest = [(distance**-2, other) for distance, other in distances[:NEIGHBOURS]]
        speed = sum(weight * math.log(math.prod(other) / known[other]) for weight, other in nearest)
        return math.prod(shape) / math.exp(speed / sum(weight for weight, _ in nearest))


@dataclass(frozen=True)
class Line:
    """Equal linears of a model: a pattern of their names, the names, and seconds of one by contender."""

    pattern: str
    names: tuple[str, ...]
    shape: Shape
    seconds: Mapping[str, float]

    @property
    def count(self) -> int:
        return len(self.names)

    def gain(self, recipe: str) -> float:
        """Speed under ``recipe``, relative to bf16."""
        return self.seconds[BASELINE] / self.seconds[recipe]


@dataclass(frozen=True)
class Advice:
    """Gain of each linear, the recipe that is fastest where layers that lose stay in bf16, and what is unknown.

    Attributes:
        lines: of the linears that ``convert`` converts.
        unknown: patterns of experts, which the table does not have.
    """

    measured: Measured
    lines: tuple[Line, ...]
    unknown: tuple[str, ...]

    def total(self, recipe: str | None, mixed: bool = True) -> float:
        """Seconds of all linears; ``mixed``: each under the faster of the recipe and bf16; None: bf16."""
        names = [BASELINE] * (recipe is None or mixed) + [recipe] * (recipe is not None)
        return sum(line.count * min(line.seconds[str(name)] for name in names) for line in self.lines)

    @property
    def best(self) -> str | None:
        """The recipe; None: none gains."""
        best = min(self.measured.recipes, key=self.total)
        return best if self.total(best) < self.total(None) else None

    def rules(self, recipe: str) -> list[tuple[str, str]]:
        """Lists the rules that keep what loses in bf16: patterns, or names where a pattern matches what gains too."""
        gaining = [name for line in self.lines if line.gain(recipe) >= 1 for name in line.names]
        kept: dict[str, None] = {}
        for line in self.lines:
            if line.gain(recipe) < 1:
                alone = not any(fnmatchcase(name, line.pattern) for name in gaining)
                kept |= dict.fromkeys([line.pattern] if alone else line.names)
        return [(name, "none") for name in kept]

    def __str__(self) -> str:
        names = self.measured.recipes
        rows = [("linear", "", "tokens x out x in", "bf16, ms", *names)]
        for line in self.lines:
            gains = [f"{line.gain(name):.2f}" for name in names]
            size, ms = " x ".join(map(str, line.shape)), f"{1000 * line.seconds[BASELINE]:.3f}"
            rows.append((line.pattern, f"{line.count} times", size, ms, *gains))
        gains = [f"{self.total(None) / self.total(name, mixed=False):.2f}" for name in names]
        rows.append(("all of them", "", "", f"{1000 * self.total(None):.3f}", *gains))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"not in the table: {pattern}" for pattern in self.unknown]
        best = self.best
        if best is None:
            return "\n".join([*lines, "no recipe gains: stay in bf16, or give more tokens a step"])
        rules = f", rules={kept}" if (kept := self.rules(best)) else ""
        gain = self.total(None) / self.total(best)
        return "\n".join([*lines, f"the linears would be {gain:.2f} times as fast: convert(model, {best!r}{rules})"])


def advise(model: nn.Module, tokens: int, measured: Measured | None = None) -> Advice:
    """Predicts the gain of each linear of ``model`` that :func:`~minifloat.convert` converts; changes nothing.

    Args:
        model: any module; ``meta`` is fine.
        tokens: of a step on one device.
        measured: the table; None: the package's.

    Raises:
        ValueError: nothing converts.
    """
    measured = Measured.read() if measured is None else measured
    kept = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    report = convert(copy.deepcopy(model, kept), "current", quantize_weights=False)  # a copy shares the tensors
    found: dict[tuple[str, tuple[int, int]], list[str]] = {}
    unknown: dict[str, None] = {}
    for layer in report.converted:
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.names[0])
        if layer.num_experts is None:
            found.setdefault((pattern, layer.shape), []).append(layer.names[0])
        else:
            unknown[pattern] = None
    if not found:
        raise ValueError("no linear of the model converts alone, so that the table says nothing about it")
    names = [BASELINE, *measured.recipes]
    lines = [
        Line(pattern, tuple(own), (tokens, *shape), {name: measured.predict(name, (tokens, *shape)) for name in names})
        for (pattern, shape), own in found.items()
    ]
    return Advice(measured, tuple(lines), tuple(unknown))
