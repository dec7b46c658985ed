"""Rotation of pairs of channels by angles of their positions, as a ``torch.library`` operation, and its definition."""

from __future__ import annotations

import torch
from torch import Tensor

from minifloat.ops.library import operation


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool = False) -> Tensor:
    """``x`` [..., d] with its first r channels turned by angles whose ``cos`` and ``sin`` are [..., r].

    The pair (a, b) becomes (a cos - b sin, b cos + a sin), computed in fp32 without contraction and rounded once to the
    dtype of ``x``. ``back``: (a cos + b sin, b cos - a sin), the gradient of that.
    """
    r = cos.shape[-1]
    turned = x[..., :r].float()
    across = -_quarter_turn(turned * sin, interleaved) if back else _quarter_turn(turned, interleaved) * sin
    result = (turned * cos + across).to(x.dtype)
    return result if r == x.shape[-1] else torch.cat((result, x[..., r:]), -1)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@operation("rope.kernels:rotate_into", mutates=("out",))
def rotate_into(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool, back: bool) -> None:
    """Writes :func:`rotated` of ``x`` [a, b, h, d] to ``out`` [a, b, h, d]; ``cos``, ``sin``: fp32 [a, b, r].

    Channels of all of them are consecutive in memory, other dims are anywhere: ``out`` may be some heads of a tensor.
    """
    out.copy_(rotated(x, cos[:, :, None], sin[:, :, None], interleaved, back))


@rotate_into.fake
def _(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool, back: bool) -> None:
    return None
