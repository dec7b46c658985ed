"""The state of sharded models and their optimizers as rectangles, for ``torch.distributed.checkpoint`` (DCP).

A checkpoint says of each tensor what the whole is, so it can be loaded on any number of ranks, and on one:

    state = sharded_state_dict(model)                  # on every rank
    dcp.save(state, checkpoint_id="...")

    state = sharded_state_dict(other)                  # the same model, sharded over other ranks or not at all
    dcp.load(state, checkpoint_id="...")
    load_sharded_state_dict(other, state)

What a rank has of a tensor is a rectangle of the whole, :class:`SavedShard`, under tensor parallelism, extended tensor
parallelism (``etp_group``), expert parallelism (``ep_group``) and :func:`~minifloat.distributed.fully_shard` alike. So
what one of them saves the others load, on any number of ranks. Separate experts have keys that other ranks lack.

Keys are those of ``state_dict()``. Only a parameter that is made of several, each of which is cut by itself (query, key
and value of ``fuse_qkv_params``; gate and up of a gated MLP), has an entry for each of these, as in
``qkv.weight.query``, since a rank has no one rectangle of it. Unsharded models have the same keys. Histories of delayed
scaling of experts are [..., slots, E] there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from minifloat.arguments import checked
from minifloat.comm.dtensor_ddp import local_rows, sharded_like
from minifloat.comm.group import Group
from minifloat.delayed import AmaxHistory, ExpertShare
from minifloat.functional.exchange import Exchange
from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.nn.grouped_linear import GroupedLinear
from minifloat.nn.linear import Linear
from minifloat.nn.multihead_attention import MultiheadAttention
from minifloat.nn.tensor_parallel import etp_weights
from minifloat.tensor import QuantizedTensor, operand_ops
from minifloat.tensor.rows import saved_chunk, write_item


class Entry(NamedTuple):
    """A rectangle of a whole tensor: what a rank has of it, all or some rows of one of its tensors.

    Args:
        key: in the state dict.
        rows: which rows of this rank's tensor; None: all.
        offsets, sizes: where the rectangle begins in the whole, and how large it is.
        shape: of the whole.
        cut: other ranks may have other parts.
        experts: as many numbers of each slot, of a history, are an entry's last dim.
    """

    key: str
    rows: slice | None = None
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    cut: bool = False
    experts: int = 0

    def among(self, first: int, count: int) -> Entry:
        """The rectangle of experts from number ``first`` on, as one of that of all ``count``, the first dim."""
        offsets, shape = (self.offsets[0] + first, *self.offsets[1:]), (count, *self.shape[1:])
        return self._replace(offsets=offsets, shape=shape, cut=True)

    def of(self, tensor: Tensor) -> Tensor:
        """This entry's part of a rank's tensor, in its memory."""
        tensor = tensor.unflatten(-1, (-1, self.experts)) if self.experts else tensor
        return tensor if self.rows is None else tensor[self.rows]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """A rank's tensor, made of the pieces of all of its entries, of which this is the first."""
        whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        return whole.flatten(-2) if self.experts and whole.dim() == len(self.sizes) else whole

    def saved(self, piece: Tensor) -> Tensor:
        """This rank's piece as what it is a piece of."""
        return SavedShard.of(piece, self.offsets, self.shape) if self.cut else piece

    def local(self, value: Tensor) -> Tensor:
        """This rank's piece, from the same rectangle or from the whole.

        Raises:
            ValueError: it is another rectangle, or the whole has another size.
        """
        if isinstance(value, SavedShard):
            if (value.offsets, value.shape, value.local.shape) != (self.offsets, self.shape, self.sizes):
                raise ValueError(
                    f"load_sharded_state_dict: {self.key} is {value}, and this rank has {self.sizes} of {self.shape} "
                    f"at {self.offsets}; load the checkpoint into the model's own sharded_state_dict"
                )
            return value.local
        value = value.full_tensor() if isinstance(value, DTensor) else value  # of a file of earlier versions
        if not self.cut:  # perhaps a history of another length
            return value
        if value.shape != self.shape:
            raise ValueError(
                f"load_sharded_state_dict: {self.key} is {tuple(value.shape)} and {self.shape} is needed, "
                f"of which this rank takes {self.sizes} from {self.offsets} on"
            )
        for dim, (offset, length) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            value = value.narrow(dim, offset, length)
        return value


Share = tuple[int, int, slice]
"""A dim of a tensor-parallel piece, its length there, and the range of it that this rank has."""


class Layout:
    """Cuts of a model's tensors."""

    def __init__(self, model: nn.Module) -> None:
        self.group = _tensor_parallel_group(model)
        self.fused = _fused_parameters(model)
        self.shares: dict[Tensor, Share] = {}  # rows that this rank has of tensor-parallel pieces with ``etp_group``
        self.experts: dict[Tensor, tuple[int, int]] = {}  # the first of a rank's experts, and how many all ranks have
        self.histories: dict[Tensor, ExpertShare] = {}
        for weight in etp_weights(model):
            for parameter, extent in zip(weight.rows.parameters(), weight.rows.extents().values(), strict=True):
                self.shares[parameter] = parameter.ndim - 2, *extent
        for module in model.modules():
            if isinstance(module, GroupedLinear) and module.ep_group.size > 1:
                own = module.first_expert, module.num_experts
                self.experts |= dict.fromkeys(module.parameters(recurse=False), own)
            elif isinstance(module, AmaxHistory) and module.share is not None:
                self.histories |= dict.fromkeys(module.buffers(), module.share)

    def of(self, key: str, tensor: Tensor) -> list[Entry]:
        """Lists the entries of a parameter or buffer, which says itself how it is cut."""
        sharded = getattr(tensor, "tensor_model_parallel", False)
        dim: int | None = tensor.partition_dim if sharded else None  # type: ignore[attr-defined]
        size, lengths = (self.group.size, tensor.partition_parts) if sharded else (1, (0,))  # type: ignore[attr-defined]
        share = _fsdp_share(key, tensor) if isinstance(tensor, DTensor) else self.shares.get(tensor)
        own, parts = tuple(local_rows(tensor).shape), self.fused.get(key)
        if tensor in self.histories:
            return [self._history(key, own, self.histories[tensor])]
        if parts is None and len(lengths) == 1:
            entry = self._entry(key, None, own, dim, lengths[0], share)
            return [entry if tensor not in self.experts else entry.among(*self.experts[tensor])]
        parts = parts or {str(i): length // size for i, length in enumerate(lengths)}
        entries = []
        for (name, length), end in zip(parts.items(), accumulate(parts.values()), strict=True):
            rows, part = slice(end - length, end), None
            if share is not None:  # the rows of this part that the rank has, counted in its tensor and in the part
                held = share[2]
                first, last = (min(max(row, rows.start), rows.stop) for row in (held.start, held.stop))
                part = 0, length, slice(first - rows.start, last - rows.start)
                rows = slice(first - held.start, last - held.start) if last > first else slice(0, 0)
            sizes = rows.stop - rows.start, *own[1:]
            entries.append(self._entry(f"{key}.{name}", rows, sizes, dim, length * size, part))
        return entries

    def _history(self, key: str, own: tuple[int, ...], share: ExpertShare) -> Entry:
        """Views a history [..., slots G] as [..., slots, G], a rectangle of that of all experts."""
        sizes = *own[:-1], own[-1] // share.own, share.own
        offsets = *[0] * len(own), share.first
        return Entry(key, None, offsets, sizes, (*sizes[:-1], share.all), share.own < share.all, share.own)

    def _entry(
        self, key: str, rows: slice | None, sizes: tuple[int, ...], dim: int | None, extent: int, share: Share | None
    ) -> Entry:
        """Finds the rectangle of a ``share`` of a tensor-parallel piece along ``dim``, ``extent`` in full."""
        offsets, shape = [0] * len(sizes), list(sizes)
        if share is not None:
            shape[share[0]], offsets[share[0]] = share[1], share[2].start
        if dim is not None:
            most = -(-extent // self.group.size)  # the last rank of a vocabulary may have fewer
            offsets[dim] += min(self.group.rank * most, extent)
            shape[dim] = extent
        cut = share is not None or (dim is not None and self.group.size > 1)
        return Entry(key, rows, tuple(offsets), sizes, tuple(shape), cut)


def _fsdp_share(key: str, sharded: DTensor) -> Share:
    """Finds the rows that this rank has of a parameter that FSDP2 shards."""
    sizes, offsets = compute_local_shape_and_global_offset(sharded.shape, sharded.device_mesh, sharded.placements)
    if sizes[1:] != sharded.shape[1:]:
        raise ValueError(
            f"sharded_state_dict: {key} is a DTensor of {sharded.placements}; a model that fully_shard shards by rows "
            "is needed, or torch.distributed.checkpoint.state_dict.get_model_state_dict"
        )
    return 0, sharded.shape[0], slice(offsets[0], offsets[0] + sizes[0])


def _tensor_parallel_group(model: nn.Module) -> Group:
    """Finds the group that the model's layers are sharded over; of one rank if they are not."""
    found: dict[Group, str] = {}
    for name, module in model.named_modules():
        exchange = getattr(module, "_exchange", None)
        if isinstance(exchange, Exchange) and exchange.group.size > 1:
            found.setdefault(exchange.group, name)
    if len(found) > 1:
        raise ValueError(f"sharded_state_dict: {' and '.join(found.values())} are sharded over different groups")
    return next(iter(found), Group())


def _fused_parameters(model: nn.Module) -> dict[str, dict[str, int]]:
    """Lists parameters made of several, by their keys, with the rows of each part on this rank."""
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
    """Shard of a tensor for DCP: ``local``, from ``offsets`` on, in its memory; maybe nothing.

    Shape, dtype and device are those of the whole. A DTensor's placements could not say how it is cut, into ranges of
    rows of tensor-parallel pieces. It computes nothing: DCP asks it for what is saved and loaded, and copies it.
    """

    local: Tensor
    offsets: tuple[int, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(local: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> SavedShard:
        """Makes the part of a tensor of ``shape`` that begins at ``offsets``, one for each dim."""
        self: SavedShard = torch.Tensor._make_wrapper_subclass(
            SavedShard, tuple(shape), dtype=local.dtype, device=local.device
        )
        operand_ops.refuse_data_pointer(self, _NO_MEMORY)
        self.local, self.offsets = local, tuple(offsets)
        return self

    def data_ptr(self) -> int:
        """Returns 0, by which PyTorch's Python code knows a tensor without memory of its own."""
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
        """Lists what this rank saves."""
        return [write_item(fqn, whole, chunk) for chunk in self._chunks()]

    def __create_chunk_list__(self) -> list[Any]:
        """Lists what this rank loads: a write, which a rank without rows must notice as the others do."""
        if not self.local.is_inference():
            torch.autograd.graph.increment_version(self.local)
        return self._chunks()

    def _chunks(self) -> list[Any]:
        first_of_none = self.shape.numel() == 0 and not any(self.offsets)  # for the key to be there
        return [saved_chunk(self.offsets, self.local.shape)] if self.local.numel() or first_of_none else []

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Returns the memory that is read and written."""
        return self.local


torch.serialization.add_safe_globals([SavedShard])


@checked
def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns ``model.state_dict()`` with a :class:`SavedShard` for each sharded tensor.

    Replicated tensors are plain. Entries share the model's memory, so loading into them loads the model, except for
    delayed scaling's histories of another length and for quantized parameters, which :func:`load_sharded_state_dict`
    handles. A quantized parameter's entry is a copy, dequantized in its dtype, and is cast again when it is loaded. A
    checkpoint's histories can be loaded once layers have theirs, from their first step or from ``prepare`` on.

    Raises:
        ValueError: layers are sharded over different groups; a parameter is a DTensor of columns; ranks do not share
            the amaxes of delayed scaling, so that there is no one history to save.
    """
    _check_histories(model)
    layout = Layout(model)
    state: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        own = local_rows(value)
        values = (own.dequantize() if isinstance(own, QuantizedTensor) else own).detach()
        state |= {entry.key: entry.saved(entry.of(values)) for entry in layout.of(key, value)}
    return state


def _check_histories(model: nn.Module) -> None:
    for name, module in model.named_modules():
        latest = module._configs.latest if isinstance(module, Linear) else None
        delayed = None if latest is None else latest.config.delayed
        if delayed is None or delayed.reduce_amax or module._exchange.group.size == 1:
            continue
        raise ValueError(
            f"sharded_state_dict: {name} has histories of its own on each rank (reduce_amax=False), which one "
            "checkpoint cannot hold; train with reduce_amax=True"
        )


@checked
def load_sharded_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Loads the state of :func:`sharded_state_dict` into the model, by ``load_state_dict``.

    An entry may also be a full plain tensor, as in an unsharded model's ``sharded_state_dict``.

    Returns:
        What ``load_state_dict`` returns.

    Raises:
        RuntimeError: with ``strict``, keys that are missing or unknown; sizes that differ.
        ValueError: an entry has another size than that of the model.
    """
    layout, left, local = Layout(model), dict(state), {}
    for key, value in model.state_dict(keep_vars=True).items():
        entries = layout.of(key, value) if isinstance(value, Tensor) else []
        pieces = [each.local(left.pop(each.key)) for each in entries if each.key in left]
        if pieces and len(pieces) == len(entries):
            local[key] = sharded_like(value, entries[0].joined(pieces))
    return model.load_state_dict(local | left, strict)  # for what is left the model may have no place yet


@checked
def sharded_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns a PyTorch optimizer's state in the same form: ``state.<name>.<parameter's key>`` and ``param_groups``.

    State of the size of its parameter is split like it; a number is equal on all ranks. An optimizer that has not
    stepped gets its state by a step with a learning rate and gradients of 0.

    Raises:
        ValueError: some state has neither the size of its parameter nor is a number; a parameter is quantized.
    """
    _init_optimizer_state(optimizer)
    tensors = _optimizer_tensors(model, optimizer)
    state: dict[str, Any] = {key: entry.saved(value.detach()) for key, entry, value in tensors}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return state | {"param_groups": groups}


@checked
def load_sharded_optimizer_state_dict(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the state of :func:`sharded_optimizer_state_dict` into the optimizer.

    Raises:
        KeyError: something is missing.
        ValueError: an entry has another size than that of the optimizer.
    """
    _init_optimizer_state(optimizer)
    with torch.no_grad():
        for key, entry, value in _optimizer_tensors(model, optimizer):
            value.copy_(entry.local(state[key]))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update(saved)


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Entry, Tensor]]:
    """Lists keys, rectangles and this rank's tensors of them, in the model's order."""
    layout = Layout(model)
    for key, parameter in model.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape != parameter.shape and value.numel() != 1:
                raise ValueError(
                    f"sharded_optimizer_state_dict: {name} of {key} is {tuple(value.shape)} and the parameter "
                    f"{tuple(parameter.shape)}; there is no rule for how it is cut"
                )
            for entry in layout.of(key, parameter) if value.shape == parameter.shape else [Entry(key)]:
                yield f"state.{name}.{entry.key}", entry, entry.of(local_rows(value))


def _init_optimizer_state(optimizer: Optimizer) -> None:
    """Gives the optimizer the state of new parameters, whose values stay as they are.

    Raises:
        ValueError: a parameter is quantized: a step would cast it again, and the state is that of master weights.
    """
    if any(isinstance(local_rows(p), QuantizedTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "sharded_optimizer_state_dict: the optimizer has quantized parameters; parameters in high precision are "
            "needed"
        )
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    grads, rates = [p.grad for p in parameters], [group["lr"] for group in optimizer.param_groups]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
