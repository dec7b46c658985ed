"""The state dict of a sharded model as that of the unsharded one, with quantized parameters as codes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from minifloat.arguments import Device, checked
from minifloat.comm.collectives import all_reduce_max
from minifloat.comm.pytorch import sharded_like
from minifloat.comm.sharded_cast import gather
from minifloat.nn.linear_state import LinearState
from minifloat.nn.quantized_parameters import bind_scale
from minifloat.operand import Operand
from minifloat.parallel.fsdp.weight import owners
from minifloat.tensor import QuantizedTensor, operand_ops
from minifloat.tensor.rows import QuantizedRows, rows_of


@checked
@torch.no_grad()
def full_state_dict(model: nn.Module, *, device: Device | None = None, only_rank0: bool = False) -> dict[str, Any]:
    """``model.state_dict()`` as the unsharded model has it, for its ``load_state_dict``; a collective.

    Quantized parameters are whole :class:`~minifloat.QuantizedTensor`, with the codes and scales of the shards, bit for
    bit. ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` gives the values that they stand for instead,
    which another cast may round otherwise.

    Args:
        device: where all tensors are put, one by one; None: each stays where the model is.
        only_rank0: the other ranks get an empty dict.
    """
    _check_not_tensor_parallel(model)
    kept = not only_rank0 or dist.get_rank() == 0
    state: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        whole = _unsharded(value) if isinstance(value, DTensor) else value
        if kept:
            state[key] = whole.to(device) if device is not None and isinstance(whole, Tensor) else whole
    return state


@checked
@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], *, strict: bool = True, from_rank0: bool = False
) -> None:
    """Loads what :func:`full_state_dict`, or the unsharded model's ``state_dict()``, gave; a collective.

    Where codes go to a parameter of the same formats they are taken as they are. All else is a cast of the values, with
    amaxes that the ranks reduce: codes of another recipe, or high precision, give those of the unsharded model.

    Args:
        state: on every rank, or with ``from_rank0`` on rank 0, which sends the others one tensor after the other.
        strict: as of ``load_state_dict``.

    Raises:
        RuntimeError: what ``load_state_dict`` raises: keys that are missing or unknown, another shape.
    """
    own = model.state_dict()
    sent_on = next((t.device_mesh.device_type for t in own.values() if isinstance(t, DTensor)), "cpu")
    described = [[(key, v.detach().to("meta") if isinstance(v, Tensor) else v) for key, v in state.items()]]
    if from_rank0:
        dist.broadcast_object_list(described, 0)
    local: dict[str, Any] = {}
    layers = owners(model)
    for key, description in described[0]:
        value, target = state.get(key), own.get(key)
        if from_rank0:
            value = _broadcast_from_rank0(value, description, sent_on)
        fits = isinstance(value, Tensor) and isinstance(target, DTensor) and value.shape == target.shape
        path, _, name = key.rpartition(".")
        layer = layers.get((model.get_submodule(path), name)) if fits else None
        local[key] = _resharded(layer, value, target) if fits else value  # type: ignore[arg-type]
    model.load_state_dict(local, strict)


def _check_not_tensor_parallel(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            raise ValueError(
                f"{name} is tensor-parallel, and its FSDP2 ranks together have one tensor-parallel rank's share of it: "
                "save each share in a folder of its own, dcp.save(state, checkpoint_id=f'{folder}/tp{rank}', "
                "process_group=...) with the group that fully_shard shards over"
            )


def _unsharded(sharded: DTensor) -> Tensor:
    rows = sharded._local_tensor
    if not isinstance(rows, QuantizedRows):
        there: Any = sharded.to(sharded.device_mesh.device_type)  # where offloaded shards are gathered, too
        whole: Tensor = there.full_tensor()
        return whole
    cover, part = rows.cover, rows.part
    assert cover.group is not None
    rowwise, columnwise = (operand is not None for operand in part)
    operands = gather(part, cover.all_owned, cover.group, rowwise=rowwise, columnwise=columnwise)
    return QuantizedTensor.from_operands(
        operand_ops.each(operands, lambda o: _with_reduced_amax(o, cover.group)),
        rows.quantizer,
        sharded.shape,
        rows.dtype,
    )


def _with_reduced_amax(operand: Operand, group: Any) -> Operand:
    """Delayed scaling has measured it on each rank's rows."""
    if operand.format.scale_rule != "given" or operand.amax is None:
        return operand
    return operand._replace(amax=all_reduce_max([operand.amax], group)[0])


def _resharded(layer: tuple[LinearState, Any, str] | None, whole: Tensor, target: DTensor) -> Tensor:
    """A tensor of the model in the way that ``target`` is, the weight of a ``layer`` if it is one."""
    rows = target._local_tensor
    if isinstance(rows, QuantizedRows) and isinstance(whole, QuantizedTensor) and rows.quantizer == whole.quantizer:
        assert rows.cover.group is not None
        return sharded_like(target, rows_of(whole, rows.cover.shards, rows.cover.group).to(rows.device), target.shape)
    values = (whole.dequantize() if isinstance(whole, QuantizedTensor) else whole).to(target.device)
    if not isinstance(rows, QuantizedRows):
        return distribute_tensor(values, target.device_mesh, target.placements, src_data_rank=None)
    if layer is not None:
        bind_scale(layer[0], layer[2], rows, [values])  # a delayed one: that of these values, unsharded, too
    shards, rank = rows.cover.shards, rows.cover.rank
    return sharded_like(target, values[shards.first(rank) : shards.end(rank)], target.shape)


def _broadcast_from_rank0(value: Any, described: Any, device: str) -> Any:
    """What rank 0 has, on all ranks; ``described``: the same, tensors on meta."""
    if not isinstance(described, Tensor):
        return described

    def memory(t: Tensor) -> Tensor:
        return (
            torch.empty_like(t, device=device, memory_format=torch.contiguous_format)
            if t.is_meta
            else (t.detach().to(device).contiguous())
        )

    source = value if dist.get_rank() == 0 else described
    tensor = source._map(memory) if isinstance(source, QuantizedTensor) else memory(source)
    for buffer in tensor._buffers().values() if isinstance(tensor, QuantizedTensor) else (tensor,):
        if buffer.numel():
            dist.broadcast(buffer.view(-1).view(torch.uint8), 0)
    return tensor
