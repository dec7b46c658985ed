"""Under torch.compile a layer computes what it computes without, in one graph; on a GPU it is captured and never waits.

The wide matrix runs on backend "aot_eager", which traces forward and backward and runs the graphs' operations as they
are; "inductor" runs a handful on a CPU and everything on a GPU. A bias's gradient is a plain sum, whose order is
Inductor's to choose: everything else is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from minifloat.autocast import autocast
from minifloat.nn import LayerNormLinear, Linear, prepare
from minifloat.recipe import (
    QuantizerRole,
    Recipe,
)
from tests.helpers.compiled import RECIPES, Pair, graphs
from tests.helpers.sample import first_by_default

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NAMED = ["delayed", "current", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4", "mxfp6", "custom"]
STATEFUL = ("delayed", "custom")
IN, HIDDEN, OUT = 32, 48, 17
Way = str  # "own": the layers' recipe; "outside", "inside": autocast around, or in, the compiled function


def two_layers(recipe: Recipe | None, device: torch.device | str = "cpu", **options: Any) -> nn.Sequential:
    """A model with something between its layers for the compiler to fuse."""
    first = Linear(IN, HIDDEN, recipe=recipe, device=device, **options)
    return nn.Sequential(first, nn.ReLU(), Linear(HIDDEN, OUT, recipe=recipe, device=device, **options))


class Twins(Pair):
    """Two layers and their compiled copies, which take the same steps; ``way``: where the recipe comes from."""

    exact_biases = False

    def __init__(
        self, recipe: Recipe, way: Way = "own", *, call: Callable[..., Tensor] = lambda model, x: model(x),
        device: torch.device | str = "cpu", save_original_input: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.recipe, self.way, self.device = recipe, way, device

        def run(model: nn.Module, x: Tensor, *more: Any) -> Tensor:
            with autocast(recipe=recipe) if way == "inside" else contextlib.nullcontext():
                return call(model, x, *more)

        own = recipe if way == "own" else None
        model = two_layers(own, device, save_original_input=save_original_input)
        super().__init__(model, run, None if way == "own" else recipe, **options)

    def take(self, shape: Sequence[int], *more: Any) -> None:
        """A step of both on the same data: everything must be equal."""
        seed = sum(shape)
        x = torch.randn(*shape, IN, device=self.device) * seed
        with autocast(recipe=self.recipe) if self.way == "outside" else contextlib.nullcontext():
            self.step(x, seed, torch.is_grad_enabled(), *more)


def grads_cleared(twins: Twins) -> None:
    """What an optimizer does after its step."""
    twins.eager.zero_grad()
    twins.model.zero_grad()


# ---- Every recipe ----


TRACED_ALIKE = set(RECIPES) - {"delayed", "block", "nvfp4 row-scaled", "mxfp8 2d hybrid", "dequantized backward"}


@first_by_default
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TRACED_ALIKE)) for name in RECIPES]
)
def test_every_recipe(name: str) -> None:
    """One graph serves all token counts where dynamic shapes were asked for and the grid of blocks has no dim of 1."""
    twins = Twins(RECIPES[name], "outside", dynamic=True)
    for tokens in (13, 16, 11):
        twins.take((tokens, 3))
    assert graphs() == 1
    assert bool(list(twins.model.buffers())) == (name in STATEFUL)


@pytest.mark.slow  # by default test_warm_start has it, and tests of other files
@pytest.mark.parametrize("name", ["delayed", "nvfp4", "block"])
def test_inductor(name: str) -> None:
    """The default backend, with its own partitioner, which chooses what backward computes again."""
    twins = Twins(RECIPES[name], "outside" if name == "delayed" else "own", backend="inductor", dynamic=True)
    for tokens in (5, 7, 16):
        twins.take((tokens,))
        grads_cleared(twins)


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("delayed", marks=pytest.mark.slow)])
def test_recompilations_over_token_counts(name: str) -> None:
    """At most four graphs over six counts (the first, its dynamic form, one token, whole groups), then never again."""
    twins = Twins(RECIPES[name])
    counts = (5, 7, 1, 16, 33, 128)
    for tokens in counts:
        twins.take((tokens,))
    assert graphs() <= 4
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (*counts, 11, 48):
            twins.take((tokens,))


@pytest.mark.parametrize("name", ["delayed", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_modes_flip(name: str) -> None:
    """Training, evaluation and no_grad take turns: a graph for each, and no other in the second round."""
    twins = Twins(RECIPES[name], "outside")

    def turn() -> None:
        twins.take((6,))
        with torch.no_grad():
            twins.take((6,))
        for model in (twins.eager, twins.model):
            model.eval()
        twins.take((6,))
        with torch.no_grad():
            twins.take((6,))
        for model in (twins.eager, twins.model):
            model.train()

    turn()
    assert graphs() <= 4
    with torch._dynamo.config.patch(error_on_recompile=True):
        turn()


def test_calibration() -> None:
    recipe = RECIPES["delayed"]
    eager = prepare(two_layers(None), recipe)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, IN)
    outputs = []
    for run in (eager, compiled):
        with autocast(enabled=False, calibrating=True, recipe=recipe):
            outputs.append(run(x))
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(eager.buffers(), model.buffers(), strict=True))
    assert model[0].forward_scaling.amax_history.any()  # type: ignore[union-attr, operator, index]


@pytest.mark.parametrize("name", ["delayed", pytest.param("current", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["outside", pytest.param("inside", marks=pytest.mark.slow)])
def test_a_layer_called_twice(name: str, way: Way) -> None:

    def twice(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model[2](torch.relu(model[0](x)) + torch.relu(model[0](2 * x)))  # type: ignore[index]
        return out

    twins = Twins(RECIPES[name], way, call=twice)
    for _ in range(3):
        twins.take((5,))


# ---- Options of the layer ----


def with_first_microbatch(model: nn.Module, x: Tensor, first: bool) -> Tensor:
    """Calls the layers as a pipeline would."""
    hidden = torch.relu(model[0](x, is_first_microbatch=first))  # type: ignore[index]
    out: Tensor = model[2](hidden, is_first_microbatch=first)  # type: ignore[index]
    return out


@pytest.mark.parametrize("name", ["delayed", pytest.param("block", marks=pytest.mark.slow)])
def test_cached_weights(name: str) -> None:
    twins = Twins(RECIPES[name], fullgraph=False, call=with_first_microbatch)
    for first in (True, False, False, True, False):
        twins.take((5,), first)


@first_by_default
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("current", "own"),
        ("delayed", "outside"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("nvfp4", "own"), ("delayed", "own"), ("delayed", "inside"))
        ],
    ],
)
def test_input_kept_for_backward(name: str, way: Way) -> None:
    twins = Twins(RECIPES[name], way, save_original_input=True)
    for _ in range(3):
        twins.take((5,))


def test_delayed_scaling_needs_prepare() -> None:
    """A graph cannot add buffers to a module: the error says what to call first, and then it works."""
    model = two_layers(None)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with autocast(recipe="delayed"), pytest.raises(RuntimeError, match=r"minifloat\.prepare\(model, recipe\)"):
        compiled(torch.randn(5, IN))
    prepare(model, "delayed")
    torch._dynamo.reset()
    with autocast(recipe="delayed"):
        compiled(torch.randn(5, IN)).sum().backward()
    assert model[0].forward_scaling.scale[0] != 1.0  # type: ignore[union-attr, operator, index]


@first_by_default
@pytest.mark.parametrize("make", [Linear, LayerNormLinear])
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_a_forward_that_runs_eagerly_and_calls_compiled_code(name: str, make: type[Linear | LayerNormLinear]) -> None:
    """Dynamo may give a forward up and compile what it calls: the layer keeps no plan that was made for a graph."""
    layer = make(IN, OUT, recipe=RECIPES[name])
    twin, forward = copy.deepcopy(layer), torch._dynamo.disable(make.forward, recursive=False)
    run = torch.compile(lambda x: 2 * forward(layer, x), backend="aot_eager")
    x = torch.randn(6, IN, requires_grad=True)
    same = x.detach().clone().requires_grad_()
    for each in (run, lambda x: 2 * layer(x), run):
        y, z = each(x), 2 * twin(same)
        y.square().sum().backward()
        z.square().sum().backward()
        assert torch.equal(y, z) and x.grad is not None and same.grad is not None and torch.equal(x.grad, same.grad)
    for (key, own), (_, others) in zip(layer.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(own, others), key
    linear = layer if isinstance(layer, Linear) else layer.linear
    assert linear._configs.latest is not None
    plans = list(linear._configs.latest.specs.values())
    assert plans and all(plan.eager for plan in plans)


@pytest.mark.parametrize(
    "name",
    ["block", "nvfp4", *[pytest.param(name, marks=pytest.mark.slow) for name in ("current", "mxfp8", "rowwise")]],
)
def test_a_layer_that_never_ran_eagerly(name: str) -> None:
    """Its first call makes formats, quantizers and the plan, all of which the compiler traces."""
    layer, x = Linear(IN, HIDDEN), torch.randn(4, IN)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with autocast(recipe=RECIPES[name]):
        y = compiled(x)
    with autocast(recipe=RECIPES[name]):
        assert torch.equal(y, layer(x))


OPERATIONS = {
    "current": ({"node": 1}, {"node": 1}),
    "block": ({"node": 1}, {"node": 1}),
    "nvfp4": ({"node": 1}, {"draw_of_pass": 1, "node": 1}),
    "delayed": ({"node_": 1, "update_scales_": 1}, {"node_": 1, "update_scales_": 1}),
}


@first_by_default
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_a_compiled_linear(name: str) -> None:
    """A pass is one operation; seeds are drawn and scales are updated outside of it."""
    found: list[Counter[str]] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        text = graph.print_readable(print_output=False)
        found.append(Counter(re.findall(r"torch\.ops\.minifloat\.(\w+)\.default", text)))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    compiled = torch.compile(Linear(IN, HIDDEN, recipe=RECIPES[name]), fullgraph=True, backend=backend)
    compiled(torch.randn(4, IN, requires_grad=True)).sum().backward()
    assert tuple(found) == OPERATIONS[name]


def test_warm_start() -> None:
    """A second compilation reads its graphs from the disk, and no other's, with the setting of docs/layers.md."""
    found, x, dy = [], torch.randn(4, IN), torch.randn(4, HIDDEN)
    allowed = torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True)
    with fresh_cache(), allowed:
        for name in ("current", "rowwise", "delayed", "current", "delayed"):
            torch._dynamo.reset()
            counters.clear()
            layer = Linear(IN, HIDDEN, bias=False, recipe=name)
            eager = copy.deepcopy(layer)
            y, expected = torch.compile(layer, fullgraph=True)(x), eager(x)
            y.backward(dy), expected.backward(dy)
            assert layer.weight.grad is not None and eager.weight.grad is not None
            assert torch.equal(y, expected) and torch.equal(layer.weight.grad, eager.weight.grad)
            found.append((counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]))
    assert [hits for hits, _ in found] == [0, 0, 0, 1, 1]
    assert [misses > 0 for _, misses in found] == [True, True, True, False, False]


@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.slow), "delayed"])
def test_equal_layers_compile_once(recipe: str) -> None:
    """Regional compilation: each layer is compiled by itself, and only the first one takes time."""
    model = torch.nn.Sequential(*[LayerNormLinear(IN, IN, recipe=recipe) for _ in range(3)])
    eager = copy.deepcopy(model)
    for layer in model:
        layer.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x, dy = torch.randn(4, IN, requires_grad=True), torch.randn(4, IN)
        y, expected = model(x), eager(x)
        assert torch.equal(y, expected)
        y.backward(dy), expected.backward(dy)
    grads = [(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True)]
    assert all(p is not None and q is not None and torch.equal(p, q) for p, q in grads)
    assert all(map(torch.equal, model.buffers(), eager.buffers()))
    assert graphs() == 1


# ---- On a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["own", "outside", "inside"])
@pytest.mark.parametrize("name", RECIPES)
def test_inductor_on_a_gpu(name: str, way: Way) -> None:
    """Inductor's kernels around ours change nothing."""
    twins = Twins(RECIPES[name], way, backend="inductor", device="cuda")
    with torch._inductor.config.patch(shape_padding=False):  # of products in high precision, by what a timing says
        for tokens in (48, 5, 64, 1):
            twins.take((tokens,))
            grads_cleared(twins)


def _replayed(layer: Linear, x: Tensor, dy: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
    """A graph of forward and backward, captured after a warm-up on a side stream, with its output and dX."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(x).backward(dy)
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad(set_to_none=True)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
        y.backward(dy)
    assert x.grad is not None
    return graph, (y, x.grad)


def _is_random(recipe: Recipe) -> bool:
    return recipe.quantizer(QuantizerRole("linear", "grad_output")).row_format.rounding == "stochastic"


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_cuda_graph(name: str) -> None:
    """A captured step on new contents is the eager one, bit for bit; stochastic rounding draws anew each replay."""
    recipe, dtype = RECIPES[name], torch.bfloat16
    layer = Linear(64, 96, recipe=recipe, device="cuda", dtype=dtype)
    x = torch.randn(32, 64, device="cuda", dtype=dtype, requires_grad=True)
    dy = torch.randn(32, 96, device="cuda", dtype=dtype)
    graph, (y, dx) = _replayed(layer, x, dy)
    twin = copy.deepcopy(layer)
    assert layer.weight.grad is not None
    drawn = []
    for step in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * (step + 1))
            dy.copy_(torch.randn_like(dy) * (step + 1))
        other = x.detach().clone().requires_grad_()
        twin.zero_grad(set_to_none=True)
        graph.replay()
        z = twin(other)
        z.backward(dy)
        assert other.grad is not None and twin.weight.grad is not None
        assert torch.equal(y, z)
        assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), twin.buffers(), strict=True))
        pairs = (dx, other.grad), (layer.weight.grad, twin.weight.grad)
        for found, wanted in pairs:
            if _is_random(recipe):
                assert torch.linalg.norm((found - wanted).float()) < 0.3 * torch.linalg.norm(wanted.float())
            else:
                assert torch.equal(found, wanted)
        if _is_random(recipe):
            drawn.append(dx.clone())
            graph.replay()
            assert not torch.equal(dx, drawn[-1]), "a replay must not repeat what the one before drew"


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["own", "outside"])
@pytest.mark.parametrize("name", RECIPES)
def test_nothing_waits_for_the_gpu(name: str, way: Way) -> None:
    """A step reads nothing back to the host (design D10)."""
    recipe = RECIPES[name]
    model = two_layers(recipe if way == "own" else None, "cuda")
    x = torch.randn(32, IN, device="cuda", requires_grad=True)

    def step() -> None:
        with autocast(recipe=recipe) if way == "outside" else contextlib.nullcontext():
            y = model(x)
        y.sum().backward()

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
