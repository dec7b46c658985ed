"""One weight whose shards FSDP2 gathers quantized: what is sent for which pass, and what is made of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from minifloat import recompute
from minifloat.distributed.fsdp import pytorch
from minifloat.distributed.fsdp.casting import cast_shards
from minifloat.distributed.fsdp.unsharded import Unsharded
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.nn.linear import Linear
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor


class ShardedWeight:
    """The hooks of FSDP2 for the weight of a linear layer.

    Shards in high precision are cast at the start of each outermost forward, together with those of all other weights
    (:func:`~minifloat.distributed.fsdp.casting.cast_shards`); gathers send what was cast then. Shards of a quantized
    parameter are sent as they are. Which orientation, FSDP2's training state says:

    =====================================================  ==========================================
    a gather                                               sends
    =====================================================  ==========================================
    for a forward after which the layer is sharded again   rowwise
    for a backward                                         columnwise; rowwise too where an earlier
                                                           backward has read it, as recomputation does
    any other: a layer that stays unsharded,               both; rowwise alone without grad mode
    an ``unshard()`` by hand, in a recomputation
    for a layer whose forward is compiled, but the first   both
    =====================================================  ==========================================

    A compiled layer cannot ask for what is missing, as in a recomputation, so that all is there.
    A symmetric format has one operand, which is sent each time. What a call needs and finds missing is gathered then
    and there (:meth:`fetch`): a wrong guess costs a gather, never a wrong number.

    Attributes:
        layer, quantizer: whose weight, and how it is cast.
        delayed: the recipe of the layer's amax history, where its scale is what shards in high precision are cast with.
        shards, group: the rows of each rank, and the ranks.
        part: what this rank sends, as :func:`~minifloat.distributed.quantize_shard` gives it; None before a cast.
    """

    def __init__(
        self, layer: Linear, quantizer: Quantizer, delayed: DelayedScaling | None, param: Any, params: Any
    ) -> None:
        """``param``, ``params``: FSDP2's records of the weight and of the group that is gathered together."""
        self.layer, self.quantizer, self.delayed = layer, quantizer, delayed
        self._param, self._params = param, params
        self._for_backward = COLUMNWISE if self.quantizer.columnwise else ROWWISE
        self.shards, self.group = pytorch.shards_of(param)
        self.part: Quantized | None = None
        self._unsharded: Unsharded | None = None
        self._backward_reads_both = False
        self._asks = False  # the layer asked in its latest forward: a compiled one takes what is there

    @property
    def rows(self) -> Tensor:
        """This rank's rows [m, K], in high precision or quantized."""
        return pytorch.own_rows(self._param)

    @property
    def name(self) -> str:
        """What the layer calls the parameter."""
        return pytorch.layer_of(self._param)[1]

    def to(self, device: torch.device, non_blocking: bool = False) -> ShardedWeight:
        """Itself: what FSDP2 takes for a tensor that it has to bring to the device."""
        return self

    # ---- FSDP2's protocol ----

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], list[int]]:
        """What this rank sends, 1-D tensors of equal sizes on all ranks, and the dims that it serves."""
        dims = self._wanted()
        if pytorch.training_state(self._params) == "FORWARD":
            self._asks = False
        if pytorch.training_state(self._params) == "IDLE":
            self.part = None  # nobody has cast it since the last step
        unsharded = self._memory()
        self._hand_over(dims)
        return tuple(unsharded.sent(dims, self._part(dims))), dims

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], dims: list[int], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]] | None:
        """The weight of ``dtype`` and what is to be freed with it; with ``out`` that one is filled again."""
        unsharded = self._unsharded
        assert unsharded is not None and self.part is not None
        for tensor in unsharded.memory(dims):
            pytorch.allocate(tensor)
        unsharded.fill(dims, self.part)
        if out is not None:
            assert isinstance(out, QuantizedTensor) and out.operands.rowwise is not None
            assert unsharded.operands.rowwise is not None
            assert out.operands.rowwise.codes.data_ptr() == unsharded.operands.rowwise.codes.data_ptr()
            return None
        shape = self.shards.total, unsharded.operands.any.shape[1]
        weight = QuantizedTensor.from_operands(unsharded.operands, self.quantizer, shape, dtype)
        weight.gatherer = self
        return weight, [wire.whole for wire in unsharded.wires(dims) if wire.joined]

    # ---- what is there ----

    def fetch(self, *dims: int) -> None:
        """Gathers the operands of the unsharded weight that are not there; all ranks call it alike."""
        unsharded = self._unsharded
        assert unsharded is not None
        missing = [dim for dim in dims if not unsharded.holds(dim)]
        if missing:
            self._backward_reads_both |= pytorch.training_state(self._params) == "PRE_BACKWARD"
            held = [dim for dim in (ROWWISE, COLUMNWISE) if dim not in missing and self._has(dim)]
            unsharded.gather(missing, self._part(missing), self.group)
            self._hand_over([*missing, *held])  # so that it is freed with the rest

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """The same for a call of a linear that reads ``quantizer``'s orientations, columnwise if backward will.

        Raises:
            ValueError: the call wants another format.
        """
        self._asks = True
        wanted = [ROWWISE] + [COLUMNWISE] * (quantizer.columnwise and self.quantizer.columnwise)
        for dim in wanted:
            if quantizer.format(dim) != self.quantizer.format(dim) and not isinstance(self.rows, QuantizedTensor):
                raise ValueError(
                    f"{label}: the weight was gathered as {self.quantizer.format(dim).spec}, and the recipe in force "
                    f"wants {quantizer.format(dim).spec}; set the layer's recipe before fully_shard, and leave it"
                )
        comes_later = pytorch.reshards_after_forward(self._params) and not pytorch.in_backward()
        if pytorch.training_state(self._params) == "FORWARD" and comes_later and not recompute.hooks_read():
            wanted = [ROWWISE]  # backward gathers the rest before it reads it
        self.fetch(*wanted)

    def _has(self, dim: int) -> bool:
        unsharded = self._unsharded
        return unsharded is not None and (dim == ROWWISE or self.quantizer.columnwise) and unsharded.holds(dim)

    # ---- inside ----

    def _wanted(self) -> list[int]:
        """The dims that the pass which gathers will contract; see the class."""
        state, again = pytorch.training_state(self._params), pytorch.reshards_after_backward(self._params)
        if state == "PRE_BACKWARD" and again and self._asks and not self._backward_reads_both:
            return [self._for_backward]
        for_forward = state == "FORWARD" and pytorch.reshards_after_forward(self._params)
        if for_forward and not pytorch.in_backward() and not (torch.is_grad_enabled() and recompute.hooks_read()):
            return [ROWWISE]
        backward = torch.is_grad_enabled() or pytorch.in_backward() or not self._asks
        return [ROWWISE, COLUMNWISE] if backward and self.quantizer.columnwise else [ROWWISE]

    def _part(self, dims: Iterable[int]) -> Quantized:
        """What was cast, with operands for ``dims``."""
        if self.part is None or (COLUMNWISE in dims and self.part.columnwise is None):
            cast_shards([self])  # the last forward had no grad mode, or there was none
        assert self.part is not None
        return self.part

    def _memory(self) -> Unsharded:
        if self._unsharded is None:
            every = [ROWWISE, COLUMNWISE] if self.quantizer.columnwise else [ROWWISE]
            self._unsharded = Unsharded(self._part(every), self.shards)
        return self._unsharded

    def _hand_over(self, dims: Iterable[int]) -> None:
        """FSDP2 allocates and frees the memory of these dims from now on."""
        assert self._unsharded is not None
        wires = self._unsharded.wires(dims)
        pytorch.set_memory(
            self._param, [wire.received for wire in wires], [wire.whole for wire in wires if wire.joined]
        )
