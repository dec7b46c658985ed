"""``fully_shard`` over one dim of a mesh of two, beside replicas and beside tensor parallelism: what a rank does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat.optim.gradient_norm import gradient_norm
from minifloat.parallel.fsdp import fully_shard, hooks
from tests.helpers.fsdp_cases import full, gathered_bytes, layers


def hybrid(rank: int, size: int, shape: tuple[int, int], device: str = "cpu") -> list[str]:
    """Two dims of a mesh: rows over the second, copies over the first."""
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    with torch.device(device):
        model = layers("nvfp4", 24, 70, 2)
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        weight = hooks.parameters_below(model)[0]
        wrong = [] if weight.group.size == shape[1] else [f"a group of {weight.group.size}"]
        return wrong + gathered_bytes(model)


def tensor_parallel(rank: int, size: int, recipe: str, device: str = "cpu") -> list[str]:
    """A layer whose weights are split over two ranks and then over two others; the norm of its gradients."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("shard", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
        options |= {"set_parallel_mode": True, "sequence_parallel": True, "tp_mesh": mesh["tp"], "recipe": recipe}
        models.append(minifloat.TransformerLayer(32, 64, 2, device=device, **options))
    plain, sharded = models
    fully_shard(sharded, mesh=mesh["shard"])
    data = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(mesh["shard"].get_local_rank()))
    results = []
    for model in models:
        torch.manual_seed(1)
        x = data.chunk(2)[mesh["tp"].get_local_rank()].to(device, copy=True).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        results.append((y, x.grad))
    wrong = [
        name for name, one, other in zip(("output", "gradient"), *results, strict=True) if not torch.equal(one, other)
    ]
    for (name, mine), theirs in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert mine.grad is not None
        dist.all_reduce(mine.grad, group=mesh["shard"].get_group())
        mine.grad /= 2
        wrong += [name] * (not torch.equal(mine.grad, full(theirs.grad)))
    norms = [gradient_norm(model.parameters(), mesh["tp"]) for model in models]
    return wrong + [f"norms {norms}"] * (not torch.allclose(*norms, rtol=1e-6))
