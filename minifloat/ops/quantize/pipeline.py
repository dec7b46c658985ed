"""Amax and cast of the tensors of one call, recorded at the first call and replayed at the next ones of equal shapes.

Which kernel does what on how many programs follows from formats and shapes alone. Finding it again costs more than the
GPU takes for a small layer, so that what the first call launched is kept, with a place for each tensor that changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.launch import Prepared, recorded
from minifloat.ops.quantize import gpu
from minifloat.ops.quantize.job import Request

MOST_SHAPES = 256
"""Recordings that a request keeps: a program whose token counts never repeat must not fill the memory."""

Output = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Of one cast: codes, scales, the measured amax under delayed scaling, and the amax or scale that it was given."""


def run(
    request: Request, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None]
) -> tuple[list[Output], list[Tensor]]:
    """The casts of ``xs``, and the amaxes that were found; of both what the request asks for.

    Args:
        given, rngs: for each cast its amax or scale, if known, and its random seed.
    """
    if not all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in xs):  # kernels would read copies
        return _step_by_step(request, xs, given, rngs)
    device = xs[0].get_device()
    if not all(level is None or _plain(level, device) for level in given):
        return _step_by_step(request, xs, given, rngs)
    # Which tensors are one and the same is part of what was recorded. No comparison of a tensor with None: it is slow.
    everyone = [id(tensor) for tensor in (*xs, *given, *rngs)]
    missing = [level is None for level in given].count(True)
    first: dict[int, int] = {}
    places = [first.setdefault(each, place) for place, each in enumerate(everyone)]
    key = (device, *[(x.shape, x.dtype) for x in xs], *places, missing)
    if key not in request.known:
        if len(request.known) >= MOST_SHAPES:
            request.known.clear()
        return _record(request, key, xs, given, rngs)
    recording = request.known[key]
    return _step_by_step(request, xs, given, rngs) if recording is None else recording.replay(xs, given, rngs)


def _plain(level: Tensor, device: int) -> bool:
    """Its address is all that a kernel needs."""
    return level.dtype == torch.float32 and level.numel() == 1 and level.get_device() == device


def _step_by_step(
    request: Request, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None]
) -> tuple[list[Output], list[Tensor]]:
    amaxes: list[Tensor] = []
    if request.amax_of:
        amaxes = gpu.amax([xs[i] for i in request.amax_of], request.amax_formats, request.amax_dims)
    if not request.cast_of:
        return [], amaxes
    levels = [given[j] if own < 0 else amaxes[own] for j, own in enumerate(request.own_level)]
    sources = [xs[i] for i in request.cast_of]
    made = gpu.cast(sources, levels, rngs, request.formats, request.dims, request.k_major, None)
    return list(zip(made[0::3], made[1::3], made[2::3], levels, strict=True)), amaxes


def _record(
    request: Request, key: Any, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None]
) -> tuple[list[Output], list[Tensor]]:
    with recorded() as launches:
        outputs, amaxes = _step_by_step(request, xs, given, rngs)
    slots: dict[int, int] = {}  # of a tensor, by its identity, the place in the list that `_Recording.replay` makes
    measured = [output[2] for output in outputs if output[2] is not None and output[2].numel()]
    made = [*[o[0] for o in outputs], *[o[1] for o in outputs], *amaxes, *measured]
    everything = [*xs, *given, *rngs, *made]
    for slot, tensor in enumerate(everything):
        if tensor is not None:
            slots.setdefault(id(tensor), slot)
    nothing = len(everything)
    for output in outputs:
        if output[2] is not None and output[2].numel() == 0:
            slots.setdefault(id(output[2]), nothing)  # needs an address and has none
    prepared = [launch.prepare(slots) for launch in launches]
    known = all(gpu.casts(parse(spec)) for spec in (*request.formats, *request.amax_formats))
    if launches and known and all(amax.numel() == 1 for amax in amaxes) and all(each is not None for each in prepared):
        request.known[key] = _Recording(request, prepared, outputs, nothing)  # type: ignore[arg-type]
    else:
        request.known[key] = None
    return outputs, amaxes


class _Recording:
    """The launches of a call, and what it allocates."""

    def __init__(self, request: Request, launches: list[Prepared], outputs: list[Output], nothing: int) -> None:
        self.launches = launches
        self.codes = [(codes.shape, codes.stride()) for codes, _, _, _ in outputs]
        self.scales = [(scale.shape, scale.stride(), scale.dtype) for _, scale, _, _ in outputs]
        self.own_level = request.own_level
        self.amaxes = len(request.amax_of)
        parsed = [parse(spec) for spec in request.formats]
        self.measures = [fmt.scale_rule == "given" for fmt in parsed]
        # Of casts that share a scale, one of a tensor in both orientations, the second takes the first one's.
        self.shares = [
            j > 0 and fmt.symmetric and request.cast_of[j] == request.cast_of[j - 1] and parsed[j - 1] == fmt
            for j, fmt in enumerate(parsed)
        ]
        self.zeros = self.amaxes + sum(self.measures)
        # Casts whose amax is part of the operand; whether any amax is for the caller to see.
        self.shown = [fmt.scale_rule == "two_level" for fmt in parsed]
        self.shows = not parsed or any(self.shown)
        self.nothing = nothing

    def replay(
        self, xs: Sequence[Tensor], given: Sequence[Tensor | None], rngs: Sequence[Tensor | None]
    ) -> tuple[list[Output], list[Tensor]]:
        device = xs[0].device
        codes = [torch.empty_strided(shape, stride, dtype=torch.uint8, device=device) for shape, stride in self.codes]
        scales: list[Tensor] = []
        for (shape, stride, dtype), shared in zip(self.scales, self.shares, strict=True):
            scales.append(scales[-1] if shared else torch.empty_strided(shape, stride, dtype=dtype, device=device))
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (*xs, *given, *rngs, *codes, *scales)]
        zeros = torch.zeros(self.zeros, dtype=torch.float32, device=device) if self.zeros else None
        if zeros is not None:
            first = zeros.data_ptr()
            pointers += range(first, first + 4 * self.zeros, 4)
        pointers += [0] * (self.nothing + 1 - len(pointers))
        for launch in self.launches:
            launch.run(pointers)
        outputs: list[Output] = []
        found: list[Tensor] = []
        if zeros is not None and self.shows:
            alone = self.zeros == self.amaxes == 1
            found = [zeros] if alone else [zeros[i : i + 1] for i in range(self.amaxes)]
        measured = self.amaxes
        for j, own in enumerate(self.own_level):
            level, amax = given[j], None
            if self.shown[j] and own >= 0:
                level = found[own]
            if zeros is not None and self.measures[j]:
                amax = zeros[measured : measured + 1]
                measured += 1
            outputs.append((codes[j], scales[j], amax, level))
        return outputs, found
