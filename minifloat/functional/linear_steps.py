"""The steps of a linear: what a plan chooses from for each of its callables.

Each does one thing in one way, for one choice of recipe, parallelism and options; ``linear_plan.py`` binds what the
plan knows and the autograd functions call them in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.comm.collectives import Pending
from minifloat.delayed_call import DelayedCall
from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE
from minifloat.functional import shared_cast
from minifloat.functional.autograd import guarded
from minifloat.functional.gathered import Gathered
from minifloat.functional.gemm import WeightGemm
from minifloat.functional.grouped import GroupLayout
from minifloat.functional.linear_config import LinearOptions
from minifloat.functional.quantize import RoleCasts, delayed_scale, quantize, quantize_part, reuse
from minifloat.functional.tensor_parallel import TensorParallel, done
from minifloat.operand import Operand, Quantized
from minifloat.quantizer import Amaxes, Quantizer, as_matrix
from minifloat.tensor import QuantizedTensor, traced

Gemm = Callable[..., Tensor]
Load = Callable[[Operand, Tensor | None], Any]


class Call:
    """What differs between calls under one plan.

    Args:
        delayed_call: where delayed scaling reads its scales and records its amaxes.
        x, w: operands that exist already: of a quantized tensor, a cached weight, a sibling's input.
        eager: no compiler traces it.
        shares_x: forward leaves the operands of X here, for siblings to come.
        groups: which rows of X are of which group, of a grouped linear.
        out, dgrad_out: tensors that fprop and dgrad write to, or none, of a grouped linear.
        owners: the parameters that W was put together from in traced code, where it cannot carry them.
    """

    __slots__ = ("delayed_call", "dgrad_out", "eager", "groups", "out", "owners", "shares_x", "w", "x")

    def __init__(self, delayed_call: DelayedCall | None, x: Quantized | None, w: Quantized | None, eager: bool) -> None:
        self.delayed_call, self.x, self.w, self.eager = delayed_call, x, w, eager
        self.shares_x = False
        self.groups: GroupLayout | None = None
        self.owners: tuple[Tensor, ...] = ()
        self.out: tuple[Tensor, ...] = ()
        self.dgrad_out: tuple[Tensor, ...] = ()


# ---- what backward saves ----


def nothing(*_: Any) -> None:
    """For a gradient that is not needed."""
    return None


def identity(x: Any) -> Any:
    """For a linear that is not split."""
    return x


def save_value(x: Tensor | None, operands: Quantized) -> Operand | None:
    """The value, which the caller may change before backward; None where it was never computed."""
    if x is None:
        return None
    operand = unquantized(x)
    return operand._replace(codes=guarded(operand.codes))


def save_weight_value(weight: Tensor, operands: Quantized) -> Operand:
    """For dgrad in high precision."""
    return unquantized(weight)


def save_part(dim: int, weight: Any, operands: Quantized) -> Operand:
    """Of a weight that was gathered this rank's part."""
    part: Operand
    part, weight.etp_cast = weight.etp.saved(dim)
    return part


def save_part_value(weight: Any, operands: Quantized) -> Operand:
    """The same in high precision."""
    part: Operand
    part, weight.etp_cast = weight.etp.saved(ROWWISE, values=True)
    return part


def save_along(dim: int, x: Tensor | None, operands: Quantized) -> Operand:
    """The operand that is scaled along ``dim``."""
    return operands.along(dim)


def save_x_along(dim: int, x: Tensor | None, operands: Quantized) -> Operand:
    """The same of X, whose values the caller may change before backward where they are the codes."""
    operand = operands.along(dim)
    return operand if operand.format.quantized else operand._replace(codes=guarded(operand.codes))


def unquantized(x: Tensor) -> Operand:
    """The values of ``x`` [..., K] as an operand."""
    matrix = as_matrix(x.dequantize() if isinstance(x, QuantizedTensor) else x)
    return Operand(matrix, None, None, IDENTITY, ROWWISE, (matrix.shape[0], matrix.shape[1]), matrix.dtype)


# ---- forward ----


class InputCasts(NamedTuple):
    """The casts of X and W together, and of each by itself where the other exists already."""

    both: RoleCasts
    x: RoleCasts
    w: RoleCasts


def quantize_inputs(
    casts: InputCasts,
    call: Call,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None = None,
    x_amaxes: Amaxes | None = None,
    label: Callable[[Quantized], Quantized] | None = None,
) -> tuple[Quantized, Quantized, Quantized]:
    """X and W in the orientations that forward and backward read, those that do not exist yet in one launch a phase.

    ``x``: None if its operands exist; ``x_scale``, ``x_amaxes``: what its cast needs to know, if that is known;
    ``label``: what is done to operands that are cast from it.
    """
    x_operands, w_operands = call.x, call.w
    if w_operands is None and isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    if x_operands is None:
        assert x is not None
        x = x.dequantize() if isinstance(x, QuantizedTensor) else x
        given = None if x_amaxes is None else (x_amaxes, None)  # the weight's own are found
        if w_operands is None:
            x_operands, w_operands = casts.both((x, weight), call.delayed_call, x_scale, given)
        else:
            (x_operands,) = casts.x((x,), call.delayed_call, x_scale, None if given is None else given[:1])
        x_operands = x_operands if label is None else label(x_operands)
    elif w_operands is None:
        (w_operands,) = casts.w((weight,), call.delayed_call)
    assert w_operands is not None
    return x_operands, w_operands, x_operands


def quantize_and_gather(
    casts: InputCasts,
    quantizer: Quantizer,
    parallel: TensorParallel,
    call: Call,
    x: Tensor | None,
    weight: Tensor,
    x_scale: Tensor | None = None,
    x_amaxes: Amaxes | None = None,
    label: Callable[[Quantized], Quantized] | None = None,
) -> tuple[Any, Quantized, Quantized]:
    """The same where X is gathered, which goes on while the weight is cast."""
    part, w = call.x, call.w
    if part is None:
        assert x is not None
        part = quantize_part(x, quantizer, "input", call.delayed_call, parallel, x_scale, x_amaxes)
        part = part if label is None else label(part)
    gathered = shared_cast.gathered(part) or parallel.gather(part, rowwise=True)
    if w is None:
        weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        (w,) = casts.w((weight,), call.delayed_call)
    return shared_cast.offer(part, gathered), w, part


def with_w_in(
    dtype: torch.dtype, quantize_inputs: Callable[..., tuple[Any, Quantized, Quantized]], call: Call, x: Tensor | None,
    weight: Tensor, *options: Any,
) -> tuple[Any, Quantized, Quantized]:  # fmt: skip
    """The same where W is not quantized: in the dtype of the product, once for fprop and dgrad."""
    return quantize_inputs(call, x, weight if isinstance(weight, QuantizedTensor) else weight.to(dtype), *options)


def with_gathered_w(
    quantize_inputs: Callable[..., tuple[Any, Quantized, Quantized]], call: Call, x: Tensor | None, weight: Any,
    *options: Any,
) -> tuple[Any, Quantized, Quantized]:  # fmt: skip
    """The same where W is gathered: not before it is multiplied, and kept by nothing else."""
    call.w = weight.etp.forward()
    operands = quantize_inputs(call, x, weight, *options)
    call.w = None
    return operands


def fprop(
    multiply: Gemm, dtype: torch.dtype, fast: bool, x: Quantized, w: Quantized, bias: Tensor | None, *out: Tensor
) -> Tensor:
    """Y = X W^T + b; to ``out``, if that is given."""
    x_rows, w_rows = x.rowwise or x.along(ROWWISE), w.rowwise or w.along(ROWWISE)
    return multiply("fprop", x_rows, w_rows, dtype, bias, fast, *out)


def sharded_fprop(
    parallel: TensorParallel, multiply: Gemm, dtype: torch.dtype, fast: bool, x: Any, w: Quantized, bias: Any
) -> Tensor:
    """Y of a linear that is split over ranks, summed where they have parts of K."""
    return parallel.output(WeightGemm("fprop", w, dtype, fast, None, multiply), x, bias)


AsOutput = Callable[[Tensor, Sequence[int]], Tensor]


def output(as_output: AsOutput, y: Tensor, x_shape: torch.Size, delayed_call: DelayedCall | None) -> Tensor:
    """Y [M, N] with the leading dims of X."""
    return as_output(y, (*x_shape[:-1], y.shape[1]))


def sharded_output(
    as_output: AsOutput, parallel: TensorParallel, y: Tensor, x_shape: torch.Size, delayed_call: DelayedCall | None
) -> Tensor:
    """The same of a rank's rows."""
    return as_output(y, parallel.output_shape(x_shape, y.shape[1]))


def grad_input(as_output: AsOutput, dx: Tensor, x_shape: torch.Size, delayed_call: DelayedCall | None) -> Tensor:
    """dX [M, K] in the shape of X."""
    return as_output(dx, x_shape)


def quantized(
    output: Callable[..., Tensor],
    quantizer: Quantizer,
    kind: str,
    y: Tensor,
    x_shape: torch.Size,
    delayed_call: DelayedCall | None,
) -> Tensor:
    """What ``output`` gives, quantized."""
    return as_quantized_tensor(output(y, x_shape, delayed_call), quantizer, kind, delayed_call)


def quantized_in_graph(y: Tensor, quantizer: Quantizer, delayed_call: DelayedCall | None, label: str) -> Tensor:
    """The same of Y in traced code, after the autograd function of ``label``: Dynamo traces none that returns it."""
    return as_quantized_tensor(y, quantizer, "output", delayed_call, label)


def as_quantized_tensor(
    x: Tensor, quantizer: Quantizer, kind: str, delayed_call: DelayedCall | None, label: str | None = None
) -> Tensor:
    """``x`` as a tensor that the next layer takes as it is; in traced code with the ``label`` of its layer."""
    if not quantizer.quantized:
        return x
    operands = quantize(x.detach(), quantizer, kind, delayed_call, gemm_ready=False)
    scale = delayed_scale(delayed_call, kind)
    scale = None if scale is None else scale.clone()
    if label is not None:
        return traced.as_quantized_tensor(x, operands, quantizer, scale, label)
    return QuantizedTensor.from_operands(operands, quantizer, x.shape, x.dtype, scale=scale)


# ---- backward ----


def quantize_dy(
    casts: RoleCasts,
    quantizer: Quantizer,
    dy: Tensor,
    delayed_call: DelayedCall | None,
    amaxes: Amaxes | None = None,
    groups: None = None,
) -> Quantized:
    """dY in the orientations that dgrad and wgrad read; its own operands where it comes quantized alike."""
    if isinstance(dy, QuantizedTensor):
        existing = reuse(dy, quantizer)
        if existing is not None:
            return existing
        dy = dy.dequantize()
    return casts((dy,), delayed_call, None, None if amaxes is None else (amaxes,))[0]


def unquantized_dy(
    dy: Tensor, delayed_call: DelayedCall | None, amaxes: Amaxes | None = None, groups: None = None
) -> Quantized:
    """dY in high precision, under a ``backward_override``."""
    return Quantized(unquantized(dy), None)


def gather_dy(
    options: LinearOptions,
    quantizer: Quantizer | None,
    dy: Tensor,
    delayed_call: DelayedCall | None,
    amaxes: None = None,
    groups: None = None,
) -> Gathered:
    """This rank's rows of dY quantized, and all rows gathered; in high precision without a quantizer."""
    parallel = options.parallel
    if quantizer is None:
        part = Quantized(unquantized(dy), None)
    else:
        part = quantize_part(dy, quantizer, "grad_output", delayed_call, parallel)
    return parallel.gather(part, rowwise=options.needs_x, columnwise=options.needs_w)


def _one_orientation(operand: Operand) -> Quantized:
    return Quantized(operand, None) if operand.dim == ROWWISE else Quantized(None, operand)


def dequantized(operand: Operand) -> Operand:
    """The values that it stands for."""
    return unquantized(operand.dequantize())


def cast_value(cast: Callable[..., Quantized], quantizer: Quantizer, value: Operand, scale: Tensor | None) -> Operand:
    """X was saved in high precision: cast now, and not recorded again."""
    return cast(value.codes, quantizer, scale).along(COLUMNWISE)


def gather_x(
    parallel: TensorParallel, along: int, load: Load | None, operand: Operand, scale: Tensor | None
) -> Gathered:
    """The X of all ranks, for wgrad; the gather begins."""
    part = _one_orientation(operand if load is None else load(operand, scale))
    return parallel.gather(part, rowwise=along == ROWWISE, columnwise=along != ROWWISE, multiplied=False)


def gather_w(dim: int, values: bool, w: Operand, weight: Any) -> Operand:
    """W gathered from the parts that ranks have saved; ``values``: in high precision."""
    whole: Operand = weight.etp.backward(dim, w, weight.etp_cast, values=values)
    return whole


def dgrad(multiply: Gemm, dtype: torch.dtype, fast: bool, dy: Quantized, w: Operand, *out: Tensor) -> Tensor:
    """dX = dY W; to ``out``, if that is given."""
    return multiply("dgrad", dy.rowwise or dy.along(ROWWISE), w, dtype, None, fast, *out)


def sharded_dgrad(options: LinearOptions, fast: bool, dy: Quantized | Gathered, w: Operand) -> Pending[Tensor]:
    """dX of a linear that is split over ranks, whose sum goes on during wgrad."""
    wgrad_follows = options.needs_w and options.wgrad_tasks is None
    product = WeightGemm("dgrad", _one_orientation(w), options.dtype, fast)
    return options.parallel.start_grad_input(product, dy, wgrad_follows)


def wgrad(
    multiply: Gemm, fast: bool, dy: Operand, x: Operand, dtype: torch.dtype, out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """dW = dY^T X; to ``out``, or added to it."""
    return multiply("wgrad", dy, x, dtype, None, fast, out, accumulate)


def of_values(dequantize: Callable[[Any], Any], product: Callable[..., Any], dy: Any, saved: Any, *options: Any) -> Any:
    """dgrad or wgrad of the values of a saved operand, for a backward in high precision that starts from codes."""
    return product(dy, dequantize(saved), *options)


def wgrad_of_gathered(along: int, wgrad: Callable[..., Tensor], dy: Operand, x: Gathered, *into: Any) -> Tensor:
    """dW of the X of all ranks, once that is here."""
    return wgrad(dy, x.along(along), *into)


def column_sum(dy: Tensor, groups: None = None) -> Tensor:
    """The gradient of a bias, [N]: dY summed over its rows."""
    return as_matrix(dy.dequantize() if isinstance(dy, QuantizedTensor) else dy).sum(0)


def reduced_column_sum(parallel: TensorParallel, dy: Tensor, groups: None = None) -> Pending[Tensor | None]:
    """The same, summed over the ranks where each has rows of its own."""
    db = column_sum(dy)
    return parallel.start_sum_of_rows(db) if parallel.mode == "row" else done(db)


def reduce_dw(sink: Callable[..., object], options: LinearOptions, weight: Any, product: Callable[..., Tensor]) -> None:
    """dW summed over ranks with other data, each of which gives its rows to ``sink``; autograd gets nothing."""
    weight.etp.reduce(product, sink, options.main_grad, options.wgrad_tasks is not None)
