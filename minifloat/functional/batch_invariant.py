"""Products of which a row has the same bits for any number of rows, any order and any grouping of them.

The products of groups have one tile for each kind of operand and add up K in its order, whatever the groups are
(``ops/grouped``). So a matrix is multiplied as one group, and a linear gives what a grouped linear gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minifloat import backends
from minifloat.arguments import label_of
from minifloat.functional.autograd import apply, first_order, guarded
from minifloat.functional.gemm import check_operands, multiply_groups
from minifloat.functional.linear_config import LinearConfig, Options
from minifloat.operand import Operand
from minifloat.ops import grouped, matmul, new


def check_rows_alone(layer: object, config: LinearConfig, options: Options) -> None:
    """Raises ValueError, naming ``layer``, where a row of the result would depend on other rows anyway."""
    ranks = options.ranks
    for fmt in (config.input.row_format, *[config.output.row_format] * options.quantize_output):
        if fmt.mixes_rows:
            raise ValueError(
                f"{label_of(layer)}: autocast(batch_invariant=True), but a row cast to {fmt.spec} depends on the "
                "other rows; use a recipe that scales each row by itself (rowwise, block, mxfp8, mxfp6, mxfp4, w4a8), "
                "or delayed"
            )
    if ranks is not None and ranks.mode == "row" and ranks.group.size > 2:
        raise ValueError(
            f"{label_of(layer)}: autocast(batch_invariant=True), but the backend chooses the order in which it sums "
            f"{ranks.group.size} ranks; two have one order"
        )
    if options.device == "cuda" and not (runs := backends.kernels(torch.cuda.current_device()))[0]:
        raise ValueError(f"{label_of(layer)}: autocast(batch_invariant=True) needs the Triton kernels: {runs[1]}")


def multiply(
    gemm: str,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Computes fprop as of ``gemm.multiply``, of a matrix as one group. Values have the dtype of the result."""
    if a.offsets is None:
        check_operands(gemm, a, b)
        a, b, bias = _one_group(a), _one_group(b), None if bias is None else bias[None]
    if a.scale_inv is not None and b.scale_inv is not None:
        return multiply_groups(gemm, a, b, out_dtype, bias, fast_accum, out)
    matmul.record(gemm, a.format.spec, b.format.spec, "torch")
    left, right = a.dequantize(out_dtype), b.dequantize(out_dtype)
    assert a.offsets is not None and b.offsets is not None
    return matmul.written(grouped.rowwise_mm(left, a.offsets, right, b.offsets, bias, out_dtype), out, False)


def _offsets(rows: int, device: torch.device) -> Tensor:
    """Of one group; ``rows`` may be a symbol of a compiler, which must guard nothing for it."""
    return torch.arange(2, dtype=torch.int32, device=device) * rows


def _one_group(x: Operand) -> Operand:
    return new(Operand, (*x[:7], _offsets(x.shape[0], x.codes.device)))


def multiply_values(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    """X W^T of ``x`` [M, K] and ``weight`` [N, K], which are of one dtype, with gradients."""
    return apply(_ValuesFunction, x, weight, out_dtype)


class _ValuesFunction(torch.autograd.Function):
    """X W^T and its gradients, which are PyTorch's products in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(guarded(x), weight)
        offsets = [_offsets(each.shape[0], x.device) for each in (x, weight)]
        return grouped.rowwise_mm(x, offsets[0], weight, offsets[1], None, out_dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.float()
        dx = (dy @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, (dy.t() @ x.float()).to(weight.dtype) if ctx.needs_input_grad[1] else None, None
