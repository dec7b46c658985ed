"""Quantizing the tensors of one call of a layer, in one launch a phase, delayed scaling included."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minifloat.autocast import Use
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.functional.plan import BACKWARD_SLOTS, FORWARD_SLOTS, LinearConfig
from minifloat.functional.tensor_parallel import TensorParallel
from minifloat.operand import Quantized
from minifloat.ops import delayed
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.tensor import QuantizedTensor


def quantize(
    xs: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    kinds: Sequence[str],
    use: Use | None,
    input_scale: Tensor | None = None,
    *,
    amaxes: Sequence[Amaxes | None] | None = None,
    gemm_ready: bool = True,
) -> list[Quantized]:
    """Quantizes the tensors that a layer knows as ``kinds`` (``"input"``, ``"weight"``, ...), for its GEMMs.

    A delayed scale is read from the layer's history (that of the input may be given), and the amax that the cast
    measured is recorded there. ``amaxes``: those of each tensor, None where they are still to be found.
    """
    xs = [x.dequantize() if isinstance(x, QuantizedTensor) else x for x in xs]
    scales = None
    if use is not None:
        scales = [delayed_scale(use, kind) for kind in kinds]
        if input_scale is not None:
            scales[kinds.index("input")] = input_scale
    if torch.compiler.is_compiling():  # each by itself: siblings' casts of one input are common subexpressions then
        known, given = amaxes or [None] * len(xs), scales or [None] * len(xs)
        results = [
            cast_with(x, quantizer, scale, levels, gemm_ready=gemm_ready)
            for x, quantizer, scale, levels in zip(xs, quantizers, given, known, strict=True)
        ]
    else:
        results = cast_all(xs, quantizers, amaxes, scales=scales, gemm_ready=gemm_ready)
    if use is not None:
        record_all(use, kinds, results)
    return results


def quantize_part(
    x: Tensor,
    quantizer: Quantizer,
    kind: str,
    use: Use | None,
    parallel: TensorParallel,
    scale: Tensor | None = None,
    amaxes: Amaxes | None = None,
) -> Quantized:
    """This rank's part of a tensor that is to be gathered; arguments as of :func:`quantize`, of one tensor.

    ``amaxes`` are those of this rank's rows. What a delayed cast records is their amax too: ranks agree at the update.
    """
    part = parallel.quantize_shard(x, quantizer, delayed_scale(use, kind) if scale is None else scale, amaxes)
    if use is not None:
        record(use, kind, part)
    return part


def cast_with(
    x: Tensor, quantizer: Quantizer, scale: Tensor | None, amaxes: Amaxes | None = None, *, gemm_ready: bool = True
) -> Quantized:
    """Quantizes ``x`` for a GEMM where delayed scaling casts with ``scale``, recording nothing."""
    return cast_all([x], [quantizer], [amaxes], scales=[scale], gemm_ready=gemm_ready)[0]


_SLOTS = {
    kind: (direction, slot)
    for direction, kinds in enumerate((FORWARD_SLOTS, BACKWARD_SLOTS))
    for slot, kind in enumerate(kinds)
}
"""Direction (0 forward, 1 backward) and index in its histories."""


def delayed_scale(use: Use | None, kind: str, keep: bool = False) -> Tensor | None:
    """The layer's scale for ``kind``, fp32 [1]; with ``keep`` one that the next update leaves as it is."""
    if use is None:
        return None
    direction, slot = _SLOTS[kind]
    if direction:
        use.backward_begins()
    history = use.histories[direction]
    if keep:
        return delayed.read_scale(history.scale, slot)
    return history.slots[slot] if history.slots else history.scale[slot : slot + 1]


def record(use: Use, kind: str, result: Quantized) -> None:
    """Records the amax that a delayed cast measured of the tensor that the layer knows as ``kind``, if at all."""
    record_all(use, [kind], [result])


def record_all(use: Use, kinds: Sequence[str], results: Sequence[Quantized]) -> None:
    """The same of several tensors of one direction, in one launch."""
    slots, amaxes, direction = [], [], 0
    for kind, result in zip(kinds, results, strict=True):
        direction, slot = _SLOTS[kind]
        for operand in result if use.records[direction] else ():
            if operand is not None and operand.format.scale_rule == "given" and operand.amax is not None:
                slots.append(slot)
                amaxes.append(operand.amax)
                break
    if slots:
        delayed.record_amax_(use.histories[direction].amax_history, slots, amaxes)


def calibrate(xs: Sequence[Tensor], kinds: Sequence[str], use: Use) -> None:
    """Records the amaxes of tensors that are computed with in high precision."""
    amaxes = find_amaxes(xs, [Quantizer(Format())] * len(xs))
    for levels, kind in zip(amaxes, kinds, strict=True):
        direction, slot = _SLOTS[kind]
        assert levels[0] is not None
        delayed.record_amax_(use.histories[direction].amax_history, [slot], [levels[0]])


def reuse(x: Tensor, quantizer: Quantizer) -> Quantized | None:
    """The operands of a quantized tensor if they are what ``quantizer`` would give, else None."""
    if not isinstance(x, QuantizedTensor) or not x.holds_own_matrix:
        return None
    for dim, wanted in ((ROWWISE, quantizer.rowwise), (COLUMNWISE, quantizer.columnwise)):
        fits = [o for o in x.operands if o is not None and o.serves(dim) and o.format == quantizer.format(dim)]
        if wanted and not fits:
            return None
    return x.operands


def pairs_with(w: Quantized, config: LinearConfig, dgrad: bool) -> bool:
    """The GEMMs of a layer take this weight, whatever its recipe would make of it, on every device.

    Codes of equal width, scales that span equally many elements, no rotation: everything else would be computed at the
    speed of the reference where a fresh cast has a GEMM.
    """
    others = [(ROWWISE, config.input.format(ROWWISE))]
    if dgrad and config.backward_override is None:
        others.append((COLUMNWISE, config.grad_output.format(ROWWISE)))
    for dim, other in others:
        held = [o.format for o in w if o is not None and o.serves(dim)]
        if not any(
            (mine.block, mine.grid, mine.packed, mine.transform)
            == (other.block, other.grid, other.packed, other.transform)
            for mine in held
            if mine.quantized and other.quantized
        ):
            return False
    return True
