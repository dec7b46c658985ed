"""Embeddings whose rows ranks share: of the same tokens ``VocabParallelEmbedding``, of other ones ``EtpEmbedding``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Device, FloatDtype, Int, Size, checked
from minifloat.comm.collectives import all_gather_rows
from minifloat.comm.group import Group
from minifloat.functional.autograd import apply, as_output, first_order
from minifloat.functional.cross_entropy import vocabulary_shards
from minifloat.functional.etp.rows import Reduction
from minifloat.functional.exchange import Exchange, in_mode
from minifloat.nn.linear_call import run_eager
from minifloat.nn.options import InitMethod, one_dtype
from minifloat.nn.tensor_parallel import EtpModule, Partition, mark, shard_rows, tensor_parallel
from minifloat.recompute import exchange_of


class EtpEmbedding(EtpModule, nn.Embedding):
    """Embedding whose rows are sharded over ``etp_group``; each rank has its own tokens.

    The table [V, D] is gathered in its own dtype before the lookup, and freed after it: backward needs none of it. Its
    gradient [V, D] is reduced like that of a :class:`~minifloat.Linear` weight. It has the initial values of
    ``nn.Embedding`` with the same seed. Without a group, or in one of one rank, it is an ``nn.Embedding``.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: V, D and the rest as in ``nn.Embedding``.
        etp_group, etp_reduction: as in :class:`~minifloat.Linear`.
        init_method: fills the whole table in place; default: as ``nn.Embedding``, normal.
        params_dtype: another name of ``dtype``.
    """

    init_method: InitMethod | None
    first: int  # of the rows that this rank computes with, counted in all
    vocabulary: int

    @checked
    def __init__(
        self,
        num_embeddings: Size,
        embedding_dim: Size,
        padding_idx: Int | None = None,
        *,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
        etp_group: ProcessGroup | DeviceMesh | None = None,
        etp_reduction: Reduction = "mean",
        init_method: InitMethod | None = None,
        params_dtype: FloatDtype | None = None,
    ) -> None:
        self.__dict__.update(vocabulary=num_embeddings, embedding_dim=embedding_dim, first=0, init_method=init_method)
        dtype = one_dtype(self._label, dtype, params_dtype)
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._share_rows(etp_group, etp_reduction)

    @classmethod
    def _adopt_whole(cls, module: nn.Embedding) -> EtpEmbedding:
        """Makes ``module`` one of these, in place; its rows are still those of all ranks."""
        module.__class__ = cls
        assert isinstance(module, cls)
        module.__dict__.update(vocabulary=module.num_embeddings, first=0, init_method=None)
        return module

    def _share_rows(self, etp_group: ProcessGroup | DeviceMesh | None, reduction: Reduction) -> None:
        if (ranks := Group.of(etp_group)).size > 1:
            shard_rows(self, ranks, reduction)
        self._mark_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the full table and keeps this rank's rows."""
        whole = self.weight.new_empty(self.vocabulary, self.embedding_dim)
        (self.init_method or nn.init.normal_)(whole)
        if self.padding_idx is not None:
            whole[self.padding_idx].zero_()
        rows = whole[self.first : self.first + self.num_embeddings]
        self.weight.copy_(rows if self._etp is None else rows[self._etp.rows.range(0)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Looks up this rank's own tokens [...]: rows [..., D]."""
        if self._etp is None:
            return super().forward(tokens)
        if torch.compiler.is_compiling():
            result: Tensor = run_eager(EtpEmbedding.forward, self, tokens)
            return result
        return F.embedding(tokens, self._etp.full(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)

    @property
    def _label(self) -> str:
        """Name of the layer in errors."""
        return f"{type(self).__name__}({self.vocabulary}, {self.embedding_dim})"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self._etp is None else f", etp_size={self._etp.sharding.group.size}")


class VocabParallelEmbedding(EtpEmbedding):
    """Embedding whose table [V, D] is sharded by rows: each of p ranks has about V/p.

    A rank looks up the tokens of its rows and uses 0 for the others; the sum over the ranks is the exact result. V need
    not be a multiple of p: ``vocabulary_shards`` gives the rows of each rank.

    ===========  ================  =======================================
    on one rank  replicated        sequence parallel
    ===========  ================  =======================================
    tokens       [S, ...], of all  [S, ...], of all
    table        [V/p, D]          [V/p, D]
    result       [S, ..., D]       [S/p, ..., D], the rank's part of dim 0
    forward      all-reduce        reduce-scatter
    backward                       all-gather of the gradient
    ===========  ================  =======================================

    It has the initial values of ``nn.Embedding`` with the same seed; without a group, or in one of one rank, it is an
    ``nn.Embedding``. ``num_embeddings`` counts this rank's rows, ``first`` is the first of them, and ``vocabulary``
    counts all. The weight has Megatron's attributes ``tensor_model_parallel``, ``partition_dim`` and
    ``partition_stride``.

    Args:
        num_embeddings, embedding_dim, device, dtype: V, D and the rest as in ``nn.Embedding``.
        sequence_parallel: each rank gets its part of dim 0 of the result.
        tp_group, tp_mesh: the ranks: a process group, or one dim of a device mesh. ``tp_size``: their number.
        init_method: fills the whole table in place; default: as ``nn.Embedding``, normal.
        params_dtype: another name of ``dtype``.
        etp_group, etp_reduction: ranks with other tokens share this rank's rows, as in :class:`EtpEmbedding`.

    Raises:
        ValueError: the vocabulary is too small for so many ranks; arguments that contradict each other.
    """

    _exchange: Exchange

    @checked
    def __init__(
        self,
        num_embeddings: Size,
        embedding_dim: Size,
        *,
        device: Device | None = None,
        dtype: FloatDtype | None = None,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: Size = 1,
        tp_mesh: DeviceMesh | None = None,
        init_method: InitMethod | None = None,
        params_dtype: FloatDtype | None = None,
        etp_group: ProcessGroup | DeviceMesh | None = None,
        etp_reduction: Reduction = "mean",
    ) -> None:
        self.__dict__.update(vocabulary=num_embeddings, embedding_dim=embedding_dim)  # which errors name
        exchange = tensor_parallel(self._label, "row", sequence_parallel, tp_group, tp_size, tp_mesh)
        rows = self._init_state(num_embeddings, exchange, init_method)  # first: nn.Embedding.__init__ fills the weight
        dtype = one_dtype(self._label, dtype, params_dtype)
        nn.Embedding.__init__(self, rows, embedding_dim, device=device, dtype=dtype)
        self._share_rows(etp_group, etp_reduction)

    @classmethod
    def _adopt(cls, module: nn.Embedding, exchange: Exchange) -> None:
        """Makes ``module``, an embedding of all tokens whose table is this rank's rows already, one of these, in place.

        Args:
            exchange: the ranks, and whether they share dim 0 of the result out.
        """
        module.__class__ = cls
        assert isinstance(module, cls)
        exchange = in_mode(exchange, "row")
        module.num_embeddings = module._init_state(module.num_embeddings, exchange, None)
        assert len(module.weight) == module.num_embeddings, (module.weight.shape, module.num_embeddings)
        module._mark_parameters()

    def _init_state(self, vocabulary: int, exchange: Exchange, init_method: InitMethod | None) -> int:
        """Sets what an ``nn.Embedding`` lacks; returns how many rows it has."""
        shards, rank = vocabulary_shards(vocabulary, exchange.group.size), exchange.group.rank
        self.__dict__.update(
            vocabulary=vocabulary, _exchange=exchange, init_method=init_method, first=shards.first(rank)
        )  # nn.Module.__init__ may not have run yet
        return shards.rows[rank]

    def forward(self, tokens: Tensor, rows_per_rank: Sequence[int] | None = None) -> Tensor:
        """Looks up tokens [S, ...], the same on all ranks: rows [S, ..., D], or this rank's part of dim 0 of them.

        Args:
            tokens: int; one that is not from 0 to V - 1 is an error of indexing, as in ``nn.Embedding``.
            rows_per_rank: sequence parallel: the part of dim 0 of each rank; default: equal parts.

        Raises:
            ValueError: ``rows_per_rank`` does not add up to S, or is missing and ranks do not divide S.
        """
        shape = (*tokens.shape, self.embedding_dim)
        call = exchange_of(self).of_call(shape, rows_per_rank, self)
        if self._exchange.group.size == 1:
            return super().forward(tokens)
        if self._etp is not None and torch.compiler.is_compiling():
            compiled: Tensor = run_eager(VocabParallelEmbedding.forward, self, tokens, rows_per_rank)
            return compiled
        row = tokens - self.first
        elsewhere = ((row < 0) | (row >= self.num_embeddings)) & (tokens >= 0) & (tokens < self.vocabulary)
        row, result_shape = row.masked_fill(elsewhere, 0), call.output_shape(shape, self.embedding_dim)
        table = self.weight if self._etp is None else self._etp.full()
        return apply(_LookUp, table, row, elsewhere, call, result_shape)

    @checked
    def set_tensor_parallel_group(self, tp_group: ProcessGroup | DeviceMesh) -> None:
        """Replaces the group of ranks from the next forward on by another of the same size; the table does not change.

        Raises:
            ValueError: the table is sharded over another number of ranks.
        """
        group, old = Group.of(tp_group), self._exchange.group
        if group.size != old.size:
            raise ValueError(f"{self._label}: its table is cut for {old.size} ranks, not for a group of {group.size}")
        self._exchange = self._exchange.over(group)

    def extra_repr(self) -> str:
        group = self._exchange.group
        part = f", rows {self.first} to {self.first + self.num_embeddings - 1} on rank {group.rank} of {group.size}"
        shared = "" if self._etp is None else f", etp_size={self._etp.sharding.group.size}"
        return f"{self.vocabulary}, {self.embedding_dim}" + part * (group.size > 1) + shared

    def _mark_parameters(self) -> None:
        super()._mark_parameters()
        group = self._exchange.group
        if group.size > 1:
            mark(self.weight, Partition(0, (self.vocabulary,), group.size, group.rank))


class _LookUp(torch.autograd.Function):
    """Looks up tokens in the rows [V/p, D] of this rank, and sums over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, rows: Tensor, elsewhere: Tensor, call: Exchange, shape: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(rows, elsewhere)
        ctx.call, ctx.table_rows = call, weight.shape[0]
        values = F.embedding(rows, weight).masked_fill_(elsewhere[..., None], 0)
        return as_output(call.start_sum(values.reshape(-1, values.shape[-1])).wait(), shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        call: Exchange = ctx.call
        dy = dy.reshape(-1, dy.shape[-1])
        if call.shards is not None:
            dy = all_gather_rows(dy, call.shards, call.group)
        dy = dy.reshape(*rows.shape, dy.shape[-1]).masked_fill(elsewhere[..., None], 0)
        dweight = torch.ops.aten.embedding_dense_backward(dy, rows, ctx.table_rows, -1, False)
        return dweight, None, None, None, None
