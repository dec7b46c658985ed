"""The examples and the code in the documents run, and what they print or assert is true."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch

from minifloat import Float8CurrentScaling, Format, MXFP8BlockScaling, Quantizer, QuantizerRole, formats
from minifloat.kernels.quantize import reference
from minifloat.recipe import NAMES

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTS = ("README.md", "docs/architecture.md", "docs/numerics.md")


def main_of(name: str) -> Callable[..., Any]:
    """The main function of an example."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]


def python_blocks(document: str) -> list[str]:
    """The fenced python blocks of a document, each of which runs by itself."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)


RUNNABLE = [
    pytest.param(code, id=f"{document}-{i}") for document in DOCUMENTS for i, code in enumerate(python_blocks(document))
]


# ---- Examples -------------------------------------------------------------------------------------------------------


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


# ---- Documents ------------------------------------------------------------------------------------------------------


def test_documents_have_code() -> None:
    """The blocks below are found: two examples of use in README.md, the worked format and rule, a worked vector."""
    assert [len(python_blocks(document)) for document in DOCUMENTS] == [2, 2, 1]


@pytest.mark.parametrize("code", RUNNABLE)
def test_code_in_documents(code: str) -> None:
    """Each block runs by itself; what it asserts holds."""
    exec(compile(code, "document", "exec"), {"__name__": "document"})


def test_a_new_scale_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/architecture.md: a function, a line in the registry, a name; casts, products and compilers follow."""
    code = next(code for code in python_blocks("docs/architecture.md") if "_scale_headroom" in code)
    defined: dict[str, Any] = {}
    exec(compile(code, "document", "exec"), defined)
    names = Literal[(*get_args(formats.ScaleRule), "headroom")]  # type: ignore[valid-type]
    monkeypatch.setattr(formats, "ScaleRule", names)
    monkeypatch.setitem(reference._SCALE_RULES, "headroom", defined["_scale_headroom"])
    fmt = Format("e4m3", block=64, scale_rule="headroom")  # type: ignore[arg-type]
    assert formats.parse(fmt.spec) == fmt
    operand = Quantizer(fmt)(torch.tensor([[3.0, -1.5]])).rowwise
    assert operand is not None and operand.codes.tolist() == [[0x76, 0xEE]]  # 224 and -112
    torch.testing.assert_close(operand.dequantize(), torch.tensor([[3.0, -1.5]]))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_are_tidy(document: str) -> None:
    """ASCII, lines of at most 120 characters, and links to files that exist."""
    path = ROOT / document
    text = path.read_text()
    assert text.isascii()
    assert [line for line in text.splitlines() if len(line) > 120] == []
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_readme_names_every_recipe() -> None:
    text = (ROOT / "README.md").read_text()
    assert [name for name in NAMES if f"`{name}`" not in text] == []
