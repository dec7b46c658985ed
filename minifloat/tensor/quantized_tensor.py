"""``QuantizedTensor``, stored as codes and scales: parameters, and outputs of layers on request.

To PyTorch it is a tensor of its logical shape and dtype. An operation that does not change it gives what it gives on
:meth:`QuantizedTensor.dequantize`, bit for bit, in high precision, unless the quantized form holds the result exactly:
``detach``, ``clone``, ``to(device)``, ``t``, ``view``, rows of whole blocks and the like stay quantized. An in-place
operation computes on the values and quantizes the result into the same memory, or raises.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.arguments import label_of, shown
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import DTYPES, Amaxes, Quantizer, as_matrix
from minifloat.tensor import operand_ops
from minifloat.tensor.base import CodedTensor, cast, copied, matrix_shape, quantize_all_, version_of

_INNER = tuple(f"{slot}_{name}" for slot in operand_ops.SLOTS for name in operand_ops.BUFFERS)
_SHARED = ("quantizer", "cover")  # what copies refer to as well
_FIELDS = frozenset(
    {"_operands", "_outside", "_wholes", "_group", "_initial", "scale", "source_version", "gatherer", "owner"}
    | {*_SHARED, "_frozen", "_scratch", "source", "first", "whole", "_loaded_amaxes"}  # also of subclasses
)


def quantize(
    x: Tensor,
    quantizer: Quantizer,
    *,
    scale: Tensor | None = None,
    amax_group: dist.ProcessGroup | None = None,
    amaxes: Amaxes | None = None,
) -> QuantizedTensor:
    """Quantizes ``x`` to a new tensor of its shape and dtype with codes and scales; no gradient flows back to ``x``.

    Args:
        x: [..., K], bf16, fp16 or fp32. Leading dims are flattened for the operands, [M, K].
        quantizer: formats and orientations, also for every later in-place operation.
        scale: fp32 [1], for delayed scaling. Stored, not copied: later writes cast with its value at that time.
        amax_group: ranks that hold the other shards, whose amaxes this one's are reduced with, now and later.
        amaxes: synchronized amaxes to cast with instead, one a cast (``Quantizer.casts``).

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: another dtype, no dims, a quantizer of no orientation, or delayed scaling without a scale.
    """
    if not (quantizer.rowwise or quantizer.columnwise):
        raise ValueError("the quantizer produces no orientation; use quantizer.with_usage(rowwise=True)")
    with torch.no_grad():
        values = x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()
        operands = cast([as_matrix(values)], [quantizer], [scale], [amax_group], [amaxes])[0]
        owned = operands.map(lambda o: o if o.format.quantized else o._replace(codes=copied(o.codes)))
    return QuantizedTensor.from_operands(
        owned, quantizer, x.shape, x.dtype, scale=scale, amax_group=amax_group, source_version=version_of(x)
    )


quantize._torchdynamo_disable = True  # type: ignore[attr-defined] # no graph makes such a tensor


class QuantizedTensor(CodedTensor):
    """Tensor of shape [..., K], or a view of it, that stores quantized operands of [M, K]; :func:`quantize` makes it.

    Views that the quantized form cannot hold (columns, rows that break blocks) are copies of the values: writing to
    them raises; ``t[index] = value`` reaches this tensor. ``zeros_like`` and similar functions return high
    precision, as an optimizer's state needs; ``new_zeros``, ``new_empty`` and, to a device, ``empty_like`` are
    quantized. A change of dtype dequantizes, but a parameter (``module.to(dtype)``) stays quantized and changes its
    logical dtype.

    Attributes:
        quantizer: what it was and will be quantized with; its usage is that of the operands.
        scale: fp32 [1], what delayed scaling casts with the next time; else None. Copies of larger values change it.
        amax_group: the ranks that it reduces its amax over, or None; set to a process group, or one dim of a mesh. Kept
            by its name, which copies have too and pickles have not.
        source_version: the version of the tensor that it was last quantized from, where that is known.
        gatherer: of a tensor that is gathered from shards, some operands of which may have no memory now; else None.
    """

    _frozen = False  # the data of a tensor that takes no gradient

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
        """Makes a tensor of existing operands; see :func:`quantize` for the other arguments.

        Raises:
            ValueError: there is no operand, or ``shape`` is not that of the operands with M split into leading dims.
        """
        if operands.rowwise is None and operands.columnwise is None:
            raise ValueError("there is neither a rowwise nor a columnwise operand to make a tensor of")
        if matrix_shape(shape) != operands.any.shape:
            raise ValueError(
                f"shape {tuple(shape)} flattens to {matrix_shape(shape)}, but operands are {operands.any.shape}"
            )
        typed = operands.map(lambda o: o if o.dtype == dtype else o._replace(dtype=dtype))
        self = QuantizedTensor(typed, quantizer, shape, dtype)
        self.scale, self.amax_group, self.source_version = scale, amax_group, source_version
        return self

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the values in a new tensor, rounded to ``dtype`` (default: its own). Differentiable."""
        if self.requires_grad and torch.is_grad_enabled():
            values: Tensor = _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-untyped-call]
            return values
        return self._own_values(dtype)

    def quantize_(
        self, src: Tensor, *, amaxes: Amaxes | None = None, noop_flag: Tensor | None = None
    ) -> QuantizedTensor:
        """Quantizes ``src`` into the memory of this tensor; arguments and errors are those of :func:`quantize_all_`."""
        quantize_all_([self], [src], amaxes=[amaxes], noop_flag=noop_flag)
        return self

    def set_high_precision_init_val(self, values: Tensor) -> None:
        """Keeps a copy of ``values`` on the CPU, for master weights to start from."""
        self._initial = values.detach().cpu().clone(), version_of(self._operands.any.codes)

    def get_high_precision_init_val(self) -> Tensor | None:
        """Returns the values before the first cast, on the CPU, if they were preserved and nothing else was written."""
        if self._initial is None or self._initial[1] != version_of(self._operands.any.codes):
            return None
        return self._initial[0]

    def clear_high_precision_init_val(self) -> None:
        """Frees the values of :meth:`get_high_precision_init_val`."""
        self._initial = None

    def update_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drops unwanted operands, and restores a wanted one from the other if one serves as both.

        Raises:
            ValueError: a wanted orientation is missing and does not follow from the other, or none would be left.
        """
        wanted = self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        held = self._operands.any
        kept: list[Operand | None] = []
        for slot, dim in zip(operand_ops.SLOTS, (ROWWISE, COLUMNWISE), strict=True):
            usage, fmt = getattr(wanted, slot), wanted.format(dim)
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
        """Tensor without its graph. Values that are assigned are quantized into its memory, not shared with it.

        Warns:
            UserWarning: that rounds them.

        Raises:
            TypeError: they are no floating-point tensor.
            ValueError: they have another shape, are on another device, or would be rounded, also as in
                ``data += update``, while this takes no gradient: so adapters are merged into a frozen weight. Its own
                values in another dtype, as PEFT assigns them, change the logical dtype alone.
        """
        alone: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if not self.requires_grad and self._operands.any.format.quantized:
            alone._frozen, alone.owner = True, self.owner  # type: ignore[attr-defined]
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
        exact = isinstance(values, QuantizedTensor) and self._same_form(values) and not version_of(values)
        rounds = self._operands.any.format.quantized and not exact
        if rounds and not self.requires_grad:
            if values.dtype not in DTYPES or not torch.equal(values.to(self.dtype), self._values()):
                self._refuse_to_merge()
            typed = self._like(self._operands.map(lambda o: o._replace(dtype=values.dtype)))
            torch.Tensor.data.__set__(self, typed)  # type: ignore[attr-defined]
            self._operands = typed._operands
            return
        quantize_all_([self], [values], fits=True)
        if rounds:
            warnings.warn(
                f"{self._whose} rounds what is assigned to its data: of a small change all below half a step is lost",
                stacklevel=2,
            )

    def __iadd__(self, other: Any) -> Tensor:  # type: ignore[misc]
        if self._frozen:
            self._refuse_to_merge()
        return self.add_(other)

    def __isub__(self, other: Any) -> Tensor:  # type: ignore[misc]
        if self._frozen:
            self._refuse_to_merge()
        return self.sub_(other)

    def _refuse_to_merge(self) -> NoReturn:
        raise ValueError(
            f"{self._whose} is frozen, and an adapter that is merged into its data loses all below half a step. Choose "
            "the precision of the result: minifloat.revert(model) before merge_and_unload() merges in "
            f"{str(self.dtype).removeprefix('torch.')}, convert(..., quantize_weights=True) after that casts the sum; "
            "weight.quantize_(values) rounds at once"
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        values = self.dequantize()
        values[index] = value
        self.copy_(values)

    def __repr__(self) -> str:  # type: ignore[override]
        named = zip(operand_ops.SLOTS, self._operands, strict=True)
        held = [f"{slot}={operand.format.spec}" for slot, operand in named if operand]
        where = [f"device={self.device}"] + ["requires_grad=True"] * self.requires_grad
        return f"QuantizedTensor({', '.join([str(tuple(self.shape)), str(self.dtype), *held, *where])})"

    # ---- new tensors from this one ----

    def _like(
        self, operands: Quantized, shape: Sequence[int] | None = None, stride: Sequence[int] | None = None
    ) -> QuantizedTensor:
        """Makes a tensor of other operands with the same quantizer, scale, group and source."""
        shape, stride = (self.shape, self.stride()) if shape is None else (shape, stride)
        out = QuantizedTensor(operands, self.quantizer, shape, operands.any.dtype, stride)
        out.scale, out._group, out.source_version = self.scale, self._group, self.source_version
        out.gatherer, out.owner = self.gatherer, self.owner
        return out

    def _zeros(self, size: Sequence[int], device: Any) -> QuantizedTensor:
        """Makes zeros of any size, quantized like this tensor."""
        zeros = torch.zeros(size, dtype=self.dtype, device=device)
        return quantize(zeros, self.quantizer, scale=self._scale_on(device))

    def _scale_on(self, device: Any) -> Tensor | None:
        """Copies the delayed scale to a device; one that has no value yet becomes 1, as in a new history."""
        if self.scale is None or not self.scale.is_meta:
            return None if self.scale is None else self.scale.to(device, copy=True)
        return torch.ones_like(self.scale, device=device)

    def _map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        out = self._like(self._gathered().map(lambda o: operand_ops.map_buffers(o, function)))
        out.scale = None if self.scale is None else function(self.scale)
        out.gatherer = None
        return out

    def _part(self, view: Tensor) -> QuantizedTensor | None:
        """Cuts out what ``view`` shows, a view of a meta tensor like this; None if operands cannot hold it."""
        rows, cols = self._operands.any.shape
        shape, stride, offset, count = view.shape, view.stride(), view.storage_offset(), view.numel()
        if view.dtype != self.dtype or not operand_ops.is_dense(shape, stride):
            return None
        if count == rows * cols and offset == 0:
            whole = self._like(self._operands, shape, stride)
            whole._outside, whole._wholes = self._outside, self._wholes
            return whole
        if not cols or offset % cols or count % cols:
            return None
        begin, end = offset // cols, (offset + count) // cols
        kept = operand_ops.cut(self._operands, begin, end)
        if kept is None:
            return None
        part = self._like(kept, shape, stride)
        left_out = [operand_ops.left_out(o, begin, end) for o in operand_ops.distinct(self._operands).values()]
        part._outside = (*self._outside, *chain.from_iterable(left_out))
        part._wholes = (*self._wholes, *operand_ops.buffers(self._operands).values())
        return part

    # ---- torch's protocols ----

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        # Without the number of rows, which dynamic shapes change: to a compiler all this is constant.
        description = operand_ops.describe(self.quantizer, self._operands, matrix_shape(self.shape))
        return list(self._buffers()), (description, self.dtype, self._group, self.is_contiguous())

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> QuantizedTensor:
        description, dtype, group, contiguous = context
        quantizer, operands = operand_ops.restore(description, inner, matrix_shape(outer_size))
        # AOTAutograd of PyTorch 2.11 gives wrong strides where they depend on a number of rows.
        self = QuantizedTensor(operands, quantizer, outer_size, dtype, None if contiguous else outer_stride)
        self.scale, self._group = inner.get("scale"), group
        return self

    def __coerce_tangent_metadata__(self) -> Any:  # AOTAutograd calls it
        """Raises where a graph returns this tensor: its gradient cannot be said to be plain."""
        raise RuntimeError(
            f"a compiled function returns a quantized tensor of shape {tuple(self.shape)}, for which PyTorch takes no "
            "gradient in high precision; return its dequantize(), or use torch.no_grad()"
        )

    def __coerce_same_metadata_as_tangent__(
        self, expected_meta: Any, expected_type: type[Tensor] | None = None
    ) -> Tensor | None:
        """Gives a compiled graph the values of a gradient that comes quantized, as in ``fp8_grad``."""
        return self.dequantize() if expected_type is Tensor else None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        context = operand_ops.describe(self.quantizer, self._gathered()), self.dtype, None
        others = {name: value for name, value in self.__dict__.items() if name not in _FIELDS}
        if (initial := self.get_high_precision_init_val()) is not None:
            others["_initial"] = initial
        geometry = tuple(self.shape), self.stride()
        return _rebuild, (self._buffers(), context, *geometry, self.requires_grad, others)

    def _set_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Sets the attributes of a pickle of :meth:`__reduce_ex__`: a user's, and the values before the first cast."""
        self.__dict__.update({name: value for name, value in attributes.items() if name != "_initial"})
        if "_initial" in attributes:
            self.set_high_precision_init_val(attributes["_initial"])

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> Any:
        """Refuses PyTorch's own FSDP2: it would gather values, and of some formats lose rows."""
        raise ValueError(
            f"{label_of(module)}: PyTorch's own fully_shard does not keep quantized "
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
    inner: dict[str, Tensor], context: tuple[Any, ...], shape: tuple[int, ...], stride: tuple[int, ...],
    requires_grad: bool, attributes: dict[str, Any],
) -> QuantizedTensor:  # fmt: skip
    """Unpickles. Its arguments are plain data, so that files outlive the classes of today.

    ``torch.load(weights_only=True)`` trusts it once this module is imported.
    """
    self = QuantizedTensor.__tensor_unflatten__(inner, (*context, False), shape, stride)
    if math.prod(self._operands.any.shape) != self.numel() or not operand_ops.is_dense(self.shape, self.stride()):
        raise ValueError(f"a QuantizedTensor of shape {tuple(shape)} is no view of its matrix; the file is damaged")
    check_form(self._operands, self._operands.any.shape)
    self._set_attributes(attributes)
    self.requires_grad_(requires_grad)
    return self


def check_form(operands: Quantized, shape: tuple[int, int]) -> None:
    """Raises a ValueError unless operands of a file are those of a matrix of ``shape``.

    Kernels read as much memory as the matrix has, and a write to a parameter would repeat rows that are missing.
    """
    for slot, held in operand_ops.distinct(operands).items():
        x, along = torch.empty(shape, dtype=held.dtype, device="meta"), held.dim == ROWWISE
        quantizer, scale = Quantizer(held.format, rowwise=along, columnwise=not along), torch.empty(1, device="meta")
        wanted = cast([x], [quantizer], [scale], [None], [None])[0].any
        for name, own, other in zip(operand_ops.BUFFERS, held.tensors, wanted.tensors, strict=True):
            forms = [None if t is None else (tuple(t.shape), t.dtype) for t in (own, other)]
            dense = own is None or operand_ops.is_dense(own.shape, own.stride())
            if held.shape != shape or forms[0] != forms[1] or not dense:
                raise ValueError(
                    f"{slot} {name} of a QuantizedTensor, a matrix of {shape} in {held.format.spec}, are {forms[0]}; "
                    f"{forms[1]} is needed: the file is damaged"
                )


_rebuild.__module__ = "minifloat.tensor"  # as it is called in files
torch.serialization.add_safe_globals([_rebuild])
