"""The autograd function of norm, linear, activation, linear: norm and activation quantize where they can."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat.delayed_call import DelayedCall
from minifloat.functional.autograd import as_output, first_order
from minifloat.functional.exchange import waited
from minifloat.functional.layernorm_linear import (
    NormCall,
    multiply_output,
    norm_gradients,
    norm_outputs,
    recompute_operand,
    saved_of_norm,
)
from minifloat.functional.linear import LinearCall, gradients, pack, unpack
from minifloat.functional.norm_activation import Activation, FusedOutput, act_value, dact_value, norm_value
from minifloat.functional.quantize import delayed_scale, record
from minifloat.operand import Quantized


@dataclass(frozen=True)
class MLPCall:
    """One call: the norm, the activation, and both linears' calls."""

    norm: NormCall
    activation: Activation
    fc1: LinearCall
    fc2: LinearCall


class LayerNormMLPFunction(torch.autograd.Function):
    """S = X + R, N = norm(S), H = N W1^T + b1, A = act(H), Y = A W2^T + b2, and the gradients.

    ======  =========  =================  ======================
    tensor  shape      contracted over    quantized along
    ======  =========  =================  ======================
    X, R    [..., K]   (without a residual R, S is X)
    S       [..., K]
    N       [..., K]   K (M in wgrad)     rowwise (columnwise)
    W1      [F', K]    K (F' in dgrad)    rowwise (columnwise)
    H       [..., F']  (F' = 2 F if the activation is gated, else F)
    A       [..., F]   F (M in wgrad)     rowwise (columnwise)
    W2      [K, F]     F (K in dgrad)     rowwise (columnwise)
    dY      [..., K]   K (M in wgrad)     rowwise (columnwise)
    dH      [..., F']  F' (M in wgrad)    rowwise (columnwise)
    ======  =========  =================  ======================

    fprop H and Y as above; dgrad dA = dY W2, dN = dH W1; wgrad dW2 = dY^T A, dW1 = dH^T N; dH = act'(H) dA; dX, dgamma
    and dbeta are the norm's gradients of dN, where the gradient of a returned S is added to dX, which is dR too. Saved
    are S, H and the columnwise operands of N and A; under ``recompute_x`` of its linear backward recomputes either,
    from S or from H.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mlp: MLPCall,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
    ) -> Any:
        spec1, spec2 = mlp.fc1.spec, mlp.fc2.spec
        compute = partial(norm_value, x, gamma, beta, mlp.norm.norm, residual=residual)
        h, n, saved1, scale1 = multiply_output(mlp.fc1, compute, w1, b1, mlp.norm.return_norm)
        returned, of_norm = norm_outputs(ctx, mlp.norm, spec1, n, x, residual), saved_of_norm(spec1, n, gamma, beta)
        del n
        y, _, saved2, scale2 = multiply_output(mlp.fc2, partial(act_value, h, mlp.activation), w2, b2)
        tensors, ctx.layouts = pack(*saved1, *saved2)
        ctx.mlp = mlp
        ctx.has_residual, ctx.has_beta = residual is not None, beta is not None
        ctx.save_for_backward(*tensors, scale1, scale2, h if spec2.options.needs_x else None, *of_norm)
        ctx.set_materialize_grads(False)
        return as_output(y, (*x.shape[:-1], w2.shape[0])), *returned

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, *extra: Tensor | None) -> tuple[Any, ...]:
        mlp: MLPCall = ctx.mlp
        (spec1, exchange1, source1, given1), (spec2, exchange2, source2, given2) = mlp.fc1, mlp.fc2
        delayed1, delayed2 = given1.delayed, given2.delayed
        saved = ctx.saved_tensors
        (x1, w1, x2, w2), (scale1, scale2, h, beta, *of_norm) = unpack(ctx.layouts, saved[:12]), saved[12:]
        del saved
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # unless they are retained: what has been read is freed before the end
        dn = dw1 = db1 = dw2 = db2 = None
        if dy is not None:
            db2 = exchange2.bias_gradient(spec2, dy) if spec2.options.needs_b else None
            if spec2.recompute_x:
                x2 = recompute_operand(spec2, scale2, partial(act_value, h, mlp.activation))
            da, dw2 = gradients(spec2, exchange2, source2, exchange2.quantize_dy(spec2, dy, delayed2), x2, w2, scale2)
            db2 = waited(db2)
            del x2, w2
            if delayed2 is not None:
                delayed2.backward_finished()
            if da is not None:
                dh = _act_gradient(mlp, da, h, delayed1)
                db1 = dh.column_sum
                del da, h  # wide as they are, they leave room for the codes of dH
                dh_operands = _grad_operands(mlp, dh, delayed1)
                del dh
                if spec1.recompute_x:
                    x1 = recompute_operand(spec1, scale1, mlp.norm.recomputation(beta, *of_norm[:2]))
                dn, dw1 = gradients(spec1, exchange1, source1, dh_operands, x1, w1, scale1)
                if delayed1 is not None:
                    delayed1.backward_finished()
        return None, *norm_gradients(ctx, mlp.norm, spec1, exchange1, dn, extra, *of_norm), dw1, db1, dw2, db2


def _act_gradient(mlp: MLPCall, da: Tensor, h: Tensor, delayed_call: DelayedCall | None) -> FusedOutput:
    """dH, with its sum over the rows, db1, if that is needed."""
    spec, options = mlp.fc1.spec, mlp.fc1.spec.options
    rounded = spec.override is not None  # its gradients read dH itself
    casts = options.needs_x or options.needs_w  # else only the bias is trained, whose gradient sums what a cast reads
    quantizer = spec.dy if casts else spec.config.grad_output
    scale = delayed_scale(delayed_call, "grad_output") if casts and not rounded else None
    return dact_value(
        da, h, mlp.activation, quantizer, scale=scale, fused=casts, return_value=rounded,
        with_column_sum=options.needs_b,
    )  # fmt: skip


def _grad_operands(mlp: MLPCall, dh: FusedOutput, delayed_call: DelayedCall | None) -> Quantized:
    """The operands of dH for the first linear."""
    spec, exchange, *_ = mlp.fc1
    if dh.quantized is None:
        assert dh.value is not None
        casts = spec.options.needs_x or spec.options.needs_w
        return dh.label(exchange.quantize_dy(spec, dh.value, delayed_call, dh.amaxes if casts else None))
    if delayed_call is not None:
        record(delayed_call, "grad_output", dh.quantized)
    return dh.quantized
