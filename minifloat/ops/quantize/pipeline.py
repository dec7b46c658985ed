"""Amax and cast of the tensors of one call by kernels, replayed at calls of equal layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from minifloat.ops import launch
from minifloat.ops.quantize import gpu
from minifloat.ops.quantize.reference import CastRequest, Output, RequestedCasts, as_matrix, read_amaxes
from minifloat.ops.replay import Recorder


class RecordedCasts(RequestedCasts):
    """Does what is requested by kernels, as it did it at the first call of equal shapes.

    Args:
        separate: no outputs share memory, which those of an operation must not.
        returned: so are the amaxes that delayed scaling measures; else the operation reads them and forgets them.
        as_values: as of ``gpu.cast``.
    """

    def __init__(
        self, request: CastRequest, separate: bool = False, as_values: Sequence[bool] = (), returned: bool = True
    ) -> None:
        super().__init__(request)
        self.separate, self.as_values = separate, as_values
        read = read_amaxes(request.formats, request.own_level)
        self.readers = [request.own_level.index(own) for own in read]  # of each the first cast that takes it
        self.shown = [own in read for own in request.own_level]
        self.recorder = Recorder(separate, separate and returned)

    def __call__(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], noop: Tensor | None
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        # A replay reads addresses alone: what is no view as a matrix is copied before its address is taken.
        xs = [x if x.is_contiguous() else as_matrix(x) for x in xs]
        most = launch.most_matrices(xs[0].get_device()) if len(xs) > launch.MOST_BY_VALUE else None
        results: Sequence[Any] = self.recorder(
            most, (*xs, *given, *rngs, noop), lambda: self._step_by_step([as_matrix(x) for x in xs], given, rngs, noop)
        )
        casts = 4 * len(self.request.cast_of)
        each = iter(results[:casts])
        return list(zip(each, each, each, each, strict=True)), results[casts:]

    def _step_by_step(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], noop: Tensor | None
    ) -> list[Tensor | None]:
        """Four parts of each cast, one after another, and, where nothing is cast, the amaxes."""
        request = self.request
        amaxes: list[Tensor] = []
        if request.amax_of:
            amaxes = gpu.amax([xs[i] for i in request.amax_of], request.amax_formats, request.amax_dims)
        if not request.cast_of:
            return [*amaxes]
        levels = [given[j] if own < 0 else amaxes[own] for j, own in enumerate(request.own_level)]
        sources = [xs[i] for i in request.cast_of]
        kinds = request.formats, request.dims, request.k_major
        made = gpu.cast(sources, levels, rngs, *kinds, noop, self.as_values, not self.separate)
        results: list[Tensor | None] = []
        for j, (level, own, shown) in enumerate(zip(levels, request.own_level, self.shown, strict=True)):
            results += *made[3 * j : 3 * j + 3], level if own < 0 or shown else None
        return results


MOST_REQUESTS = 256
"""Of operations: recipes that change at each step must not fill the memory."""


@lru_cache(MOST_REQUESTS)
def _requested(of: tuple[int, ...], formats: tuple[str, ...], dims: tuple[int, ...], k_major: Any) -> RecordedCasts:
    each = list(of), list(formats), list(dims)
    if k_major is None:
        return RecordedCasts(CastRequest(*each, [], [], [], [], []), True)
    return RecordedCasts(CastRequest([], [], [], *each, list(k_major), [-1] * len(of)), True)


def _distinct(xs: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Each tensor once, and which of them stands where in ``xs``."""
    places: dict[int, int] = {}
    of = tuple([places.setdefault(id(x), len(places)) for x in xs])
    return [xs[of.index(place)] for place in range(len(places))], of


def amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """GPU implementation of ``ops.quantize.amax``."""
    distinct, of = _distinct(xs)
    return list(_requested(of, tuple(formats), tuple(dims), None)(distinct, (), (), None)[1])


def cast(
    xs: Sequence[Tensor],
    given: Sequence[Tensor | None],
    rngs: Sequence[Tensor | None],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
    noop: Tensor | None,
) -> list[Tensor]:
    """GPU implementation of ``ops.quantize.cast``."""
    distinct, of = _distinct(xs)
    return _flat(_requested(of, tuple(formats), tuple(dims), tuple(k_major))(distinct, given, rngs, noop)[0])


def amax_and_cast(*lists: Sequence[Any]) -> Callable[..., list[Tensor]]:
    """GPU implementation of ``ops.quantize.amax_and_cast``, prepared for its lists."""
    work = RecordedCasts(CastRequest(*map(list, lists)), True)
    nothing = [None] * len(work.request.cast_of)

    def run(xs: Sequence[Tensor], rngs: Sequence[Tensor | None]) -> list[Tensor]:
        outputs, _ = work(xs, nothing, rngs, None)
        read: list[Any] = [outputs[j][3] for j in work.readers]
        return [*read, *[part for output in outputs for part in output[:2]]]

    return run


def _flat(outputs: Sequence[Output]) -> list[Tensor]:
    flat: list[Tensor] = []
    for codes, scale_inv, measured, _ in outputs:
        nothing = codes.new_empty(0, dtype=torch.float32) if measured is None else measured
        flat += codes, scale_inv, nothing
    return flat
