"""Activations of groups of rows, times a probability for each row: what stands between the linears of experts.

y = p act(x) is computed in fp32 and rounded once to the dtype of x; each group's rows are cast by themselves, as by
:data:`~minifloat.ops.grouped.grouped_cast`. Rows that are no group's are 0 (in casts undefined on a GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.formats import ROWWISE, Format
from minifloat.ops import grouped
from minifloat.ops.activation import out_columns, reference
from minifloat.ops.library import operation


@operation("grouped.activation_kernels:forward")
def grouped_activation(
    x: Tensor, probabilities: Tensor | None, offsets: Tensor, name: str, parameters: Sequence[float], with_amax: bool
) -> tuple[Tensor, Tensor]:
    """y [M, N] of ``x`` [M, N], or [M, 2 N] if the activation is gated, and the amax of each group, fp32 [G].

    ``probabilities``: fp32 [M]. ``offsets``: as of ``grouped_amax``, the first one 0. The amaxes are [0] unless
    ``with_amax``.
    """
    y = _forward(x, probabilities, offsets, name, parameters)
    return y, _amax(y, offsets, with_amax)


@grouped_activation.fake
def _(x: Tensor, _p: Any, offsets: Tensor, name: str, _parameters: Any, with_amax: bool) -> tuple[Tensor, Tensor]:
    amax = x.new_empty(offsets.shape[0] - 1 if with_amax else 0, dtype=torch.float32)
    return x.new_empty(x.shape[0], out_columns(name, x.shape[1])), amax


@operation("grouped.activation_kernels:cast")
def grouped_activation_cast(
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    scales: Tensor | None,
    name: str,
    parameters: Sequence[float],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """What :data:`~minifloat.ops.grouped.grouped_cast` gives of y.

    The formats are one format: of the rule "given", with ``scales`` fp32 [G] and columnwise codes ``k_major``, or one
    of ``quantize.casts_blocks``.
    """
    y = _forward(x, probabilities, offsets, name, parameters)
    return grouped.grouped_cast.reference(y, offsets, [scales] * len(formats), None, formats, dims, k_major)


@grouped_activation_cast.fake
def _(x: Tensor, _p: Any, offsets: Tensor, _s: Any, name: str, _parameters: Any, *how: Any) -> list[Tensor]:
    return grouped.empty_casts(x[:, : out_columns(name, x.shape[1])], offsets, *how)


@operation("grouped.activation_kernels:backward")
def grouped_activation_backward(
    dy: Tensor,
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    name: str,
    parameters: Sequence[float],
    with_amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx; the gradients of the probabilities, fp32 [M], or [0] without them; and the amaxes of dx."""
    dx, dprobabilities = _backward(dy, x, probabilities, offsets, name, parameters)
    return dx, dprobabilities, _amax(dx, offsets, with_amax)


@grouped_activation_backward.fake
def _(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, _name: Any, _parameters: Any, with_amax: bool
) -> tuple[Tensor, Tensor, Tensor]:
    amax = x.new_empty(offsets.shape[0] - 1 if with_amax else 0, dtype=torch.float32)
    return x.new_empty(x.shape), _empty_sums(x, probabilities), amax


@operation("grouped.activation_kernels:backward_cast")
def grouped_activation_backward_cast(
    dy: Tensor,
    x: Tensor,
    probabilities: Tensor | None,
    offsets: Tensor,
    scales: Tensor | None,
    name: str,
    parameters: Sequence[float],
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: Sequence[bool],
) -> list[Tensor]:
    """The casts of dx, as of :data:`grouped_activation_cast`, and then the gradients of the probabilities.

    In blocks, each half of what a gated activation has for input must be whole ones.
    """
    dx, dprobabilities = _backward(dy, x, probabilities, offsets, name, parameters)
    made = grouped.grouped_cast.reference(dx, offsets, [scales] * len(formats), None, formats, dims, k_major)
    return [*made, dprobabilities]


@grouped_activation_backward_cast.fake
def _(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, _s: Any, _n: Any, _p: Any, *how: Any
) -> list[Tensor]:
    return [*grouped.empty_casts(x, offsets, *how), _empty_sums(x, probabilities)]


def _empty_sums(x: Tensor, probabilities: Tensor | None) -> Tensor:
    return x.new_empty(0 if probabilities is None else x.shape[0], dtype=torch.float32)


def _forward(
    x: Tensor, probabilities: Tensor | None, offsets: Tensor, name: str, parameters: Sequence[float]
) -> Tensor:
    out_columns(name, x.shape[1])
    y = reference.forward(x.float(), name, parameters)
    if probabilities is not None:
        y = y * probabilities.float()[:, None]
    return torch.where(_some_groups(x, offsets), y, 0.0).to(x.dtype).contiguous()


def _backward(
    dy: Tensor, x: Tensor, probabilities: Tensor | None, offsets: Tensor, name: str, parameters: Sequence[float]
) -> tuple[Tensor, Tensor]:
    assert dy.shape == (x.shape[0], out_columns(name, x.shape[1])), (dy.shape, name, x.shape)
    present, incoming = _some_groups(x, offsets), dy.float()
    sums = _empty_sums(x, probabilities)
    if probabilities is not None:
        sums = torch.where(present, incoming * reference.forward(x.float(), name, parameters), 0.0).sum(1)
        incoming = incoming * probabilities.float()[:, None]
    dx = reference.backward(incoming, x.float(), name, parameters)
    return torch.where(present, dx, 0.0).to(x.dtype).contiguous(), sums


def _some_groups(x: Tensor, offsets: Tensor) -> Tensor:
    """Which rows are some group's, [M, 1]."""
    return torch.arange(x.shape[0], device=x.device)[:, None] < offsets[-1]


def _amax(y: Tensor, offsets: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return y.new_empty(0, dtype=torch.float32)
    return grouped.grouped_amax.reference(y, offsets, [Format().spec], [ROWWISE])[0]


__all__ = [
    "grouped_activation", "grouped_activation_backward", "grouped_activation_backward_cast", "grouped_activation_cast",
]  # fmt: skip
