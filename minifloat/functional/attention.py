"""Scaled dot-product attention: which keys a query attends to, and the backend that fits it best.

``softmax(softcap(scale q k^T) + bias + mask) v``, where ``softcap(x) = c tanh(x / c)``. A query that may attend to
nothing gives 0. Shapes: q [B, H, S, E], k [B, G, T, E], v [B, G, T, F]; H heads share G heads of keys and values.
A mask is a band around the diagonal, the places of tokens where sequences differ in length, and a tensor of the user's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minifloat.arguments import label_of
from minifloat.functional.autograd import autocast_off

Kind = Literal["none", "causal", "band", "sequences", "tensor"]
Keep = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Band(NamedTuple):
    """Band of keys that a query at position p sees: ``p - left`` to ``p + right``; None is without limit."""

    left: int | None = None
    right: int | None = None


EVERYTHING, CAUSAL = Band(), Band(None, 0)
_UNLIMITED = 2**30


class TokenPlaces(NamedTuple):
    """Sequence that each token belongs to, and its position there: int [B, S].

    A token in a sequence of its own, such as -1 of queries and -2 of keys, neither attends nor is attended to.
    """

    sequence: Tensor
    position: Tensor


@dataclass(frozen=True)
class Mask:
    """Mask: which of T keys each of S queries attends to.

    Args:
        band: around the diagonal; key ``j`` lies on that of query ``i`` where ``j = i + diagonal``.
        diagonal: 0 for an alignment at the top left, T - S at the bottom right. Unused where there are places.
        query, key: places of the tokens, in which the position of queries includes the diagonal; None where each row
            of the batch is one sequence and full.
        kept: bool, broadcasts to [B, H, S, T]; False masks.
        bias: broadcasts to [B, H, S, T]; added to the scaled scores.
    """

    band: Band = EVERYTHING
    diagonal: int = 0
    query: TokenPlaces | None = None
    key: TokenPlaces | None = None
    kept: Tensor | None = None
    bias: Tensor | None = None

    @property
    def kind(self) -> Kind:
        """Kind of mask that a backend has to be able to apply."""
        if self.kept is not None or self.bias is not None:
            return "tensor"
        if self.query is not None:
            return "sequences"
        if self.band == EVERYTHING:
            return "none"
        return "causal" if self.band == CAUSAL and self.diagonal == 0 else "band"

    def keep(self, device: torch.device) -> Keep:
        """Returns a function of indices (batch, head, query, key): whether the query attends to the key.

        The band and the places, in the form that FlexAttention calls a mask_mod. It reads nothing but tensors, since a
        number would be compiled into the kernel, and another length would compile another one.
        """
        left, right = (_tensor(_UNLIMITED if bound is None else bound, device) for bound in self.band)
        if self.query is None or self.key is None:
            diagonal = _tensor(self.diagonal, device)

            def keep(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                distance = j - i - diagonal
                return (distance >= -left) & (distance <= right)

            return keep
        (query, query_at), (key, key_at) = self.query, self.key

        def keep_places(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            distance = key_at[b, j] - query_at[b, i]
            return (query[b, i] == key[b, j]) & (distance >= -left) & (distance <= right)

        return keep_places

    def dense(self, batch: int, queries: int, keys: int, device: torch.device) -> Tensor:
        """Makes the whole mask, bool, broadcasting to [B, H, S, T]; the bias is left out."""
        b = torch.arange(batch, device=device)[:, None, None, None]
        i = torch.arange(queries, device=device)[:, None]
        j = torch.arange(keys, device=device)
        kept = self.keep(device)(b, b, i, j)
        return kept if self.kept is None else kept & self.kept


def _tensor(value: int, device: torch.device) -> Tensor:
    """Makes a tensor on the device, where a copy would wait for it."""
    return torch.full((), value, dtype=torch.int32, device=device)


def simplified(band: Band, diagonal: int, queries: int, keys: int) -> Band:
    """Drops limits that no pair of tokens reaches: a single query at the bottom right sees every key."""
    left, right = band
    if left is not None and left >= queries - 1 + diagonal:
        left = None
    if right is not None and right >= keys - 1 - diagonal:
        right = None
    return Band(left, right)


def packed_places(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, queries: int, keys: int, bottom_right: bool
) -> tuple[TokenPlaces, TokenPlaces]:
    """Finds the places of packed sequences, [1, tokens], from where each starts, int [b + 1]."""
    sequence_q, sequence_kv = sequence_ids(cu_seqlens_q, queries), sequence_ids(cu_seqlens_kv, keys)
    position_q, position_kv = positions(cu_seqlens_q, queries), positions(cu_seqlens_kv, keys)
    sequences = cu_seqlens_q.numel() - 1
    if bottom_right:
        diagonal = cu_seqlens_kv.diff() - cu_seqlens_q.diff()
        position_q = position_q + torch.cat((diagonal, diagonal.new_zeros(1)))[sequence_q]
    sequence_q = sequence_q.where(sequence_q < sequences, -1)
    sequence_kv = sequence_kv.where(sequence_kv < sequences, -2)
    return TokenPlaces(sequence_q[None], position_q[None]), TokenPlaces(sequence_kv[None], position_kv[None])


def padded_places(valid_q: Tensor, valid_kv: Tensor, bottom_right: bool) -> tuple[TokenPlaces, TokenPlaces]:
    """Finds the places of padded sequences, from bool [B, S] and [B, T], False where there is padding."""
    position_q = torch.arange(valid_q.shape[1], device=valid_q.device).expand(valid_q.shape)
    position_kv = torch.arange(valid_kv.shape[1], device=valid_kv.device).expand(valid_kv.shape)
    if bottom_right:
        position_q = position_q + (valid_kv.sum(1) - valid_q.sum(1))[:, None]
    none = torch.zeros_like(position_q), torch.zeros_like(position_kv)
    return TokenPlaces(none[0].where(valid_q, -1), position_q), TokenPlaces(none[1].where(valid_kv, -2), position_kv)


# ---- sequences of different lengths, packed one behind the other along one dim of tokens ----


def sequence_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Finds which sequence each of ``tokens`` tokens belongs to, int64 [tokens]; those behind the last one get ``b``.

    Args:
        cu_seqlens: int [b + 1], where sequence ``i`` is tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1


def positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Finds the position of each token in its own sequence, in the dtype of ``cu_seqlens``, [tokens]."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return token - cu_seqlens[sequence_ids(cu_seqlens, tokens)]


def check_cu_seqlens(layer: object, name: str, cu_seqlens: Tensor | None) -> Tensor:
    """Returns ``cu_seqlens``; raises ValueError where it is missing or is not int [b + 1]."""
    if cu_seqlens is None:
        raise ValueError(
            f"{label_of(layer)}: packed sequences need {name}, int32 [sequences + 1]; "
            "as torch.tensor([0, 3, 8]) for sequences of 3 and 5 tokens"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{label_of(layer)}: {name} is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; "
            "int32 or int64 [sequences + 1] is needed"
        )
    return cu_seqlens


# ---- backends: SDPA, FlexAttention, or plain PyTorch ----

_MASKS_KEPT = 16
_FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLEX_SMALLEST_HEAD = 16


class Backend(NamedTuple):
    """Name of what computes attention, and why."""

    name: Literal["sdpa", "flex", "math"]
    reason: str


def choose_backend(
    device: str, kind: Kind, dtype: torch.dtype, head_dim: int, *, softcap: bool, dropout: bool
) -> Backend:
    """Decides which backend computes attention.

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
    """Computes attention [B, H, S, F] in the dtype of ``q``, on the backend that :func:`choose_backend` names.

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
    """Runs PyTorch's SDPA, without softcap; a mask that it has no name for becomes a tensor."""
    kind = mask.kind
    if kind in ("none", "causal"):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=kind == "causal", dropout_p=dropout, scale=scale, enable_gqa=_grouped(q, k)
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
    """Computes attention in plain PyTorch, with all scores in fp32 (fp64 for fp64)."""
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
    """Runs FlexAttention, compiled on a GPU: blocks that the mask leaves empty are not computed.

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
    """Finds which blocks have something to compute; None for all of them."""
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
