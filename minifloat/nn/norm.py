"""``LayerNorm`` and ``RMSNorm``: the norms that the fused modules compute, as modules of their own."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import ClassVar

import torch
from torch import Tensor, nn

from minifloat.arguments import Device, FloatDtype, NonNegativeFloat, Size, checked
from minifloat.functional.autograd import as_output, autocast_to
from minifloat.functional.norm_activation import Norm, normalize
from minifloat.nn.options import check_meta, check_tensor, one_dtype


class _Norm(nn.Module):
    normalization: ClassVar[str]
    weight: nn.Parameter
    bias: nn.Parameter | None

    @checked
    def __init__(
        self,
        normalized_shape: Size | Sequence[Size],
        eps: NonNegativeFloat = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        params_dtype: FloatDtype | None = None,
        dtype: FloatDtype | None = None,
        device: Device | None = None,
    ) -> None:
        super().__init__()
        shape = (int(normalized_shape),) if isinstance(normalized_shape, int | Integral) else tuple(normalized_shape)
        if not shape:
            raise ValueError(f"{type(self).__name__}: normalized_shape is {normalized_shape}; give one or more sizes")
        self.normalized_shape = shape
        self.norm = Norm(self.normalization, eps, zero_centered_gamma)
        self.weight = nn.Parameter(
            torch.empty(shape, dtype=one_dtype(type(self).__name__, dtype, params_dtype), device=device)
        )
        has_bias = self.normalization == "LayerNorm"
        self.register_parameter("bias", nn.Parameter(torch.empty_like(self.weight)) if has_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to 1 (a zero-centered gamma to 0) and the bias to 0."""
        nn.init.constant_(self.weight, 0.0 if self.norm.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., *normalized_shape] to the same shape, in the dtype of ``x`` or of ``torch.autocast``."""
        check_tensor(x, self)
        check_meta(x, self, self._parameters.get("weight"))
        dims = len(self.normalized_shape)
        if x.shape[max(x.dim() - dims, 0) :] != self.normalized_shape:
            raise ValueError(
                f"{type(self).__name__}: input of shape {tuple(x.shape)} must end in "
                f"normalized_shape={self.normalized_shape}"
            )
        bias = None if self.bias is None else self.bias.flatten()
        rows = autocast_to(x).flatten(x.dim() - dims)
        y = normalize(rows, self.weight.flatten(), bias, self.norm)
        return y if dims == 1 else as_output(y, x.shape)

    def extra_repr(self) -> str:
        centered = ", zero_centered_gamma=True" if self.norm.zero_centered_gamma else ""
        return f"{self.normalized_shape}, eps={self.norm.eps}{centered}"


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dims; statistics and gradients in fp32.

    Layer Normalization (Ba et al. 2016). State dict keys are those of ``nn.LayerNorm``. Under ``torch.autocast`` the
    input is first rounded to its dtype, as in the linears, so a fused LayerNormLinear gives the same numbers.

    Args:
        normalized_shape: the sizes of the last dims, or the one size of the last.
        eps: added to the variance.
        zero_centered_gamma: scale by ``1 + weight``, which starts at 0.
        params_dtype, dtype, device: as in :class:`~minifloat.Linear`.

    Raises:
        ValueError: ``normalized_shape`` is empty or not positive; an input that does not end in it, or that is neither
            bf16 nor fp16 nor fp32.
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dims; statistics and gradients in fp32.

    Root Mean Square Layer Normalization (Zhang and Sennrich 2019). State dict keys are those of ``nn.RMSNorm``;
    arguments, errors and ``torch.autocast`` as for :class:`LayerNorm`.
    """

    normalization = "RMSNorm"
