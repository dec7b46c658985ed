"""``EtpEmbedding``: an ``nn.Embedding`` whose rows ranks with other data share, gathered for each lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from minifloat.arguments import Device, FloatDtype, Int, Size, checked
from minifloat.comm.group import Group
from minifloat.functional.etp.rows import EtpRows, Reduction
from minifloat.functional.etp.weight import EtpWeight
from minifloat.nn.etp import mark_rows, shard_rows
from minifloat.nn.parameters import InitMethod, one_dtype
from minifloat.nn.uncompiled import run_eager


class EtpEmbedding(nn.Embedding):
    """``weight[tokens]`` where each rank of ``etp_group``, which has tokens of its own, has some rows of the table.

    The table [V, D] is gathered in its own dtype before the lookup, and freed after it: backward needs none of it. Its
    gradient [V, D] is reduced as those of weights of :class:`~minifloat.Linear` are. It starts as ``nn.Embedding`` of
    the same seed. Without a group, or in one of one rank, it is an ``nn.Embedding``.

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: V, D and the rest as of ``nn.Embedding``.
        etp_group, etp_reduction: as of :class:`~minifloat.Linear`.
        init_method: fills the whole table in place; default: as ``nn.Embedding``, normal.
        params_dtype: another name of ``dtype``.
    """

    _weight_names, _rows_kind = ("weight",), EtpRows
    _etp: EtpWeight | None = None
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
        """Draws the whole table and keeps this rank's rows."""
        whole = self.weight.new_empty(self.vocabulary, self.embedding_dim)
        (self.init_method or nn.init.normal_)(whole)
        if self.padding_idx is not None:
            whole[self.padding_idx].zero_()
        rows = whole[self.first : self.first + self.num_embeddings]
        self.weight.copy_(rows if self._etp is None else rows[self._etp.rows.range(0)])

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [...], this rank's own, to their rows [..., D]."""
        if self._etp is None:
            return super().forward(tokens)
        if torch.compiler.is_compiling():
            result: Tensor = run_eager(EtpEmbedding.forward, self, tokens)
            return result
        return F.embedding(tokens, self._etp.whole(), self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)

    @property
    def _label(self) -> str:
        """What errors call the layer."""
        return f"{type(self).__name__}({self.vocabulary}, {self.embedding_dim})"

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self._etp is None else f", etp_size={self._etp.sharding.group.size}")

    def invalidate(self) -> None:
        """Forgets what was cast: call it after writing to the parameter in a way that PyTorch does not see."""
        if self._etp is not None:
            self._etp.forget()

    # A parameter that is copied or replaced has lost its attributes.

    def _mark_parameters(self) -> None:
        mark_rows(self)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        replaced = self._parameters.get(name)
        super().register_parameter(name, param)
        if replaced is not None and param is not None:
            self._mark_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.invalidate()  # module.to() and the like write through .data
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_parameters()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.invalidate()
        if self._etp is not None:
            self._etp.rows.cut_wholes(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._mark_parameters()
