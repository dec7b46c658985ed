"""LayerNorm and RMSNorm: under autograd, and as the outputs that a layer quantizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minifloat.functional.autograd import apply, as_output, first_order, guarded
from minifloat.functional.fused_cast import FusedOutput, OutputCast
from minifloat.ops import norm
from minifloat.quantizer import Quantizer, as_matrix

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_NORM = norm.norm_forward, norm.norm_cast
_NORM_RECOMPUTED = norm.norm_forward.for_recompute(), norm.norm_cast.for_recompute()


@dataclass(frozen=True)
class Norm:
    """Which norm, as a value of a call.

    Args:
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        eps: added to the variance.
        zero_centered_gamma: scale by ``1 + gamma``.
    """

    normalization: str = "LayerNorm"
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        norm.check_name(self.normalization)

    def gradients(
        self, dy: Tensor, x: Tensor, gamma: Tensor, saved: tuple[Tensor, ...], dresidual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """dx like ``x``, dgamma and dbeta (None for RMSNorm) like gamma, all computed in fp32.

        Args:
            dy: [..., K], any float dtype.
            saved: :attr:`FusedOutput.saved`.
            dresidual: another gradient of ``x``, added to dx before its one rounding.
        """
        mean, rsigma = saved
        other = None if dresidual is None else as_matrix(dresidual)
        dx, dgamma, dbeta = norm.norm_backward(
            as_matrix(dy), as_matrix(x), gamma, mean, rsigma, self.normalization, self.zero_centered_gamma, other
        )
        return as_output(dx, x.shape), dgamma, dbeta if self.normalization == "LayerNorm" else None


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
    return apply(NormFunction, x, gamma, beta, of)


class NormFunction(torch.autograd.Function):
    """Keeps ``x`` as it came, gamma, and mean and rsigma, fp32 [M] each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, of: Norm) -> Tensor:
        y, *saved, _, _ = norm.norm_forward(
            x.reshape(-1, x.shape[-1]), gamma, beta, of.normalization, of.eps, of.zero_centered_gamma, x.dtype, False
        )
        ctx.save_for_backward(guarded(x), gamma, *saved)
        ctx.of = of
        return as_output(y, x.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, *saved = ctx.saved_tensors
        dx, dgamma, dbeta = ctx.of.gradients(dy, x, gamma, tuple(saved))
        return dx, dgamma, dbeta if ctx.needs_input_grad[2] else None, None


# ---- to be quantized ----


def norm_value(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor | None,
    of: Norm,
    quantizer: Quantizer,
    *,
    residual: Tensor | None = None,
    recompute: bool = False,
    **cast_options: Any,
) -> FusedOutput:
    """LayerNorm or RMSNorm of ``x``, or of ``x + residual``, to be cast with ``quantizer``.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        gamma, beta: [K], any float dtype; RMSNorm has no beta.
        residual: [..., K] in the dtype of ``x``; the sum, rounded to it, is :attr:`FusedOutput.stream`.
        recompute: backward recomputes what its forward computed, see ``Operation.for_recompute``.
        cast_options: those of :class:`~minifloat.functional.fused_cast.OutputCast`.

    Raises:
        TypeError, ValueError: ``x`` cannot be quantized (see ``cast_all``), or the parameters do not fit it.
    """
    cast = OutputCast(x, quantizer, **cast_options)
    forward, forward_cast = _NORM_RECOMPUTED if recompute else _NORM
    options = gamma, beta, of.normalization, of.eps, of.zero_centered_gamma, *cast.arguments
    added = None if residual is None else as_matrix(residual)
    if cast.in_kernel:
        *outputs, mean, rsigma, total = forward_cast(cast.matrix, *options, added)
    else:
        y, mean, rsigma, amax, total = forward(cast.matrix, *options, added)
        outputs = [y, amax]
    stream = x if residual is None else as_output(total, x.shape)
    return cast.output(outputs, x.shape, saved=(mean, rsigma), stream=stream)
