"""Rotary position embedding of queries and keys: pairs of channels turned by angles of their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat.arguments import checked
from minifloat.functional import attention
from minifloat.functional.autograd import apply, first_order
from minifloat.ops.rope import rotate_into, rotated

TensorFormat = Literal["sbhd", "bshd", "thd"]


@checked
def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: TensorFormat = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Rotates the first ``r`` channels of each head by the angles of its position; the other channels do not change.

    The pair (a, b) becomes (a cos - b sin, a sin + b cos), computed in fp32 and returned in the dtype of ``t``.

    Args:
        t: [s, b, h, d], [b, s, h, d] or [tokens, h, d], as ``tensor_format`` says.
        freqs: angles [positions, 1, 1, r], ``r <= d``, from :class:`~minifloat.RotaryPositionEmbedding`.
        start_positions: int [b], the position of each sequence's first token; 0 if None.
        interleaved: as in :class:`~minifloat.RotaryPositionEmbedding`.
        cu_seqlens: int [b + 1] for ``thd``: where the packed sequences start, and where the last one ends.

    Raises:
        ValueError: an unknown format, shapes that do not fit, more tokens than angles, ``thd`` without ``cu_seqlens``.
            On a device a position without an angle is an error of indexing.
    """
    _check(t, freqs, tensor_format, start_positions, cu_seqlens)
    angles = _angles(t, freqs.flatten(1), tensor_format, start_positions, cu_seqlens)
    cos, sin = angles.cos(), angles.sin()
    if not _in_one_kernel(t, angles):
        return rotated(t, cos, sin, interleaved)
    tables = _of_tokens(cos, t), _of_tokens(sin, t)
    return apply(RotateFunction, _four(t), *tables, interleaved, False).view(t.shape)


def split_rotated(
    heads: Tensor, sizes: Sequence[int], freqs: Sequence[Tensor], tensor_format: TensorFormat, interleaved: bool,
    cu_seqlens: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Splits the heads of queries, keys and values, and turns the first two as :func:`apply_rotary_pos_emb` does.

    Their gradients become one tensor as they are turned back, with no copy of those of queries and keys.

    Args:
        heads: [..., h, d] with ``sum(sizes)`` heads.
        freqs, cu_seqlens: of queries and of keys.
    """
    given = zip(freqs, cu_seqlens, strict=True)
    if not _in_one_kernel(heads, *freqs):
        q, k, v = heads.split(tuple(sizes), -2)
        turned = [
            apply_rotary_pos_emb(t, of, tensor_format, None, interleaved, cu_seqlens=starts)
            for t, (of, starts) in zip((q, k), given, strict=True)
        ]
        return *turned, v
    tables: list[Tensor] = []
    for f, c in given:
        _check(heads, f, tensor_format, None, c)
        if tables and f is freqs[0] and c is cu_seqlens[0]:
            tables += tables
        else:
            angles = _angles(heads, f.flatten(1), tensor_format, None, c)
            tables += _of_tokens(angles.cos(), heads), _of_tokens(angles.sin(), heads)
    parts = apply(SplitRotatedFunction, _four(heads), tuple(sizes), interleaved, *tables)
    return tuple([part.view(*heads.shape[:-2], *part.shape[-2:]) for part in parts])


class RotateFunction(torch.autograd.Function):
    """Turns in one launch; the gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.options = interleaved, back
        return _rotated(t, cos, sin, interleaved, back)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        interleaved, back = ctx.options
        return apply(RotateFunction, dy, *ctx.saved_tensors, interleaved, not back), None, None, None, None


class SplitRotatedFunction(torch.autograd.Function):
    """Splits and turns heads; backward turns gradients of queries and keys straight into that of all heads."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, sizes: tuple[int, ...], interleaved: bool, *tables: Tensor) -> Any:
        ctx.save_for_backward(*tables)
        ctx.sizes, ctx.interleaved = sizes, interleaved
        q, k, v = heads.split(sizes, -2)
        q_cos, q_sin, k_cos, k_sin = tables
        return _rotated(q, q_cos, q_sin, interleaved), _rotated(k, k_cos, k_sin, interleaved), v

    @staticmethod
    @first_order
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        q_cos, q_sin, k_cos, k_sin = ctx.saved_tensors
        dheads = dq.new_empty(*dq.shape[:2], sum(ctx.sizes), dq.shape[-1])
        to_q, to_k, to_v = dheads.split(ctx.sizes, -2)
        rotate_into(dq, q_cos, q_sin, to_q, ctx.interleaved, True)
        rotate_into(dk, k_cos, k_sin, to_k, ctx.interleaved, True)
        to_v.copy_(dv)
        return dheads, *[None] * 6


def _rotated(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool = False) -> Tensor:
    out = t.new_empty(t.shape)
    rotate_into(t, cos, sin, out, interleaved, back)
    return out


def _in_one_kernel(t: Tensor, *angles: Tensor) -> bool:
    """Whether one kernel turns: no compiler fuses PyTorch's operations itself, and only ``t`` needs a gradient."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not traced and type(t) in (Tensor, torch.nn.Parameter) and not any(each.requires_grad for each in angles)


def _four(t: Tensor) -> Tensor:
    """Views ``t`` as [a, b, h, d]; packed tokens are those of one sequence."""
    return t if t.dim() == 4 else t[None]


def _of_tokens(table: Tensor, t: Tensor) -> Tensor:
    """Expands cosines or sines, which broadcast over ``t``, to [a, b, r]."""
    table = table.expand(*t.shape[:-2], 1, -1).squeeze(-2)
    return table if t.dim() == 4 else table[None]


def _angles(
    t: Tensor, freqs: Tensor, tensor_format: str, start_positions: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """Lays out angles [positions, r] so as to broadcast over ``t``."""
    if cu_seqlens is not None:
        position = attention.positions(cu_seqlens, t.shape[0])
        sequence = attention.sequence_ids(cu_seqlens, t.shape[0])
        last = cu_seqlens.numel() - 2
        if start_positions is not None and last >= 0:
            position = position + start_positions[sequence.clamp(max=last)]
        return F.embedding(position.where(sequence <= last, 0), freqs)[:, None]  # tokens behind the last: any angle
    dim = 0 if tensor_format == "sbhd" else 1
    if start_positions is None:
        angles = freqs[: t.shape[dim]]
        return angles[:, None, None] if dim == 0 else angles[:, None]
    position = start_positions[:, None] + torch.arange(t.shape[dim], device=start_positions.device)
    return F.embedding(position.t() if dim == 0 else position, freqs)[:, :, None]  # which refuses those below 0


def _check(
    t: Tensor, freqs: Tensor, tensor_format: str, start_positions: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    name = "apply_rotary_pos_emb"
    if t.dim() != len(tensor_format):
        raise ValueError(f"{name}: t has shape {tuple(t.shape)}; {tensor_format} has {len(tensor_format)} dims")
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] % 2 or freqs.shape[-1] > t.shape[-1]:
        raise ValueError(
            f"{name}: freqs has shape {tuple(freqs.shape)}; [positions, 1, 1, r] is needed, r even and at most the "
            f"{t.shape[-1]} channels of t"
        )
    if tensor_format == "thd":
        attention.check_cu_seqlens(name, "cu_seqlens", cu_seqlens)
        sequences = -1 if cu_seqlens is None else cu_seqlens.numel() - 1
    elif cu_seqlens is not None:
        raise ValueError(f"{name}: cu_seqlens is for tensor_format='thd', not {tensor_format!r}; leave it out")
    else:
        length, sequences = t.shape[:2] if tensor_format == "sbhd" else (t.shape[1], t.shape[0])
        if start_positions is None and length > freqs.shape[0]:
            raise ValueError(
                f"{name}: {length} tokens but angles of {freqs.shape[0]} positions; "
                f"make them with RotaryPositionEmbedding(...)({length})"
            )
    if start_positions is not None and start_positions.shape != (sequences,):
        raise ValueError(
            f"{name}: start_positions has shape {tuple(start_positions.shape)}; one for each of {sequences} sequences"
        )
