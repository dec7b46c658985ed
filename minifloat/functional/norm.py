"""LayerNorm and RMSNorm with gradients: the norm operations under autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from minifloat.functional.outputs import as_output, guarded
from minifloat.functional.produced import Norm
from minifloat.ops.norm import norm_forward

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def normalize(x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm) -> Tensor:
    """``norm(x)`` over the last dim, computed in fp32 and rounded once to the dtype of ``x``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.

    Raises:
        ValueError: another dtype, or parameters that do not fit ``x``.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"{of.normalization} of {x.dtype}; bf16, fp16 and fp32 are supported: use x.float()")
    y: Tensor = NormFunction.apply(x, gamma, beta, of)  # type: ignore[no-untyped-call]
    return y


class NormFunction(torch.autograd.Function):
    """Keeps ``x`` as it came, gamma, and mean and rsigma, fp32 [M] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm) -> Tensor:
        y, *saved, _, _ = norm_forward(
            x.reshape(-1, x.shape[-1]), gamma, beta, of.normalization, of.eps, of.zero_centered_gamma, x.dtype, False
        )
        ctx.save_for_backward(guarded(x), gamma, *saved)
        ctx.of = of
        return as_output(y, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, *saved = ctx.saved_tensors
        dx, dgamma, dbeta = ctx.of.gradients(dy, x, gamma, tuple(saved))
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, None
