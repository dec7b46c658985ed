"""Cross entropy of a linear's output that never holds all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Count, Int, Probability, Size, checked
from minifloat.comm.collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from minifloat.comm.group import Group
from minifloat.comm.shard_map import ShardMap
from minifloat.functional.autograd import autocast_to
from minifloat.functional.cross_entropy import check_arguments, place
from minifloat.functional.tensor_parallel import TensorParallel
from minifloat.functional.vocabulary import vocabulary_shards
from minifloat.ops import cross_entropy as kernels


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
    check: bool = False,
) -> Tensor:
    """``cross_entropy`` of ``hidden @ weight.t() + bias``, with logits for ``chunk_rows`` rows at a time.

    The gradients are computed in the forward, while the logits of a chunk are there, and scaled in the backward: kept
    in between are that of ``hidden``, in its dtype, and those of weight and bias, summed over the chunks in fp32. The
    products are computed in the dtype of ``hidden``, or of ``torch.autocast``, and are not quantized.

    Vocabulary-parallel, with ``tp_group``, each rank gives its own rows of the head. Loss and exchange are those of
    ``cross_entropy``, chunk by chunk: they differ from the unsharded ones by the order of fp32 sums. The gradients
    of weight and bias are this rank's rows of them. That of ``hidden`` is a sum over the ranks of products that each
    was rounded to its dtype, one all-reduce in the forward, as dX of a column-parallel linear. Backward communicates
    nothing.

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
        weight: [V, D], of the output head; its gradient comes in its own dtype.
        target: int [...].
        bias: [V].
        sequence_parallel: ``hidden`` is this rank's part of dim 0.
        rows_per_rank: those parts, of all ranks; equal ones if not given.
        check: ranks first compare what each brings, as layers do after ``set_check``.

    Other arguments, the returned loss and the errors are those of :func:`~minifloat.cross_entropy`.
    """
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"cross_entropy: hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}; [..., D] and [V, D] are "
            "needed"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"cross_entropy: bias has shape {tuple(bias.shape)}; one entry for each of {len(weight)} rows")
    group = Group.of(tp_group)
    parallel = TensorParallel("column", sequence_parallel, group, check=check)
    parallel = parallel.of_call(hidden.shape, rows_per_rank, "linear_cross_entropy")
    shape = parallel.output_shape(hidden.shape, hidden.shape[-1])
    check_arguments(hidden, shape, target)
    first, classes = place(len(weight), group, classes)
    hidden = autocast_to(hidden)
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss: Tensor = LinearCrossEntropyFunction.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        target.reshape(-1).long(),
        parallel,
        needs,
        reduction,
        label_smoothing,
        ignore_index,
        chunk_rows or 0,
        first,
        classes,
    )
    return loss


class LinearCrossEntropyFunction(torch.autograd.Function):
    """The loss of hidden [M, D] under a head [V, D], those of this rank."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        parallel: TensorParallel,
        needs: list[bool],
        reduction: str,
        *options: Any,
    ) -> Tensor:
        w, b = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        _, ignore_index, _, _, _ = options
        if parallel.group.size == 1:
            total, *gradients = kernels.linear_cross_entropy(hidden, w, b, target, *options[:3], needs)
        else:
            total, *gradients = _of_shared_head(parallel, needs, hidden, w, b, target, *options)
        count = (target != ignore_index).sum() if reduction == "mean" else torch.ones_like(total)
        ctx.save_for_backward(count, *gradients)
        ctx.needs = needs
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        count, *gradients = ctx.saved_tensors
        # The gradients of no target are 0, not 0 / 0. They are scaled in fp32: a bf16 one would round the scale too.
        scale = dloss / count.clamp(min=1)
        scaled = (
            (gradient.to(scale.dtype) * scale).to(dtype) if need else None
            for gradient, dtype, need in zip(gradients, ctx.dtypes, ctx.needs, strict=True)
        )
        return *scaled, None, None, None, None, None, None, None, None, None


def _of_shared_head(
    parallel: TensorParallel,
    needs: list[bool],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    label_smoothing: float,
    ignore_index: int,
    chunk_rows: int,
    first: int,
    classes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``kernels.linear_cross_entropy`` gives, by its steps, of a head that ranks share."""
    group, shards, check = parallel.group, parallel.shards, parallel.check
    if shards is not None:
        hidden = all_gather_rows(hidden, shards, group, check=check)
    options = label_smoothing, ignore_index, 0, first, classes
    precise = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_zeros((), dtype=precise)
    dhidden = hidden.new_empty(hidden.shape if needs[0] else 0)
    dweight = weight.new_zeros(weight.shape if needs[1] else 0, dtype=precise)
    dbias = weight.new_zeros(weight.shape[0] if needs[2] else 0, dtype=precise)
    largest = vocabulary_shards(classes, group.size).largest  # all ranks have the same chunks
    for rows in kernels.chunks(hidden.shape[0], largest, chunk_rows):
        x, targets = hidden[rows], target[rows]
        z = F.linear(x, weight, bias).to(precise)
        own = kernels.cross_entropy_statistics(z, targets, *options)
        statistics = all_gather_rows(own[None], ShardMap.even(1, group.size), group, check=check)
        loss, lse = kernels.loss_of_parts(statistics, targets == ignore_index, label_smoothing, classes)
        total += loss.sum()
        if not any(needs):
            continue
        dlogits = kernels.cross_entropy_backward(torch.ones_like(loss), z, targets, lse, *options)
        if needs[2]:
            dbias += dlogits.sum(0)
        dlogits = dlogits.to(hidden.dtype)
        if needs[0]:
            dhidden[rows] = dlogits @ weight
        if needs[1]:
            dweight += dlogits.t() @ x
    if needs[0] and shards is not None:
        dhidden = reduce_scatter_rows(dhidden, shards, group, check=check)
    elif needs[0]:
        dhidden = all_reduce(dhidden, group, check=check)
    return total, dhidden, dweight, dbias
