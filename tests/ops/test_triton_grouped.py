"""Amax and cast of groups of rows on kernels: what they launch, replay and compile to.

``test_triton_kernels.py`` tests what they give.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.path import calls_of
from minifloat.formats import COLUMNWISE, ROWWISE, parse
from minifloat.formats.elements import Quotient, define_scale_rule
from minifloat.ops import grouped
from minifloat.ops.grouped import casts, layout
from minifloat.ops.grouped.table import Outputs
from minifloat.ops.launch import KNOWN, Kernel, count_launches
from minifloat.ops.quantize import per_tensor
from tests.helpers.compare import assert_same_bits
from tests.helpers.triton_interpreter import compile_for

ROTATED = "e2m1/1x16/two_level/hadamard16"
STOCHASTIC, ROTATED_STOCHASTIC = "e2m1/1x16/two_level/stochastic", f"{ROTATED}/stochastic"
FORMATS = [
    "e4m3/tensor/fp32", "e5m2/tensor/pow2", "e4m3/row/fp32", "e4m3/tensor/given", "e4m3/1x128/pow2",
    "e5m2/128x128/fp32", "e4m3/1x32/e8m0", "e2m3/1x32/e8m0", "e2m1/1x32/e8m0", "e2m1/1x16/two_level",
    "e2m1/16x16/two_level", STOCHASTIC, "e2m1/1x16/two_level/amax_per_row",
    "e2m1/1x16/two_level/four_over_six_mae/max=256.0", "e2m1/16x16/two_level/four_over_six_mse", ROTATED,
]  # fmt: skip
BOTH = (ROWWISE, COLUMNWISE)


def offsets_of(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def values(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Rows of very different sizes."""
    return (torch.randn(shape) * torch.randint(-9, 9, (shape[0], 1)).float().exp2()).bfloat16().to(device)


def dims_of(spec: str) -> tuple[int, ...]:
    """Groups of rows are all that is ever rotated."""
    return (COLUMNWISE,) if "hadamard" in spec else BOTH


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
    with count_launches() as of_amaxes:
        found = casts.amax(x, offsets, formats, BOTH)
    levels = [
        torch.ones(3, device=device) if "given" in spec else own for spec, own in zip(formats, found, strict=True)
    ]
    levels = levels[:1] * 2 if formats[0] == formats[1] and "tensor" in formats[0] else levels
    given = [level if level.numel() else None for level in levels]
    rng = torch.ones(3, 2, dtype=torch.int64, device=device) if STOCHASTIC in formats else None
    with count_launches() as of_casts:
        casts.cast(x, offsets, given, rng, formats, BOTH, [True] * 2)
    for launches, wanted in ((of_amaxes, amaxes), (of_casts, passes)):
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


@pytest.mark.gpu
@pytest.mark.parametrize("spec", FORMATS)
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
            name = layout.NAMES[i % 3]
            for own in layout.own_rows(name, fmt, dims[i // 3], offsets.tolist()):
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


# ---- rows that are read by index ----


def tokens_of(counts: Sequence[int], columns: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of which some go to several groups and some to none, where each row is from, and offsets."""
    rows = torch.randint(0, 11, (sum(counts) + 2,), dtype=torch.int32)
    return values((11, columns), device), rows.to(device), offsets_of(counts, device)


def arguments_of(
    x: Tensor, rows: Tensor, offsets: Tensor, level: Tensor | None, formats: Any, dims: Any, k_major: Any
) -> Any:
    return x, offsets, [level] * len(dims), None, formats, dims, k_major, rows


def test_amaxes_of_more_columns_and_rows_than_a_tile(device: torch.device) -> None:
    """The largest element stands in the second tile of a token, and its token in the first tile of a group."""
    x, rows, offsets = tokens_of((1100, 30), 600, device)
    x[:, 550], x[10, 550] = -100.0, -3e5
    rows.clamp_(max=9)
    rows[0] = 10
    assert_same_bits(casts.gathered_amax(x, rows, offsets), grouped.gathered_amax.reference(x, rows, offsets))
    assert casts.gathered_amax(x, rows, offsets)[0] > 2e5


def test_rows_by_index_by_a_rule_without_a_kernel(device: torch.device) -> None:
    """The reference casts."""
    define_scale_rule(Quotient("gathered_only", own=False))
    x, rows, offsets = tokens_of((5, 0, 18), 32, device)
    level, how = casts.gathered_amax(x, rows, offsets), (["e4m3/tensor/gathered_only"] * 2, BOTH, [True] * 2)
    with count_launches() as launches:
        found = casts.cast(*arguments_of(x, rows, offsets, level, *how))
    assert not launches
    expected = grouped.grouped_cast.reference(*arguments_of(x, rows, offsets, level, *how))
    for mine, other in zip(found, expected, strict=True):
        assert_same_bits(mine, other)


@pytest.mark.parametrize("spec", ["e4m3/1x128/fp32", "e5m2/1x32/e8m0", "e2m1/1x32/e8m0"])
def test_chained(spec: str, device: torch.device) -> None:
    """Columnwise codes of what the rowwise ones stand for, in one launch, of rows as they lie and by index."""
    x, rows, offsets = tokens_of((5, 0, 18), 136, device)
    how = [spec] * 2, BOTH, [True] * 2
    for source, index in ((x.index_select(0, rows), None), (x, rows)):
        arguments = source, offsets, [None] * 2, None, *how, index, True
        with count_launches() as launches:
            found = casts.cast(*arguments)
        assert launches == {"group_table_kernel": 1, "grouped_cast_kernel": 1}
        for i, (mine, wanted) in enumerate(zip(found, grouped.grouped_cast.reference(*arguments), strict=True)):
            places = layout.own_rows(layout.NAMES[i % 3], parse(spec), BOTH[i // 3], offsets.tolist())
            for place in places if mine.numel() else ():
                assert_same_bits(mine[place].contiguous(), wanted[place].contiguous())


def test_launches_of_rows_by_index(device: torch.device) -> None:
    """Whatever the number of groups."""
    for counts in ((12,), (1,) * 12):
        x, rows, offsets = tokens_of(counts, 32, device)
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
def test_rows_by_index_compiled(spec: str, shared: bool) -> None:
    """For sm_90: a row's elements are read 16 bytes at a time, through shared memory too."""
    bf16, fp32, codes = ((dtype, torch.int64) for dtype in (torch.bfloat16, torch.float32, torch.uint8))
    fmt = parse(spec)
    scales = codes if fmt.scale_dtype == torch.uint8 else fp32
    how = True, True, fmt.block != 32, fmt.block, fmt.tile, fmt.encoding, fmt.max, fmt.scaling, 0.0, 3.0e38
    out = Outputs((), how, format=fmt, dims=BOTH, shared=shared)
    choice = out.tile("cast", 2048, torch.device("cpu"))
    constants = *how, True, False, False, True, choice.rows, choice.cols, out.layouts(choice)
    compiled = compile_for(
        casts.KERNEL.function_for(constants), bf16, (torch.int32, torch.int64), fp32,
        *[codes, scales, fp32] * 2, torch.int32, (torch.int64,), *[7] * 7, *constants,
        num_warps=choice.warps, **casts.KERNEL.options_for(constants),
    )  # fmt: skip
    assert "ld.global.v4.b32" in compiled.ptx
    assert compiled.spills <= (0 if KNOWN else 32)  # Triton 3.7 spills a little
