"""LayerNorm and RMSNorm in float64: inputs, values, and bounds of the errors of an fp32 evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minifloat.functional.norm_activation import Norm
from minifloat.ops.norm import NORMALIZATIONS
from tests.helpers.compare import U, assert_within

NORMS = [
    Norm(normalization, zero_centered_gamma=centered) for normalization in NORMALIZATIONS for centered in (False, True)
]
FOR_EACH_NORM = pytest.mark.parametrize("norm", NORMS, ids=lambda n: n.normalization + "-1+" * n.zero_centered_gamma)


def norm_inputs(
    norm: Norm, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Any, Any]:
    """x, gamma and beta (None for RMSNorm); rows of very different size, the mean apart from 0."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-6, 6, (shape[0], 1)) + 0.5
    gamma = torch.randn(shape[1]) * 0.5 + (0.0 if norm.zero_centered_gamma else 1.0)
    beta = torch.randn(shape[1]) if norm.normalization == "LayerNorm" else None
    return tuple(None if t is None else t.to(device, dtype) for t in (x, gamma, beta))  # type: ignore[return-value]


def norm_float64(norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """PyTorch's own norm, in float64."""
    scale = gamma.double() + norm.zero_centered_gamma
    if norm.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(x.double(), x.shape[-1:], scale, norm.eps)
    return torch.nn.functional.layer_norm(
        x.double(), x.shape[-1:], scale, None if beta is None else beta.double(), norm.eps
    )


class Normalized(NamedTuple):
    """n = (x - mean) * rsigma in float64, with bounds of the errors of n and (relative) of rsigma in fp32."""

    n: Tensor
    rsigma: Tensor
    error: Tensor
    rsigma_error: Tensor


def normalized(norm: Norm, x: Tensor) -> Normalized:
    """The sum of K numbers in any order errs by at most K u times the sum of their magnitudes.

    So the mean errs by (K + 1) u mean|x|; each centered c by that and u |c|; the variance v by 2 mean(|c| err(c)) +
    mean(err(c)^2) + (K + 2) u v; rsigma by half of that relative to v + eps, and 3 u; n by rsigma err(c) and |n| times
    rsigma's relative error and u. The factor 1.1 is for products of errors.
    """
    x = x.double()
    size = x.shape[-1]
    mean = x.mean(-1, keepdim=True) if norm.normalization == "LayerNorm" else torch.zeros_like(x[:, :1])
    c = x - mean
    err_c = torch.zeros_like(c)
    if norm.normalization == "LayerNorm":
        err_c = (size + 1) * U * x.abs().mean(-1, keepdim=True) + U * c.abs()
    v = c.square().mean(-1, keepdim=True)
    err_v = 2 * (c.abs() * err_c).mean(-1, keepdim=True) + err_c.square().mean(-1, keepdim=True) + (size + 2) * U * v
    rsigma = (v + norm.eps).rsqrt()
    relative = 1.1 * (0.5 * err_v / (v + norm.eps) + 3 * U)
    n = c * rsigma
    return Normalized(n, rsigma, 1.1 * (rsigma * err_c + n.abs() * (relative + U)), relative)


def assert_norm_forward(
    norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, y: Tensor, mean: Tensor, rsigma: Tensor
) -> None:
    """Value in fp32 and statistics, within the sums' freedom of order."""
    size, exact = x.shape[1], norm_float64(norm, x, gamma, beta)
    scale = (gamma.double() + norm.zero_centered_gamma).abs()
    n, exact_rsigma, err_n, relative = normalized(norm, x)
    bound = scale * (err_n + 2 * U * n.abs()) + U * exact.abs() + 1e-30
    assert (y.dtype, mean.dtype, rsigma.dtype) == (torch.float32,) * 3
    assert ((y.double() - exact).abs() <= bound).all()
    assert ((rsigma - exact_rsigma[:, 0]).abs() <= relative[:, 0] * exact_rsigma[:, 0]).all()
    if norm.normalization == "LayerNorm":
        assert ((mean - x.double().mean(-1)).abs() <= (size + 1) * U * x.double().abs().mean(-1)).all()
    else:
        assert mean.shape == (0,)


def assert_norm_gradients(
    norm: Norm, x: Tensor, gamma: Tensor, beta: Tensor | None, dy: Tensor, dx: Tensor, dgamma: Tensor, dbeta: Any
) -> tuple[Tensor, Tensor]:
    """Against autograd in float64; returns its dx, and the bound of what another one differs by before it is rounded.

    The bounds follow err(n) through dx = rsigma (d - mean(d) - n mean(d n)), d = dy g.
    """
    leaves = [t.detach().double().requires_grad_() for t in (x, gamma, beta) if t is not None]
    y = norm_float64(norm, *leaves, *[None] * (3 - len(leaves)))
    dy, rows, size = dy.double(), *x.shape
    exact = torch.autograd.grad(y, leaves, dy)
    n, rsigma, err_n, relative = normalized(norm, x)
    d = (dy * (gamma.detach().double() + norm.zero_centered_gamma)).abs()
    mean_d, mean_dn, mean_d_err = (t.mean(-1, keepdim=True) for t in (d, d * n.abs(), d * err_n))
    terms = d + mean_d + n.abs() * mean_dn
    bound = 1.1 * rsigma * ((relative + (size + 12) * U) * terms + err_n * mean_dn + n.abs() * mean_d_err)
    assert_within(dx, exact[0], bound, dx.dtype)
    sums = (rows + 2) * U * (dy * n).abs().sum(0) + (dy.abs() * err_n).sum(0)
    assert_within(dgamma, exact[1], 1.1 * sums, dgamma.dtype)
    if beta is not None:
        assert_within(dbeta, exact[2], (rows + 1) * U * dy.abs().sum(0), dbeta.dtype)
    return exact[0], bound
