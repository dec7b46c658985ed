"""Random numbers under tensor parallelism: which ranks draw the same, and what a recomputation draws."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from minifloat import checkpoint
from minifloat.comm.group import Group, draw_apart
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fused_model import assert_same
from tests.helpers.tensor_parallel_layers import BATCH, HIDDEN, Case, step

LLAMA: dict[str, Any] = {"num_gqa_groups": 4, "normalization": "RMSNorm", "activation": "swiglu", "bias": False}


def test_draws_apart(worker_pool: Pools) -> None:
    first, second = worker_pool(2).run(_draws)
    assert not torch.equal(first["apart"], second["apart"])
    assert not torch.equal(first["apart"], first["apart again"])
    assert torch.equal(first["after"], second["after"]) and torch.equal(first["before"], second["before"])
    assert torch.equal(first["replayed"], first["apart"]) and torch.equal(second["replayed"], second["apart"])


def _draws(rank: int, size: int) -> dict[str, Tensor]:
    group, x = Group.of(dist.group.WORLD), torch.zeros(20)
    results = {"before": torch.rand(3)}
    state = torch.get_rng_state()
    for name in ("apart", "apart again"):
        results[name] = draw_apart(group, torch.rand_like, x)
    results["after"] = torch.rand(3)
    torch.set_rng_state(state)
    return results | {"replayed": draw_apart(group, torch.rand_like, x)}


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sequence", "replicated"])
def test_hidden_dropout(worker_pool: Pools, sequence_parallel: bool) -> None:
    """Rows that all ranks have drop the same elements; rows that each rank has by itself drop others."""
    case = Case(rows=(8, 8), sequence_parallel=sequence_parallel, options={"bias": False})
    first, second = worker_pool(2).run(_dropped, case)
    assert 0.3 < float(first.mean(dtype=torch.float32)) < 0.7
    assert torch.equal(first, second) is not sequence_parallel


def _dropped(rank: int, size: int, case: Case, batch: int = BATCH) -> Tensor:
    layer = case.sharded()
    layer.dropout.p = 0.5
    x = torch.randn(16 // (2 if case.sequence_parallel else 1), batch, HIDDEN)
    dropped: Tensor = layer._drop(torch.ones_like(x)) == 0
    return dropped


def test_drop_path(worker_pool: Pools) -> None:
    """All ranks drop the same samples, also of a sequence that is split, and behind dropout that differs by rank."""
    case = Case(rows=(8, 8), options={"bias": False, "drop_path_rate": 0.5})
    first, second = worker_pool(2).run(_dropped, case, 16)
    samples = first.all(dim=(0, 2))
    assert 0 < int(samples.sum()) < 16
    assert torch.equal(samples, second.all(dim=(0, 2))) and not torch.equal(first, second)


def test_attention_dropout(worker_pool: Pools) -> None:
    """Heads of all ranks drop their own weights, evaluation none, and a recomputation the same as the forward."""
    for results in worker_pool(2).run(_attention_dropout):
        assert_same(results["computed again"], results["kept"])
    first, second = (each["heads"] for each in worker_pool(2).run(_attention_dropout))
    assert not torch.equal(first, second)
    assert torch.equal(*(each["evaluated"] for each in worker_pool(2).run(_attention_dropout)))


def _attention_dropout(rank: int, size: int) -> dict[str, Any]:
    layer = Case(options={"bias": False}).sharded()
    attention = layer.self_attention
    attention.core_attention.attention_dropout = 0.5
    x = torch.randn(4, BATCH, HIDDEN)
    results: dict[str, Any] = {}
    for again in (False, True):
        torch.manual_seed(3)
        given = {"checkpoint_core_attention": again}
        results["computed again" if again else "kept"] = step(layer, x, torch.ones_like(x), None, None, **given)
    heads: list[Tensor] = []
    attention.proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
    attention.qkv.register_forward_hook(lambda module, inputs, output: torch.ones_like(output))
    for mode in (True, False):
        layer.train(mode)
        layer(x)
    return results | {"heads": heads[0].detach(), "evaluated": heads[1].detach()}


@on_ranks(2)
def test_dropout_is_drawn_again(rank: int, size: int) -> None:
    """A layer that backward computes a second time drops what its forward did, on each rank."""
    layer = Case(options=LLAMA).sharded()
    layer.dropout.p = layer.self_attention.core_attention.attention_dropout = 0.5
    x, results = torch.randn(4, BATCH, HIDDEN), []
    for again in (False, True):
        torch.manual_seed(3)
        run = partial(checkpoint, layer) if again else layer
        layer.zero_grad()
        own = x.clone().requires_grad_()
        y = run(own)
        (y * torch.rand_like(y)).sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append({"y": y.detach(), "x": own.grad, **grads, "after": torch.rand(2)})
    found, wanted = results
    assert_same(found, wanted)
