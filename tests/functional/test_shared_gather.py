"""Linears of sequence parallelism that read one X: one cast of the shard, and inside ``gathered_once`` one gather."""

from __future__ import annotations

import contextlib
import gc
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat import Linear
from minifloat.distributed import gathered_once
from minifloat.functional import linear, tensor_parallel
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.gather_cases import Wire

ROWS, K = (3, 130), 32


def siblings(recipe: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    options = {"parallel_mode": "column", "sequence_parallel": True, "tp_group": dist.group.WORLD}
    return nn.ModuleList(Linear(K, 8 + 2 * i, recipe=recipe, **options) for i in range(3))


def steps(rank: int, size: int, recipe: Any) -> list[tuple[list[Tensor], int, int]]:
    """Results, and bytes sent in forward and in backward: each for itself, as siblings, and in the context."""
    results = []
    for way in ("alone", "siblings", "once"):
        layers = siblings(recipe)
        torch.manual_seed(rank + 1)
        x = torch.randn(ROWS[rank], K, requires_grad=True)
        for layer in layers:  # ranks agree on a layer's recipe in its first call
            layer(x.detach().clone().requires_grad_(), rows_per_rank=ROWS)
        with Wire() as wire, gathered_once() if way == "once" else contextlib.nullcontext():
            ys = []
            for layer in layers:
                if way == "alone":
                    linear._local.slot.latest = None
                ys.append(layer(x, rows_per_rank=ROWS))
        with Wire() as backward:
            sum(y.square().sum() for y in ys).backward()  # type: ignore[union-attr]
        tensors = [*(y.detach() for y in ys), x.grad, *(layer.weight.grad for layer in layers)]
        bytes_sent = [sum(each.bytes for each in seen.sent) for seen in (wire, backward)]
        results.append((tensors, *bytes_sent))
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "delayed", None])
def test_the_same_bits_and_fewer_bytes(recipe: Any, worker_pool: Pools) -> None:
    """133 rows: a block straddles the ranks. Siblings agree on amaxes, and send its rows to the first, once only."""
    for rank, (alone, siblings, in_context) in enumerate(worker_pool(2).run(steps, recipe)):
        (tensors, sent, back), (shared, sent_shared, _), (once, sent_once, back_once) = alone, siblings, in_context
        assert len(tensors) == 7
        for a, b, c in zip(tensors, shared, once, strict=True):
            assert torch.equal(a, b) and torch.equal(a, c)
        assert back == back_once
        if recipe in ("delayed", None):
            assert sent == sent_shared == sent_once
        else:
            sends_before_cast = recipe == "current" or rank == 1
            assert 3 * sent_once == sent and sent_once < sent_shared <= sent
            assert (sent_shared < sent) == sends_before_cast


@on_ranks(2)
def test_freed(rank: int, size: int) -> None:
    """What is kept is dead after the context, though X and the graph are not."""
    layers = siblings("current")
    x = torch.randn(4, K, requires_grad=True)
    with gathered_once():
        y = layers[0](x)
        whole = tensor_parallel._shared.whole
        assert whole is not None and whole[1].rowwise is not None
        codes = ref(whole[1].rowwise.codes)
        del whole
        other = layers[1](x * 2)
        gc.collect()
        assert codes() is None, "another tensor was gathered"
        whole = tensor_parallel._shared.whole
        codes = ref(whole[1].rowwise.codes)  # type: ignore[index, union-attr]
        del whole
    gc.collect()
    assert codes() is None and tensor_parallel._shared.whole is None
    layers[2](x)
    assert tensor_parallel._shared.whole is None
    (y.sum() + other.sum()).backward()
