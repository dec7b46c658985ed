"""Which keys a query attends to: one description for every backend of attention.

A mask is a band around the diagonal, the places of tokens where sequences differ in length, and a tensor of the user's.
Suffixes: B batch, S queries, T keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minifloat.arguments import label_of

Kind = Literal["none", "causal", "band", "sequences", "tensor"]
Keep = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Band(NamedTuple):
    """A query at position p sees keys at ``p - left`` to ``p + right``; None is without limit."""

    left: int | None = None
    right: int | None = None


EVERYTHING = Band()
_UNLIMITED = 2**30


class Places(NamedTuple):
    """Of each token the sequence that it belongs to, and its position there: int [B, S].

    A token in a sequence of its own, such as -1 of queries and -2 of keys, neither attends nor is attended to.
    """

    sequence: Tensor
    position: Tensor


@dataclass(frozen=True)
class Mask:
    """Which of T keys each of S queries attends to.

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
    query: Places | None = None
    key: Places | None = None
    kept: Tensor | None = None
    bias: Tensor | None = None

    @property
    def kind(self) -> Kind:
        """What a backend has to be able to do."""
        if self.kept is not None or self.bias is not None:
            return "tensor"
        if self.query is not None:
            return "sequences"
        if self.band == EVERYTHING:
            return "none"
        return "causal" if self.band == Band(None, 0) and self.diagonal == 0 else "band"

    def keep(self, device: torch.device) -> Keep:
        """Of indices (batch, head, query, key), which broadcast: whether the query attends to the key.

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
        """The whole mask, bool, broadcasting to [B, H, S, T]; the bias is left out."""
        b = torch.arange(batch, device=device)[:, None, None, None]
        i = torch.arange(queries, device=device)[:, None]
        j = torch.arange(keys, device=device)
        kept = self.keep(device)(b, b, i, j)
        return kept if self.kept is None else kept & self.kept


def _tensor(value: int, device: torch.device) -> Tensor:
    """Filled on the device, where a copy would wait for it."""
    return torch.full((), value, dtype=torch.int32, device=device)


def simplified(band: Band, diagonal: int, queries: int, keys: int) -> Band:
    """The band without limits that no pair of tokens reaches: a single query at the bottom right sees every key."""
    left, right = band
    if left is not None and left >= queries - 1 + diagonal:
        left = None
    if right is not None and right >= keys - 1 - diagonal:
        right = None
    return Band(left, right)


def packed_places(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, queries: int, keys: int, bottom_right: bool
) -> tuple[Places, Places]:
    """Places of packed sequences, [1, tokens], from where each starts, int [b + 1]."""
    sequence_q, sequence_kv = sequence_ids(cu_seqlens_q, queries), sequence_ids(cu_seqlens_kv, keys)
    position_q, position_kv = positions(cu_seqlens_q, queries), positions(cu_seqlens_kv, keys)
    sequences = cu_seqlens_q.numel() - 1
    if bottom_right:
        diagonal = cu_seqlens_kv.diff() - cu_seqlens_q.diff()
        position_q = position_q + torch.cat((diagonal, diagonal.new_zeros(1)))[sequence_q]
    sequence_q = sequence_q.where(sequence_q < sequences, -1)
    sequence_kv = sequence_kv.where(sequence_kv < sequences, -2)
    return Places(sequence_q[None], position_q[None]), Places(sequence_kv[None], position_kv[None])


def padded_places(valid_q: Tensor, valid_kv: Tensor, bottom_right: bool) -> tuple[Places, Places]:
    """Places of sequences padded to one length, from bool [B, S] and [B, T], False where there is padding."""
    position_q = torch.arange(valid_q.shape[1], device=valid_q.device).expand(valid_q.shape)
    position_kv = torch.arange(valid_kv.shape[1], device=valid_kv.device).expand(valid_kv.shape)
    if bottom_right:
        position_q = position_q + (valid_kv.sum(1) - valid_q.sum(1))[:, None]
    none = torch.zeros_like(position_q), torch.zeros_like(position_kv)
    return Places(none[0].where(valid_q, -1), position_q), Places(none[1].where(valid_kv, -2), position_kv)


# ---- sequences of different lengths, packed one behind the other along one dim of tokens ----


def sequence_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Which sequence each of ``tokens`` tokens belongs to, int64 [tokens]; those behind the last one get ``b``.

    Args:
        cu_seqlens: int [b + 1], where sequence ``i`` is tokens ``cu_seqlens[i]`` to ``cu_seqlens[i + 1]``.
    """
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens.contiguous(), token, right=True) - 1


def positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The position of each token in its own sequence, in the dtype of ``cu_seqlens``, [tokens]."""
    token = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return token - cu_seqlens[sequence_ids(cu_seqlens, tokens)]


def check_cu_seqlens(layer: object, name: str, cu_seqlens: Tensor | None) -> Tensor:
    """``cu_seqlens``, or raises ValueError where it is missing or is not int [b + 1]."""
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
