"""Activations against float64 within derived bounds, and their fused casts bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minifloat.functional.norm_activation import Activation
from minifloat.ops import activation
from minifloat.ops.activation import (
    activation_backward,
    activation_backward_cast,
    activation_cast,
    activation_forward,
    out_columns,
    parameters_of,
)
from tests.helpers.activation_model import FOR_EACH_ACTIVATION, activation_float64, activation_inputs
from tests.helpers.fused_output import (
    SCALE,
)

SOME = [Activation.of(name) for name in ("gelu", "srelu", "swiglu", "clamped_swiglu")]
FOR_EACH_KIND = pytest.mark.parametrize("act", SOME, ids=lambda act: act.name)


def forward(x: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    return activation_forward(x, act.name, act.parameters, dtype, False)[0]


def backward(dy: Tensor, x: Tensor, act: Activation, dtype: torch.dtype) -> Tensor:
    return activation_backward(dy, x, act.name, act.parameters, dtype, False, False)[0]


@FOR_EACH_ACTIVATION
def test_derivatives_in_float64(act: Activation) -> None:
    """The reference is of one dtype throughout: in float64 its backward is autograd's of its forward."""
    x = activation_inputs((5, 12), torch.float32).double()
    dy = torch.randn(5, out_columns(act.name, 12), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    y = activation.forward(leaf, act.name, act.parameters)
    (want,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(y.detach(), activation_float64(x, act), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(activation.backward(dy, x, act.name, act.parameters), want, rtol=1e-11, atol=1e-13)


def test_clamped_swiglu_at_its_limits() -> None:
    """At the limits themselves the gradient passes; beyond them it is 0. The gate has no lower limit."""
    act = Activation.of("clamped_swiglu", {"limit": 2.0})
    gate, linear = [2.0, 2.5, -9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0, -2.5, 2.5]
    x = torch.tensor([gate + linear])
    dx = backward(torch.ones(1, 6), x, act, torch.float32)[0]
    assert (dx == 0).nonzero().flatten().tolist() == [1, 10, 11]
    assert forward(x, act, torch.float32)[0, 1] == forward(torch.tensor([[2.0, 1.0]]), act, torch.float32)[0, 0]


@FOR_EACH_ACTIVATION
def test_extremes(act: Activation, device: torch.device) -> None:
    """Finite in the far tails, derivatives too; zero gives zero but for sigmoid's half; NaN stays where it is."""
    largest = 1e4 if act.name in ("srelu", "sreglu") else 1e18
    x = torch.tensor([[largest, -largest, 0.0, 20.0, -20.0, -100.0]], device=device)
    x = torch.cat([x, torch.ones_like(x)], -1) if act.gated else x
    y, dx = forward(x, act, torch.float32), backward(torch.ones(1, 6, device=device), x, act, torch.float32)
    assert y.isfinite().all() and dx.isfinite().all()
    assert abs(y[0, 2] - (0.5 if act.name in ("sigmoid", "glu") else 0.0)) <= 2.0**-22  # a GPU approximates 1 / (1 + 1)
    x[0, 3] = torch.nan
    y = forward(x, act, torch.float32)
    assert y.isnan().nonzero().tolist() == [[0, 3]]
    dx = backward(torch.full((1, 6), torch.nan, device=device), x, act, torch.float32)
    assert dx.isnan().float().mean() >= 0.5


def test_gelu_derivative_does_not_overflow() -> None:
    x = torch.tensor([[3e38, -3e38, torch.inf, -torch.inf, 10.0, -10.0]])
    assert backward(torch.ones(1, 6), x, Activation.of("gelu"), torch.float32).tolist() == [[1, 0, 1, 0, 1, 0]]


@FOR_EACH_KIND
def test_layout_of_the_input_is_no_matter(act: Activation, device: torch.device) -> None:
    x = activation_inputs((12, 20), torch.bfloat16, device)
    dy = activation_inputs((12, out_columns(act.name, 20)), torch.bfloat16, device)
    for view in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :20]):
        y, dx = forward(view, act, torch.float32), backward(dy.T.contiguous().T, view, act, torch.float32)
        assert y.is_contiguous() and dx.is_contiguous()
        # Vectorised and scalar paths of PyTorch's transcendentals differ in their last bits.
        torch.testing.assert_close(y, forward(x, act, torch.float32), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dx, backward(dy, x, act, torch.float32), rtol=1e-5, atol=1e-5)


@FOR_EACH_KIND
def test_operations_pass_opcheck(act: Activation, device: torch.device) -> None:
    utils: Any = ("test_schema", "test_autograd_registration", "test_faketensor")
    if act.name in ("gelu", "clamped_swiglu"):
        utils = (*utils, "test_aot_dispatch_dynamic")
    for dtype in (torch.bfloat16, torch.float32):
        x = activation_inputs((6, 20), dtype, device)
        dy = activation_inputs((6, out_columns(act.name, 20)), dtype, device)
        formula, scale = (act.name, list(act.parameters)), torch.full((1,), SCALE, device=device)
        for yes in (True, False):
            forwards = activation_forward.spelled(x, *formula, dtype, yes)
            backwards = activation_backward.spelled(dy, x, *formula, dtype, yes, yes)
            torch.library.opcheck(activation_forward.overload, forwards, test_utils=utils)
            torch.library.opcheck(activation_backward.overload, backwards, test_utils=utils)
            cast = (*formula, scale, "e4m3/tensor/given", yes, True, True)
            torch.library.opcheck(activation_cast.overload, (x, *cast), test_utils=utils)
            torch.library.opcheck(activation_backward_cast.overload, (dy, x, *cast, yes), test_utils=utils)


# ---- Followed by a cast --------------------------------------------------------------------------------------------


def test_parameters_by_name() -> None:
    assert parameters_of("clamped_swiglu") == (7.0, 1.702, 1.0)
    assert parameters_of("clamped_swiglu", {"glu_linear_offset": 0.0, "limit": 3.0}) == (3.0, 1.702, 0.0)
    assert parameters_of("gelu") == ()
    assert hash(Activation.of("clamped_swiglu")) == hash(Activation("clamped_swiglu", (7.0, 1.702, 1.0)))
