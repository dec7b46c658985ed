"""LayerNorm and RMSNorm against float64 within derived bounds, and their fused casts bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat.functional.norm_activation import Norm
from minifloat.ops.norm import NORMALIZATIONS, norm_backward, norm_forward
from tests.helpers.compare import DTYPES
from tests.helpers.norm_model import (
    FOR_EACH_NORM,
    assert_norm_forward,
    assert_norm_gradients,
    norm_float64,
    norm_inputs,
)
from tests.helpers.sample import each_once, each_pair, each_twice

SHAPES = [(1, 1), (3, 5), (16, 64), (7, 129), (2, 1000)]


def forward(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return norm_forward(x, gamma, beta, norm.normalization, norm.eps, norm.zero_centered_gamma, dtype)[:3]


@each_pair
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@FOR_EACH_NORM
def test_forward(norm: Norm, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, shape, dtype, device)
    assert_norm_forward(norm, x, gamma, beta, *forward(norm, x, gamma, beta, torch.float32))


@FOR_EACH_NORM
def test_forward_rounds_once(norm: Norm, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (7, 129), torch.bfloat16, device)
    fp32 = forward(norm, x, gamma, beta, torch.float32)[0]
    for dtype in DTYPES:
        assert torch.equal(forward(norm, x, gamma, beta, dtype)[0], fp32.to(dtype))


@each_pair
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@FOR_EACH_NORM
def test_backward(norm: Norm, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, shape, dtype, device)
    dy = torch.randn(shape, device=device).to(dtype)
    saved = forward(norm, x, gamma, beta, dtype)[1:]
    got = norm.gradients(dy, x, gamma, saved)
    assert [None if g is None else g.dtype for g in got] == [dtype, dtype, None if beta is None else dtype]
    assert_norm_gradients(norm, x, gamma, beta, dy, *got)


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


@each_twice
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@FOR_EACH_NORM
def test_one_bad_row_spoils_no_other(norm: Norm, value: float, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (4, 33), torch.bfloat16, device)
    clean = forward(norm, x, gamma, beta, torch.float32)[0]
    x[2, 5] = value
    y = forward(norm, x, gamma, beta, torch.float32)[0]
    others = [0, 1, 3]
    assert torch.equal(y[others], clean[others])
    # Infinity over an infinite deviation; the finite rest of an RMSNorm row becomes 0, of a LayerNorm row NaN.
    assert y[2, 5].isnan()
    assert y[2].isnan().all() if norm.normalization == "LayerNorm" or value != value else not y[2, :5].any()


def test_zero_centered_gamma_is_added_in_fp32() -> None:
    x = torch.randn(4, 8).bfloat16()
    gamma = torch.full((8,), 2.0**-12).bfloat16()
    y = forward(Norm("RMSNorm", zero_centered_gamma=True), x, gamma, None, torch.float32)[0]
    unscaled = forward(Norm("RMSNorm"), x, torch.ones(8), None, torch.float32)[0]
    assert torch.equal(y, unscaled * (1 + 2.0**-12))


@FOR_EACH_NORM
def test_parameters_of_another_dtype_and_any_layout(norm: Norm, device: torch.device) -> None:
    x, gamma, beta = norm_inputs(norm, (12, 20), torch.bfloat16, device)
    wide = [None if t is None else t.float() for t in (gamma, beta)]
    want = forward(norm, x, gamma, beta, torch.float32)
    for view in (x.T.contiguous().T, torch.cat([x, x], 1)[:, :20]):
        got = forward(norm, view, wide[0], wide[1], torch.float32)
        assert all(t.is_contiguous() for t in got)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # strides may change the order of a sum
    dx, dgamma, _ = norm.gradients(x.T.contiguous().T, x, wide[0], want[1:])
    assert (dx.dtype, dgamma.dtype) == (torch.bfloat16, torch.float32)
    assert dx.is_contiguous()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_operations_pass_opcheck(normalization: str, device: torch.device) -> None:
    norm = Norm(normalization)
    for dtype in (torch.bfloat16, torch.float32):
        x, gamma, beta = norm_inputs(norm, (6, 20), dtype, device)
        arguments = (x, gamma, beta, normalization, 1e-5, False, torch.float32)
        torch.library.opcheck(norm_forward.overload, norm_forward.spelled(*arguments))
        _, mean, rsigma, *_ = norm_forward(*arguments)
        torch.library.opcheck(norm_backward.overload, (x, x, gamma, mean, rsigma, normalization, False))


@each_once
@pytest.mark.parametrize("shape", [(0, 4), (3, 7)])
@FOR_EACH_NORM
def test_fakes(norm: Norm, shape: tuple[int, int]) -> None:
    def run(dtype: torch.dtype) -> list[Tensor]:
        x, gamma = torch.ones(shape, dtype=dtype), torch.ones(shape[1])
        outputs = forward(norm, x, gamma, None, torch.bfloat16)
        return [*outputs, *norm_backward(x, x, gamma, *outputs[1:], norm.normalization, False)]

    for dtype in DTYPES:
        with FakeTensorMode():
            fakes = run(dtype)
        for real, fake in zip(run(dtype), fakes, strict=True):
            assert (real.shape, real.dtype, real.stride()) == (fake.shape, fake.dtype, fake.stride())


# ---- Followed by a cast ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@FOR_EACH_NORM
def test_gpu_agrees_with_the_cpu(norm: Norm) -> None:
    """Within the sums' freedom of order; the casts of equal values are equal in every bit (test_quantize)."""
    x, gamma, beta = norm_inputs(norm, (515, 1024), torch.bfloat16, torch.device("cpu"))
    want = forward(norm, x, gamma, beta, torch.float32)
    on_gpu = [None if t is None else t.cuda() for t in (x, gamma, beta)]
    got = forward(norm, on_gpu[0], on_gpu[1], on_gpu[2], torch.float32)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)
