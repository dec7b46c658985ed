"""Weights of experts in one parameter [G, N, K], which FSDP2 shards by experts: each rank casts its own, all gather."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.comm.group import Group, ShardMap
from minifloat.formats import ROWWISE
from minifloat.functional.etp.rows import Sharding
from minifloat.functional.grouped import joined, of_all
from minifloat.functional.quantize import FORWARD_SLOTS
from minifloat.nn.expert_parameters import ExpertParameters
from minifloat.nn.linear_state import LinearState
from minifloat.operand import Operand, Quantized
from minifloat.parallel.fsdp.weight import ShardedWeight
from minifloat.quantizer import Quantizer
from minifloat.recipe import DelayedScaling
from minifloat.tensor import QuantizedTensor


def _stack(operands: Sequence[Operand]) -> Operand:
    """Operands of matrices [N, K], alike in all but their tensors, as one that has these stacked, [G, ...] each."""
    stacked = [None if each[0] is None else torch.stack(each) for each in zip(*[o[:3] for o in operands], strict=True)]
    codes, scale_inv, amax = stacked
    assert codes is not None
    return operands[0]._replace(codes=codes, scale_inv=scale_inv, amax=amax)


class StackedExperts(QuantizedTensor):
    """W [G, N, K] that was gathered, or a view of all of it, each expert quantized by itself.

    The tensors of its operands are stacked, [G, ...]: FSDP2 may free them until a product reads and joins them. What
    PyTorch makes of a part of it is in high precision.
    """

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        if self.gatherer is not None:
            self.gatherer.fetch(ROWWISE)
        values = joined(self._operands.any).dequantize(dtype or self.dtype)
        return values.as_strided(self.shape, self.stride())

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        return super()._part(view) if view.numel() == self.numel() else None

    def _like(
        self, operands: Quantized, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
    ) -> StackedExperts:
        shape, stride = (self.shape, self.stride()) if shape is None else (shape, stride)
        out = StackedExperts(operands, self.quantizer, shape, operands.any.dtype, stride)
        out.gatherer = self.gatherer
        return out

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> StackedExperts:
        one = QuantizedTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return StackedExperts(one._operands, one.quantizer, outer_size, one.dtype, one.stride())


class ShardedExperts(ShardedWeight):
    """The weights of experts in one parameter: a rank has whole matrices [N, K], and asks no other for their amaxes.

    A rank that has none casts zeros, so that it does what the others do, and sends them as padding.
    """

    def __init__(
        self, layer: LinearState, quantizer: Quantizer, recipe: DelayedScaling | None, params: dict[str, Any], fsdp: Any
    ) -> None:
        super().__init__(layer, quantizer, recipe, params, fsdp)
        (parameter,) = self.params
        self.owned = [parameter.shards]
        self._count, self._first = parameter.shards.rows[self.group.rank], parameter.shards.first(self.group.rank)
        groups, *sizes = parameter.sharded_param.shape
        self._transposed = isinstance(layer, ExpertParameters) and layer.transposed
        self._shape = (groups, *(reversed(sizes) if self._transposed else sizes))
        rows = ShardMap((self._shape[1],))
        self.sharding = Sharding(Group(), rows, "mean", max(self._count, 1), recasts=True)

    def matrices(self) -> list[Tensor]:
        rows = self.params[0].rows
        own = rows if self._count else rows.new_zeros(1, *rows.shape[1:])
        return list((own.mT.contiguous() if self._transposed else own).unbind())

    def scales(self) -> list[Tensor | None]:
        if self.delayed is None:
            return [None] * self.sharding.matrices
        groups = self.params[0].shards.total
        first = FORWARD_SLOTS.index("weight") * groups + min(self._first, groups - 1)
        return list(self.layer.forward_scaling.scale[first : first + self.sharding.matrices].split(1))

    def parts_for(self, dims: Collection[int]) -> Sequence[Quantized]:
        return [of_all(self._matrices_for(dims), _stack)]

    def _as_tensor(self, operands: Quantized, dtype: torch.dtype) -> QuantizedTensor:
        rows = self._shape[0] * self._shape[1], self._shape[2]
        stacked = operands.map(lambda o: o._replace(shape=rows, dtype=dtype))
        like = torch.empty(self._shape, device="meta")
        like = like.transpose(1, 2) if self._transposed else like
        tensor = StackedExperts(stacked, self.quantizer, like.shape, dtype, like.stride())
        tensor.gatherer = self
        return tensor
