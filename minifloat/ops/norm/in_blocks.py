"""LayerNorm and RMSNorm followed by a cast in blocks, as one ``torch.library`` operation."""

from __future__ import annotations

from torch import Tensor

from minifloat.formats import parse
from minifloat.ops.library import register
from minifloat.ops.norm import _check, norm_forward
from minifloat.ops.quantize import block_cast, empty_block_cast

__all__ = ["norm_cast_blocks"]


def _cast_blocks(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool, format: str,
    rowwise: bool, columnwise: bool, k_major: bool, residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = normalization, eps, zero_centered, x.dtype, False, residual
    y, mean, rsigma, _, total = norm_forward(x, gamma, beta, *options)
    return *block_cast(y, parse(format), rowwise, columnwise, k_major), mean, rsigma, total


def _fake_cast_blocks(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool, format: str,
    rowwise: bool, columnwise: bool, k_major: bool, residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = normalization, eps, zero_centered, x.dtype, False, residual
    y, mean, rsigma, _, total = norm_forward(x, gamma, beta, *options)
    return *empty_block_cast(y, y.shape[1], parse(format), rowwise, columnwise, k_major), mean, rsigma, total


def _cast_blocks_on_gpu(
    x: Tensor, gamma: Tensor, beta: Tensor | None, normalization: str, eps: float, zero_centered: bool, format: str,
    rowwise: bool, columnwise: bool, k_major: bool, residual: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    from minifloat.ops.norm import blocks

    _check(x, residual, gamma, beta, normalization)
    how = parse(format), rowwise, columnwise, k_major
    return blocks.cast(x, residual, gamma, beta, normalization, eps, zero_centered, *how)


norm_cast_blocks = register(
    "norm_cast_blocks(Tensor x, Tensor gamma, Tensor? beta, str normalization, float eps, bool zero_centered, "
    "str format, bool rowwise, bool columnwise, bool k_major, Tensor? residual=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _cast_blocks,
    _fake_cast_blocks,
    cuda=_cast_blocks_on_gpu,
)
"""The norm, rounded to the dtype of ``x`` and cast in blocks, whose amaxes are their own.

Returns codes and scales along the rows, then along the columns, those that are not wanted [0]; then mean, rsigma and
total. ``format`` is one of ``quantize.casts_blocks``, ``k_major`` as in ``quantize.cast``; the other arguments and
outputs are those of ``norm_forward``, whose ``y`` the codes are those of.
"""
