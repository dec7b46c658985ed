"""Tokens sorted by the experts that they go to, and back: around the grouped linears of a mixture of experts.

Nothing is dropped but what the indices drop, and the host waits for nothing: the number of rows is always T k, and how
many of them each expert has is known to the device alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat import finite
from minifloat.arguments import Size, checked, label_of, shown
from minifloat.autocast import checks_finite
from minifloat.functional.autograd import apply, exporting, first_order, guarded
from minifloat.ops.permute import (
    check_indices,
    checked_indices,
    permute_rows,
    unpermute_rows,
    unpermute_rows_backward,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Routing(NamedTuple):
    """Where the k choices (slots) of each of T tokens go: :func:`sort_by_expert` makes it. Rows are sorted by expert.

    Attributes:
        order: int32 [T k], the slot of each row, ``token * k + choice``: a permutation.
        inverse: int32 [T, k], the row of each slot.
        counts: int32 [E], how many rows each expert has.
        offsets: int32 [E + 1], the first row of each expert, and then the number of rows of all experts. Later rows are
            those of dropped slots.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    offsets: Tensor


@checked
def sort_by_expert(indices: Tensor, num_experts: Size) -> Routing:
    """The order in which slots of one expert follow each other, tokens in their own order inside of each.

    Args:
        indices: int [T, k]: the experts of each token, 0 to E - 1, or -1 for a dropped slot: it comes after all experts
            and is not counted, :func:`permute` gives it a row of zeros, :func:`unpermute` adds none. Others on a
            device, which is not waited for, are dropped too, but under ``autocast(check_finite=True)``, which waits,
            they raise.
        num_experts: E.

    Raises:
        TypeError, ValueError: the arguments are no such, or the host has an index that is none; in compiled code when
            it runs, and with the class of the layer alone.
        RuntimeError: ``autocast(check_finite=True)`` in compiled code or the capture of a CUDA graph.
    """
    return route(indices, num_experts)


def route(indices: Tensor, num_experts: int, layer: object = "sort_by_expert") -> Routing:
    """:func:`sort_by_expert` in ``layer``, which errors name."""
    if indices.dim() != 2 or indices.shape[1] == 0 or indices.dtype not in _INTEGERS:
        raise ValueError(
            f"{label_of(layer)}: indices is {shown(indices)}; a tensor of signed integers [T, k] is needed"
        )
    indices = indices.to(torch.promote_types(indices.dtype, torch.int32))  # no int8 can be compared with all numbers
    on_host, compiling = indices.is_cpu and type(indices) is Tensor, torch.compiler.is_compiling()
    wait = finite.active and checks_finite() and not indices.is_meta
    if wait and (compiling or not on_host):
        finite.check_can_wait(label_of(layer))
    if on_host and compiling and not exporting():
        indices = checked_indices(indices, num_experts, layer if isinstance(layer, str) else type(layer).__name__)
    elif wait or (on_host and not compiling):
        check_indices(indices, num_experts, label_of(layer))
    flat = indices.reshape(-1)
    flat = flat.masked_fill((flat < 0) | (flat >= num_experts), num_experts)
    keys = flat.to(torch.int16 if num_experts < 2**15 else torch.int32)  # the fewer bits, the faster is a radix sort
    keys, order = torch.sort(keys, stable=True)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    inverse = torch.empty_like(rows).scatter_(0, order, rows)
    experts = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    offsets = torch.searchsorted(keys, experts, out_int32=True)
    return Routing(order.to(torch.int32), inverse.view(indices.shape), offsets.diff(), offsets)


@checked
def permute(x: Tensor, routing: Routing) -> Tensor:
    """Tokens ``x`` [T, H] as rows [T k, H] sorted by expert; the rows after those of all experts are 0.

    The gradient of a token is the sum over its k rows, in the order of its slots, in fp32, rounded once.

    Raises:
        TypeError, ValueError: ``x`` is not [T, H] of bf16, fp16, fp32 or fp64.
    """
    _check_rows("permute", "x", x, routing.inverse.shape[0], "T")
    return apply(PermuteFunction, x, routing.inverse, routing.offsets, False)


@checked
def unpermute(y: Tensor, routing: Routing, probabilities: Tensor | None = None) -> Tensor:
    """Rows ``y`` [T k, H] as tokens [T, H]: the sum of the k rows of each, times their probabilities if there are any.

    Products and sums are of fp32, in the order of the slots, and rounded once; so are the gradients, which are 0 for
    dropped slots, whatever ``y`` is there. Those of probabilities are computed and returned in fp32.

    Args:
        probabilities: [T, k], any floating-point dtype; fp32 as a router gives them.

    Raises:
        TypeError, ValueError: ``y`` is not [T k, H] of bf16, fp16, fp32 or fp64, or ``probabilities`` not [T, k].
    """
    _check_rows("unpermute", "y", y, routing.order.shape[0], "T k")
    if probabilities is None:
        return apply(PermuteFunction, y, routing.inverse, routing.offsets, True)
    _check_probabilities("unpermute", probabilities, routing)
    weights = probabilities.to(torch.promote_types(y.dtype, torch.float32))
    return apply(WeightedUnpermuteFunction, y, weights, routing.inverse, routing.offsets)


@checked
def permute_probabilities(probabilities: Tensor, routing: Routing) -> Tensor:
    """Probabilities [T, k] in the order of rows, fp32 [T k]; the gradient of a slot is that of its row.

    Raises:
        TypeError, ValueError: ``probabilities`` is not [T, k] of floating-point numbers.
    """
    _check_probabilities("permute_probabilities", probabilities, routing)
    return apply(PermuteProbabilitiesFunction, probabilities.float(), routing.order, routing.inverse)


def _check_probabilities(function: str, probabilities: Tensor, routing: Routing) -> None:
    if probabilities.shape != routing.inverse.shape or not probabilities.is_floating_point():
        raise ValueError(
            f"{function}: probabilities is {shown(probabilities)}; the routing is of {tuple(routing.inverse.shape)}, "
            "[T, k], and needs floating-point numbers of that shape"
        )


def _check_rows(function: str, name: str, x: Tensor, rows: int, symbol: str) -> None:
    if x.dim() != 2 or x.shape[0] != rows:
        raise ValueError(
            f"{function}: {name} is {shown(x)}; [{symbol}, H] is needed, and {symbol} is {rows} for this routing"
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"{function}: {name} is of {x.dtype}; bf16, fp16, fp32 and fp64 are supported")


class PermuteFunction(torch.autograd.Function):
    """Tokens to rows, or ``back``: each the gradient of the other. Keeps the routing alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: Tensor, offsets: Tensor, back: bool) -> Tensor:
        ctx.save_for_backward(inverse, offsets)
        ctx.back = back
        return (unpermute_rows if back else permute_rows)(x, None, inverse, offsets)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return (permute_rows if ctx.back else unpermute_rows)(dy, None, *ctx.saved_tensors), None, None, None


class WeightedUnpermuteFunction(torch.autograd.Function):
    """Keeps the routing and the probabilities, and ``y`` if these need a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, probabilities: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
        kept = (guarded(y),) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(guarded(probabilities), inverse, offsets, *kept)
        return unpermute_rows(y, probabilities, inverse, offsets)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, inverse, offsets, *kept = ctx.saved_tensors
        if not kept:
            return permute_rows(dx, probabilities, inverse, offsets), None, None, None
        return *unpermute_rows_backward(dx, kept[0], probabilities, inverse, offsets), None, None


class PermuteProbabilitiesFunction(torch.autograd.Function):
    """Both directions read by index, so that nothing is summed."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return probabilities.reshape(-1)[order]

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
