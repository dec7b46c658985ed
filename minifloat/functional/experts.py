"""Linears and MLPs of many experts: exchange, weights and autograd function of operands made for groups of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minifloat.autocast import DelayedCall
from minifloat.formats import COLUMNWISE
from minifloat.functional.autograd import as_output, first_order, guarded
from minifloat.functional.exchange import UNKNOWN, Exchange, Inputs, KnownOfX, waited
from minifloat.functional.grouped import GroupLayout, joined, joined_for_dgrad
from minifloat.functional.linear import LinearCall, grad_input, gradients, output, pack, save_x, unpack
from minifloat.functional.norm_activation import (
    VALUES,
    Activation,
    measures_amax,
    one_format,
)
from minifloat.functional.quantize import RoleCasts, delayed_scale, values_of
from minifloat.functional.router import Routing, permute, unpermute
from minifloat.functional.spec import Given, Spec
from minifloat.functional.weight_source import Product, WeightSource, computed, into_main_grad, is_old, written
from minifloat.operand import Operand, Quantized
from minifloat.ops import new
from minifloat.ops.activation import grouped_activation, grouped_activation_backward, out_columns
from minifloat.ops.grouped import gathered_amax, grouped_sum
from minifloat.ops.permute import unpermute_rows
from minifloat.ops.quantize import casts_blocks
from minifloat.quantizer import Amaxes, as_matrix
from minifloat.tensor import QuantizedTensor


class Tokens(NamedTuple):
    """Says that X or Y has tokens [T, K]: each goes to k rows, read where these are cast, and gets the sum of k.

    ``rows``: int32 [T k], the token of each row.
    """

    routing: Routing
    rows: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Experts(Exchange):
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

    @property
    def memory(self) -> tuple[Tensor, ...] | None:
        of_tokens = self.x_tokens is not None or self.y_tokens is not None
        return None if of_tokens else (self.layout.offsets, *self.dgrad_out)

    def values(self, x: Any) -> Any:
        return values_of(x, self.layout.offsets)

    def dequantized(self, operand: Any) -> Any:
        return super().dequantized(joined(operand))

    def quantize_inputs(
        self, spec: Spec, source: WeightSource, given: Given, x: Tensor | None, weight: Tensor,
        known: KnownOfX = UNKNOWN,
    ) -> Inputs:  # fmt: skip
        x_operands, w = given.x, source.operands(given.w)
        if x_operands is None:
            assert x is not None
            x_operands = self._cast(spec.casts.x, x, self.x_tokens, given.delayed, known.scale)
        if w is None:  # cast while ranks send tokens
            own = spec.casts_w or isinstance(weight, QuantizedTensor)
            w = quantize_weight(spec.casts.w, weight if own else weight.to(spec.options.dtype), given.delayed)
        x_operands = waited(x_operands)
        return x_operands, w, x_operands

    def _cast(
        self, cast: RoleCasts, x: Tensor, tokens: Tokens | None, delayed_call: DelayedCall | None, *scale: Tensor | None
    ) -> Any:
        """The operands of rows, or of the rows of tokens; ranks may still be sending them."""
        if tokens is None:
            return cast.of_groups(x, self.layout.offsets, delayed_call, *scale)
        return cast_tokens(cast, x, tokens.rows, tokens.routing.offsets, delayed_call)

    def _summed(self, rows: Tensor, tokens: Tokens | None) -> Any:
        """The rows, or for each token the sum of its own, which may be on their way."""
        if tokens is None:
            return rows
        return unpermute_rows(rows, None, tokens.routing.inverse, tokens.routing.offsets)

    def fprop(self, spec: Spec, x: Any, w: Any, bias: Tensor | None, *out: Tensor) -> Any:
        """Y; results of tokens may be on their way back."""
        x_rows, w_rows = x.rowwise or x.along(-1), joined(w.rowwise or w.along(-1))
        y = spec.multiply_rows("fprop", x_rows, w_rows, spec.options.dtype, bias, spec.config.fast_fprop, *out)
        return self._summed(y, self.y_tokens)

    def bias_gradient(self, spec: Spec, dy: Tensor) -> Tensor:
        """db [G, N]."""
        return grouped_sum(as_matrix(dy), self.layout.offsets)

    def quantize_dy(
        self, spec: Spec, dy: Tensor, delayed_call: DelayedCall | None, amaxes: Amaxes | None = None
    ) -> Quantized:
        if spec.override is not None:
            return new(Quantized, (self.values(dy), None))
        operands: Quantized = waited(self.start_dy(spec, dy, delayed_call))
        return operands

    def start_dy(self, spec: Spec, dy: Tensor, delayed_call: DelayedCall | None) -> Any:
        """Starts :meth:`quantize_dy`, without an override."""
        return self._cast(spec.casts.dy, dy, self.y_tokens, delayed_call)

    def load_x(self, spec: Spec, x: Any, scale: Tensor | None) -> Any:
        if spec.again is None:
            return x
        cast = RoleCasts([spec.again], ["input"], spec.options.device)
        return cast.of_groups(x.codes, x.offsets, None, scale).along(COLUMNWISE)

    def dgrad(self, spec: Spec, dy: Any, w: Any) -> Any:
        dy_rows = dy.rowwise or dy.along(-1)
        options = spec.options.dtype, None, spec.config.fast_dgrad, *self.dgrad_out
        dx = spec.multiply("dgrad", dy_rows, joined_for_dgrad(w, dy_rows), *options)
        return self._summed(dx, self.x_tokens)


class LocalExperts(NamedTuple):
    """Experts that are all on this rank: rows are where they are needed.

    Attributes:
        layout: rows of each expert.
        routing: that of the tokens, if these are given.
        fused: as of ``Dispatch``.
    """

    layout: GroupLayout
    routing: Routing | None = None
    fused: bool = True

    def spread(self, x: Tensor) -> Tensor:
        """Tokens [T, K] to the rows of their experts."""
        assert self.routing is not None
        return permute(x, self.routing)

    def gather(self, y: Tensor) -> Tensor:
        """Rows of experts to the sums of each token's."""
        assert self.routing is not None
        return unpermute(y, self.routing)

    def probabilities_of(self, p: Tensor) -> Tensor:
        """Returns the probabilities of rows, which are where they are needed."""
        return p

    def collect(self, y: Tensor) -> Tensor:
        """Rows of experts, where their tokens are."""
        return y

    def exchange(self, x_tokens: Tokens | None, y_tokens: Tokens | None) -> Experts:
        """The exchange of a linear."""
        return Experts(layout=self.layout, x_tokens=x_tokens, y_tokens=y_tokens)


def cast_tokens(
    cast: RoleCasts, x: Tensor, rows: Tensor, offsets: Tensor, delayed_call: DelayedCall | None,
    amax: Tensor | None = None,
) -> Quantized:  # fmt: skip
    """Makes the operands of the groups of ``x[rows]``, of tokens ``x`` [T, K]; where kernels can, it is never written.

    Args:
        rows: int32 [M], the token of each row.
        amax: of each group, fp32 [G], if it is known.
    """
    quantizer = cast.quantizers[0]
    one_amax = measures_amax(quantizer)
    from_tokens = one_amax and one_format(quantizer) is not None and cast.prepared.columns_k_major
    if not from_tokens and not casts_in_kernel(cast):
        return cast.of_groups(x.index_select(0, rows), offsets, delayed_call, amax=amax)
    if one_amax and amax is None:
        amax = gathered_amax(x, rows, offsets)
    return cast.of_groups(x, offsets, delayed_call, amax=amax, rows=rows)


class ExpertWeights(WeightSource):
    """The weights of experts, W [G, N, K], which this rank has whole: one parameter, or one [N, K] for each."""

    def save(self, spec: Spec, weight: Tensor, w: Any) -> Any:
        if spec.override != "high_precision":
            return super().save(spec, weight, w)
        layout = GroupLayout.uniform(weight.shape[0], weight.shape[1], weight.device)
        return values_of(weight, layout.offsets)

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
                asked |= into_main_grad(own, partial(computed, part)) is not None
        else:
            new: tuple[list[Tensor], list[Tensor]] = [], []
            held: tuple[list[Tensor], list[Tensor]] = [], []
            for own, part in parts:
                old = is_old(own)
                held[old].append(own.main_grad)
                new[old].append(part.to(own.main_grad.dtype))
                asked |= written(own, old)
            if held[False]:
                torch._foreach_add_(held[False], new[False])
            if held[True]:
                torch._foreach_copy_(held[True], new[True])
        return torch.zeros((len(parameters), *first.shape), dtype=first.dtype, device=first.device) if asked else None


EXPERT_WEIGHTS = ExpertWeights()


def quantize_weight(cast: RoleCasts, weight: Tensor, delayed_call: DelayedCall | None) -> Quantized:
    """W [G, N, K], each group by itself; of one that is quantized already its values."""
    weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    layout = GroupLayout.uniform(weight.shape[0], weight.shape[1], weight.device)
    return cast.of_groups(weight.flatten(0, 1), layout.offsets, delayed_call)


def casts_in_kernel(cast: RoleCasts) -> bool:
    """Whether a kernel that computes the values of groups can cast them."""
    if cast.needs_values:
        return False
    fmt = one_format(cast.quantizers[0])
    # With given scales no kernel writes columnwise codes in another order.
    given = fmt is not None and fmt.scale_rule == "given" and cast.prepared.columns_k_major
    return given or cast.prepared.chained or (fmt is not None and casts_blocks(fmt))


# ---- MLPs ----


class GroupedMLPCall(NamedTuple):
    """The activation, both linears' calls, and the rows of each expert.

    Attributes:
        meanwhile: called while ranks send results.
        ahead: dY and its operands, on their way while backward computes what ``meanwhile`` computed.
    """

    activation: Activation
    fc1: LinearCall
    fc2: LinearCall
    layout: GroupLayout
    meanwhile: Callable[[], Any] | None
    ahead: list[tuple[Tensor, Any]]


class GroupedMLPFunction(torch.autograd.Function):
    """H_g = X_g W1_g^T + b1_g, A = p act(H), Y_g = A_g W2_g^T + b2_g for the rows of each expert g, and the gradients.

    ======  ==========  ===================  ===============================
    tensor  shape       contracted over      quantized along, in each group
    ======  ==========  ===================  ===============================
    X       [M, K]      K (M_g in wgrad)     rowwise (columnwise)
    W1      [G, F', K]  K (F' in dgrad)      rowwise (columnwise)
    H       [M, F']     (F' = 2 F if the activation is gated, else F)
    p       [M]         (fp32; without it 1)
    A       [M, F]      F (M_g in wgrad)     rowwise (columnwise)
    W2      [G, K, F]   F (K in dgrad)       rowwise (columnwise)
    dY      [M, K]      K (M_g in wgrad)     rowwise (columnwise)
    dH      [M, F']     F' (M_g in wgrad)    rowwise (columnwise)
    ======  ==========  ===================  ===============================

    fprop H and Y as above; dgrad dA_g = dY_g W2_g, dX_g = dH_g W1_g; wgrad dW2_g = dY_g^T A_g, dW1_g = dH_g^T X_g.
    With a routing X, Y and their gradients are tokens [T, K]: each goes to k rows, read where they are cast, and gets
    the sum of k. dH = act'(H) p dA; dp = the sum of act(H) dA over a row. Saved are H, p, and the columnwise operands
    of X and A; under ``recompute_x`` of the second linear backward casts A again, from H. Each direction casts twice,
    weights apart.
    """

    @staticmethod
    def forward(
        ctx: Any, mlp: GroupedMLPCall, x: Tensor, probabilities: Tensor | None, w1: Tensor, b1: Tensor | None,
        w2: Tensor, b2: Tensor | None,
    ) -> Tensor:  # fmt: skip
        (spec1, exchange1, source1, given1), (spec2, exchange2, source2, given2) = mlp.fc1, mlp.fc2
        activation, offsets = mlp.activation, mlp.layout.offsets
        x_operands, w_operands, own = exchange1.quantize_inputs(spec1, source1, given1, x, w1)
        given1.w = None  # what is not saved must not take memory during what follows
        h = exchange1.fprop(spec1, x_operands, w_operands, b1)
        saved_w = source1.save(spec1, w1, w_operands) if spec1.options.needs_x else None
        saved1 = save_x(spec1, exchange1, None, own), saved_w
        del x_operands, w_operands, own
        scales = delayed_scale(given2.delayed, "input", keep=True) if spec2.recompute_x else None
        given2.x = act_operands(spec2.casts.x, activation, h, probabilities, offsets, given2.delayed, scales)
        read_again: Tensor | None = h if spec2.options.needs_x else None
        del h
        a_operands, w_operands, own = exchange2.quantize_inputs(spec2, source2, given2, None, w2)
        given2.x = given2.w = None
        y = exchange2.fprop(spec2, a_operands, w_operands, b2)
        saved_w = source2.save(spec2, w2, w_operands) if spec2.options.needs_x else None
        if mlp.meanwhile is not None:
            mlp.meanwhile()
        y = waited(y)
        tensors, ctx.layouts = pack(*saved1, save_x(spec2, exchange2, None, own), saved_w)
        ctx.mlp, ctx.x_shape = mlp, x.shape
        ctx.save_for_backward(
            *tensors, scales, read_again, None if probabilities is None else guarded(probabilities)
        )  # fmt: skip
        return output(spec2, exchange2, y, x.shape, given2.delayed)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        mlp: GroupedMLPCall = ctx.mlp
        (spec1, exchange1, source1, given1), (spec2, exchange2, source2, given2) = mlp.fc1, mlp.fc2
        activation, layout = mlp.activation, mlp.layout
        *tensors, scales, h, probabilities = ctx.saved_tensors
        x, w1, a, w2 = unpack(ctx.layouts, tensors)
        db2 = exchange2.bias_gradient(spec2, dy) if spec2.options.needs_b else None
        if spec2.recompute_x:
            a = _recompute(spec2, activation, h, probabilities, layout, scales)
        sent, operands = mlp.ahead.pop() if mlp.ahead else (None, None)
        operands = waited(operands) if sent is dy else exchange2.quantize_dy(spec2, dy, given2.delayed)
        da, dw2 = gradients(spec2, exchange2, source2, operands, a, w2)
        del a, w2
        if given2.delayed is not None:
            given2.delayed.backward_finished()
        dx = dw1 = db1 = dp = None
        if da is not None:
            operands, dp, value = dact_operands(
                spec1.casts.dy, activation, da, h, probabilities, layout.offsets, given1.delayed, spec1.options.needs_b
            )
            del da, h
            db1 = None if value is None else exchange1.bias_gradient(spec1, value)
            dx, dw1 = gradients(spec1, exchange1, source1, operands, x, w1)
            if given1.delayed is not None:
                given1.delayed.backward_finished()
        if dx is not None:
            dx = grad_input(spec1, dx, ctx.x_shape, given1.delayed)
        dp = dp if probabilities is not None and ctx.needs_input_grad[2] else None
        return None, dx, dp, dw1, db1, dw2, db2


class AheadFunction(torch.autograd.Function):
    """Y as it is; backward sends dY to the experts before what is older than this, but newer than the experts."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, mlp: GroupedMLPCall) -> Tensor:
        ctx.mlp = mlp
        return as_output(y, y.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        mlp: GroupedMLPCall = ctx.mlp
        spec, exchange, _, given = mlp.fc2
        assert isinstance(exchange, Experts)
        mlp.ahead[:] = [(dy, exchange.start_dy(spec, dy, given.delayed))]
        return dy, None


def _recompute(
    spec: Spec, activation: Activation, h: Tensor, probabilities: Tensor | None, layout: GroupLayout,
    scales: Tensor | None,
) -> Operand:  # fmt: skip
    """Recomputes from H what wgrad reads of A; nothing is recorded a second time."""
    cast = RoleCasts([spec.config.input.with_usage(rowwise=False)], ["input"], spec.options.device)
    return act_operands(cast, activation, h, probabilities, layout.offsets, None, scales, True).along(COLUMNWISE)


# ---- the activation in between ----


_RECOMPUTED = grouped_activation.for_recompute()


def act_operands(
    cast: RoleCasts, of: Activation, h: Tensor, probabilities: Tensor | None, offsets: Tensor,
    delayed_call: DelayedCall | None, scales: Tensor | None = None, recompute: bool = False,
) -> Quantized:  # fmt: skip
    """A = p act(H), cast group by group; arguments as of :meth:`RoleCasts.of_groups`, which records amaxes likewise.

    ``recompute``: backward recomputes what its forward computed, see ``Operation.for_recompute``.
    """
    how, forward = (of.name, of.parameters), _RECOMPUTED if recompute else grouped_activation
    if not casts_in_kernel(cast):
        y, amax = forward(h, probabilities, offsets, None, *how, one := measures_amax(cast.quantizers[0]), *VALUES)
        return cast.of_groups(y, offsets, delayed_call, scales, amax=amax if one else None)
    scales = cast.group_scales(delayed_call, scales)
    made = forward(h, probabilities, offsets, scales, *how, False, *cast.prepared.how, cast.prepared.chained)
    return cast.of_groups(h[:, : out_columns(of.name, h.shape[1])], offsets, delayed_call, scales, made=made)


def dact_operands(
    cast: RoleCasts, of: Activation, da: Tensor, h: Tensor, probabilities: Tensor | None, offsets: Tensor,
    delayed_call: DelayedCall | None, with_value: bool,
) -> tuple[Quantized, Tensor, Tensor | None]:  # fmt: skip
    """dH = act'(H) p dA, cast group by group; dp, [0] without probabilities; and the value, if it is read too.

    The cast of blocks that straddle the halves of a gated activation's input is a kernel of its own.
    """
    how, quantizer = (of.name, of.parameters), cast.quantizers[0]
    straddles = of.gated and (h.shape[1] // 2) % max(quantizer.format(COLUMNWISE).block, 1) != 0
    if with_value or straddles or not casts_in_kernel(cast):
        one = measures_amax(quantizer)
        dh, amax, dp = grouped_activation_backward(da, h, probabilities, offsets, None, *how, one, *VALUES)
        operands = cast.of_groups(dh, offsets, delayed_call, amax=amax if one else None)
        return operands, dp, dh if with_value else None
    scales = cast.group_scales(delayed_call)
    casts = *cast.prepared.how, cast.prepared.chained
    *made, dp = grouped_activation_backward(da, h, probabilities, offsets, scales, *how, False, *casts)
    return cast.of_groups(h, offsets, delayed_call, scales, made=made), dp, None
