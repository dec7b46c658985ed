"""Gives a test a sample of the combinations of its parameters, where all of them are many near-copies."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, product
from math import prod
from typing import Any, TypeVar

import pytest
from _pytest.mark.structures import Mark, ParameterSet

Test = TypeVar("Test", bound=Callable[..., None])


def each_once(test: Test) -> Test:
    """Samples the ``parametrize`` marks below, the same way each time: each value of each mark is in a case."""
    return _sampled(test, together=1, times=1)


def each_twice(test: Test) -> Test:
    """As `each_once`, with each value in two cases."""
    return _sampled(test, together=1, times=2)


def each_pair(test: Test) -> Test:
    """As `each_once`, with each pair of values of two marks in a case."""
    return _sampled(test, together=2, times=1)


def first_by_default(test: Test) -> Test:
    """Makes all cases of the ``parametrize`` marks below slow but for the first: the others go the same way."""

    def chosen(axes: list[list[ParameterSet]]) -> list[ParameterSet]:
        first, *others = map(_joined, map(list, product(*axes)))
        return [
            first,
            *(pytest.param(*each.values, marks=[*each.marks, pytest.mark.slow], id=each.id) for each in others),
        ]

    return _parametrized(test, chosen)


def sample(sizes: list[int], together: int, times: int, late: Callable[..., bool]) -> list[tuple[int, ...]]:
    """Combinations of the axes' indices that have those of each ``together`` axes ``times``, or as often as all do."""

    together = min(together, len(sizes))

    def parts(indices: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
        return list(combinations(enumerate(indices), together))

    every = list(product(*map(range, sizes)))
    random.Random(0).shuffle(every)
    every.sort(key=late)
    missing = {}
    for part in {part for indices in every for part in parts(indices)}:
        missing[part] = min(times, len(every) // prod(sizes[axis] for axis, _ in part))
    chosen = set()
    for fewest in range(len(parts(every[0])), 0, -1):  # those first that have many missing parts
        for indices in every:
            if indices not in chosen and sum(missing[part] > 0 for part in parts(indices)) >= fewest:
                chosen.add(indices)
                for part in parts(indices):
                    missing[part] -= 1
    return sorted(chosen)


def _sampled(test: Test, together: int, times: int) -> Test:
    def chosen(axes: list[list[ParameterSet]]) -> list[ParameterSet]:
        def values(indices: tuple[int, ...]) -> list[ParameterSet]:
            return [axis[i] for axis, i in zip(axes, indices, strict=True)]

        def slow(indices: tuple[int, ...]) -> bool:
            return any(value.marks for value in values(indices))

        return [_joined(values(each)) for each in sample([len(axis) for axis in axes], together, times, slow)]

    return _parametrized(test, chosen)


def _parametrized(test: Test, chosen: Callable[[list[list[ParameterSet]]], list[ParameterSet]]) -> Test:
    """The test with one ``parametrize`` mark, of the cases that are ``chosen`` of those of its marks."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]  # type: ignore[attr-defined]
    cases = chosen([_values(mark) for mark in marks])
    return pytest.mark.parametrize([name for mark in marks for name in _names(mark)], cases)(test)


def _names(mark: Mark) -> list[str]:
    names = mark.args[0]
    return [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)


def _values(mark: Mark) -> list[ParameterSet]:
    """The mark's sets of values, each with the id that pytest would give it."""
    names, ids = _names(mark), mark.kwargs.get("ids")
    found = []
    for i, given in enumerate(mark.args[1]):
        values = ParameterSet.extract_from(given, force_tuple=len(names) == 1)
        own = values.id or (ids[i] if isinstance(ids, list | tuple) else None)
        parts = [_id(value, f"{name}{i}", ids) for name, value in zip(names, values.values, strict=True)]
        found.append(pytest.param(*values.values, marks=values.marks, id=own or "-".join(parts)))
    return found


def _id(value: Any, default: str, ids: Any) -> str:
    if callable(ids) and (found := ids(value)) is not None:
        return str(found)
    if isinstance(value, str | int | float | None):
        return str(value)
    return getattr(value, "__name__", default)


def _joined(parts: list[ParameterSet]) -> ParameterSet:
    return pytest.param(
        *(value for part in parts for value in part.values),
        marks=[mark for part in parts for mark in part.marks],
        id="-".join(str(part.id) for part in parts if part.values),
    )
