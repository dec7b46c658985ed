"""Products of groups of rows against the same of each group alone; ``test_triton_kernels.py`` has the casts."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from minifloat.formats import COLUMNWISE, IDENTITY, ROWWISE, parse
from minifloat.ops import grouped, matmul, quantize
from minifloat.ops.grouped import layout
from tests.helpers.grouped_operands import Operand, offsets_of, poisoned, quantized
from tests.helpers.sample import each_twice

FORMATS = [
    "e4m3/tensor/fp32", "e4m3/row/fp32", "e4m3/1x128/pow2", "e5m2/128x128/fp32", "e4m3/1x32/e8m0", "e2m3/1x32/e8m0",
    "e2m1/1x32/e8m0", "e2m1/1x16/two_level", "e2m1/16x16/two_level", "e2m1/1x16/two_level/stochastic",
    "e2m1/1x16/two_level/amax_per_row", "e2m1/1x16/two_level/four_over_six_mae/max=256.0", "e4m3/tensor/given",
]  # fmt: skip
COUNTS = [(7, 0, 23, 15), (0, 0), (1,), (0, 5, 0), (128, 1, 200, 31), (64, 64)]


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

    def operand(value: Tensor, of: Tensor, dim: int) -> Operand:
        return quantized(value, of, spec, dim)

    def alone(gemm: str, a: Tensor, b: Tensor, dims: tuple[int, int], bias: Tensor | None = None) -> Tensor:
        sides, sizes = [], []
        for value, dim in zip((a, b), dims, strict=True):
            level = quantize.amax([value], [spec], [dim])[0] if parse(spec).needs_amax else None
            codes, scales, _ = quantize.cast([value], [level], [None], [spec], [dim], [False], None)
            sides.append((codes, scales, level if "two_level" in spec else None))
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
    packed, values = quantized(x, offsets, spec, ROWWISE), (w, None, None, IDENTITY.spec, ROWWISE, of_w)
    decoded = grouped.grouped_dequantize(
        packed.codes, packed.scale_inv, None, offsets, spec, ROWWISE, 7, 37, torch.bfloat16
    )
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
    """Poison between groups, and in rows beyond them, changes no product."""
    torch.manual_seed(0)
    offsets = offsets_of((5, 0, 18))
    sides = [quantized(torch.randn(40, cols).bfloat16(), offsets, "e4m3/tensor/fp32", COLUMNWISE) for cols in (16, 32)]
    clean, dirty = (
        grouped.grouped_mm("wgrad", *a, *b, 16, 32, torch.float32, None, False)
        for a, b in (sides, map(poisoned, sides))
    )
    assert torch.equal(clean, dirty) and clean.isfinite().all()
