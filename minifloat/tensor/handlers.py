"""Handlers of PyTorch's operations on a :class:`~minifloat.tensor.QuantizedTensor`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from minifloat.comm.dtensor_ddp import local_rows
from minifloat.operand import Operand
from minifloat.quantizer import DTYPES
from minifloat.tensor.base import (
    READS,
    WRITES,
    Handler,
    assign_all,
    copied,
    count_writes,
    on_values,
    written_by,
)
from minifloat.tensor.quantized_tensor import QuantizedTensor


def _handles(table: dict[Any, Handler], names: str) -> Callable[[Handler], Handler]:
    """Enters a handler, ``(func, args, kwargs) -> result``, for the operations ``aten.name`` of these names."""

    def enter(handler: Handler) -> Handler:
        table.update(dict.fromkeys([getattr(torch.ops.aten, name) for name in names.split()], handler))
        return handler

    return enter


# ---- reads: quantized where the form holds the result exactly ----


@_handles(
    READS,
    "detach alias lift_fresh view _unsafe_view _reshape_alias unsqueeze squeeze t transpose permute as_strided slice "
    "select split split_with_sizes unbind",
)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Asks a meta tensor what the result is a view of; whole rows of whole blocks, in any order, stay quantized."""
    self = args[0]
    shadow = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    views, spec = tree_flatten(func(shadow, *args[1:], **kwargs))
    parts = [self._part(view) for view in views]
    if any(part is None for part in parts):
        return on_values(func, args, kwargs)
    return tree_unflatten(parts, spec)


@_handles(READS, "clone")
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._map(copied) if _keeps_form(args[0], kwargs) else on_values(func, args, kwargs)


@_handles(READS, "_to_copy")
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    t: QuantizedTensor = args[0]
    dtype = kwargs.get("dtype") or t.dtype
    if not _keeps_form(t, kwargs | {"dtype": None}) or not (
        dtype == t.dtype or (dtype in DTYPES and isinstance(t, torch.nn.Parameter))
    ):
        return on_values(func, args, kwargs)
    device, non_blocking = kwargs.get("device") or t.device, kwargs.get("non_blocking", False)

    def move(buffer: Tensor) -> Tensor:
        moved = buffer.to(device, non_blocking=non_blocking, copy=True)
        return moved.pin_memory() if kwargs.get("pin_memory") else moved

    def convert(o: Operand) -> Operand:
        return o._replace(codes=o.codes if o.format.quantized else o.codes.to(dtype), dtype=dtype)

    moved = t._map(move)
    return moved if dtype == t.dtype else moved._like(moved._operands.map(convert))


@_handles(READS, "empty_like")
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a quantized tensor if a device is given (``module.to_empty``), else scratch memory, as of dropout."""
    t, device = args[0], kwargs.get("device")
    if device is None or not _keeps_form(t, kwargs):
        return on_values(func, args, kwargs)
    empty = t._map(lambda buffer: torch.empty_like(buffer, device=device, pin_memory=kwargs.get("pin_memory")))
    empty.scale = t._scale_on(device)
    return empty


@_handles(READS, "zeros_like ones_like full_like rand_like randn_like")
def _new_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes values in high precision; those of this tensor are not read, let alone gathered from other ranks."""
    t = args[0]
    return func(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device), *args[1:], **kwargs)


@_handles(READS, "new_empty new_zeros")
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes zeros of the requested shape, quantized as this tensor; ``new_empty`` too, where any codes will do."""
    t, size = args
    if not _keeps_form(t, kwargs) or len(size) == 0:
        return on_values(func, args, kwargs)
    new = t._zeros(size, kwargs.get("device") or t.device)
    new = new._map(Tensor.pin_memory) if kwargs.get("pin_memory") else new
    new._scratch = True
    new._group, new.source_version = t._group, None  # the amax of zeros needs no all-reduce, which could hang
    return new


@_handles(READS, "is_pinned")
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return all(buffer.is_pinned() for buffer in args[0]._buffers().values())


@_handles(READS, "_pin_memory")
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]._map(Tensor.pin_memory)


def _keeps_form(t: QuantizedTensor, kwargs: dict[str, Any]) -> bool:
    """Whether the keyword arguments of a factory ask for nothing that operands cannot be."""
    layout, memory_format = kwargs.get("layout"), kwargs.get("memory_format")
    return (
        kwargs.get("dtype") in (None, t.dtype)
        and layout in (None, torch.strided)
        and (memory_format in (None, torch.preserve_format) or t.is_contiguous(memory_format=memory_format))
    )


# ---- writes: into the same memory ----

_INITIAL = (torch.ops.aten.fill_, torch.ops.aten.normal_, torch.ops.aten.uniform_)


@_handles(
    WRITES,
    "zero_ fill_ add_ sub_ mul_ div_ addcmul_ addcdiv_ clamp_ clamp_min_ clamp_max_ normal_ uniform_ "
    "_foreach_zero_ _foreach_add_ _foreach_sub_ _foreach_mul_ _foreach_div_ _foreach_addcmul_ _foreach_addcdiv_ "
    "_foreach_clamp_min_ _foreach_clamp_max_ _fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_",
)
def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes on the values, one copy for each tensor however often it is listed, and quantizes those written."""
    values: dict[int, Tensor] = {}

    def value(t: QuantizedTensor) -> Tensor:
        if id(t) not in values:
            values[id(t)] = t._own_values()
        return values[id(t)]

    func(*tree_map_only(QuantizedTensor, value, args), **tree_map_only(QuantizedTensor, value, kwargs))
    written = {id(t): t for t in written_by(func, args, kwargs) if isinstance(t, QuantizedTensor)}
    gain = args[1] if func.overloadpacket is torch.ops.aten.mul_ else 0
    initial = func.overloadpacket in _INITIAL or (isinstance(gain, float | int) and abs(gain) > 1)  # of orthogonal_
    assign_all(list(written.values()), [values[each] for each in written], fits=initial)
    for t in written.values():
        t.source_version = None
    if not isinstance(args[0], Tensor):
        count_writes(written.values())
    return args[0] if func._schema.returns else None


def _check_averages(tensors: Iterable[Tensor]) -> None:
    """Refuses codes, of whose way to the other values each step is below half a step of theirs."""
    for t in map(local_rows, tensors):
        if isinstance(t, QuantizedTensor) and t._operands.any.format.quantized:
            raise ValueError(
                f"{t._whose} would round a moving average's small updates away: average in high precision, after "
                "dequantize_weights(averaged_model), from minifloat.convert import dequantize_weights"
            )


@_handles(WRITES, "lerp_ _foreach_lerp_")
def _average(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_averages(written_by(func, args, kwargs))
    return _in_place(func, args, kwargs)


_update = AveragedModel.update_parameters


@functools.wraps(_update)
def _update_parameters(self: AveragedModel, model: nn.Module) -> None:
    _check_averages(self.parameters())
    _update(self, model)


AveragedModel.update_parameters = _update_parameters  # type: ignore[method-assign] # it writes by copy_, too


@_handles(WRITES, "copy_")
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assign_all([args[0]], [args[1]], fits=True)
    return args[0]


@_handles(WRITES, "_foreach_copy_")
def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pairs = list(zip(*args[:2], strict=True))
    quantized = [(target, source) for target, source in pairs if isinstance(target, QuantizedTensor)]
    assign_all([target for target, _ in quantized], [source for _, source in quantized], fits=True)
    count_writes([target for target, _ in quantized])
    for target, source in pairs:
        if not isinstance(target, QuantizedTensor):
            target.copy_(source)


@_handles(WRITES, "record_stream")
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for buffer in args[0]._buffers().values():
        buffer.record_stream(args[1])
