"""Functions of a :class:`~minifloat.tensor.QuantizedTensor`'s operands: cut rows, store, describe as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minifloat.comm.group import unit_rows
from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Quantizer

SLOTS = ("rowwise", "columnwise")
BUFFERS = ("codes", "scale_inv", "amax")


def distinct(operands: Quantized) -> dict[str, Operand]:
    """Lists operands by the place they fill; one that fills both once, as rowwise."""
    shared = operands.rowwise is operands.columnwise
    slots = zip(SLOTS[:1] if shared else SLOTS, operands, strict=False)
    return {slot: operand for slot, operand in slots if operand is not None}


def buffers(operands: Quantized) -> dict[str, Tensor]:
    """Lists the tensors of the operands, called ``rowwise_codes`` and so on."""
    named = {f"{slot}_{name}": getattr(o, name) for slot, o in distinct(operands).items() for name in BUFFERS}
    return {name: buffer for name, buffer in named.items() if buffer is not None}


def map_buffers(operand: Operand, function: Callable[[Tensor], Tensor]) -> Operand:
    """Applies ``function`` to each tensor of an operand."""
    scale_inv, amax = (None if t is None else function(t) for t in (operand.scale_inv, operand.amax))
    return operand._replace(codes=function(operand.codes), scale_inv=scale_inv, amax=amax)


_SET_ERROR = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)  # of some builds of PyTorch
_NO_MEMORY = (
    "a QuantizedTensor has codes and scales, but no memory of its values; read t.dequantize(), write with "
    "t.copy_(values), and split layers over ranks with minifloat.distributed.parallelize or parallel_mode="
)


def refuse_data_pointer(t: Tensor, message: str = _NO_MEMORY) -> None:
    """Makes C++ code that asks for the data pointer raise; as a null pointer it ended the process in c10d's scatter."""
    if _SET_ERROR is None:
        torch._C._set_throw_on_mutable_data_ptr(t)  # with PyTorch's message
    else:
        _SET_ERROR(Tensor.untyped_storage(t)._cdata, message)


# ---- rows ----


def cut(operands: Quantized, begin: int, end: int) -> Quantized | None:
    """Cuts rows ``begin`` to ``end`` out as views of the operands' tensors; None where that would break blocks."""
    for operand in distinct(operands).values():
        unit = unit_rows(operand.format, operand.dim)
        if begin % unit or (end % unit and end != operand.shape[0]):
            return None
    return operands.map(lambda operand: _cut(operand, begin, end))


def _cut(operand: Operand, begin: int, end: int) -> Operand:
    fmt, rows, block = operand.format, operand.shape[0], operand.format.scale_block(operand.dim)[0] or 1
    first, last = _code_rows(operand, begin), _code_rows(operand, end)
    scale_inv, amax = operand.scale_inv, operand.amax
    if scale_inv is not None and fmt.owns_scales(operand.dim):
        scale_inv = scale_inv[begin // block : None if end == rows else end // block]
    if amax is not None and fmt.amax_per_row and operand.dim == ROWWISE:
        amax = amax[begin:end]
    codes = operand.codes[first:last]
    return operand._replace(codes=codes, scale_inv=scale_inv, amax=amax, shape=(end - begin, operand.shape[1]))


def left_out(operand: Operand, begin: int, end: int) -> tuple[Tensor, ...]:
    """Lists the codes of other rows, if there are any and a scale spans them and rows ``begin`` to ``end``."""
    before, after = operand.codes[: _code_rows(operand, begin)], operand.codes[_code_rows(operand, end) :]
    return tuple([codes for codes in (before, after) if codes.numel()]) if shared_levels(operand) else ()


def _code_rows(operand: Operand, row: int) -> int:
    if row == operand.shape[0]:
        return operand.codes.shape[0]
    return row // 2 if operand.format.packed and operand.dim == COLUMNWISE else row


def shared_levels(operand: Operand) -> tuple[Tensor, ...]:
    """Lists scales that every row of the operand shares: a tensor's one scale, or the amax above block scales."""
    fmt = operand.format
    level = operand.amax if fmt.scale_rule == "two_level" else None if fmt.block else operand.scale_inv
    return () if level is None or (fmt.amax_per_row and operand.dim == ROWWISE) else (level,)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill a range of memory, each of it once, in whichever order."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return True
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


# ---- store ----


def store(target: Quantized, source: Quantized, outside: Sequence[Tensor], noop_flag: Tensor | None = None) -> None:
    """Writes ``source`` into the tensors of ``target``, whose addresses stay; not where ``noop_flag`` is not 0.

    Raises:
        NotImplementedError: ``outside``, rows that share a scale with these, would change with it.
    """
    pairs = [(mine, getattr(source, slot)) for slot, mine in distinct(target).items()]
    for mine, theirs in pairs if any(not rest.is_meta and bool(rest.any()) for rest in outside) else []:
        levels = zip(shared_levels(mine), shared_levels(theirs), strict=True)
        if not all(torch.equal(old, new.to(old.device)) for old, new in levels):
            raise NotImplementedError(
                f"{mine.shape[0]} rows of a larger QuantizedTensor share its scale ({mine.format.spec}), so writing to "
                "them would change the rest: write to the whole, as in whole[rows] = values, or zero_() it first"
            )
    for mine, theirs in pairs:
        assert mine.format == theirs.format and mine.shape == theirs.shape
        for name in BUFFERS:
            old, new = getattr(mine, name), getattr(theirs, name)
            if old is not None and new is not None:
                old.copy_(new if noop_flag is None else torch.where(noop_flag != 0, old, new))


# ---- as plain data, which a compiler compares and a checkpoint keeps ----


def describe(quantizer: Quantizer, operands: Quantized, shape: tuple[int, int] | None = None) -> tuple[Any, ...]:
    """Describes all but the tensors in strings, numbers and tuples; :func:`restore` reads it.

    ``shape``: a matrix shape that is known to who reads it, and may be a symbol to a compiler; it is left out.
    """
    column = None if quantizer.column_format is None else quantizer.column_format.spec
    usage = (quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source)
    layouts = tuple(
        (slot, o.format.spec, o.dim, None if o.shape == shape else o.shape, o.dtype)
        for slot, o in distinct(operands).items()
    )
    return (quantizer.row_format.spec, column, *usage), layouts, operands.rowwise is operands.columnwise


def restore(
    description: tuple[Any, ...], buffers: Mapping[str, Tensor], known: tuple[int, int] = (0, 0)
) -> tuple[Quantizer, Quantized]:
    """Inverts :func:`describe`, given the tensors under the names ``rowwise_codes`` and so on.

    ``known``: the shape that was left out.
    """
    (row_spec, column_spec, *usage), layouts, shared = description
    column: Format | None = None if column_spec is None else parse(column_spec)
    found: dict[str, Operand | None] = dict.fromkeys(SLOTS)
    for slot, spec, dim, shape, dtype in layouts:
        codes, scale_inv, amax = (buffers.get(f"{slot}_{name}") for name in BUFFERS)
        if codes is None:
            raise ValueError(
                f"a quantized tensor in {spec} has no {slot} codes: what it was loaded from lacks a part; save it anew"
            )
        found[slot] = Operand(codes, scale_inv, amax, parse(spec), dim, known if shape is None else shape, dtype)
    rowwise, columnwise = found["rowwise"], found["columnwise"]
    return Quantizer(parse(row_spec), column, *usage), Quantized(rowwise, rowwise if shared else columnwise)
