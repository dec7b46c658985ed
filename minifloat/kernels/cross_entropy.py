"""Cross entropy in chunks of rows, as ``torch.library`` operations: no operation holds all logits in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from minifloat.kernels.library import register

_CHUNK_ELEMENTS = 2**24
"""How many logits are held in fp32 at a time: 64 MiB."""


def _chunks(rows: int, classes: int, chunk_rows: int) -> Iterator[slice]:
    step = chunk_rows or max(1, _CHUNK_ELEMENTS // max(1, classes))
    return (slice(start, start + step) for start in range(0, rows, step))


def _precise(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _loss(z: Tensor, target: Tensor, label_smoothing: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp [M] of logits ``z`` [M, V]: ``lse - (1 - s) z[target] - s mean(z)``, 0 where ignored."""
    ignored = target == ignore_index
    lse = z.logsumexp(-1)
    loss = lse - (1 - label_smoothing) * z.gather(1, target.masked_fill(ignored, 0)[:, None])[:, 0]
    if label_smoothing:
        loss = loss - label_smoothing * z.mean(-1)
    return loss.masked_fill(ignored, 0), lse


def _gradient_(z: Tensor, target: Tensor, lse: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
    """Turns logits [M, V] into the gradient of their losses: ``softmax(z) - (1 - s) onehot - s / V``, 0 if ignored."""
    ignored = target == ignore_index
    z.sub_(lse[:, None]).exp_()
    if label_smoothing:
        z.sub_(label_smoothing / z.shape[1])
    picked = target.masked_fill(ignored, 0)[:, None]
    z.scatter_add_(1, picked, z.new_full((), label_smoothing - 1).expand(picked.shape))
    return z.masked_fill_(ignored[:, None], 0)


def _forward(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=_precise(logits.dtype))
    lse = torch.empty_like(loss)
    for rows in _chunks(logits.shape[0], logits.shape[1], chunk_rows):
        loss[rows], lse[rows] = _loss(logits[rows].to(loss.dtype), target[rows], label_smoothing, ignore_index)
    return loss, lse


def _fake_forward(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    loss = logits.new_empty(logits.shape[0], dtype=_precise(logits.dtype))
    return loss, torch.empty_like(loss)


def _backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    label_smoothing: float,
    ignore_index: int,
    chunk_rows: int,
) -> Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    for rows in _chunks(logits.shape[0], logits.shape[1], chunk_rows):
        z = logits[rows].to(lse.dtype, copy=True)
        gradient = _gradient_(z, target[rows], lse[rows], label_smoothing, ignore_index)
        ignored = (target[rows] == ignore_index)[:, None]  # the mean over no target divides by 0
        dlogits[rows] = gradient.mul_(dloss[rows, None].masked_fill(ignored, 0))
    return dlogits


def _fake_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    label_smoothing: float,
    ignore_index: int,
    chunk_rows: int,
) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    chunk_rows: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, dhidden, dweight, dbias = _linear_outputs(hidden, weight, needs)
    for each in (total, dweight, dbias):
        each.zero_()
    for rows in _chunks(hidden.shape[0], weight.shape[0], chunk_rows):
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        z = logits.to(total.dtype)
        loss, lse = _loss(z, target[rows], label_smoothing, ignore_index)
        total += loss.sum()
        if not any(needs):
            continue
        dlogits = _gradient_(z, target[rows], lse, label_smoothing, ignore_index)
        if needs[2]:
            dbias += dlogits.sum(0)
        dlogits = logits.copy_(dlogits)  # in the dtype of the products
        if needs[0]:
            dhidden[rows] = dlogits @ weight
        if needs[1]:
            dweight += dlogits.t() @ hidden[rows]
    return total, dhidden, dweight, dbias


def _linear_outputs(hidden: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    precise = _precise(hidden.dtype)
    return (
        hidden.new_empty((), dtype=precise),
        hidden.new_empty(hidden.shape if needs[0] else 0),
        weight.new_empty(weight.shape if needs[1] else 0, dtype=precise),
        weight.new_empty(weight.shape[0] if needs[2] else 0, dtype=precise),
    )


def _fake_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    chunk_rows: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _linear_outputs(hidden, weight, needs)


cross_entropy_forward = register(
    "cross_entropy_forward(Tensor logits, Tensor target, float label_smoothing, int ignore_index, int chunk_rows) "
    "-> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
"""Loss and log-sum-exp, fp32 [M], of logits [M, V] and int64 targets [M]; ``chunk_rows`` 0 chooses."""

cross_entropy_backward = register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor lse, float label_smoothing, "
    "int ignore_index, int chunk_rows) -> Tensor",
    _backward,
    _fake_backward,
)
"""The gradient of the logits [M, V] in their dtype, computed in fp32 and rounded once, from that of the losses [M]."""

linear_cross_entropy = register(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, float label_smoothing, "
    "int ignore_index, int chunk_rows, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    _linear,
    _fake_linear,
)
"""The sum of the losses of ``hidden @ weight.t() + bias``, and its gradients: dhidden, dweight, dbias.

``hidden`` [M, D], ``weight`` [V, D] and ``bias`` [V] have one dtype, which dhidden has too; the rest is fp32. A
gradient that is not in ``needs`` is empty.
"""
