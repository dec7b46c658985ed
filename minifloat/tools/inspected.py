"""Report of what ``minifloat.inspect`` wrote: a heat map, a page that stands alone, scalars for TensorBoard."""

from __future__ import annotations

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from minifloat.inspection import MEANINGS, Losses
from minifloat.nn.inspect import Place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

K = TypeVar("K")
ROLES = "X", "W", "dY"
STATISTICS = {"snr": "SNR (dB)", "underflow": "underflow (%)", "saturation": "saturation (%)"}


class Line(NamedTuple):
    """One operand in one step on one rank; its SNR is minus infinite where infinite or NaN elements spoil it."""

    step: int
    rank: int
    place: Place
    losses: Losses


def read_lines(folder: Path) -> list[Line]:
    """Reads the files of all ranks in ``folder``, in the order of the casts; lines that were cut off are left out.

    Raises:
        ValueError: there are none.
    """
    lines = []
    for path in files(folder):
        rank, casts = int(path.stem.partition(".rank")[2] or 0), Counter[int]()
        for each in whole_lines(path):
            if each["snr"] is None:
                each["snr"] = -math.inf if each["nonfinite"] else math.inf
            place = Place(*(each[name] for name in Place._fields))
            each |= {"snr": float(each["snr"]), "excess": each.get("excess", 0.0)}  # "-inf", and lines without
            numbers: Any = (math.nan if each[name] is None else each[name] for name in Losses._fields)
            casts[step := each["step"]] += 1
            lines.append(((step, casts[step], rank), Line(step, rank, place, Losses(*numbers))))
    if not lines:
        raise ValueError(
            f"{folder} has no lines in inspect.jsonl; they come from Inspection.write, or minifloat train --inspect"
        )
    return [line for _, line in sorted(lines, key=lambda entry: entry[0])]


def files(folder: Path) -> list[Path]:
    """Lists the files of lines in ``folder``."""
    return sorted(folder.glob("inspect*.jsonl"))


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a file that were written to their end."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def keep(folder: Path, last: int) -> None:
    """Makes ``folder``, and drops what it has of steps after ``last``."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in files(folder):
        kept = [line for line in whole_lines(path) if line["step"] <= last]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept)) if kept else path.unlink()


def worst(lines: Sequence[Line], key: Callable[[Line], K]) -> dict[K, Losses]:
    """Puts the worst numbers of the lines of each key together, of shares those that were counted."""
    groups: dict[K, list[Losses]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line.losses)
    ways: tuple[Any, ...] = max, _largest, _largest, min, sum, max  # of the fields of Losses
    return {
        of: Losses(*(way(each) for way, each in zip(ways, zip(*group, strict=True), strict=True)))
        for of, group in groups.items()
    }


def _largest(shares: Sequence[float]) -> float:
    return max((share for share in shares if not math.isnan(share)), default=math.nan)


def heat_map(lines: Sequence[Line]) -> Figure:
    """Draws layers over steps: a column of panels for each role, a row for each statistic, the worst of all ranks.

    Gray has no finite number: nothing was inspected, or nothing lost. A cross marks infinite or NaN elements.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no global state
    except ImportError as error:
        raise ImportError("the heat map needs matplotlib; get it with: pip install matplotlib") from error

    layers, steps = list(dict.fromkeys(line.place.layer for line in lines)), sorted({line.step for line in lines})
    cells = worst(lines, lambda line: (line.place.role, line.place.layer, line.step))
    height = min(max(1.2, 0.2 * len(layers)), 8.0)
    figure = Figure(figsize=(13, len(STATISTICS) * height + 1.5), layout="constrained")
    panels = figure.subplots(len(STATISTICS), len(ROLES), sharex=True, sharey=True, squeeze=False)
    for (name, title), row in zip(STATISTICS.items(), panels, strict=True):
        numbers = {cell: getattr(of, name) * (1 if name == "snr" else 100) for cell, of in cells.items()}
        finite = {cell: number for cell, number in numbers.items() if math.isfinite(number)}
        colors = {
            "vmin": min(finite.values(), default=0), "vmax": max(finite.values(), default=1),
            "cmap": "viridis" if name == "snr" else "viridis_r",  # dark is bad
        }  # fmt: skip
        for role, axes in zip(ROLES, row, strict=True):
            image = [[finite.get((role, layer, step), math.nan) for step in steps] for layer in layers]
            shown = axes.imshow(image, aspect="auto", interpolation="nearest", **colors)
            axes.set(title=f"{title} of {role}", facecolor="lightgray")
            for (its_role, layer, step), of in cells.items():
                if its_role == role and of.nonfinite:
                    axes.plot(steps.index(step), layers.index(layer), "x", color="red")
        figure.colorbar(shown, ax=list(row))
    for ticks, names, most in ((axes.set_yticks, layers, 40), (axes.set_xticks, steps, 8)):  # more would overlap
        places = range(0, len(names), -(-len(names) // most))
        ticks(places, [str(names[i]) for i in places])
    figure.supxlabel("step")
    return figure


def page(lines: Sequence[Line], picture: bytes) -> str:
    """Writes HTML that needs no other file: the first non-finite operand, a table to be sorted, the picture (PNG)."""
    first = next((line for line in lines if line.losses.nonfinite), None)
    verdict = "No operand had an infinite or NaN element."
    if first is not None:
        verdict = (
            f"First infinite or NaN elements: {first.losses.nonfinite} in {first.place.role} of {first.place.layer}, "
            f"step {first.step}, rank {first.rank}."
        )
    by_place = worst(lines, lambda line: line.place)
    rows = sorted(by_place.items(), key=lambda row: (-row[1].nonfinite, -row[1].excess, row[1].snr))
    body = "".join(
        f"<tr><td>{'<td>'.join(map(escape, place))}<td>{of.excess:.1%}<td>{of.amax:.3g}<td>{of.underflow:.2%}"
        f"<td>{of.saturation:.2%}<td>{of.snr:.1f}<td>{of.nonfinite}\n"
        for place, of in rows
    )
    image, steps = base64.b64encode(picture).decode(), len({line.step for line in lines})
    meanings = "".join(f"<li>{name}: {escape(meaning)}\n" for name, meaning in MEANINGS.items())
    return _HTML.format(verdict=escape(verdict), image=image, rows=body, steps=steps, meanings=meanings)


def write_report(folder: Path) -> Path:
    """Writes ``inspect.png`` and ``inspect.html`` beside the lines of a run; returns the page.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no lines.
    """
    lines, picture = read_lines(folder), io.BytesIO()
    heat_map(lines).savefig(picture, format="png", dpi=110)
    (folder / "inspect.png").write_bytes(picture.getvalue())
    path = folder / "inspect.html"
    path.write_text(page(lines, picture.getvalue()), encoding="utf-8")
    return path


def add_scalars(lines: Sequence[Line], writer: Any) -> None:
    """Hands the finite numbers to a ``SummaryWriter`` of TensorBoard: of each step and operand the worst of all ranks.

    Tags are as ``snr/blocks.0.fc1/dY/columnwise``.
    """
    for (step, place), of in worst(lines, lambda line: (line.step, line.place)).items():
        for name, value in of._asdict().items():
            if math.isfinite(value):
                writer.add_scalar("/".join((name, *place)), value, step)


_HTML = """<!doctype html>
<meta charset="utf-8"><title>minifloat inspect</title>
<style>
body {{ font: 15px sans-serif; margin: 2em }} img {{ max-width: 100% }} table {{ border-collapse: collapse }}
td, th {{ padding: 2px 12px; text-align: right; border-bottom: 1px solid #ddd }} th {{ cursor: pointer }}
td:nth-child(-n+3), th:nth-child(-n+3) {{ text-align: left }}
</style>
<h1>What the casts lose</h1>
<p><b>{verdict}</b></p>
<p>The worst of {steps} inspected steps and of all ranks; click a heading to sort by it, the worst first.</p>
<table>
<thead><tr><th>layer<th>role<th>orientation<th>excess<th>amax
<th>underflow<th>saturation<th>SNR (dB)<th>non-finite</thead>
<tbody>
{rows}</tbody></table>
<ul>
{meanings}</ul>
<p><img alt="layers over steps" src="data:image/png;base64,{image}"></p>
<script>
const body = document.querySelector("tbody"), text = (row, i) => row.cells[i].textContent
const number = (row, i) => parseFloat(text(row, i).replace("inf", "Infinity")) * (i == 7 ? -1 : 1)
document.querySelectorAll("th").forEach((head, i) => head.onclick = () => body.append(...[...body.rows].sort(
  (a, b) => number(b, i) - number(a, i) || text(a, i).localeCompare(text(b, i)))))
</script>
"""
