"""LayerNorm and RMSNorm against float64 within derived bounds, and their fused casts bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.functional.norm_activation import Norm
from minifloat.ops.norm import norm_backward, norm_forward
from tests.helpers.compare import DTYPES
from tests.helpers.norm_model import (
    FOR_EACH_NORM,
    norm_float64,
    norm_inputs,
)


def forward(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return norm_forward(x, gamma, beta, norm.normalization, norm.eps, norm.zero_centered_gamma, dtype)[:3]


@FOR_EACH_NORM
def test_forward_rounds_once(norm: Norm, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (7, 129), torch.bfloat16, device)
    fp32 = forward(norm, x, gamma, beta, torch.float32)[0]
    for dtype in DTYPES:
        assert torch.equal(forward(norm, x, gamma, beta, dtype)[0], fp32.to(dtype))


@FOR_EACH_NORM
def test_formulas_in_float64(norm: Norm) -> None:
    """The reference is of one dtype throughout: in float64 its backward is autograd's of its forward."""
    x, gamma, beta = (
        None if t is None else t.double() for t in norm_inputs(norm, (4, 7), torch.float32, torch.device("cpu"))
    )
    leaves = [t.requires_grad_() for t in (x, gamma, beta) if t is not None]
    dy = torch.randn(4, 7, dtype=torch.float64)
    how = norm.normalization, norm.eps, norm.zero_centered_gamma
    y, mean, rsigma, *_ = norm_forward.reference(x, gamma, beta, *how, torch.float64)
    exact = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        got = norm_backward.reference(dy, x, gamma, mean, rsigma, norm.normalization, norm.zero_centered_gamma)
    for a, b in zip(got, exact, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(y, norm_float64(norm, x, gamma, beta), rtol=1e-12, atol=1e-13)


@FOR_EACH_NORM
def test_zero_rows_and_no_rows(norm: Norm, device: torch.device) -> None:
    _, gamma, beta = norm_inputs(norm, (1, 9), torch.bfloat16, device)
    x = torch.zeros(3, 9, dtype=torch.bfloat16, device=device)
    y, _, rsigma = forward(norm, x, gamma, beta, torch.bfloat16)
    assert torch.equal(y, torch.zeros_like(x) if beta is None else beta.expand(3, -1))
    torch.testing.assert_close(rsigma, torch.full_like(rsigma, norm.eps**-0.5))

    nothing = x[:0]
    y, *saved = forward(norm, nothing, gamma, beta, torch.bfloat16)
    dx, dgamma, dbeta = norm.gradients(nothing, nothing, gamma, tuple(saved))
    assert y.shape == dx.shape == (0, 9)
    assert not dgamma.any() and (dbeta is None or not dbeta.any())


def test_zero_centered_gamma_is_added_in_fp32() -> None:
    x = torch.randn(4, 8).bfloat16()
    gamma = torch.full((8,), 2.0**-12).bfloat16()
    y = forward(Norm("RMSNorm", zero_centered_gamma=True), x, gamma, None, torch.float32)[0]
    unscaled = forward(Norm("RMSNorm"), x, torch.ones(8), None, torch.float32)[0]
    assert torch.equal(y, unscaled * (1 + 2.0**-12))
