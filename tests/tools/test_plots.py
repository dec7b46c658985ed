"""What can be read off the plots: scales that are shared where panels are compared, and a legend that hides no bar."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minifloat.tools.bench import plots
from minifloat.tools.bench.measure import COPY, Rounds
from minifloat.tools.bench.registry import Case
from minifloat.tools.bench.run import Entry
from minifloat.tools.bench.run import Result as Timed
from minifloat.tools.train import study_report
from minifloat.tools.train.run import Metrics, Run
from minifloat.tools.train.study import BASELINE, CONTROLS, Conditions, Job, Result
from minifloat.tools.train.study_statistics import outcomes


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    save = Figure.savefig

    def saving(figure: Any, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", saving)
    return saved


def test_a_row_of_panels_has_one_scale(drawn: list[Any], tmp_path: Path) -> None:
    names = ["current", "delayed", "mxfp8", "block", "nvfp4"]
    sizes = dict(zip((BASELINE, *CONTROLS, *names), (0, 0.001, 0.002, 0.003, 0.02, 0.004, 0.005, 0.08), strict=True))
    results = {}
    conditions = Conditions("micro", 4, 1, 1e-3, "text", "cpu")
    for name, size in sizes.items():
        for seed in range(3):
            losses = [5.0 + size * step * (1 + seed / 5) for step in range(1, 5)]
            history = tuple(Metrics(i + 1, loss, 1.0, 1e-3, 0.1, 1.0, loss) for i, loss in enumerate(losses))
            results[Job(name, seed)] = Result(Job(name, seed), conditions, Run(name, history, Counter(), None, 1))
    found = outcomes(study_report.final_losses(results), BASELINE, list(CONTROLS), dict.fromkeys(names, 0.005))
    study_report.plot_gaps(results, found, tmp_path / "gaps.png")
    (figure,) = drawn
    panels = figure.get_axes()
    assert len(panels) == 7
    tops = [panel.get_ylim()[1] for panel in panels]
    assert len(set(tops[:4])) == 1 and len(set(tops[4:])) == 1 and tops[0] != tops[4]
    for panel in panels:
        assert panel.get_ylim()[0] == 0
        highest = max(float(max(line.get_ydata())) for line in panel.get_lines())
        assert highest <= panel.get_ylim()[1]


@pytest.mark.parametrize("contenders", [3, 14])
def test_the_legend_is_beside_the_bars(drawn: list[Any], tmp_path: Path, contenders: int) -> None:
    names = [f"contender {i}, of a long name" for i in range(contenders)]
    times = {COPY: [1.0]} | {name: [1.0 + i] for i, name in enumerate(names)}
    entries = [Entry(name, "ok") for name in names]
    rounds = Rounds({"sustained": times}, {"sustained": [None]})
    rows = [Timed("suite", f"row {i}", Case((), tuple(names[:1]), flops=4e12), entries, rounds, 100) for i in range(3)]
    plots.draw(rows, "bars", tmp_path / "bars.png")
    curves = [replace(row, case=replace(row.case, axis=("tokens", 2.0**i))) for i, row in enumerate(rows)]
    plots.draw(curves, "curves", tmp_path / "curves.png")
    for figure in drawn:
        (axes,), (legend,) = figure.get_axes(), figure.legends
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())
        whole = figure.get_window_extent()
        assert legend.get_window_extent().x1 <= whole.x1 and axes.get_window_extent().width > 0.5 * whole.width
