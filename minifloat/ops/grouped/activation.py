"""Activations of groups of rows, times a probability for each row: what stands between the linears of experts.

y = p act(x) is computed in fp32 and rounded once to the dtype of x. Where ``formats`` are given, each group's rows are
cast by themselves, as by :data:`~minifloat.ops.grouped.grouped_cast`; else the values are returned. Rows that are no
group's are 0 (in casts undefined on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.ops import activation, grouped
from minifloat.ops.activation import out_columns
from minifloat.ops.library import operation


@operation("grouped.activation_kernels:forward")
def grouped_activation(
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    scales: Tensor | None,
    name: str,
    parameters: Sequence[float],
    with_amax: bool,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """y [M, N] of ``x`` [M, N], or [M, 2 N] if the activation is gated, and its amaxes; or what ``grouped_cast`` gives.

    Args:
        probabilities: fp32 [M].
        offsets: as of ``grouped_amax``, the first one 0.
        scales: fp32 [G], those that casts are given.
        with_amax: measure the amax of each group of values, fp32 [G]; else it is [0].
        formats: one format: of the rule "given", with columnwise codes ``k_major``, or of ``quantize.casts_blocks``.
    """
    out_columns(name, x.shape[1])
    y = activation.forward(x.float(), name, parameters)
    if probabilities is not None:
        y = y * probabilities.float()[:, None]
    y = torch.where(_some_groups(x, offsets), y, 0.0).to(x.dtype).contiguous()
    return _results(y, offsets, scales, with_amax, formats, dims, k_major)


@grouped_activation.fake
def _(x: Tensor, _p: Any, offsets: Tensor, _s: Any, name: str, _parameters: Any, *how: Any) -> list[Tensor]:
    return _empty_results(x, out_columns(name, x.shape[1]), offsets, *how)


@operation("grouped.activation_kernels:backward")
def grouped_activation_backward(
    dy: Tensor,
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    scales: Tensor | None,
    name: str,
    parameters: Sequence[float],
    with_amax: bool,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """dx and its amaxes, or its casts; and then the gradients of the probabilities, fp32 [M], or [0] without them.

    In blocks, each half of what a gated activation has for input must be whole ones.
    """
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    present, incoming = _some_groups(x, offsets), dy.float()
    sums = _empty_sums(x, probabilities)
    if probabilities is not None:
        sums = torch.where(present, incoming * activation.forward(x.float(), name, parameters), 0.0).sum(1)
        incoming = incoming * probabilities.float()[:, None]
    dx = torch.where(present, activation.backward(incoming, x.float(), name, parameters), 0.0).to(x.dtype).contiguous()
    return [*_results(dx, offsets, scales, with_amax, formats, dims, k_major), sums]


@grouped_activation_backward.fake
def _(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, _s: Any, _n: Any, _p: Any, *how: Any
) -> list[Tensor]:
    return [*_empty_results(x, x.shape[1], offsets, *how), _empty_sums(x, probabilities)]


def _results(y: Tensor, offsets: Tensor, scales: Tensor | None, with_amax: bool, *how: Any) -> list[Tensor]:
    formats = how[0]
    if formats:
        return grouped.grouped_cast.reference(y, offsets, [scales] * len(formats), None, *how)
    none = y.new_empty(0, dtype=torch.float32)
    return [y, grouped.grouped_amax.reference(y, offsets, [Format().spec], [ROWWISE])[0] if with_amax else none]


def _empty_results(x: Tensor, columns: int, offsets: Tensor, with_amax: bool, *how: Any) -> list[Tensor]:
    if how[0]:
        return grouped.empty_casts(x[:, :columns], offsets, *how)
    amax = x.new_empty(offsets.shape[0] - 1 if with_amax else 0, dtype=torch.float32)
    return [x.new_empty(x.shape[0], columns), amax]


def _empty_sums(x: Tensor, probabilities: Tensor | None) -> Tensor:
    return x.new_empty(0 if probabilities is None else x.shape[0], dtype=torch.float32)


def _some_groups(x: Tensor, offsets: Tensor) -> Tensor:
    """Which rows are some group's, [M, 1]."""
    return torch.arange(x.shape[0], device=x.device)[:, None] < offsets[-1]


__all__ = ["grouped_activation", "grouped_activation_backward"]
