"""The examples run, and what they print is true."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minifloat import Float8CurrentScaling, MXFP8BlockScaling, QuantizerRole
from minifloat.recipe import NAMES

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def main_of(name: str) -> Callable[..., Any]:
    """The main function of an example."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_train_mlp(capsys: pytest.CaptureFixture[str]) -> None:
    """Every recipe starts within quantization error of bf16 and learns."""
    losses = main_of("train_mlp")()
    assert set(losses) == {"none", *NAMES}
    for recipe, curve in losses.items():
        assert all(math.isfinite(loss) for loss in curve)
        assert curve[0] == pytest.approx(losses["none"][0], rel=0.02), recipe
        assert curve[-1] < curve[0] / 10, recipe
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["bf16", *NAMES]


def test_custom_recipe() -> None:
    """Each layer multiplied in the formats that the factory gave it."""
    gemms = main_of("custom_recipe")()
    high, mxfp8 = "identity", MXFP8BlockScaling().quantizer(QuantizerRole()).row_format.spec
    e4m3, e5m2 = (
        Float8CurrentScaling().quantizer(QuantizerRole("linear", kind)).row_format.spec
        for kind in ("input", "grad_output")
    )
    assert {(g.gemm, g.a, g.b): count for g, count in gemms.items()} == {
        ("fprop", high, high): 2,
        ("fprop", high, mxfp8): 1,
        ("fprop", mxfp8, mxfp8): 1,
        ("dgrad", high, high): 2,
        ("dgrad", high, mxfp8): 1,
        ("dgrad", e5m2, e4m3): 1,
        ("wgrad", high, high): 3,
        ("wgrad", e5m2, e4m3): 1,
    }


def test_split_phase() -> None:
    assert main_of("split_phase")() == [True, True]
