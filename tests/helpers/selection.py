"""Which cases of a product run by default."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def diagonals(every: int, *axes: Iterable[Any]) -> list[Any]:
    """The product of the axes, of which one in `every` runs by default, the others are ``slow``.

    The default cases are those whose indices add to a multiple of `every`: all values of all axes where another axis
    has at least `every` values, and of two such axes equally many pairs for each value.
    """
    indexed = [list(enumerate(axis)) for axis in axes]
    return [
        pytest.param(*[value for _, value in case], marks=[pytest.mark.slow] * (sum(i for i, _ in case) % every != 0))
        for case in product(*indexed)
    ]
