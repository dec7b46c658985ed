"""``minifloat advise``: predictions from a table of measured linears, and the call that it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat.recipe import named
from minifloat.tools.advise import BASELINE, Advice, Line, Measured, advise
from tests.helpers.micro_training import invoke

SHAPES = [(m, n, k) for m in (1024, 4096) for n in (256, 1024, 4096) for k in (256, 1024, 4096)]


def seconds(name: str, shape: tuple[int, int, int]) -> float:
    """Of a device on which bf16 runs at 600 TFLOP/s, current scaling at twice that, both after a wait for the host."""
    host, speed = {BASELINE: (1e-4, 6e14), "minifloat current": (4e-4, 12e14), "minifloat block": (6e-4, 11e14)}[name]
    return max(host, 6 * math.prod(shape) / speed)


def result(**more: Any) -> dict[str, Any]:
    names = BASELINE, "minifloat current", "minifloat block"
    rows = [
        {
            "suite": "shapes", "row": " x ".join(map(str, shape)),
            "contenders": [{"name": name, "median_seconds": {"sustained": seconds(name, shape)}} for name in names]
            + [{"name": "minifloat current, compiled", "median_seconds": {"sustained": 1.0}}]
            + [{"name": "minifloat mxfp8", "median_seconds": {}}],  # failed its check
        }
        for shape in SHAPES
    ]  # fmt: skip
    return {"device": "cuda: a device", "date": "2026-11-27", "rows": [*rows, {"suite": "host", "row": "x"}]} | more


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(result()))
    return path


def test_predictions(table: Path) -> None:
    """What was measured as it is; in between at the speed of the neighbours."""
    measured = Measured.read(table)
    assert measured.recipes == ["current", "block"]
    for shape in SHAPES:
        assert measured.predict("current", shape) == seconds("minifloat current", shape)
    for between in ((4096, 4096, 3072), (4096, 3072, 3072), (3000, 4096, 4096)):
        assert measured.predict(BASELINE, between) == pytest.approx(seconds(BASELINE, between), rel=0.1)
    nearly = measured.predict("current", (4096, 4096, 4090))
    assert nearly == pytest.approx(seconds("minifloat current", (4096, 4096, 4096)), rel=0.01)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"small": nn.Linear(256, 256), "large": nn.Linear(4096, 4096)}) for _ in range(3)
        )


def test_layers_that_lose_stay(table: Path) -> None:
    """The best recipe is of the layers that gain; its rules name the others, and convert takes them."""
    with torch.device("meta"):
        model = Model()
    advice = advise(model, 4096, Measured.read(table))
    assert [(line.pattern, line.count, line.shape) for line in advice.lines] == [
        ("layers.*.small", 3, (4096, 256, 256)), ("layers.*.large", 3, (4096, 4096, 4096))
    ]  # fmt: skip
    assert advice.lines[0].gain("current") == 0.25 and advice.lines[1].gain("current") == pytest.approx(1.717986)
    assert advice.best == "current" and advice.total("current") < advice.total("current", mixed=False)
    assert advice.total("current") == pytest.approx(3 * (1e-4 + 4e-4))
    call = """convert(model, 'current', rules=[('layers.*.small', 'none')])"""
    assert str(advice).endswith(f"the linears would be 1.57 times as fast: {call}")
    assert type(model.layers[0]["large"]) is nn.Linear  # type: ignore[index]
    assert advise(model, 1, Measured.read(table)).best is None
    more = Measured.read(table)
    assert more.predict("block", (40960, 4096, 4096)) == pytest.approx(10 * more.predict("block", (4096, 4096, 4096)))
    assert more.predict("block", (40960, 4096, 3000)) == pytest.approx(10 * more.predict("block", (4096, 4096, 3000)))


def test_a_pattern_of_several_shapes(table: Path) -> None:
    """Names take its place, or the layers that gain would stay too; a model that is converted stays so."""
    with torch.device("meta"):  # of which the first and the last are left alone
        model = nn.Sequential(*(nn.Linear(size, size) for size in (64, 256, 4096, 256, 64)))
    minifloat.convert(model, "mxfp8", filter_fn=lambda module, name: True)
    advice = advise(model, 4096, Measured.read(table))
    assert [layer.recipe for layer in model] == [named("mxfp8")] * 5
    assert {line.pattern for line in advice.lines} == {"*"}
    rules = advice.rules("current")
    assert rules == [("1", "none"), ("3", "none")] and f"rules={rules}" in str(advice)
    report = minifloat.convert(model, "current", rules=rules)
    assert [layer.names for layer in report.converted] == [("2",)]


def test_the_recipe_is_chosen_with_the_layers_that_stay() -> None:
    """One is the fastest of all layers, the other where the small one stays in bf16."""
    small, large = (1, 256, 256), (1, 4096, 4096)
    seconds = {BASELINE: (1.0, 10.0), "mixed": (100.0, 5.0), "alone": (2.0, 8.0)}
    lines = [
        Line(name, (name,), shape, {of: each[i] for of, each in seconds.items()})
        for i, (name, shape) in enumerate({"small": small, "large": large}.items())
    ]
    advice = Advice(Measured("", "", {name: {} for name in seconds}), tuple(lines), ())
    assert advice.best == "mixed" and advice.total("mixed") == 6


def test_the_command(table: Path, tmp_path: Path) -> None:
    code, text = invoke("advise", "base", "--tokens", 4096, "--table", table)
    assert code == 0 and "measured 2026-11-27 on cuda: a device; this machine is cpu" in text
    assert "all of them" in text and "no recipe gains" in text
    (tmp_path / "broken.json").write_text("{}")
    (tmp_path / "empty.json").write_text(json.dumps(result(rows=[])))
    for arguments, message in (
        (("smal", "--tokens", 1), "there is no model 'smal': give one of micro"),
        (("small", "--tokens", 1, "--table", tmp_path / "broken.json"), "is no result of minifloat bench: KeyError"),
        (("small", "--tokens", 1, "--table", tmp_path / "empty.json"), "make it with: minifloat bench shapes"),
        (("small", "--tokens", 0), "--tokens"),
    ):
        code, text = invoke("advise", *arguments)
        assert code == 2 and message in text, text
