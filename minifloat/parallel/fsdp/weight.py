"""One weight whose shards FSDP2 gathers quantized: what is sent for which pass, and what is made of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from minifloat import recompute
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.nn.linear import Linear
from minifloat.operand import Quantized
from minifloat.parallel.fsdp import pytorch
from minifloat.parallel.fsdp.casting import Agreed, Casting, cast_again, cast_shards
from minifloat.parallel.fsdp.parameter import ShardedParameter
from minifloat.parallel.fsdp.unsharded import Unsharded
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor


class ShardedWeight:
    """The weight [M, K] of a linear layer, which is one parameter or several below each other that are cast as one.

    Shards in high precision are cast at the start of each outermost forward, together with those of all other weights
    (:func:`~minifloat.parallel.fsdp.casting.cast_shards`). What was sent is let go, and cast again for backward with
    the amaxes and scales of then, so that a rank does not hold its codes of all weights at once. Shards of a quantized
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
        parameters: from the first row on.
        group: the ranks.
        parts: what this rank sends of each parameter, as :func:`~minifloat.distributed.quantize_shard` gives it; None
            before a cast, and once it was sent.
        agreed: with what the latest cast may be repeated; None where it may not.
        gathered_dims: what the latest gather serves.
        whole: the gathered weight, if it has several parameters and has been gathered ever; else None.
    """

    def __init__(
        self, layer: Linear, quantizer: Quantizer, delayed: DelayedScaling | None, params: Sequence[Any], together: Any
    ) -> None:
        """``params``: FSDP2's records of the parameters; ``together``: of the group that is gathered together."""
        self.layer, self.quantizer, self.delayed = layer, quantizer, delayed
        self.parameters = tuple(ShardedParameter(self, number, param) for number, param in enumerate(params))
        self.group = self.parameters[0].group
        self.parts: Sequence[Quantized] | None = None
        self.agreed: Agreed | None = None
        self.gathered_dims: list[int] = []
        self.whole: QuantizedTensor | None = None
        self._together = together
        pytorch.note_grad_mode(together)
        self._for_backward = COLUMNWISE if self.quantizer.columnwise else ROWWISE
        self._castings: dict[bool, Casting] = {}
        self._unsharded: Unsharded | None = None
        self._backward_reads_both = False
        self._asks = False  # the layer asked in its latest forward: a compiled one takes what is there

    @property
    def is_quantized(self) -> bool:
        """The parameter is kept quantized."""
        return self.parameters[0].is_quantized

    def casting(self, columnwise: bool) -> Casting:
        """How shards in high precision are cast, ``columnwise``: in the orientation that backward reads, too."""
        found = self._castings.get(columnwise)
        if found is None:
            quantizer = self.quantizer.with_usage(columnwise=self.quantizer.columnwise and columnwise)
            found = Casting.of(quantizer, tuple(each.shards for each in self.parameters), self.group.rank)
            assert found is not None
            self._castings[columnwise] = found
        return found

    # ---- a gather of FSDP2's ----

    def begin_gather(self) -> list[int]:
        """The dims that a gather which begins will serve, for all parameters."""
        self.gathered_dims = dims = self._wanted()
        state = pytorch.training_state(self._together)
        if state == "FORWARD":
            self._asks = False
        if state == "IDLE":
            self.parts = self.agreed = None  # nobody has cast it since the last step
        if self._unsharded is None:
            every = [ROWWISE, COLUMNWISE] if self.quantizer.columnwise else [ROWWISE]
            self._unsharded = Unsharded(self.cast_for(every), [each.shards for each in self.parameters])
        self._hand_over(dims)
        return dims

    @property
    def unsharded(self) -> Unsharded:
        """The memory of the whole."""
        assert self._unsharded is not None
        return self._unsharded

    @property
    def gathers_again(self) -> bool:
        """What backward reads is gathered of all ranks then, and not needed yet when a forward begins."""
        return pytorch.reshards_after_forward(self._together) and not pytorch.reshards_to_fewer(self._together)

    def is_gathered(self, columnwise: bool) -> bool:
        """It is unsharded since an earlier microbatch: forward gathers nothing, and backward the same once more."""
        dims = [ROWWISE, COLUMNWISE] if columnwise and self.quantizer.columnwise else [ROWWISE]
        return pytorch.is_unsharded(self._together) and self.agreed is not None and self.agreed.serves(dims)

    def for_backward(self) -> list[int]:
        """Of the dims that forward has gathered those that backward reads."""
        both = self._backward_reads_both or not self._asks
        wanted = [ROWWISE, COLUMNWISE] if both else [self._for_backward]
        return [dim for dim in wanted if self._has(dim)] or [ROWWISE]

    def cast_for(self, dims: Collection[int]) -> Sequence[Quantized]:
        """What this rank sends of each parameter, with operands for ``dims``."""
        if self._lacks(dims) and (self.agreed is None or not self.agreed.serves(dims)):
            cast_shards([self])  # the last forward had no grad mode, or there was none
        if self._lacks(dims):
            assert self.agreed is not None
            self.parts = cast_again(self, self.agreed, dims)
        assert self.parts is not None
        return self.parts

    def let_go(self) -> None:
        """Frees what was sent, if it can be cast again; to be called in the stream that waits for the gather."""
        if self.agreed is not None and self.parts is not None:
            held = [operand for part in self.parts for operand in part if operand is not None]
            pytorch.used_here(tensor for operand in held for tensor in operand.tensors if tensor is not None)
            self.parts = None

    def _lacks(self, dims: Collection[int]) -> bool:
        if self.parts is None:
            return True
        rowwise, columnwise = self.parts[0]
        return (rowwise is None and ROWWISE in dims) or (columnwise is None and COLUMNWISE in dims)

    def as_parameter(self, number: int, dtype: torch.dtype) -> QuantizedTensor:
        """The gathered parameter, which stands for values of ``dtype``."""
        if number == 0 and len(self.parameters) > 1:
            self.whole = self._as_tensor(self.unsharded.operands, dtype)
        return self._as_tensor(self.unsharded.pieces[number], dtype)

    def _as_tensor(self, operands: Quantized, dtype: torch.dtype) -> QuantizedTensor:
        tensor = QuantizedTensor.from_operands(operands, self.quantizer, operands.any.shape, dtype)
        tensor.gatherer = self
        return tensor

    def _hand_over(self, dims: Iterable[int]) -> None:
        """FSDP2 allocates and frees the memory of these dims from now on."""
        for i, parameter in enumerate(self.parameters):
            parameter.hand_over(self.unsharded.received(dims, i), self.unsharded.memory(dims, i))

    def _wanted(self) -> list[int]:
        """The dims that the pass which gathers will contract; see the class."""
        state, in_backward = pytorch.training_state(self._together), pytorch.in_backward()
        again = pytorch.reshards_after_backward(self._together)
        if state == "PRE_BACKWARD" and again and self._asks and not self._backward_reads_both:
            return [self._for_backward]
        grad = pytorch.grad_enabled(self._together)
        read_at_once = grad and recompute.hooks_read()  # what forward saves for backward
        gathered_later = state == "FORWARD" and self.gathers_again and not in_backward and not read_at_once
        no_backward = self._asks and not grad and not in_backward
        if gathered_later or no_backward or not self.quantizer.columnwise:
            return [ROWWISE]
        return [ROWWISE, COLUMNWISE]

    # ---- a call of the layer ----

    def fetch(self, *dims: int) -> None:
        """Gathers the operands of the unsharded weight that are not there; all ranks call it alike."""
        unsharded = self.unsharded
        missing = [dim for dim in dims if not unsharded.holds(dim)]
        if missing:
            self._backward_reads_both |= pytorch.training_state(self._together) == "PRE_BACKWARD"
            held = [dim for dim in (ROWWISE, COLUMNWISE) if dim not in missing and self._has(dim)]
            unsharded.gather(missing, self.cast_for(missing), self.group)
            self.let_go()
            self._hand_over([*missing, *held])  # so that it is freed with the rest

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """The same for a call of a linear that reads ``quantizer``'s orientations, columnwise if backward will.

        Raises:
            ValueError: the call wants another format.
        """
        self._asks = True
        wanted = [ROWWISE] + [COLUMNWISE] * (quantizer.columnwise and self.quantizer.columnwise)
        for dim in wanted:
            if quantizer.format(dim) != self.quantizer.format(dim) and not self.is_quantized:
                raise ValueError(
                    f"{label}: the weight was gathered as {self.quantizer.format(dim).spec}, and the recipe in force "
                    f"wants {quantizer.format(dim).spec}; set the layer's recipe before fully_shard, and leave it"
                )
        comes_later = self.gathers_again and not pytorch.in_backward()
        if pytorch.training_state(self._together) == "FORWARD" and comes_later and not recompute.hooks_read():
            wanted = [ROWWISE]  # backward gathers the rest before it reads it
        self.fetch(*wanted)

    def _has(self, dim: int) -> bool:
        return (dim == ROWWISE or self.quantizer.columnwise) and self.unsharded.holds(dim)
