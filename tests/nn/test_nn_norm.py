"""LayerNorm and RMSNorm as modules: against PyTorch's own in float64, their state, dtypes, shapes and compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat.functional.norm_activation import normalize
from minifloat.nn.norm import LayerNorm, RMSNorm
from minifloat.ops.norm import norm_forward
from tests.helpers.sample import each_pair, first_by_default

MODULES: list[Any] = [LayerNorm, RMSNorm]
# Relative to the largest value of a result: some roundings of the output's dtype, and fp32's of the sums inside.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BOTH = pytest.mark.parametrize("module", MODULES)


def filled(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The module with parameters that are nowhere 0 or 1."""
    norm = module(*args, **kwargs)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=0.5)
    return norm


def reference64(norm: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, and the gradients of the parameters, by PyTorch's norm in float64."""
    x = x.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in norm.parameters()]
    scale = parameters[0] + (1 if norm.norm.zero_centered_gamma else 0)
    shape = norm.normalized_shape
    if isinstance(norm, LayerNorm):
        y = nn.functional.layer_norm(x, shape, scale, parameters[1], norm.norm.eps)
    else:
        y = nn.functional.rms_norm(x, shape, scale, norm.norm.eps)
    return [y, *torch.autograd.grad(y, [x, *parameters], dy.double())]


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=TOLERANCE[dtype] * max(1.0, float(expected.detach().abs().max()))
    )


@each_pair
@BOTH
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values_and_gradients(
    module: Any, centered: bool, params_dtype: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    norm = filled(module, 37, eps=1e-3, zero_centered_gamma=centered, params_dtype=params_dtype, device=device)
    x = (torch.randn(3, 5, 37, device=device) * 3 + 1).to(dtype).requires_grad_()
    dy = torch.randn(3, 5, 37, device=device).to(dtype)
    y = norm(x)
    gradients = torch.autograd.grad(y, [x, *norm.parameters()], dy)
    assert y.dtype == x.dtype and gradients[0].dtype == dtype and gradients[1].dtype == params_dtype
    for actual, expected, rounded_to in zip(
        [y, *gradients], reference64(norm, x, dy), [dtype, dtype, params_dtype, params_dtype], strict=False
    ):
        assert_close(actual, expected, rounded_to)


@BOTH
def test_a_shape_of_several_dims_is_normalized_as_one(module: Any) -> None:
    norm = filled(module, [4, 6])
    x = torch.randn(3, 5, 4, 6, requires_grad=True)
    dy = torch.randn_like(x)
    y = norm(x)
    gradients = torch.autograd.grad(y, [x, *norm.parameters()], dy)
    assert norm.weight.shape == (4, 6) and gradients[1].shape == (4, 6)
    for actual, expected in zip([y, *gradients], reference64(norm, x, dy), strict=True):
        assert_close(actual, expected, torch.float32)


@BOTH
def test_state_is_that_of_pytorchs_norm(module: Any) -> None:
    theirs = getattr(nn, module.__name__)(12, eps=1e-5)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = module(12)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(4, 12)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(copy.deepcopy(ours)(x), ours(x), rtol=0, atol=0)


@BOTH
def test_a_new_norm_scales_by_one(module: Any) -> None:
    x = torch.randn(4, 12)
    assert not module(12, zero_centered_gamma=True).weight.any()
    assert torch.equal(module(12, zero_centered_gamma=True)(x), module(12)(x))


@BOTH
def test_autocast_rounds_the_input_as_a_linear_does(module: Any) -> None:
    norm = filled(module, 16)
    x = torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad is not None and x.grad.dtype == torch.float32
    assert torch.equal(y, norm(x.bfloat16())) and norm.weight.grad.dtype == torch.float32


@BOTH
def test_it_is_one_norm_operation(module: Any) -> None:
    """A fused module that calls the same operation gives the same bits."""
    norm = filled(module, 33, zero_centered_gamma=True)
    x = torch.randn(9, 33).bfloat16()
    y = norm_forward(x, norm.weight, norm.bias, norm.normalization, norm.norm.eps, True, x.dtype)[0]
    assert torch.equal(norm(x), y) and torch.equal(normalize(x, norm.weight, norm.bias, norm.norm), y)


@first_by_default
@BOTH
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_to_one_graph_with_dynamic_rows(module: Any, backend: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(filled(module, 16, eps=1e-5), filled(module, 16, eps=1e-2, zero_centered_gamma=True))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows in (3, 5, 8):
        x = torch.randn(rows, 16, requires_grad=True)
        y, expected = compiled(x), model(x)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        actual = torch.autograd.grad(y, [x, *model.parameters()], dy)
        for a, e in zip(actual, torch.autograd.grad(expected, [x, *model.parameters()], dy), strict=True):
            assert torch.equal(a, e)


@BOTH
def test_a_row_that_is_not_finite_stays_alone(module: Any) -> None:
    x = torch.randn(3, 8)
    x[1, 2] = float("nan")
    y = filled(module, 8)(x)
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


@BOTH
def test_wrong_input_is_named(module: Any) -> None:
    with pytest.raises(ValueError, match=r"\(3, 7\) must end in normalized_shape=\(8,\)"):
        module(8)(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"\(8,\) must end in normalized_shape=\(3, 8\)"):
        module((3, 8))(torch.randn(8))
    with pytest.raises(ValueError, match=r"float64.*x\.float\(\)"):
        module(8)(torch.randn(3, 8, dtype=torch.float64))
    for shape in ((), 0, (3, -1)):
        with pytest.raises(ValueError, match="normalized_shape is"):
            module(shape)
