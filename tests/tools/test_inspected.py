"""The report of what ``minifloat.inspect`` wrote, and ``minifloat train --inspect``, which writes it."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minifloat.inspection import MEANINGS
from minifloat.tools.inspected import add_scalars, heat_map, keep, read_lines, write_report
from minifloat.tools.train import loop
from tests.helpers.micro_training import invoke, write_texts

FINE = {"amax": 1.0, "underflow": 0.0, "saturation": 0.0, "snr": 30.0, "nonfinite": 0, "excess": 0.0}
BAD = {"snr": None, "nonfinite": 3}


def line(step: int, layer: str, role: str, **losses: Any) -> str:
    return json.dumps({"step": step, "layer": layer, "role": role, "orientation": "both"} | FINE | losses) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks; on the second an operand is not finite, which makes the first one's next operand so, too."""
    first = [line(1, "a<b>", "X"), line(1, "a<b>", "W"), line(1, "c", "X", snr=20.0, underflow=0.5, excess=0.4)]
    first += [line(3, "a<b>", "X", snr=None), line(3, "a<b>", "W"), line(3, "c", "X", **BAD)]
    second = [line(1, "a<b>", "X", snr=25.0), line(1, "a<b>", "W"), line(1, "c", "X", saturation=0.25, amax=9.0)]
    second += [
        line(3, "a<b>", "X"),
        line(3, "a<b>", "W", **BAD | {"nonfinite": 4}),
        line(3, "c", "X")[:-9],
    ]  # as the run was killed
    (tmp_path / "inspect.jsonl").write_text("".join(first))
    (tmp_path / "inspect.rank1.jsonl").write_text("".join(second))
    return tmp_path


def test_the_page_stands_alone_and_names_the_first(folder: Path) -> None:
    page = write_report(folder).read_text()
    assert "First infinite or NaN elements: 4 in W of a&lt;b&gt;, step 3, rank 1." in page
    assert "http" not in page and page.count("src=") == 1 and 'src="data:image/png;base64,' in page
    assert (folder / "inspect.png").read_bytes().startswith(b"\x89PNG")
    rows = [row.partition("\n")[0].split("<td>")[1:] for row in page.split("<tr>")[2:]]
    assert [row[:2] for row in rows] == [["a&lt;b&gt;", "W"], ["c", "X"], ["a&lt;b&gt;", "X"]]
    assert rows[1][3:] == ["40.0%", "9", "50.00%", "25.00%", "-inf", "3"] and rows[2][-2:] == ["25.0", "0"]
    assert all(f"<li>{name}: " in page for name in MEANINGS)

    for path in folder.glob("*.jsonl"):
        path.write_text(re.sub('"nonfinite": [34]', '"nonfinite": 0', path.read_text()))
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


def test_a_run_that_goes_on_drops_the_lines_of_all_ranks_after_its_step(folder: Path) -> None:
    keep(folder, 1)
    assert {(each.rank, each.step) for each in read_lines(folder)} == {(0, 1), (1, 1)}
    keep(folder, 0)
    assert not list(folder.glob("*.jsonl"))


def test_missing_parts_are_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no lines in inspect.jsonl.*Inspection.write"):
        read_lines(tmp_path / "nowhere")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        heat_map(read_lines(folder))


# ---- minifloat train --inspect ----


@pytest.fixture
def options(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "texts").mkdir()
    fixed = "--model micro --device cpu --batch-size 2 --accumulate 2 --recipe mxfp8"
    return ("train", write_texts(tmp_path / "texts"), *fixed.split(), "--out", tmp_path / "out")


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "inspect" / "mxfp8" / "inspect.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_inspected_and_goes_on(options: tuple[object, ...], tmp_path: Path) -> None:
    """Steps have the numbers of metrics.jsonl; lines that a run left after its checkpoint are not there twice."""
    out, page = tmp_path / "out", tmp_path / "out" / "inspect" / "mxfp8" / "inspect.html"
    code, said = invoke(*options, "--against", "bf16", "--steps", 2, "--inspect", 2)
    assert code == 0 and f"inspection: {page}" in said and page.exists(), said
    assert [path.name for path in (out / "inspect").iterdir()] == ["mxfp8"]
    first = lines_of(out)
    with page.with_suffix(".jsonl").open("a") as file:
        file.write(json.dumps(first[0] | {"step": 3}) + '\n{"step": 3')
    code, said = invoke(*options, "--against", "bf16", "--steps", 5, "--inspect", 2, "--resume")
    lines = lines_of(out)
    assert code == 0 and lines[: len(first)] == first, said
    assert [line["step"] for line in lines] == sorted(len(first) * [1, 3, 5])
    assert {line["layer"].split(".")[-1] for line in lines} == {line["layer"].split(".")[-1] for line in first}
    assert {line["role"] for line in lines} == {"X", "W", "dY"}
    assert "of 3 inspected steps" in page.read_text()

    plain = (*options[:-1], tmp_path / "plain")
    assert invoke(*plain, "--steps", 2)[0] == 0 and invoke(*plain, "--steps", 5, "--resume")[0] == 0
    assert losses_of(tmp_path / "plain") == losses_of(out)[:5]
    assert invoke("inspect-report", page.parent, "--tensorboard", tmp_path / "events")[0] == 0
    assert list((tmp_path / "events").glob("events*"))


def test_a_run_that_fails_leaves_the_step(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = loop.train_step, [0]

    def spoilt(model: Any, *arguments: Any) -> tuple[float, float]:
        calls[0] += 1
        if calls[0] == 2:
            model.get_parameter("blocks.0.layernorm_mlp.fc2.weight").data[3, 5] = math.inf
        return step(model, *arguments)

    monkeypatch.setattr(loop, "train_step", spoilt)
    code, said = invoke(*options, "--steps", 4, "--inspect", 1)
    assert code == 1 and "step 2 has loss" in said, said
    assert {line["step"] for line in lines_of(tmp_path / "out")} == {1, 2}
    page = (tmp_path / "out" / "inspect" / "mxfp8" / "inspect.html").read_text()
    assert "First infinite or NaN elements: 1 in W of blocks.0.layernorm_mlp.fc2, step 2, rank 0." in page


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("--inspect 0", "'--inspect'"),
        ("--inspect 5 --cuda-graph", "--cuda-graph replays them; leave one out"),
        ("--inspect 5 --recipe bf16", "bf16 has none"),
    ],
)
def test_what_cannot_be_inspected_is_refused(options: tuple[object, ...], more: str, reason: str) -> None:
    code, said = invoke(*options, *more.split())
    assert code == 2 and reason in " ".join(said.split()), said
