"""What PyTorch does to modules and their gradients from outside: second derivatives, ``torch.func``, swaps, pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from minifloat import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, autocast
from minifloat.nn import quantized_model_init
from tests.helpers.compiled import compiled

MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Linear(16, 16, name="fc1"),
    "LayerNormLinear": lambda: LayerNormLinear(16, 16, name="fc1"),
    "LayerNormMLP": lambda: LayerNormMLP(16, 32),
    "GroupedLinear": lambda: GroupedLinear(2, 16, 16, name="fc1"),
}


def call(module: nn.Module, x: Tensor, recipe: str = "current") -> Tensor:
    counts = (torch.tensor([2, 4]),) if isinstance(module, GroupedLinear) else ()
    with autocast(recipe=recipe):
        y: Tensor = module(x, *counts)
    return y


@pytest.mark.parametrize("make", [*MODULES.values(), lambda: LayerNorm(16)], ids=[*MODULES, "LayerNorm"])
def test_gradient_penalty_raises(make: Callable[[], nn.Module]) -> None:
    """Also where dY is a constant, and for some gradients alone: ``once_differentiable`` would drop the penalty."""
    module, x = make(), torch.randn(6, 16, requires_grad=True)
    of = [partial(torch.autograd.grad, inputs=leaf) for leaf in (x, *module.parameters())]
    for gradients in (torch.autograd.backward, *of):
        y = call(module, 2 * x).sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradients(y + (dx.norm() - 1).square())


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_functional_call(make: Callable[[], nn.Module]) -> None:
    """With other parameters a module is one that has them."""
    module = make()
    twin, x, others = copy.deepcopy(module), torch.randn(6, 16), {}
    with torch.no_grad():
        for name, own in twin.named_parameters():
            others[name] = own.copy_(torch.randn_like(own)).clone()
    counts = (torch.tensor([2, 4]),) if isinstance(module, GroupedLinear) else ()
    with autocast(recipe="current"):
        found = torch.func.functional_call(module, others, (x, *counts))
    assert torch.equal(found, call(twin, x))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_vmap_is_refused(make: Callable[[], nn.Module]) -> None:
    """The error names the layer and a way out."""
    with pytest.raises(RuntimeError, match=r"'fc1': torch\.func.*recipe='none'"):
        torch.func.vmap(partial(call, make()))(torch.randn(1, 6, 16))


@pytest.mark.parametrize("transform", ["vmap", "jacrev", "jacfwd"])
def test_transforms_of_norms_are_refused(transform: str) -> None:
    """Which no recipe quantizes: the error names what it is that they do not see into."""
    with pytest.raises(RuntimeError, match=r"^\w+Function: torch\.func cannot transform it; use torch\.autograd\.grad"):
        getattr(torch.func, transform)(LayerNorm(16))(torch.randn(6, 16))


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_many_gradients_at_once_are_refused(make: Callable[[], nn.Module], recipe: str) -> None:
    """The error of a cast that PyTorch cannot batch names the backward and a way out."""
    module, x = make(), torch.randn(6, 16)
    match = r"^(Linear|LayerNorm)\w*Backward: vmap.*vectorize=False"
    with pytest.raises(RuntimeError, match=match):
        torch.autograd.functional.jacobian(partial(call, module, recipe=recipe), x, vectorize=True)
    y = call(module, x.requires_grad_(), "nvfp4")
    with pytest.raises(RuntimeError, match=match):
        torch.vmap(partial(torch.autograd.grad, y, x))(torch.randn(3, *y.shape))


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian_of_what_is_not_cast(vectorize: bool) -> None:
    norm, x = LayerNorm(4), torch.randn(3, 4)
    found = torch.autograd.functional.jacobian(norm, x, vectorize=vectorize)
    torch.testing.assert_close(found, torch.autograd.functional.jacobian(nn.LayerNorm(4), x))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("run", [lambda function: function, compiled], ids=["eager", "compiled"])
def test_func_grad_is_refused(run: Callable[..., Any]) -> None:
    """Compiled code would get zeros for gradients."""
    layer = Linear(16, 16, name="fc1")
    gradient = torch.func.grad(lambda parameters, x: torch.func.functional_call(layer, parameters, (x,)).sum())
    with autocast(recipe="current"), pytest.raises(Exception, match=r"'fc1': torch\.func"):
        run(gradient)(dict(layer.named_parameters()), torch.randn(6, 16))


def test_a_kept_weight_is_moved() -> None:
    """PyTorch swaps quantized parameters, but for those that have a weak reference."""
    with quantized_model_init(recipe="mxfp8"):
        layer = Linear(16, 24)
    x = torch.randn(6, 16)
    with autocast(recipe="current"):  # which casts the weight, and keeps that
        layer(x, is_first_microbatch=True)
        layer.bfloat16()
        found = layer(x.bfloat16(), is_first_microbatch=False)
        assert torch.equal(found, layer(x.bfloat16()))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_computed_weights(recipe: str, quantized: bool) -> None:
    """Weight norm and pruning: a layer multiplies what they compute, whatever it kept before."""
    for change in (parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)):
        layer, plain, x = Linear(16, 24), Linear(16, 24), torch.randn(6, 16)
        if quantized:
            with quantized_model_init(recipe=recipe):
                layer = Linear(16, 24)
        with autocast(recipe=recipe):
            layer(x, is_first_microbatch=True)
            change(layer)  # type: ignore[operator]
            with torch.no_grad():
                next(p for p in layer.parameters() if p.dim() == 2 and p.shape[1] == 16).mul_(-2)
            found = layer(x, is_first_microbatch=False)
            with torch.no_grad():
                plain.weight.copy_(layer.weight)
                assert layer.bias is not None and plain.bias is not None
                plain.bias.copy_(layer.bias)
            assert torch.equal(found, plain(x))
        found.sum().backward()
        assert any(p.grad is not None for p in layer.parameters() if p.dim() == 2)
