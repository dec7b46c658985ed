"""Compiled layers under ``fully_shard``: the bits of eager ones, and no graph that is new after the second step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import minifloat
from minifloat.optim import MasterWeights
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.fsdp_cases import MODELS, RECIPES, TWINS, Case, loss, mesh_of, shard, width

STEPS = 4


def compiled(rank: int, size: int, case: Case, kind: str, order: str) -> list[str]:
    """What differs between a model with compiled layers and one without, both sharded, or of their graphs."""
    torch._dynamo.reset()
    counters.clear()
    backend = CompileCounterWithBackend("aot_eager")
    models: list[torch.nn.Module] = []
    optimizers: list[Any] = []
    for way in ("eager", order):
        torch.manual_seed(0)
        with minifloat.quantized_model_init(kind == "quantized", recipe=case.recipe):
            model = MODELS[case.model](case.recipe)
        if way == "compile, shard":
            for layer in model.children():
                layer.compile(backend=backend, fullgraph=True)
        shard(model, case, mesh_of(size))
        if way == "shard, compile":
            for layer in model.children():
                layer.compile(backend=backend, fullgraph=True)
        models.append(model)
        if kind == "quantized":
            optimizers.append(MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.02))
        else:
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.02))
    generator, wrong, graphs = torch.Generator().manual_seed(rank), [], []
    for step in range(STEPS):
        data = torch.randn(6, 2, width(models[0]), generator=generator)
        results = []
        for model, optimizer in zip(models, optimizers, strict=True):
            results.append(_step(model, data))
            optimizer.step()
            optimizer.zero_grad()
        eager, found = results
        wrong += [f"{name} of step {step}" for name in eager if not torch.equal(eager[name], found[name])]
        graphs.append(backend.frame_count)
    wrong += [f"graphs after each step: {graphs}"] * (graphs[1] != graphs[-1] or graphs[0] == 0)
    wrong += [f"graph breaks: {dict(counters['graph_break'])}"] * bool(counters["graph_break"])
    torch._dynamo.reset()
    return wrong


def _step(model: torch.nn.Module, data: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)  # of what is rounded stochastically
    x = data.clone().requires_grad_()
    y = model(x)
    loss(y).backward()
    assert x.grad is not None
    found = {"output": y.detach(), "gradient of the input": x.grad}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[f"gradient of {name}"] = parameter.grad.to_local()  # type: ignore[attr-defined]
    return found | {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("model", ["LayerNormLinear", "one parameter"])
def test_compiled_layers(worker_pool: Pools, model: str) -> None:
    case = Case(model, "mxfp8", reshard=True)
    assert worker_pool(2).run(compiled, case, "high-precision", "shard, compile") == [[]] * 2


@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.slow)])
@on_ranks(2)
def test_experts_with_a_parameter_each(rank: int, size: int, fullgraph: bool) -> str:
    """No graph holds what joins the codes for backward: it raises, or the layer runs as an eager one."""
    torch._dynamo.reset()
    results, case = [], Case("experts", "mxfp8", reshard=True)
    for way in ("eager", "compiled"):
        torch.manual_seed(0)
        model = shard(MODELS[case.model](case.recipe), case, mesh_of(size))
        if way == "compiled":
            next(model.children()).compile(backend="aot_eager", fullgraph=fullgraph)
        if way == "compiled" and fullgraph:
            with pytest.raises(Exception, match=r"'experts.fc1'.*FSDP2 gathers them later; use single_grouped_weight"):
                model(torch.ones(6, 24))
            return ""
        results.append(_step(model, torch.ones(6, 24)))
    eager, found = results
    return ", ".join(name for name in eager if not torch.equal(eager[name], found[name]))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["compile, shard", "shard, compile"])
@pytest.mark.parametrize("kind", TWINS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_compiled_layers_of_every_recipe(worker_pool: Pools, module: str, recipe: str, kind: str, order: str) -> None:
    """Both kinds of parameters; layers compiled before they are sharded or after."""
    case = Case(module, recipe, reshard=True)
    assert worker_pool(2).run(compiled, case, kind, order, timeout=280) == [[]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_experts_in_one_parameter(worker_pool: Pools, recipe: str) -> None:
    case = Case("one parameter", recipe, reshard=True)
    assert worker_pool(2).run(compiled, case, "high-precision", "compile, shard", timeout=280) == [[]] * 2
