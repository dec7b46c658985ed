"""Plots of a suite: speed over an axis that its rows share (tokens, groups, GPUs), or bars where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minifloat.tools.bench.run import Entry, Result
from minifloat.tools.bench.summary import rate, seconds

LEAST_POINTS = 3  # on a curve


def draw(results: Sequence[Result], title: str, path: Path) -> None:
    """Writes the plot of one suite's sustained speeds."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    axes_of_rows = [result.case.axis for result in results]
    points = {axis for axis in axes_of_rows if axis is not None}
    curves = None not in axes_of_rows and len(points) == len(results) >= LEAST_POINTS
    speeds, unit = _speeds(results)
    names = [name for name in speeds if any(value is not None for value in speeds[name])]
    figure = Figure(figsize=(11, 5) if curves else (11, 1.5 + 0.22 * len(names) * len(results)), layout="constrained")
    axes = figure.subplots()
    if curves:
        _curves(axes, [axis for axis in axes_of_rows if axis is not None], {name: speeds[name] for name in names})
        axes.set(ylabel=unit, title=title)
    else:
        _bars(axes, [result.row for result in results], {name: speeds[name] for name in names})
        axes.set(xlabel=unit, title=title)
    if names:
        figure.legend(loc="outside right upper", fontsize="small")  # bars reach everywhere
    figure.savefig(path, dpi=110)


def _speeds(results: Sequence[Result]) -> tuple[dict[str, list[float | None]], str]:
    """Values of each contender, one a row, and their unit: TFLOP/s, GB/s, or microseconds where speed is a time."""
    names = list(dict.fromkeys(entry.name for result in results for entry in result.entries))
    columns = [{entry.name: _speed(result, entry) for entry in result.entries} for result in results]
    units = [speed[1] for column in columns for speed in column.values() if speed is not None]
    values = {name: [column.get(name) for column in columns] for name in names}
    numbers = {name: [None if speed is None else speed[0] for speed in row] for name, row in values.items()}
    return numbers, units[0] if units else ""


def _speed(result: Result, entry: Entry) -> tuple[float, str] | None:
    time = seconds(result, entry.name)
    if result.case.host:
        return None if time is None else (time * 1e6, "microseconds")
    return rate(result, entry)


def _curves(axes: Any, points: Sequence[tuple[str, float]], speeds: dict[str, list[float | None]]) -> None:
    for i, (name, values) in enumerate(speeds.items()):
        pairs = sorted((x, y) for (_, x), y in zip(points, values, strict=True) if y is not None)
        axes.plot(*zip(*pairs, strict=True), marker="o", label=name, **_look(i))
    axes.set_xscale("log", base=2)
    axes.set_xlabel(points[0][0])
    axes.set_ylim(bottom=0)


def _bars(axes: Any, rows: Sequence[str], speeds: dict[str, list[float | None]]) -> None:
    height = 0.8 / max(len(speeds), 1)
    for i, (name, values) in enumerate(speeds.items()):
        places = [row + i * height for row in range(len(rows))]
        axes.barh(places, [value or 0.0 for value in values], height, label=name, **_look(i))
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], rows, fontsize="small")
    axes.invert_yaxis()


def _look(i: int) -> dict[str, Any]:
    """Ten colours, strong and then pale."""
    return {"color": f"C{i % 10}", "alpha": 1.0 if i < 10 else 0.5}
