"""Compiled delayed scaling on several ranks: the numbers of the same steps without a compiler."""

from __future__ import annotations

import contextlib
import copy
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat import Linear, autocast, prepare
from minifloat.functional.quantize import Mode
from minifloat.recipe import DelayedScaling
from tests.helpers.compiled import Pair, graphs
from tests.helpers.compiled import compiled as compile_whole
from tests.helpers.distributed_pool import Pools, on_ranks
from tests.helpers.sample import first_by_default

RECIPE = DelayedScaling(amax_history_len=2, reduce_amax=True)


def steps(model: nn.Module, way: str, group: dist.ProcessGroup | None, compiled: bool, rank: int) -> list[Tensor]:
    """Output, gradients and all state after steps on data of this rank."""

    def forward(x: Tensor) -> Tensor:
        inside = autocast(recipe=RECIPE, amax_reduction_group=group) if way == "inside" else contextlib.nullcontext()
        with inside:
            result: Tensor = model(x)
        return result

    call = torch.compile(forward, fullgraph=True, backend="aot_eager") if compiled else forward
    torch.manual_seed(rank)
    for step in range(3):
        x = (torch.randn(5, 16) * 10.0 ** (rank - step)).requires_grad_()
        outside = autocast(recipe=RECIPE, amax_reduction_group=group) if way == "outside" else contextlib.nullcontext()
        with outside:
            y = call(x)
        model.zero_grad()
        (y * (rank + 1)).square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.grad is not None], *model.buffers()]


def both(rank: int, size: int, way: str, subgroup: bool) -> list[Tensor]:
    logging.getLogger("torch.__trace").disabled = True
    torch._dynamo.reset()
    torch.manual_seed(0)
    recipe = RECIPE if way == "own" else None
    model = nn.Sequential(Linear(16, 12, recipe=recipe), nn.ReLU(), Linear(12, 8, recipe=recipe))
    prepare(model, RECIPE)
    group = dist.new_group([0, 1]) if subgroup else None
    wanted = steps(copy.deepcopy(model), way, group, False, rank)
    found = steps(model, way, group, True, rank)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    return list(model.buffers())


@first_by_default
@pytest.mark.parametrize("way", ["own", "outside", "inside"])
def test_compiled_delayed_scaling(way: str, worker_pool: Pools) -> None:
    """Outputs, gradients and histories of both directions and of all layers, also over a group that was asked for."""
    first, second = worker_pool(2).run(both, way, way == "outside")
    assert len(first) == 8 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- what changes after a compilation ----


def fresh() -> None:
    logging.getLogger("torch.__trace").disabled = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
@on_ranks(2)
def test_groups_change(rank: int, size: int, recipe: str) -> None:
    """A group that is gone raises; one made anew compiles once more and gives the eager numbers."""
    fresh()
    old = dist.new_group([0, 1])
    layer = Linear(16, 24, recipe=recipe, parallel_mode="column", sequence_parallel=True, tp_group=old)
    pair = Pair(layer)
    x = torch.randn(3, 16) * (rank + 1)
    pair.step(x)
    dist.destroy_process_group(old)
    with pytest.raises(RuntimeError, match="process group"):
        pair.run(x)
    new = dist.new_group([0, 1])
    for model in (pair.eager, pair.model):
        model.set_tensor_parallel_group(new)  # type: ignore[operator]
    for _ in range(2):
        pair.step(x)
    dist.destroy_process_group(new)
    assert graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["outside", pytest.param("inside", marks=pytest.mark.slow)])
@on_ranks(2)
def test_amax_groups_made_anew(rank: int, size: int, way: str) -> None:
    """Histories are reduced over the group of the step, whatever was there when the graph was compiled."""
    fresh()
    group: dist.ProcessGroup | None = None

    def call(model: Any, x: Tensor) -> Tensor:
        with autocast(recipe=RECIPE, amax_reduction_group=group) if way == "inside" else contextlib.nullcontext():
            y: Tensor = model(x)
        return y

    pair, alike = Pair(Linear(16, 12), call, RECIPE), []
    for together in (True, False, True):
        groups = [dist.new_group(ranks) for ranks in ([[0, 1]] if together else [[0], [1]])]
        group = groups[0 if together else rank]
        for _ in range(2):
            with autocast(recipe=RECIPE, amax_reduction_group=group) if way == "outside" else contextlib.nullcontext():
                pair.step(torch.randn(5, 16) * 10.0**rank)
        scales = [torch.empty(3) for _ in range(2)]
        dist.all_gather(scales, pair.model.forward_scaling.scale)  # type: ignore[union-attr, arg-type]
        alike.append(torch.equal(*scales))
        dist.destroy_process_group(group)
    assert alike == [True, False, True]


def named(rank: int, size: int, sequence_parallel: bool) -> int:
    """How many graphs there are of three layers with names, each compiled by itself."""
    fresh()
    options: dict[str, Any] = {"parallel_mode": "column", "sequence_parallel": sequence_parallel, "recipe": "delayed"}
    layers = [Linear(16, 24, tp_group=dist.group.WORLD, name=f"layer{i}", **options) for i in range(3)]
    for layer in layers:
        compile_whole(layer)(torch.randn(6, 16, requires_grad=True)).sum().backward()
    return graphs()


@first_by_default
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_of_any_names_compile_once(sequence_parallel: bool, worker_pool: Pools) -> None:
    assert worker_pool(2).run(named, sequence_parallel) == [1, 1]


def different(rank: int, size: int, mode: Mode, recipes: tuple[str, str], run_compiled: bool) -> None:
    fresh()
    options: dict[str, Any] = {"parallel_mode": mode, "sequence_parallel": "rowwise" not in recipes}
    layer = Linear(32, 32, recipe=recipes[rank], tp_group=dist.group.WORLD, name="fc1", **options)
    run = compile_whole(layer) if run_compiled else layer
    x = torch.randn(32, layer.in_features)
    with pytest.raises(Exception, match=r"Linear 'fc1': .*different recipes.*rank 0: .*Float8Current.*; rank 1: "):
        run(x)
    layer.recipe = recipes[0]  # type: ignore[assignment]
    assert run(x).isfinite().all()


@first_by_default
@pytest.mark.parametrize(
    "case", [("column", "rowwise", False), ("column", "mxfp8", True), ("row", "none", False)], ids=str
)
def test_recipes_that_differ_between_ranks(case: tuple[Mode, str, bool], worker_pool: Pools) -> None:
    """They raise on each rank, before anything is gathered or summed; afterwards all goes on."""
    mode, other, run_compiled = case
    worker_pool(2).run(different, mode, ("current", other), run_compiled)
