"""Amax, cast and product of groups of rows against the same of each group alone."""

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, parse
from minifloat.ops import grouped, matmul, quantize
from minifloat.ops.grouped import layout
from tests.helpers.sample import each_twice

FORMATS = [
    "e4m3/tensor/fp32", "e4m3/row/fp32", "e4m3/1x128/pow2", "e5m2/128x128/fp32", "e4m3/1x32/e8m0", "e2m3/1x32/e8m0",
    "e2m1/1x32/e8m0", "e2m1/1x16/two_level", "e2m1/16x16/two_level", "e2m1/1x16/two_level/stochastic",
    "e2m1/1x16/two_level/amax_per_row", "e2m1/1x16/two_level/four_over_six_mae/max=256.0", "e4m3/tensor/given",
]  # fmt: skip
COUNTS = [(7, 0, 23, 15), (0, 0), (1,), (0, 5, 0), (128, 1, 200, 31), (64, 64)]


def offsets_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def random(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values of very different sizes, with NaN, infinity, zeros and a denormal among them."""
    x = torch.randn(rows, cols) * torch.randint(-9, 9, (rows, 1)).float().exp2()
    if rows > 4 and cols > 4:
        x[1, 2], x[2, 3], x[3], x[4, 4] = torch.nan, torch.inf, 0.0, 1e-40
    return x.to(dtype)


def cast(x: Tensor, offsets: Tensor, spec: str, dim: int, k_major: bool = False) -> tuple[list[Tensor], Tensor | None]:
    """Codes, scales and measured amaxes of groups, and the level that they were cast with."""
    fmt = parse(spec)
    if fmt.scale_rule == "given":
        level = torch.rand(offsets.numel() - 1) * 4 + 0.5
    else:
        level = grouped.grouped_amax(x, offsets, [spec], [dim])[0] if fmt.needs_amax else None
    rng = torch.randint(2**62, (offsets.numel() - 1, 2)) if fmt.rounding == "stochastic" else None
    made = grouped.grouped_cast(x, offsets, [level], rng, [spec], [dim], [k_major])
    for group, (first, end) in enumerate(pairwise(offsets.tolist())):
        own = x[first:end]
        if level is None:
            expected_level = None
        elif fmt.scale_rule == "given":
            expected_level = level[group : group + 1]
        else:
            expected_level = quantize.amax([own], [spec], [dim])[0]
            assert torch.equal(
                level[layout.own_rows("amax", fmt, dim, first, end - first, group)].reshape(-1), expected_level
            )
        seed = None if rng is None else rng[group]
        codes, scales, amax = quantize.cast([own], [expected_level], [seed], [spec], [dim], [False], None)
        assert torch.equal(made[0][layout.own_rows("codes", fmt, dim, first, end - first, group)], codes)
        found = made[1][layout.own_rows("scale_inv", fmt, dim, first, end - first, group)]
        assert torch.equal(found.reshape(scales.shape).view(torch.uint8), scales.view(torch.uint8))
        if fmt.scale_rule == "given":
            assert torch.equal(made[2][group], amax[0])
    return made, level


@each_twice
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    "spec, dim",
    [*product(FORMATS, (ROWWISE, COLUMNWISE)), ("e2m1/1x16/two_level/hadamard16", COLUMNWISE)],
)
def test_casts_are_those_of_each_group(spec: str, dim: int, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    offsets = offsets_of(counts)
    x = random(sum(counts) + 3, 37)
    cast(x, offsets, spec, dim)


@each_twice
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("spec", ["e4m3/tensor/fp32", "e4m3/1x128/pow2", "e4m3/1x32/e8m0", "e2m1/1x16/two_level"])
def test_products_are_those_of_each_group(spec: str, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    offsets, groups, out, inner = offsets_of(counts), len(counts), 20, 37
    rows = sum(counts) + 3
    weight_offsets = offsets_of((out,) * groups)
    x, dy, w, b = (
        torch.randn(r, c).bfloat16() for r, c in ((rows, inner), (rows, out), (groups * out, inner), (groups, out))
    )
    two_level = parse(spec).scale_rule == "two_level"

    def operand(value: Tensor, of: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor | None, str, int, Tensor]:
        (codes, scales, _), level = cast(value, of, spec, dim)
        return codes, scales, level if two_level else None, spec, dim, of

    def alone(gemm: str, a: Tensor, b: Tensor, dims: tuple[int, int], bias: Tensor | None = None) -> Tensor:
        sides, sizes = [], []
        for value, dim in zip((a, b), dims, strict=True):
            level = quantize.amax([value], [spec], [dim])[0] if parse(spec).needs_amax else None
            codes, scales, _ = quantize.cast([value], [level], [None], [spec], [dim], [False], None)
            sides.append((codes, scales, level if two_level else None))
            sizes.append(value.shape[0 if dim == ROWWISE else 1])
        gemm_of = matmul.product(gemm, spec, dims[0], dims[0], spec, dims[1], dims[1], torch.device("cpu"))
        return gemm_of(*sides[0], sizes[0], *sides[1], sizes[1], torch.bfloat16, bias)

    y = grouped.grouped_mm(
        "fprop",
        *operand(x, offsets, ROWWISE),
        *operand(w, weight_offsets, ROWWISE),
        rows,
        out,
        torch.bfloat16,
        b,
        False,
    )
    dx = grouped.grouped_mm(
        "dgrad", *operand(dy, offsets, ROWWISE), *operand(w, weight_offsets, COLUMNWISE), rows, inner, torch.bfloat16,
        None, False,
    )  # fmt: skip
    dw = grouped.grouped_mm(
        "wgrad", *operand(dy, offsets, COLUMNWISE), *operand(x, offsets, COLUMNWISE), out, inner, torch.bfloat16,
        None, False,
    )  # fmt: skip
    db = grouped.grouped_sum(dy, offsets)
    for group, (first, end) in enumerate(pairwise(offsets.tolist())):
        own, weight = slice(first, end), w[group * out : (group + 1) * out]
        assert torch.equal(y[own], alone("fprop", x[own], weight, (ROWWISE, ROWWISE), b[group]))
        assert torch.equal(dx[own], alone("dgrad", dy[own], weight, (ROWWISE, COLUMNWISE)))
        assert torch.equal(dw[group], alone("wgrad", dy[own], x[own], (COLUMNWISE, COLUMNWISE)))
        assert torch.equal(db[group], dy[own].sum(0))
    assert not y[sum(counts) :].any() and not dx[sum(counts) :].any()


def test_products_of_values() -> None:
    """A bias is rounded as Y is; where rows stand alone, fp32 products are added in the order of K."""
    torch.manual_seed(0)
    x, w, bias = torch.randn(7, 33), torch.randn(10, 33), torch.randn(2, 5)
    offsets, of_w = offsets_of((3, 2)), offsets_of((5, 5))
    sides = [(each.bfloat16(), None, None, IDENTITY.spec, ROWWISE, of) for each, of in ((x, offsets), (w, of_w))]
    y = grouped.grouped_mm("fprop", *sides[0], *sides[1], 7, 5, torch.bfloat16, bias, False)
    rounded, alone = (grouped.rowwise_mm(x, offsets, w, of_w, bias, to) for to in (torch.bfloat16, torch.float32))
    for own, weight, b in ((slice(0, 3), w[:5], bias[0]), (slice(3, 5), w[5:], bias[1])):
        expected = torch.nn.functional.linear(x[own].bfloat16(), weight.bfloat16(), b.bfloat16())
        assert torch.equal(y[own], expected)
        total = torch.zeros_like(expected, dtype=torch.float32)
        for k in range(33):
            total = total + x[own, k, None] * weight[:, k]
        assert torch.equal(alone[own], total + b)
        assert torch.equal(rounded[own], (total + b.bfloat16().float()).bfloat16())
    assert not y[5:].any() and not alone[5:].any()


def test_packed_rows_of_an_odd_number_of_columns() -> None:
    """The last byte has half a code too many; rows of no group are 0."""
    torch.manual_seed(0)
    offsets, of_w, spec = offsets_of((3, 2)), offsets_of((5, 5)), "e2m1/1x32/e8m0"
    x, w = torch.randn(7, 37).bfloat16(), torch.randn(10, 37).bfloat16()
    (codes, scales, _), _ = cast(x, offsets, spec, ROWWISE)
    decoded = grouped.grouped_dequantize(codes, scales, None, offsets, spec, ROWWISE, 7, 37, torch.bfloat16)
    packed, values = (codes, scales, None, spec, ROWWISE, offsets), (w, None, None, IDENTITY.spec, ROWWISE, of_w)
    y = grouped.grouped_mm("fprop", *packed, *values, 7, 5, torch.bfloat16, None, False)
    assert torch.equal(y[:3], decoded[:3] @ w[:5].t()) and torch.equal(y[3:5], decoded[3:5] @ w[5:].t())
    assert not y[5:].any() and not decoded[5:].any() and decoded[:5].any()


def test_shapes_follow_from_counts_on_the_device() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(100, 48, dtype=torch.bfloat16))
        offsets = mode.from_tensor(offsets_of((3, 90)))
        for spec in FORMATS:
            for dim in (ROWWISE, COLUMNWISE):
                level = grouped.grouped_amax(x, offsets, [spec], [dim])
                made = grouped.grouped_cast(x, offsets, level, None, [spec], [dim], [False])
                fmt = parse(spec)
                assert made[0].shape == layout.shape("codes", fmt, dim, 100, 48, 2)
                assert made[1].shape == layout.shape("scale_inv", fmt, dim, 100, 48, 2)


def test_memory_that_is_nobodys_is_not_read() -> None:
    """Poisoned storage between groups, and rows beyond them, change no product."""
    torch.manual_seed(0)
    offsets = offsets_of((5, 0, 18))
    x, dy = torch.randn(40, 32).bfloat16(), torch.randn(40, 16).bfloat16()
    spec = "e4m3/tensor/fp32"
    made = {}
    for poison in (0, 0x7F):
        sides = []
        for value in (dy, x):
            (codes, scales, _), _ = cast(value, offsets, spec, COLUMNWISE)
            free = torch.ones(codes.shape[0], dtype=torch.bool)
            for group, (first, end) in enumerate(pairwise(offsets.tolist())):
                free[layout.own_rows("codes", parse(spec), COLUMNWISE, first, end - first, group)] = False
            codes[free] = poison
            sides += codes, scales, None, spec, COLUMNWISE, offsets
        made[poison] = grouped.grouped_mm("wgrad", *sides, 16, 32, torch.float32, None, False)
    assert torch.equal(made[0], made[0x7F]) and made[0].isfinite().all()
