"""Activations of groups, times probabilities: values against float64, casts against those of the values, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.functional.norm_activation import Activation
from minifloat.ops import activation, grouped
from minifloat.ops.activation import kernels as activation_kernels
from minifloat.ops.grouped import layout
from minifloat.ops.grouped.table import Outputs
from minifloat.ops.launch import KNOWN, count_launches
from minifloat.ops.quantize.blocks import VALUE
from minifloat.ops.tiles import tile
from tests.helpers.activation_model import FOR_EACH_ACTIVATION, activation_float64, activation_inputs, error_scale
from tests.helpers.compare import U, assert_same_bits, assert_same_bits_or_nan
from tests.helpers.sample import each_twice
from tests.helpers.triton_interpreter import compile_for, confined

BOTH = (ROWWISE, COLUMNWISE)
HERE = torch.device("cpu")
SWIGLU, RELU = Activation.of("swiglu"), Activation.of("srelu")
FORMATS = [
    "e4m3/tensor/given", "e4m3/1x128/pow2", "e5m2/128x128/fp32", "e4m3/1x32/e8m0", "e4m3/32x32/e8m0", "e2m1/1x32/e8m0"
]  # fmt: skip
COUNTS = [(5, 0, 18), (0, 0)]
EACH_COUNTS = pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: "-".join(map(str, counts)))
VALUES: Any = (), (), ()
IMPLEMENTATIONS = pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])


def offsets_of(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def inputs(act: Activation, counts: Sequence[int], columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """x, dy, p and offsets; there are three rows that are no group's, of infinity and NaN."""
    rows = sum(counts) + 3
    x = activation_inputs((rows, columns * (2 if act.gated else 1)), torch.bfloat16, device)
    dy = torch.randn(rows, columns).to(device, torch.bfloat16)
    p = torch.rand(rows).to(device)
    x[-3:], dy[-3:], p[-3:] = torch.inf, torch.nan, torch.nan
    return x, dy, p, offsets_of(counts, device)


def run(name: str, kernels: bool, *arguments: Any) -> Any:
    """The operation on kernels or as the reference, whose shapes are those that it promises."""
    operation = getattr(activation, f"grouped_activation{name}")
    if kernels:
        with confined():
            found = getattr(activation_kernels, f"{name.removeprefix('_') or 'forward'}_groups")(*arguments)
    else:
        found = operation.reference(*arguments)
    for each, promised in zip(found, operation.shapes(*arguments), strict=True):
        assert each.shape == promised.shape and each.dtype == promised.dtype and each.stride() == promised.stride()
    return found


def groups_amax(y: Tensor, offsets: Tensor) -> Tensor:
    return grouped.grouped_amax.reference(y, offsets, [Format().spec], [ROWWISE])[0]


@IMPLEMENTATIONS
@FOR_EACH_ACTIVATION
def test_values(act: Activation, kernels: bool, device: torch.device) -> None:
    """Of the fp32 result, which is rounded once; rows that are no group's are 0 and count for no amax."""
    for counts, columns in (((7, 0, 9), 16), ((0, 5, 0), 37))[act != SWIGLU :]:
        x, _, p, offsets = inputs(act, counts, columns, device)
        for each in (p, None):
            y, amax = run("", kernels, x, each, offsets, None, act.name, act.parameters, True, *VALUES)
            known = sum(counts)
            expected = activation_float64(x[:known], act)
            error = error_scale(x[:known], act) * 8 * U
            if each is not None:
                expected, error = expected * each[:known, None].double(), error * each[:known, None]
            assert ((y[:known].double() - expected).abs() <= error + expected.abs() * 2.0**-8).all()
            assert not y[known:].any()
            assert_same_bits(amax, groups_amax(y, offsets))


@IMPLEMENTATIONS
@FOR_EACH_ACTIVATION
def test_gradients(act: Activation, kernels: bool, device: torch.device) -> None:
    """Against PyTorch's autograd in float64; 300 columns are more than a tile's."""
    for counts, columns in (((7, 0, 9), 16), ((0, 5, 0), 300 if act == RELU else 37))[act != SWIGLU :]:
        x, dy, p, offsets = inputs(act, counts, columns, device)
        known = sum(counts)
        wide, weights = x[:known].double().requires_grad_(), p[:known].double().requires_grad_()
        (activation_float64(wide, act) * weights[:, None]).backward(dy[:known].double())
        assert wide.grad is not None and weights.grad is not None
        dx, amax, dp = run("_backward", kernels, dy, x, p, offsets, None, act.name, act.parameters, True, *VALUES)
        bound = 2.0**-8 * wide.grad.abs() + 64 * U * (1 + x[:known].abs().double().square()) * 8
        assert ((dx[:known].double() - wide.grad).abs() <= bound).all() and not dx[known:].any()
        sizes = (error_scale(x[:known], act) * dy[:known].abs()).sum(1)
        assert ((dp[:known].double() - weights.grad).abs() <= 64 * U * sizes).all() and not dp[known:].any()
        assert_same_bits(amax, groups_amax(dx, offsets))
        how = None, act.name, act.parameters, False, *VALUES
        without, _, none = run("_backward", kernels, dy, x, None, offsets, *how)
        ones, _, _ = run("_backward", kernels, dy, x, torch.ones_like(p), offsets, *how)
        assert none.numel() == 0
        assert_same_bits(without, ones)


def check_casts(found: Sequence[Tensor], y: Tensor, offsets: Tensor, *how: Any, chained: bool = False) -> None:
    """They are those of ``y``, bit for bit; ``chained``: of the values of the rowwise codes the columnwise ones."""
    scales, formats, dims, k_major = how
    given = [scales] * len(formats)
    expected = grouped.grouped_cast.reference(y, offsets, given, None, formats, dims, k_major)
    if chained:
        values = grouped.grouped_dequantize.reference(*expected[:2], None, offsets, formats[0], -1, *y.shape, y.dtype)
        column = [each[1:] for each in (given, formats, dims, k_major)]
        expected[3:] = grouped.grouped_cast.reference(values, offsets, column[0], None, *column[1:])
    for i, (spec, dim) in enumerate(zip(formats, dims, strict=True)):
        places = (layout.own_rows(name, parse(spec), dim, offsets.tolist()) for name in layout.NAMES[:2])
        for codes, grid in zip(*places, strict=True):
            assert_same_bits(found[3 * i][codes].contiguous(), expected[3 * i][codes].contiguous())
            assert_same_bits_or_nan(found[3 * i + 1][grid], expected[3 * i + 1][grid])
        assert_same_bits(found[3 * i + 2], expected[3 * i + 2])


@each_twice
@IMPLEMENTATIONS
@EACH_COUNTS
@pytest.mark.parametrize("spec", FORMATS)
def test_casts_are_those_of_the_values(spec: str, counts: tuple[int, ...], kernels: bool, device: torch.device) -> None:
    wide = max(parse(spec).block, 48 if parse(spec).packed else 32)  # rows of 24 bytes do not begin at 16
    for act, columns, dims, k_major in (
        (SWIGLU, wide, BOTH, True), (SWIGLU, wide, (COLUMNWISE,), False), (RELU, 37, (ROWWISE,), False)
    ):  # fmt: skip
        x, dy, p, offsets = inputs(act, counts, columns, device)
        scales = (torch.arange(len(counts)) + 1).to(device) * 0.7 if spec.endswith("given") else None
        how = [spec] * len(dims), dims, [k_major or scales is not None] * len(dims)
        y, _ = run("", kernels, x, p, offsets, None, act.name, act.parameters, False, *VALUES)
        casts = run("", kernels, x, p, offsets, scales, act.name, act.parameters, False, *how)
        check_casts(casts, y, offsets, scales, *how)
        if act.gated and columns % max(parse(spec).block, 1):
            continue  # a block in both halves
        dx, _, sums = run("_backward", kernels, dy, x, p, offsets, None, act.name, act.parameters, False, *VALUES)
        *casts, total = run("_backward", kernels, dy, x, p, offsets, scales, act.name, act.parameters, False, *how)
        check_casts(casts, dx, offsets, scales, *how)
        torch.testing.assert_close(total, sums, rtol=1e-4, atol=1e-3)


@IMPLEMENTATIONS
@EACH_COUNTS
@pytest.mark.parametrize("spec", ["e4m3/1x128/pow2", "e5m2/1x128/fp32", "e4m3/1x32/e8m0", "e2m1/1x32/e8m0"])
def test_chained_casts(spec: str, counts: tuple[int, ...], kernels: bool, device: torch.device) -> None:
    """The columnwise codes are of what the rowwise ones stand for, which casts of the values are not."""
    wide = max(parse(spec).block, 96 if parse(spec).packed else 32)
    for act, columns, k_major in ((SWIGLU, wide, True), (RELU, 37, False)):
        x, dy, p, offsets = inputs(act, counts, columns, device)
        if sum(counts):  # rows of very different sizes, a NaN, and an infinity
            x[: sum(counts)] *= torch.exp2(torch.arange(sum(counts), device=device) % 13 - 6)[:, None].bfloat16()
            x[3, 5], dy[7, 5] = torch.nan, torch.inf
        how = [spec] * 2, BOTH, [k_major] * 2
        arguments: Any = x, p, offsets, None, act.name, act.parameters, False
        y, _ = run("", kernels, *arguments, *VALUES)
        casts = run("", kernels, *arguments, *how, True)
        check_casts(casts, y, offsets, None, *how, chained=True)
        dx, _, _ = run("_backward", kernels, dy, *arguments, *VALUES)
        *made, _ = run("_backward", kernels, dy, *arguments, *how, True)
        check_casts(made, dx, offsets, None, *how, chained=True)
        if sum(counts):
            with pytest.raises(AssertionError):
                check_casts(casts, y, offsets, None, *how)


def test_strided_probabilities(device: torch.device) -> None:
    """A column of a matrix, and one for all rows: a kernel reads neither what is between nor what is behind."""
    x, dy, p, offsets = inputs(SWIGLU, (2, 5), 16, device)
    spec, one = "e4m3/tensor/given", p[:1].expand(len(p))
    scales = torch.tensor([0.7, 1.4], device=device)
    for contiguous, strided in ((p, torch.stack([p, -p], dim=1)[:, 0]), (one.contiguous(), one)):
        found = []
        for probabilities in (contiguous, strided):
            y, _ = run("", True, x, probabilities, offsets, None, "swiglu", (), False, *VALUES)
            of = x, probabilities, offsets, scales, "swiglu", (), False, [spec], (ROWWISE,), [False]
            codes, *rest = run("_backward", True, dy, *of)
            found.append([y, codes[:7], *rest])  # of rows that are no group's they are undefined
        for mine, expected in zip(*found, strict=True):
            assert_same_bits(mine, expected)


def test_launches(device: torch.device) -> None:
    """One of each kernel, and one for its table, whatever the number of groups."""
    for counts in ((12,), (1,) * 12):
        x, dy, p, offsets = inputs(SWIGLU, counts, 32, device)
        how = ["e4m3/1x32/e8m0"] * 2, BOTH, [False] * 2
        with count_launches() as launches:
            activation_kernels.forward_groups(x, p, offsets, None, "swiglu", (), False, *how)
            activation_kernels.backward_groups(dy, x, p, offsets, None, "swiglu", (), False, *how)
        assert launches == {"group_table_kernel": 2, "activation_kernel": 1, "activation_backward_kernel": 1}


@pytest.mark.parametrize(
    "spec, shared, chained",
    [(None, False, False), ("e4m3/tensor/given", False, False), ("e4m3/1x128/pow2", False, False),
     ("e4m3/1x128/pow2", True, False), ("e4m3/1x32/e8m0", False, False), ("e4m3/1x128/pow2", False, True),
     ("e4m3/1x32/e8m0", False, True)],
)  # fmt: skip
def test_compiled(spec: str | None, shared: bool, chained: bool) -> None:
    """For sm_90: accesses are wide, and nothing is kept in local memory."""
    bf16, fp32, codes = ((dtype, torch.int64) for dtype in (torch.bfloat16, torch.float32, torch.uint8))
    outputs: Any = bf16, fp32, fp32, bf16, fp32, fp32
    out, scales = Outputs((), VALUE), fp32
    if spec is not None:
        fmt = parse(spec)
        scales = codes if fmt.scale_dtype == torch.uint8 else fp32
        outputs = codes, scales, fp32, codes, scales, fp32
        how = True, True, fmt.block != 32, fmt.block, fmt.tile, fmt.encoding, fmt.max, fmt.scaling, 0.0, 3.0e38
        out = Outputs((), how, format=fmt, dims=BOTH, shared=shared)
    integers = torch.int32, (torch.int64,), *[7] * 7
    for name, kernel, read in (
        ("activation", activation_kernels.FORWARD, (bf16, fp32, fp32)),
        ("activation_backward", activation_kernels.BACKWARD, (bf16, bf16, fp32, fp32, fp32)),
    ):
        choice = tile(name, HERE) if spec is None else out.tile(name, 1536, HERE)
        measured = spec is None or spec.endswith("given")
        bias = (False,) if kernel is activation_kernels.BACKWARD else ()
        constants = (
            0, "swish", 1.0, None, 0.0, True, *out.constants, True, True, *bias, False, chained, measured, True,
            choice.rows, choice.cols, out.layouts(choice),
        )  # fmt: skip
        compiled = compile_for(
            kernel.function_for(constants), *read, *outputs, *integers, *constants, num_warps=choice.warps,
            **kernel.options_for(constants),
        )  # fmt: skip
        assert "ld.global.v4.b32" in compiled.ptx and ("st.global.b8" not in compiled.ptx or scales is codes)
        # Two halves of 128 x 128 elements in registers: as the kernel of one matrix.
        both = (name, choice.rows) == ("activation_backward", 128) and not shared
        assert compiled.spills <= (320 if both else 32 if shared and KNOWN else 128 if shared else 0)
