"""A run's report: tables on the terminal, one JSON file with every round, and plots."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from minifloat.tools.bench import plots, summary
from minifloat.tools.bench.against import Change
from minifloat.tools.bench.measure import Mode
from minifloat.tools.bench.run import Entry, Result

NOT_RESULTS = "CPU: shapes are divided, nothing here is a result"
GIB = 2**30


def show(result: Result, console: Console) -> None:
    """Prints one row's table; times and ratios are sustained, then in bursts where these were measured."""
    unit, factor = ("us", 1e6) if result.case.host else ("ms", 1e3)
    modes = list(result.rounds.seconds)
    label = " / ".join(modes)
    columns = [
        "contender",
        f"{unit}, {label}",
        "speed",
        f"x baseline, {label}",
        "roofline",
        "peak GiB",
        "error",
        "goals",
    ]
    table = Table(*columns, title=f"{result.suite}: {result.row}", title_justify="left", box=SIMPLE_HEAD)
    for entry in result.entries:
        table.add_row(*_cells(result, entry, modes, factor), style=_style(entry))
    console.print(table)
    console.print(_conditions(result), highlight=False)


def _cells(result: Result, entry: Entry, modes: Sequence[Mode], factor: float) -> list[str]:
    peak = _number(entry.peak, ".2f", 1 / GIB) if result.case.memory_baseline else ""
    error = _number(entry.error, ".2g")
    if entry.status != "ok":
        return [entry.name, "", "", "", "", peak, error, _said(entry)]
    speed = summary.rate(result, entry)
    times = [_number(summary.seconds(result, entry.name, mode), ".3f", factor) for mode in modes]
    ratios = [_number(summary.ratio(result, entry.name, mode), ".2f") for mode in modes]
    goals = ", ".join(_goal(verdict) for verdict in summary.verdicts(result, entry))
    return [
        entry.name, " / ".join(times), "" if speed is None else f"{speed[0]:.0f} {speed[1]}",
        " / ".join(filter(None, ratios)), _number(summary.fraction(result, entry), ".1%"), peak, error, goals,
    ]  # fmt: skip


def _said(entry: Entry) -> str:
    said = {"wrong": entry.message, "unavailable": f"not here: {entry.message}"}
    return escape(said.get(entry.status, f"{entry.status}: {entry.message}"))


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "" if value is None else format(value * factor, form)


def _goal(verdict: summary.Verdict) -> str:
    form = {"ratio": ".2f", "roofline": ".0%", "memory": ".2f"}[verdict.measure]
    wanted = f"{verdict.measure} {format(verdict.goal, form)}"
    if verdict.value is None:
        return f"{wanted} not measured"
    return f"{wanted} met" if verdict.met else f"{wanted} MISSED ({format(verdict.value, form)})"


def _style(entry: Entry) -> str | None:
    return {"wrong": "bold red", "failed": "bold red", "unavailable": "dim", "skipped": "dim"}.get(entry.status)


def _conditions(result: Result) -> str:
    parts = [] if result.baseline is None else [f"baseline: {result.baseline}"]
    for mode, clocks in result.rounds.clocks.items():
        known = [clock for clock in clocks if clock is not None]
        clock = f"SM clock {statistics.median(known):.0f} MHz" if known else "SM clock unknown"
        copy = summary.copy_rate(result, mode)
        parts.append(f"{mode}: {clock}" + ("" if copy is None else f", copy {copy:.0f} GB/s"))
    return "; ".join(parts) + "\n"


def conclude(results: Sequence[Result], console: Console) -> None:
    """Prints the geometric means over the rows of each suite, and what is wrong."""
    for suite in dict.fromkeys(result.suite for result in results):
        means = summary.mean_ratios(results, suite)
        if means:
            told = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
            console.print(f"{suite}, geometric mean of the ratios over its rows: {told}", highlight=False)
    for result in results:
        for problem in result.problems:
            console.print(f"FAILED: {problem}", style="bold red", highlight=False, markup=False)


def show_changes(changes: Sequence[Change], revision: str, console: Console) -> None:
    """Prints how this tree compares with a revision; torch's own lines show how steady the machine is."""
    table = Table("row", "contender", f"{revision} ms", "this tree ms", "times as fast", "", box=SIMPLE_HEAD)
    for change in changes:
        problems = {f"{revision}: ": change.old_problem, "this tree: ": change.new_problem}
        said = "; ".join(f"{side}{problem}" for side, problem in problems.items() if problem)
        times = [_number(time, ".3f", 1e3) for time in (change.old, change.new)]
        said = said or ("" if change.ratio else "not timed in both")
        table.add_row(change.row, change.contender, *times, _number(change.ratio, ".3f"), escape(said))
    console.print(table)


def write(
    results: Sequence[Result], facts: Mapping[str, Any], out: Path, name: str, more: Mapping[str, Any] | None = None
) -> Path:
    """Writes ``DATE-NAME.json`` and the plots beside it; a number is added to names that are taken.

    Returns:
        The JSON file.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = _free(out, f"{date.today().isoformat()}-{name}")
    rows = [summary.as_dict(result) for result in results]
    content = {**facts, **(more or {}), "rows": rows}
    path.write_text(json.dumps(content, allow_nan=False) + "\n")
    for suite in dict.fromkeys(result.suite for result in results):
        drawn = [result for result in results if result.suite == suite]
        plots.draw(drawn, f"{suite}, {facts['device']}", path.with_name(f"{path.stem}-{suite}.png"))
    return path


def _free(out: Path, stem: str) -> Path:
    number, path = 1, out / f"{stem}.json"
    while path.exists():
        number += 1
        path = out / f"{stem}-{number}.json"
    return path
