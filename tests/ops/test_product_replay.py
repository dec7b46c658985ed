"""Products replayed from a recording give what PyTorch alone gives: compiled on a GPU, interpreted on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat import backends
from minifloat.formats import COLUMNWISE, ROWWISE, Format
from minifloat.operand import Operand
from minifloat.ops import matmul, tape
from minifloat.ops.launch import count_launches
from minifloat.ops.matmul import _Matrix, emulated, native
from minifloat.ops.matmul.native import cut
from minifloat.quantizer import Quantizer
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.compare import assert_same_bits
from tests.helpers.replay_on_cpu import multiply_strided, nothing_else, replay_on_cpu
from tests.helpers.selection import diagonals

STRIP, TILE = Format(block=128, scale_rule="pow2"), Format(block=128, tile=True, scale_rule="pow2")
MX, MX_TILE, MX4 = (
    Format(e, 32, tile=t, scale_rule="e8m0") for e, t in (("e4m3", False), ("e4m3", True), ("e2m1", False))
)
NV, NV_TILE = (Format("e2m1", 16, tile=tile, scale_rule="two_level") for tile in (False, True))
NV_ROWS = Format("e2m1", 16, scale_rule="two_level", amax_per_row=True)
E4 = Format("e4m3")
PAIRS = {
    "MXFP8": (MX, MX), "MXFP8 tiles": (MX, MX_TILE), "MXFP4": (MX4, MX4), "NVFP4": (NV, NV_TILE),
    "NVFP4 by rows": (NV_ROWS, NV), "FP8 by MXFP8": (E4, MX), "block": (STRIP, TILE), "blocks": (STRIP, STRIP),
    "tiles on the left": (TILE, STRIP),
}  # fmt: skip
GEMMS = {"fprop": (ROWWISE, ROWWISE), "dgrad": (ROWWISE, COLUMNWISE), "wgrad": (COLUMNWISE, COLUMNWISE)}
SIZES = {"whole": (32, 48, 256), "ragged": (17, 19, 150), "small": (16, 16, 16)}
OUTPUTS = [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False), (torch.float16, True)]
"""dtype, and whether there is a bias."""


@pytest.fixture(autouse=True)
def _kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU take the way of a GPU."""
    if device.type == "cuda":
        return
    if torch.cuda.is_available():
        pytest.skip("the compiled kernels are tested here, not the interpreted ones")
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(native, "has_kernels", lambda x: True)
    monkeypatch.setattr(native, "block128", multiply_strided)


def matrices(gemm: str, pair: tuple[Format, Format], size: tuple[int, int, int], device: torch.device) -> list[_Matrix]:
    """Operands of a product of ``size`` (m, n, depth), as a GPU lays them out."""
    made = []
    for fmt, outer, along in zip(pair, size[:2], GEMMS[gemm], strict=True):
        shape = (outer, size[2]) if along == ROWWISE else (size[2], outer)
        x = (torch.randn(shape) * torch.exp(torch.randn(shape))).to(device)
        operand: Operand = Quantizer(fmt).with_usage(rowwise=along == ROWWISE, columnwise=along != ROWWISE)(x).any
        assert operand.scale_inv is not None
        made.append(_Matrix(operand.codes, operand.scale_inv, operand.amax, fmt, operand.dim, along, outer))
    return made


def backend_of(pair: tuple[Format, Format]) -> str:
    return "native" if pair[0].block == 128 else "emulated"


def expected(pair: tuple[Format, Format], a: _Matrix, b: _Matrix, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The same product with nothing but PyTorch before and after it."""
    if backend_of(pair) == "emulated":
        return matmul.stepped("emulated", a.format, b.format, False)(a, b, dtype, bias, False, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "has_kernels", lambda x: False)
        return matmul.stepped("native", *pair, False)(a, b, dtype, bias, False, None)


def runs_here(pair: tuple[Format, Format], device: torch.device) -> bool:
    return device.type == "cpu" or backends.backend(*pair, device) == backend_of(pair)


@pytest.mark.parametrize(("name", "gemm", "size"), diagonals(3, PAIRS, GEMMS, SIZES))
def test_replays(name: str, gemm: str, size: str, device: torch.device) -> None:
    """Each call gives what PyTorch alone gives for its operands; of whole blocks the second one is a replay."""
    pair = PAIRS[name]
    if not runs_here(pair, device):
        pytest.skip("another backend multiplies these here")
    torch.manual_seed(0)
    product = matmul.stepped(backend_of(pair), *pair, True)
    for dtype, biased in OUTPUTS:
        bias = torch.randn(SIZES[size][1], device=device).to(dtype) if biased else None
        counts = []
        for call in range(2):
            a, b = matrices(gemm, pair, SIZES[size], device)
            want = expected(pair, a, b, dtype, bias)
            with pytest.MonkeyPatch.context() as patch, count_launches() as launches:
                if call and size != "ragged" and name != "tiles on the left":
                    nothing_else(patch)
                got = product(a, b, dtype, bias, False, None)
            assert_same_bits(got, want)
            assert got.is_contiguous()
            counts.append(launches)
        assert counts[0] == counts[1]


def test_where_the_result_goes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can add its product gets the memory for it, at each call, if that product is the result; it need not add."""
    seen: list[tuple[object, ...]] = []
    adds = True

    def multiply(a_tile: bool, b_tile: bool, operands: Any, dtype: torch.dtype) -> Tensor:
        into = tuple(operands[4:])
        seen.append(into)
        return into[0] if into and adds else torch.zeros(32, 48, device=device)

    monkeypatch.setattr(native, "block128", multiply)
    product = matmul.stepped("native", STRIP, STRIP, True)
    out = torch.zeros(32, 48, device=device)
    a, b = matrices("wgrad", (STRIP, STRIP), SIZES["whole"], device)
    for _ in range(2):
        assert product(a, b, torch.float32, None, False, out, True) is out
        assert product(a, b, torch.float32, torch.ones(48, device=device), False, out, True) is not out
    assert seen == [(out,), (), (out,)]  # the last one replays what it gave
    adds = False
    assert product(a, b, torch.float32, None, False, out, True) is not out


def test_what_a_bf16_product_launches(device: torch.device) -> None:
    """Scales of powers of two: a pass over each operand and the library's product, no fp32 result in between."""
    for pair, bias, wanted in (
        ((MX, MX), None, {"decode_kernel": 2}),
        ((MX, MX4), None, {"decode_kernel": 2}),
        ((MX, MX), torch.ones(32, device=device), {"largest_scale_kernel": 2, "decode_kernel": 2, "finish_kernel": 1}),
        ((NV, NV), None, {"decode_kernel": 2, "finish_kernel": 1}),
    ):
        a, b = matrices("fprop", pair, (32, 32, 64), device)
        product = matmul.stepped("emulated", *pair, True)
        for _ in range(2):
            with count_launches() as launches:
                product(a, b, torch.bfloat16, bias, False, None)
            assert launches == wanted


def test_operands_that_kernels_read_copies_of(device: torch.device) -> None:
    """At odd addresses, or not consecutive at all, each call goes step by step."""
    product = matmul.stepped("emulated", MX, MX, True)
    for _ in range(2):
        a, b = matrices("fprop", (MX, MX), SIZES["whole"], device)
        want = matmul.stepped("emulated", a.format, b.format, False)(a, b, torch.float32, None, False, None)
        moved = torch.empty(a.codes.numel() + 1, dtype=torch.uint8, device=device)[1:].view(a.codes.shape)
        apart = torch.empty(*b.codes.shape, 3, dtype=torch.uint8, device=device)[..., 1]
        left, right = a._replace(codes=moved.copy_(a.codes)), b._replace(codes=apart.copy_(b.codes))
        for x, y in ((left, b), (a, right), (a, b)):
            assert_same_bits(product(x, y, torch.float32, None, False, None), want)


def test_one_tensor_as_both_operands(device: torch.device) -> None:
    """Which tensors of a call are the same must not be recorded."""
    product = matmul.stepped("emulated", MX, MX, True)
    a, b = matrices("fprop", (MX, MX), (32, 32, 64), device)
    for x, y in ((a, a), (a, b), (b, b), (a, b), (b, a)):
        want = matmul.stepped("emulated", MX, MX, False)(x, y, torch.bfloat16, None, False, None)
        assert_same_bits(product(x, y, torch.bfloat16, None, False, None), want)


def test_recordings_are_bounded(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_TAPES", 3)
    product = matmul.stepped("emulated", MX, MX, True)
    for rows in range(1, 9):
        a, b = matrices("fprop", (MX, MX), (rows, 16, 32), device)
        want = emulated.multiply([x.codes for x in (emulated.spread(*a), emulated.spread(*b))])
        got = product(a, b, torch.float32, None, False, None)
        assert product.recorder is not None
        assert got.shape == want.shape and product.recorder is not None and len(product.recorder.known) <= 3


def test_cut_is_contiguous() -> None:
    whole = torch.arange(12.0).view(3, 4)
    assert cut(whole, 3, 4) is whole
    assert torch.equal(cut(whole, 2, 3), whole[:2, :3]) and cut(whole, 2, 3).is_contiguous()
    assert cut(whole.t(), 4, 3).is_contiguous()
