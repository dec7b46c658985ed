"""LayerNorm and RMSNorm in float64: inputs, values, and bounds of the errors of an fp32 evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from minifloat.functional.norm import Norm
from minifloat.ops.norm import NORMALIZATIONS
from tests.helpers.compare import U

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
