"""The permutation's kernels equal their reference bit for bit: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.functional import permute, sort_by_expert, unpermute
from minifloat.ops.launch import count_launches
from minifloat.ops.permute import kernels, permute_rows, precise, unpermute_rows, unpermute_rows_backward
from minifloat.ops.tiles import Tile
from tests.helpers import triton_interpreter
from tests.helpers.compare import DTYPES, assert_same_bits, assert_same_bits_or_nan
from tests.helpers.routing import CASES, KINDS, Case, some_indices
from tests.helpers.sample import first_by_default
from tests.helpers.selection import diagonals

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
SHAPES = [*CASES, Case(3, 2, 1025, 2), Case(70, 4, 4, 9)]


REFERENCE = SimpleNamespace(
    permute=permute_rows.reference,
    unpermute=unpermute_rows.reference,
    unpermute_backward=unpermute_rows_backward.reference,
)


def where(case: Case, kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """``inverse`` and ``offsets``."""
    routing = sort_by_expert(some_indices(case, kind).to(device), case.experts)
    return routing.inverse, routing.offsets


def results(module: Any, x: Tensor, y: Tensor, p: Tensor, *of: Tensor) -> list[Tensor]:
    """Everything that the kernels, or the reference, give."""
    return [
        module.permute(x, None, *of),
        module.permute(x, p, *of),
        module.unpermute(y, None, *of),
        module.unpermute(y, p, *of),
        *module.unpermute_backward(x, y, p, *of),
    ]


def check(x: Tensor, y: Tensor, p: Tensor, *of: Tensor) -> None:
    same = assert_same_bits_or_nan if x.dtype in DTYPES else assert_same_bits
    for got, want in zip(results(kernels, x, y, p, *of), results(REFERENCE, x, y, p, *of), strict=True):
        assert got.is_contiguous() and got.device == want.device
        same(got, want)


@pytest.mark.parametrize(("case", "kind", "dtype"), diagonals(4, SHAPES, KINDS, [*DTYPES, torch.float64]), ids=str)
def test_bit_for_bit(case: Case, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    of = where(case, kind, device)
    x = torch.randn(case.tokens, case.columns).to(dtype).to(device)
    y = torch.randn(case.tokens * case.k, case.columns).to(dtype).to(device)
    check(x, y, torch.rand(case.tokens, case.k, dtype=precise(dtype)).to(device), *of)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: torch.dtype, device: torch.device) -> None:
    """Zeros of both signs, infinities, NaN, and sums beyond the largest number; in dropped rows, too."""
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max])
    case = Case(64, 2, 8, 3)
    of = where(case, "dropped", device)
    x, y, p = (special[torch.randint(8, shape)].to(device) for shape in ((64, 8), (128, 8), (64, 2)))
    check(x.to(dtype), y.to(dtype), p, *of)


@pytest.mark.parametrize("tile", [Tile(1, 4, 1), Tile(8, 64, 4)], ids=str)
def test_tiles_do_not_change_rows(tile: Tile, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Tiles that end within the matrix, in both dims."""
    columns = 99 if tile.cols > 4 else 11
    of = where(Case(13, 3, columns, 5), "dropped", device)
    x, y = torch.randn(13, columns, device=device).bfloat16(), torch.randn(39, columns, device=device).bfloat16()
    p = torch.rand(13, 3, device=device)
    monkeypatch.setattr(kernels, "rows_tile", lambda columns: tile)
    for got, want in zip(results(kernels, x, y, p, *of)[:5], results(REFERENCE, x, y, p, *of)[:5], strict=True):
        assert_same_bits(got, want)


def test_layout_and_address_of_the_input_are_no_matter(device: torch.device) -> None:
    case = Case(12, 2, 40, 3)
    of = where(case, "random", device)
    x, y, p = (torch.randn(shape, device=device) for shape in ((12, 40), (24, 40), (12, 2)))
    want = results(REFERENCE, x, y, p, *of)
    shifted = [torch.cat([each.new_zeros(1), each.flatten()])[1:].view(each.shape) for each in (x, y, p, *of)]
    turned = [each.T.contiguous().T if each.dim() == 2 else each for each in (x, y, p, *of)]
    for moved in (shifted, turned):
        for a, b in zip(results(kernels, *moved), want, strict=True):
            assert_same_bits(a, b)


def test_one_launch_each(device: torch.device) -> None:
    """None without tokens. Without columns there still are gradients of probabilities, 0."""
    case = Case(9, 2, 24, 4)
    for tokens, columns, launched in ((9, 24, [2, 2, 1]), (0, 24, [0, 0, 0]), (9, 0, [0, 0, 1])):
        of = where(case._replace(tokens=tokens), "random", device)
        x, y = torch.ones(tokens, columns, device=device), torch.ones(2 * tokens, columns, device=device)
        with count_launches() as launches:
            *_, dp = results(kernels, x, y, torch.ones(tokens, 2, device=device), *of)
        names = ("permute_kernel", "unpermute_kernel", "unpermute_backward_kernel")
        assert [launches[name] for name in names] == launched and len(launches) == sum(map(bool, launched))
        assert torch.equal(dp, torch.full((tokens, 2), float(columns), device=device))


# ---- compiled, and on a GPU ----


def check_compiled(kernel: Any, tensors: Sequence[torch.dtype], constants: tuple[Any, ...], warps: int) -> None:
    compiled = triton_interpreter.compile_for(
        kernel, *tensors, *[7] * 4, *constants, num_warps=warps, enable_fp_fusion=False
    )
    assert compiled.spills == 0
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
    assert "fma.rn.f32" not in compiled.ptx and "atom" not in compiled.ptx


@first_by_default
@pytest.mark.parametrize(("dtype", "columns"), diagonals(2, [BF16, FP32], [4096, 64]))
def test_compiled_for_sm_90(dtype: torch.dtype, columns: int) -> None:
    """Accesses are 16 bytes wide, nothing spills, is contracted or atomic."""
    tile = kernels.rows_tile(columns)
    constants = False, True, tile.rows, tile.cols
    for scaled in (True, False):
        tensors = dtype, FP32 if scaled else dtype, INT32, INT32, dtype
        for kernel in (kernels.permute_kernel, kernels.unpermute_kernel):
            check_compiled(kernel, tensors, (scaled, *constants), tile.warps)
    tensors = dtype, dtype, FP32, INT32, INT32, dtype, FP32
    levels = tile.cols.bit_length() - 1
    check_compiled(kernels.unpermute_backward_kernel, tensors, (*constants, levels), tile.warps)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "one expert", "dropped"])
def test_large_on_a_gpu(kind: str) -> None:
    """Through autograd, of a model's sizes; rows that begin past 2^31 elements included. Runs repeat to the bit."""
    for case in (Case(4096, 8, 7168, 256), Case(1000, 2, 1111, 8), Case(40_000, 8, 7168, 64)):
        indices = some_indices(case, kind).cuda()
        x = torch.randn(case.tokens, case.columns, device="cuda", dtype=BF16, requires_grad=True)
        p = torch.rand(case.tokens, case.k, device="cuda", requires_grad=True)
        runs = []
        for _ in range(2):
            routing = sort_by_expert(indices, case.experts)
            with count_launches() as launches:
                y = permute(x, routing)
                out = unpermute(y, routing, p)
                dx, dp = torch.autograd.grad(out, [x, p], x)
            assert launches == {"permute_kernel": 1, "unpermute_kernel": 2, "unpermute_backward_kernel": 1}
            runs.append([out.detach(), dx, dp])
        for first, second in zip(*runs, strict=True):
            assert_same_bits(first, second)
        of = routing.inverse[-500:], routing.offsets
        with torch.no_grad():
            assert_same_bits(
                y[of[0].long()][of[0] < of[1][-1]], x[-500:, None].expand(-1, case.k, -1)[of[0] < of[1][-1]]
            )
            assert_same_bits(out[-500:], REFERENCE.unpermute(y, p[-500:], *of))
