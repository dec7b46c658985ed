"""``LayerNormLinear``: a norm and the linear that reads it, in one autograd function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from minifloat.distributed.tensor_parallel import UNSHARDED, Mode
from minifloat.functional.layernorm_linear import LayerNormLinearFunction
from minifloat.nn.linear import Linear
from minifloat.nn.norm import LayerNorm, RMSNorm
from minifloat.nn.parameters import InitMethod
from minifloat.recipe import Recipe

NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def make_norm(
    normalization: str,
    size: int,
    eps: float,
    zero_centered_gamma: bool,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> LayerNorm | RMSNorm:
    """The norm module of that name.

    Raises:
        ValueError: there is no such norm.
    """
    if normalization not in NORMS:
        raise ValueError(f"there is no normalization {normalization!r}; choose one of {', '.join(NORMS)}")
    return NORMS[normalization](size, eps, zero_centered_gamma, dtype, device)


def part_name(name: str | None, part: str) -> str:
    """What recipes and errors call a part of a module of that name."""
    return f"{name}.{part}" if name else part


def runs_alone(*parts: nn.Module) -> bool:
    """Some part is to be called as a module: it has hooks or a ``forward`` of its own, is none of ours, or keeps X.

    The fused function reads the parts' parameters and never calls them.
    """
    return any(
        type(part) not in (Linear, LayerNorm, RMSNorm)
        or getattr(part, "save_original_input", False)
        or "forward" in part.__dict__
        or part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        for part in parts
    )


def call_alone(
    part: nn.Module,
    x: Tensor,
    is_first_microbatch: bool | None,
    fp8_output: bool = False,
    rows_per_rank: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    """Y, and the bias or norm's result that the part returns with it, or None.

    What replaced a part need not know options that are not used, nor return more than Y.
    """
    options: dict[str, Any] = {} if is_first_microbatch is None else {"is_first_microbatch": is_first_microbatch}
    options |= ({"fp8_output": True} if fp8_output else {}) | (
        {} if rows_per_rank is None else {"rows_per_rank": rows_per_rank}
    )
    outputs = part(x, **options)
    return outputs if isinstance(outputs, tuple) else (outputs, None)


def call_norm(norm: nn.Module, x: Tensor, linear: nn.Module) -> Any:
    """N for a linear. If that gathers the rows of all ranks, the norm's parameters get the gradients of all of them."""
    parallel = linear.parallel if isinstance(linear, Linear) else UNSHARDED
    if not parallel.sequence_parallel:
        return norm(x)
    shared = {name: parallel.replicated(parameter) for name, parameter in norm.named_parameters()}
    return functional_call(norm, shared, (x,))


class LayerNormLinear(nn.Module):
    """Y = norm(X) W^T + b, where the norm hands the linear codes and keeps no high-precision result.

    Its parts are the modules ``norm`` and ``linear``, and what it computes is what they compute one after the other,
    to the bit, except that delayed scaling quantizes the norm's result before it is rounded to the dtype of X. Where
    there is no recipe, or a part has hooks or was replaced, the parts do run one after the other.

    Args:
        in_features, out_features, bias, init_method, parameters_split, return_bias, recipe, name, params_dtype, device,
            fuse_wgrad_accumulation, delay_wgrad_compute, sequence_parallel, tp_group, tp_size, tp_mesh, fused_parts: as
            of :class:`~minifloat.Linear`.
        parallel_mode: ``"column"``, as of :class:`~minifloat.Linear`; every rank has the whole norm. Under sequence
            parallelism X and the norm's result are this rank's rows.
        eps, zero_centered_gamma: as of :class:`~minifloat.RMSNorm`.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: forward also gives the norm's result, in the dtype of the activations.

    Raises:
        ValueError: an unknown normalization, and as of the parts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        *,
        init_method: InitMethod | None = None,
        parameters_split: Mapping[str, int] | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        parallel_mode: Mode | None = None,
        sequence_parallel: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        tp_mesh: DeviceMesh | None = None,
        fused_parts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if parallel_mode == "row":
            raise ValueError(
                f"LayerNormLinear {name or ''!r}: parallel_mode='row' would split the rows that the norm is over; use "
                "'column', or a norm and a Linear"
            )
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.norm = make_norm(normalization, in_features, eps, zero_centered_gamma, params_dtype, device)
        self.linear = Linear(
            in_features,
            out_features,
            bias,
            device,
            recipe=recipe,
            name=name,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            return_bias=return_bias,
            parameters_split=parameters_split,
            init_method=init_method,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            tp_mesh=tp_mesh,
            fused_parts=fused_parts,
        )

    def forward(
        self,
        x: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        rows_per_rank: Sequence[int] | None = None,
    ) -> Any:
        """X [..., in_features] to Y [..., out_features], or to a tuple.

        The tuple is Y, then the bias if ``return_bias``, then the norm's result if ``return_layernorm_output``.
        ``is_first_microbatch``, ``fp8_output`` and ``rows_per_rank`` are those of :class:`~minifloat.Linear`.
        """
        recipe = None if runs_alone(self.norm, self.linear) else self.linear.recipe_in_force()
        if recipe is None:
            n = call_norm(self.norm, x, self.linear)
            y, bias = call_alone(self.linear, n, is_first_microbatch, fp8_output, rows_per_rank)
        else:
            y, n = self._fused(x, recipe, is_first_microbatch, fp8_output, rows_per_rank)
            bias = self.linear.bias_vector() if self.return_bias else None
        outputs = (y, *([bias] if self.return_bias else []), *([n] if self.return_layernorm_output else []))
        return outputs if len(outputs) > 1 else y

    def _fused(
        self,
        x: Tensor,
        recipe: Recipe,
        is_first_microbatch: bool | None,
        fp8_output: bool,
        rows_per_rank: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor | None]:
        self.linear.check_input(x)
        parallel = self.linear.parallel.of_call(x.shape, rows_per_rank, self.linear.label)
        dtype = self.linear.compute_dtype(x)
        gamma, beta = self.norm.weight, self.norm.bias
        started = self.linear.start(
            recipe, dtype, needs_gradient(x, gamma, beta), is_first_microbatch, fp8_output, parallel=parallel
        )
        result = LayerNormLinearFunction.apply(  # type: ignore[no-untyped-call]
            self.norm.norm, started.plan, started.call, started.ready, self.return_layernorm_output,
            x.to(dtype), gamma, beta, started.weight, started.bias,
        )  # fmt: skip
        started.finish()
        return result if self.return_layernorm_output else (result, None)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | DeviceMesh) -> None:
        """As :meth:`Linear.set_tensor_parallel_group`."""
        self.linear.set_tensor_parallel_group(tp_group)

    def reset_parameters(self) -> None:
        """Initial values of both parts."""
        self.norm.reset_parameters()
        self.linear.reset_parameters()

    def backward_dw(self) -> None:
        """As :meth:`Linear.backward_dw`."""
        self.linear.backward_dw()


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Some of them requires a gradient."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
