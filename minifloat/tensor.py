"""A tensor that is kept as codes and scales: parameters, and outputs of layers that ask for it.

To PyTorch it is a tensor of its logical shape and dtype. An operation that does not change it gives what it gives on
:meth:`QuantizedTensor.dequantize`, bit for bit, in high precision, unless the quantized form holds the result exactly:
``detach``, ``clone``, ``to(device)``, ``t``, ``view``, rows of whole blocks and the like stay quantized. An in-place
operation computes on the values and quantizes the result into the same memory, or raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minifloat import tensor_ops
from minifloat.arguments import shown
from minifloat.comm.group import Group, group_of_name
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import DTYPES, Amaxes, Quantizer, as_matrix

_INNER = tuple(f"{slot}_{name}" for slot in tensor_ops.SLOTS for name in tensor_ops.BUFFERS)
_SHARED = ("quantizer", "cover")  # what copies refer to as well
_FIELDS = frozenset(
    {"_operands", "_outside", "_wholes", "_group", "_initial", "scale", "source_version", "gatherer"}
    | {*_SHARED, "source", "first", "whole", "_loaded_amaxes"}  # of subclasses
)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    amax_group: dist.ProcessGroup | None = None,
    amaxes: Amaxes | None = None,
) -> QuantizedTensor:
    """``x`` as a new tensor of its shape and dtype that holds codes and scales; no gradient flows back to ``x``.

    Args:
        x: [..., K], bf16, fp16 or fp32. Leading dims are flattened for the operands, [M, K].
        quantizer: formats and orientations, also for every later in-place operation.
        scale: fp32 [1], for delayed scaling. Kept, not copied: later writes cast with what it holds by then.
        amax_group: ranks that hold the other shards, whose amaxes this one's are reduced with, now and later.
        amaxes: what to cast with instead, already agreed on, one a cast (``Quantizer.casts``).

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: another dtype, no dims, a quantizer of no orientation, or delayed scaling without a scale.
    """
    if not (quantizer.rowwise or quantizer.columnwise):
        raise ValueError("the quantizer produces no orientation; use quantizer.with_usage(rowwise=True)")
    with torch.no_grad():
        values = x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()
        operands = tensor_ops.cast([as_matrix(values)], [quantizer], [scale], [amax_group], [amaxes])[0]
        owned = tensor_ops.each(operands, lambda o: o if o.format.quantized else o._replace(codes=copied(o.codes)))
    return QuantizedTensor.from_operands(
        owned, quantizer, x.shape, x.dtype, scale=scale, amax_group=amax_group, source_version=_version(x)
    )


def quantize_all_(
    targets: Sequence[QuantizedTensor],
    sources: Sequence[Tensor],
    *,
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """Quantizes each source into the memory of its target, all of them in one launch a phase.

    The bytes are those of ``target.quantize_(source)`` for each in turn. Amaxes are reduced in one all-reduce for each
    ``amax_group``, whose ranks list their targets in the same order. Sources are cast from their own dtype: a bf16
    parameter takes fp32 master weights in one rounding.

    Args:
        targets: written. None may share memory with another one's source.
        sources: of the targets' shapes, fp32, bf16, fp16 or quantized, on any device.
        amaxes: what to cast with instead, already agreed on, as in :func:`quantize`; None for a target's own.
        noop_flag: fp32 [1] on the targets' device, read there: where it is not 0, codes and scales stay as they are.

    Raises:
        ValueError: the lists differ in length, a source has another shape than its target, or delayed scaling has no
            scale. Nothing has been written then.
        NotImplementedError: a target is a range of rows of a larger tensor, which share a scale that would change.
    """
    if len(targets) != len(sources):
        raise ValueError(f"{len(targets)} tensors cannot take the values of {len(sources)}: pass one source a target")
    for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.shape != target.shape:
            raise ValueError(
                f"a tensor of shape {tuple(target.shape)} cannot take values of shape {tuple(source.shape)}"
                + f" (number {i} of {len(targets)})" * (len(targets) > 1)
            )
    with torch.no_grad():
        assign_all(targets, sources, amaxes, noop_flag)
    count_writes(targets)


def assign_all(
    targets: Sequence[QuantizedTensor],
    sources: Sequence[Tensor],
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
) -> None:
    """As :func:`quantize_all_`, of sources that broadcast, with versions left to the caller."""
    pairs = list(zip(targets, sources, strict=True))
    ready = [s._gathered() if isinstance(s, QuantizedTensor) and t._same_form(s) else None for t, s in pairs]
    missing = [i for i, operands in enumerate(ready) if operands is None]
    values = [s._values() if isinstance(s, QuantizedTensor) else s.detach() for s in (sources[i] for i in missing)]
    fresh = iter(
        _cast_all(
            [targets[i] for i in missing], values, None if amaxes is None else [amaxes[i] for i in missing], noop_flag
        )
    )
    for (target, source), operands in zip(pairs, ready, strict=True):
        target._store(next(fresh) if operands is None else operands, noop_flag)
        target.source_version = _version(source) if noop_flag is None else None  # the device knows whether


def write_all(targets: Sequence[QuantizedTensor], values: Sequence[Tensor]) -> None:
    """Quantizes values of no known source that broadcast to the logical shapes."""
    for target, operands in zip(targets, _cast_all(targets, values), strict=True):
        target._store(operands)
        target.source_version = None


def _cast_all(
    targets: Sequence[QuantizedTensor],
    values: Sequence[Tensor],
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
) -> list[Quantized]:
    """Operands of ``values`` in the form of those that ``targets`` hold."""
    return tensor_ops.cast(
        [target._as_matrix(value) for target, value in zip(targets, values, strict=True)],
        [target.quantizer for target in targets],
        [target.scale for target in targets],
        [target.amax_group for target in targets],
        amaxes or [None] * len(targets),
        noop_flag,
    )


class Gatherer(Protocol):
    """What gathers a tensor from the shards of other ranks, one orientation at a time, as FSDP2's hooks do."""

    def fetch(self, *dims: int) -> None:
        """Sees to it that the operands that serve ``dims`` are there; a collective."""

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """The same for a call of the layer ``label``, which reads what ``quantizer`` gives."""


class QuantizedTensor(torch.Tensor):
    """Operands of one [M, K] matrix, in the shape [..., K] or as a view of it. Made by :func:`quantize`.

    Rows that would break blocks, columns, and other views that the quantized form cannot hold are copies of the values:
    writing to those does not reach this tensor. ``t[index] = value`` does. ``zeros_like`` and the like are in high
    precision, so that an optimizer's state is; ``new_zeros``, ``new_empty`` and, to a device, ``empty_like`` are
    quantized. A change of dtype gives the values, but a parameter (``module.to(dtype)``) stays quantized and changes
    its logical dtype.

    Attributes:
        quantizer: what it was and will be quantized with; its usage is that of the operands.
        scale: fp32 [1], what delayed scaling casts with the next time; else None.
        amax_group: the ranks that it reduces its amax over, or None; set to a process group, or one dim of a mesh. Kept
            by its name, which copies have too and pickles have not.
        source_version: the version of the tensor that it was last quantized from, where that is known.
        gatherer: of a tensor that is gathered from shards, some operands of which may have no memory now; else None.
    """

    _operands: Quantized
    _outside: tuple[Tensor, ...]  # codes of the rows that share a scale with these, for a range of rows; else empty
    _wholes: tuple[Tensor, ...]  # the tensors whose rows these are, for a range of rows; else empty
    _initial: tuple[Tensor, int | None] | None  # the values before the first cast, and the codes' version since it
    _group: str | None  # amax_group by its name, a value like others to what copies and stages tensors
    quantizer: Quantizer
    scale: Tensor | None
    source_version: int | None
    gatherer: Gatherer | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        operands: Quantized,
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> QuantizedTensor:
        self: QuantizedTensor = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=None if stride is None else tuple(stride), dtype=dtype,
            device=operands.any.codes.device,
        )  # fmt: skip
        tensor_ops.refuse_data_pointer(self)
        rowwise, columnwise = operands
        self._operands, self._outside, self._wholes = operands, (), ()
        self.quantizer = quantizer.with_usage(rowwise=rowwise is not None, columnwise=columnwise is not None)
        self.scale = self._group = self._initial = self.source_version = self.gatherer = None
        return self

    @staticmethod
    def from_operands(
        operands: Quantized,
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        scale: Tensor | None = None,
        amax_group: dist.ProcessGroup | None = None,
        source_version: int | None = None,
    ) -> QuantizedTensor:
        """A tensor of operands that exist, which it keeps; see :func:`quantize` for the other arguments.

        Raises:
            ValueError: there is no operand, or ``shape`` is not that of the operands with M split into leading dims.
        """
        if operands.rowwise is None and operands.columnwise is None:
            raise ValueError("there is neither a rowwise nor a columnwise operand to make a tensor of")
        if _matrix_shape(shape) != operands.any.shape:
            raise ValueError(
                f"shape {tuple(shape)} flattens to {_matrix_shape(shape)}, but operands are {operands.any.shape}"
            )
        typed = tensor_ops.each(operands, lambda o: o if o.dtype == dtype else o._replace(dtype=dtype))
        self = QuantizedTensor(typed, quantizer, shape, dtype)
        self.scale, self.amax_group, self.source_version = scale, amax_group, source_version
        return self

    @property
    def amax_group(self) -> dist.ProcessGroup | None:
        """The ranks that it reduces its amax with."""
        return None if self._group is None else group_of_name(self._group)

    @amax_group.setter
    def amax_group(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else Group.of(group).name

    @property
    def holds_own_matrix(self) -> bool:
        """The operands are those of this very matrix, not of one that this is a transposed or reshaped view of."""
        return self.is_contiguous() and _matrix_shape(self.shape) == self._operands.any.shape

    @property
    def operands(self) -> Quantized:
        """The rowwise and columnwise operand, [M, K] each: the same object twice if one serves both, None if dropped.

        Raises:
            ValueError: this is a transposed or reshaped view, whose operands are those of another matrix.
        """
        if not self.holds_own_matrix:
            raise ValueError(
                f"this view of shape {tuple(self.shape)} and stride {self.stride()} has the operands of a matrix of "
                f"{self._operands.any.shape}; quantize its values anew, as in quantize(t.dequantize(), t.quantizer)"
            )
        return self._operands

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values in a tensor of their own, rounded once to ``dtype`` (default: its own). Differentiable."""
        if self.requires_grad and torch.is_grad_enabled():
            values: Tensor = _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-untyped-call]
            return values
        return self._own_values(dtype)

    def _own_values(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self._values(dtype)
        return values if self._operands.any.format.quantized else values.clone()

    def _values(self, dtype: torch.dtype | None = None) -> Tensor:
        """As :meth:`dequantize`, but the identity format gives its very memory."""
        if self.gatherer is not None:
            self.gatherer.fetch(ROWWISE)
        values = self._operands.dequantize(dtype or self.dtype)
        if values.shape == self.shape and self.is_contiguous():
            return values
        return values.contiguous().as_strided(self.shape, self.stride())

    def data_ptr(self) -> int:
        """0, by which PyTorch's Python code knows a tensor without memory of its own; to C++ code it raises."""
        return 0

    def share_memory_(self) -> Self:
        """Moves codes and scales to shared memory, as ``Tensor.share_memory_`` does."""
        for buffer in self._buffers().values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Codes and scales are in shared memory."""
        return all(buffer.is_shared() for buffer in self._buffers().values())

    def quantize_(
        self, src: Tensor, *, amaxes: Amaxes | None = None, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantizes ``src`` into the memory of this tensor; the arguments are those of :func:`quantize_all_`.

        ``src`` is cast from its own dtype: a bf16 parameter takes fp32 master weights in one rounding.

        Raises:
            ValueError: ``src`` has another shape.
            NotImplementedError: this is a range of rows of a larger tensor, which share a scale that would change.
        """
        quantize_all_([self], [src], amaxes=[amaxes], noop_flag=noop_flag)
        return self

    def _as_matrix(self, values: Tensor) -> Tensor:
        """Values that broadcast to the logical shape, as the [M, K] that the operands are of."""
        values = values.to(self.device, values.dtype if values.dtype in DTYPES else self.dtype).expand(self.shape)
        rows, cols = self._operands.any.shape
        if self.is_contiguous():
            return values.reshape(rows, cols)
        matrix = values.new_empty((rows, cols))
        matrix.as_strided(self.shape, self.stride()).copy_(values)
        return matrix

    def _store(self, operands: Quantized, noop_flag: Tensor | None = None) -> None:
        """Writes operands into the memory of these, and into the version of every tensor that it is the memory of.

        A tensor of codes that a forward saved may be one of them, and autograd is to notice. In a dispatch handler
        neither the write counts by itself nor does a view share the version of its base.
        """
        if self.gatherer is not None:
            raise ValueError(
                f"this weight of shape {tuple(self.shape)} is gathered from shards, and what is written to it is lost: "
                "reshard() the module first, and write to the sharded parameter"
            )
        tensor_ops.store(self._operands, operands, self._outside, noop_flag)
        held = tensor_ops.distinct(self._operands).values()
        written = [buffer for operand in held for buffer in tensor_ops.buffers(operand)]
        count_writes(buffer for buffer in (*written, *self._wholes) if not buffer.is_inference())

    def _same_form(self, other: QuantizedTensor) -> bool:
        """The operands of ``other`` can be copied as they are."""
        both = {"rowwise": True, "columnwise": True}
        return (
            self.quantizer.with_usage(**both) == other.quantizer.with_usage(**both)
            and self._operands.any.shape == other._operands.any.shape
            and (self.shape, self.stride()) == (other.shape, other.stride())
            and all(theirs is not None for mine, theirs in zip(self._operands, other._operands, strict=True) if mine)
        )

    def set_high_precision_init_val(self, values: Tensor) -> None:
        """Keeps a copy of ``values`` on the CPU, for master weights to start from."""
        self._initial = values.detach().cpu().clone(), _version(self._operands.any.codes)

    def get_high_precision_init_val(self) -> Tensor | None:
        """The values before the first cast, on the CPU, if they were to be preserved and nothing else was written."""
        if self._initial is None or self._initial[1] != _version(self._operands.any.codes):
            return None
        return self._initial[0]

    def clear_high_precision_init_val(self) -> None:
        """Frees what :meth:`get_high_precision_init_val` gives."""
        self._initial = None

    def update_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drops operands that are not wanted, and fills a place again from the other where one serves both.

        Raises:
            ValueError: a wanted orientation is missing and does not follow from the other, or none would be left.
        """
        wanted = self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        held = self._operands.any
        kept: list[Operand | None] = []
        for slot, usage, fmt in zip(
            tensor_ops.SLOTS,
            (wanted.rowwise, wanted.columnwise),
            (wanted.row_format, wanted.format(COLUMNWISE)),
            strict=True,
        ):
            operand: Operand | None = getattr(self._operands, slot)
            if usage and operand is None and not (fmt.symmetric and held.format == fmt and not wanted.chained):
                raise ValueError(
                    f"the {slot} operand ({fmt.spec}) is missing and does not follow from {held.format.spec}: "
                    f"quantize the source again, as in quantize(source, t.quantizer.with_usage({slot}=True))"
                )
            kept.append((held if operand is None else operand) if usage else None)
        if not any(kept):
            raise ValueError("a tensor keeps at least one orientation: rowwise=True or columnwise=True")
        self._operands, self.quantizer = Quantized(*kept), wanted

    @property
    def data(self) -> Tensor:
        """This tensor without its graph. Values that are assigned are quantized into its memory, not shared with it.

        Raises:
            TypeError: they are no floating-point tensor.
            ValueError: they have another shape, or are on another device.
        """
        alone: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return alone

    @data.setter
    def data(self, values: Tensor) -> None:
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TypeError(f"a QuantizedTensor's data is set to {shown(values)}; a floating-point tensor is needed")
        if values.device != self.device:
            raise ValueError(
                f"a QuantizedTensor on {self.device} cannot take data from {values.device}; move it as in "
                "module.to(device), which moves codes and scales"
            )
        self.quantize_(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.dequantize()
        values[index] = value
        self.copy_(values)

    def __repr__(self) -> str:  # type: ignore[override]
        held = [
            f"{slot}={operand.format.spec}"
            for slot, operand in zip(tensor_ops.SLOTS, self._operands, strict=True)
            if operand
        ]
        where = [f"device={self.device}"] + ["requires_grad=True"] * self.requires_grad
        return f"QuantizedTensor({', '.join([str(tuple(self.shape)), str(self.dtype), *held, *where])})"

    # ---- new tensors from this one ----

    def _like(
        self, operands: Quantized, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
    ) -> QuantizedTensor:
        """Other operands for the same quantizer, scale, group and source."""
        shape, stride = (self.shape, self.stride()) if shape is None else (shape, stride)
        out = QuantizedTensor(operands, self.quantizer, shape, operands.any.dtype, stride)
        out.scale, out._group, out.source_version = self.scale, self._group, self.source_version
        out.gatherer = self.gatherer
        return out

    def _zeros(self, size: Sequence[int], device: Any) -> QuantizedTensor:
        """Zeros of any size, quantized like this tensor."""
        return quantize(
            torch.zeros(size, dtype=self.dtype, device=device), self.quantizer, scale=self._scale_on(device)
        )

    def _scale_on(self, device: Any) -> Tensor | None:
        """The delayed scale on another device; one that has no value yet becomes 1, as in a new history."""
        if self.scale is None or not self.scale.is_meta:
            return None if self.scale is None else self.scale.to(device)
        return torch.ones_like(self.scale, device=device)

    def _gathered(self) -> Quantized:
        """The operands, all of which have their memory."""
        if self.gatherer is not None:
            dims = zip((ROWWISE, COLUMNWISE), self._operands, strict=True)
            self.gatherer.fetch(*[dim for dim, operand in dims if operand])
        return self._operands

    def _map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        out = self._like(tensor_ops.each(self._gathered(), lambda o: tensor_ops.map_buffers(o, function)))
        out.scale = None if self.scale is None else function(self.scale)
        out.gatherer = None
        return out

    def _buffers(self) -> dict[str, Tensor]:
        """Every tensor inside, by the name of its attribute."""
        held = {
            f"{slot}_{name}": getattr(operand, name)
            for slot, operand in tensor_ops.distinct(self._operands).items()
            for name in tensor_ops.BUFFERS
        }
        return {name: buffer for name, buffer in (held | {"scale": self.scale}).items() if buffer is not None}

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        """What ``view`` shows of the values, for a view of a meta tensor like this; None if operands cannot hold it."""
        rows, cols = self._operands.any.shape
        shape, stride, offset, count = view.shape, view.stride(), view.storage_offset(), view.numel()
        if view.dtype != self.dtype or not tensor_ops.is_dense(shape, stride):
            return None
        if count == rows * cols and offset == 0:
            whole = self._like(self._operands, shape, stride)
            whole._outside, whole._wholes = self._outside, self._wholes
            return whole
        if not cols or offset % cols or count % cols:
            return None
        begin, end = offset // cols, (offset + count) // cols
        kept = [operand if operand is None else tensor_ops.cut(operand, begin, end) for operand in self._operands]
        if any(cut is None for cut, operand in zip(kept, self._operands, strict=True) if operand is not None):
            return None
        shared = self._operands.rowwise is self._operands.columnwise
        part = self._like(Quantized(kept[0], kept[0] if shared else kept[1]), shape, stride)
        held = tensor_ops.distinct(self._operands).values()
        others = [tensor_ops.left_out(operand, begin, end) for operand in held]
        part._outside = self._outside + tuple(codes for rest in others for codes in rest if codes.numel())
        part._wholes = self._wholes + tuple(buffer for operand in held for buffer in tensor_ops.buffers(operand))
        return part

    # ---- torch's protocols ----

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():  # a view of an ordinary tensor must be an ordinary one
                return _dispatch(func, args, kwargs or {})
        return _dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self._buffers()), (tensor_ops.describe(self.quantizer, self._operands), self.dtype, self._group)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> QuantizedTensor:
        description, dtype, group = context
        quantizer, operands = tensor_ops.restore(description, inner)
        self = QuantizedTensor(operands, quantizer, outer_size, dtype, outer_stride)
        self.scale = inner.get("scale")
        self._group = group
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        context = tensor_ops.describe(self.quantizer, self._gathered()), self.dtype, None
        others = {name: value for name, value in self.__dict__.items() if name not in _FIELDS}
        if (initial := self.get_high_precision_init_val()) is not None:
            others["_initial"] = initial
        geometry = tuple(self.shape), self.stride()
        return _rebuild, (self._buffers(), context, *geometry, self.requires_grad, others)

    def _set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Those that a pickle of :meth:`__reduce_ex__` has: a user's, and the values before the first cast."""
        self.__dict__.update({name: value for name, value in attributes.items() if name != "_initial"})
        if "_initial" in attributes:
            self.set_high_precision_init_val(attributes["_initial"])

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """What ``torch.distributed.checkpoint`` saves, and loads into, maybe in several ranges of rows."""
        from minifloat.saved_rows import SavedRows  # a subclass

        return SavedRows.of(self, self._operands, self.shape, self.stride(), whole=True)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> Any:
        """What PyTorch's own FSDP2 asks for: it would gather values, and of some formats lose rows.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{getattr(module, '_label', type(module).__name__)}: PyTorch's own fully_shard does not keep quantized "
            "parameters; give its module to minifloat.distributed.fully_shard"
        )

    fsdp_post_all_gather = fsdp_pre_all_gather  # which has to be there, too

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            found: QuantizedTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError("a QuantizedTensor that autograd computed cannot be deep-copied; detach() it first")
        self._gathered()
        kept = {name: self.__dict__[name] for name in _SHARED if name in self.__dict__}
        kept |= {"gatherer": None, "_initial": None}
        copied = copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in kept}, memo)
        out = type(self)(copied["_operands"], self.quantizer, self.shape, self.dtype, self.stride())
        out.__dict__.update(copied | kept)
        out.requires_grad_(self.requires_grad)
        out.grad = copy.deepcopy(self.grad, memo)
        if (initial := self.get_high_precision_init_val()) is not None:
            out.set_high_precision_init_val(initial)
        memo[id(self)] = out
        return out


for _name in _INNER:  # rowwise_codes and so on: the names that torch finds the inner tensors by
    setattr(QuantizedTensor, _name, property(attrgetter("_operands." + _name.replace("_", ".", 1))))


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        values = tensor._own_values(dtype)
        return values.clone() if values._is_view() else values  # views made here refuse in-place operations later

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _rebuild(
    inner: dict[str, Tensor],
    context: tuple[Any, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    attributes: dict[str, Any],
) -> QuantizedTensor:
    """What a pickle calls. Its arguments are plain data, so that files outlive the classes of today.

    ``torch.load(weights_only=True)`` trusts it once this module is imported.
    """
    self = QuantizedTensor.__tensor_unflatten__(inner, context, shape, stride)
    self._set_attributes(attributes)
    self.requires_grad_(requires_grad)
    return self


torch.serialization.add_safe_globals([_rebuild])


def _matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a tensor of ``shape``."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, (shape[-1] if len(shape) else 1)


def copied(x: Tensor) -> Tensor:
    """In memory of its own, row after row."""
    return x.clone(memory_format=torch.contiguous_format)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Raises the versions, as autograd does itself for an operation on one tensor, but not for one on lists."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


# ---- what PyTorch's operations do ----

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
READS: dict[Any, Handler] = {}
"""Operations that read a quantized tensor and may give one; every other gives high precision."""
WRITES: dict[Any, Handler] = {}
"""Operations that write to a quantized tensor; every other raises. ``tensor_aten`` has the handlers of both."""


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = [t for t in written_by(func, args, kwargs) if isinstance(t, QuantizedTensor)]
    handler = (WRITES if written else READS).get(func.overloadpacket)
    if handler is not None:
        return handler(func, args, kwargs)
    if func.namespace == "c10d":  # whose schemas do not say what they write
        raise NotImplementedError(
            f"{func} would not reach the codes of a QuantizedTensor; communicate t.dequantize() and write it back with "
            "t.copy_(values), and split layers over ranks with minifloat.distributed.parallelize or parallel_mode="
        )
    # Without autograd (inference_mode) composite operations come whole: reshape is to be seen as view.
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    if written:
        raise NotImplementedError(
            f"{func} would write to a QuantizedTensor of shape {tuple(written[0].shape)} and has no form for that; "
            "compute on values = t.dequantize() and write them back with t.copy_(values)"
        )
    return on_values(func, args, kwargs)


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All that the operation's schema says it writes to, lists taken apart."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return tree_leaves([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])


def on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the operation gives on the values, in high precision."""
    args, kwargs = tree_map_only(QuantizedTensor, lambda t: t._values(), (args, kwargs))
    return func(*args, **kwargs)
