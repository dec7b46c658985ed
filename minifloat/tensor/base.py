"""``CodedTensor``: storage of quantized tensors, their reads, writes and casts, and the dispatch of operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from minifloat.comm.group import Group, group_of_name
from minifloat.comm.sharded_cast import reduce_amaxes, scale_of
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Quantized
from minifloat.quantizer import DTYPES, Amaxes, Quantizer, cast_all, find_amaxes
from minifloat.tensor import operand_ops


class Gatherer(Protocol):
    """Gathers a tensor from the shards of other ranks, one orientation at a time, for FSDP2's hooks."""

    def fetch(self, *dims: int) -> None:
        """Fetches the operands that serve ``dims``, where they are not there; a collective."""

    def fetch_for(self, quantizer: Quantizer, label: str) -> None:
        """Fetches for a call of the layer ``label``, which reads what ``quantizer`` gives."""


class CodedTensor(torch.Tensor):
    """Storage of a :class:`~minifloat.tensor.QuantizedTensor`, and how it is read and written.

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
    _scratch = False  # new zeros, whose views FSDP2 writes to for nothing

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls, operands: Any, quantizer: Any = None, shape: Sequence[int] = (), dtype: torch.dtype | None = None,
        stride: Sequence[int] | None = None, requires_grad: bool = False, **_: Any,
    ) -> Self:  # fmt: skip
        if isinstance(operands, Tensor):  # as nn.Parameter: Accelerate moves parameters by making them anew
            if isinstance(operands, cls):
                return nn.Parameter(operands.detach(), requires_grad)  # type: ignore[return-value]
            raise TypeError(
                f"a quantized weight of shape {tuple(operands.shape)} is not made of values alone, as Accelerate does "
                "that loads a checkpoint: load it before convert(..., quantize_weights=True)"
            )
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
        """Ranks that it reduces its amax with."""
        return None if self._group is None else group_of_name(self._group)

    @amax_group.setter
    def amax_group(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None else Group.of(group).name

    @property
    def holds_own_matrix(self) -> bool:
        """Whether the operands are those of this matrix, not of one that this is a transposed or reshaped view of."""
        return self.is_contiguous() and matrix_shape(self.shape) == self._operands.any.shape

    @property
    def operands(self) -> Quantized:
        """Rowwise and columnwise operand, [M, K] each: the same object twice if one serves both, None if dropped.

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
        """Dequantizes; the identity format gives its very memory."""
        if self.gatherer is not None:
            self.gatherer.fetch(ROWWISE)
        values = self._operands.dequantize(dtype or self.dtype)
        if values.shape == self.shape and self.is_contiguous():
            return values
        return values.contiguous().as_strided(self.shape, self.stride())

    def _gathered(self) -> Quantized:
        """Fetches the memory of all operands, and returns them."""
        if self.gatherer is not None:
            dims = zip((ROWWISE, COLUMNWISE), self._operands, strict=True)
            self.gatherer.fetch(*[dim for dim, operand in dims if operand])
        return self._operands

    def _buffers(self) -> dict[str, Tensor]:
        """Lists every tensor inside, by the name of its attribute."""
        return operand_ops.buffers(self._operands) | ({} if self.scale is None else {"scale": self.scale})

    def data_ptr(self) -> int:
        """Returns 0, by which PyTorch's Python code knows a tensor without memory of its own; to C++ code it raises."""
        return 0

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns PyTorch's storage, whose address, for which safetensors asks, is an error that names the way out."""
        storage = super().untyped_storage()
        storage.data_ptr = partial(_refuse_to_save, self._whose)  # type: ignore[method-assign]
        return storage

    def numpy(self, *, force: bool = False) -> Any:
        """Refuses to share values that are in no memory."""
        return _refuse_to_save(self._whose)

    @property
    def _whose(self) -> str:
        """Label of the tensor in errors."""
        what = f"{self.owner}: its weight" if self.owner else "a QuantizedTensor"
        return f"{what} of shape {tuple(self.shape)} in {self._operands.any.format.spec}"

    def share_memory_(self) -> Self:
        """Moves codes and scales to shared memory, as ``Tensor.share_memory_`` does."""
        for buffer in self._buffers().values():
            buffer.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether codes and scales are in shared memory."""
        return all(buffer.is_shared() for buffer in self._buffers().values())

    # ---- writes ----

    def _as_matrix(self, values: Tensor) -> Tensor:
        """Reshapes values that broadcast to the logical shape to the [M, K] that the operands are of."""
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
        """Whether the operands of ``other`` can be copied as they are."""
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
        f"{whose} has codes and scales, and in no memory the values that safetensors, save_pretrained and numpy (as of "
        "disk_offload, where cpu_offload works) read: give them t.dequantize(), after convert call "
        "minifloat.revert(model) first, or save the codes with export_weights (from minifloat.convert) for engines, "
        "with torch.save(model.state_dict(), file) for training"
    )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Returns (M, K) of a tensor of ``shape``."""
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, (shape[-1] if len(shape) else 1)


def copied(x: Tensor) -> Tensor:
    """Returns a contiguous copy."""
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
"""Operations that write to a quantized tensor; every other raises. ``handlers.py`` has the handlers of both."""


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
    """Lists what the operation's schema says it writes to, lists taken apart."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    given = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    return tree_leaves([value for a, value in given if a.alias_info is not None and a.alias_info.is_write])


def on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the operation on the values, in high precision."""
    values, named = tree_map_only(CodedTensor, lambda t: t._values(), (args, kwargs))
    result = func(*values, **named)
    whole = args[0]
    if func.is_view and isinstance(whole, CodedTensor) and whole._operands.any.format.quantized and not whole._scratch:
        return tree_map_only(Tensor, partial(ReadOnlyView.of, whole._whose), result)
    return result


class ReadOnlyView(torch.Tensor):
    """Values that a view of a quantized tensor shows where codes cannot: a write would be lost, and raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    shown: Tensor  # in the same memory
    whose: str

    @staticmethod
    def of(whose: str, values: Tensor) -> Tensor:
        """Makes one of ``values``, but in a graph, which is to return plain tensors."""
        if type(values) is not Tensor:
            return values
        self: ReadOnlyView = torch.Tensor._make_subclass(ReadOnlyView, values)
        self.shown, self.whose = values, whose
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for view in written_by(func, args, kwargs or {}):
            if isinstance(view, ReadOnlyView):
                raise NotImplementedError(
                    f"{view.whose} has no codes for a view of shape {tuple(view.shape)}, as for rows of whole blocks: "
                    f"what {func} writes would be lost. Write to the whole, as in weight[index] = values, or "
                    "values = weight.dequantize(), change them, weight.copy_(values)"
                )
        values, named = tree_map_only(ReadOnlyView, lambda view: view.shown, (args, kwargs or {}))
        result = func(*values, **named)
        return tree_map_only(Tensor, partial(ReadOnlyView.of, args[0].whose), result) if func.is_view else result


for _name in ("tolist", "__reduce_ex__", "__deepcopy__"):  # which know no subclass
    setattr(ReadOnlyView, _name, lambda self, *args, _name=_name: getattr(self.shown, _name)(*args))


def quantize_all_(
    targets: Sequence[CodedTensor],
    sources: Sequence[Tensor],
    *,
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
    fits: bool = False,
) -> None:
    """Quantizes each source into the memory of its target, all of them in one launch a phase.

    The bytes are those of ``target.quantize_(source)`` for each in turn. Amaxes are reduced in one all-reduce for each
    ``amax_group``, whose ranks list their targets in the same order. Sources are cast from their own dtype: a bf16
    parameter takes fp32 master weights in one rounding.

    Args:
        targets: written. None may share memory with another one's source.
        sources: of the targets' shapes, fp32, bf16, fp16 or quantized, on any device.
        amaxes: synchronized amaxes to cast with instead, as in :func:`quantize`; None for a target's own.
        noop_flag: fp32 [1] on the targets' device, read there: where it is not 0, codes and scales stay as they are.
        fits: a delayed scale under which values would saturate becomes the largest that holds them, as in ``copy_``.

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
        assign_all(targets, sources, amaxes, noop_flag, fits)
    count_writes(targets)


def assign_all(
    targets: Sequence[CodedTensor],
    sources: Sequence[Tensor],
    amaxes: Sequence[Amaxes | None] | None = None,
    noop_flag: Tensor | None = None,
    fits: bool = False,
) -> None:
    """Quantizes sources that broadcast, as :func:`quantize_all_`, with versions left to the caller."""
    pairs = list(zip(targets, sources, strict=True))
    ready = [s._gathered() if isinstance(s, CodedTensor) and t._same_form(s) else None for t, s in pairs]
    missing = [i for i, operands in enumerate(ready) if operands is None]
    values = [s._values() if isinstance(s, CodedTensor) else s.detach() for s in (sources[i] for i in missing)]
    written = [targets[i] for i in missing]
    xs = [target._as_matrix(value) for target, value in zip(written, values, strict=True)]
    scales, groups = [target.scale for target in written], [target.amax_group for target in written]
    for i, (x, scale) in enumerate(zip(xs, scales, strict=True)):
        if fits and scale is not None:
            scales[i] = scale_of([x], written[i].quantizer, scale, Group.of(groups[i]), keeps=True)
    known = [None if amaxes is None else amaxes[i] for i in missing]
    fresh = iter(cast(xs, [target.quantizer for target in written], scales, groups, known, noop_flag))
    for (target, source), operands in zip(pairs, ready, strict=True):
        target._store(next(fresh) if operands is None else operands, noop_flag)
        target.source_version = version_of(source) if noop_flag is None else None  # the device knows whether
    for target, scale in zip(written, scales, strict=True):
        if fits and target.scale is not None and scale is not None:
            target.scale.copy_(scale)


def cast(
    xs: Sequence[Tensor], quantizers: Sequence[Quantizer], scales: Sequence[Tensor | None],
    groups: Sequence[dist.ProcessGroup | None], amaxes: Sequence[Amaxes | None], noop_flag: Tensor | None = None,
) -> list[Quantized]:  # fmt: skip
    """Quantizes many ``xs`` [M, K]: one launch a phase, and between the phases one all-reduce a group.

    Each with its quantizer, its delayed scale, the ranks that it reduces its amax over, and amaxes to cast with
    instead of its own, as :func:`quantize` has them. Ranks list the tensors of a group alike.

    Raises:
        ValueError: a quantizer takes a given scale and there is none.
    """
    for quantizer, scale, known in zip(quantizers, scales, amaxes, strict=True):
        if known is None and scale is None and any(fmt.scale_rule == "given" for fmt, _ in quantizer.casts):
            raise ValueError(
                f"{quantizer.row_format.spec} casts with a delayed scale and none is known; pass an fp32 [1] as in "
                "quantize(x, quantizer, scale=scale)"
            )
    unknown = [i for i, known in enumerate(amaxes) if known is None]
    own = dict(zip(unknown, find_amaxes([xs[i] for i in unknown], [quantizers[i] for i in unknown]), strict=True))
    by_group: dict[dist.ProcessGroup | None, list[int]] = defaultdict(list)
    for i in unknown:
        by_group[groups[i]].append(i)
    for group, those in by_group.items():
        reduced = reduce_amaxes([own[i] for i in those], [quantizers[i] for i in those], Group.of(group))
        own |= zip(those, reduced, strict=True)
    levels = [own.get(i, known) for i, known in enumerate(amaxes)]
    given = [scale if known is None else None for scale, known in zip(scales, amaxes, strict=True)]
    return cast_all(xs, quantizers, levels, noop_flag=noop_flag, scales=given)


# ---- steps of optimizers, whose writes PyTorch does not always count ----


_counted: Any = WeakTensorKeyDictionary()
_hooks: list[Any] = []


def count_steps(parameters: Iterable[Any]) -> None:
    """Raises the versions of ``parameters`` at each later step of an optimizer: PyTorch's fused kernels do not.

    Whoever keeps what was cast of a parameter reads its version. An optimizer that counts what it writes has a true
    ``counts_its_writes``.
    """
    if torch.compiler.is_compiling():
        return
    for parameter in parameters:
        _counted[parameter] = True
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_count))


def stop_counting(parameters: Iterable[Any]) -> None:
    """Forgets ``parameters`` that are about to be replaced: PyTorch swaps no tensor that has a weak reference."""
    for parameter in parameters:
        _counted.pop(parameter, None)


def _count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "counts_its_writes", False):
        return
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    count_writes(parameter for parameter in held if parameter in _counted)
