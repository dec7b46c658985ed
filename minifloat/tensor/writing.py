"""Casts into many quantized tensors at once, and the counting of writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from minifloat.comm.group import Group
from minifloat.comm.sharded_cast import reduce_amaxes
from minifloat.operand import Quantized
from minifloat.quantizer import Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.tensor.base import CodedTensor, count_writes, version_of


def quantize_all_(
    targets: Sequence[CodedTensor],
    sources: Sequence[Tensor],
    *,
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """Quantizes each source into the memory of its target, all of them in one launch a phase.

    The bytes are those of ``target.quantize_(source)`` for each in turn. Amaxes are reduced in one all-reduce for each
    ``amax_group``, whose ranks list their targets in the same order. Sources are cast from their own dtype: a bf16
    parameter takes fp32 master weights in one rounding.

    Args:
        targets: written. None may share memory with another one's source.
        sources: of the targets' shapes, fp32, bf16, fp16 or quantized, on any device.
        amaxes: synchronized amaxes to cast with instead, as in :func:`quantize`; None for a target's own.
        noop_flag: fp32 [1] on the targets' device, read there: where it is not 0, codes and scales stay as they are.

    Raises:
        ValueError: the lists differ in length, a source has another shape than its target, or delayed scaling has no
            scale. Nothing has been written then.
        NotImplementedError: a target is a range of rows of a larger tensor, which share a scale that would change.
    """
    if len(targets) != len(sources):
        raise ValueError(f"{len(targets)} tensors cannot take the values of {len(sources)}: pass one source a target")
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.shape != target.shape:
            raise ValueError(
                f"a tensor of shape {tuple(target.shape)} cannot take values of shape {tuple(source.shape)}"
                + f" (number {i} of {len(targets)})" * (len(targets) > 1)
            )
    with torch.no_grad():
        assign_all(targets, sources, amaxes, noop_flag)
    count_writes(targets)


def assign_all(
    targets: Sequence[CodedTensor],
    sources: Sequence[Tensor],
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """As :func:`quantize_all_`, of sources that broadcast, with versions left to the caller."""
    pairs = list(zip(targets, sources, strict=True))
    ready = [s._gathered() if isinstance(s, CodedTensor) and t._same_form(s) else None for t, s in pairs]
    missing = [i for i, operands in enumerate(ready) if operands is None]
    values = [s._values() if isinstance(s, CodedTensor) else s.detach() for s in (sources[i] for i in missing)]
    written = [targets[i] for i in missing]
    fresh = iter(
        cast(
            [target._as_matrix(value) for target, value in zip(written, values, strict=True)],
            [target.quantizer for target in written],
            [target.scale for target in written],
            [target.amax_group for target in written],
            [None if amaxes is None else amaxes[i] for i in missing],
            noop_flag,
        )
    )
    for (target, source), operands in zip(pairs, ready, strict=True):
        target._store(next(fresh) if operands is None else operands, noop_flag)
        target.source_version = version_of(source) if noop_flag is None else None  # the device knows whether


def cast(
    xs: Sequence[Tensor],
    quantizers: Sequence[Quantizer],
    scales: Sequence[Tensor | None],
    groups: Sequence[dist.ProcessGroup | None],
    amaxes: Sequence[Amaxes | None],
    noop_flag: Tensor | None = None,
) -> list[Quantized]:
    """Quantizes many ``xs`` [M, K]: one launch a phase, and between the phases one all-reduce a group.

    Each with its quantizer, its delayed scale, the ranks that it reduces its amax over, and amaxes to cast with
    instead of its own, as :func:`quantize` has them. Ranks list the tensors of a group alike.

    Raises:
        ValueError: a quantizer takes a given scale and there is none.
    """
    for quantizer, scale, known in zip(quantizers, scales, amaxes, strict=True):
        if known is None and scale is None and any(fmt.scale_rule == "given" for fmt, _ in quantizer.casts):
            raise ValueError(
                f"{quantizer.row_format.spec} casts with a delayed scale and none is known; pass an fp32 [1] as in "
                "quantize(x, quantizer, scale=scale)"
            )
    unknown = [i for i, known in enumerate(amaxes) if known is None]
    own = dict(zip(unknown, find_amaxes([xs[i] for i in unknown], [quantizers[i] for i in unknown]), strict=True))
    by_group: dict[dist.ProcessGroup | None, list[int]] = defaultdict(list)
    for i in unknown:
        by_group[groups[i]].append(i)
    for group, those in by_group.items():
        reduced = reduce_amaxes([own[i] for i in those], [quantizers[i] for i in those], Group.of(group))
        own |= zip(those, reduced, strict=True)
    levels = [own.get(i, known) for i, known in enumerate(amaxes)]
    given = [scale if known is None else None for scale, known in zip(scales, amaxes, strict=True)]
    return cast_all(xs, quantizers, levels, noop_flag=noop_flag, scales=given)


# ---- steps of optimizers, whose writes PyTorch does not always count ----


_counted: Any = WeakTensorKeyDictionary()
_hooks: list[Any] = []


def count_steps(parameters: Iterable[Any]) -> None:
    """Raise the versions of ``parameters`` at each later step of an optimizer: PyTorch's fused kernels do not.

    Whoever keeps what was cast of a parameter reads its version. An optimizer that counts what it writes has a true
    ``counts_its_writes``.
    """
    if torch.compiler.is_compiling():
        return
    for parameter in parameters:
        _counted[parameter] = True
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count))


def stop_counting(parameters: Iterable[Any]) -> None:
    """Of ``parameters`` that are about to be replaced: PyTorch swaps no tensor that has a weak reference."""
    for parameter in parameters:
        _counted.pop(parameter, None)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "counts_its_writes", False):
        return
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    count_writes(parameter for parameter in held if parameter in _counted)
