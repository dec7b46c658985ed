"""Cross entropy that never holds all logits in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Int, Probability, Size, checked
from minifloat.comm.checks import Check
from minifloat.comm.collectives import all_gather_rows
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.functional.autograd import guarded
from minifloat.functional.vocabulary import vocabulary_shards
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
    check: bool = False,
) -> Tensor:
    """``F.cross_entropy`` of class indices, with fp32 numbers for ``chunk_rows`` rows at a time.

    Between forward and backward it keeps the logits as they came and one fp32 number a row. Backward computes the
    softmax anew, chunk by chunk, and rounds the gradient once to the dtype of the logits.

    Vocabulary-parallel: with ``tp_group`` each rank gives the logits of its own classes (``vocabulary_shards``) for the
    same rows and targets, and gets the loss of all and its own logits' gradient. The ranks exchange two fp32 numbers a
    row, three with label smoothing, in one all-gather: log-sum-exp over a rank's own classes, the target's logit, the
    sum. All of them then compute the same bits, in rank order: the log-sum-exp of the ranks' log-sum-exps; the logit of
    the target exactly; the sum of sums. So the loss differs from the unsharded one by the order of fp32 sums only, and
    in a group of one not at all. Backward communicates nothing.

    Args:
        logits: [..., V], any float dtype.
        target: int [...]; a class, or ``ignore_index``. Anything else is an error of indexing, raised on a CPU and by
            the device's assertion on a GPU, as in PyTorch.
        label_smoothing: the part of each target that is spread over all classes, 0 to 1 (Szegedy et al. 2015).
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"``, or ``"none"``.
        chunk_rows: rows held in fp32 at a time; None chooses about 64 MiB.
        tp_group: the ranks that share the classes out.
        classes: how many classes all ranks have together; needed with a ``tp_group`` of several.
        check: ranks first compare how many rows each has, as layers do after ``set_check``.

    Returns:
        The loss in fp32 whatever the dtype of the logits (fp64 for fp64): a number, or [...] for ``"none"``, with 0
        where ignored. As in PyTorch the mean over no target is NaN, with gradients of 0.

    Raises:
        ValueError: shapes that do not fit, targets that are not integers, options out of range; logits of other
            classes than the rank's.
    """
    check_arguments(logits, logits.shape, target)
    group = Group.of(tp_group)
    first, classes = place(logits.shape[-1], group, classes)
    rows = target.reshape(-1).long()
    loss: Tensor = CrossEntropyFunction.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]),
        rows,
        group,
        check and "cross_entropy",
        label_smoothing,
        ignore_index,
        chunk_rows or 0,
        first,
        classes,
    )
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / (rows != ignore_index).sum()


class CrossEntropyFunction(torch.autograd.Function):
    """Losses [M] of logits [M, V], those of this rank's classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group, check: Check, *options: Any) -> Tensor:
        label_smoothing, ignore_index, _, _, classes = options
        own = kernels.cross_entropy_statistics(logits, target, *options)
        statistics = all_gather_rows(own[None], ShardMap.even(1, group.size), group, check=check)
        loss, lse = kernels.loss_of_parts(statistics, target == ignore_index, label_smoothing, classes)
        ctx.save_for_backward(guarded(logits), guarded(target), lse)
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dlogits = kernels.cross_entropy_backward(dloss, *ctx.saved_tensors, *ctx.options)
        return dlogits, None, None, None, None, None, None, None, None


def place(here: int, group: Group, classes: int | None) -> tuple[int, int]:
    """The first class of this rank's ``here``, and how many there are in all.

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


def check_arguments(
    rows: Tensor,
    shape: Sequence[int],
    target: Tensor,
) -> None:
    if not rows.is_floating_point():
        raise ValueError(f"cross_entropy: input is {rows.dtype}; a floating-point tensor is needed")
    if not shape or tuple(target.shape) != tuple(shape[:-1]):
        raise ValueError(
            f"cross_entropy: target has shape {tuple(target.shape)}, input {tuple(shape)}; one target is needed "
            f"for each row, {tuple(shape[:-1])}"
        )
    if target.dtype not in _INTEGERS:
        raise ValueError(f"cross_entropy: target is {target.dtype}; class indices are needed, as target.long()")
