"""Models whose weights ranks share, of which parts are captured and others run eagerly, beside the same all eager."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import minifloat
from minifloat import make_graphed_callables
from minifloat.distributed import parallelize
from minifloat.formats import ROWWISE
from minifloat.graphs import capture
from minifloat.nn.tensor_parallel import etp_weights
from minifloat.recipe import DelayedScaling, named
from tests.helpers.graph_on_cpu import GraphOnCpu

HIDDEN = 32
DELAYED = DelayedScaling(amax_history_len=3)


class Block(nn.Module):
    """Attention, to be captured, and experts, whose numbers of tokens no graph can hold."""

    def __init__(self, experts: bool, **options: Any) -> None:
        super().__init__()
        self.attention = minifloat.MultiheadAttention(
            HIDDEN, 4, attention_dropout=0.0, input_layernorm=True, bias=True, **options
        )
        mlp = minifloat.MoE(HIDDEN, 48, 3, **options) if experts else minifloat.LayerNormMLP(HIDDEN, 49, **options)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        result: Tensor = x + self.mlp(x)
        return result


def model_of(experts: bool, device: str, size: int, recipe: str, dtype: torch.dtype, depth: int = 1) -> nn.Module:
    torch.manual_seed(0)
    chosen = None if recipe == "none" else DELAYED if recipe == "delayed" else named(recipe)
    options = {"dtype": dtype, "device": device, "recipe": chosen}
    model = nn.Sequential(*[Block(experts, **options) for _ in range(2)])
    return parallelize(model, init_device_mesh(device, (size,), mesh_dim_names=("etp",)), prefetch=depth)


def state_of(model: nn.Module) -> dict[Any, Tensor]:
    """Parameters, buffers and gradients."""
    found: dict[Any, Any] = dict(model.named_buffers())
    for name, p in model.named_parameters():
        found |= {name: p, (name, "grad"): p.grad, (name, "main_grad"): getattr(p, "main_grad", None)}
    return {name: each.detach().clone() for name, each in found.items() if each is not None}


def different(found: dict[Any, Tensor], wanted: dict[Any, Tensor]) -> list[str]:
    """Names of what is not equal to the bit."""
    return [str(name) for name in found.keys() | wanted.keys() if not _same(found.get(name), wanted.get(name))]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def queues_of(model: nn.Module) -> list[Any]:
    return list(dict.fromkeys(weight.queue for weight in etp_weights(model)))


def step(model: nn.Module, rank: int, seed: int) -> dict[Any, Tensor]:
    """Y and dX of this rank's data."""
    dtype, device = next((p.dtype, p.device) for p in model.parameters())
    generator = torch.Generator().manual_seed(2 * seed + rank)
    x, dy = (torch.randn(8, 2, HIDDEN, generator=generator).to(device, dtype) for _ in range(2))
    x.requires_grad_()
    torch.manual_seed(seed)
    y = model(x)
    y.backward(dy)
    assert x.grad is not None
    return {"y": y.detach().clone(), "dx": x.grad}


def compare(
    rank: int, size: int, recipe: str, experts: bool, dtype: torch.dtype, depth: int = 1, device: str = "cpu"
) -> list[str]:
    """What differs in five steps of two microbatches from a model that runs eagerly: nothing."""
    wrong: list[str] = []
    graphs: list[bool] = []  # of each replay, whether nothing was in flight

    class Watched(GraphOnCpu if device == "cpu" else capture.Graph):  # type: ignore[misc]
        def replay(self) -> None:
            graphs.append(not any(queue._prefetched or queue._reducing for queue in queues_of(model)))
            super().replay()

    with mock.patch.object(capture, "Graph", Watched):
        model, twin = (model_of(experts, device, size, recipe, dtype, depth) for _ in range(2))
        step(model, rank, 99)  # what it learns of the order of gathers is of no use to graphs
        step(twin, rank, 99)
        _forget_hooks(model)
        before = state_of(model)
        captured = [block.attention if experts else block for block in model]
        sample = torch.randn(8, 2, HIDDEN, dtype=dtype, device=device).requires_grad_()
        make_graphed_callables(captured, [(sample,) for _ in captured])
        wrong += [f"{name} after the capture" for name in different(state_of(model), before)]
        sources = [weight for part in captured for weight in etp_weights(part)]
        wrong += ["casts in the memory of a graph"] * any(each.parts(ROWWISE) is not None for each in sources)
        runs: Counter[str] = Counter()
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: runs.update([name]))
        wasted = 0
        for number in range(5):
            if number == 3:
                wasted = sum(queue.wasted for queue in queues_of(model))
            for part in range(2):
                found, wanted = (step(each, rank, 2 * number + part) for each in (model, twin))
                wrong += [f"{name} of step {number}, {part}" for name in different(found, wanted)]
            wrong += [f"{name} after step {number}" for name in different(state_of(model), state_of(twin))]
            for each in (model, twin):
                torch.optim.SGD(each.parameters(), lr=0.002).step()
                each.zero_grad(set_to_none=number % 2 == 0)
        wrong += ["something was in flight at a graph's begin"] * (not all(graphs) or len(graphs) != 40)
        wrong += [f"hook of {name}: {count}" for name, count in runs.items() if count != 10]
        if sum(queue.wasted for queue in queues_of(model)) > wasted:
            wrong.append("gathers were predicted across a graph")
        for each in (model, twin):
            each.eval()
        x = torch.randn(8, 2, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
        with torch.no_grad():
            wrong += ["evaluation"] * (not torch.equal(model(x), twin(x)))
    return wrong


def _forget_hooks(model: nn.Module) -> None:
    """Those that reduce the gradients of replicated parameters, which the next forward registers anew."""
    for hook in model._forward_pre_hooks.values():
        hook._watched.clear()
    for p in model.parameters():
        if p._backward_hooks:
            p._backward_hooks.clear()


def in_main_grad(rank: int, size: int, device: str = "cpu") -> list[str]:
    """A layer that adds to ``main_grad`` in its graph; captures and warm-ups leave it as it was."""
    wrong = []
    with mock.patch.object(capture, "Graph", GraphOnCpu if device == "cpu" else capture.Graph):
        mesh = init_device_mesh(device, (size,))
        torch.manual_seed(0)
        layer = minifloat.Linear(
            HIDDEN, 49, False, device=device, recipe="current", fuse_wgrad_accumulation=True, etp_group=mesh
        )
        twin = copy.deepcopy(layer)
        for each in (layer, twin):
            each.weight.main_grad = torch.ones(each.weight.shape, device=device)
        sample = (torch.randn(8, 2, HIDDEN, device=device).requires_grad_(),)
        try:
            make_graphed_callables(layer, sample, cache_quantized_params=True)
            wrong.append("a flag that skips the cast of shared rows")
        except ValueError as error:
            assert "weights that etp_group shards" in str(error)
        make_graphed_callables(layer, sample)
        if not bool((layer.weight.main_grad == 1).all()):
            wrong.append("main_grad after the capture")
        runs: list[int] = []
        layer.weight.register_post_accumulate_grad_hook(lambda p: runs.append(1))  # the twin's is another parameter
        for number in range(5):
            generator = torch.Generator().manual_seed(2 * number + rank)
            x, dy = (torch.randn(8, 2, wide, generator=generator).to(device) for wide in (HIDDEN, 49))
            for each in (layer, twin):
                each(x.clone().requires_grad_(), is_first_microbatch=number % 2 == 0).backward(dy)
            if not torch.equal(layer.weight.main_grad, twin.weight.main_grad):
                wrong.append(f"main_grad of step {number}")
        wrong += [] if len(runs) == 5 and layer.weight.grad is None else [f"hooks ran {len(runs)} times"]
    return wrong


def frozen(rank: int, size: int, device: str = "cpu") -> list[str]:
    """A weight that is frozen before the capture: the graph gives the other one its gradient, and this one none."""
    with mock.patch.object(capture, "Graph", GraphOnCpu if device == "cpu" else capture.Graph):
        mesh = init_device_mesh(device, (size,))
        torch.manual_seed(0)
        layers = [minifloat.Linear(HIDDEN, HIDDEN, recipe="current", device=device, etp_group=mesh) for _ in range(2)]
        layers[0].weight.requires_grad_(False)
        model = nn.Sequential(*layers)
        twin = copy.deepcopy(model)
        make_graphed_callables(model, (torch.randn(8, 2, HIDDEN, device=device).requires_grad_(),))
        found, wanted = (step(each, rank, 1) | state_of(each) for each in (model, twin))
        wrong = different(found, wanted)
    return wrong + ["a gradient of the frozen weight"] * (layers[0].weight.grad is not None)


class Fails(nn.Module):
    """Raises in its third forward or backward, after a gather has been started ahead."""

    def __init__(self, device: str, backward: bool) -> None:
        super().__init__()
        self.first, self.second = (minifloat.Linear(HIDDEN, HIDDEN, recipe="current", device=device) for _ in range(2))
        self.calls, self.backward = 0, backward

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.backward:
            y.register_hook(self.count)
        else:
            self.count(y)
        result: Tensor = self.second(y)
        return result

    def count(self, x: Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("of a test")


def after_a_failure(rank: int, size: int, backward: bool) -> list[str]:
    """A capture that raises leaves nothing in flight, no gradient, and the next step as it would have been."""
    results = []
    with mock.patch.object(capture, "Graph", GraphOnCpu):
        for captured in (False, True):
            torch.manual_seed(0)
            model = Fails("cpu", backward)
            parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("etp",)))
            if captured:
                with suppress(ArithmeticError):
                    make_graphed_callables(model, (torch.randn(8, 2, HIDDEN).requires_grad_(),))
                (queue,) = queues_of(model)
                assert queue.in_graph is None and not queue._prefetched and not queue._reducing
                assert all(p.grad is None for p in model.parameters())
            model.calls = 3
            results.append(step(model, rank, 5) | state_of(model))
    return different(*results)
