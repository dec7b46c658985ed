"""How the parameters of a model are cut over ranks: tensor-parallel pieces, their fused parts, rows of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from minifloat.comm.group import Group
from minifloat.comm.pytorch import placed
from minifloat.functional.exchange import Local
from minifloat.nn.etp import etp_weights
from minifloat.nn.layernorm_linear import LayerNormLinear
from minifloat.nn.layernorm_mlp import LayerNormMLP
from minifloat.nn.linear import Linear
from minifloat.nn.multihead_attention import MultiheadAttention
from minifloat.tensor import operand_ops
from minifloat.tensor.rows import saved_chunk, write_item


class Entry(NamedTuple):
    """Rows of a tensor that are an entry of their own, or all of it.

    Args:
        key: in the state dict.
        rows: which rows of this rank's tensor; None: it is all one.
        dim: what tensor-parallel ranks have pieces along; None: each has the whole.
        extent: of the whole along ``dim``.
        etp: of a weight with ``etp_group`` how many rows the tensor-parallel piece has, and which of them are ``rows``.
    """

    key: str
    rows: slice | None = None
    dim: int | None = None
    extent: int = 0
    etp: tuple[int, slice] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This entry's part of a rank's tensor, in its memory."""
        return tensor if self.rows is None else tensor[self.rows]

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The same of a shape."""
        return tuple(shape) if self.rows is None else (self.rows.stop - self.rows.start, *shape[1:])


class Layout:
    """How a model's tensors are cut, and their pieces as DTensors."""

    def __init__(self, model: nn.Module) -> None:
        self.group = _tensor_parallel_group(model)
        self.fused = _fused_parameters(model)
        self.etp = _etp_extents(model)
        self._meshes: dict[str, DeviceMesh] = {}

    def of(self, key: str, tensor: Tensor) -> list[Entry]:
        """The entries of a parameter or buffer, which says itself how it is cut."""
        if isinstance(tensor, DTensor):
            raise ValueError(f"sharded_state_dict: {key} is a DTensor; use it on a model without fully_shard")
        sharded = getattr(tensor, "tensor_model_parallel", False)
        dim: int | None = tensor.partition_dim if sharded else None  # type: ignore[attr-defined]
        size, lengths = (self.group.size, tensor.partition_parts) if sharded else (1, (0,))  # type: ignore[attr-defined]
        rows, extent = self.fused.get(key), self.etp.get(tensor)
        if rows is None and len(lengths) == 1:
            return [Entry(key, None, dim, lengths[0], extent)]
        rows = rows or {str(i): length // size for i, length in enumerate(lengths)}
        ends = accumulate(rows.values())
        return [
            _fused_entry(f"{key}.{name}", slice(end - length, end), dim, length * size, extent)
            for end, (name, length) in zip(ends, rows.items(), strict=True)
        ]

    def saved(self, entry: Entry, piece: Tensor) -> Tensor:
        """This rank's piece as what it is a piece of."""
        if entry.etp is not None:
            return SavedShard.of(piece, *self._place(entry, piece.shape))
        if self.group.size == 1:
            return piece
        device = "cpu" if piece.is_meta else piece.device.type
        if device not in self._meshes:
            self._meshes[device] = DeviceMesh.from_group(self.group.process_group, device)
        shape = [entry.extent if dim == entry.dim else extent for dim, extent in enumerate(piece.shape)]
        return placed(piece, self._meshes[device], [Replicate() if entry.dim is None else Shard(entry.dim)], shape)

    def _place(self, entry: Entry, own: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of rows with ``etp_group`` of shape ``own`` the offsets, and the shape of the whole."""
        assert entry.etp is not None
        offsets, shape = [0] * len(own), list(own)
        shape[-2], offsets[-2] = entry.etp[0], entry.etp[1].start
        if entry.dim is not None:
            most = -(-entry.extent // self.group.size)  # the last rank of a vocabulary may have fewer
            offsets[entry.dim] += min(self.group.rank * most, entry.extent)
            shape[entry.dim] = entry.extent
        return tuple(offsets), tuple(shape)

    def local(self, entry: Entry, value: Tensor, shape: Sequence[int]) -> Tensor:
        """This rank's piece of an entry, from the same shards or from the whole; ``shape``: of this rank's tensor.

        Raises:
            ValueError: the shards are others, or the whole has another number of rows.
        """
        if isinstance(value, SavedShard):
            own = entry.shape_of(shape)
            if entry.etp is None or (value.offsets, value.shape, value.local.shape) != (*self._place(entry, own), own):
                raise self._other_shards(entry, str(value))
            return value.local
        if isinstance(value, DTensor):
            if value.device_mesh.size() != self.group.size or entry.etp is not None:
                raise self._other_shards(entry, f"sharded over {value.device_mesh.size()} ranks")
            return value.to_local()
        whole = value if entry.dim is None else value.chunk(self.group.size, entry.dim)[self.group.rank]
        if entry.etp is None:
            return whole
        if whole.ndim < 2 or whole.shape[-2] != entry.etp[0]:
            raise ValueError(
                f"load_sharded_state_dict: {entry.key} is {tuple(value.shape)}; {entry.etp[0]} rows on each "
                f"tensor-parallel rank are needed, of which this rank takes {entry.etp[1].start} to {entry.etp[1].stop}"
            )
        return whole[..., entry.etp[1], :]

    def _other_shards(self, entry: Entry, found: str) -> ValueError:
        rows = "" if entry.etp is None else f", with rows {entry.etp[1].start} to {entry.etp[1].stop} of etp_group here"
        return ValueError(
            f"load_sharded_state_dict: {entry.key} is {found} and the model over {self.group.size}{rows}; load the "
            "checkpoint into the model's own sharded_state_dict"
        )


def _fused_entry(key: str, part: slice, dim: int | None, extent: int, etp: tuple[int, slice] | None) -> Entry:
    """The rows ``part`` of a parameter on this rank, before ``etp_group`` shares them out."""
    if etp is None:
        return Entry(key, part, dim, extent)
    own = etp[1]
    begin, end = (min(max(row, part.start), part.stop) for row in (own.start, own.stop))
    first = max(begin - own.start, 0) if end > begin else 0
    rows = slice(first, first + end - begin)
    return Entry(key, rows, dim, extent, (part.stop - part.start, slice(begin - part.start, end - part.start)))


def _etp_extents(model: nn.Module) -> dict[Tensor, tuple[int, slice]]:
    """Of weights with ``etp_group``: the rows of the tensor-parallel piece, and which of them this rank has."""
    found: dict[Tensor, tuple[int, slice]] = {}
    for weight in etp_weights(model):
        found |= zip(weight.rows.parameters(), weight.rows.extents().values(), strict=True)
    return found


def _tensor_parallel_group(model: nn.Module) -> Group:
    """The one that the model's layers are sharded over; of one rank if they are not."""
    found: dict[Group, str] = {}
    for name, module in model.named_modules():
        exchange = getattr(module, "_exchange", None)
        if isinstance(exchange, Local) and exchange.group.size > 1:
            found.setdefault(exchange.group, name)
    if len(found) > 1:
        raise ValueError(f"sharded_state_dict: {' and '.join(found.values())} are sharded over different groups")
    return next(iter(found), Group())


def _fused_parameters(model: nn.Module) -> dict[str, dict[str, int]]:
    """Of parameters made of several, by their keys: the rows of each part on this rank."""
    return {
        f"{name}.{linear}.{kind}".lstrip("."): rows
        for name, module in model.named_modules()
        for linear, rows in _fused_linears(module)
        for kind in ("weight", "bias")
    }


def _fused_linears(module: nn.Module) -> Iterator[tuple[str, dict[str, int]]]:
    if isinstance(module, LayerNormMLP) and module.activation.gated:
        half = module.fc1.out_features // 2
        yield "fc1", {"gate": half, "up": half}
    elif isinstance(module, MultiheadAttention):
        both = {"key": module.groups * module.channels, "value": module.groups * module.channels}
        own = module.attention_type == "self"
        part = "qkv" if own else "key_value"
        linear = getattr(module, part)
        path, linear = (f"{part}.linear", linear.linear) if isinstance(linear, LayerNormLinear) else (part, linear)
        if isinstance(linear, Linear) and linear.parameters_split is None:
            yield path, {"query": module.heads * module.channels} | both if own else both


# ---- what torch.distributed.checkpoint saves and loads ----


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
