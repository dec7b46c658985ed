"""Quantized parameters in compiled code, quantized activations beside it, and the options that no graph holds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from minifloat import (
    GroupedLinear,
    GroupedMLP,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    QuantizedTensor,
)
from minifloat.nn import quantized_model_init
from minifloat.recipe import QuantizerRole, named
from minifloat.tensor import quantize
from tests.helpers.compiled import Pair, compiled, graphs
from tests.helpers.sample import each_once, first_by_default

pytestmark = pytest.mark.usefixtures("fresh_compiler")

IN, HIDDEN, OUT = 32, 48, 17
INPUT = QuantizerRole("linear", "input")
NAMES = ["delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"]
KINDS = [Linear, LayerNormLinear, LayerNormMLP]


def fast_if(fast: set[Any], *axes: Sequence[Any]) -> list[Any]:
    """The product of the axes, slow but for some."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in fast)) for case in product(*axes)]


def slow_but(*fast: str) -> list[Any]:
    return fast_if({(name,) for name in fast}, NAMES)


class TwoLinears(nn.Module):
    """The second reads what the first returns quantized."""

    def __init__(self, first: str, second: str, fused: bool = False) -> None:
        super().__init__()
        kind: Any = LayerNormLinear if fused else Linear
        self.first = kind(IN, HIDDEN, recipe=first, name="first")
        self.second = Linear(HIDDEN, OUT, recipe=second, name="second")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x, fp8_output=True))
        return y


# ---- quantized activations, which no graph makes or reads ----


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but("delayed", "nvfp4"))
def test_quantized_output_between_graphs(name: str, fused: bool) -> None:
    """The next layer takes the codes as they are, and gradients flow back through them."""
    pair = Pair(TwoLinears(name, name, fused), fullgraph=False)
    for tokens in (6, 8):
        pair.step(torch.randn(tokens, IN))


@pytest.mark.parametrize("name", slow_but("current"))
def test_quantize(name: str) -> None:
    """``quantize`` and a quantizer's call give what they give in eager code."""
    quantizer = named("current" if name == "delayed" else name).quantizer(INPUT)
    x = torch.randn(2, 32, IN)
    found, codes = compiled(lambda x: (quantize(x, quantizer), quantizer(x).any.codes), fullgraph=False)(x)
    for made, wanted in zip(found.operands, quantizer(x), strict=True):
        assert torch.equal(made.codes, wanted.codes) and torch.equal(made.scale_inv, wanted.scale_inv)
    assert torch.equal(codes, quantizer(x).any.codes)


@pytest.mark.parametrize(("name", "reads"), fast_if({("current", True), ("nvfp4", False)}, NAMES, [True, False]))
def test_quantized_input(name: str, reads: bool) -> None:
    """Of a layer with a recipe of its own: its codes are multiplied as they are, or its values are cast."""
    layer = Linear(IN, OUT, recipe=name)
    recipe = named(name if reads and name != "delayed" else "mxfp6")
    x = quantize(torch.randn(2, 8, IN), recipe.quantizer(INPUT))
    with pytest.raises(RuntimeError, match=r"Linear.*X\.dequantize\(\)"):
        compiled(layer)(x)
    found, wanted = [], []
    twin = copy.deepcopy(layer)
    for results, own, run in ((wanted, layer, layer), (found, twin, compiled(twin, fullgraph=False))):
        for value in (x, x.detach().requires_grad_()):
            own.zero_grad()
            torch.manual_seed(1)
            y = run(value)
            y.square().sum().backward()
            results += [y.detach(), own.weight.grad, value.grad]
    for a, b in zip(found, wanted, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert found[-1] is not None


# ---- what runs uncompiled: exact with graph breaks, an error without ----


def with_output(model: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.relu(model[1](torch.relu(model[0](x)), fp8_output=True))
    return y


def with_gradient(model: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.relu(model[1](torch.relu(model[0](x)), fp8_grad=True))
    return y


def with_microbatch(model: Any, x: Tensor) -> Tensor:
    hidden = torch.relu(model[0](x, is_first_microbatch=True))
    y: Tensor = torch.relu(model[1](hidden, is_first_microbatch=False))
    return y


def with_main_grad(model: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.relu(model[1](torch.relu(model[0](x)), is_first_microbatch=True))
    return y


def plain(model: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.relu(model[1](torch.relu(model[0](x))))
    return y


def two_layers(kind: Any, name: str, **options: Any) -> nn.Sequential:
    sizes = (HIDDEN, HIDDEN)
    return nn.Sequential(Linear(IN, HIDDEN, recipe=name), kind(*sizes, recipe=name, name="fc1", **options))


def give_main_grads(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.main_grad = torch.ones_like(parameter)  # type: ignore[attr-defined]


UNCOMPILED = {
    "fp8_output": (with_output, {}),
    "fp8_grad": (with_gradient, {}),
    "is_first_microbatch": (with_microbatch, {}),
    "delay_wgrad_compute": (plain, {"delay_wgrad_compute": True}),
    "fuse_wgrad_accumulation": (with_main_grad, {"fuse_wgrad_accumulation": True}),
}
FAST = {(Linear, "fp8_output"), (Linear, "fp8_grad"), (Linear, "delay_wgrad_compute")}
FAST |= {(LayerNormLinear, "is_first_microbatch"), (LayerNormMLP, "fuse_wgrad_accumulation")}
HAVE_NOT = {(LayerNormLinear, "fp8_grad"), (LayerNormMLP, "fp8_grad"), (LayerNormMLP, "fp8_output")}


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "option"), [case for case in fast_if(FAST, KINDS, UNCOMPILED) if case.values not in HAVE_NOT]
)
def test_uncompiled(kind: Any, option: str, name: str) -> None:
    """Everything of the layer runs as in eager code, nothing of it as in traced code; the rest is compiled."""
    call, options = UNCOMPILED[option]
    pair = Pair(two_layers(kind, name, **options), call, fullgraph=False)
    for model in (pair.eager, pair.model):
        give_main_grads(model)
    for _ in range(3):
        pair.step(torch.randn(6, IN))
        for model in (pair.eager, pair.model):
            if option == "delay_wgrad_compute":
                model[1].backward_dw()  # type: ignore[index, operator, union-attr]
        pair.same_state()
    assert graphs() >= 1


@each_once
@pytest.mark.parametrize("option", UNCOMPILED)
@pytest.mark.parametrize("kind", KINDS)
def test_refused_in_one_graph(kind: Any, option: str) -> None:
    """The error names the layer, the option and the way out."""
    if (kind, option) in HAVE_NOT:
        return
    call, options = UNCOMPILED[option]
    pair = Pair(two_layers(kind, "current", **options), call)
    give_main_grads(pair.model)
    with pytest.raises(RuntimeError, match=rf"fc1.*{option}.*torch\.compiler\.disable"):
        pair.run(torch.randn(6, IN))


@first_by_default
@pytest.mark.parametrize("option", UNCOMPILED)
def test_without_gradients_in_one_graph(option: str) -> None:
    """There is no gradient to quantize, delay or accumulate; cached weights, quantized outputs are refused anyway."""
    call, options = UNCOMPILED[option]
    pair = Pair(two_layers(Linear, "current", **options), call)
    x = torch.randn(6, IN)
    if option in ("is_first_microbatch", "fp8_output"):
        with pytest.raises(RuntimeError, match=r"version|fp8_output=True"), torch.no_grad():
            pair.run(x)
    else:
        pair.step(x, training=False)


def test_quantized_gradient_into_a_compiled_layer() -> None:
    """What an uncompiled layer returns with ``fp8_grad`` is a gradient like others to a graph: its values."""
    pair = Pair(Linear(IN, HIDDEN, recipe="current"))
    second = Linear(HIDDEN, OUT, recipe="current")
    x = torch.randn(6, IN)
    hidden = pair.eager(x).detach().requires_grad_()
    second(hidden, fp8_grad=True).square().sum().backward()
    assert type(hidden.grad) is QuantizedTensor
    pair.eager(x).backward(hidden.grad.dequantize())
    second(pair.run(x), fp8_grad=True).square().sum().backward()
    pair.same_state()


# ---- quantized parameters and the first microbatch ----


@first_by_default
@pytest.mark.parametrize(
    ("name", "make"),
    fast_if({("mxfp8", Linear), ("mxfp8", LayerNormLinear), ("delayed", LayerNormMLP)}, NAMES, KINDS),
)
def test_quantized_parameters(name: str, make: Callable[..., nn.Module]) -> None:
    """Codes of the weight are what is multiplied, whatever the microbatch; and an optimizer's writes are seen."""
    with quantized_model_init(recipe=name):
        model = make(IN, IN, recipe=name)
    pair = Pair(model, lambda model, x: model(x, is_first_microbatch=False))
    for _ in range(3):
        pair.step(torch.randn(6, IN))
        for each in (pair.eager, pair.model):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    assert graphs() == 1


@pytest.mark.parametrize("name", slow_but("delayed", "nvfp4"))
def test_first_microbatch_in_one_graph(name: str) -> None:
    """Its weight is cast and kept, for the uncompiled microbatches that follow."""
    pair = Pair(Linear(IN, OUT, recipe=name), lambda model, x: model(x, is_first_microbatch=True))
    for _ in range(3):
        pair.step(torch.randn(6, IN))
    assert graphs() == 1
    x = torch.randn(6, IN)
    outputs = []
    for each in (pair.eager, pair.model):
        torch.manual_seed(0)
        outputs.append(each(x, is_first_microbatch=False))
    assert torch.equal(*outputs)


# ---- main gradients ----


@pytest.mark.parametrize(
    ("name", "make"),
    fast_if({("current", Linear), ("current", LayerNormLinear), ("delayed", LayerNormMLP)}, NAMES, KINDS),
)
def test_main_gradients_in_one_graph(name: str, make: Callable[..., nn.Module]) -> None:
    """dW is added to views of one flat buffer, of a weight that is used twice both; autograd gets nothing of it."""

    def twice(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model(x, is_first_microbatch=None) + model(torch.relu(x))
        return y

    pair = Pair(make(IN, IN, recipe=name, fuse_wgrad_accumulation=True), twice)
    flat = []
    for model in (pair.eager, pair.model):
        parameters = list(model.parameters())
        flat.append(torch.ones(sum(p.numel() for p in parameters)))
        for parameter, part in zip(parameters, flat[-1].split([p.numel() for p in parameters]), strict=True):
            parameter.main_grad = part.view_as(parameter)  # type: ignore[attr-defined]
    for _ in range(3):
        pair.step(torch.randn(6, IN))
        assert torch.equal(*flat) and bool((flat[0] != 1).any())
        for model in (pair.eager, pair.model):
            added = [p for p in model.parameters() if getattr(p, "grad_added_to_main_grad", False)]
            assert added and all(p.grad is None and p.dim() == 2 for p in added)
            for p in added:
                p.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    assert graphs() == 1


def with_splits(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x, torch.tensor([4, 0, 2]))
    return y


@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weights", ["single", "separate", "first frozen"])
def test_main_gradients_of_experts_in_one_graph(weights: str, name: str) -> None:
    single = weights == "single"
    options: dict[str, Any] = {"single_grouped_weight": single, "fuse_wgrad_accumulation": True}
    pair = Pair(GroupedLinear(3, IN, OUT, bias=False, recipe=name, **options), with_splits)
    for model in (pair.eager, pair.model):
        give_main_grads(model)
        if weights == "first frozen":
            next(model.parameters()).requires_grad_(False)
    for _ in range(2):
        pair.step(torch.randn(6, IN))
        pair.same_state()
    for eager, own in zip(pair.eager.parameters(), pair.model.parameters(), strict=True):
        mine, other = (p.main_grad for p in (own, eager))  # type: ignore[attr-defined]
        assert torch.equal(mine, other) and own.grad is None
        assert getattr(own, "grad_added_to_main_grad", False) == own.requires_grad
    assert bool((mine != 1).any()) and graphs() == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [Linear, LayerNormLinear, LayerNormMLP])
def test_a_gradient_of_the_input_alone_adds_nothing(make: Callable[..., nn.Module], backend: str) -> None:
    """A graph's backward computes all gradients that it can; ``main_grad`` is asked for by a whole backward alone."""
    layer = make(IN, OUT, recipe="current", fuse_wgrad_accumulation=True)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    run, x = compiled(layer, backend=backend), torch.randn(6, IN, requires_grad=True)
    (dx,) = torch.autograd.grad(run(x).square().sum(), x)
    assert not any(p.main_grad.any() for p in layer.parameters())  # type: ignore[attr-defined]
    run(x).square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, dx)
    assert all(p.main_grad.any() for name, p in layer.named_parameters() if p.dim() == 2)  # type: ignore[attr-defined]


def test_a_backward_that_only_adds() -> None:
    """Of a first layer without a bias nothing goes to autograd."""
    layer = Linear(IN, OUT, bias=False, recipe="current", fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(OUT, IN)
    eager, x = copy.deepcopy(layer), torch.randn(6, IN)
    eager.weight.main_grad = torch.zeros(OUT, IN)
    for run in (eager, compiled(layer)):
        run(x).square().sum().backward()
    assert layer.weight.main_grad.any() and torch.equal(layer.weight.main_grad, eager.weight.main_grad)


def splits(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model(x, torch.tensor([4, 2])) if isinstance(model, GroupedMLP) else model(x)
    return y


@pytest.mark.parametrize(
    "make",
    [Linear, *[pytest.param(each, marks=pytest.mark.slow) for each in (LayerNormLinear, partial(GroupedMLP, 2))]],
)
def test_delayed_scaling_under_compiled_autograd(make: Callable[..., nn.Module]) -> None:
    """Of a graph's backward it knows what forward saved: no histories. Layers run uncompiled, whatever ran before."""
    pair = Pair(make(IN, OUT, recipe="delayed"), splits, fullgraph=False)
    x = torch.randn(6, IN)
    for on in (False, True, False):
        with compiled_autograd._enable(torch.compile(backend="eager")) if on else contextlib.nullcontext():
            pair.step(x)
    error = pytest.raises(RuntimeError, match=r"compiled autograd does not know the histories.*another recipe")
    with compiled_autograd._enable(torch.compile(backend="eager")), error:
        compiled(lambda x: splits(pair.model, x))(x)


def test_delayed_gradients_of_experts_run_uncompiled() -> None:
    """As in eager code with graph breaks, an error without."""
    grouped = GroupedLinear(3, IN, OUT, recipe="current", name="experts", delay_wgrad_compute=True)
    pair = Pair(grouped, with_splits, fullgraph=False)
    for _ in range(2):
        pair.step(torch.randn(6, IN))
        for model in (pair.eager, pair.model):
            model.backward_dw()  # type: ignore[operator]
        pair.same_state()
    with pytest.raises(RuntimeError, match=r"GroupedLinear 'experts'.*delay_wgrad_compute"):
        compiled(pair.model)(torch.randn(6, IN), torch.tensor([4, 0, 2]))
