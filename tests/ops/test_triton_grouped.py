"""Amax and cast of groups of rows on kernels against the references, bit for bit: interpreted, or compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import COLUMNWISE, ROWWISE, Format, parse
from minifloat.ops import grouped
from minifloat.ops.grouped import casts, layout
from minifloat.ops.launch import count_launches
from minifloat.ops.quantize import hadamard
from tests.helpers.compare import assert_same_bits, strides
from tests.helpers.triton_interpreter import confined

ROTATED = "e2m1/1x16/two_level/hadamard16"
STOCHASTIC = "e2m1/1x16/two_level/stochastic"
FORMATS = [
    "e4m3/tensor/fp32", "e5m2/tensor/pow2", "e4m3/row/fp32", "e4m3/tensor/given", "e4m3/1x128/pow2",
    "e5m2/128x128/fp32", "e4m3/1x32/e8m0", "e2m3/1x32/e8m0", "e2m1/1x32/e8m0", "e2m1/1x16/two_level",
    "e2m1/16x16/two_level", STOCHASTIC, "e2m1/1x16/two_level/amax_per_row",
    "e2m1/1x16/two_level/four_over_six_mae/max=256.0", "e2m1/16x16/two_level/four_over_six_mse", ROTATED,
]  # fmt: skip
COUNTS = [(7, 0, 23, 15), (0, 0), (1,), (0, 5, 0), (128, 1, 70, 31), (64, 64)]
BOTH = (ROWWISE, COLUMNWISE)
EACH_FORMAT = pytest.mark.parametrize("spec", FORMATS)
EACH_COUNTS = pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: "-".join(map(str, counts)))


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
            place = layout.amax_rows(parse(spec), dim, first, end - first, group)
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
            codes = layout.code_rows(fmt, dim, first, end - first, group)
            scales = layout.scale_rows(fmt, dim, first, end - first, group)
            assert_same_bits(actual[3 * i][codes].contiguous(), expected[3 * i][codes].contiguous())
            assert_same_bits(actual[3 * i + 1][scales], expected[3 * i + 1][scales])
        assert_same_bits(actual[3 * i + 2], expected[3 * i + 2])
    return dict(launches)


# ---- every format ----


@EACH_COUNTS
@EACH_FORMAT
def test_amaxes_are_the_references(spec: str, counts: tuple[int, ...], device: torch.device) -> None:
    """Also where a group follows that is no group's, and in front of the first one."""
    for shape, first in (((sum(counts) + 3, 48), 0), ((sum(counts) + 20, 37), 17)):
        x, offsets = values(shape, device), offsets_of(counts, device, first)
        x[:first] = torch.inf
        x[first + sum(counts) :] = torch.inf
        check_amax(x, offsets, [spec] * len(dims_of(spec)), dims_of(spec))


@EACH_COUNTS
@EACH_FORMAT
def test_casts_are_the_references(spec: str, counts: tuple[int, ...], device: torch.device) -> None:
    """Sizes at which rows begin at 16 bytes in x, in codes and in packed codes, or in none."""
    for cols in (37, 16, 96):
        x, offsets = values((sum(counts) + 3, cols), device), offsets_of(counts, device)
        x[sum(counts) :] = torch.nan
        check_cast(x, offsets, [spec] * len(dims_of(spec)), dims_of(spec))
        check_cast(x, offsets, [spec], dims_of(spec)[-1:], k_major=True)


@EACH_FORMAT
def test_each_orientation(spec: str, device: torch.device) -> None:
    x, offsets = values((90, 144), device), offsets_of((7, 0, 33, 40), device)
    for k_major in (False, True):
        for dims in ([dim] for dim in dims_of(spec)):
            check_cast(x, offsets, [spec], dims, k_major)
        check_cast(x, offsets, [spec] * len(dims_of(spec)), dims_of(spec), k_major)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@EACH_FORMAT
def test_other_dtypes(spec: str, dtype: torch.dtype, device: torch.device) -> None:
    for cols in (40, 33):
        x, offsets = values((50, cols), device, dtype), offsets_of((7, 0, 33, 9), device)
        dims = dims_of(spec)
        check_amax(x, offsets, [spec] * len(dims), dims)
        check_cast(x, offsets, [spec] * len(dims), dims, k_major=True)


# ---- what is launched ----


@pytest.mark.parametrize(
    ("formats", "amaxes", "passes"),
    [
        (("e4m3/tensor/fp32", "e4m3/tensor/fp32"), {"amax_kernel": 1}, {"cast_tensor_kernel": 1}),
        (("e4m3/tensor/fp32", "e5m2/tensor/fp32"), {"amax_kernel": 1}, {"cast_tensor_kernel": 2}),
        (("e4m3/tensor/given", "e4m3/tensor/given"), {}, {"cast_tensor_kernel": 1}),
        (("e4m3/row/fp32", "e4m3/row/fp32"), {"line_amax_kernel": 2}, {"cast_tensor_kernel": 2}),
        (("e4m3/1x128/pow2", "e4m3/1x128/pow2"), {}, {"cast_block_kernel": 1}),
        (("e4m3/128x128/pow2", "e4m3/1x128/pow2"), {}, {"cast_block_kernel": 2}),
        (("e2m1/1x16/two_level", ROTATED), {"rotated_amax_kernel": 1}, {"cast_nvfp4_kernel": 1}),
        ((STOCHASTIC, ROTATED + "/stochastic"), {"rotated_amax_kernel": 1}, {"cast_nvfp4_kernel": 1}),
        (("e2m1/1x16/two_level", "e4m3/tensor/fp32"), {"amax_kernel": 1}, {"cast_nvfp4_kernel": 1, "cast_tensor_kernel": 1}),
    ],
    ids=lambda part: "-".join(part) if isinstance(part, tuple) else None,
)  # fmt: skip
def test_launches_do_not_depend_on_the_number_of_groups(
    formats: tuple[str, str], amaxes: dict[str, int], passes: dict[str, int], device: torch.device
) -> None:
    """A launch of each kernel, with one that finds the groups: of 1, of more than a list has by value, of many."""
    for groups in (1, 9, 300):
        x, offsets = values((groups + 40, 32), device), offsets_of((*[1] * (groups - 1), 33), device)
        for check, wanted in ((check_amax, amaxes), (check_cast, passes)):
            launches = check(x, offsets, formats, BOTH)
            found = launches.pop("group_table_kernel", 0)
            assert launches == wanted and found == sum(wanted.values())


def test_calls_do_not_depend_on_the_number_of_groups(device: torch.device) -> None:
    """What the host does is the same, but for sizes."""
    made: list[list[tuple[object, ...]]] = []
    for groups in (2, 200):
        x, offsets = values((groups + 40, 32), device), offsets_of((1,) * groups, device)
        seen: list[tuple[object, ...]] = []

        def profile(frame: object, event: str, _: object, seen: list[tuple[object, ...]] = seen) -> None:
            code = frame.f_code  # type: ignore[attr-defined]
            if event == "call" and "minifloat" in code.co_filename and "kernel" not in code.co_name:
                seen.append((code.co_filename, code.co_name))

        launch = casts.table.launch
        spec = ["e4m3/tensor/fp32"] * 2
        with pytest.MonkeyPatch.context() as patch:
            import sys

            patch.setattr("minifloat.ops.launch.Kernel._through_jit", lambda *args: None)
            patch.setattr("minifloat.ops.launch.Kernel._launch", lambda *args: None)
            sys.setprofile(profile)
            try:
                (level, _) = casts.amax(x, offsets, spec, BOTH)
                casts.cast(x, offsets, [level] * 2, None, spec, BOTH, [True] * 2)
            finally:
                sys.setprofile(None)
        assert launch is casts.table.launch
        made.append(seen)
    assert made[0] == made[1] and made[0]
