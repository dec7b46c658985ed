"""Amax and cast of groups of rows on kernels against the references, bit for bit: interpreted, or compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.path import calls_of
from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops import grouped
from minifloat.ops.grouped import casts, layout, spread
from minifloat.ops.launch import Kernel, count_launches
from minifloat.ops.quantize import gpu, per_tensor
from tests.helpers.compare import assert_same_bits, assert_same_bits_or_nan, strides
from tests.helpers.selection import diagonals
from tests.helpers.triton_interpreter import compile_for, confined, last_first

ROTATED = "e2m1/1x16/two_level/hadamard16"
STOCHASTIC, ROTATED_STOCHASTIC = "e2m1/1x16/two_level/stochastic", f"{ROTATED}/stochastic"
FORMATS = [
    "e4m3/tensor/fp32", "e5m2/tensor/pow2", "e4m3/row/fp32", "e4m3/tensor/given", "e4m3/1x128/pow2",
    "e5m2/128x128/fp32", "e4m3/1x32/e8m0", "e2m3/1x32/e8m0", "e2m1/1x32/e8m0", "e2m1/1x16/two_level",
    "e2m1/16x16/two_level", STOCHASTIC, "e2m1/1x16/two_level/amax_per_row",
    "e2m1/1x16/two_level/four_over_six_mae/max=256.0", "e2m1/16x16/two_level/four_over_six_mse", ROTATED,
]  # fmt: skip
COUNTS = [(7, 0, 23, 15), (0, 0), (0, 1, 16, 0)]
WITHOUT_KERNEL = ["e4m3/1x8/e8m0", "e2m1/1x32/two_level"]
BOTH = (ROWWISE, COLUMNWISE)
EACH_FORMAT = pytest.mark.parametrize("spec", FORMATS)
FORMATS_AND_COUNTS = pytest.mark.parametrize(("spec", "counts"), diagonals(3, FORMATS, COUNTS), ids=str)
"""All formats have tests of no rows, and of groups whose first is not empty, beside these."""


def offsets_of(counts: Sequence[int], device: torch.device, first: int = 0) -> Tensor:
    return torch.tensor([first, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def values(shape: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of very different sizes, with NaN, infinity, zeros and a denormal among them."""
    x = torch.randn(shape) * torch.randint(-9, 9, (shape[0], 1)).float().exp2()
    if shape[0] > 4 and shape[1] > 4:
        x[1, 2], x[2, 3], x[3], x[4, 4] = torch.nan, torch.inf, 0.0, 1e-40
    return x.to(dtype).to(device)


def dims_of(spec: str) -> tuple[int, ...]:
    """Groups of rows are all that is ever rotated."""
    return (COLUMNWISE,) if "hadamard" in spec else BOTH


def check_amax(x: Tensor, offsets: Tensor, formats: Sequence[str], dims: Sequence[int]) -> dict[str, int]:
    """Asserts that kernels give what the reference gives of each group, and returns what was launched."""
    with count_launches() as launches, confined():
        actual = casts.amax(x, offsets, formats, dims)
    expected = grouped.grouped_amax.reference(x, offsets, formats, dims)
    promised = grouped.grouped_amax.shapes(x, offsets, formats, dims)
    for found, wanted, promise, spec, dim in zip(actual, expected, promised, formats, dims, strict=True):
        assert found.shape == promise.shape == wanted.shape and found.dtype == promise.dtype
        for group, (first, end) in enumerate(pairwise(offsets.tolist())):
            place = layout.own_rows("amax", parse(spec), dim, first, end - first, group)
            assert_same_bits(found[place], wanted[place])
    assert len({each.data_ptr() for each in actual if each.numel()}) == sum(each.numel() > 0 for each in actual)
    return dict(launches)


def levels_of(x: Tensor, offsets: Tensor, fmt: Format, dim: int) -> Tensor | None:
    if fmt.scale_rule == "given":
        return (torch.arange(offsets.numel() - 1, device=x.device) + 1) * 0.7
    return grouped.grouped_amax.reference(x, offsets, [fmt.spec], [dim])[0] if fmt.needs_amax else None


def check_cast(
    x: Tensor,
    offsets: Tensor,
    formats: Sequence[str],
    dims: Sequence[int],
    k_major: bool = False,
    levels: Sequence[Tensor | None] | None = None,
) -> dict[str, int]:
    """The same of casts: codes, scales and measured amaxes."""
    parsed, groups = [parse(spec) for spec in formats], offsets.numel() - 1
    if levels is None:
        levels = [levels_of(x, offsets, fmt, dim) for fmt, dim in zip(parsed, dims, strict=True)]
        if len(set(formats)) == 1 and parsed[0].symmetric:
            levels = levels[:1] * len(levels)  # one object: one pass
    rng = torch.randint(2**62, (groups, 2), device=x.device) if "stochastic" in "".join(formats) else None
    arguments = x, offsets, levels, rng, formats, dims, [k_major] * len(dims)
    with count_launches() as launches, confined():
        actual = casts.cast(*arguments)
    expected = grouped.grouped_cast.reference(*arguments)
    for found, promise in zip(actual, grouped.grouped_cast.shapes(*arguments), strict=True):
        assert found.shape == promise.shape and found.dtype == promise.dtype and strides(found) == strides(promise)
    memory = [each.untyped_storage().data_ptr() for each in actual if each.numel()]
    assert len(set(memory)) == len(memory)
    for i, (fmt, dim) in enumerate(zip(parsed, dims, strict=True)):
        for group, (first, end) in enumerate(pairwise(offsets.tolist())):
            codes = layout.own_rows("codes", fmt, dim, first, end - first, group)
            scales = layout.own_rows("scale_inv", fmt, dim, first, end - first, group)
            assert_same_bits(actual[3 * i][codes].contiguous(), expected[3 * i][codes].contiguous())
            assert_same_bits(actual[3 * i + 1][scales], expected[3 * i + 1][scales])
        assert_same_bits(actual[3 * i + 2], expected[3 * i + 2])
    return dict(launches)


def check_dequantize(x: Tensor, offsets: Tensor, spec: str, dim: int, k_major: bool, dtype: torch.dtype) -> None:
    """The values of the reference's casts, also of codes in rows that are longer, and of fewer columns."""
    fmt, groups = parse(spec), offsets.numel() - 1
    level = levels_of(x, offsets, fmt, dim)
    rng = torch.ones(groups, 2, dtype=torch.int64, device=x.device) if fmt.rounding == "stochastic" else None
    codes, scales, _ = grouped.grouped_cast.reference(x, offsets, [level], rng, [spec], [dim], [k_major])
    longer = torch.cat([codes, codes[:, :1]], 1)[:, :-1]
    for each, cols in ((codes, x.shape[1]), (longer, x.shape[1]), (codes, max(x.shape[1] - 1, 0))):
        arguments = each, scales, level, offsets, spec, dim, x.shape[0], cols, dtype
        with confined(), count_launches() as launches:
            actual = spread.dequantize(*arguments)
        assert_same_bits_or_nan(actual, grouped.grouped_dequantize.reference(*arguments))
        assert sum(launches.values()) == (1 if actual.numel() and groups and gpu.casts(fmt) else 0)


# ---- every format ----


@FORMATS_AND_COUNTS
def test_amaxes_are_the_references(spec: str, counts: tuple[int, ...], device: torch.device) -> None:
    """Whatever lies behind the groups, and in front of the first one."""
    for cols, first in ((48, 0), (37, 17)):
        x, offsets = values((first + sum(counts) + 3, cols), device), offsets_of(counts, device, first)
        x[:first] = torch.inf
        x[first + sum(counts) :] = torch.inf
        check_amax(x, offsets, [spec] * len(dims_of(spec)), dims_of(spec))


@FORMATS_AND_COUNTS
def test_casts_are_the_references(spec: str, counts: tuple[int, ...], device: torch.device) -> None:
    """The same, of sizes at which all rows but those of packed codes begin at multiples of 16 bytes, or none."""
    for cols, first in ((48, 0), (37, 17)):
        x, offsets = values((first + sum(counts) + 3, cols), device), offsets_of(counts, device, first)
        x[:first] = torch.nan
        x[first + sum(counts) :] = torch.nan
        check_cast(x, offsets, [spec] * len(dims_of(spec)), dims_of(spec))


@EACH_FORMAT
def test_each_orientation(spec: str, device: torch.device) -> None:
    """Whichever program comes last: those behind a group's last row write nothing."""
    x, offsets = values((41, 160), device), offsets_of((7, 0, 33, 1), device)
    for dim in dims_of(spec):
        with last_first():
            check_cast(x, offsets, [spec], [dim], k_major=True)


@pytest.mark.parametrize("spec", [spec for spec in FORMATS if "two_level" not in spec])
def test_groups_of_several_tiles(spec: str, device: torch.device) -> None:
    for cols in (144, 37):
        x, offsets = values((333, cols), device), offsets_of((128, 1, 170, 31), device)
        check_amax(x, offsets, [spec] * 2, BOTH)
        for k_major in (False, True):
            check_cast(x, offsets, [spec] * 2, BOTH, k_major)


@pytest.mark.parametrize(("spec", "dtype"), diagonals(2, FORMATS, [torch.float16, torch.float32]), ids=str)
def test_other_dtypes(spec: str, dtype: torch.dtype, device: torch.device) -> None:
    x, offsets = values((26, 40), device, dtype), offsets_of((7, 0, 17), device)
    dims = dims_of(spec)
    check_amax(x, offsets, [spec] * len(dims), dims)
    check_cast(x, offsets, [spec] * len(dims), dims, k_major=True)


@EACH_FORMAT
def test_nothing(spec: str, device: torch.device) -> None:
    """No rows, no columns, no groups."""
    for shape, counts in (((0, 32), (0, 0)), ((5, 0), (2, 3)), ((5, 32), ()), ((0, 0), (0,))):
        x, offsets = values(shape, device), offsets_of(counts, device)
        check_amax(x, offsets, [spec] * len(dims_of(spec)), dims_of(spec))
        for dim in dims_of(spec):
            check_cast(x, offsets, [spec], [dim], k_major=True)


@EACH_FORMAT
def test_values_are_the_references(spec: str, device: torch.device) -> None:
    for dim in dims_of(spec):
        for i, counts in enumerate(((7, 0, 23, 40), (0, 5, 0))):
            for cols in (48, 37):
                first = 130 if i and cols == 37 else 0
                x = values((first + sum(counts) + 3, cols), device).nan_to_num(5.0, 8.0, -8.0)
                offsets = offsets_of(counts, device, first)
                check_dequantize(x, offsets, spec, dim, i == 0, (torch.bfloat16, torch.float32)[i])
        for shape, counts in (((0, 32), (0, 0)), ((5, 0), (2, 3)), ((5, 32), ())):
            check_dequantize(values(shape, device), offsets_of(counts, device), spec, dim, False, torch.float16)


@pytest.mark.parametrize("spec", WITHOUT_KERNEL)
def test_formats_without_a_kernel_are_the_references(spec: str, device: torch.device) -> None:
    x, offsets = values((33, 48), device), offsets_of((7, 0, 23), device)
    assert not check_amax(x, offsets, [spec, "e4m3/tensor/fp32"], BOTH)
    assert not check_cast(x, offsets, [spec, "e4m3/tensor/fp32"], BOTH, k_major=True)
    check_dequantize(x, offsets, spec, ROWWISE, False, torch.float32)


def test_inputs_anywhere_in_memory(device: torch.device) -> None:
    wide = values((34, 48), device)
    for x in (wide.flatten()[3 : 3 + 16 * 32].view(16, 32), wide[:33, :16].t(), wide[::2, 1::3]):
        offsets = offsets_of((9, 2, 5), device)
        for each in (offsets, torch.stack([offsets, offsets], 1)[:, 1], torch.cat([offsets[:1], offsets])[1:]):
            for spec in ("e4m3/tensor/fp32", "e4m3/1x32/e8m0", "e2m1/1x16/two_level"):
                check_amax(x, each, [spec] * 2, BOTH)
                check_cast(x, each, [spec], [COLUMNWISE])


def test_many_groups(device: torch.device) -> None:
    """More than a program of the table's kernel writes."""
    x, offsets = values((300, 32), device), offsets_of((1,) * 270, device)
    check_amax(x, offsets, ["e4m3/tensor/fp32"], [ROWWISE])
    check_cast(x, offsets, ["e4m3/tensor/fp32"] * 2, BOTH)


# ---- what is launched ----


@pytest.mark.parametrize(
    ("formats", "amaxes", "passes"),
    [
        (("e4m3/tensor/fp32", "e4m3/tensor/fp32"), {"amax_kernel": 1}, {"grouped_cast_kernel": 1}),
        (("e4m3/tensor/fp32", "e5m2/tensor/fp32"), {"amax_kernel": 1}, {"cast_tensor_kernel": 2}),
        (("e4m3/tensor/given", "e4m3/tensor/given"), {}, {"grouped_cast_kernel": 1}),
        (("e4m3/row/fp32", "e4m3/row/fp32"), {"line_amax_kernel": 2}, {"cast_tensor_kernel": 2}),
        (("e4m3/1x128/pow2", "e4m3/1x128/pow2"), {}, {"cast_block_kernel": 1}),
        (("e4m3/128x128/pow2", "e4m3/128x128/pow2"), {}, {"grouped_cast_kernel": 1}),
        (("e4m3/128x128/pow2", "e4m3/1x128/pow2"), {}, {"cast_block_kernel": 2}),
        (("e2m1/1x16/two_level", ROTATED), {"rotated_amax_kernel": 1}, {"cast_nvfp4_kernel": 1}),
        ((STOCHASTIC, ROTATED_STOCHASTIC), {"rotated_amax_kernel": 1}, {"cast_nvfp4_kernel": 1}),
        (
            ("e2m1/1x16/two_level", "e4m3/tensor/fp32"),
            {"amax_kernel": 1},
            {"cast_nvfp4_kernel": 1, "cast_tensor_kernel": 1},
        ),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, tuple) else None,
)
def test_launches(
    formats: tuple[str, str], amaxes: dict[str, int], passes: dict[str, int], device: torch.device
) -> None:
    """One of each kernel for all groups, and one for its table; both orientations in one where lists have it so."""
    x, offsets = values((26, 32), device), offsets_of((7, 0, 17), device)
    for check, wanted in ((check_amax, amaxes), (partial(check_cast, k_major=True), passes)):
        launches = check(x, offsets, formats, BOTH)
        tables = launches.pop("group_table_kernel", 0)
        assert launches == wanted and tables == sum(wanted.values())


@pytest.mark.parametrize("spec", ["e4m3/tensor/fp32", "e4m3/row/fp32", "e4m3/1x128/pow2", "e2m1/1x16/two_level"])
def test_work_of_the_host_does_not_depend_on_the_number_of_groups(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels it launches, and what it calls for it."""
    monkeypatch.setattr(Kernel, "_through_jit", lambda *args: None)
    fmt, here, found = parse(spec), torch.device("cpu"), []
    for groups in (1, 9, 300):
        x, offsets = values((400, 32), here), offsets_of((1,) * groups, here)
        levels = [
            torch.ones(layout.shape("amax", fmt, dim, 400, 32, groups)) if fmt.needs_amax else None for dim in BOTH
        ]
        with count_launches() as launches:
            calls, _ = calls_of(partial(casts.amax, x, offsets, [spec] * 2, BOTH))
            more, _ = calls_of(partial(casts.cast, x, offsets, levels, None, [spec] * 2, BOTH, [True] * 2))
        found.append((len(calls), len(more), launches))
    assert found[0] == found[1] == found[2] and found[0][2].total() >= 2


# ---- on a GPU ----

LARGE = (1000, 0, 17, 2048, 1, 0, 333, *[40] * 60)


@pytest.mark.gpu
@EACH_FORMAT
def test_large(spec: str) -> None:
    device, dims = torch.device("cuda"), dims_of(spec)
    for cols in (1024, 1040, 1030):
        x, offsets = values((6000, cols), device), offsets_of(LARGE, device)
        x[sum(LARGE) :] = torch.inf
        check_amax(x, offsets, [spec] * len(dims), dims)
        for k_major in (False, True):
            check_cast(x, offsets, [spec] * len(dims), dims, k_major)
            check_dequantize(x, offsets, spec, dims[-1], k_major, torch.bfloat16)


@pytest.mark.gpu
@EACH_FORMAT
def test_a_captured_graph_casts_the_groups_that_there_then_are(spec: str) -> None:
    """The host waits for nothing, and reads no counts: replays follow the offsets."""
    device, dims, fmt = torch.device("cuda"), dims_of(spec), parse(spec)
    x, offsets = values((600, 256), device), offsets_of((100, 0, 300, 7), device)
    scales = torch.full((4,), 0.7, device=device)
    rng = torch.arange(8, device=device).view(4, 2) if fmt.rounding == "stochastic" else None

    def run() -> list[Tensor]:
        levels = casts.amax(x, offsets, [spec] * len(dims), dims)
        given = [level if fmt.needs_amax else scales if fmt.scale_rule == "given" else None for level in levels]
        return casts.cast(x, offsets, given, rng, [spec] * len(dims), dims, [True] * len(dims))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for counts in ((1, 2, 3, 4), (0, 0, 599, 1), (150, 150, 150, 150)):
        x.copy_(values((600, 256), device))
        offsets.copy_(offsets_of(counts, device))
        graph.replay()
        replayed = [each.clone() for each in captured]
        for i, (found, wanted) in enumerate(zip(replayed, run(), strict=True)):
            for group, (first, end) in enumerate(pairwise(offsets.tolist())):
                name = layout.NAMES[i % 3]
                own = layout.own_rows(name, fmt, dims[i // 3], first, end - first, group)
                place = slice(None) if name == "amax" else own
                assert_same_bits(found[place].contiguous(), wanted[place].contiguous())


# ---- compiled ----


def test_compiled() -> None:
    """Accesses are wide though groups have any number of rows, also those along the columns."""
    bf16, fp32, codes = ((dtype, torch.int64) for dtype in (torch.bfloat16, torch.float32, torch.uint8))
    number = (torch.int64,)
    rule, element = parse("e4m3/tensor/fp32").scaling, parse("e4m3/tensor/fp32").encoding
    for row, column in ((True, False), (False, True), (True, True)):
        compiled = compile_for(
            per_tensor.cast_tensor_kernel, bf16, fp32, codes, fp32, fp32, codes, fp32, fp32, torch.float32,
            *[number] * 4, 0, row, column, column, False, False, element, 448.0, rule, 0.0,
            False, False, True, True, 64, 128, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        assert "ld.global.v4.b32" in compiled.ptx and compiled.spills == 0
        assert "st.global.b8" not in compiled.ptx and "st.global.v4.b32" in compiled.ptx
