"""Parameters of layers that ranks share, put in the place of others or frozen while a step goes on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from minifloat import Linear, VocabParallelEmbedding
from minifloat.distributed import parallelize
from minifloat.optim import gradient_norm
from tests.helpers.distributed_pool import on_ranks, process_group
from tests.helpers.etp_cases import mesh_of


def layers() -> nn.Sequential:
    """Their rows divide by two, so that an all-reduce of the gradients of different rows would go unnoticed."""
    torch.manual_seed(1)
    return nn.Sequential(Linear(8, 12), Linear(12, 4))


def replace(model: nn.Module) -> None:
    """Assigns new parameters of half the values, which have no attributes."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach() / 2))


def gradients(model: nn.Module, data: list[Tensor]) -> dict[str, Tensor]:
    """Of the mean over the data."""
    model.zero_grad()
    for x in data:
        (model(x).square().sum() / len(data)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@on_ranks(2)
def test_gradients_of_assigned_rows(rank: int, size: int) -> None:
    """Each rank's are of its rows; the norm counts the rows of all ranks."""
    data = [torch.randn(5, 8, generator=torch.Generator().manual_seed(each)) for each in range(size)]
    whole, model = layers(), parallelize(layers(), mesh_of({"etp": size}))
    for _ in range(2):
        wanted, found = gradients(whole, data), gradients(model, [data[rank]])
        for name, own in found.items():
            part = wanted[name].chunk(size)[rank] if name.endswith("weight") else wanted[name]
            torch.testing.assert_close(own, part)
        norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
        torch.testing.assert_close(gradient_norm(model.parameters()), norm)
        replace(whole)
        replace(model)


@on_ranks(2)
def test_norm_of_assigned_parts(rank: int, size: int) -> None:
    norms = []
    for options in ({}, {"tp_group": process_group()}):
        torch.manual_seed(1)
        embedding = VocabParallelEmbedding(10, 8, **options)
        linear = Linear(8, 12, parallel_mode="column" if options else None, **options)
        model = nn.Sequential(embedding, linear)
        replace(model)
        y = model(torch.arange(10))
        y.backward(torch.ones_like(y))
        norms.append(float(gradient_norm(model.parameters(), options.get("tp_group"))))
    whole, parts = norms
    assert parts == pytest.approx(whole, rel=1e-6)


@on_ranks(2)
def test_frozen_after_the_forward(rank: int, size: int) -> None:
    """No gradient, as from autograd."""
    data = torch.randn(5, 8)
    model = parallelize(layers(), mesh_of({"etp": size}))
    wanted = gradients(model, [data])
    model.zero_grad()
    y = model(data)
    model[1].weight.requires_grad_(False)
    y.square().sum().backward()
    assert model[1].weight.grad is None
    model[1].weight.requires_grad_(True)
    assert all(torch.equal(p.grad, wanted[n]) for n, p in model.named_parameters() if p.grad is not None)
    again = gradients(model, [data])
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in again.items()) and len(again) == 4
