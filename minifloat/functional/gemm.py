"""The three GEMMs of a linear layer on operands: Y = X W^T, dX = dY W, dW = dY^T X; X [M, K], W [N, K], dY [M, N].

A row of :func:`multiply_rows` has the same bits for any number of rows, any order and any grouping of them: products of
groups have one tile for each kind of operand and add up K in its order (``ops/grouped``), and a matrix is one group.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minifloat import backends
from minifloat.arguments import FloatDtype, label_of
from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.functional.autograd import apply, first_order, guarded
from minifloat.functional.quantize import LinearConfig, Options
from minifloat.operand import Operand, Quantized
from minifloat.ops import grouped, matmul, new


def fprop(
    x: Quantized,
    w: Quantized,
    bias: Tensor | None = None,
    *,
    out_dtype: FloatDtype,
    fast_accum: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Computes Y [M, N] = X W^T + bias, contracting K: both operands rowwise. The bias is added in fp32.

    Operands of groups (:func:`~minifloat.functional.quantize_groups`) are multiplied group by group: X [M, K] or dY
    [M, N] by W [G N, K], with biases [G, N].

    The result overwrites ``out``, or with ``accumulate`` is added to it, and ``out`` is returned (in all three
    functions).

    Raises:
        ValueError: an operand is not quantized along the contracted dim, or ``out`` differs in shape, dtype or device.
    """
    return multiply("fprop", x.along(ROWWISE), w.along(ROWWISE), out_dtype, bias, fast_accum, out, accumulate)


def dgrad(
    dy: Quantized,
    w: Quantized,
    *,
    out_dtype: FloatDtype,
    fast_accum: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Computes dX [M, K] = dY W, contracting N: dY rowwise, W columnwise."""
    return multiply("dgrad", dy.along(ROWWISE), w.along(COLUMNWISE), out_dtype, None, fast_accum, out, accumulate)


def wgrad(
    dy: Quantized,
    x: Quantized,
    *,
    out_dtype: FloatDtype,
    fast_accum: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """Computes dW [N, K] = dY^T X, contracting M: both operands columnwise; of groups dW [G, N, K]."""
    return multiply("wgrad", dy.along(COLUMNWISE), x.along(COLUMNWISE), out_dtype, None, fast_accum, out, accumulate)


def multiply(
    gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False,
    out: Tensor | None = None, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """Computes fprop, dgrad or wgrad of two operands.

    Raises:
        ValueError: one is not quantized along the contracted dim; with a square matrix this would go unnoticed.
    """
    eager = not torch.compiler.is_compiling()
    return _multiply(eager, gemm, a, b, out_dtype, bias, fast_accum, out, accumulate)


def _multiply(
    eager: bool, gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None,
    fast_accum: bool = False, out: Tensor | None = None, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """Multiplies by a product prepared once for each kind, or in traced code by an operation."""
    if a.offsets is not None or b.offsets is not None:
        return multiply_groups(gemm, a, b, out_dtype, bias, fast_accum, out, accumulate)
    a_along, m, b_along, n = check_operands(gemm, a, b)
    if out is not None or accumulate:
        _check_out(gemm, out, (m, n), out_dtype, a.codes.device)
    if a.scale_inv is None or b.scale_inv is None:
        target = out if eager and not accumulate else None
        return matmul.written(_high_precision(gemm, a, a_along, b, b_along, out_dtype, bias, target), out, accumulate)
    if eager:
        product = matmul.product(gemm, a.format.spec, a.dim, a_along, b.format.spec, b.dim, b_along, a.codes.device)
        return product(
            a.codes, a.scale_inv, a.amax, m, b.codes, b.scale_inv, b.amax, n,
            out_dtype, bias, fast_accum, out, accumulate,
        )  # fmt: skip
    result = matmul.scaled_mm(
        gemm, a.codes, a.scale_inv, a.amax, a.format.spec, a.dim, a_along, m,
        b.codes, b.scale_inv, b.amax, b.format.spec, b.dim, b_along, n,
        out_dtype, bias, fast_accum, "",
    )  # fmt: skip
    return matmul.written(result, out, accumulate)


multiply_eager = partial(_multiply, True)
"""Multiplies where no compiler traces it, which is not asked again."""


def multiply_groups(
    gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False,
    out: Tensor | None = None, accumulate: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`multiply` of each group, see :data:`~minifloat.ops.grouped.grouped_mm`; ``out`` may have another dtype.

    Raises:
        ValueError: sizes that do not fit.
    """
    if a.offsets is None or b.offsets is None:
        raise ValueError(f"grouped {gemm} of groups and a matrix that is none; quantize both by quantize_groups")
    groups, b_groups = a.offsets.shape[0] - 1, b.offsets.shape[0] - 1
    weight_rows = b.shape[0] // max(b_groups, 1)
    shape: tuple[int, ...] = a.shape[0], weight_rows
    depths = a.shape[1], b.shape[1]
    if gemm == "wgrad":
        shape, depths = (groups, a.shape[1], b.shape[1]), (a.shape[0], b.shape[0])
    elif gemm == "dgrad":
        shape, depths = (a.shape[0], b.shape[1]), (a.shape[1], weight_rows)
    if depths[0] != depths[1] or groups != b_groups:
        raise ValueError(
            f"grouped {gemm} contracts {depths[0]} elements with {depths[1]}, of {groups} and {b_groups} groups"
        )
    arguments = (
        gemm, a.codes, a.scale_inv, a.amax, a.format.spec, a.dim, a.offsets,
        b.codes, b.scale_inv, b.amax, b.format.spec, b.dim, b.offsets,
        *shape[-2:], out_dtype, bias, fast_accum,
    )  # fmt: skip
    if out is not None or accumulate:
        _check_out(gemm, out, shape, out_dtype if out is None else out.dtype, a.codes.device)
    if out is not None and not accumulate and _takes_product(out, out_dtype):
        grouped.grouped_mm_into(out, *arguments)
        return out
    return matmul.written(grouped.grouped_mm(*arguments), out, accumulate)


def _takes_product(out: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels of groups can write a product there."""
    if torch.compiler.is_compiling() or type(out) is not Tensor:
        return False
    return out.dtype == dtype and out.is_contiguous() and out.data_ptr() % 256 == 0


def _check_out(gemm: str, out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if out is None:
        raise ValueError(f"{gemm}: accumulate=True adds to out; give it, {dtype} {shape} on {device}")
    if out.shape != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"{gemm}: out is {out.dtype} {tuple(out.shape)} on {out.device}; the result is {dtype} {shape} on {device}"
        )


def check_operands(gemm: str, a: Operand, b: Operand) -> tuple[int, int, int, int]:
    """Checks operands; returns for each the dim that is contracted and the size of the other one."""
    a_along, b_along = matmul.CONTRACTED[gemm]
    for operand, along in ((a, a_along), (b, b_along)):
        if operand.dim != along and not operand.format.symmetric:
            Quantized(operand, None).along(along)  # raises
    m, depth = a.shape if a_along == ROWWISE else a.shape[::-1]
    n, depth_b = b.shape if b_along == ROWWISE else b.shape[::-1]
    if depth != depth_b:
        raise ValueError(f"{gemm} contracts {depth} elements of {a.shape} with {depth_b} of {b.shape}")
    if a.format.transform != b.format.transform:
        raise ValueError(
            f"{gemm} of {a.format.spec} and {b.format.spec}: a rotation cancels only if both operands have it"
        )
    return a_along, m, b_along, n


def _high_precision(
    gemm: str, a: Operand, a_along: int, b: Operand, b_along: int, out_dtype: torch.dtype, bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiplies with an operand that was left in high precision: the other is dequantized.

    ``out``: it may be written there. A GPU multiplies 16-bit values for an fp32 result without a copy of them in fp32.
    """
    matmul.record(gemm, a.format.spec, b.format.spec, "torch")
    halves = a.codes.dtype == b.codes.dtype in (torch.bfloat16, torch.float16) and a.scale_inv is b.scale_inv is None
    in_backward = not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    direct = halves and out_dtype == torch.float32 and bias is None and a.codes.is_cuda and in_backward
    left, right = (x.codes if direct else x.dequantize(out_dtype) for x in (a, b))
    left = left if a_along == ROWWISE else left.t()
    right = right.t() if b_along == ROWWISE else right
    if direct:
        return torch.mm(left, right, out_dtype=out_dtype, out=out)
    with torch.autocast(left.device.type, enabled=False) if torch.compiler.is_compiling() else nullcontext():
        # A graph's backward is traced under the autocast of its forward, which would round a product of fp32.
        return left @ right if bias is None else torch.addmm(bias.to(out_dtype), left, right)


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


def multiply_rows(
    gemm: str, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Computes fprop as :func:`multiply`, of a matrix as one group. Values have the dtype of the result."""
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
    """Offsets of one group; ``rows`` may be a symbol of a compiler, which must guard nothing for it."""
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
