"""Draws the pictures of the documents: ``python docs/pictures/draw.py``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from minifloat.formats import ELEMENTS

HERE = Path(__file__).parent
STYLE = "font-family='Helvetica, Arial, sans-serif' font-size='15'"
HIGH, LOW, PRODUCT = "#eeeeee", "#cfe8ff", "#ffe3b8"  # the fills of high precision, codes and products
SHADES = "#cfe8ff", "#ffe3b8", "#d7f0d0", "#f3d3e6"  # of what shares a scale, or of what one rank has
EVERY = "#dddddd"  # what all ranks have


# ---- shapes ----


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    tip = (
        "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='2' refY='4' orient='auto'>"
        "<path d='M0,0 L8,4 L0,8 z' fill='#555'/></marker></defs>"
    )
    body = "\n".join([tip, f"<rect width='{width}' height='{height}' fill='white'/>", *parts])
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {STYLE}>\n{body}\n</svg>\n"


def text(x: float, y: float, words: str, anchor: str = "middle", size: int = 15, fill: str = "#222") -> str:
    return f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' font-size='{size}' fill='{fill}'>{words}</text>"


def rectangle(x: float, y: float, width: float, height: float, fill: str, line: str = "#555") -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}' stroke='{line}'/>"


def line(x: float, y: float, right: float, down: float) -> str:
    return f"<path d='M{x:g},{y:g}l{right:g},{down:g}' stroke='#ccc'/>"


def box(x: int, y: int, width: int, fill: str, words: str) -> str:
    """A rounded box whose left edge and middle are at (x, y)."""
    return (
        f"<rect x='{x}' y='{y - 16}' width='{width}' height='32' rx='6' fill='{fill}' stroke='#555'/>"
        f"{text(x + width / 2, y + 5, words)}"
    )


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    bend = (x + to_x) // 2
    path = f"M{x},{y} C{bend},{y} {bend},{to_y} {to_x - 7},{to_y}"
    return f"<path d='{path}' fill='none' stroke='#555' stroke-width='1.4' marker-end='url(#tip)'/>"


def grid(x: int, y: int, cell: int, rows: int, columns: int, shade: Callable[[int, int], int]) -> Iterable[str]:
    """A matrix whose element (row, column) has the color of that number, with a frame around it."""
    for row in range(rows):
        for column in range(columns):
            fill = SHADES[shade(row, column) % len(SHADES)]
            yield rectangle(x + column * cell, y + row * cell, cell, cell, fill, "#fff")
    yield rectangle(x, y, columns * cell, rows * cell, "none")


# ---- pictures ----


def linear() -> str:
    """The three products of a linear, and the two casts of each tensor that they read, under current scaling."""
    tensors = {"X": (80, "E4M3"), "W": (180, "E4M3"), "dY": (280, "E5M2")}
    products = {"Y = X W<tspan dy='-5' font-size='11'>T</tspan>": ("Y", 80, ("X-", "W-"))}
    products["dX = dY W"] = ("dX", 180, ("W+", "dY-"))
    products["dW = dY<tspan dy='-5' font-size='11'>T</tspan><tspan dy='5'> X</tspan>"] = ("dW", 280, ("X+", "dY+"))
    parts = [
        text(x, 28, words, fill="#555")
        for x, words in ((60, "bf16"), (270, "codes and scales"), (530, "FP8 products"), (710, "bf16"))
    ]
    for name, (y, element) in tensors.items():
        parts += [box(20, y, 80, HIGH, name), arrow(100, y, 180, y - 20), arrow(100, y, 180, y + 20)]
        parts += [box(180, y - 20, 180, LOW, f"{name} rowwise, {element}")]
        parts += [box(180, y + 20, 180, LOW, f"{name} columnwise, {element}")]
    for words, (result, y, reads) in products.items():
        parts += [box(455, y, 150, PRODUCT, words), arrow(605, y, 670, y), box(670, y, 80, HIGH, result)]
        for end, read in zip((-7, 7), reads, strict=True):
            parts.append(arrow(360, tensors[read[:-1]][0] + (20 if read[-1] == "+" else -20), 455, y + end))
    return svg(770, 330, parts)


BITS = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}
USED = {"e4m3": "most FP8 recipes", "e5m2": "FP8 gradients", "e2m3": "MXFP6 X and W", "e3m2": "MXFP6 gradients"}
USED["e2m1"] = "NVFP4, MXFP4"


def formats() -> str:
    """The bits of each element, and its positive values on a logarithmic axis."""
    left, octave, low, high = 400, 12.5, -17, 16

    def place(exponent: float) -> float:
        return left + (exponent - low) * octave

    parts = [text(20, 28, "bits: sign, exponent, mantissa", "start", fill="#555")]
    parts.append(text(place(0), 28, "positive values, a line each", fill="#555"))
    for index, (name, (exponent, mantissa)) in enumerate(BITS.items()):
        y, bits = 50 + 52 * index, [HIGH, *[LOW] * exponent, *[PRODUCT] * mantissa]
        parts += [rectangle(90 + 20 * bit, y, 20, 24, fill) for bit, fill in enumerate(bits)]
        parts += [text(20, y + 17, name.upper(), "start"), text(262, y + 17, USED[name], "start", 13, "#555")]
        element = ELEMENTS[name]
        values = element.values(torch.device("cpu"))
        marks = "".join(f"M{place(math.log2(v)):.1f},{y}v24" for v in sorted({*values[values > 0].tolist()}))
        parts.append(f"<path d='{marks}' stroke='#2a6fb0' stroke-width='0.8'/>")
        parts.append(text(place(math.log2(element.max)) + 6, y + 17, f"{element.max:g}", "start", 13))
    base = 50 + 52 * len(BITS)
    parts.append(f"<path d='M{place(low)},{base}H{place(high)}' stroke='#555'/>")
    parts += [
        text(place(e), base + 20, f"2<tspan dy='-5' font-size='10'>{e}</tspan>", size=13) for e in range(-16, 17, 4)
    ]
    return svg(880, base + 32, parts)


def scalings() -> str:
    """The elements of a matrix that share a scale, one color each."""

    def strips(row: int, column: int) -> int:
        return row + column // 4 * 2

    kinds: list[tuple[str, str, str, Callable[[int, int], int]]] = [
        ("one a tensor", "delayed, current", "", lambda row, column: 0),
        ("one a row", "rowwise", "", lambda row, column: row),
        ("strips", "block: 1 x 128 of X, dY", "mxfp8: 1 x 32; nvfp4: 1 x 16", strips),
        ("tiles", "block: 128 x 128 of W", "nvfp4: 16 x 16 of W", lambda row, column: row // 4 + column // 4 * 2),
    ]
    parts: list[str] = []
    for index, (title, *users, shade) in enumerate(kinds):
        x = 30 + 215 * index
        parts += [text(x + 72, 26, title), *grid(x, 40, 18, 8, 8, shade)]
        parts += [text(x + 72, 206 + 19 * line, words, size=13, fill="#555") for line, words in enumerate(users)]
    return svg(860, 236, parts)


def orientations() -> str:
    """The two casts of X in blocks, and the dim that each product contracts."""
    parts: list[str] = []
    sides = (
        ("X rowwise", "blocks along K", "fprop contracts K: Y = X W", lambda row, column: row + column // 4 * 2),
        ("X columnwise", "blocks along M", "wgrad contracts M: dW = dY", lambda row, column: column + row // 4 * 2),
    )
    ends = "<tspan dy='-5' font-size='10'>T</tspan>", "<tspan dy='-5' font-size='10'>T</tspan><tspan dy='5'> X</tspan>"
    for index, ((title, blocks, product, shade), end) in enumerate(zip(sides, ends, strict=True)):
        x = 90 + 370 * index
        parts += [text(x + 108, 28, f"{title}: {blocks}"), *grid(x, 62, 18, 8, 12, shade)]
        parts += [text(x + 108, 54, "K", size=13, fill="#555"), text(x - 12, 139, "M", size=13, fill="#555")]
        parts.append(text(x + 108, 240, product + end))
        way = (x, 214, x + 216, 214) if index == 0 else (x + 230, 62, x + 230, 206)
        parts.append(
            f"<path d='M{way[0]},{way[1]}L{way[2] - 7 * (index == 0)},{way[3] - 7 * (index == 1)}' stroke='#555' "
            "stroke-width='1.4' marker-end='url(#tip)'/>"
        )
    return svg(760, 258, parts)


def gather() -> str:
    """A quantized all-gather of rows on two ranks."""
    steps = (20, "its rows, bf16"), (190, "amax"), (350, "agreed amax"), (530, "its codes"), (720, "all codes")
    parts = [text(x + 55, 28, words, fill="#555") for x, words in steps]
    for rank, (y, amax) in enumerate(((85, "3.1"), (195, "5.6"))):
        middle = y + 8
        parts.append(rectangle(20, y - 20, 110, 56, HIGH))
        parts += [text(75, middle + 5, f"rank {rank}"), arrow(130, middle, 190, middle)]
        parts += [box(190, middle, 110, HIGH, amax)]
        parts += [arrow(300, middle, 350, 93), arrow(300, middle, 350, 203), box(350, middle, 110, HIGH, "5.6")]
        parts += [arrow(460, middle, 530, middle), rectangle(530, y - 20, 110, 56, SHADES[rank])]
        parts += [text(585, middle + 5, f"rank {rank}"), arrow(640, middle, 720, 93), arrow(640, middle, 720, 203)]
        parts += [rectangle(720, y - 20 + 28 * part, 110, 28, SHADES[part]) for part in (0, 1)]
    parts += [text(325, 268, "all-reduce, MAX", size=13, fill="#555"), text(495, 268, "cast", size=13, fill="#555")]
    parts.append(text(680, 268, "all-gather of codes and scales", size=13, fill="#555"))
    return svg(850, 284, parts)


# ---- who holds what ----


class Held(NamedTuple):
    """Part of a tensor: left, top, width and height of 0 to 1, and the color of whose it is."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class Column(NamedTuple):
    """A tensor at one moment: what each of two ranks has of it; ``before``: what is done to get there."""

    title: str
    before: str
    ranks: tuple[tuple[Held, ...], tuple[Held, ...]]


BLUE, ORANGE = SHADES[:2]
UPPER, LOWER = Held(0, 0, 1, 0.5, BLUE), Held(0, 0.5, 1, 0.5, ORANGE)
LEFT, RIGHT = Held(0, 0, 0.5, 1, BLUE), Held(0.5, 0, 0.5, 1, ORANGE)
ALL = (Held(0, 0, 1, 1, EVERY),)
ROWS, COLUMNS = ((UPPER,), (LOWER,)), ((LEFT,), (RIGHT,))
TOKENS = (
    (Held(0, 0, 1, 0.25, BLUE), Held(0, 0.5, 1, 0.25, ORANGE)),
    (Held(0, 0.25, 1, 0.25, BLUE), Held(0, 0.75, 1, 0.25, ORANGE)),
)
GATHERED = ((UPPER, LOWER), (UPPER, LOWER))

MODES = {
    "ddp": (
        Column("tokens", "", ROWS),
        Column("W", "", (ALL, ALL)),
        Column("Y", "product", ROWS),
        Column("dW", "all-reduce", (ALL, ALL)),
    ),
    "fsdp": (
        Column("tokens", "", ROWS),
        Column("W, kept", "", ROWS),
        Column("W, in a product", "all-gather codes", GATHERED),
        Column("Y", "product", ROWS),
        Column("dW", "reduce-scatter", ROWS),
    ),
    "tensor": (
        Column("X", "", ROWS),
        Column("X, in a product", "all-gather codes", GATHERED),
        Column("W of fc1", "", ROWS),
        Column("H", "product", COLUMNS),
        Column("W of fc2", "", COLUMNS),
        Column("Y", "reduce-scatter", ROWS),
    ),
    "experts": (
        Column("tokens", "", ROWS),
        Column("sent to experts", "all-to-all", TOKENS),
        Column("W of 4 experts", "", ROWS),
        Column("Y of experts", "product", TOKENS),
        Column("Y", "all-to-all", ROWS),
    ),
}


def holds(columns: tuple[Column, ...]) -> str:
    """Who of two ranks holds which part of each tensor; the dashed frame is the whole tensor."""
    width, height, step = 88, 72, 150
    parts = [text(14, 46 + rank * 104 + height / 2, f"rank {rank}", "start") for rank in (0, 1)]
    for index, column in enumerate(columns):
        x = 90 + step * index
        parts.append(text(x + width / 2, 24, column.title))
        for rank, held in enumerate(column.ranks):
            y = 40 + 104 * rank
            for left, top, wide, high, fill in held:
                parts.append(rectangle(x + left * width, y + top * height, wide * width, high * height, fill, "#fff"))
            parts.append(
                f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='none' stroke='#555' "
                "stroke-dasharray='4 3'/>"
            )
            if column.before:
                parts.append(arrow(x - step + width + 6, y + height // 2, x - 4, y + height // 2))
        if column.before:
            parts.append(text(x - (step - width) / 2, 234, column.before, size=12, fill="#555"))
    return svg(90 + step * len(columns) - 40, 246, parts)


RESULTS = HERE.parents[1] / "benchmarks/results"
CURVES = {
    "bf16-reordered": "#888", "current": "#2a6fb0", "block": "#c77d1e", "mxfp8": "#7a5ba8", "nvfp4": "#c0504d",
    "nvfp4+finish20": "#3a8a3a",
}  # fmt: skip
WINDOW = 50  # steps that a point is the mean of
Place = Callable[[float, float], tuple[float, float]]


def study() -> str:
    """Gaps of recipes to bf16 over the steps: of 124M parameters, and of 30M after 400 steps in common."""
    return svg(890, 330, [*validation_gaps(60), *training_gaps(550)])


def panel(
    left: int, title: str, steps: tuple[int, ...], gaps: tuple[float, ...], low: float
) -> tuple[list[str], Place]:
    """A frame whose lines are at ``gaps`` (percent), and the place of a step and a gap in it."""
    wide, top, high = 240, 50, 250
    most = gaps[-1] + 0.3 * (gaps[-1] - gaps[-2])

    def place(step: float, gap: float) -> tuple[float, float]:
        x = left + wide * (step - steps[0]) / (steps[-1] - steps[0])
        return x, top + high * (most - gap) / (most - low)

    parts = [text(left + wide / 2, 24, title, fill="#555")]
    for gap in gaps:
        y = place(0, gap)[1]
        parts += [line(left, y, wide, 0), text(left - 8, y + 5, f"{gap:+g} %" if gap else "0", "end", 12)]
    parts += [text(place(step, 0)[0], top + high + 20, f"step {step}", size=12) for step in steps]
    return parts, place


def curve(points: Iterable[tuple[float, float]], style: str) -> str:
    return f"<polyline points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in points)}' fill='none' {style}/>"


def validation_gaps(left: int) -> list[str]:
    """Gaps of 124M parameters; the second seed is dashed."""
    parts, place = panel(left, "124M parameters, validation loss", (760, 1140, 1526), (0.0, 0.5, 1.0), -0.35)
    tables: list[list[list[str]]] = []  # validation losses by step: seeds 0 and 1 of 124M, then experts
    for words in [line.split() for line in (RESULTS / "2026-11-28-h100-study.txt").read_text().splitlines()]:
        if words[:2] == ["step", "bf16"]:
            tables.append([words])
        elif tables and len(words) == len(tables[-1][0]):
            tables[-1].append(words)
    x, y = place(1221, 1.3)
    parts.append(f"<path d='M{x:.0f},50v250' stroke='{CURVES['nvfp4+finish20']}' stroke-dasharray='4 3'/>")
    parts.append(text(x - 5, 62, "bf16 from here", "end", 12, CURVES["nvfp4+finish20"]))
    for names, *rows in tables[:2]:
        late = [row for row in rows if int(row[0]) > 700 and row[0] != "1520"]  # the last row has a larger sample
        for name in [name for name in names[2:] if name in CURVES]:
            gaps = [100 * (float(row[names.index(name)]) / float(row[1]) - 1) for row in late]
            points = [place(int(row[0]), gap) for row, gap in zip(late, gaps, strict=True)]
            first = names is tables[0][0]
            style = "stroke-width='2'" if first else "stroke-dasharray='5 3'"
            parts.append(curve(points, f"stroke='{CURVES[name]}' {style}"))
            if first:
                x, y = points[-1]
                lower = 14 if name == "bf16-reordered" else 2
                parts.append(text(x + 6, y + lower, name, "start", 12, CURVES[name]))
    return parts


def training_gaps(left: int) -> list[str]:
    """Gaps of 30M parameters, means over four seeds."""
    report = json.loads((RESULTS / "2026-11-28-h200-study-30m-common.json").read_text())
    first, end = report["conditions"]["common"], report["conditions"]["steps"]
    losses: dict[str, list[list[float]]] = {}
    for run in report["runs"]:
        losses.setdefault(run["name"], []).append(run["training"])
    twins = losses.pop("bf16")

    def gaps(runs: list[list[float]]) -> list[float]:
        parts = [slice(start, start + WINDOW) for start in range(first, end, WINDOW)]
        pairs = list(zip(runs, twins, strict=True))
        return [100 * (fmean(sum(ours[part]) / sum(twin[part]) for ours, twin in pairs) - 1) for part in parts]

    title = "30M, training loss, from one bf16 start a seed"
    parts, place = panel(left, title, (first, (first + end) // 2, end), (0.0, 0.05, 0.1, 0.15), -0.025)
    above = 0.0
    for name, each in sorted(((name, gaps(runs)) for name, runs in losses.items()), key=lambda pair: -pair[1][-1]):
        points = [place(first + (index + 0.5) * WINDOW, gap) for index, gap in enumerate(each)]
        parts.append(curve(points, f"stroke='{CURVES[name]}' stroke-width='2'"))
        above = max(above + 16, points[-1][1] + 5)
        parts.append(text(left + 246, above, name, "start", 12, CURVES[name]))
    return parts


PICTURES: dict[str, Callable[[], str]] = {
    "linear.svg": linear,
    "formats.svg": formats,
    "scalings.svg": scalings,
    "orientations.svg": orientations,
    "gather.svg": gather,
    "study.svg": study,
    **{f"{name}.svg": partial(holds, columns) for name, columns in MODES.items()},
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
