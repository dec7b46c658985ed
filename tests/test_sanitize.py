"""Tests that the script for compute-sanitizer launches every kernel there is, here in Triton's interpreter."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from minifloat.ops.launch import Kernel
from minifloat.ops.matmul import kernels
from tests.helpers import sanitize

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the script itself is run")
ROOT = Path(__file__).parents[1]


def written_kernels() -> Iterator[str]:
    """The functions that the sources make a ``Kernel`` of, wherever."""
    for path in (ROOT / "minifloat").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Kernel":
                yield ast.unparse(node.args[0])


def counts(printed: str) -> dict[str, int]:
    """The table at the end: launches by kernel."""
    rows = [line.split() for line in printed.splitlines() if line.startswith(" ")]
    return {row[1]: int(row[0]) for row in rows if len(row) == 2}


def forgotten_kernel() -> None: ...


@pytest.mark.slow
def test_every_kernel_is_launched(capsys: pytest.CaptureFixture[str]) -> None:
    code = sanitize.main([])
    printed = capsys.readouterr().out
    assert code == 0, printed
    table = counts(printed)
    assert sorted(table) == sorted(written_kernels())
    assert all(table.values()) and sum(table.values()) <= 300, table
    assert f"{sum(table.values())} in all" in printed and "never" not in printed
    for name in sanitize.GROUPS:
        assert f"\n{name}: " in "\n" + printed


@pytest.mark.parametrize("hold", [lambda k: k, lambda k: {"a": k}, lambda k: [1, k]], ids=["alone", "dict", "list"])
def test_a_kernel_that_is_never_launched_is_named(
    hold: type, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "_forgotten", hold(Kernel(forgotten_kernel)), raising=False)
    monkeypatch.setattr(sanitize, "GROUPS", {"transpose": sanitize.transposes})
    assert sanitize.main([]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("never launched: ") and "forgotten_kernel" in last and "amax_kernel" in last
    assert "copy_bytes_kernel" not in last
