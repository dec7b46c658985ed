"""``LayerNormLinear``: a norm and the linear that reads it, in one autograd function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from minifloat.arguments import Count, NonNegativeFloat, Size, checked
from minifloat.functional.autograd import apply
from minifloat.functional.fused_layers import LayerNormLinearFunction, NormCall
from minifloat.functional.linear_config import Mode
from minifloat.functional.quantize import as_quantized_tensor
from minifloat.nn import linear_call, parts
from minifloat.nn.linear import Linear
from minifloat.nn.linear_call import needs_eager, run_eager
from minifloat.nn.options import DenseOptions, InitMethod, check_meta, check_tensors, place
from minifloat.recompute import exchange_of


class LayerNormLinear(parts.LayerOfParts):
    """Norm and linear, Y = norm(X) W^T + b, where the norm's kernel quantizes and its result is not kept.

    Its parts are the modules ``norm`` and ``linear``, and what it computes is what they compute one after the other,
    to the bit, except that delayed scaling quantizes the norm's result before it is rounded to the dtype of X. Where
    there is no recipe, or a part has hooks or was replaced, the parts do run one after the other.

    Args:
        in_features, out_features, bias, init_method, parameters_split, return_bias, recipe, name, params_dtype, dtype,
            device, fuse_wgrad_accumulation, delay_wgrad_compute, sequence_parallel, tp_group, tp_size, tp_mesh,
            fused_parts, etp_group, etp_reduction: as of :class:`~minifloat.Linear`.
        parallel_mode: ``"column"``, as of :class:`~minifloat.Linear`; every rank has the whole norm. Under sequence
            parallelism X and the norm's result are this rank's rows.
        eps, zero_centered_gamma: as of :class:`~minifloat.RMSNorm`.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: forward also gives the norm's result, in the dtype of the activations.
        recompute_norm: save the input of the norm, which its gradient needs anyway, and in backward recompute what the
            linear reads of its result. Costs a norm and a cast, saves a byte an element in FP8. Has no effect where
            ranks gather that result, each of which keeps its rows of it, nor under a ``backward_override``.

    Raises:
        ValueError: an unknown normalization, and as of the parts.
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
            in_features,
            out_features,
            bias,
            name=name,
            delay_wgrad_compute=delay_wgrad_compute,
            return_bias=return_bias,
            parameters_split=parameters_split,
            init_method=init_method,
            parallel_mode=parallel_mode,
            fused_parts=fused_parts,
            **options,
        )

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
            residual: of the shape of X: the norm is of S = X + residual, rounded to the dtype of both, which the
                norm's kernel adds.
            return_residual: forward also gives S, of the shape of X (X itself where no residual is given). Whatever
                gradient S gets is added to that of X in the kernel of the norm's gradient, before its one rounding.
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
            call, weight, b = linear_call.prepare(
                linear, recipe, dtype, parts.needs_gradient(x, residual, gamma, beta), is_first_microbatch, fp8_output,
                exchange=exchange, recompute_x=self.recompute_norm,
            )  # fmt: skip
            of_norm = NormCall(norm.norm, self.return_layernorm_output, return_residual and parts.fuses(x))
            y, *extra = apply(LayerNormLinearFunction, of_norm, call, x.to(dtype), residual, gamma, beta, weight, b)
            delayed = call.given.delayed
            if fp8_output and not call.spec.eager:
                y = as_quantized_tensor(y, call.spec.config.output, "output", delayed, type(self).__name__)
            if delayed is not None:
                delayed.forward_finished()
            n, found = of_norm.extra_outputs(extra)
            stream = x if found is None else found
            bias = linear._bias_vector() if self.return_bias else None
        return parts.outputs(y, (self.return_bias, bias), (self.return_layernorm_output, n), (return_residual, stream))
