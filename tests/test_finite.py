"""What is not finite: where each format lets it go, and how ``autocast(check_finite=True)`` finds the layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import minifloat
from minifloat import DelayedScaling, GroupedLinear, LayerNormMLP, Linear, autocast, quantized_model_init
from minifloat.autocast import used
from minifloat.recipe import Recipe, named
from tests.helpers.sample import each_once, each_pair, each_twice

M, N, K = 48, 40, 56
POISONED = 3, 5  # row and column of the one element that is not finite
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    **{name: named(name) for name in ("current", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4", "mxfp6", "w4a8")},
}

# docs/numerics.md 5. "line": every element of the row or column that reads it is NaN. "tile": so are 16 of them. "inf":
# that line is infinite. "all": nothing is finite.
WHERE = {
    "delayed": {"inf": "line", "nan": "line"},
    "current": {"inf": "all", "nan": "line"},
    "block": {"inf": "line", "nan": "line"},
    "mxfp8": {"inf": "line", "nan": "line"},
    "nvfp4": {"inf": "all", "nan": "line"},
    "rowwise": {"inf": "line", "nan": "line"},
    "mxfp4": {"inf": "line", "nan": "line"},
    "mxfp6": {"inf": "line", "nan": "line"},
    "w4a8": {"inf": "line", "nan": "line"},
    "none": {"inf": "inf", "nan": "line"},
}
OF_WEIGHTS = {"block": WHERE["current"], "nvfp4": {"inf": "all", "nan": "tile"}}  # blocks' one is smaller than a tile
# What reads a tensor, and whether its row or its column of the result does.
READERS = {
    "input": {"y": (0, POISONED[0]), "dw": (1, POISONED[1])},
    "weight": {"y": (1, POISONED[0]), "dx": (1, POISONED[1])},
    "grad_output": {"dx": (0, POISONED[0]), "dw": (0, POISONED[1])},
}


def results(layer: Linear, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(1)  # of stochastic rounding
    y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


@each_pair
@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("tensor", READERS)
@pytest.mark.parametrize("name", WHERE)
def test_where_it_goes(name: str, tensor: str, value: str) -> None:
    """The table of docs/numerics.md 5."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layer = Linear(K, N, recipe=RECIPES.get(name, "none"))
    x, dy = torch.randn(M, K, generator=generator), torch.randn(M, N, generator=generator)
    if name == "delayed":
        results(layer, x, dy)  # scales of ordinary values
        layer.zero_grad()
    clean = results(copy.deepcopy(layer), x, dy)
    poisoned: dict[str, Tensor] = {"input": x, "weight": layer.weight, "grad_output": dy}
    with torch.no_grad():
        poisoned[tensor][POISONED] = float(value)
    found = results(layer, x, dy)
    for result in ("y", "dx", "dw"):
        of = OF_WEIGHTS.get(name, WHERE[name]) if tensor == "weight" else WHERE[name]
        reads, where = READERS[tensor].get(result), of[value]
        if (name, value, result) == ("nvfp4", "nan", "dw"):  # whose operands are rotated
            where = "all"
        if reads is None:
            assert torch.equal(found[result], clean[result]), result
        elif where == "all":
            assert not found[result].isfinite().any(), result
        else:
            lines = torch.arange(found[result].shape[reads[0]]) // (16 if where == "tile" else 1)
            others = lines != reads[1] // (16 if where == "tile" else 1)
            of_it = found[result].movedim(reads[0], 0)[~others]
            assert (of_it.isinf() if where == "inf" else of_it.isnan()).all(), result
            both = [each[result].movedim(reads[0], 0)[others] for each in (found, clean)]
            assert torch.equal(*both), result
    assert found["db"].isfinite().tolist() == [tensor != "grad_output" or n != POISONED[1] for n in range(N)]


EXPERTS = 20, 0, 28  # rows of each


@each_pair
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("tensor", READERS)
@pytest.mark.parametrize("name", WHERE)
def test_no_overflow_gives_finite_numbers(
    name: str, tensor: str, value: str, whole: bool, device: torch.device
) -> None:
    """Whatever reads an infinity or a NaN, in one element or in all, is not finite: ``GradScaler`` finds it."""
    torch.manual_seed(0)
    recipe = RECIPES.get(name, "none")
    linear = Linear(K, N, recipe=recipe).to(device)
    experts = GroupedLinear(len(EXPERTS), K, N, recipe=recipe).to(device)
    for layer in (linear, experts):
        parameters = list(layer.parameters())
        for overflows in (False, True):  # scales of ordinary values
            x, dy = torch.randn(M, K, device=device), torch.randn(M, N, device=device)
            poisoned = {"input": x, "weight": parameters[0], "grad_output": dy}[tensor]
            layer.zero_grad()
            with torch.no_grad():
                if overflows:
                    poisoned[... if whole else POISONED] = float(value)
            x.requires_grad_()
            y = layer(x, EXPERTS) if layer is experts else layer(x)
            y.backward(dy)
        weights = [each.grad for each in parameters if each.dim() == 2]
        found = {"y": y, "dx": x.grad, "dw": weights[0]}
        for result in READERS[tensor]:
            assert not found[result].isfinite().all(), (type(layer).__name__, result)
        if whole and tensor != "weight":
            assert not any(dw.isfinite().any() for dw, rows in zip(weights, EXPERTS, strict=False) if rows)


def model(recipe: str | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Linear(K, K, name="first", recipe=recipe),
        LayerNormMLP(K, N, name="mlp", recipe=recipe),
        Linear(K, N, name="last", recipe=recipe),
    )


@each_twice
@pytest.mark.parametrize("kind", ["autocast", "own", "none"])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            "input",
            r"Linear 'first': input of shape \(48, 56\) is not finite: 0 infinite and 1 NaN, the first at \[3, 5\]",
        ),
        ("weight", r"Linear 'mlp.fc2': weight of shape .* 1 infinite and 0 NaN"),
        ("activation", r"Linear 'mlp.fc2': input"),
        ("gradient", r"Linear 'mlp.fc1': grad_output of shape"),
    ],
)
def test_the_layer_is_found(kind: str, broken: str, message: str) -> None:
    """Inside of fused modules too, in whatever precision, under checkpoints, and in the backward after the context."""
    net, x = model("current" if kind == "own" else None), torch.randn(M, K)
    mlp: Any = net[1]
    with torch.no_grad():
        if broken == "input":
            x[POISONED] = torch.nan
        elif broken == "weight":
            mlp.fc2.weight[POISONED] = torch.inf
        elif broken == "activation":
            mlp.fc1.bias[7] = torch.inf
    context = autocast(recipe="mxfp8", enabled=kind == "autocast", check_finite=True)
    if broken == "gradient":
        with context:
            h = net[0](x)
            with autocast(recipe="current", enabled=kind == "autocast"):  # a nested one does not switch it off
                hidden = mlp.fc1(mlp.norm(h))
        doubled = hidden * 2
        doubled.register_hook(lambda grad: grad / 0)
        with pytest.raises(FloatingPointError, match=message):
            doubled.sum().backward()
    else:
        with pytest.raises(FloatingPointError, match=message), context:
            net(x)


def test_quantized_weights_are_checked() -> None:
    with quantized_model_init(recipe="mxfp8"):
        layer = Linear(K, N, name="q", recipe="mxfp8")
    with autocast(recipe="mxfp8", check_finite=True):
        layer(torch.randn(M, K)).sum().backward()
        with torch.no_grad():
            layer.weight.copy_(torch.full_like(layer.weight, torch.nan))
        with pytest.raises(FloatingPointError, match="Linear 'q': weight"):
            layer(torch.randn(M, K))


@each_once
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_finite_steps_are_the_same(name: str, checkpointed: bool) -> None:
    """What is looked at does not change, except that delayed scaling casts rounded values where parts run alone."""
    nets = [model(), model()]
    nets[1].load_state_dict(nets[0].state_dict())
    nets = [net.to(torch.float32) for net in nets]
    grads = []
    for checks, net in enumerate(nets):
        torch.manual_seed(1)
        x = torch.randn(M, K, requires_grad=True)
        with autocast(recipe=RECIPES[name], check_finite=bool(checks)):
            y = minifloat.checkpoint(net, x) if checkpointed else net(x)
        torch.manual_seed(2)
        y.square().sum().backward()
        assert x.grad is not None
        grads.append([y.detach(), x.grad, *[p.grad for p in net.parameters()]])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_compiled_code_is_refused() -> None:
    torch._dynamo.reset()
    layer = Linear(K, N, recipe="current")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(M, K))
    with pytest.raises(RuntimeError, match="check_finite=True"), autocast(recipe="current", check_finite=True):
        compiled(torch.randn(M, K))


def test_context_in_compiled_code() -> None:
    """Refused in one graph, with what to do; else it runs uncompiled, and finds the layer."""
    torch._dynamo.reset()
    layer = Linear(K, N, recipe="current", name="fc1")

    def run(x: Tensor) -> Tensor:
        with autocast(check_finite=True):
            y: Tensor = layer(x)
        return y

    x = torch.randn(M, K)
    with pytest.raises(RuntimeError, match=r"autocast\(check_finite=True\) looks at values.* run eager"):
        torch.compile(run, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager")
    assert torch.equal(compiled(x), layer(x))
    with pytest.raises(FloatingPointError, match="'fc1': input"):
        compiled(x.fill_(torch.nan))


def test_compiled_code_does_not_count_contexts() -> None:
    """Each number of them would compile all layers anew."""
    torch._dynamo.reset()
    used.check_finite = False
    layer, graphs = Linear(K, N, recipe="current"), CompileCounter()
    compiled = torch.compile(layer, backend=graphs, fullgraph=True)
    try:
        for count in range(3):
            compiled(torch.randn(M, K))
            assert graphs.frame_count == min(count, 1) + 1
            used.check_finite = True
    finally:
        used.check_finite = False
    compiled(torch.randn(M, K))
    assert graphs.frame_count == 2
