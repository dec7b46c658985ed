"""Handlers of PyTorch's operations on a :class:`~minifloat.tensor.QuantizedTensor`, and traced code.

Dynamo builds no subclass of tensors, and of one that it has computed it reads tensors and constants alone. So operands
go through the graph as plain tensors, and :func:`wrap_traced` is one node of it, which AOTAutograd runs and Dynamo does
not look into. Formats go in as strings and come out of a quantizer that the caller has: they are not parsed in traced
code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from minifloat.comm.group import Group
from minifloat.comm.sharded_cast import reduce_amaxes
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import DTYPES, Amaxes, Quantizer, as_matrix, cast_all, find_amaxes
from minifloat.tensor import operand_ops
from minifloat.tensor.base import (
    READS,
    WRITES,
    Handler,
    assign_all,
    copied,
    count_writes,
    matrix_shape,
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
    return moved if dtype == t.dtype else moved._like(operand_ops.each(moved._operands, convert))


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
    assign_all(list(written.values()), [values[each] for each in written])
    for t in written.values():
        t.source_version = None
    if not isinstance(args[0], Tensor):
        count_writes(written.values())
    return args[0] if func._schema.returns else None


@_handles(WRITES, "lerp_ _foreach_lerp_")
def _average(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Refuses codes, of whose way to the other values each step is below half a step of theirs."""
    for t in written_by(func, args, kwargs):
        if isinstance(t, QuantizedTensor) and t._operands.any.format.quantized:
            raise ValueError(
                f"{t._whose} would round a moving average's small updates away: average in high precision, after "
                "dequantize_weights(averaged_model), from minifloat.convert import dequantize_weights"
            )
    return _in_place(func, args, kwargs)


@_handles(WRITES, "copy_")
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assign_all([args[0]], [args[1]])
    return args[0]


@_handles(WRITES, "_foreach_copy_")
def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pairs = list(zip(*args[:2], strict=True))
    quantized = [(target, source) for target, source in pairs if isinstance(target, QuantizedTensor)]
    assign_all([target for target, _ in quantized], [source for _, source in quantized])
    count_writes([target for target, _ in quantized])
    for target, source in pairs:
        if not isinstance(target, QuantizedTensor):
            target.copy_(source)


@_handles(WRITES, "record_stream")
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for buffer in args[0]._buffers().values():
        buffer.record_stream(args[1])


# ---- in traced code ----


class _Wrapped(torch.autograd.Function):
    """Wraps operands as a quantized tensor that has the gradient of ``values``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, description: tuple[Any, ...], label: str, *inner: Tensor) -> Tensor:
        ctx.inner = len(inner)
        *description, names, group = description  # type: ignore[assignment]
        buffers = dict(zip(names, inner, strict=True))
        quantizer, operands = operand_ops.restore(tuple(description), buffers, matrix_shape(values.shape))
        result = QuantizedTensor.from_operands(
            operands, quantizer, values.shape, values.dtype, scale=buffers.get("scale")
        )
        result.made_by, result._group = label, group
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, *[None] * ctx.inner


def _wrapped(values: Tensor, description: tuple[Any, ...], label: str, *inner: Tensor) -> Tensor:
    result: Tensor = _Wrapped.apply(values, description, label, *inner)  # type: ignore[no-untyped-call]
    return result


def allow_in_graph() -> None:
    """Makes :func:`wrap_traced` known to Dynamo; the compiler calls this, and does not trace it."""
    torch.compiler.allow_in_graph(_wrapped)


allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


def wrap_traced(
    values: Tensor, operands: Quantized, quantizer: Quantizer, scale: Tensor | None = None, label: str = "",
    group: str | None = None,
) -> Any:  # fmt: skip
    """Makes a tensor of operands in traced code, of the shape, dtype and gradient of ``values``.

    Args:
        label: of the layer that computes it, for errors.
        group: the name of the ranks that it reduces its amax over.
    """
    allow_in_graph()
    description = operand_ops.describe(quantizer, operands, operands.any.shape)
    named = operand_ops.buffers(operands) | ({} if scale is None else {"scale": scale})
    return _wrapped(values, (*description, tuple(named), group), label, *named.values())


def quantize_traced(
    x: Tensor, quantizer: Quantizer, scale: Tensor | None, amax_group: dist.ProcessGroup | None, amaxes: Amaxes | None
) -> Any:
    """Quantizes as ``minifloat.tensor.quantize`` in traced code; no gradient flows back to ``x``."""
    values = (x.dequantize() if isinstance(x, QuantizedTensor) else x).detach()
    matrix, group = as_matrix(values), Group.of(amax_group)
    if amaxes is None and amax_group is not None:
        (amaxes,) = reduce_amaxes(find_amaxes([matrix], [quantizer]), [quantizer], group)
    operands = cast_all([matrix], [quantizer], None if amaxes is None else [amaxes], scales=[scale])[0]
    if not quantizer.quantized:  # whose codes are the values
        operands = operand_ops.each(operands, lambda o: o._replace(codes=o.codes.clone()))
    return wrap_traced(values, operands, quantizer, scale, "quantize", None if amax_group is None else group.name)


def reuse_traced(x: QuantizedTensor, quantizer: Quantizer) -> Quantized | None:
    """Returns operands in traced code if they are what ``quantizer`` would give, else None."""
    if not x.holds_own_matrix:
        return None
    held, shared = x.held
    shape = matrix_shape(x.shape)
    found: dict[str, Operand | None] = {"rowwise": None, "columnwise": None}
    for slot, spec, dim, names in held:
        for fmt in (quantizer.row_format, quantizer.format(COLUMNWISE)):
            if fmt.spec == spec and found[slot] is None:
                own = {name: getattr(x, f"{slot}_{name}") for name in names}
                found[slot] = Operand(own["codes"], own.get("scale_inv"), own.get("amax"), fmt, dim, shape, x.dtype)
    operands = Quantized(found["rowwise"], found["rowwise"] if shared else found["columnwise"])
    for dim, wanted in ((ROWWISE, quantizer.rowwise), (COLUMNWISE, quantizer.columnwise)):
        fits = [o for o in operands if o is not None and o.serves(dim) and o.format.spec == quantizer.format(dim).spec]
        if wanted and not fits:
            return None
    return operands
