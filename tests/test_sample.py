"""Samples of the combinations of parameters."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest

from tests.helpers.sample import each_twice, sample


@pytest.mark.parametrize("sizes", [[7, 3], [5, 4, 2], [2, 2], [1, 6], [6]], ids=str)
@pytest.mark.parametrize(("together", "times"), [(1, 2), (2, 1)])
def test_each_value_and_each_pair_is_there(sizes: list[int], together: int, times: int) -> None:
    found = sample(sizes, together, times, late=lambda _: False)
    assert len(set(found)) == len(found) <= times * max(sizes) ** min(together, len(sizes)) * 1.5
    assert found == sample(sizes, together, times, late=lambda _: False)
    for axes in combinations(range(len(sizes)), min(together, len(sizes))):
        counts = Counter(tuple(each[axis] for axis in axes) for each in found)
        others, values = 1, 1
        for axis, size in enumerate(sizes):
            others, values = (others, values * size) if axis in axes else (others * size, values)
        assert len(counts) == values and min(counts.values()) >= min(times, others)


@each_twice
@pytest.mark.parametrize(("a", "b"), [(1, 2), pytest.param(3, 4, id="named")], ids=str)
@pytest.mark.parametrize("letter", ["x", "y", pytest.param("z", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(5))
def test_cases_are_named_as_pytest_names_them(
    a: int, b: int, letter: str, number: int, request: pytest.FixtureRequest
) -> None:
    assert request.node.name.endswith(f"[{number}-{letter}-{'named' if a == 3 else '1-2'}]")
