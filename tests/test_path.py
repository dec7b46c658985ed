"""``benchmarks/path.py``: what a call runs is counted, and a linear runs no more than it did."""

from __future__ import annotations

import json
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
MOST = {
    "linear current, forward": (11, 33, 46),
    "linear current, backward": (12, 36, 68),
    "linear delayed, forward": (17, 53, 84),
    "linear delayed, backward": (17, 50, 98),
    "linear block, forward": (12, 44, 84),
    "linear block, backward": (13, 46, 116),
    "linear mxfp8, forward": (12, 46, 94),
    "linear mxfp8, backward": (13, 48, 120),
    "linear nvfp4, forward": (12, 60, 153),
    "linear nvfp4, backward": (15, 70, 203),
    "LayerNormLinear current, forward": (22, 67, 95),
    "LayerNormLinear current, backward": (18, 49, 89),
    "MLP current, forward": (24, 76, 168),
    "MLP current, backward": (23, 72, 166),
    "layer current, forward": (29, 124, 427),
    "layer current, backward": (24, 78, 298),
    "experts mxfp8, forward": (20, 94, 499),
    "experts mxfp8, backward": (19, 74, 493),
}
"""Files, functions and calls, of Python 3.11; later ones have fewer frames. They only fall.

The goals: 9 files and 45 calls of a linear's forward under current scaling, 12 and 160 under others, 28 and 350 of a
layer's.
"""
MOST_LINES = 33_098
"""Of the library without its tools, which only fall, too."""


def test_the_library_grows_no_longer() -> None:
    library = Path(path.minifloat.__file__).parent
    files = [file for file in library.rglob("*.py") if file.relative_to(library).parts[0] != "tools"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES


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
    for name, most in MOST.items():
        counts = {column: found[name][column] for column in COLUMNS}
        assert all(counts[column] <= bound for column, bound in zip(COLUMNS, most, strict=True)), (name, counts, most)


@pytest.mark.slow
def test_ranks() -> None:
    found = path.measure(["column sequence-parallel current"])
    assert len(found) == 2 and all(path.counts(calls)["files"] > 5 for calls in found.values())
