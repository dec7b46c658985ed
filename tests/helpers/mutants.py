"""Mutants: small wrong changes of the package, each with tests one of which notices it.

``make mutants`` runs them, ``tests/test_mutants.py`` checks that they still fit the code. ``tests/mutants/*.txt`` has
them: a file and what pytest is given for it, then for each mutant a name, some text of the file, and what replaces it::

    == functional/router.py: functional/test_permutation.py nn/test_moe.py -k "order or loop"

    a negative index is kept
    - (flat < 0) | (flat >= num_experts)
    + flat >= num_experts

What no test could notice, since results are the same, is no mutant; nor is what only a GPU runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    """``old`` becomes ``new`` in the file ``path``; ``tests``: arguments of pytest. Paths are below ``ROOT``."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """The source of the mutant.

        Raises:
            ValueError: ``old`` is not there, or more than once.
        """
        if (found := source.count(self.old)) != 1:
            raise ValueError(f"mutant {self.name!r}: {self.path} has {self.old!r} {found} times; fit it to the code")
        return source.replace(self.old, self.new)


def mutants() -> Iterator[Mutant]:
    """Those of all tables."""
    for table in sorted(ROOT.glob("tests/mutants/*.txt")):
        for paragraph in table.read_text().strip().split("\n\n"):
            name, *lines = paragraph.split("\n")
            if name.startswith("== "):
                path, _, tests = name.removeprefix("== ").partition(": ")
                arguments = [f"tests/{each}" if ".py" in each else each for each in shlex.split(tests)]
                continue
            old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
            yield Mutant(name, f"minifloat/{path}", old, new, tuple(arguments))
