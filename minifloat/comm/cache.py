"""What follows from row counts and formats alone, found once: finding it takes longer than a small tensor travels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

MOST_KEPT = 1024
"""Results that are kept of each function, the latest: row counts that never repeat must not fill the memory."""

_remembering: dict[Callable[..., Any], Callable[..., Any]] = {}
# Not in the closures of what is decorated, which Dynamo looks into before it gets to know that they are not used.


def kept(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` of hashable values, that remembers its results. Under a compiler, which traces it, it does not."""
    _remembering[function] = functools.lru_cache(MOST_KEPT)(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        result: T = _remembering[function](*args, **kwargs)
        return result

    return call
