"""Autograd functions of norm and linear, and of norm, linear, activation and linear, whose casts are in the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from minifloat.autocast import DelayedCall
from minifloat.formats import COLUMNWISE
from minifloat.functional import node
from minifloat.functional.autograd import as_output, first_order, guarded, replayed
from minifloat.functional.exchange import Exchange, KnownOfX, waited
from minifloat.functional.linear import (
    LinearCall,
    backward_inputs,
    forward_inputs,
    gradients,
    output,
    pack,
    save_x,
    unpack,
)
from minifloat.functional.norm_activation import (
    Activation,
    FusedOutput,
    Norm,
    act_value,
    dact_value,
    norm_value,
    reads_fp32,
)
from minifloat.functional.quantize import delayed_scale, record_all
from minifloat.functional.spec import Spec
from minifloat.operand import Operand, Quantized
from minifloat.ops import new


@dataclass(frozen=True)
class NormCall:
    """Norm of one call, and the outputs of forward after Y: N (``return_norm``), and S (``return_stream``).

    S is the residual stream, whose gradient is added where dX is computed.
    """

    norm: Norm
    return_norm: bool = False
    return_stream: bool = False

    def recomputation(self, beta: Tensor | None, stream: Tensor, gamma: Tensor) -> Callable[..., FusedOutput]:
        """Returns what gives N once more for :func:`recompute_operand`, rounded as the forward rounded it."""
        return partial(norm_value, stream, gamma, beta, self.norm, return_value=self.return_norm)

    def how(self, gamma: Tensor, residual: Tensor | None, beta: Tensor | None) -> list[str]:
        """Spells for :class:`NormPass` what decides on the norm."""
        flags = self.return_norm, self.return_stream, residual is not None, beta is not None
        return [self.norm.text, "".join(["1" if flag else "0" for flag in flags]), str(gamma.dtype)[6:]]

    def shaped(self, results: Sequence[Any], x: Tensor) -> list[Any]:
        """Gives N and S of an operation their shape."""
        return [None if each is None else as_output(each, x.shape) for each in results[:2]] + [*results[2:]]

    def extra_outputs(self, given: Sequence[Tensor | None]) -> tuple[Tensor | None, Tensor | None]:
        """Returns N and S, or their gradients, of those that are ``given``; None for what is not wanted.

        Functions return what is wanted alone: for an output that is None Dynamo may not trace their backward.
        """
        return given[0] if self.return_norm else None, given[-1] if self.return_stream else None


class LayerNormLinearFunction(torch.autograd.Function):
    """Computes S = X + R, N = norm(S), Y = N W^T + b, and the gradients. Without a residual R, S is X.

    ======  ========  =================  ======================
    tensor  shape     contracted over    quantized along
    ======  ========  =================  ======================
    X, R, S [..., K]
    N       [..., K]  K (M in wgrad)     rowwise (columnwise)
    W       [N, K]    K (N in dgrad)     rowwise (columnwise)
    dY      [..., N]  N (M in wgrad)     rowwise (columnwise)
    ======  ========  =================  ======================

    dgrad dN = dY W; wgrad dW = dY^T N; dX, dgamma and dbeta are the norm's gradients of dN and a returned N; the
    gradient of a returned S is added to dX, which is dR too. Saved are S, rounded to the dtype of X, and the columnwise
    operand of N; under ``recompute_x`` S alone, from which backward recomputes that operand.
    """

    @staticmethod
    def forward(
        ctx: Any, norm: NormCall, linear: LinearCall, x: Tensor, residual: Tensor | None, gamma: Tensor,
        beta: Tensor | None, weight: Tensor, bias: Tensor | None,
    ) -> Any:  # fmt: skip
        spec, exchange, source, given = linear
        inputs = x, residual, gamma, beta, weight, bias
        if isinstance(spec, node.Traced):
            ctx.sizes, ctx.x_shape, ctx.weights = (*x.shape, weight.shape[0]), x.shape, (weight.shape,)
            how = norm.how(gamma, residual, beta)
            (y, *results), ctx.after = node.forward("norm_linear", how, (spec,), (given.delayed,), inputs, ctx.sizes)
            y, results = as_output(y, (*x.shape[:-1], weight.shape[0])), norm.shaped(results, x)
        else:
            (y, *results), ctx.after = norm_linear_forward(norm, linear, *inputs)
            y = output(spec, exchange, y, x.shape, given.delayed)
        value, stream, *of_rows = results[:4]
        stream = x if residual is None else stream
        ctx.norm, ctx.axes, ctx.delayed = norm, linear[:3], given.delayed
        ctx.has_residual, ctx.has_beta = residual is not None, beta is not None
        written = [weight] * (isinstance(spec, node.Traced) and source.memory(spec.options) is not None)
        ctx.save_for_backward(*results[4:], *saved_of_norm(spec, stream, of_rows, gamma, beta), *written)
        ctx.set_materialize_grads(False)
        return y, *norm_outputs(ctx, norm, spec, value, stream, x, residual)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, *extra: Tensor | None) -> tuple[Any, ...]:
        saved, (spec, _, source) = ctx.saved_tensors, ctx.axes  # read once: a checkpoint gives each tensor once
        if isinstance(spec, node.Traced):
            memory = (source.memory(spec.options),)
            results: Sequence[Any] = _shaped(
                ctx, node.backward(ctx.after, (ctx.delayed,), (dy, *extra), saved, ctx.sizes, memory)
            )
        else:
            results = norm_linear_backward(ctx.norm, ctx.axes, ctx.delayed, ctx.after, dy, extra, saved)
        dx, dgamma, dbeta, dw, db = results
        if dy is not None and ctx.delayed is not None:
            ctx.delayed.backward_finished()
        residual, beta = dx if ctx.has_residual else None, dbeta if ctx.has_beta else None
        return None, None, dx, residual, dgamma, beta, dw, db


def norm_linear_forward(
    norm: NormCall, linear: LinearCall, x: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None,
    weight: Tensor, bias: Tensor | None,
) -> tuple[Sequence[Any], tuple[Any, Any]]:  # fmt: skip
    """Computes Y, the parts of the norm and what backward reads; as ``forward_pass`` of a linear."""
    spec, _, _, given = linear

    def compute() -> tuple[list[Any], list[Any]]:
        value = partial(norm_value, x, gamma, beta, norm.norm, residual=residual)
        y, n, saved, scale = multiply_output(linear, value, weight, bias, norm.return_norm)
        tensors, layouts = pack(*saved)
        return [y, *parts_of_norm(norm, n, residual), *tensors, scale], layouts

    cast = weight if given.w is None else None
    taped = spec.forward and forward_inputs([linear], x, residual, gamma, beta, cast, bias)
    key = norm, taped and taped[0]
    made, layouts = replayed(spec.forward, key, taped[1], compute) if taped else compute()
    return made, (layouts, key)


def norm_linear_backward(
    norm: NormCall, axes: tuple[Any, Any, Any], delayed: DelayedCall | None, after: tuple[Any, Any], dy: Tensor | None,
    extra: Sequence[Tensor | None], saved: Sequence[Any],
) -> Sequence[Any]:  # fmt: skip
    """Computes dX, dgamma, dbeta, dW and db."""
    (spec, exchange, source), (layouts, key) = axes, after

    def compute() -> tuple[list[Any], None]:
        (x, w), (scale, beta, *of_norm) = unpack(layouts, saved[:8]), saved[8:]
        dn = dw = db = None
        if dy is not None:
            db = exchange.bias_gradient(spec, dy) if spec.options.needs_b else None
            if spec.recompute_x:
                x = recompute_operand(spec, scale, norm.recomputation(beta, *of_norm[:2]))
            dn, dw = gradients(spec, exchange, source, exchange.quantize_dy(spec, dy, delayed), x, w, scale)
        return [*norm_gradients(norm, spec, exchange, dn, extra, *of_norm), dw, waited(db)], None

    inputs = spec.backward and backward_inputs([(exchange, source, delayed)], dy, *saved, *extra)
    return (replayed(spec.backward, (key, source.dtype), inputs, compute) if inputs else compute())[0]


def multiply_output(
    linear: LinearCall, compute: Callable[..., FusedOutput], weight: Tensor, bias: Tensor | None, returned: bool = False
) -> tuple[Tensor, FusedOutput, tuple[Operand | None, Operand | None], Tensor | None]:
    """Computes a linear of the output of a norm or an activation, which may be cast by the kernel that computes it.

    Args:
        compute: gives the output for a quantizer: ``norm_value`` or ``act_value``.
        returned: the value of the output is read by others too; else it is freed before the product if it can be.

    Returns:
        Y [M, N]; the output; X and W as backward saves them; the delayed scale for a backward that recomputes X, since
        the next update replaces it.
    """
    spec, exchange, source, given = linear
    quantizer, gathers = spec.x, exchange.gathers_x
    if gathers and len(quantizer.casts) == 1 and quantizer.rowwise:
        quantizer = quantizer.with_usage(columnwise=False)  # memory orders for GEMMs come after the gather
    scale = None
    if given.delayed is not None and not spec.saves_value:
        scale = delayed_scale(given.delayed, "input", keep=spec.recompute_x)
    rounded = returned or spec.override == "high_precision"  # else backward does not read X itself
    fused = not spec.saves_value and not gathers  # no other rank has rows of the blocks
    made = compute(quantizer, scale=scale, fused=fused, return_value=rounded)
    if made.quantized is not None:
        given.x = made.quantized
        if spec.seen is not None and (read := compute(quantizer).value) is not None:  # what the kernel's cast reads
            spec.seen("input", read, made.quantized)
        if given.delayed is not None:
            record_all(given.delayed, ["input"], [made.quantized])
    known = new(KnownOfX, (None, made.amaxes, made.label))
    x, w, own = exchange.quantize_inputs(spec, source, given, made.value, weight, known)
    if spec.eager:
        given.x = given.w = None  # what is not saved must not take memory during what follows
    value = made.value if returned or spec.saves_value else None
    made = new(FusedOutput, (value, made.dtype, made.saved, None, None, None, made.stream))
    y = exchange.fprop(spec, x, w, bias)
    saved_w = source.save(spec, weight, w) if spec.options.needs_x else None
    return y, made, (save_x(spec, exchange, made.value, own), saved_w), scale if spec.recompute_x else None


def parts_of_norm(norm: NormCall, n: FusedOutput, residual: Tensor | None) -> list[Tensor | None]:
    """Lists the value if it is read, S unless that is X, mean (None of RMSNorm, which has none) and rsigma."""
    mean, rsigma = n.saved
    stream = None if residual is None else n.stream
    return [n.value if norm.return_norm else None, stream, mean if norm.norm.has_mean else None, rsigma]


def norm_outputs(
    ctx: Any, norm: NormCall, spec: Spec, value: Tensor | None, stream: Tensor, x: Tensor, residual: Tensor | None
) -> list[Tensor]:
    """Returns the outputs after Y: N and S if wanted, each with a gradient if what it is computed from has one."""
    moving = x.requires_grad or (residual is not None and residual.requires_grad)
    outputs, constant = [], []
    for each, has_gradient in ((value, spec.options.needs_x), (stream if norm.return_stream else None, moving)):
        if each is not None:
            outputs.append(each)
            if not has_gradient:
                constant.append(each)
    if constant:
        ctx.mark_non_differentiable(*constant)
    return outputs


def saved_of_norm(
    spec: Spec, stream: Tensor, of_rows: Sequence[Tensor | None], gamma: Tensor, beta: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Lists what backward reads of the norm: beta, to recompute N; and what :func:`norm_gradients` takes."""
    of_gradients = (guarded(stream), gamma, *of_rows) if spec.options.needs_x else ()
    return beta if spec.recompute_x else None, *of_gradients


def recompute_operand(spec: Spec, scale: Tensor | None, compute: Callable[..., FusedOutput]) -> Operand:
    """Recomputes wgrad's operand of X; ``scale``: delayed scaling's in the forward. No amax is recorded again."""
    quantizer = spec.config.input.with_usage(rowwise=False)
    scale = scale if reads_fp32(quantizer) else None
    output = compute(quantizer, scale=scale, fused=True)
    return output.cast(quantizer, None if scale is None else (scale,)).along(COLUMNWISE)


def norm_gradients(
    norm: NormCall, spec: Spec, exchange: Exchange, dn: Tensor | None, extra: Sequence[Tensor | None], *saved: Any
) -> tuple[Tensor | None, ...]:
    """Computes dX, dgamma and dbeta from the gradients of N, dgrad's and a returned N's and of S; any may be None.

    ``spec``, ``exchange``: of the linear that reads N. Where that gathers N, each rank has seen the gradients of its
    rows alone.
    ``extra``: gradients of the outputs after Y. ``saved``: S, gamma, and of each row what the norm saved.
    """
    if not spec.options.needs_x:
        return None, None, None
    stream, gamma, *of_rows = saved
    total, dx = norm.extra_outputs(extra)
    dgamma = dbeta = None
    if dn is not None:
        dn = dn.reshape(stream.shape)
        total = dn if total is None else dn + total
    if total is not None:
        dx, *of_parameters = norm.norm.gradients(total, stream, gamma, tuple(of_rows), dx)
        sums = [exchange.start_sum_of_rows(each) for each in of_parameters]
        dgamma, dbeta = sums[0].wait(), sums[1].wait()
    return dx, dgamma, dbeta


# ---- norm, linear, activation, linear ----


@dataclass(frozen=True)
class MLPCall:
    """Norm, activation and the calls of both linears."""

    norm: NormCall
    activation: Activation
    fc1: LinearCall
    fc2: LinearCall


class LayerNormMLPFunction(torch.autograd.Function):
    """Computes S = X + R, N = norm(S), H = N W1^T + b1, A = act(H), Y = A W2^T + b2, and the gradients.

    ======  =========  =================  ======================
    tensor  shape      contracted over    quantized along
    ======  =========  =================  ======================
    X, R    [..., K]   (without a residual R, S is X)
    N       [..., K]   K (M in wgrad)     rowwise (columnwise)
    W1      [F', K]    K (F' in dgrad)    rowwise (columnwise)
    H       [..., F']  (F' = 2 F if the activation is gated, else F)
    A       [..., F]   F (M in wgrad)     rowwise (columnwise)
    W2      [K, F]     F (K in dgrad)     rowwise (columnwise)
    dY      [..., K]   K (M in wgrad)     rowwise (columnwise)
    dH      [..., F']  F' (M in wgrad)    rowwise (columnwise)
    ======  =========  =================  ======================

    dgrad dA = dY W2, dN = dH W1; wgrad dW2 = dY^T A, dW1 = dH^T N; dH = act'(H) dA; dX, dgamma and dbeta are the norm's
    gradients of dN, dX with that of a returned S added, which is dR too. Saved are S, H and the columnwise operands of
    N and A; under ``recompute_x`` of its linear backward recomputes either, from S or from H.
    """

    @staticmethod
    def forward(
        ctx: Any, mlp: MLPCall, x: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, w1: Tensor,
        b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    ) -> Any:  # fmt: skip
        spec, inputs = mlp.fc1.spec, (x, residual, gamma, beta, w1, b1, w2, b2)
        if isinstance(spec, node.Traced):
            ctx.sizes, ctx.x_shape, ctx.weights = (*x.shape, w1.shape[0], w2.shape[0]), x.shape, (w1.shape, w2.shape)
            calls = mlp.fc1.given.delayed, mlp.fc2.given.delayed
            how, specs = [*mlp.norm.how(gamma, residual, beta), mlp.activation.text], (spec, mlp.fc2.spec)
            (y, *results), ctx.after = node.forward("mlp", how, specs, calls, inputs, ctx.sizes)
            results = mlp.norm.shaped(results, x)
        else:
            (y, *results), ctx.after = mlp_forward(mlp, *inputs)
        value, stream, *of_rows = results[:4]
        stream = x if residual is None else stream
        ctx.mlp = mlp
        ctx.has_residual, ctx.has_beta = residual is not None, beta is not None
        written: list[Tensor] = []
        for call, weight in ((mlp.fc1, w1), (mlp.fc2, w2)):
            if isinstance(call.spec, node.Traced) and call.source.memory(call.spec.options) is not None:
                written.append(weight)
        ctx.save_for_backward(*results[4:], *saved_of_norm(spec, stream, of_rows, gamma, beta), *written)
        ctx.set_materialize_grads(False)
        return as_output(y, (*x.shape[:-1], w2.shape[0])), *norm_outputs(
            ctx, mlp.norm, spec, value, stream, x, residual
        )

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, *extra: Tensor | None) -> tuple[Any, ...]:
        mlp: MLPCall = ctx.mlp
        saved, spec = [*ctx.saved_tensors], mlp.fc1.spec
        if isinstance(spec, node.Traced):
            calls = mlp.fc1.given.delayed, mlp.fc2.given.delayed
            memory = mlp.fc1.source.memory(spec.options), mlp.fc2.source.memory(mlp.fc2.spec.options)
            results: Sequence[Any] = _shaped(
                ctx, node.backward(ctx.after, calls, (dy, *extra), saved, ctx.sizes, memory)
            )
        else:
            if not torch.compiler.is_compiling():
                ctx.maybe_clear_saved_tensors()  # unless they are retained: what has been read is freed before the end
            results = mlp_backward(mlp, ctx.after, dy, extra, saved)
        dx, dgamma, dbeta, *of_linears = results
        for call in (mlp.fc2, mlp.fc1):
            if dy is not None and call.given.delayed is not None:
                call.given.delayed.backward_finished()
        return None, dx, dx if ctx.has_residual else None, dgamma, dbeta if ctx.has_beta else None, *of_linears


def mlp_forward(
    mlp: MLPCall, x: Tensor, residual: Tensor | None, gamma: Tensor, beta: Tensor | None, w1: Tensor,
    b1: Tensor | None, w2: Tensor, b2: Tensor | None,
) -> tuple[Sequence[Any], tuple[Any, Any]]:  # fmt: skip
    """Computes Y, the parts of the norm and what backward reads; as :func:`norm_linear_forward`."""
    spec1, spec2 = mlp.fc1.spec, mlp.fc2.spec

    def compute() -> tuple[list[Any], list[Any]]:
        value = partial(norm_value, x, gamma, beta, mlp.norm.norm, residual=residual)
        h, n, saved1, scale1 = multiply_output(mlp.fc1, value, w1, b1, mlp.norm.return_norm)
        of_norm = parts_of_norm(mlp.norm, n, residual)
        del n
        y, _, saved2, scale2 = multiply_output(mlp.fc2, partial(act_value, h, mlp.activation), w2, b2)
        tensors, layouts = pack(*saved1, *saved2)
        return [y, *of_norm, *tensors, scale1, scale2, h if spec2.options.needs_x else None], layouts

    both = spec1.forward and spec2.forward
    casts = w1 if mlp.fc1.given.w is None else None, w2 if mlp.fc2.given.w is None else None
    taped = both and forward_inputs([mlp.fc1, mlp.fc2], x, residual, gamma, beta, b1, b2, *casts)
    key = mlp.norm, mlp.activation, spec2, taped and taped[0]
    made, layouts = replayed(spec1.forward, key, taped[1], compute) if taped else compute()
    return made, (layouts, key)


def mlp_backward(
    mlp: MLPCall, after: tuple[Any, Any], dy: Tensor | None, extra: Sequence[Tensor | None], saved: list[Any]
) -> Sequence[Any]:
    """Computes dX, dgamma, dbeta, dW1, db1, dW2 and db2; empties ``saved``, to free what has been read."""
    (spec1, exchange1, source1, given1), (spec2, exchange2, source2, given2) = mlp.fc1, mlp.fc2
    (layouts, key), delayed1, delayed2 = after, given1.delayed, given2.delayed
    linears = (exchange1, source1, delayed1), (exchange2, source2, delayed2)
    inputs = spec1.backward and spec2.backward and backward_inputs(linears, dy, *saved, *extra)

    def compute() -> tuple[list[Any], None]:
        (x1, w1, x2, w2), (scale1, scale2, h, beta, *of_norm) = unpack(layouts, saved[:16]), saved[16:]
        saved.clear()
        dn = dw1 = db1 = dw2 = db2 = None
        if dy is not None:
            db2 = exchange2.bias_gradient(spec2, dy) if spec2.options.needs_b else None
            if spec2.recompute_x:
                x2 = recompute_operand(spec2, scale2, partial(act_value, h, mlp.activation))
            dy2 = exchange2.quantize_dy(spec2, dy, delayed2)
            da, dw2 = gradients(spec2, exchange2, source2, dy2, x2, w2, scale2)
            db2 = waited(db2)
            del dy2, x2, w2
            if da is not None:
                dh = _act_gradient(mlp, da, h, delayed1)
                db1 = dh.column_sum
                del da, h  # wide as they are, they leave room for the codes of dH
                dh_operands = _grad_operands(mlp, dh, delayed1)
                del dh
                if spec1.recompute_x:
                    x1 = recompute_operand(spec1, scale1, mlp.norm.recomputation(beta, *of_norm[:2]))
                dn, dw1 = gradients(spec1, exchange1, source1, dh_operands, x1, w1, scale1)
        return [*norm_gradients(mlp.norm, spec1, exchange1, dn, extra, *of_norm), dw1, db1, dw2, db2], None

    key = key, source1.dtype, source2.dtype
    return (replayed(spec1.backward, key, inputs, compute, saved) if inputs else compute())[0]


def _act_gradient(mlp: MLPCall, da: Tensor, h: Tensor, delayed_call: DelayedCall | None) -> FusedOutput:
    """Computes dH, and its sum over the rows, db1, if that is needed."""
    spec, options = mlp.fc1.spec, mlp.fc1.spec.options
    rounded = spec.override is not None  # its gradients read dH itself
    casts = options.needs_x or options.needs_w  # else only the bias is trained, whose gradient sums what a cast reads
    quantizer = spec.dy if casts else spec.config.grad_output
    scale = delayed_scale(delayed_call, "grad_output") if casts and not rounded else None
    dh = dact_value(
        da, h, mlp.activation, quantizer, scale=scale, fused=casts, return_value=rounded,
        with_column_sum=options.needs_b,
    )  # fmt: skip
    if spec.seen is not None and dh.quantized is not None:
        read = dact_value(da, h, mlp.activation, quantizer).value  # what the kernel's cast reads
        assert read is not None
        spec.seen("grad_output", read, dh.quantized)
    return dh


def _grad_operands(mlp: MLPCall, dh: FusedOutput, delayed_call: DelayedCall | None) -> Quantized:
    """Casts dH for the first linear."""
    spec, exchange, *_ = mlp.fc1
    if dh.quantized is None:
        assert dh.value is not None
        casts = spec.options.needs_x or spec.options.needs_w
        return dh.label(exchange.quantize_dy(spec, dh.value, delayed_call, dh.amaxes if casts else None))
    if delayed_call is not None:
        record_all(delayed_call, ["grad_output"], [dh.quantized])
    return dh.quantized


# ---- as operations ----


class _NormPass(node.Pass):
    """Plan of a module that begins with a norm; its inputs are X, R, gamma, beta, and W and b of each linear.

    The facts are those of :meth:`NormCall.how`, and the activation.
    """

    def __init__(self, specs: Sequence[Spec], into_memory: Sequence[bool], facts: Sequence[str]) -> None:
        super().__init__(specs, into_memory, facts)
        norm, flags, gamma, *activation = facts
        value, stream, self.residual, self.beta = [flag == "1" for flag in flags]
        self.norm, self.gamma = NormCall(Norm.of_text(norm), value, stream), getattr(torch, gamma)
        self.activation = Activation.of_text(activation[0]) if activation else None
        self.gated = self.activation is not None and self.activation.gated

    def operands(self, sizes: Sequence[Any]) -> list[node.Saved]:
        """Lists what backward reads of X and W of each linear."""
        count = len(self.specs)
        *lead, k = sizes[:-count]
        rows, cols, operands = prod(lead), k, list[node.Saved]()
        for i, (spec, features) in enumerate(zip(self.specs, sizes[-count:], strict=True)):
            operands += node.saved_operands(spec, rows, cols, features, -1, 4 + 2 * i)
            cols = features // 2 if self.gated else features
        return operands

    def results(self, sizes: Sequence[Any]) -> list[node.Result]:
        count, first = len(self.specs), self.specs[0].options
        *lead, k = sizes[:-count]
        rows, dtype = prod(lead), first.dtype
        of_row = node.Memory((rows,), torch.float32)
        results: list[node.Result] = [
            node.Memory((rows, sizes[-1]), dtype),
            node.Memory((rows, k), dtype) if self.norm.return_norm else None,
            node.Memory((rows, k), dtype) if self.residual else None,
            of_row if self.norm.norm.has_mean else None,
            of_row,
        ]
        for operand in self.operands(sizes):
            results += operand.results
        for spec in self.specs:
            kept = spec.recompute_x and spec.config.delayed is not None and not spec.saves_value
            results.append(node.Memory((1,), torch.float32) if kept else None)
        if count == 2:
            results.append(node.Memory((rows, sizes[-2]), dtype) if self.specs[1].options.needs_x else None)
        return results

    def saved(self, sizes: Sequence[Any]) -> list[node.Result]:
        x_shape = tuple(sizes[: -len(self.specs)])
        spec, rows, of_k = self.specs[0], (prod(x_shape[:-1]),), node.Itself(0, x_shape[-1:])
        saved = [*self.results(sizes)[5:], of_k if spec.recompute_x else None]
        if spec.options.needs_x:
            saved += node.Itself(0, x_shape), of_k, node.Itself(0, rows), node.Itself(0, rows)
        return saved

    def gradients(self, sizes: Sequence[Any], given: Sequence[bool]) -> list[node.Result]:
        count, (first, *_) = len(self.specs), self.specs
        *lead, k = sizes[:-count]
        of_y, extra = given[0], list(given[1:])
        of_n = of_y and all(spec.options.needs_x for spec in self.specs)
        of_n = of_n or (self.norm.return_norm and first.options.needs_x and extra[0])
        of_stream = self.norm.return_stream and first.options.needs_x and extra[-1]
        gamma = node.Memory((k,), self.gamma) if of_n else None
        dx = node.Memory((prod(lead), k), first.options.dtype) if of_n or of_stream else None
        results: list[node.Result] = [dx, gamma, gamma if self.norm.norm.has_mean else None]
        features, cols = sizes[-count:], k
        for i, (spec, n, memory) in enumerate(zip(self.specs, features, self.into_memory, strict=True)):
            reached = of_y and (i == count - 1 or self.specs[1].options.needs_x)
            dtype, needs = spec.options.dtype, spec.options
            results.append(node.Memory((n, cols), dtype) if reached and needs.needs_w and not memory else None)
            if reached and i < count - 1 and _sums_fp32(spec) and not self.gated:
                dtype = torch.float32
            results.append(node.Memory((n,), dtype) if reached and needs.needs_b else None)
            cols = n // 2 if self.gated else n
        return results


def _sums_fp32(spec: Spec) -> bool:
    """Whether db1 is the sum of the fp32 dH that its cast reads."""
    quantizer = spec.dy if spec.options.needs_x or spec.options.needs_w else spec.config.grad_output
    return spec.override is None and reads_fp32(quantizer)


class NormLinearPass(_NormPass):
    """Plan of :class:`LayerNormLinearFunction`."""

    def forward(self, calls: Any, inputs: Sequence[Any]) -> Sequence[Tensor | None]:
        return norm_linear_forward(self.norm, *calls, *inputs)[0]

    def backward(
        self, calls: Any, gradients: Sequence[Any], saved: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> Sequence[Tensor | None]:  # fmt: skip
        after, (dy, *extra) = ([each.layout for each in self.operands(sizes)], None), gradients
        return norm_linear_backward(self.norm, calls[0][:3], calls[0].given.delayed, after, dy, extra, saved)


class MLPPass(_NormPass):
    """Plan of :class:`LayerNormMLPFunction`."""

    def _mlp(self, calls: Any) -> MLPCall:
        assert self.activation is not None
        return MLPCall(self.norm, self.activation, *calls)

    def forward(self, calls: Any, inputs: Sequence[Any]) -> Sequence[Tensor | None]:
        return mlp_forward(self._mlp(calls), *inputs)[0]

    def backward(
        self, calls: Any, gradients: Sequence[Any], saved: Sequence[Tensor | None],
        sizes: Sequence[int],
    ) -> Sequence[Tensor | None]:  # fmt: skip
        after, (dy, *extra) = ([each.layout for each in self.operands(sizes)], None), gradients
        return mlp_backward(self._mlp(calls), after, dy, extra, [*saved])


node.Pass.kinds |= {"norm_linear": NormLinearPass, "mlp": MLPPass}


def _shaped(ctx: Any, results: Sequence[Any]) -> list[Any]:
    """Gives the gradients of X and of the weights from an operation their shapes."""
    dx, dgamma, dbeta, *of_linears = results
    shaped = [None if dx is None else as_output(dx, ctx.x_shape), dgamma, dbeta]
    for shape, dw, db in zip(ctx.weights, of_linears[::2], of_linears[1::2], strict=True):
        shaped += [None if dw is None else dw.view(shape), db]
    return shaped
