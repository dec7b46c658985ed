"""Cross entropy that never holds all logits in fp32, of logits or of the linear that computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Count, Int, Probability, Size, checked
from minifloat.comm.collectives import all_gather_rows, all_reduce, start_reduce_scatter_rows
from minifloat.comm.group import Group, ShardMap
from minifloat.functional.autograd import apply, autocast_to, first_order, guarded
from minifloat.functional.exchange import Exchange, make_exchange
from minifloat.ops import cross_entropy as kernels

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@checked
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: Probability = 0.0,
    ignore_index: Int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    chunk_rows: Size | None = None,
    *,
    tp_group: Group | dist.ProcessGroup | DeviceMesh | None = None,
    classes: Size | None = None,
) -> Tensor:
    """Computes ``F.cross_entropy`` of class indices in fp32, in chunks of ``chunk_rows`` rows.

    It saves the logits in their dtype and one fp32 number a row for backward, which recomputes the softmax and rounds
    the gradient once. With ``tp_group`` each rank gives the logits of its own classes (``vocabulary_shards``) for the
    same rows and targets, and gets the loss over all classes and the gradient of its own logits: ranks all-gather two
    fp32 numbers a row, three with label smoothing, and compute the same bits, in rank order; only the order of fp32
    sums differs from the unsharded loss. Backward communicates nothing.

    Args:
        logits: [..., V], any float dtype.
        target: int [...]; a class, or ``ignore_index``. Anything else is an error of indexing, as in PyTorch.
        label_smoothing: the part of each target that is spread over all classes, 0 to 1 (Szegedy et al. 2015).
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"``, or ``"none"``.
        chunk_rows: rows held in fp32 at a time; None chooses about 64 MiB.
        tp_group: the ranks that share the classes out.
        classes: how many classes all ranks have together; needed with a ``tp_group`` of several.

    Returns:
        The loss in fp32 (fp64 for fp64): a number, or [...] for ``"none"``, with 0 where ignored. As in PyTorch the
        mean over no target is NaN, with gradients of 0.

    Raises:
        ValueError: shapes that do not fit, targets that are not integers, options out of range, logits of other
            classes.
    """
    check_arguments(logits, logits.shape, target)
    group = Group.of(tp_group)
    options = label_smoothing, ignore_index, chunk_rows or 0, *place(logits.shape[-1], group, classes)
    rows = target.reshape(-1).long()
    loss = apply(CrossEntropyFunction, logits.reshape(-1, logits.shape[-1]), rows, group, *options)
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (rows != ignore_index).sum()


class CrossEntropyFunction(torch.autograd.Function):
    """Computes losses [M] of logits [M, V], those of this rank's classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group, *options: Any) -> Tensor:
        loss, lse = _losses(logits, target, group, *options)
        ctx.save_for_backward(guarded(logits), guarded(target), lse)
        ctx.options = options
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dlogits = kernels.cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options)
        return dlogits, *[None] * 7


def _losses(logits: Tensor, target: Tensor, group: Group, *options: Any) -> tuple[Tensor, Tensor]:
    """Computes losses, and what backward needs, of logits of this rank's classes: from the statistics of all ranks."""
    label_smoothing, ignore_index, _, _, classes = options
    own = kernels.cross_entropy_statistics(logits, target, *options)
    statistics = all_gather_rows(own[None], ShardMap.even(1, group.size), group)
    return kernels.loss_of_parts(statistics, target == ignore_index, label_smoothing, classes)


def place(here: int, group: Group, classes: int | None) -> tuple[int, int]:
    """Finds the first class of this rank's ``here``, and how many there are in all.

    Raises:
        ValueError: that is not told, or the rank should have other classes.
    """
    if group.size == 1 and classes in (None, here):
        return 0, here
    if classes is None:
        raise ValueError(
            f"cross_entropy: rank {group.rank} of {group.size} has logits of {here} classes, and the ranks may have "
            "different numbers; say how many all have together with classes="
        )
    shards = vocabulary_shards(classes, group.size)
    if here != shards.rows[group.rank]:
        raise ValueError(
            f"cross_entropy: logits of {here} classes on rank {group.rank} of {group.size}; of {classes} classes the "
            f"ranks have {shards.rows}"
        )
    return shards.first(group.rank), classes


def check_arguments(rows: Tensor, shape: Sequence[int], target: Tensor) -> None:
    if not rows.is_floating_point():
        raise ValueError(f"cross_entropy: input is {rows.dtype}; a floating-point tensor is needed")
    if not shape or tuple(target.shape) != tuple(shape[:-1]):
        raise ValueError(
            f"cross_entropy: target has shape {tuple(target.shape)}, input {tuple(shape)}; one target is needed "
            f"for each row, {tuple(shape[:-1])}"
        )
    if target.dtype not in _INTEGERS:
        raise ValueError(f"cross_entropy: target is {target.dtype}; class indices are needed, as target.long()")


def vocabulary_shards(vocabulary: int, ranks: int) -> ShardMap:
    """Shares out the tokens in their order: ``ceil(vocabulary / ranks)`` each, and the last rank has what is left.

    So any vocabulary is split as it is, with nothing padded, and as ``torch.chunk`` and DTensor's ``Shard(0)`` do it.

    Raises:
        ValueError: nothing would be left for the last rank.
    """
    most = -(-vocabulary // ranks)
    if vocabulary <= most * (ranks - 1):
        raise ValueError(
            f"a vocabulary of {vocabulary} in pieces of {most} leaves rank {ranks - 1} of {ranks} without a token; "
            "use a smaller tensor-parallel group"
        )
    return ShardMap.chunks(vocabulary, ranks)


# ---- of a linear ----


@checked
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    label_smoothing: Probability = 0.0,
    ignore_index: Int = -100,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_rows: Size | None = None,
    *,
    tp_group: Group | dist.ProcessGroup | DeviceMesh | None = None,
    classes: Size | None = None,
    sequence_parallel: bool = False,
    rows_per_rank: Sequence[Count] | None = None,
) -> Tensor:
    """Computes ``cross_entropy`` of ``hidden @ weight.t() + bias``, in chunks of ``chunk_rows`` rows of logits.

    The forward computes gradients too, while it has the logits of a chunk: the gradient of ``hidden`` is kept in its
    dtype, gradients of weight and bias are summed in fp32. Products have the dtype of ``hidden``, or of
    ``torch.autocast``, and are not quantized. With ``tp_group`` each rank gives its own rows of the head and gets their
    gradients; the gradient of ``hidden`` is a sum over ranks of products that were rounded to its dtype. Backward
    communicates nothing.

    =================  ======================  ================================
    on one of p ranks  replicated              sequence parallel
    =================  ======================  ================================
    hidden             [S, ..., D]             [S/p, ..., D], gathered
    its gradient       all-reduced             reduce-scattered
    target             [S, ...]                [S, ...], of all rows
    weight, bias       [V/p, D], [V/p]         [V/p, D], [V/p]
    =================  ======================  ================================

    Args:
        hidden: [..., D], bf16, fp16, fp32 or fp64.
        weight: [V, D], of the output head; its gradient comes in its own dtype. ``bias``: [V]. ``target``: int [...].
        sequence_parallel: ``hidden`` is this rank's part of dim 0.
        rows_per_rank: those parts, of all ranks; equal ones if not given.

    Other arguments, the returned loss and the errors are those of :func:`~minifloat.cross_entropy`.
    """
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"cross_entropy: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; [..., D] and [V, D] are "
            "needed"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"cross_entropy: bias has shape {tuple(bias.shape)}; one entry for each of {len(weight)} rows")
    if hasattr(weight, "etp_group"):
        raise ValueError(
            f"linear_cross_entropy: weight {tuple(weight.shape)} has this rank's rows of etp_group alone; pass "
            "head.whole_weight(), or 'replicated' for the head in the plan of parallelize"
        )
    group = Group.of(tp_group)
    exchange = make_exchange("column", sequence_parallel, group)
    exchange = exchange.of_call(hidden.shape, rows_per_rank, "linear_cross_entropy")
    shape = exchange.output_shape(hidden.shape, hidden.shape[-1])
    check_arguments(hidden, shape, target)
    options = label_smoothing, ignore_index, chunk_rows or 0, *place(len(weight), group, classes)
    hidden = autocast_to(hidden)
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1).long()
    return apply(LinearCrossEntropyFunction, rows, weight, bias, targets, exchange, needs, reduction, *options)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """Computes the loss of hidden [M, D] under a head [V, D], those of this rank."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, exchange: Exchange,
        needs: list[bool], reduction: str, *options: Any,
    ) -> Tensor:  # fmt: skip
        w, b = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        if exchange.group.size == 1:
            total, *gradients = kernels.linear_cross_entropy(hidden, w, b, target, *options[:3], needs)
        else:
            total, *gradients = _of_shared_head(exchange, needs, hidden, w, b, target, *options)
        count = (target != options[1]).sum() if reduction == "mean" else torch.ones_like(total)
        ctx.save_for_backward(count, *gradients)
        ctx.needs = needs
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / count

    @staticmethod
    @first_order
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        count, *gradients = ctx.saved_tensors
        # The gradients of no target are 0, not 0 / 0. They are scaled in fp32: a bf16 one would round the scale too.
        scale = dloss / count.clamp(min=1)
        scaled = (
            (gradient.to(scale.dtype) * scale).to(dtype) if need else None
            for gradient, dtype, need in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
        )
        return *scaled, *[None] * 9


def _of_shared_head(
    exchange: Exchange, needs: list[bool], hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes what ``kernels.linear_cross_entropy`` gives, of a head that ranks share."""
    group, shards = exchange.group, exchange.shards
    if shards is not None:
        hidden = all_gather_rows(hidden, shards, group)
    label_smoothing, ignore_index, chunk_rows, first, classes = options
    options = label_smoothing, ignore_index, 0, first, classes

    def of_chunk(z: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        loss, lse = _losses(z, target[rows], group, *options)
        if not any(needs):
            return loss, None
        return loss, kernels.cross_entropy_backward(torch.ones_like(loss), z, target[rows], lse, *options)

    largest = vocabulary_shards(classes, group.size).largest  # all ranks have the same chunks
    chunks = kernels.chunks(hidden.shape[0], largest, chunk_rows)
    total, dhidden, dweight, dbias = kernels.of_head(hidden, weight, bias, chunks, needs, of_chunk)
    if needs[0] and shards is not None:
        dhidden = start_reduce_scatter_rows(dhidden, shards, group).wait()
    elif needs[0]:
        dhidden = all_reduce(dhidden, group)
    return total, dhidden, dweight, dbias
