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
    "linear current, forward": (18, 43, 63),
    "linear current, backward": (14, 34, 70),
    "linear delayed, forward": (21, 60, 99),
    "linear delayed, backward": (19, 56, 103),
    "linear block, forward": (19, 55, 105),
    "linear block, backward": (15, 47, 127),
    "linear mxfp8, forward": (19, 58, 131),
    "linear mxfp8, backward": (15, 50, 140),
    "linear nvfp4, forward": (20, 72, 177),
    "linear nvfp4, backward": (19, 71, 216),
}
"""Files, functions and calls: those of 2026-11-24 and 5 %, of Python 3.11; later ones have fewer frames."""


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
    subprocess.run([sys.executable, SCRIPT, "linear ", "--json", tmp_path / "counts.json"], check=True)
    found = json.loads((tmp_path / "counts.json").read_text())
    for name, most in MOST.items():
        counts = {column: found[name][column] for column in COLUMNS}
        assert all(counts[column] <= bound for column, bound in zip(COLUMNS, most, strict=True)), (name, counts, most)


@pytest.mark.slow
def test_ranks() -> None:
    found = path.measure(["column sequence-parallel current"])
    assert len(found) == 2 and all(path.counts(calls)["files"] > 5 for calls in found.values())
