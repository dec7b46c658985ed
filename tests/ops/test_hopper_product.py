"""bf16 products of sm_90 with factors and bias in their epilogue: what they compile to, and what a GPU computes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need Triton")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import MockTensor

from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.ops import matmul
from minifloat.ops.launch import KNOWN, count_launches
from minifloat.ops.matmul import hopper
from minifloat.ops.matmul.kernels import finish
from minifloat.ops.matmul.reference import Scales
from minifloat.quantizer import Quantizer
from tests.helpers.replay_on_cpu import replay_on_cpu
from tests.helpers.sample import each_once, each_twice
from tests.helpers.triton_interpreter import compile_for

MX, NV = Format("e4m3", 32, scale_rule="e8m0"), Format("e2m1", 16, scale_rule="two_level")
GEMMS = {"fprop": (ROWWISE, ROWWISE), "dgrad": (ROWWISE, COLUMNWISE), "wgrad": (COLUMNWISE, COLUMNWISE)}
SIZES = [(8, 16, 8), (136, 120, 72), (128, 384, 64), (1000, 520, 1032), (4096, 2048, 264)]
"""Rows, columns and what is contracted: less than a tile, tails, one step, more steps than stages, many tiles."""


@each_once
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("along", GEMMS.values(), ids=GEMMS)
def test_products_do_not_wait_for_each_other(along: tuple[int, int], biased: bool) -> None:
    """Of each warpgroup four wgmma a step, before the loop and in it; ptxas serializes none. Tiles come by TMA."""
    a, b = (
        TensorDescriptor(MockTensor(torch.bfloat16), [512, 512], [512, 1], box, hopper._OPERAND.value)
        for box in ([rows, 64] if dim == ROWWISE else [64, rows] for dim, rows in zip(along, (64, 256), strict=True))
    )
    contracted_last = [dim == ROWWISE for dim in along]
    compiled = compile_for(
        hopper.scaled_product_kernel, a, b, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, 7, 7, 7,
        1 / 3, True, *contracted_last, 1, 1, biased, hopper.SWEEP, hopper.STAGES, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    assert compiled.sass.count("HGMMA") == 2 * 2 * 4
    assert compiled.sass.count("WARPGROUP.ARRIVE") == 4 and compiled.sass.count("WARPGROUP.DEPBAR") == 6
    assert compiled.shared <= 227 * 1024
    assert compiled.spills <= (0 if KNOWN else 128)  # other versions of Triton do not run it


class Stand:
    """Stands for the kernel on a CPU: computes of its arguments what it would, in PyTorch."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(
            a: TensorDescriptor, b: TensorDescriptor, a_factor: Tensor, b_factor: Tensor, bias: Tensor, out: Tensor,
            m: int, n: int, depth: int, inverse: float, _aligned: bool, a_k: bool, b_k: bool, a_step: int, b_step: int,
            biased: bool, *_: int, **__: Any,
        ) -> None:  # fmt: skip
            sides = []
            for x, size, contracted_last, box in ((a, m, a_k, 64), (b, n, b_k, 256)):
                assert x.block_shape == ([box, 64] if contracted_last else [64, box])
                matrix = x.base if contracted_last else x.base.t()
                assert matrix.shape[0] == size and matrix.shape[1] >= depth
                sides.append(matrix[:, :depth].float())
            assert (
                grid[0] <= 132 and a_factor.numel() == (m if a_step else 1) and b_factor.numel() == (n if b_step else 1)
            )
            sums = (sides[0] @ sides[1].t()) * (a_factor.view(-1, 1) * b_factor.view(1, -1) * inverse)
            out.copy_(sums + bias.to(out.dtype).float() if biased else sums)

        return launch


@each_twice
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("pair", [(MX, MX), (NV, NV), (MX, NV), (NV, Format())], ids=lambda pair: pair[1].spec)
def test_what_the_kernel_is_given(gemm: str, pair: tuple[Format, Format], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands, factors, divisor and bias of each call that is not direct, in every layout; odd sizes go elsewhere."""
    if torch.cuda.is_available():
        pytest.skip("the kernel itself is tested")
    monkeypatch.setattr(hopper, "SMALLEST", 1)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "scaled_product_kernel", stand := Stand())
    monkeypatch.setattr(stand, "__name__", "scaled_product_kernel", raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    replay_on_cpu(monkeypatch)
    product = matmul.stepped("emulated", *pair, True)
    for m, n, depth in ((24, 40, 48), (24, 40, 50), (25, 40, 48)):
        made = []
        for fmt, size, along in zip(pair, (m, n), GEMMS[gemm], strict=True):
            x = torch.randn((size, depth) if along == ROWWISE else (depth, size))
            operand = Quantizer(fmt).with_usage(rowwise=along == ROWWISE, columnwise=along != ROWWISE)(x).any
            made.append(matmul._Matrix(*operand.tensors, fmt, operand.dim, along, size))  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float32):
            for bias in (None, torch.randn(n)):
                with count_launches() as launches:
                    got = product(*made, dtype, bias, False, None)
                direct = pair == (MX, MX) and dtype == torch.bfloat16 and bias is None
                assert launches["scaled_product_kernel"] == ((m, depth) == (24, 48) and not direct)
                assert torch.equal(
                    got,
                    emulated_product(*made, dtype, bias, False, None),
                )


def emulated_product(a: Any, b: Any, *rest: Any) -> Tensor:
    return matmul.stepped("emulated", a.format, b.format, False)(a, b, *rest)


def laid_out(x: Tensor, along: int) -> Tensor:
    """``x`` [outer, contracted] as a GEMM's operand lies in memory: transposed where its columns are contracted."""
    return x if along == ROWWISE else x.t().contiguous().t()


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", GEMMS)
def test_integers_are_exact(gemm: str) -> None:
    """Sums of small integers times powers of two: the bits of a product in float64, whatever the tails."""
    for m, n, depth in SIZES:
        x, y = (torch.randint(-3, 4, (size, depth), device="cuda").bfloat16() for size in (m, n))
        sides = [laid_out(*each) for each in zip((x, y), GEMMS[gemm], strict=True)]
        bias = torch.randint(-7, 8, (n,), device="cuda").float()
        # Each pair of factors and dtype, with or without a bias: all of them would be compiled for minutes.
        for rows, dtype in ((0, torch.bfloat16), (1, torch.float16), (2, torch.float32), (2, torch.bfloat16)):
            counts = (m if rows > 0 else 1, n if rows > 1 else 1)
            factors = [torch.randint(-3, 4, (count,), device="cuda").float().exp2() for count in counts]
            exact = (x.double() @ y.double().t()) * factors[0].double()[:, None] * factors[1].double()
            added, wanted = (bias, exact + bias.double()) if rows < 2 or dtype == torch.bfloat16 else (None, exact)
            got = hopper.multiply(sides, Scales(*factors, 1.0), added, dtype)
            assert torch.equal(got, wanted.to(dtype)), (m, n, depth, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", GEMMS)
def test_epilogue_is_that_of_finish(gemm: str) -> None:
    """Random factors, a divisor and a bias give the bits of ``finish`` for the same sums; NaN stays in its row."""
    m, n, depth = 264, 392, 520
    x, y = (torch.randn(size, depth, device="cuda").bfloat16() for size in (m, n))
    x[5, 7] = torch.nan
    one = torch.ones(1, device="cuda")
    for factors in ((torch.rand(m, device="cuda"), torch.rand(n, device="cuda")), (torch.rand(1, device="cuda"), one)):
        codes = [laid_out(each, along) for each, along in zip((x, y), GEMMS[gemm], strict=True)]
        sums = hopper.multiply(codes, Scales(one, one, 1.0), None, torch.float32)
        for bias in (None, torch.randn(n, device="cuda")):
            got = hopper.multiply(codes, Scales(*factors, 9.0), bias, torch.bfloat16)
            want = finish(sums, Scales(*factors, 9.0), bias, torch.bfloat16)
            assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7))
            assert got[5].isnan().all() and got.isnan().sum() == n


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [MX, NV], ids=lambda fmt: fmt.spec)
@pytest.mark.parametrize("gemm", GEMMS)
def test_large_products_take_it(gemm: str, fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TMA can read the operands and there is enough to do; again and again the same bits."""
    monkeypatch.setattr(hopper, "SMALLEST", 128 * 256 * 512)
    for m, n, depth, kernel in ((128, 256, 512, True), (128, 256, 504, False), (136, 260, 512, False)):
        made = []
        for size, along in zip((m, n), GEMMS[gemm], strict=True):
            x = torch.randn((size, depth) if along == ROWWISE else (depth, size), device="cuda")
            operand = Quantizer(fmt).with_usage(rowwise=along == ROWWISE, columnwise=along != ROWWISE)(x).any
            made.append(matmul._Matrix(*operand.tensors, fmt, operand.dim, along, size))  # type: ignore[arg-type]
        product = matmul.stepped("emulated", fmt, fmt, True)
        with count_launches() as launches:
            results = [product(*made, torch.float32, None, False, None) for _ in range(3)]
        assert launches["scaled_product_kernel"] == 3 * kernel and launches["finish_kernel"] == 3 * (not kernel)
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        want = matmul.stepped("emulated", made[0].format, made[1].format, False)(
            *made, torch.float32, None, False, None
        )
        torch.testing.assert_close(results[0], want, rtol=1e-4, atol=1e-3)
