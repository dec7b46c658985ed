"""Any rectangle of a tensor as ``torch.distributed.checkpoint`` (DCP) saves and loads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.tensor import operand_ops
from minifloat.tensor.saved_rows import saved_chunk, write_item

_aten = torch.ops.aten
_NO_MEMORY = (
    "a rank's shard of a tensor has no memory of the whole, and is saved and loaded by torch.distributed.checkpoint "
    "alone; compute with its .local"
)
_COPIES = (_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.empty_like.default)


class SavedShard(torch.Tensor):
    """What this rank has of a tensor: ``local``, from ``offsets`` on, in its memory; maybe nothing.

    Shape, dtype and device are those of the whole, which a DTensor would be if its placements could say how it is cut.
    It computes nothing: DCP asks it for what is saved and loaded, and copies it.
    """

    local: Tensor
    offsets: tuple[int, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> SavedShard:
        """The part of a tensor of ``shape`` that begins at ``offsets``, one for each dim."""
        self: SavedShard = torch.Tensor._make_wrapper_subclass(
            SavedShard, tuple(shape), dtype=local.dtype, device=local.device
        )
        operand_ops.refuse_data_pointer(self, _NO_MEMORY)
        self.local, self.offsets = local, tuple(offsets)
        return self

    def data_ptr(self) -> int:
        """0, by which PyTorch's Python code knows a tensor without memory of its own."""
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SavedShard({tuple(self.shape)}, local={tuple(self.local.shape)} at {self.offsets}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        whole, options = args[0], kwargs or {}
        if func in _COPIES:
            return SavedShard.of(func(whole.local, *args[1:], **options), whole.offsets, whole.shape)
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(whole.shape):  # of DCP's stager
            return SavedShard.of(func(whole.local, whole.local.shape, **options), whole.offsets, whole.shape)
        raise TypeError(f"{func}: {_NO_MEMORY}")

    # ---- torch.distributed.checkpoint ----

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        """What this rank saves."""
        return [write_item(fqn, whole, chunk) for chunk in self._chunks()]

    def __create_chunk_list__(self) -> list[Any]:
        """What this rank loads: a write, which a rank without rows must notice as the others do."""
        if not self.local.is_inference():
            torch.autograd.graph.increment_version(self.local)
        return self._chunks()

    def _chunks(self) -> list[Any]:
        first_of_none = self.shape.numel() == 0 and not any(self.offsets)  # for the key to be there
        return [saved_chunk(self.offsets, self.local.shape)] if self.local.numel() or first_of_none else []

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The memory that is read and written."""
        return self.local


torch.serialization.add_safe_globals([SavedShard])
