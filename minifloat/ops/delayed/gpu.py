"""Delayed scaling's bookkeeping on a GPU: the amaxes of a layer, or the scales of many layers, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from minifloat.ops.delayed import Rule, refuse_recomputation
from minifloat.ops.launch import Kernel
from minifloat.ops.quantize.device import FLT_MAX
from minifloat.ops.tape import Recorder

_LAYERS = 32
"""Histories that one launch updates."""
_TILE = 8192
"""Amaxes of a program, about: it has all rows of some slots. A layer of many experts has hundreds of slots."""


@triton.jit
def _finite(amax):
    return tl.where(amax < float("inf"), amax, 0.0)  # a NaN is not less, either


@triton.jit
def record_kernel(history, amaxes, slots, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        newest = history + slots[i]
        tl.store(newest, tl.maximum(_finite(tl.load(newest)), _finite(tl.load(amaxes[i]))))


@triton.jit
def update_kernel(
    histories, scales, length, slots,
    COUNT: tl.constexpr, LARGEST: tl.constexpr, MOST_RECENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(slots, BLOCK_N)
    program = tl.program_id(0) // parts
    history, scale = histories[0], scales[0]
    for i in tl.static_range(1, COUNT):
        history = tl.where(program == i, histories[i], history)
        scale = tl.where(program == i, scales[i], scale)
    row, slot = tl.arange(0, BLOCK_L), tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row[:, None] < length) & (slot[None, :] < slots)
    newest = _finite(tl.load(history + slot, mask=slot < slots, other=0.0))
    following = (row[:, None] + 1) % length  # the row after the last is the newest, row 0
    rolled = _finite(tl.load(history + following * slots + slot[None, :], mask=inside, other=0.0))
    old = tl.load(scale + slot, mask=slot < slots, other=1.0)
    tl.debug_barrier()  # all is read before any is written
    amax = newest if MOST_RECENT else tl.max(rolled, axis=0)
    seen = newest != 0
    rolled = tl.where(row[:, None] == 0, 0.0, rolled)
    tl.store(history + row[:, None] * slots + slot[None, :], rolled, mask=inside & seen[None, :])
    fresh = tl.div_rn(tl.full(amax.shape, LARGEST, tl.float32), amax)
    fresh = tl.where(fresh == float("inf"), FLT_MAX, fresh)
    tl.store(scale + slot, tl.where(seen & (amax > 0), fresh, old), mask=slot < slots)


_record = Kernel(record_kernel, wide=False, table=False)
_update = Kernel(update_kernel, wide=False, table=False)


_recorder = Recorder()


def record(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """The operation ``record_amax_``."""
    places = tuple(slots)

    def launch() -> tuple[tuple[()], None]:
        _record(1, (history, tuple(amaxes)), (places,), (len(places),), 1)
        return (), None

    _recorder(places, (history, *amaxes), launch)


def record_forward(history: Tensor, slots: Sequence[int], amaxes: Sequence[Tensor]) -> None:
    """The operation ``record_forward_amax_``."""
    refuse_recomputation()
    if amaxes:
        record(history, slots, amaxes)


def update(histories: Sequence[Tensor], scales: Sequence[Tensor], rules: Sequence[str]) -> None:
    """The operation ``update_scales_``: histories of equal shape and rule in one launch."""
    if len({*rules}) != 1 or _recorder.again(rules[0], [*histories, *scales]) is None:
        alike: dict[tuple[object, object, str], list[tuple[Tensor, Tensor]]] = {}
        for history, scale, rule in zip(histories, scales, rules, strict=True):
            alike.setdefault((history.device, history.shape, rule), []).append((history, scale))
        for (*_, rule), layers in alike.items():
            for first in range(0, len(layers), _LAYERS):
                some = layers[first : first + _LAYERS]
                tensors = [each for layer in zip(*some, strict=True) for each in layer]
                _recorder(rule, tensors, partial(_update_alike, some, Rule.parse(rule)))
    torch.autograd.graph.increment_version(scales)  # weights that several calls share are cast anew when it rises


def _update_alike(layers: list[tuple[Tensor, Tensor]], rule: Rule) -> tuple[tuple[()], None]:
    length, slots = layers[0][0].shape
    count = next(size for size in (1, 8, _LAYERS) if size >= len(layers))
    padded = [*layers, *[layers[0]] * (count - len(layers))]  # of which only the first are programs
    tensors = tuple(history for history, _ in padded), tuple(scale for _, scale in padded)
    rows = triton.next_power_of_2(length)
    columns = min(triton.next_power_of_2(slots), max(_TILE // rows, 1))
    constants = count, rule.largest, rule.most_recent, rows, columns
    _update(len(layers) * triton.cdiv(slots, columns), tensors, (length, slots), constants, 4)
    return (), None
