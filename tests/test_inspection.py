"""Statistics of casts equal plain formulas, and add up over parts."""

import math

import pytest
import torch

from minifloat.formats import ROWWISE, parse
from minifloat.functional.quantize import values_of
from minifloat.inspection import combine, measure, read
from minifloat.quantizer import Quantizer


@pytest.mark.parametrize("spec", ["e4m3/tensor/fp32", "e5m2/tensor/fp32", "e4m3/1x32/e8m0", "e2m1/1x32/e8m0"])
@pytest.mark.parametrize("rowwise", [True, False])
def test_statistics_are_those_of_a_plain_formula(spec: str, rowwise: bool) -> None:
    x = torch.randn(37, 96, generator=torch.Generator().manual_seed(0)) * 10
    x[::3] *= 1e-6  # small beside what shares their column's or tensor's scale
    x[5, 7] = 0
    operand = Quantizer(parse(spec), rowwise=rowwise, columnwise=not rowwise)(x).any
    restored, scales = operand.dequantize(torch.float32), operand.scale_values()
    assert scales is not None
    if scales.numel() > 1:
        scales = scales.repeat_interleave(32, int(operand.dim == ROWWISE))[:37, :96]
    seen = read(measure(x, operand))
    assert seen.amax == x.abs().max()
    assert seen.underflow == ((restored == 0) & (x != 0)).double().mean()
    assert seen.saturation == (restored.abs() == operand.format.max * scales).double().mean()
    noise = (restored - x).double().square().sum()
    assert math.isclose(seen.snr, 10 * math.log10(x.double().square().sum() / noise))
    assert seen.nonfinite == 0 and seen.saturation > 0


def test_elements_that_are_not_finite_count_as_such_alone() -> None:
    x = torch.ones(3, 32)
    x[0, 0], x[2, 31] = math.nan, -math.inf
    seen = read(measure(x, Quantizer(parse("e4m3/1x32/e8m0"))(x).any))
    assert (seen.nonfinite, seen.amax) == (2, 1)


def test_parts_add_up_to_the_whole() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    cast = Quantizer(parse("e4m3/1x32/e8m0"))
    parts = combine(torch.stack([measure(rows, cast(rows).any) for rows in (x[:3], x[3:])]))
    torch.testing.assert_close(parts, measure(x, cast(x).any), rtol=1e-12, atol=0)


def test_no_rows_lose_nothing() -> None:
    x = torch.zeros(0, 32)
    assert read(measure(x, Quantizer(parse("e4m3/1x32/e8m0"))(x).any)) == (0, 0, 0, math.inf, 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e-15, 1e30])
@pytest.mark.parametrize("spec", ["e4m3/tensor/fp32", "e4m3/1x32/e8m0", "e2m1/1x16/two_level"])
def test_the_ratio_is_right_of_any_size(spec: str, size: float, dtype: torch.dtype) -> None:
    x = (torch.randn(16, 32, generator=torch.Generator().manual_seed(0)) * size).to(dtype)
    operand = Quantizer(parse(spec))(x).any
    noise = (operand.dequantize(torch.float32).double() - x.double()).square().sum()
    assert read(measure(x, operand)).snr == pytest.approx(float(10 * torch.log10(x.double().square().sum() / noise)))


def test_values_that_overflow_give_the_worst_ratio() -> None:
    x = torch.full((1, 32), 3.38e38)  # 3.97 times the scale, which is cast to 4
    assert read(measure(x, Quantizer(parse("e2m1/1x32/e8m0"))(x).any)).snr == -math.inf


def test_values_are_refused() -> None:
    with pytest.raises(ValueError, match="cast it by itself"):
        measure(torch.ones(8, 64), values_of(torch.ones(8, 64)))


def test_zeros_of_a_rotated_format_are_counted_after_the_rotation() -> None:
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    x[3] = 1  # each rotated element is 1/4 or -1/4, so that none is lost
    x[5, 7] = math.nan
    fmt = parse("e2m1/1x16/two_level/hadamard16")
    seen = read(measure(x, Quantizer(parse("e2m1/1x16/two_level"), column_format=fmt, rowwise=False)(x).any))
    assert (seen.underflow, seen.nonfinite) == (0, 1)  # the column with NaN has a scale of NaN
    assert seen.saturation > 0.9


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("spec", ["e2m1/1x16/two_level", "e2m1/16x16/two_level", "e2m1/1x16/two_level/hadamard16"])
def test_elements_under_a_scale_of_zero_are_lost(spec: str, groups: bool) -> None:
    """Of blocks beside which another is so large that theirs underflows in E4M3, whatever their codes are."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 1e-4
    x[3, :16] = 1e4  # rotated, 1/4 of it in each element of its columns
    x[20, 40] = 0
    offsets = torch.tensor([0, 32], dtype=torch.int32) if groups else None
    cast = Quantizer(parse("e4m3/tensor/fp32"), column_format=parse(spec), rowwise=False)
    operand = cast.cast(x, offsets=offsets).columnwise
    assert operand is not None
    seen = read(measure(x, operand))
    if groups and "hadamard" in spec:
        assert math.isnan(seen.underflow)
        return
    kept = 16 * 16 if "hadamard" in spec else 16
    assert seen.underflow == (x.numel() - kept - ("hadamard" not in spec)) / x.numel()
    assert seen.saturation == kept / x.numel()
