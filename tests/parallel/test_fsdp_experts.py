"""Weights of experts under ``fully_shard``: gathered as codes, beside unsharded replicas, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import minifloat
from minifloat.comm.group import ShardMap
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.nn.moe import LayerNormMoE
from minifloat.optim import MasterWeights
from minifloat.parallel.fsdp import full_state_dict, fully_shard, hooks, load_full_state_dict, sharded_weights
from minifloat.tensor import QuantizedTensor
from minifloat.tensor.rows import row_unit
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fsdp_cases import KINDS, Case, RecordedGathers, mesh_of
from tests.helpers.selection import diagonals

COUNTS = [3, 0, 6]


@pytest.mark.parametrize(
    ("size", "recipe", "kind"), diagonals(2, [2, 3], ["current", "block", "mxfp8", "delayed"], KINDS)
)
def test_lockstep(worker_pool: Pools, size: int, recipe: str, kind: str) -> None:
    assert worker_pool(size).run(KINDS[kind], Case("experts", recipe), 2) == [""] * size


WAYS = {
    "evaluate": Case("experts", "nvfp4", "root", options=("evaluate",)),
    "accumulate": Case("experts", "mxfp8", reshard=False, options=("accumulate",)),
    "checkpoint": Case("experts", "mxfp8", dtype="bfloat16", options=("checkpoint",)),
    "autocast": Case("experts", "delayed", options=("autocast", "accumulate")),
}
ONE_WAYS = {
    "evaluate": Case("one parameter", "nvfp4", "root", options=("evaluate",)),
    "keep": Case("one parameter", "mxfp8", reshard=False, options=("keep", "frozen")),
    "checkpoint": Case("one parameter", "block", dtype="bfloat16", options=("checkpoint",)),
    "save_on_cpu": Case("one parameter", "mxfp8", reshard=True, options=("save_on_cpu",)),
    "autocast": Case("one parameter", "delayed", "nested", options=("autocast", "accumulate")),
}


@pytest.mark.parametrize(("way", "kind"), diagonals(2, WAYS, KINDS))
def test_ways_to_step(worker_pool: Pools, way: str, kind: str) -> None:
    assert worker_pool(2).run(KINDS[kind], WAYS[way], 2) == [""] * 2


class Layers(nn.Sequential):
    """Grouped linears."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x, COUNTS)
        return x


def made(recipe: str, quantized: bool, seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    sizes = ((256, 128), (128, 256))
    with minifloat.quantized_model_init(quantized, recipe=recipe):
        return Layers(*[minifloat.GroupedLinear(3, k, n, bias=False, recipe=recipe) for k, n in sizes])


def called(model: Layers, rank: int) -> torch.Tensor:
    y: torch.Tensor = model(torch.randn(9, 256, generator=torch.Generator().manual_seed(rank), requires_grad=True))
    return y


@torch.no_grad()
def evaluated(model: Layers) -> torch.Tensor:
    return called(model, 0)


@pytest.mark.parametrize("quantized", [False, True], ids=["high-precision", "quantized"])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@on_ranks(2)
def test_wire_bytes(rank: int, size: int, recipe: str, quantized: bool) -> None:
    """Of a step the bytes of each gather, what the formula says, and how many weights are gathered as codes.

    Between forward and backward their memory is free, and none is kept of what they were before they were sharded.
    """
    model = made(recipe, quantized)
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(size), reshard_after_forward=True)
    recorded, expected = RecordedGathers(model), []
    for _ in range(2):
        recorded.sent.clear()
        y = called(model, rank)
        assert not any(each.weight.gathered.holds(ROWWISE) for each in hooks.parameters_below(model))
        y.sum().backward()
    for dim, layers in ((ROWWISE, list(model)), (COLUMNWISE, list(model)[::-1])):
        for layer in layers:
            quantizer: Any = layer._config(layer.recipe).weight  # type: ignore[operator]
            fmt, (n, k) = quantizer.format(dim), (layer.out_features, layer.in_features)
            shards = ShardMap.chunks(n, size).whole_units(row_unit(quantizer))  # type: ignore[arg-type]
            expected.append(3 * shards.gather_bytes(fmt, ROWWISE if fmt.symmetric else dim, k))  # type: ignore[arg-type]
    assert all(layer._joined is None for layer in model)
    assert recorded.sent == expected and len(sharded_weights(model)) == 6


@pytest.mark.parametrize("recipe", ["current", "block", "nvfp4"])
@on_ranks(2, 3, 4)
def test_wire_bytes_of_one_parameter(rank: int, size: int, recipe: str) -> None:
    """Of a step the bytes of each gather: those of the operands of as many experts as the first rank has, of three."""
    layer = minifloat.GroupedLinear(3, 37, 70, bias=False, recipe=recipe, single_grouped_weight=True)
    one: Any = minifloat.Linear(37, 70, recipe=recipe)._config(layer.recipe).weight(torch.zeros(70, 37))  # type: ignore
    model = Layers(layer)
    fully_shard(model, mesh=mesh_of(size), reshard_after_forward=True)
    (parameter,), recorded = hooks.parameters_below(model), RecordedGathers(model)
    y = model(torch.randn(9, 37, requires_grad=True))
    assert sharded_weights(model).keys() == {"0.weight"} and not parameter.weight.gathered.holds(COLUMNWISE)
    y.sum().backward()
    each = [sum(own.nbytes for own in operand[:3] if own is not None) for operand in one]
    assert recorded.sent == [-(-3 // size) * count for count in each]


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@on_ranks(2)
def test_whole_state_dicts(rank: int, size: int, recipe: str) -> list[str]:
    """The whole state dict there and back; what differs."""
    whole = made(recipe, True)
    twin, sharded = copy.deepcopy(whole), made(recipe, True, seed=1)
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh_of(size))
    load_full_state_dict(sharded, whole.state_dict())
    wrong = ["output"] * (not torch.equal(evaluated(sharded), evaluated(whole)))
    optimizers = [MasterWeights(each.parameters(), torch.optim.SGD, lr=0.5) for each in (whole, sharded)]
    for model, optimizer in zip((whole, sharded), optimizers, strict=True):
        called(model, 0).square().sum().backward()
        optimizer.step()
    state = full_state_dict(sharded)
    for name, expected in whole.state_dict().items():
        found = state[name]
        pairs = [(found, expected)]
        if isinstance(expected, QuantizedTensor):
            pairs = [(found._buffers()[key], own) for key, own in expected._buffers().items() if key != "scale"]
        wrong += [name] * (not all(torch.equal(a, b) for a, b in pairs))
    values = {key: v.dequantize() if isinstance(v, QuantizedTensor) else v for key, v in state.items()}
    for model in (twin, sharded):
        kept = {key: value for key, value in values.items() if "scaling" not in key}
        load_full_state_dict(model, kept, strict=False)  # the scales are those of these values then
    return wrong + ["loaded values"] * (not torch.equal(evaluated(sharded), evaluated(twin)))


class Residual(nn.Module):
    """A layer around which X is added in place, or not."""

    def __init__(self, layer: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = layer, in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y.add_(x) if self.in_place else y + x


@pytest.mark.parametrize(("kind", "recipe"), diagonals(2, ["MoE", "LayerNormMoE"], ["current", "mxfp8", "none"]))
@on_ranks(2)
def test_addition_in_place_to_experts(rank: int, size: int, kind: str, recipe: str) -> None:
    """The gradients of X and of this rank's rows, with the addition in place and not."""
    found = []
    for in_place in (True, False):
        torch.manual_seed(0)
        layer = minifloat.MoE(64, 96, 4, recipe=recipe) if kind == "MoE" else LayerNormMoE(64, 96, 4, recipe=recipe)
        model = Residual(layer, in_place)
        for module in (layer, model):
            fully_shard(module, mesh=mesh_of(size), reshard_after_forward=True)
        x = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        model(x * 1).square().sum().backward()
        gradients = [x.grad, *[p.grad.to_local() for p in model.parameters() if p.grad is not None]]  # type: ignore
        found.append(torch.cat([each.flatten() for each in gradients]))
    in_place, expected = found
    assert torch.equal(in_place, expected) and expected.norm() > 0


@pytest.mark.parametrize("way", ONE_WAYS)
def test_ways_to_step_one_parameter(worker_pool: Pools, way: str) -> None:
    assert worker_pool(3).run(KINDS["high-precision"], ONE_WAYS[way], 2) == [""] * 3


ONE = ["delayed", "rowwise", "mxfp8", "mxfp4"], ["current", "block", "nvfp4", "w4a8"]  # on two ranks, and on three


@pytest.mark.parametrize(("recipe", "size"), [(recipe, 2 + i) for i, recipes in enumerate(ONE) for recipe in recipes])
def test_one_parameter_in_lockstep(worker_pool: Pools, recipe: str, size: int) -> None:
    assert worker_pool(size).run(KINDS["high-precision"], Case("one parameter", recipe), 2) == [""] * size
