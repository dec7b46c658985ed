"""Amax and cast of lists of tensors on a GPU, each read once for all its casts, recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops import quantize
from minifloat.ops.launch import MOST_BY_VALUE, most_matrices, ready
from minifloat.ops.quantize import amax_shape, blocks, casts_blocks, empty_cast, nvfp4, per_tensor
from minifloat.ops.quantize.job import CastJob, CastTarget, groups
from minifloat.ops.quantize.reference import CastRequest, Output, RequestedCasts, as_matrix
from minifloat.ops.tape import Recorder


def casts(fmt: Format) -> bool:
    """Whether there are kernels for the format; others are the reference's, but for those that are rotated first."""
    if fmt.scale_rule == "two_level":
        return fmt.block == 16
    whole = fmt.block == 0 and fmt.transform == "none" and (fmt.scaling.own or fmt.scale_rule == "given")
    return whole or casts_blocks(fmt)


def _rotates_first(fmt: Format) -> bool:
    """Whether a format is rotated by a launch of its own, to bf16; NVFP4's kernels rotate themselves.

    Scales of other rules than powers of two depend on the dtype that is cast.
    """
    plain = replace(fmt, transform="none")
    return fmt != plain and casts_blocks(plain) and fmt.scaling.power_of_two


def amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """Implements the operation; whole tensors in one launch a dtype, a rotated one in the same reading."""
    parsed = [parse(spec) for spec in formats]
    if not all(map(casts, parsed)):
        return quantize.amax.reference(xs, formats, dims)
    if len({x.device for x in xs}) > 1:
        return [amax([x], [spec], [dim])[0] for x, spec, dim in zip(xs, formats, dims, strict=True)]
    single = [not fmt.amax_per_row and (fmt.block == 0 or fmt.scale_rule == "two_level") for fmt in parsed]
    rotated = [fmt.transform == "hadamard16" for fmt in parsed]
    # Not parts of one tensor: outputs of an operation must not share memory.
    results = [_zeros(amax_shape(fmt, dim, *x.shape), x) for x, fmt, dim in zip(xs, parsed, dims, strict=True)]
    plain: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for i, (x, fmt, dim, found) in enumerate(zip(xs, parsed, dims, results, strict=True)):
        check(x, None, fmt, dim)
        if rotated[i] and i > 0 and x is xs[i - 1] and single[i - 1] and not rotated[i - 1]:
            plain[x.dtype].pop()
            nvfp4.amax([ready(x)], fmt, dim, [found], plain=[results[i - 1]])
        elif rotated[i] or fmt.amax_per_row:
            nvfp4.amax([ready(x)], fmt, dim, [found])
        elif single[i]:
            plain.setdefault(x.dtype, []).append((ready(x), found))
        else:
            nothing = found.new_empty(0)
            target = CastTarget(fmt, dim, None, nothing, nothing, found, False)
            blocks.amax([CastJob(ready(x), None, *((target, None) if dim == ROWWISE else (None, target)))])
    most = most_matrices(xs[0].get_device())
    for pairs in plain.values():
        for first in range(0, len(pairs), most):
            group = pairs[first : first + most]
            per_tensor.amax([x for x, _ in group], [found for _, found in group])
    return results


def cast(
    xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], formats: Sequence[str],
    dims: Sequence[int], k_major: Sequence[bool], noop: Tensor | None, as_values: Sequence[bool] = (),
    shared: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Implements the operation; a rowwise cast and the columnwise one of the same tensor after it are one pass.

    Args:
        as_values: which casts give bf16 values [M, K] in lieu of codes, where those are numbers of bf16.
        shared: two orientations have one scale in memory, where it is the same.
    """
    parsed = [parse(spec) for spec in formats]
    if not all(casts(fmt) or _rotates_first(fmt) for fmt in parsed):
        return quantize.cast.reference(xs, given, rngs, formats, dims, k_major, noop)
    outputs: list[Tensor] = []
    jobs: list[CastJob] = []
    previous = None
    as_values = as_values or [False] * len(xs)
    for x, level, rng, fmt, dim, transposed, value in zip(
        xs, given, rngs, parsed, dims, k_major, as_values, strict=True
    ):
        check(x, level, fmt, dim)
        if _rotates_first(fmt):
            x, fmt, value = nvfp4.rotated(ready(x)), replace(fmt, transform="none"), False
        value = value and gives_values(fmt, level, x)
        transposed = transposed and not value
        codes, scale_inv = empty_cast(x, fmt, dim, transposed)
        if value:
            codes = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
        before = jobs[-1].targets[-1] if shared and x is previous else None
        if before is not None and fmt.symmetric and before.format == fmt and before.level is level:
            scale_inv = before.scale_inv
        own_amax = _zeros((int(fmt.scale_rule == "given"),), x)
        target = CastTarget(fmt, dim, level, codes, scale_inv, own_amax, transposed)
        outputs += codes, scale_inv, own_amax
        add(jobs, x, rng, target, x is previous)
        previous = x
    launch(jobs, noop)
    return outputs


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def gives_values(fmt: Format, level: Tensor | None, x: Tensor) -> bool:
    """Whether a cast may give bf16 values in lieu of codes."""
    if fmt.scale_rule == "two_level":
        return nvfp4.gives_values(fmt, x)
    return level is None and casts_blocks(fmt) and blocks.gives_values(fmt, x)


def add(jobs: list[CastJob], x: Tensor, rng: Tensor | None, target: CastTarget, follows: bool) -> None:
    """Adds a cast to the last job, which is of the same tensor if it ``follows``, where one pass does both."""
    if follows and _one_pass(jobs[-1], target, rng):
        jobs[-1] = jobs[-1]._replace(column=target, rng=jobs[-1].rng if rng is None else rng)
    elif target.dim == ROWWISE:
        jobs.append(CastJob(ready(x), rng, target, None))
    else:
        jobs.append(CastJob(ready(x), rng, None, target))


def check(x: Tensor, level: Tensor | None, fmt: Format, dim: int) -> None:
    """Checks what a kernel would not notice."""
    if level is not None and level.device != x.device:
        raise ValueError(f"an amax or scale on {level.device} for a tensor on {x.device}; move it there, as by .to()")
    if fmt.transform == "hadamard16" and dim == ROWWISE:
        raise ValueError("the Hadamard transform rotates groups of tokens: columnwise casts only")


def _one_pass(job: CastJob, column: CastTarget, rng: Tensor | None) -> bool:
    """Whether one kernel makes the rowwise operand of ``job`` and this columnwise one."""
    row = job.row
    if row is None or job.column is not None or column.dim != COLUMNWISE:
        return False
    if _kernel(row.format) is not _kernel(column.format):
        return False
    if job.rng is not None and rng is not None and job.rng is not rng:
        return False
    one_level = row.level is column.level or row.format.scale_rule == "two_level"  # which takes one for each
    return one_level and (row.format == column.format or row.format.scale_rule == "two_level")


def launch(jobs: Sequence[CastJob], noop: Tensor | None) -> None:
    """Runs jobs, those that are alike in one launch; none where ``noop``, fp32 [1] on the device, is not 0."""
    for group in groups(jobs):
        _kernel(group[0].targets[0].format)(group, noop)


def _kernel(fmt: Format) -> Callable[..., None]:
    if fmt.scale_rule == "two_level":
        return nvfp4.cast
    return blocks.cast if fmt.block else per_tensor.cast


class RecordedCasts(RequestedCasts):
    """Does what is requested by kernels, as it did it at the first call of equal shapes.

    Args:
        separate: no outputs share memory, which those of an operation must not. ``as_values``: as of :func:`cast`.
    """

    def __init__(self, request: CastRequest, separate: bool = False, as_values: Sequence[bool] = ()) -> None:
        super().__init__(request)
        self.separate, self.as_values = separate, as_values
        self.two_level = [parse(spec).scale_rule == "two_level" for spec in request.formats]  # they keep their amaxes
        self.recorder = Recorder(separate, separate)

    def __call__(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], noop: Tensor | None
    ) -> tuple[Sequence[Output], Sequence[Tensor]]:
        most = most_matrices(xs[0].get_device()) if len(xs) > MOST_BY_VALUE else None
        results: Any
        results, _ = self.recorder(
            most, (*xs, *given, *rngs, noop),
            lambda: (self._step_by_step([as_matrix(x) for x in xs], given, rngs, noop), None),
        )  # fmt: skip
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
            amaxes = amax([xs[i] for i in request.amax_of], request.amax_formats, request.amax_dims)
        if not request.cast_of:
            return [*amaxes]
        levels = [given[j] if own < 0 else amaxes[own] for j, own in enumerate(request.own_level)]
        sources = [xs[i] for i in request.cast_of]
        kinds = request.formats, request.dims, request.k_major
        made = cast(sources, levels, rngs, *kinds, noop, self.as_values, not self.separate)
        results: list[Tensor | None] = []
        for j, (level, own, kept) in enumerate(zip(levels, request.own_level, self.two_level, strict=True)):
            results += *made[3 * j : 3 * j + 3], level if own < 0 or kept else None
        return results


MOST_REQUESTS = 256
"""Most kept requests of operations: recipes that change at each step must not fill the memory."""


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


def recorded_amax(xs: Sequence[Tensor], formats: Sequence[str], dims: Sequence[int]) -> list[Tensor]:
    """GPU implementation of ``ops.quantize.amax``."""
    distinct, of = _distinct(xs)
    return list(_requested(of, tuple(formats), tuple(dims), None)(distinct, (), (), None)[1])


def recorded_cast(
    xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None], formats: Sequence[str],
    dims: Sequence[int], k_major: Sequence[bool], noop: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """GPU implementation of ``ops.quantize.cast``."""
    distinct, of = _distinct(xs)
    flat: list[Tensor] = []
    outputs, _ = _requested(of, tuple(formats), tuple(dims), tuple(k_major))(distinct, given, rngs, noop)
    for codes, scale_inv, measured, _ in outputs:
        flat += codes, scale_inv, codes.new_empty(0, dtype=torch.float32) if measured is None else measured
    return flat
