"""Casts of rows that are read by index against casts of the rows themselves, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.formats.elements import Quotient, define_scale_rule
from minifloat.ops import grouped
from minifloat.ops.grouped import casts, layout
from minifloat.ops.grouped.table import Outputs
from minifloat.ops.launch import KNOWN, count_launches
from tests.helpers.compare import assert_same_bits, strides
from tests.helpers.triton_interpreter import compile_for, confined

BOTH = (ROWWISE, COLUMNWISE)
FORMATS = [
    "e4m3/tensor/fp32", "e5m2/tensor/pow2", "e4m3/tensor/given", "e4m3/1x128/pow2", "e5m2/128x128/fp32",
    "e4m3/1x32/e8m0", "e2m1/1x32/e8m0",
]  # fmt: skip
IMPLEMENTATIONS = pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])


def inputs(counts: Sequence[int], columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of which some go to several groups, some to none and one, of NaN, to nobody; where from; offsets."""
    tokens, total = 11, sum(counts)
    x = torch.randn(tokens, columns) * torch.randint(-9, 9, (tokens, 1)).float().exp2()
    x[1, 2], x[2, 3], x[3], x[4, 4], x[-1] = torch.nan, torch.inf, 0.0, 1e-40, torch.nan
    rows = torch.randint(0, tokens - 1, (total + 2,), dtype=torch.int32)
    rows[total:] = tokens - 1
    offsets = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return x.bfloat16().to(device), rows.to(device), offsets.to(device)


def amax(kernels: bool, *arguments: Any) -> Any:
    if not kernels:
        return grouped.gathered_amax.reference(*arguments)
    with confined():
        return casts.gathered_amax(*arguments)


def arguments_of(
    x: Tensor, rows: Tensor, offsets: Tensor, level: Tensor | None, formats: Any, dims: Any, k_major: Any
) -> Any:
    return x, offsets, [level] * len(dims), None, formats, dims, k_major, rows


@IMPLEMENTATIONS
def test_amaxes(kernels: bool, device: torch.device) -> None:
    for counts in ((5, 0, 18), (0, 0)):
        x, rows, offsets = inputs(counts, 37, device)
        found = amax(kernels, x, rows, offsets)
        matrix = x[rows.long()]
        assert_same_bits(found, grouped.grouped_amax.reference(matrix, offsets, [Format().spec], [ROWWISE])[0])
        assert found.shape == grouped.gathered_amax.shapes(x, rows, offsets).shape


@IMPLEMENTATIONS
@pytest.mark.parametrize("spec", FORMATS)
def test_casts(spec: str, kernels: bool, device: torch.device) -> None:
    fmt = parse(spec)
    for counts in ((5, 0, 18), (0, 0)):
        for columns, dims, k_major in ((160, BOTH, True), (37, (COLUMNWISE,), not fmt.block), (37, (ROWWISE,), False)):
            x, rows, offsets = inputs(counts, columns, device)
            level = None if fmt.block else amax(False, x, rows, offsets) + (fmt.scale_rule == "given")
            how = [spec] * len(dims), dims, [k_major] * len(dims)
            arguments = arguments_of(x, rows, offsets, level, *how)
            with confined():
                found = (casts.cast if kernels else grouped.grouped_cast.reference)(*arguments)
            matrix = x[rows.long()]
            expected = grouped.grouped_cast.reference(matrix, offsets, [level] * len(dims), None, *how)
            promised = grouped.grouped_cast.shapes(*arguments)
            for each, promise in zip(found, promised, strict=True):
                assert each.shape == promise.shape and each.dtype == promise.dtype and strides(each) == strides(promise)
            for i, dim in enumerate(dims):
                for group, (first, end) in enumerate(pairwise(offsets.tolist())):
                    codes = layout.own_rows("codes", fmt, dim, first, end - first, group)
                    scales = layout.own_rows("scale_inv", fmt, dim, first, end - first, group)
                    assert_same_bits(found[3 * i][codes].contiguous(), expected[3 * i][codes].contiguous())
                    assert_same_bits(found[3 * i + 1][scales], expected[3 * i + 1][scales])
                assert_same_bits(found[3 * i + 2], expected[3 * i + 2])


def test_a_rule_without_a_kernel(device: torch.device) -> None:
    """The reference casts."""
    define_scale_rule(Quotient("gathered_only", own=False))
    x, rows, offsets = inputs((5, 0, 18), 32, device)
    level, how = casts.gathered_amax(x, rows, offsets), (["e4m3/tensor/gathered_only"] * 2, BOTH, [True] * 2)
    with count_launches() as launches:
        found = casts.cast(*arguments_of(x, rows, offsets, level, *how))
    assert not launches
    expected = grouped.grouped_cast.reference(*arguments_of(x, rows, offsets, level, *how))
    for mine, other in zip(found, expected, strict=True):
        assert_same_bits(mine, other)


def test_launches(device: torch.device) -> None:
    """Whatever the number of groups."""
    for counts in ((12,), (1,) * 12):
        x, rows, offsets = inputs(counts, 32, device)
        with count_launches() as launches:
            level = casts.gathered_amax(x, rows, offsets)
            casts.cast(*arguments_of(x, rows, offsets, level, ["e4m3/tensor/fp32"] * 2, BOTH, [True] * 2))
        assert launches == {
            "token_amax_kernel": 1, "gathered_amax_kernel": 1, "group_table_kernel": 1, "grouped_cast_kernel": 1
        }  # fmt: skip


@pytest.mark.parametrize(
    "spec, shared",
    [("e4m3/tensor/fp32", False), ("e4m3/1x128/pow2", False), ("e4m3/1x128/pow2", True), ("e4m3/1x32/e8m0", False)],
)
def test_compiled(spec: str, shared: bool) -> None:
    """For sm_90: a row's elements are read 16 bytes at a time, through shared memory too."""
    bf16, fp32, codes = ((dtype, torch.int64) for dtype in (torch.bfloat16, torch.float32, torch.uint8))
    fmt = parse(spec)
    scales = codes if fmt.scale_dtype == torch.uint8 else fp32
    how = True, True, fmt.block != 32, fmt.block, fmt.tile, fmt.encoding, fmt.max, fmt.scaling, 0.0, 3.0e38
    out = Outputs((), how, format=fmt, dims=BOTH, shared=shared)
    choice = out.tile("cast", 2048, torch.device("cpu"))
    constants = *how, True, False, True, choice.rows, choice.cols, out.layouts(choice)
    compiled = compile_for(
        casts.KERNEL.function_for(constants), bf16, (torch.int32, torch.int64), fp32,
        *[codes, scales, fp32] * 2, torch.int32, (torch.int64,), *[7] * 7, *constants,
        num_warps=choice.warps, **casts.KERNEL.options_for(constants),
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx
    assert compiled.spills <= (0 if KNOWN else 32)  # Triton 3.7 spills a little
