"""One parameter whose shards FSDP2 gathers quantized: the hooks that it calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minifloat.operand import Quantized
from minifloat.parallel.fsdp import pytorch
from minifloat.tensor import QuantizedTensor

if TYPE_CHECKING:
    from minifloat.parallel.fsdp.weight import ShardedWeight


class ShardedParameter:
    """The hooks of FSDP2 for the weight of a linear layer, or for one of several parameters that are cast as one.

    Attributes:
        weight: what it is or belongs to, and its number among the parameters there.
        shards, group: the rows of each rank, and the ranks.
    """

    def __init__(self, weight: ShardedWeight, number: int, param: Any) -> None:
        """``param``: FSDP2's record of the parameter."""
        self.weight, self.number = weight, number
        self._param = param
        self._share: tuple[list[int], list[Tensor], int] | None = None
        self.shards, self.group = pytorch.shards_of(param)

    @property
    def rows(self) -> Tensor:
        """This rank's rows [m, K], in high precision or quantized."""
        return pytorch.own_rows(self._param)

    @property
    def is_quantized(self) -> bool:
        """The rows are kept quantized; nothing is brought to the device to find out."""
        return pytorch.is_quantized(self._param)

    @property
    def name(self) -> str:
        """What the layer calls the parameter."""
        return pytorch.layer_of(self._param)[1]

    def to(self, device: torch.device, non_blocking: bool = False) -> ShardedParameter:
        """Itself: what FSDP2 takes for a tensor that it has to bring to the device."""
        return self

    def hook(self) -> None:
        """FSDP2 asks this from now on what it gathers of the parameter."""
        pytorch.hook(self._param, self)

    def hand_over(self, received: list[Tensor], memory: list[Tensor]) -> None:
        """FSDP2 allocates and frees ``memory`` from now on, and gathers into ``received``."""
        pytorch.set_memory(self._param, received, memory)

    # ---- fewer ranks than have gathered for forward gather for backward ----

    def keep_share(self, rank: int, size: int) -> None:
        """Of what backward reads and forward has gathered, a part of ``size`` equal ones."""
        dims = self.weight.for_backward()
        self._share = dims, self.weight.unsharded.share(dims, self.number, rank, size), size

    def send_share(self) -> tuple[list[Tensor], tuple[list[int], None]]:
        """What :meth:`fsdp_pre_all_gather` gives otherwise; PyTorch itself keeps no part of an extension."""
        assert self._share is not None
        dims, shares, size = self._share
        received = [share.new_empty(share.numel() * size) for share in shares]
        self.hand_over(received, [*received, *self.weight.unsharded.wholes(dims, self.number)])
        return shares, (dims, None)

    # ---- FSDP2's protocol ----

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[list[int], Quantized]]:
        """What this rank sends, 1-D tensors of equal sizes on all ranks; the dims that it serves, and what it is of."""
        dims = self.weight.begin_gather() if self.number == 0 else self.weight.gathered_dims
        part = self.weight.cast_for(dims)[self.number]
        return tuple(self.weight.unsharded.sent(dims, self.number, part)), (dims, part)

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        gathered: tuple[list[int], Quantized | None],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The parameter of ``dtype``; with ``out`` that one is filled again."""
        (dims, part), unsharded = gathered, self.weight.unsharded
        if part is None:
            unsharded.fill_again(dims, self.number, outputs)
            self._share = None
            return None
        for tensor in unsharded.memory(dims, self.number):
            pytorch.allocate(tensor)  # with one rank, FSDP2 has not
        unsharded.fill(dims, self.number, part)
        if self.number == len(self.weight.parameters) - 1:
            self.weight.let_go()
        if out is not None:
            held = unsharded.pieces[self.number].rowwise
            assert isinstance(out, QuantizedTensor) and out.operands.rowwise is not None and held is not None
            assert out.operands.rowwise.codes.data_ptr() == held.codes.data_ptr()
            return None
        return self.weight.as_parameter(self.number, dtype), []
