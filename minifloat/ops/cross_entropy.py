"""Cross entropy in chunks of rows, as ``torch.library`` operations: no operation holds all logits in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from minifloat.ops.library import SymInt, operation

_CHUNK_ELEMENTS = 2**24
"""Number of logits held in fp32 at a time: 64 MiB."""


def chunks(rows: int, classes: int, chunk_rows: int) -> Iterator[slice]:
    """Slices of rows that are held in fp32 at a time; ``chunk_rows`` 0 chooses."""
    step = chunk_rows or max(1, _CHUNK_ELEMENTS // max(1, classes))
    return (slice(start, start + step) for start in range(0, rows, step))


def _precise(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class _Targets(NamedTuple):
    """Places of the targets' logits among those of some of the classes; [M] each.

    Args:
        column: of the target's logit; 0 where it is not here, or ignored.
        own: it is here.
        ignored: the target is ``ignore_index``.
    """

    column: Tensor
    own: Tensor
    ignored: Tensor

    @staticmethod
    def of(target: Tensor, ignore_index: int, first: int, here: int, classes: int) -> _Targets:
        """Among the ``here`` classes from ``first`` on, of ``classes``.

        A target that is no class at all keeps a column out of bounds, so that reading it is an error.
        """
        column, ignored = target - first, target == ignore_index
        elsewhere = ((column < 0) | (column >= here)) & (target >= 0) & (target < classes)
        absent = elsewhere | ignored
        return _Targets(column.masked_fill(absent, 0), ~absent, ignored)


def _statistics(z: Tensor, targets: _Targets, label_smoothing: float) -> Tensor:
    """Computes the log-sum-exp of logits ``z`` [M, V], the targets' and, with label smoothing, the sum: [2 or 3, M]."""
    picked = z.gather(1, targets.column[:, None])[:, 0].masked_fill(~targets.own, 0)
    return torch.stack([z.logsumexp(-1), picked, *([z.sum(-1)] if label_smoothing else [])])


def loss_of_parts(statistics: Tensor, ignored: Tensor, label_smoothing: float, classes: int) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp [M] over all classes: ``lse - (1 - s) z[target] - s mean(z)``, the loss 0 where ignored.

    Args:
        statistics: [parts, 2 or 3, M], what :data:`cross_entropy_statistics` gives of each part of the classes.
        ignored: bool [M].
    """
    lse = statistics[:, 0].logsumexp(0)
    loss = lse - (1 - label_smoothing) * statistics[:, 1].sum(0)
    if label_smoothing:
        loss = loss - label_smoothing * (statistics[:, 2].sum(0) / classes)
    return loss.masked_fill(ignored, 0), lse


def _gradient_(z: Tensor, targets: _Targets, lse: Tensor, label_smoothing: float, classes: int) -> Tensor:
    """Turns logits [M, V] into the gradient of their losses: ``softmax(z) - (1 - s) onehot - s / classes``.

    ``lse`` is over all classes. 0 where ignored.
    """
    z.sub_(lse[:, None]).exp_()
    if label_smoothing:
        z.sub_(label_smoothing / classes)
    z.scatter_add_(1, targets.column[:, None], targets.own[:, None] * z.new_full((), label_smoothing - 1))
    return z.masked_fill_(targets.ignored[:, None], 0)


@operation()
def cross_entropy_statistics(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, chunk_rows: int, first: SymInt,
    classes: SymInt,
) -> Tensor:  # fmt: skip
    """Computes what losses need of logits [M, V]: V of ``classes`` classes, from ``first`` on. Targets are int64 [M].

    fp32 [2, M], or [3, M] with label smoothing: log-sum-exp, the logit of the target (0 where it is none of these
    classes) and the sum; :func:`loss_of_parts` makes losses of them. ``chunk_rows`` 0 chooses.
    """
    statistics = _empty_statistics(logits, target, label_smoothing)
    for rows in chunks(logits.shape[0], logits.shape[1], chunk_rows):
        targets = _Targets.of(target[rows], ignore_index, first, logits.shape[1], classes)
        statistics[:, rows] = _statistics(logits[rows].to(statistics.dtype), targets, label_smoothing)
    return statistics


@cross_entropy_statistics.fake
def _empty_statistics(logits: Tensor, target: Tensor, label_smoothing: float, *_: int) -> Tensor:
    return logits.new_empty(3 if label_smoothing else 2, logits.shape[0], dtype=_precise(logits.dtype))


@operation()
def cross_entropy_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, label_smoothing: float, ignore_index: int,
    chunk_rows: int, first: SymInt, classes: SymInt,
) -> Tensor:  # fmt: skip
    """The gradient of the logits [M, V] in their dtype, computed in fp32 and rounded once, from that of the losses [M].

    ``lse``, [M], is over all classes; the other arguments are those of :func:`cross_entropy_statistics`.
    """
    dlogits = _empty_dlogits(dloss, logits)
    dloss = dloss.masked_fill(target == ignore_index, 0)  # the mean over no target divides by 0
    for rows in chunks(logits.shape[0], logits.shape[1], chunk_rows):
        targets = _Targets.of(target[rows], ignore_index, first, logits.shape[1], classes)
        z = logits[rows].to(lse.dtype, copy=True)
        gradient = _gradient_(z, targets, lse[rows], label_smoothing, classes)
        dlogits[rows] = gradient.mul_(dloss[rows, None])
    return dlogits


@cross_entropy_backward.fake
def _empty_dlogits(dloss: Tensor, logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operation()
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, label_smoothing: float, ignore_index: int,
    chunk_rows: int, needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum of the losses of ``hidden @ weight.t() + bias``, and its gradients: dhidden, dweight, dbias.

    ``hidden`` [M, D], ``weight`` [V, D] and ``bias`` [V] have one dtype, which dhidden has too; the rest is fp32. A
    gradient that is not in ``needs`` is empty.
    """
    classes = weight.shape[0]

    def of_chunk(z: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        targets = _Targets.of(target[rows], ignore_index, 0, classes, classes)
        statistics = _statistics(z, targets, label_smoothing)[None]
        loss, lse = loss_of_parts(statistics, targets.ignored, label_smoothing, classes)
        return loss, _gradient_(z, targets, lse, label_smoothing, classes) if any(needs) else None

    return of_head(hidden, weight, bias, chunks(hidden.shape[0], classes, chunk_rows), needs, of_chunk)


def of_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunks: Iterator[slice], needs: list[bool],
    of_chunk: Callable[[Tensor, slice], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes :data:`linear_cross_entropy`; ``of_chunk``: from fp32 logits of some rows losses and gradient."""
    total, dhidden, dweight, dbias = _empty_linear(hidden, weight, needs)
    for each in (total, dweight, dbias):
        each.zero_()
    for rows in chunks:
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        loss, dlogits = of_chunk(logits.to(total.dtype), rows)
        total += loss.sum()
        if dlogits is None:
            continue
        if needs[2]:
            dbias += dlogits.sum(0)
        dlogits = logits.copy_(dlogits)  # in the dtype of the products
        if needs[0]:
            dhidden[rows] = dlogits @ weight
        if needs[1]:
            dweight += dlogits.t() @ hidden[rows]
    return total, dhidden, dweight, dbias


linear_cross_entropy.fake(lambda hidden, weight, *rest: _empty_linear(hidden, weight, rest[-1]))


def _empty_linear(hidden: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precise = _precise(hidden.dtype)
    return (
        hidden.new_empty((), dtype=precise),
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=precise),
        weight.new_empty(weight.shape[0] if needs[2] else 0, dtype=precise),
    )
