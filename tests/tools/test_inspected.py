"""The report of what ``minifloat.inspect`` wrote."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minifloat.tools.inspected import add_scalars, heat_map, read_lines, write_report

FINE = {"amax": 1.0, "underflow": 0.0, "saturation": 0.0, "snr": 30.0, "nonfinite": 0}
BAD = {"snr": None, "nonfinite": 3}


def line(step: int, layer: str, role: str, **losses: Any) -> str:
    return json.dumps({"step": step, "layer": layer, "role": role, "orientation": "both"} | FINE | losses) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks; on the second an operand is not finite, which makes the first one's next operand so, too."""
    first = [line(1, "a<b>", "X"), line(1, "a<b>", "W"), line(1, "c", "X", snr=20.0, underflow=0.5)]
    first += [line(3, "a<b>", "X", snr=None), line(3, "a<b>", "W"), line(3, "c", "X", **BAD)]
    second = [line(1, "a<b>", "X", snr=25.0), line(1, "a<b>", "W"), line(1, "c", "X", saturation=0.25, amax=9.0)]
    second += [line(3, "a<b>", "X"), line(3, "a<b>", "W", **BAD), line(3, "c", "X")[:-9]]  # as the run was killed
    (tmp_path / "inspect.jsonl").write_text("".join(first))
    (tmp_path / "inspect.rank1.jsonl").write_text("".join(second))
    return tmp_path


def test_the_page_stands_alone_and_names_the_first(folder: Path) -> None:
    page = write_report(folder).read_text()
    assert "First infinite or NaN elements: 3 in W of a&lt;b&gt;, step 3, rank 1." in page
    assert "http" not in page and page.count("src=") == 1 and 'src="data:image/png;base64,' in page
    assert (folder / "inspect.png").read_bytes().startswith(b"\x89PNG")
    rows = [row.partition("\n")[0].split("<td>")[1:] for row in page.split("<tr>")[2:]]
    assert [row[:2] for row in rows] == [["a&lt;b&gt;", "W"], ["c", "X"], ["a&lt;b&gt;", "X"]]
    assert rows[1][3:] == ["9", "50.00%", "25.00%", "-inf", "3"] and rows[2][-2:] == ["25.0", "0"]

    for path in folder.glob("*.jsonl"):
        path.write_text(path.read_text().replace('"nonfinite": 3', '"nonfinite": 0'))
    assert "No operand had an infinite or NaN element." in write_report(folder).read_text()


def test_the_heat_map_has_the_worst_of_all_ranks(folder: Path) -> None:
    panels = {axes.get_title(): axes for axes in heat_map(read_lines(folder)).axes if axes.get_title()}

    def cells(title: str) -> list[list[float]]:
        shown: Any = panels[title].images[0].get_array()
        return np.ma.filled(shown, math.nan).tolist()  # type: ignore[no-any-return]

    assert cells("SNR (dB) of X") == [[25.0, 30.0], pytest.approx([20.0, math.nan], nan_ok=True)]
    assert cells("underflow (%) of X") == [[0.0, 0.0], [50.0, 0.0]]
    assert cells("saturation (%) of X") == [[0.0, 0.0], [25.0, 0.0]]
    assert np.isnan(cells("SNR (dB) of dY")).all()
    crosses = {title: [mark.get_xydata().tolist() for mark in axes.lines] for title, axes in panels.items()}
    assert crosses["SNR (dB) of X"] == [[[1, 1]]] and crosses["underflow (%) of W"] == [[[1, 0]]]
    assert len(panels) == 9 and not crosses["SNR (dB) of dY"]
    assert [label.get_text() for label in panels["SNR (dB) of X"].get_yticklabels()] == ["a<b>", "c"]


def test_scalars(folder: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: dict[tuple[str, int], float] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            assert (tag, step) not in self.scalars
            self.scalars[tag, step] = value

    add_scalars(read_lines(folder), writer := Writer())
    assert writer.scalars["snr/a<b>/X/both", 1] == 25 and writer.scalars["amax/c/X/both", 1] == 9
    assert writer.scalars["nonfinite/c/X/both", 3] == 3 and ("snr/c/X/both", 3) not in writer.scalars


def test_missing_parts_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no lines in inspect.jsonl.*Inspection.write"):
        read_lines(tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        heat_map(read_lines(folder))
