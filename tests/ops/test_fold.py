"""MXFP4 operands folded to FP8 in tiles: values stay the same, and so does the product, whatever the scales."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from minifloat import backends
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.formats.elements import E4M3
from minifloat.ops import matmul
from minifloat.ops.launch import count_launches
from minifloat.ops.matmul import _Matrix, fold_kernels, native
from minifloat.ops.matmul import reference as products
from minifloat.ops.quantize import reference
from minifloat.quantizer import Quantizer
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.compare import assert_same_bits, assert_same_bits_or_nan
from tests.helpers.replay_on_cpu import multiply_strided, nothing_else, replay_on_cpu
from tests.helpers.sample import each_twice

MX4, MX4_TILE = (Format("e2m1", 32, tile=tile, scale_rule="e8m0") for tile in (False, True))
STRIP = Format(block=128, scale_rule="pow2")
WAYS = {
    "fprop": (MX4, ROWWISE, ROWWISE), "dgrad": (MX4, COLUMNWISE, COLUMNWISE),
    "fprop tiles": (MX4_TILE, ROWWISE, ROWWISE), "dgrad tiles": (MX4_TILE, ROWWISE, COLUMNWISE),
}  # fmt: skip
"""Format, the dim that it was cast along, and the one that is contracted."""
SIZES = [(1, 1), (37, 161), (130, 300), (160, 96)]


def random(way: str, outer: int, depth: int, spread: int = 14, largest: int = 140) -> _Matrix:
    """Any codes, scales at most 2^spread apart but those of some blocks that are zero, which are anything."""
    fmt, dim, along = WAYS[way]
    shape = (outer, depth) if along == ROWWISE else (depth, outer)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    rows, cols = fmt.scale_block(dim)
    grid = -(-shape[0] // rows), -(-shape[1] // cols)
    scales = torch.randint(max(largest - spread, 0), largest + 1, grid).to(torch.uint8)
    zero = torch.rand(grid) < 0.2
    scales[zero] = torch.randint(0, 255, (int(zero.sum()),), dtype=torch.uint8)
    codes[zero.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: shape[0], : shape[1]]] &= 8
    return _Matrix(reference._pack(codes, dim), scales, None, fmt, dim, along, outer)


def values(x: _Matrix) -> Tensor:
    """float64 [outer, contracted], zero in blocks that are zero whatever their scale, contracted in whole strips."""
    length = products.contracted_length(x.codes, x.format, x.dim, x.along)
    shape = (x.outer, length) if x.along == ROWWISE else (length, x.outer)
    codes = reference.decode(x.codes, x.format, x.dim, torch.Size(shape)).double()
    rows, cols = x.format.scale_block(x.dim)
    grid = torch.exp2(x.scale_inv.double() - 127)
    found = codes * grid.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: shape[0], : shape[1]]
    found = found if x.along == ROWWISE else found.t()
    return torch.nn.functional.pad(found, (0, -length % 128))


def unfolded(x: products.Folded, outer: int) -> Tensor:
    """The values that a fold stands for."""
    scale = x.scale.double().repeat_interleave(128, 0)[:outer].repeat_interleave(128, 1)
    return E4M3.decode(x.codes).double() * scale


def run(x: _Matrix) -> products.Folded:
    return products.fold(x.codes, x.scale_inv, x.format, x.dim, x.along, x.outer)


@each_twice
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_values_are_the_same(way: str, size: tuple[int, int]) -> None:
    for largest in (140, 14, 3, 254):
        x = random(way, *size, largest=largest)
        assert torch.equal(unfolded(run(x), size[0]), values(x))


BLOCKS = st.tuples(st.integers(0, 255), st.integers(0, 15), st.integers(0, 15))
"""A scale and two codes."""


@settings(max_examples=60)
@given(st.lists(BLOCKS, min_size=8, max_size=8), st.integers(1, 3))
def test_any_scales_fold_exactly_or_are_marked(blocks: list[tuple[int, int, int]], apart: int) -> None:
    """Eight blocks in two rows of any scales, some zero: a NaN marks what is further apart than 2^14, nothing else."""
    codes, scales = torch.zeros(2 * apart, 128, dtype=torch.uint8), torch.zeros(2 * apart, 4, dtype=torch.uint8)
    for i, (scale, *two) in enumerate(blocks):
        row, column = i // 4 * apart, i % 4
        codes[row, 32 * column : 32 * column + 2] = torch.tensor(two, dtype=torch.uint8)
        scales[row, column] = scale
    x = _Matrix(reference._pack(codes, ROWWISE), scales, None, MX4, ROWWISE, ROWWISE, 2 * apart)
    used = [scale for scale, *two in blocks if any(code & 7 for code in two)]
    folds = all(scale < 255 for scale, *_ in blocks) and (not used or min(used) - max(max(used) - 6, 1) >= -8)
    found = run(x)
    assert bool(found.scale.isnan()) == (not folds)
    if folds:
        assert torch.equal(unfolded(found, 2 * apart), values(x))
    else:
        assert not (found.codes & 0x7F).any()


def test_every_code_and_shift() -> None:
    """All 16 codes 2^0 to 2^15 below the largest scale of their tile, in another row of it."""
    for below in range(16):
        codes = torch.zeros(128, 128, dtype=torch.uint8)
        codes[3, :16], codes[97, 32:48] = torch.arange(16), torch.arange(16)
        scales = torch.tensor([9, 254, 0, 70], dtype=torch.uint8).repeat(128, 1)
        scales[3, 0], scales[97, 1] = 100, 100 - below
        x = _Matrix(reference._pack(codes, ROWWISE), scales, None, MX4, ROWWISE, ROWWISE, 128)
        found = run(x)
        assert bool(found.scale.isnan()) == (below > 14)
        if below <= 14:
            assert torch.equal(unfolded(found, 128), values(x)) and found.scale == 2.0 ** (100 - 6 - 127)
            assert found.codes[3, 8] == 0x80  # a zero keeps its sign


# ---- kernels ----


@pytest.fixture
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Lets a CPU take the way of a GPU."""
    if device.type == "cpu":
        if torch.cuda.is_available():
            pytest.skip("the compiled kernels are tested here, not the interpreted ones")
        replay_on_cpu(monkeypatch)
        monkeypatch.setattr(native, "has_kernels", lambda x: True)
        monkeypatch.setattr(native, "block128", multiply_strided)
        monkeypatch.setattr(fold_kernels, "PROGRAMS", 3)  # the interpreter runs one after the other
    yield device


def on(x: _Matrix, device: torch.device) -> _Matrix:
    return x._replace(codes=x.codes.to(device), scale_inv=x.scale_inv.to(device))


def wild(way: str, outer: int, depth: int, spread: int = 14) -> _Matrix:
    """Of which some tiles fold and some do not, and in the last one a scale is NaN."""
    x = random(way, outer, depth, spread)
    x.scale_inv[0, 0], x.scale_inv[-1, -1] = 90, 255
    return x


@each_twice
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_kernel(way: str, size: tuple[int, int], kernels: torch.device) -> None:
    """The bits of the reference, with zeros around."""
    for make in (random, wild):
        x = make(way, *size)
        want = run(x)
        y = on(x, kernels)
        codes, scales = fold_kernels.fold(fold_kernels.source(y.codes, y.scale_inv, *y[3:]))
        high, wide = want.scale.shape
        assert_same_bits(codes.view(torch.uint8)[: size[0]].cpu(), want.codes)
        assert_same_bits(scales[:high, :wide].cpu().contiguous(), want.scale)
        assert not codes.view(torch.uint8)[size[0] :].any() and not scales[:, wide:].any()


def left(rows: int, depth: int) -> _Matrix:
    """FP8 strips of small integers, so that every sum is exact."""
    x = torch.randint(-2, 3, (rows, depth)).float()
    made = Quantizer(STRIP).with_usage(rowwise=True, columnwise=False)(x).any
    assert made.scale_inv is not None
    return _Matrix(made.codes, made.scale_inv, None, STRIP, ROWWISE, ROWWISE, rows)


@pytest.mark.parametrize("size", [(40, 37, 161), (17, 144, 128), (16, 16, 128)])
@pytest.mark.parametrize("way", WAYS)
def test_product(way: str, size: tuple[int, int, int], kernels: torch.device) -> None:
    """That of the reference in every column, whether its tiles fold or not; where sums are exact to the bit."""
    if kernels.type == "cuda" and not backends.supports(STRIP, MX4, kernels)[0]:
        pytest.skip("no product of FP8 blocks here")
    m, n, depth = size
    product = matmul.stepped("native", STRIP, MX4, True)
    for make, dtype, biased in ((random, torch.float32, False), (wild, torch.bfloat16, True)):
        bias = torch.randn(n).to(dtype) if biased else None
        counts = []
        for call in range(2):
            a, b = left(m, depth), make(way, n, depth, 1)
            want = matmul._reference(a, b, dtype, bias, False, None)
            with pytest.MonkeyPatch.context() as patch, count_launches() as launches:
                if call and not m % 16 and not n % 16 and not depth % 128:
                    nothing_else(patch)
                addend = None if bias is None else bias.to(kernels)
                got = product(on(a, kernels), on(b, kernels), dtype, addend, False, None).cpu()
            unfoldable = run(b).scale.isnan().any(1).repeat_interleave(128)[:n]
            assert bool(unfoldable.any()) == (make is wild)
            same = unfoldable if make is wild else torch.ones(n, dtype=torch.bool)
            assert_same_bits_or_nan(got[:, same], want[:, same])  # a GPU makes another NaN than a CPU
            torch.testing.assert_close(
                got, want, rtol=2**-7, atol=2**-7 * float(want.nan_to_num().abs().max()), equal_nan=True
            )
            counts.append(launches)
        assert counts[0] == counts[1] and counts[0]["repair_kernel"] == 1
