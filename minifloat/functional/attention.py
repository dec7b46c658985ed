"""Scaled dot-product attention on the backend that fits: SDPA, FlexAttention, or plain PyTorch.

``softmax(softcap(scale q k^T) + bias + mask) v``, where ``softcap(x) = c tanh(x / c)``. A query that may attend to
nothing gives 0. Shapes: q [B, H, S, E], k [B, G, T, E], v [B, G, T, F]; H heads share G heads of keys and values.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat.functional.attention_mask import Band, Kind, Mask
from minifloat.functional.autograd import autocast_off

_MASKS_KEPT = 16
_FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLEX_SMALLEST_HEAD = 16


class Backend(NamedTuple):
    """How attention is computed, and why."""

    name: Literal["sdpa", "flex", "math"]
    reason: str


def choose_backend(
    device: str, kind: Kind, dtype: torch.dtype, head_dim: int, *, softcap: bool, dropout: bool
) -> Backend:
    """The one place that decides which backend computes attention.

    Args:
        device: its type, ``"cuda"`` and the like.
        kind: of the mask.
        head_dim: the smaller of that of keys and of values.
    """
    if kind in ("none", "causal") and not softcap:
        return Backend("sdpa", f"PyTorch's SDPA has this mask: {kind}")
    wanted = "softcap" if softcap else f"mask of kind {kind}"
    if device != "cuda":
        obstacle = f"it does not train on {device}"
    elif kind == "tensor":
        obstacle = "mask or bias is a tensor"
    elif dropout:
        obstacle = "it has no dropout"
    elif dtype not in _FLEX_DTYPES:
        obstacle = f"it has no {dtype}"
    elif head_dim < _FLEX_SMALLEST_HEAD:
        obstacle = f"heads of {head_dim} channels are too small"
    else:
        return Backend("flex", f"{wanted} in one kernel")
    return Backend("math" if softcap else "sdpa", f"{wanted}; no FlexAttention: {obstacle}")


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, softcap: float | None = None, dropout: float = 0.0
) -> Tensor:
    """[B, H, S, F] in the dtype of ``q``, ``k`` and ``v``, on the backend that :func:`choose_backend` names.

    Args:
        mask: which keys each query attends to.
        scale: multiplies the scores.
        softcap: bounds them to between -softcap and softcap.
        dropout: the probability that a weight is set to 0.
    """
    head_dim = min(q.shape[-1], v.shape[-1])
    backend = choose_backend(
        q.device.type, mask.kind, q.dtype, head_dim, softcap=softcap is not None, dropout=dropout > 0
    )
    if backend.name == "sdpa" or not q.numel() or not k.numel():
        return by_sdpa(q, k, v, mask, scale, dropout)
    if backend.name == "flex":
        return by_flex(q, k, v, mask, scale, softcap)
    return by_math(q, k, v, mask, scale, softcap, dropout)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, dropout: float = 0.0) -> Tensor:
    """PyTorch's SDPA, without softcap; a mask that it has no name for becomes a tensor."""
    if mask.kind in ("none", "causal"):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=mask.kind == "causal", dropout_p=dropout, scale=scale, enable_gqa=_grouped(q, k)
        )
    kept = mask.dense(q.shape[0], q.shape[2], k.shape[2], q.device)
    # What kernels make of a row that sees nothing differs: it sees everything here, and gives 0 in the end.
    blind = ~kept.any(-1, keepdim=True)
    kept = kept | blind
    tensor = kept if mask.bias is None else mask.bias.to(q.dtype).masked_fill(~kept, float("-inf"))
    k, v = _repeated(q, k), _repeated(q, v)  # the kernels that take a tensor do not share heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=tensor, dropout_p=dropout, scale=scale)
    return out.masked_fill(blind, 0)


def by_math(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Everything in plain PyTorch, with all scores in fp32 (fp64 for fp64)."""
    precise = torch.promote_types(q.dtype, torch.float32)
    kept = mask.dense(q.shape[0], q.shape[2], k.shape[2], q.device)
    with autocast_off(q):
        scores = (q.to(precise) * scale) @ _repeated(q, k).to(precise).transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask.bias is not None:
            scores = scores + mask.bias
        # A row of -inf alone would be NaN, and so would its gradients: it keeps its scores and loses its weights.
        masked = scores.masked_fill(~kept & kept.any(-1, keepdim=True), float("-inf"))
        weights = F.dropout(masked.softmax(-1).masked_fill(~kept, 0), dropout)
        return (weights @ _repeated(q, v).to(precise)).to(q.dtype)


def by_flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None = None) -> Tensor:
    """FlexAttention, compiled on a GPU: blocks that the mask leaves empty are not computed.

    Compiled backwards of PyTorch free what was saved as they go, and refuse ``retain_graph=True`` unless
    ``torch._functorch.config.donated_buffer`` is False.
    """
    from torch.nn.attention import flex_attention as flex

    score_mod = None if softcap is None else _softcap(softcap, q.device)
    run: Any = (
        _compiled(flex.flex_attention) if q.is_cuda and not torch.compiler.is_compiling() else flex.flex_attention
    )
    out: Tensor = run(
        q, k, v, score_mod=score_mod, block_mask=_block_mask(q, k, mask), scale=scale, enable_gqa=_grouped(q, k)
    )
    return out


def _softcap(softcap: float, device: torch.device) -> Any:
    cap = torch.full((), softcap, device=device)  # a tensor: a compiler takes a second number for a symbol

    def soft(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return soft


def _block_mask(q: Tensor, k: Tensor, mask: Mask) -> Any:
    """Which blocks have something to compute, or None for all of them."""
    if mask.kind == "none":
        return None
    queries, keys, traced = q.shape[2], k.shape[2], torch.compiler.is_compiling()
    if mask.query is not None:
        return _new_block_mask(mask, q.shape[0], queries, keys, q.device, traced)
    captured = not traced and q.is_cuda and torch.cuda.is_current_stream_capturing()
    if traced or captured or type(q) is not Tensor:  # memory of a graph, or of a fake: not to be kept
        return _new_block_mask(mask, None, queries, keys, q.device, traced)
    return _band_block_mask(mask.band, mask.diagonal, queries, keys, q.device)


@functools.lru_cache(maxsize=_MASKS_KEPT)
def _band_block_mask(band: Band, diagonal: int, queries: int, keys: int, device: torch.device) -> Any:
    with torch.inference_mode(False):  # or training could not use it later
        return _new_block_mask(Mask(band, diagonal), None, queries, keys, device, False)


def _new_block_mask(mask: Mask, batch: int | None, queries: int, keys: int, device: torch.device, traced: bool) -> Any:
    from torch.nn.attention import flex_attention as flex

    create: Any = flex.create_block_mask
    if device.type == "cuda" and not traced:
        create = _compiled(create)  # or the mask of all pairs would be in memory
    return create(mask.keep(device), batch, None, queries, keys, device=device)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _repeated(q: Tensor, k: Tensor) -> Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1) if _grouped(q, k) else k
