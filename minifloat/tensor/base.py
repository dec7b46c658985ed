"""Operands in a tensor: what reads and writes them, and which operations of PyTorch know them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minifloat.comm.group import Group, group_of_name
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Quantized
from minifloat.quantizer import DTYPES, Quantizer
from minifloat.tensor import operand_ops


class Gatherer(Protocol):
    """What gathers a tensor from the shards of other ranks, one orientation at a time, as FSDP2's hooks do."""

    def fetch(self, *dims: int) -> None:
        """Sees to it that the operands that serve ``dims`` are there; a collective."""

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """The same for a call of the layer ``label``, which reads what ``quantizer`` gives."""


class CodedTensor(torch.Tensor):
    """What a :class:`~minifloat.tensor.QuantizedTensor` holds, how it is read and how it is written.

    An operation of PyTorch runs what :data:`READS` or :data:`WRITES` have for it. Another one computes on the values,
    in high precision, or raises if it would write.
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
    owner = ""  # what errors call the layer whose weight it is

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        operands: Quantized,
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: Sequence[int] | None = None,
    ) -> Self:
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=None if stride is None else tuple(stride), dtype=dtype,
            device=operands.any.codes.device,
        )  # fmt: skip
        operand_ops.refuse_data_pointer(self)
        rowwise, columnwise = operands
        self._operands, self._outside, self._wholes = operands, (), ()
        self.quantizer = quantizer.with_usage(rowwise=rowwise is not None, columnwise=columnwise is not None)
        self.scale = self._group = self._initial = self.source_version = self.gatherer = None
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
        return self.is_contiguous() and matrix_shape(self.shape) == self._operands.any.shape

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

    def _gathered(self) -> Quantized:
        """The operands, all of which have their memory."""
        if self.gatherer is not None:
            dims = zip((ROWWISE, COLUMNWISE), self._operands, strict=True)
            self.gatherer.fetch(*[dim for dim, operand in dims if operand])
        return self._operands

    def _buffers(self) -> dict[str, Tensor]:
        """Every tensor inside, by the name of its attribute."""
        return operand_ops.buffers(self._operands) | ({} if self.scale is None else {"scale": self.scale})

    def data_ptr(self) -> int:
        """0, by which PyTorch's Python code knows a tensor without memory of its own; to C++ code it raises."""
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        """PyTorch's, whose address, for which safetensors asks, is an error that names the way out."""
        storage = super().untyped_storage()
        storage.data_ptr = partial(_refuse_to_save, self._whose)  # type: ignore[method-assign]
        return storage

    @property
    def _whose(self) -> str:
        """What errors call it."""
        what = f"{self.owner}: its weight" if self.owner else "a QuantizedTensor"
        return f"{what} of shape {tuple(self.shape)} in {self._operands.any.format.spec}"

    def share_memory_(self) -> Self:
        """Moves codes and scales to shared memory, as ``Tensor.share_memory_`` does."""
        for buffer in self._buffers().values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Codes and scales are in shared memory."""
        return all(buffer.is_shared() for buffer in self._buffers().values())

    # ---- writes ----

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
        operand_ops.store(self._operands, operands, self._outside, noop_flag)
        written = operand_ops.buffers(self._operands).values()
        count_writes(buffer for buffer in (*written, *self._wholes) if not buffer.is_inference())

    def _same_form(self, other: CodedTensor) -> bool:
        """The operands of ``other`` can be copied as they are."""
        return (
            self.quantizer.same_formats(other.quantizer)
            and self._operands.any.shape == other._operands.any.shape
            and (self.shape, self.stride()) == (other.shape, other.stride())
            and all(theirs is not None for mine, theirs in zip(self._operands, other._operands, strict=True) if mine)
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():  # a view of an ordinary tensor must be an ordinary one
                return _dispatch(func, args, kwargs or {})
        return _dispatch(func, args, kwargs or {})


def _refuse_to_save(whose: str) -> int:
    raise ValueError(
        f"{whose} has codes and scales, and in no memory the values that safetensors and save_pretrained write: give "
        "them t.dequantize(), after convert call minifloat.convert.revert(model) first, or save the codes with "
        "torch.save(model.state_dict(), file)"
    )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(M, K) of a tensor of ``shape``."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, (shape[-1] if len(shape) else 1)


def copied(x: Tensor) -> Tensor:
    """In memory of its own, row after row."""
    return x.clone(memory_format=torch.contiguous_format)


def version_of(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def versions(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Counts the writes to each that PyTorch sees; an inference tensor has no such count: a NaN, which equals none."""
    compiling = torch.compiler.is_compiling()  # no graph can ask whether a tensor is one of inference
    return tuple([float("nan") if not compiling and each.is_inference() else each._version for each in tensors])


def count_writes(tensors: Iterable[Tensor]) -> None:
    """Raises the versions, as autograd does itself for an operation on one tensor, but not for one on lists."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
READS: dict[Any, Handler] = {}
"""Operations that read a quantized tensor and may give one; every other gives high precision."""
WRITES: dict[Any, Handler] = {}
"""Operations that write to a quantized tensor; every other raises. ``aten`` has the handlers of both."""


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = [t for t in written_by(func, args, kwargs) if isinstance(t, CodedTensor)]
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
    args, kwargs = tree_map_only(CodedTensor, lambda t: t._values(), (args, kwargs))
    return func(*args, **kwargs)
