"""The first line of a docstring begins with a verb or with the name of the thing, not with half a sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minifloat"
CLAUSE = re.compile(
    r"(Those|That|What|Of|As|The same|It|Its|Their|They|Them|Where|How|Which|Whose|Who|For|In|To|By|From|With|On|Also"
    r"|If|When|There)\b"
)
"""Beginnings of a clause that completes an unspoken sentence, as in "Of one row." or "Where their groups begin."."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lists line and text of each string that stands alone: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def clauses(source: str) -> list[tuple[int, str]]:
    return [(line, text.partition("\n")[0]) for line, text in docstrings(ast.parse(source)) if CLAUSE.match(text)]


def test_no_docstring_begins_with_half_a_sentence() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    found = {str(file.relative_to(PACKAGE)): clauses(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""Those of a row."""',
        'class A:\n    """Where it is."""',
        'def f():\n    """As\n    g."""',
        'x = 1\n"""Of y."""',
    ],
)
def test_the_check_finds_all_kinds(source: str) -> None:
    assert len(clauses(source)) == 1
    assert clauses(re.sub('"""', '"""Returns ', source, count=1)) == []
