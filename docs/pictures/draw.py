"""Draws the pictures of the documents: ``python docs/pictures/draw.py``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
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


STUDY = HERE.parents[1] / "benchmarks/results/2026-11-28-h100-study.txt"
CURVES = {"bf16-reordered": "#888", "current": "#2a6fb0", "nvfp4": "#c0504d", "nvfp4+finish20": "#3a8a3a"}


def study() -> str:
    """Gaps of recipes to bf16: over the steps of 124M parameters, and at the end of each run of 30M."""
    ended: dict[str, list[float]] = {}  # of 30M, by seed
    tables: list[list[list[str]]] = []  # validation losses by step: seeds 0 and 1 of 124M, then experts
    for words in [line.split() for line in STUDY.read_text().splitlines()]:
        if words[:1] == ["30m"] and words[5:6] == ["%"]:
            ended.setdefault(words[1], []).append(float(words[4]))
        elif words[:2] == ["step", "bf16"]:
            tables.append([words])
        elif tables and len(words) == len(tables[-1][0]):
            tables[-1].append(words)
    left, wide, top, high = 60, 300, 50, 250

    def across(step: float) -> float:
        return left + wide * (step - 720) / 806

    def down(gap: float) -> float:
        return top + high * (1.3 - gap) / 1.7

    parts = [text(left + wide / 2, 24, "124M parameters, 100M tokens, two seeds", fill="#555")]
    for gap in (0.0, 0.5, 1.0):
        parts += [line(left, down(gap), wide, 0), text(left - 8, down(gap) + 5, f"{gap:+.1f} %", "end", 12)]
    parts += [text(across(step), top + high + 20, f"step {step}", size=12) for step in (760, 1000, 1221, 1526)]
    parts.append(f"<path d='M{across(1221):.0f},{top}v{high}' stroke='#3a8a3a' stroke-dasharray='4 3'/>")
    parts.append(text(across(1221) - 5, top + 12, "bf16 from here", "end", 12, "#3a8a3a"))
    for names, *rows in tables[:2]:
        first = names is tables[0][0]
        late = [row for row in rows if int(row[0]) > 700 and row[0] != "1520"]  # the last row has a larger sample
        for name in names[2:]:
            if name not in CURVES:
                continue
            gaps = [100 * (float(row[names.index(name)]) / float(row[1]) - 1) for row in late]
            points = " ".join(f"{across(int(row[0])):.1f},{down(gap):.1f}" for row, gap in zip(late, gaps, strict=True))
            style = f"stroke='{CURVES[name]}' " + ("stroke-width='2'" if first else "stroke-dasharray='5 3'")
            parts.append(f"<polyline points='{points}' fill='none' {style}/>")
            if first:
                label = down(gaps[-1]) + (14 if name == "bf16-reordered" else 2)
                parts.append(text(left + wide + 6, label, name, "start", 12, CURVES[name]))
    parts.append(text(690, 24, "30M parameters, 66M tokens, a dot a seed", fill="#555"))
    for place in range(-1, 4):
        x = 640 + 60 * place
        parts += [line(x, top - 8, 0, high + 12), text(x, top + high + 20, f"{place:+} %", size=12)]
    for index, (name, gaps) in enumerate(ended.items()):
        y = top + index * high / (len(ended) - 1)
        color = "#888" if name == "bf16-reordered" else "#c0504d" if "fp4" in name or name == "w4a8" else "#2a6fb0"
        parts.append(text(570, y + 4, name, "end", 12))
        parts += [f"<circle cx='{640 + 60 * gap:.1f}' cy='{y:.1f}' r='4' fill='{color}'/>" for gap in gaps]
    return svg(860, 330, parts)


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
