"""A linear of many experts: the exchange and the weight source of operands that are made for groups of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minifloat.delayed_call import DelayedCall
from minifloat.formats import COLUMNWISE
from minifloat.functional import batch_invariant
from minifloat.functional.exchange import UNKNOWN, Inputs, KnownOfX, Local, high_precision
from minifloat.functional.grouped import GroupedCasts, GroupLayout, bias_gradient, grouped_casts, multiply, values
from minifloat.functional.grouped_weight import SeparateOperands, multiply_weight
from minifloat.functional.permutation import Routing
from minifloat.functional.spec import Spec
from minifloat.functional.weight_source import LocalWeight, Product, computed, into_main_grad, is_old, written
from minifloat.operand import Quantized
from minifloat.ops import new
from minifloat.ops.permute import unpermute_rows
from minifloat.quantizer import Amaxes
from minifloat.tensor import QuantizedTensor

if TYPE_CHECKING:
    from minifloat.functional.linear import Given


class Tokens(NamedTuple):
    """Says that X or Y has tokens [T, K]: each goes to k rows, read where these are cast, and gets the sum of k.

    ``rows``: int32 [T k], the token of each row.
    """

    routing: Routing
    rows: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Experts(Local):
    """No exchange: one rank has all experts; X [M, K] has the rows of all of them, W is [G, N, K].

    Args:
        layout: which rows are of which expert.
        dgrad_out: memory for dX, if given.
        x_tokens, y_tokens: of X and dX, or of Y and dY.
    """

    layout: GroupLayout
    dgrad_out: tuple[Tensor, ...] = ()
    x_tokens: Tokens | None = None
    y_tokens: Tokens | None = None

    def values(self, x: Any) -> Any:
        return values(x, self.layout.offsets)

    def dequantized(self, operand: Any) -> Any:
        operand = operand.joined() if isinstance(operand, SeparateOperands) else operand
        return values(operand.dequantize(), operand.offsets)

    def quantize_inputs(
        self, spec: Spec, source: LocalWeight, given: Given, x: Tensor | None, weight: Tensor, known: KnownOfX = UNKNOWN
    ) -> Inputs:
        x_operands: Any = given.x
        w = source.operands(given.w)
        if x_operands is None:
            assert x is not None
            casts = grouped_casts(spec.x, "input", spec.options.device)
            x_operands = self._cast(casts, x, self.x_tokens, given.delayed, known.scale)
        if w is None:
            casts = grouped_casts(spec.w, "weight", spec.options.device)
            w = quantize_weight(casts, high_precision(spec, weight), given.delayed)
        return x_operands, w, x_operands

    def _cast(self, casts: GroupedCasts, x: Tensor, tokens: Tokens | None, *options: Any) -> Quantized:
        return casts(x, self.layout.offsets, *options) if tokens is None else casts.of_tokens(x, *tokens, options[0])

    def fprop(self, spec: Spec, x: Any, w: Any, bias: Tensor | None, *out: Tensor) -> Tensor:
        gemm = batch_invariant.multiply_weight if spec.options.batch_invariant else multiply_weight
        x_rows, w_rows = x.rowwise or x.along(-1), w.rowwise or w.along(-1)
        y = gemm("fprop", x_rows, w_rows, spec.options.dtype, bias, spec.config.fast_fprop, *out)
        return _summed(y, self.y_tokens)

    def bias_gradient(self, spec: Spec, dy: Tensor) -> Tensor:
        """db [G, N]."""
        return bias_gradient(dy, self.layout)

    def quantize_dy(
        self, spec: Spec, dy: Tensor, delayed_call: DelayedCall | None, amaxes: Amaxes | None = None
    ) -> Quantized:
        if spec.override is not None:
            return new(Quantized, (self.values(dy), None))
        return self._cast(grouped_casts(spec.dy, "grad_output", spec.options.device), dy, self.y_tokens, delayed_call)

    def load_x(self, spec: Spec, x: Any, scale: Tensor | None) -> Any:
        if spec.again is None:
            return x
        casts = grouped_casts(spec.again, "input", spec.options.device)
        return casts(x.codes, x.offsets, None, scale).along(COLUMNWISE)

    def dgrad(self, spec: Spec, dy: Any, w: Any) -> Tensor:
        dy_rows = dy.rowwise or dy.along(-1)
        dx = multiply_weight("dgrad", dy_rows, w, spec.options.dtype, None, spec.config.fast_dgrad, *self.dgrad_out)
        return _summed(dx, self.x_tokens)

    def wgrad(
        self, spec: Spec, dy: Any, x: Any, dtype: torch.dtype, out: Tensor | None = None, accumulate: bool = False
    ) -> Tensor:
        """dW [G, N, K]."""
        x = self.dequantized(x) if spec.override == "dequantized" else x
        return multiply("wgrad", dy, x, dtype, None, spec.config.fast_wgrad, out, accumulate)


def _summed(rows: Tensor, tokens: Tokens | None) -> Tensor:
    """The rows, or for each token the sum of its own."""
    if tokens is None:
        return rows
    return unpermute_rows(rows, None, tokens.routing.inverse, tokens.routing.offsets)


class ExpertWeights(LocalWeight):
    """The weights of experts, W [G, N, K], which this rank has whole: one parameter, or one [N, K] for each."""

    def save(self, spec: Spec, weight: Tensor, w: Any) -> Any:
        if spec.override != "high_precision":
            return w.along(spec.along)
        layout = GroupLayout.uniform(weight.shape[0], weight.shape[1], weight.device)
        weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        return values(weight.flatten(0, 1), layout.offsets)

    def _parts(self, dw: Tensor) -> Iterable[tuple[Any, Tensor]]:
        return zip(self.parameters, (dw,) if self.parameters[0].dim() == 3 else dw.unbind(), strict=True)

    def _add(self, spec: Spec, product: Product) -> Tensor | None:
        """Separate ``main_grad``, those of weights that want a gradient, are added to in one launch."""
        if not self.main_grad or self.parameters[0].dim() == 3:
            return super()._add(spec, product)
        parameters, first = self.parameters, self.parameters[0]
        dtype = next(own.main_grad.dtype for own in parameters if own.requires_grad)
        parts = [(own, part) for own, part in self._parts(product(dtype)) if own.requires_grad]
        if not spec.eager:
            for own, part in parts:
                own.main_grad.add_(part)
            return None
        asked = False
        if len({id(own.main_grad) for own, _ in parts}) < len(parts):  # some share one: in turn
            for own, part in parts:
                asked |= into_main_grad(self.overwrite, own, partial(computed, part)) is not None
        else:
            new: tuple[list[Tensor], list[Tensor]] = [], []
            held: tuple[list[Tensor], list[Tensor]] = [], []
            for own, part in parts:
                old = is_old(self.overwrite, own)
                held[old].append(own.main_grad)
                new[old].append(part.to(own.main_grad.dtype))
                asked |= written(own, old)
            if held[False]:
                torch._foreach_add_(held[False], new[False])
            if held[True]:
                torch._foreach_copy_(held[True], new[True])
        return torch.zeros((len(parameters), *first.shape), dtype=first.dtype, device=first.device) if asked else None


EXPERT_WEIGHTS = ExpertWeights()


def quantize_weight(casts: GroupedCasts, weight: Tensor, delayed_call: DelayedCall | None) -> Quantized:
    """W [G, N, K], each group by itself; of one that is quantized already its values."""
    weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    layout = GroupLayout.uniform(weight.shape[0], weight.shape[1], weight.device)
    return casts(weight.flatten(0, 1), layout.offsets, delayed_call)
