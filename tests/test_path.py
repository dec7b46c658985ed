"""``benchmarks/path.py``: what a call runs is counted, and a linear runs no more than it did."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import path
from minifloat import Linear

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "path.py"
COLUMNS = ("files", "functions", "calls")
ROWS = dict(re.findall(r"^\| ([^|]+) \| ([\d, |]+) \|$", path.DOCS.read_text(), re.M))
MOST = {name: [[int(number) for number in cell.split(",")] for cell in row.split("|")] for name, row in ROWS.items()}
"""What the tables of docs/architecture.md say: of a folder its files and lines, of a module files, functions and calls.

They only fall. The goals: 9 files and 45 calls of a linear's forward under current scaling, 12 and 160 under others, 28
and 350 of a layer's.
"""


def test_the_library_grows_no_longer() -> None:
    *_, (name, *counts) = path.lines()
    assert all(count <= most for count, [most] in zip(counts, MOST[name], strict=True)), counts


def test_counts() -> None:
    """Of delayed scaling, whose forward updates scales by an operation while gradients are on; others pass it by."""
    calls = path.passes(partial(Linear, 64, 16, dtype=torch.bfloat16, recipe="delayed", bias=False))
    for key, name in (("forward", "Linear.forward"), ("backward", "Tensor.backward")):
        assert name in [call.function for call in calls[key]]
        counts = path.counts(calls[key])
        assert counts["calls"] == sum(counts[place] for place in ("minifloat", "torch", "others"))
        assert 0 < counts["files"] <= counts["functions"] <= counts["minifloat"]
        assert bool(counts["in operations"]) == (key == "forward")


def test_counts_python_functions() -> None:
    def inner() -> int:
        return len([1, 2])

    calls, result = path.calls_of(lambda: inner() + inner())
    assert result == 4 and [call.function.split(".")[-1] for call in calls] == ["<lambda>", "inner", "inner"]
    assert [call.depth for call in calls] == [0, 1, 1] and {call.place for call in calls} == {"others"}


def test_linear_runs_no_more(tmp_path: Path) -> None:
    """In a process of its own, where nothing wraps PyTorch's functions."""
    subprocess.run(
        [sys.executable, SCRIPT, "linear ", "LayerNorm", "MLP", "layer", "experts", "--json", tmp_path / "counts.json"],
        check=True,
    )
    found = json.loads((tmp_path / "counts.json").read_text())
    for name, calls in found.items():
        module, _, which = name.rpartition(", ")
        counts, most = [calls[column] for column in COLUMNS], MOST[module][which == "backward"]
        assert all(count <= bound for count, bound in zip(counts, most, strict=True)), (name, counts, most)


def test_docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Writes the tables anew, and nothing beside them."""
    text = path.DOCS.read_text()
    monkeypatch.setattr(path, "DOCS", tmp_path / "architecture.md")
    path.DOCS.write_text(text)
    path.write_docs({f"one, {key}": dict.fromkeys(COLUMNS, 7) for key in ("forward", "backward")})
    written = path.DOCS.read_text()
    assert "| one | 7, 7, 7 | 7, 7, 7 |" in written and "| linear current" not in written
    assert written.split("\n\n")[:-2] == text.split("\n\n")[:-2]  # the lines of the library are as they are


@pytest.mark.slow
def test_ranks() -> None:
    found = path.measure(["column sequence-parallel current"])
    assert len(found) == 2 and all(path.counts(calls)["files"] > 5 for calls in found.values())
