"""The autograd function of a linear layer, Y = X W^T + b, on quantized operands, and what it saves.

A call varies along three axes, each an object with methods: its :class:`~minifloat.functional.spec.Spec` (what is
computed), its exchange (what ranks tell each other about activations: ``exchange.py``) and its weight source (where W's
operands come from and where dW goes: ``weight_source.py``). Fused modules (``fused_layers.py``, ``experts.py``) compose
the same three.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.autocast import DelayedCall
from minifloat.comm.collectives import Pending
from minifloat.formats import COLUMNWISE
from minifloat.functional import node
from minifloat.functional.autograd import as_output, first_order, guarded, replayed
from minifloat.functional.exchange import LOCAL, UNKNOWN, Exchange, KnownOfX, waited
from minifloat.functional.quantize import as_quantized_tensor, delayed_scale
from minifloat.functional.spec import Given, Spec
from minifloat.functional.weight_source import WeightSource
from minifloat.operand import Operand, Quantized
from minifloat.ops import new


class LinearCall(NamedTuple):
    """One call of a linear: its three axes, and what is given."""

    spec: Spec
    exchange: Exchange
    source: WeightSource
    given: Given


class LinearFunction(torch.autograd.Function):
    """Y = X W^T + b and its gradients.

    ======  ========  =================  ======================
    tensor  shape     contracted over    quantized along
    ======  ========  =================  ======================
    X       [..., K]  K (M in wgrad)     rowwise (columnwise)
    W       [N, K]    K (N in dgrad)     rowwise (columnwise)
    dY      [..., N]  N (M in wgrad)     rowwise (columnwise)
    ======  ========  =================  ======================

    fprop Y = X W^T + b; dgrad dX = dY W; wgrad dW = dY^T X; db = the sum of dY over the M rows. Saved are the
    columnwise X and W, the very codes of the rowwise ones where a format is symmetric; nothing that no gradient needs
    is saved or computed. Of a linear that is split over ranks these are the shapes of what a rank multiplies; each
    exchange has those of its inputs and outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, exchange: Exchange, source: WeightSource, given: Given, x: Tensor, weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:  # fmt: skip
        if not spec.eager and isinstance(spec, node.Traced):
            inputs, ctx.sizes = (x, weight, bias), (*x.shape, weight.shape[0])
            (y, *saved), after = node.forward("linear", (), (spec,), (given.delayed,), inputs, ctx.sizes)
            y = as_output(y, (*x.shape[:-1], weight.shape[0]))
            saved = [*saved, *[weight] * (source.memory(spec.options) is not None)]
        else:
            (y, *saved), after = forward_pass((spec, exchange, source, given), x, weight, bias)
            if exchange is not LOCAL or spec.options.quantize_output:
                y = output(spec, exchange, y, x.shape, given.delayed)
        ctx.call = (spec, exchange, source), given.delayed, after, x.shape
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        axes, delayed, after, x_shape = ctx.call
        (spec, exchange, source), saved = axes, ctx.saved_tensors
        if not spec.eager and isinstance(spec, node.Traced):
            memory = source.memory(spec.options)
            dx, dw, db = node.backward(after, (delayed,), (dy,), saved, ctx.sizes, (memory,))
            dw = dw if dw is None else dw.view(ctx.sizes[-1], ctx.sizes[-2])
            dx = dx if dx is None else as_output(dx, x_shape)
        else:
            dx, dw, db = backward_pass(axes, delayed, after, dy, saved)
            if dx is not None and (exchange is not LOCAL or spec.options.quantize_grad_input):
                dx = grad_input(spec, dx, x_shape, delayed)
        if delayed is not None:
            delayed.backward_finished()
        return None, None, None, None, dx, dw, db


def forward_pass(
    call: LinearCall | tuple[Spec, Exchange, WeightSource, Given], x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Sequence[Any], Any]:
    """Computes Y and what backward reads; then the layouts of that, and what of the call decides on the backward."""
    spec, exchange, source, given = call
    taped: Any = None
    if spec.forward is not None:
        if given.x is None and given.w is None and exchange is LOCAL:  # what forward_inputs finds, in less time
            inputs = [x, weight] if bias is None else [x, weight, bias]
            if given.delayed is not None:
                inputs += _history(given.delayed, 0)
            taped = (bias is None, len(inputs)), inputs
            if (again := spec.forward.again(*taped)) is not None:
                return again[0], (again[1], taped[0])
        else:
            read = x if given.x is None else None, weight if given.w is None else None, bias
            taped = forward_inputs([call], *read)

    def compute() -> tuple[list[Any], list[Any]]:
        # Delayed scaling: a backward that casts X again needs this forward's scale, which the next update replaces.
        x_scale = delayed_scale(given.delayed, "input", keep=True) if spec.saves_value else None
        known = UNKNOWN if x_scale is None else KnownOfX(x_scale)
        x_operands, w_operands, own_x = exchange.quantize_inputs(spec, source, given, x, weight, known)
        y = exchange.fprop(spec, x_operands, w_operands, bias, *given.out)
        if exchange is LOCAL and not spec.options.quantize_output:  # a part of what is replayed
            y = output(spec, exchange, y, x.shape, None)
        saved_w = source.save(spec, weight, w_operands) if spec.options.needs_x else None
        saved, layouts = pack(save_x(spec, exchange, x, own_x), saved_w)
        return [y, *saved, x_scale], layouts

    made, layouts = replayed(spec.forward, taped[0], taped[1], compute) if taped else compute()
    return made, (layouts, taped and taped[0])


def backward_pass(
    axes: tuple[Spec, Exchange, WeightSource], delayed: DelayedCall | None, after: tuple[Any, Any], dy: Tensor,
    saved: Sequence[Tensor | None],
) -> Sequence[Any]:  # fmt: skip
    """Computes dX [M, K], dW and db, each None if not needed, from what :func:`forward_pass` gave."""
    (spec, exchange, source), (layouts, key) = axes, after
    inputs: Any = None
    key = source.dtype, key
    if spec.backward is not None:
        if exchange is LOCAL and source.tasks is None and not source.main_grad:  # likewise
            inputs = [dy, *[each for each in saved if each is not None]]
            if delayed is not None:
                delayed.backward_begins()
                inputs += _history(delayed, 1)
            if (again := spec.backward.again(key, inputs)) is not None:
                return again[0]
        else:
            inputs = backward_inputs([(exchange, source, delayed)], dy, *saved)

    def compute() -> tuple[list[Any], None]:
        *packed, x_scale = saved
        x, w = unpack(layouts, packed)
        db = exchange.bias_gradient(spec, dy) if spec.options.needs_b else None
        dy_operands = exchange.quantize_dy(spec, dy, delayed)
        dx, dw = gradients(spec, exchange, source, dy_operands, x, w, x_scale)
        if dx is not None and exchange is LOCAL and not spec.options.quantize_grad_input:
            dx = grad_input(spec, dx, (*dy.shape[:-1], dx.shape[1]), None)
        return [dx, dw, waited(db)], None

    return (replayed(spec.backward, key, inputs, compute) if inputs else compute())[0]


class LinearPass(node.Pass):
    """Plan of a linear; its inputs are X, W and b."""

    def forward(self, calls: Any, inputs: Sequence[Any]) -> Sequence[Tensor | None]:
        return forward_pass(*calls, *inputs)[0]

    def results(self, sizes: Sequence[Any]) -> list[node.Result]:
        (spec,), (*lead, _, n) = self.specs, sizes
        y, (x, w) = node.Memory((prod(lead), n), spec.options.dtype), self._operands(sizes)
        kept = spec.saves_value and spec.config.delayed is not None
        return [y, *x.results, *w.results, node.Memory((1,), torch.float32) if kept else None]

    def _operands(self, sizes: Sequence[Any]) -> tuple[node.Saved, node.Saved]:
        *lead, k, n = sizes
        return node.saved_operands(self.specs[0], prod(lead), k, n, 0, 1)

    def saved(self, sizes: Sequence[Any]) -> list[node.Result]:
        return self.results(sizes)[1:]

    def backward(
        self, calls: Any, gradients: Sequence[Any], saved: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> Sequence[Tensor | None]:  # fmt: skip
        layouts = [each.layout for each in self._operands(sizes)]
        return backward_pass(calls[0][:3], calls[0].given.delayed, (layouts, None), gradients[0], saved)

    def gradients(self, sizes: Sequence[Any], given: Sequence[bool]) -> list[node.Result]:
        (spec,), (*lead, k, n), (into_memory,) = self.specs, sizes, self.into_memory
        types = spec.options
        return [
            node.Memory((prod(lead), k), types.dtype) if types.needs_x else None,
            node.Memory((n, k), types.dtype) if types.needs_w and not into_memory else None,
            node.Memory((n,), types.dtype) if types.needs_b else None,
        ]


node.Pass.kinds["linear"] = LinearPass
apply_eagerly = super(torch.autograd.Function, LinearFunction).apply
"""``LinearFunction.apply`` without the ten Python calls that ``torch.func`` needs."""


def gradients(
    spec: Spec, exchange: Exchange, source: WeightSource, dy: Any, x: Operand | None, w: Operand | None,
    x_scale: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Computes dgrad dX [M, K] and wgrad dW [N, K], each None if not needed; ``x``, ``w``: as forward saved them.

    What is gathered for wgrad is gathered during dgrad, and dX is summed over the ranks during wgrad.
    """
    dx: Pending[Tensor] | Tensor | None = None
    dw = None
    loaded = None if x is None else exchange.load_x(spec, x, x_scale)
    if w is not None:
        w = source.for_dgrad(spec, w)
        dx = exchange.dgrad(spec, dy, exchange.dequantized(w) if spec.override == "dequantized" else w)
    if loaded is not None:
        dw = source.accumulate(spec, partial(exchange.wgrad, spec, dy.columnwise or dy.along(COLUMNWISE), loaded))
    return waited(dx), dw


def output(spec: Spec, exchange: Exchange, y: Tensor, x_shape: Sequence[int], delayed: DelayedCall | None) -> Tensor:
    """Y [M, N] with the leading dims of X on this rank, quantized if that is wanted."""
    shape = exchange.output_shape(x_shape, y.shape[1]) if exchange.lengths else (*x_shape[:-1], y.shape[1])
    if not spec.eager or y.shape != shape or not y.is_contiguous() or y._is_view():
        y = as_output(y, shape)
    quantizes = spec.options.quantize_output and spec.eager  # else after the autograd function
    return as_quantized_tensor(y, spec.config.output, "output", delayed) if quantizes else y


def grad_input(spec: Spec, dx: Tensor, x_shape: Sequence[int], delayed: DelayedCall | None) -> Tensor:
    """Gives dX [M, K] the shape of X, quantized if that is wanted."""
    if not spec.eager or dx.shape != x_shape or not dx.is_contiguous() or dx._is_view():
        dx = as_output(dx, x_shape)
    quantizes = spec.options.quantize_grad_input
    return as_quantized_tensor(dx, spec.config.grad_input, "grad_input", delayed) if quantizes else dx


# ---- what backward saves, and what a taped pass reads ----


def forward_inputs(
    calls: Sequence[LinearCall | tuple[Spec, Exchange, WeightSource, Given]], *tensors: Tensor | None
) -> tuple[Any, list[Tensor | None]] | None:
    """Lists all that the forward of ``calls`` reads and writes: ``tensors``, what is given, histories; and a key of it.

    ``tensors``: without X and weights whose operands are given. None: the forward is not taped.
    """
    inputs, layouts = [*tensors], list[Any]()
    for _, exchange, _, given in calls:
        if exchange.memory is None:
            return None
        for operands in (given.x, given.w):
            if operands is not None:
                same = operands.columnwise is operands.rowwise
                packed, of_packed = pack(operands.rowwise, None if same else operands.columnwise)
                inputs += packed
                layouts += operands is given.x, same, *of_packed
        inputs += *given.out, *exchange.memory, *_history(given.delayed, 0)
    return tuple(layouts), inputs


def backward_inputs(
    linears: Sequence[tuple[Exchange, WeightSource, DelayedCall | None]], *tensors: Tensor | None
) -> list[Tensor | None] | None:
    """Lists the same of a backward whose weight gradients go to autograd; ``tensors`` begin with dY."""
    inputs = [*tensors]
    for exchange, source, delayed in linears:
        past_autograd = source.tasks is not None or source.main_grad
        if past_autograd or tensors[0] is None or exchange.memory is None:
            return None
        if delayed is not None:
            delayed.backward_begins()
        inputs += *exchange.memory, *_history(delayed, 1)
    return inputs


def _history(call: DelayedCall | None, direction: int) -> tuple[Tensor, ...]:
    """Lists what a pass reads and writes of delayed scaling's state."""
    if call is None:
        return ()
    scale, amaxes, *_ = call.histories[direction]
    return (scale, amaxes) if call.records[direction] else (scale,)


def save_x(spec: Spec, exchange: Exchange, x: Tensor | None, own: Quantized) -> Operand | None:
    """Chooses what wgrad needs of X: its values, or an operand; the caller may change either before backward."""
    if spec.saves_x == "nothing" or (spec.saves_x == "values" and x is None):
        return None
    operand: Operand
    if spec.saves_x == "values":
        operand = exchange.values(x)
    else:
        operand = (own.columnwise if spec.along == COLUMNWISE else own.rowwise) or own.along(spec.along)
    return operand if operand.format.quantized else operand._replace(codes=guarded(operand.codes))


def pack(*operands: Operand | None) -> tuple[list[Tensor | None], list[Any]]:
    """The tensors of operands, for ``save_for_backward``, where autograd's hooks see them, and how to put them back."""
    tensors: list[Tensor | None] = []
    layouts: list[Any] = []
    for operand in operands:
        if operand is None:
            tensors += (None,) * 4
            layouts.append((None, 4, ()))
            continue
        own = operand[:-5]
        if type(operand) is Operand:  # its ``tensors``, without a call
            own = *own[:2], own[2] if operand[3].scale_rule == "two_level" else None
        tensors += *own, operand[-1]
        layouts.append((type(operand), len(own) + 1, operand[-5:-1]))
    return tensors, layouts


def unpack(layouts: Sequence[Any], tensors: Sequence[Tensor | None]) -> list[Any]:
    """The operands that :func:`pack` was given."""
    operands: list[Any] = []
    compiling, first = torch.compiler.is_dynamo_compiling(), 0
    for kind, count, layout in layouts:
        *own, offsets = tensors[first : first + count]
        codes = own[0]
        if kind is None or codes is None:
            operands.append(None)
        else:
            if not compiling:  # a read of memory that FSDP2 has freed would end the process
                assert not codes.numel() or codes.untyped_storage().nbytes(), "saved codes were freed before backward"
            operands.append(new(kind, (*own, *layout, offsets)))
        first += count
    return operands
