"""Draws the pictures of the documents: ``python docs/pictures/draw.py``."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
STYLE = "font-family='Helvetica, Arial, sans-serif' font-size='15'"
HIGH, LOW, PRODUCT = "#eeeeee", "#cfe8ff", "#ffe3b8"  # the fills of high precision, codes and products


def box(x: int, y: int, width: int, fill: str, text: str) -> str:
    """A rounded box whose left edge and middle are at (x, y)."""
    return (
        f"<rect x='{x}' y='{y - 16}' width='{width}' height='32' rx='6' fill='{fill}' stroke='#555'/>"
        f"<text x='{x + width / 2}' y='{y + 5}' text-anchor='middle'>{text}</text>"
    )


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    bend = (x + to_x) // 2
    path = f"M{x},{y} C{bend},{y} {bend},{to_y} {to_x - 7},{to_y}"
    return f"<path d='{path}' fill='none' stroke='#555' stroke-width='1.4' marker-end='url(#tip)'/>"


def linear() -> str:
    """The three products of a linear, and the two casts of each tensor that they read."""
    tensors = {"X": 80, "W": 180, "dY": 280}
    products = {"Y = X W<tspan dy='-5' font-size='11'>T</tspan>": ("Y", 80, ("X-", "W-"))}
    products["dX = dY W"] = ("dX", 180, ("W+", "dY-"))
    products["dW = dY<tspan dy='-5' font-size='11'>T</tspan><tspan dy='5'> X</tspan>"] = ("dW", 280, ("X+", "dY+"))
    parts = [
        f"<text x='{x}' y='28' text-anchor='middle' fill='#555'>{text}</text>"
        for x, text in ((60, "bf16"), (255, "codes and scales"), (500, "products in 8 or 4 bits"), (680, "bf16"))
    ]
    for name, y in tensors.items():
        parts += [box(20, y, 80, HIGH, name), arrow(100, y, 190, y - 20), arrow(100, y, 190, y + 20)]
        parts += [box(190, y - 20, 130, LOW, f"{name}, by rows"), box(190, y + 20, 130, LOW, f"{name}, by columns")]
    for text, (result, y, reads) in products.items():
        parts += [box(425, y, 150, PRODUCT, text), arrow(575, y, 640, y), box(640, y, 80, HIGH, result)]
        for end, read in zip((-7, 7), reads, strict=True):
            parts.append(arrow(320, tensors[read[:-1]] + (20 if read[-1] == "+" else -20), 425, y + end))
    tip = (
        "<defs><marker id='tip' markerWidth='8' markerHeight='8' refX='2' refY='4' orient='auto'>"
        "<path d='M0,0 L8,4 L0,8 z' fill='#555'/></marker></defs>"
    )
    body = "\n".join([tip, "<rect width='740' height='330' fill='white'/>", *parts])
    return f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 740 330' {STYLE}>\n{body}\n</svg>\n"


PICTURES = {"linear.svg": linear}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(draw())
