"""Functions that make a :class:`~minifloat.tensor.QuantizedTensor` in traced code, and take it apart.

Dynamo builds no subclass of tensors, and of one that it has computed it reads tensors and constants alone. So the
operands go through the graph as plain tensors, and :func:`as_quantized_tensor` is one node of it, which AOTAutograd
runs and Dynamo does not look into. Formats go in as strings and come out of a quantizer that the caller has: they are
not parsed in traced code.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifloat.comm.group import Group
from minifloat.comm.sharded_cast import reduce_amaxes
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix, cast_all, find_amaxes
from minifloat.tensor import operand_ops
from minifloat.tensor.base import matrix_shape
from minifloat.tensor.quantized_tensor import QuantizedTensor


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
    """Makes :func:`as_quantized_tensor` known to Dynamo; the compiler calls this, and does not trace it."""
    torch.compiler.allow_in_graph(_wrapped)


allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined] # what assume_constant_result does


def as_quantized_tensor(
    values: Tensor, operands: Quantized, quantizer: Quantizer, scale: Tensor | None = None, label: str = "",
    group: str | None = None,
) -> Any:  # fmt: skip
    """Makes a tensor of operands in traced code, of the shape, dtype and gradient of ``values``.

    Args:
        label: of the layer that computes it, for errors.
        group: the name of the ranks that it reduces its amax over.
    """
    allow_in_graph()
    usage = (quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source)
    column = None if quantizer.column_format is None else quantizer.column_format.spec
    shared = operands.rowwise is operands.columnwise
    layouts: list[tuple[Any, ...]] = []
    inner: list[tuple[str, Tensor | None]] = []
    for slot, operand in (("rowwise", operands.rowwise), ("columnwise", None if shared else operands.columnwise)):
        if operand is not None:
            layouts.append((slot, operand.format.spec, operand.dim, None, values.dtype))
            parts = (("codes", operand.codes), ("scale_inv", operand.scale_inv), ("amax", operand.amax))
            inner += [(f"{slot}_{name}", part) for name, part in parts]
    held = [(name, tensor) for name, tensor in (*inner, ("scale", scale)) if tensor is not None]
    names = tuple([name for name, _ in held])
    description = (quantizer.row_format.spec, column, *usage), tuple(layouts), shared, names, group
    return _wrapped(values, description, label, *[tensor for _, tensor in held])


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
        row, column = (None if o is None else o._replace(codes=o.codes.clone()) for o in operands)
        operands = Quantized(row, row if operands.rowwise is operands.columnwise else column)
    return as_quantized_tensor(
        values, operands, quantizer, scale, "quantize", None if amax_group is None else group.name
    )


def reuse(x: QuantizedTensor, quantizer: Quantizer) -> Quantized | None:
    """Returns operands in traced code if they are what ``quantizer`` would give, else None."""
    if not x.holds_own_matrix:
        return None
    held, shared = x.held
    shape = matrix_shape(x.shape)
    found: dict[str, Operand | None] = {"rowwise": None, "columnwise": None}
    for slot, spec, dim, names in held:
        for fmt in (quantizer.row_format, quantizer.format(COLUMNWISE)):
            if fmt.spec == spec and found[slot] is None:
                scale_inv, amax = (
                    getattr(x, f"{slot}_{name}") if name in names else None for name in ("scale_inv", "amax")
                )
                found[slot] = Operand(getattr(x, f"{slot}_codes"), scale_inv, amax, fmt, dim, shape, x.dtype)
    operands = Quantized(found["rowwise"], found["rowwise"] if shared else found["columnwise"])
    for dim, wanted in ((ROWWISE, quantizer.rowwise), (COLUMNWISE, quantizer.columnwise)):
        fits = [o for o in operands if o is not None and o.serves(dim) and o.format.spec == quantizer.format(dim).spec]
        if wanted and not fits:
            return None
    return operands
