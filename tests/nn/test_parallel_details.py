"""What is easily lost where ranks share layers: marks of parameters, gradients of what all heads use, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifloat import DelayedScaling, Linear, MultiheadAttention, VocabParallelEmbedding
from minifloat.distributed import sharded_state_dict
from minifloat.optim import gradient_norm
from tests.helpers.distributed_pool import Pools, on_ranks


def loaded_by_assignment(rank: int, size: int) -> Any:
    torch.manual_seed(1)
    modules = [
        Linear(16, 32, parallel_mode="column", tp_group=dist.group.WORLD),
        VocabParallelEmbedding(10, 4, tp_group=dist.group.WORLD),
    ]
    inputs = [torch.randn(4, 16), torch.arange(10)]
    found = []
    for _ in range(2):
        for module, x in zip(modules, inputs, strict=True):
            module.zero_grad()
            module(x).square().sum().backward()
            norm = gradient_norm(module.parameters(), dist.group.WORLD)
            weight = sharded_state_dict(module)["weight"]
            found.append((float(norm), tuple(weight.shape), str(weight.offsets)))
            module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)
    return found


def test_marks_survive_assignment(worker_pool: Pools) -> None:
    for found in worker_pool(2).run(loaded_by_assignment):
        assert found[:2] == found[2:]
        assert [shape for _, shape, _ in found[:2]] == [(32, 16), (10, 4)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_the_gradient_of_a_bias_is_that_of_all_heads(rank: int, size: int, sequence_parallel: bool) -> None:
    results = []
    for options in ({}, {"set_parallel_mode": True, "sequence_parallel": sequence_parallel}):
        torch.manual_seed(1)
        if options:
            options["tp_group"] = dist.group.WORLD
        module = MultiheadAttention(32, 4, attention_dropout=0.0, attn_mask_type="no_mask", **options)  # type: ignore[arg-type]
        x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(2))
        x = x.chunk(size)[rank] if options and sequence_parallel else x
        for shape in ((1, 4, 6, 6), (1, 1, 6, 6)):
            bias = torch.randn(shape, generator=torch.Generator().manual_seed(3), requires_grad=True)
            loss = module(x, core_attention_bias=bias).square().sum()
            loss.backward()
            results.append(bias.grad)
    wanted_all, wanted_one, got_all, got_one = results
    torch.testing.assert_close(got_all, wanted_all, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_one, wanted_one, atol=1e-4, rtol=1e-4)


@on_ranks(2)
def test_groups_and_histories(rank: int, size: int) -> Any:
    torch.manual_seed(1)
    embedding = VocabParallelEmbedding(10, 4, tp_group=dist.group.WORLD)
    before = embedding(torch.arange(10))
    embedding.set_tensor_parallel_group(dist.new_group(list(range(size))))
    one = embedding(torch.tensor(7))  # one token, without any dim
    assert torch.equal(embedding(torch.arange(10)), before)
    assert torch.equal(one, before[7])
    layer = Linear(16, 32, parallel_mode="column", tp_group=dist.group.WORLD, recipe=DelayedScaling(reduce_amax=False))
    with pytest.raises(ValueError, match="histories of its own on each rank"):
        sharded_state_dict(layer)
    alone = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="is cut for 2 ranks, not for a group of 1"):
        embedding.set_tensor_parallel_group(alone)
