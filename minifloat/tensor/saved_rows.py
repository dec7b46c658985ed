"""Rows of a quantized tensor as ``torch.distributed.checkpoint`` (DCP) saves and loads them: codes, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.operand import Operand, Quantized
from minifloat.tensor import operand_ops
from minifloat.tensor.quantized_tensor import QuantizedTensor


class SavedRows(QuantizedTensor):
    """A range of rows of ``source``, in its memory, into which codes are copied range by range.

    A range of rows of a :class:`QuantizedTensor` refuses codes of another scale where it is one scale for the tensor.
    These take them: a checkpoint has the rest of the rows in the same scale, and DCP sees to it that all are loaded.
    """

    source: QuantizedTensor
    first: int  # row of the operands of the source
    whole: bool  # all rows of the parameter, which may then take values, too

    @staticmethod
    def of(
        source: QuantizedTensor,
        operands: Quantized,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        *,
        first: int = 0,
        whole: bool,
    ) -> SavedRows:
        """``operands``: of the rows from ``first`` on."""
        self = SavedRows(operands, source.quantizer, shape, source.dtype, stride)
        self.source, self.first, self.whole = source, first, whole
        self.scale, self._group = source.scale, source._group
        return self

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        part = super()._part(view)
        if part is None:
            raise self._refusal()  # the checkpoint has other ranges of rows than whole blocks
        rows, cols = self._operands.any.shape
        out = SavedRows.of(
            self.source,
            part._operands,
            part.shape,
            part.stride(),
            first=self.first + (view.storage_offset() // cols if cols else 0),
            whole=self.whole and part._operands.any.shape[0] == rows,
        )
        out._wholes = part._wholes
        return out

    def _as_matrix(self, values: Tensor) -> Tensor:
        if self.whole:
            return super()._as_matrix(values)
        raise self._refusal()

    def _refusal(self) -> ValueError:
        held = self._operands.any
        return ValueError(
            f"codes of another recipe, or values, cannot be loaded into {held.shape[0]} rows of a quantized parameter "
            f"({held.format.spec}), which are not all of it: load the state of MasterWeights, whose masters are "
            "written to parameters of any recipe, or load into parameters in high precision"
        )

    def _store(self, operands: Quantized, noop_flag: Tensor | None = None) -> None:
        super()._store(operand_ops.each(operands, self._with_amax), noop_flag)
        # A rank without rows loads a block for its scale alone; optimizers of all ranks are to notice the write alike.
        torch.autograd.graph.increment_version(self.source._operands.any.codes)

    def _with_amax(self, loaded: Operand) -> Operand:
        """With the amax of all rows that were loaded, where it was measured on these alone: under delayed scaling."""
        if loaded.format.scale_rule != "given" or loaded.amax is None:
            return loaded
        ranges: dict[tuple[int, int], Tensor] = self.source.__dict__.setdefault("_loaded_amaxes", {})
        begin, end = self.first, self.first + loaded.shape[0]
        for other in [each for each in ranges if each[0] < end and begin < each[1]]:
            del ranges[other]
        ranges[begin, end] = loaded.amax.to(self.device)
        return loaded._replace(amax=torch.stack(list(ranges.values())).amax(0))


def _saved(self: QuantizedTensor, index: Any) -> Tensor:
    """What ``torch.distributed.checkpoint`` saves, and loads into, maybe in several ranges of rows."""
    return SavedRows.of(self, self._operands, self.shape, self.stride(), whole=True)


setattr(QuantizedTensor, "__get_tensor_shard__", _saved)  # noqa: B010 - which this module is above


def saved_chunk(offsets: Sequence[int], sizes: Sequence[int]) -> Any:
    """DCP's description of a part of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def write_item(fqn: str, whole: Tensor, chunk: Any) -> Any:
    """DCP's order to save ``chunk`` of ``whole``."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=whole.dtype), size=whole.size())
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)
