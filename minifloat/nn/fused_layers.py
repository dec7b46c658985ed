"""Fused layers, ``LayerNormLinear`` and ``LayerNormMLP``: a norm and what reads it in one autograd function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from minifloat.arguments import Count, NonNegativeFloat, Size, checked
from minifloat.functional.autograd import apply
from minifloat.functional.fused_layers import LayerNormLinearFunction, LayerNormMLPFunction, MLPCall, NormCall
from minifloat.functional.norm_activation import Activation, activate
from minifloat.functional.quantize import Mode
from minifloat.nn import linear_call, parts
from minifloat.nn.linear import Linear
from minifloat.nn.linear_call import needs_eager, run_eager
from minifloat.nn.options import DenseOptions, InitMethod, check_meta, check_tensors, place
from minifloat.recompute import checkpoint_without_dropout, exchange_of


class LayerNormLinear(parts.LayerOfParts):
    """Norm and linear, Y = norm(X) W^T + b; the norm's kernel quantizes its result and does not store it.

    Its parts are the modules ``norm`` and ``linear``. Results equal, to the bit, those of the parts called in turn,
    except that delayed scaling quantizes the norm's result before it is rounded to the dtype of X. Without a recipe, or
    if a part has hooks or was replaced, the parts are called in turn.

    Args:
        in_features, out_features, bias, init_method, parameters_split, return_bias, recipe, name, params_dtype, dtype,
            device, fuse_wgrad_accumulation, delay_wgrad_compute, sequence_parallel, tp_group, tp_size, tp_mesh,
            fused_parts, etp_group, etp_reduction: as in :class:`~minifloat.Linear`.
        parallel_mode: ``"column"``, as in :class:`~minifloat.Linear`; every rank has the whole norm. Under sequence
            parallelism X and the norm's result are this rank's rows.
        eps, zero_centered_gamma: as in :class:`~minifloat.RMSNorm`.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: forward also gives the norm's result, in the dtype of the activations.
        recompute_norm: save only the input of the norm, which its gradient needs anyway, and recompute the linear's
            operand in backward. This costs a norm and a cast, and saves a byte an element in FP8. No effect if ranks
            gather the norm's result, of which each keeps its rows, nor under a ``backward_override``.

    Raises:
        ValueError: an unknown normalization, and as in the parts.
    """

    @checked
    def __init__(
        self,
        in_features: Size,
        out_features: Count,
        eps: NonNegativeFloat = 1e-5,
        *,
        bias: bool = True,
        normalization: parts.Normalization = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        recompute_norm: bool = False,
        init_method: InitMethod | None = None,
        parameters_split: Mapping[str, Count] | Sequence[str] | None = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        parallel_mode: Mode | None = None,
        fused_parts: Sequence[Count] | None = None,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        placement = place(type(self).__name__, options)
        if parallel_mode == "row":
            raise ValueError(
                f"LayerNormLinear {name or ''!r}: parallel_mode='row' would split the rows that the norm is over; use "
                "'column', or a norm and a Linear"
            )
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.recompute_norm = recompute_norm
        self.norm = parts.NORMS[normalization](in_features, eps, zero_centered_gamma=zero_centered_gamma, **placement)
        self.linear = Linear(
            in_features, out_features, bias, name=name, delay_wgrad_compute=delay_wgrad_compute,
            return_bias=return_bias, parameters_split=parameters_split, init_method=init_method,
            parallel_mode=parallel_mode, fused_parts=fused_parts, **options,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        rows_per_rank: Sequence[int] | None = None,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Computes Y [..., out_features] of X [..., in_features]; returns it or a tuple.

        The tuple is Y, then the bias if ``return_bias``, then the norm's result if ``return_layernorm_output``, then
        the residual stream if ``return_residual``. ``is_first_microbatch``, ``fp8_output`` and ``rows_per_rank`` are
        those of :class:`~minifloat.Linear`.

        Args:
            residual: of the shape of X: the norm's kernel computes S = X + residual, rounded to the dtype of both, and
                norms S.
            return_residual: forward also returns S, of the shape of X (X itself without a residual). The kernel of the
                norm's gradient adds the gradient of S to that of X, before its one rounding.
        """
        linear, norm = self.linear, self.norm
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
        if compiling and type(linear) is Linear and needs_eager(linear, is_first_microbatch, fp8_output):
            return run_eager(
                LayerNormLinear.forward, self, x, is_first_microbatch, fp8_output, rows_per_rank, residual,
                return_residual,
            )  # fmt: skip
        check_tensors(x, residual, self)
        recipe = None if parts.needs_unfused_path(norm, linear) else linear_call.recipe_in_force(linear)
        bias: Tensor | None
        if recipe is None:
            stream = parts.add_residual(x, residual, linear)
            n = parts.call_norm(norm, stream, exchange_of(linear) if isinstance(linear, Linear) else None)
            options = {"fp8_output": fp8_output or None, "rows_per_rank": rows_per_rank}  # a replaced part knows less
            y, bias = parts.call_unfused(linear, n, is_first_microbatch=is_first_microbatch, **options)
        else:
            x, residual = parts.prepare_residual(x, residual, linear)
            exchange = linear._exchange
            if exchange.mode is not None or rows_per_rank is not None:
                exchange = exchange_of(linear).of_call(x.shape, rows_per_rank, linear)
            linear_call.check_input(linear, x, is_first_microbatch)
            check_meta(x, self, norm._parameters.get("weight"))
            dtype = linear_call.compute_dtype(linear, x)
            gamma, beta = norm.weight, norm.bias
            call, weight, b = linear_call.prepare_call(
                linear, recipe, dtype, parts.needs_gradient(x, residual, gamma, beta), is_first_microbatch, fp8_output,
                exchange=exchange, recompute_x=self.recompute_norm,
                node=compiling and linear_call.takes_node(linear, is_first_microbatch),
            )  # fmt: skip
            of_norm = NormCall(norm.norm, self.return_layernorm_output, return_residual and parts.fuses(x))
            y, *extra = apply(LayerNormLinearFunction, of_norm, call, x.to(dtype), residual, gamma, beta, weight, b)
            delayed = call.given.delayed
            if delayed is not None:
                delayed.forward_finished()
            n, found = of_norm.extra_outputs(extra)
            stream = x if found is None else found
            bias = linear._bias_vector() if self.return_bias else None
        return parts.outputs(y, (self.return_bias, bias), (self.return_layernorm_output, n), (return_residual, stream))


class LayerNormMLP(parts.LayerOfParts):
    """Norm and MLP, Y = act(norm(X) W1^T + b1) W2^T + b2; the kernels of norm and activation quantize their results.

    Its parts are the modules ``norm``, ``fc1`` and ``fc2``. Results equal, to the bit, those of the parts called in
    turn, except that delayed scaling quantizes results of norm and activation before they are rounded to the dtype of
    X. If a linear has no recipe, or a part has hooks or was replaced, the parts are called in turn.

    Args:
        hidden_size, ffn_hidden_size: widths of X and Y, and of the activation's result.
        eps, zero_centered_gamma: as in :class:`~minifloat.RMSNorm`.
        bias, params_dtype, dtype, device, return_bias, fuse_wgrad_accumulation, delay_wgrad_compute: of both linears
            (``return_bias``: of the second), as in :class:`~minifloat.Linear`.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: gelu, qgelu, relu, srelu, silu, or, with an fc1 of twice the width, geglu, qgeglu, reglu, sreglu,
            swiglu, clamped_swiglu.
        activation_params: by name: ``limit``, ``alpha`` and ``glu_linear_offset`` of clamped_swiglu.
        init_method, output_layer_init_method: fill the weights of fc1 and fc2 in place.
        return_layernorm_output: forward also gives the norm's result.
        checkpoint: save only X (or the sum of X and a residual), and recompute the rest in backward.
        recompute_norm: of norm and fc1, as in :class:`~minifloat.LayerNormLinear`.
        recompute_activation: save only the input of the activation, which its gradient needs anyway, and recompute
            fc2's operand in backward.
        recipe: of both linears, as in :class:`~minifloat.Linear`.
        set_parallel_mode: fc1 is column-parallel, each half of a gated one separately, and fc2 row-parallel, over the
            ``tp_size`` ranks of ``tp_group`` or ``tp_mesh``. Arguments are sizes of the full layer.
        sequence_parallel: X and Y are split by rows over the same ranks; see :class:`~minifloat.Linear`.
        etp_group, etp_reduction: of both linears, as in :class:`~minifloat.Linear`.
        name: recipes and errors call the linears ``name.fc1`` and ``name.fc2``; without it ``fc1`` and ``fc2``.

    Raises:
        ValueError: an unknown normalization or activation or parameter of one, and as in the parts.
    """

    @checked
    def __init__(
        self,
        hidden_size: Size,
        ffn_hidden_size: Size,
        eps: NonNegativeFloat = 1e-5,
        *,
        bias: bool = True,
        normalization: parts.Normalization = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        checkpoint: bool = False,
        recompute_norm: bool = False,
        recompute_activation: bool = False,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        delay_wgrad_compute: bool = False,
        name: str | None = None,
        set_parallel_mode: bool = False,
        **options: Unpack[DenseOptions],
    ) -> None:
        super().__init__()
        placement = place(type(self).__name__, options)
        self.activation = Activation.of(activation, activation_params)
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.checkpoint = checkpoint
        self.recompute_norm = recompute_norm
        self.recompute_activation = recompute_activation
        self.norm = parts.NORMS[normalization](hidden_size, eps, zero_centered_gamma=zero_centered_gamma, **placement)
        linear = partial(Linear, bias=bias, delay_wgrad_compute=delay_wgrad_compute, **options)
        halves = [ffn_hidden_size] * (2 if self.activation.gated else 1)
        self.fc1 = linear(
            hidden_size,
            sum(halves),
            init_method=init_method,
            name=parts.part_name(name, "fc1"),
            parallel_mode="column" if set_parallel_mode else None,
            fused_parts=halves,
        )
        self.fc2 = linear(
            ffn_hidden_size,
            hidden_size,
            init_method=output_layer_init_method or init_method,
            return_bias=return_bias,
            name=parts.part_name(name, "fc2"),
            parallel_mode="row" if set_parallel_mode else None,
        )

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        rows_per_rank: Sequence[int] | None = None,
        residual: Tensor | None = None,
        return_residual: bool = False,
    ) -> Any:
        """Computes Y of the shape of X [..., hidden_size]; returns it or a tuple.

        The tuple is Y, then fc2's bias if ``return_bias``, then the norm's result if ``return_layernorm_output``, then
        the residual stream if ``return_residual``. ``is_first_microbatch`` and ``rows_per_rank`` are those of
        :class:`~minifloat.Linear`, ``residual`` and ``return_residual`` those of :class:`~minifloat.LayerNormLinear`.
        """
        for fc in (self.fc1, self.fc2) if torch.compiler.is_compiling() else ():
            if type(fc) is Linear and needs_eager(fc, is_first_microbatch, checkpointed=self.checkpoint):
                return run_eager(
                    LayerNormMLP.forward, self, x, is_first_microbatch, rows_per_rank, residual, return_residual
                )
        check_tensors(x, residual, self)
        if self.checkpoint and torch.is_grad_enabled():
            stream = parts.add_residual(x, residual, self.fc1)  # which is kept, not what it is the sum of
            return checkpoint_without_dropout(
                self._run, stream, None, is_first_microbatch, rows_per_rank, return_residual
            )
        return self._run(x, residual, is_first_microbatch, rows_per_rank, return_residual)

    def _run(
        self, x: Tensor, residual: Tensor | None, is_first_microbatch: bool | None, rows: Sequence[int] | None,
        return_residual: bool,
    ) -> Any:  # fmt: skip
        fc1, fc2, own_norm = self.fc1, self.fc2, self.norm
        unfused = parts.needs_unfused_path(own_norm, fc1, fc2)
        first = None if unfused else linear_call.recipe_in_force(fc1)
        second = None if unfused else linear_call.recipe_in_force(fc2)
        bias: Tensor | None
        if first is None or second is None:
            stream = parts.add_residual(x, residual, fc1)
            n = parts.call_norm(own_norm, stream, exchange_of(fc1) if isinstance(fc1, Linear) else None)
            options = {"is_first_microbatch": is_first_microbatch, "rows_per_rank": rows}
            h, _ = parts.call_unfused(fc1, n, **options)
            y, bias = parts.call_unfused(fc2, activate(h, self.activation), **options)
        else:
            x, residual = parts.prepare_residual(x, residual, fc1)
            column, row = fc1._exchange, fc2._exchange
            split = rows is not None or column.mode is not None or row.mode is not None
            if split:
                column = exchange_of(fc1).of_call(x.shape, rows, fc1)
            linear_call.check_input(fc1, x, is_first_microbatch)
            for part in (own_norm, fc2):
                check_meta(x, self, part._parameters.get("weight"))
            if split:
                row = exchange_of(fc2).of_call(column.output_shape(x.shape, 0), column.lengths or None, fc2)
            dtype = linear_call.compute_dtype(fc1, x)
            gamma, beta = own_norm.weight, own_norm.bias
            needs_x = parts.needs_gradient(x, residual, gamma, beta)
            compiling = torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag
            node = compiling and all(linear_call.takes_node(fc, is_first_microbatch) for fc in (fc1, fc2))
            call1, w1, b1 = linear_call.prepare_call(
                fc1, first, dtype, needs_x, is_first_microbatch, exchange=column, recompute_x=self.recompute_norm,
                node=node,
            )  # fmt: skip
            needs_hidden = needs_x or parts.needs_gradient(w1, b1)
            call2, w2, b2 = linear_call.prepare_call(
                fc2, second, dtype, needs_hidden, is_first_microbatch, exchange=row,
                recompute_x=self.recompute_activation, node=node,
            )  # fmt: skip
            norm = NormCall(own_norm.norm, self.return_layernorm_output, return_residual and parts.fuses(x))
            mlp = MLPCall(norm, self.activation, call1, call2)
            y, *extra = apply(LayerNormMLPFunction, mlp, x.to(dtype), residual, gamma, beta, w1, b1, w2, b2)
            for call in (call1, call2):
                if call.given.delayed is not None:
                    call.given.delayed.forward_finished()
            n, found = norm.extra_outputs(extra)
            stream = x if found is None else found
            bias = linear_call.returned_bias(fc2, row) if self.return_bias else None
        return parts.outputs(y, (self.return_bias, bias), (self.return_layernorm_output, n), (return_residual, stream))

    def backward_dw(self) -> None:
        """Calls :meth:`Linear.backward_dw` of fc2 and then of fc1; a frozen weight has no gradient to compute."""
        for linear in (self.fc2, self.fc1):
            if linear.weight.requires_grad:
                linear.backward_dw()

    def extra_repr(self) -> str:
        return f"activation={self.activation.name}" + (", checkpoint=True" if self.checkpoint else "")
