"""Products of groups in memory that is given, and gradients of experts' activations in blocks, by kernels too."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from minifloat.formats import ROWWISE, parse
from minifloat.functional import dgrad, experts, fprop, wgrad
from minifloat.functional import gemm as gemms
from minifloat.functional.gemm import multiply_groups
from minifloat.functional.grouped import GroupLayout, quantize_groups
from minifloat.functional.norm_activation import Activation
from minifloat.functional.quantize import RoleCasts
from minifloat.ops import matmul
from minifloat.ops.activation import kernels as activation_kernels
from minifloat.ops.grouped import products
from minifloat.quantizer import Quantizer
from tests.helpers import triton_interpreter  # noqa: F401
from tests.helpers.compare import assert_same_bits
from tests.helpers.sample import each_once

FP32 = torch.float32
COUNTS, N, K = (5, 0, 18), 20, 36
IMPLEMENTATIONS = pytest.mark.parametrize("kernels", [False, True], ids=["reference", "kernels"])


def offsets_of(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


def memories(like: Tensor) -> dict[str, Tensor]:
    """Of small integers, in the shape of ``like``: what a product may be written to, or added to."""
    values = torch.randint(-9, 9, like.shape, device=like.device).float()
    apart = torch.zeros(like.numel() + 1, device=like.device)
    return {
        "of the product's dtype": values,
        "of another dtype": values.bfloat16(),
        "with strides": values.transpose(0, -1).contiguous().transpose(0, -1),
        "at any address": apart[1:].view(like.shape).copy_(values),
    }


def in_place_of(x: Tensor, shift: int) -> Tensor:
    """A copy of ``x``, with its strides, ``shift`` bytes after a multiple of 256."""
    memory = torch.empty(x.untyped_storage().nbytes() + 512, dtype=torch.uint8, device=x.device)
    first = -memory.data_ptr() % 256 + shift
    return memory[first : first + x.nbytes].view(x.dtype).as_strided(x.shape, x.stride()).copy_(x)


@IMPLEMENTATIONS
@pytest.mark.parametrize("spec", ["identity", "e4m3/tensor/fp32", "e4m3/1x128/pow2"])
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_where_products_go(
    gemm: str, spec: str, kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very memory has what it had plus the product, or the product alone; 0 is added of groups without rows."""
    if kernels:
        monkeypatch.setattr(gemms.grouped, "grouped_mm", products.multiply)
        monkeypatch.setattr(gemms.grouped, "grouped_mm_into", products.multiply_into)
    layout, weights = GroupLayout(offsets_of(COUNTS, device), 25), GroupLayout.uniform(3, N, device)
    x, dy, w = (torch.randint(-3, 4, shape, device=device).bfloat16() for shape in ((25, K), (25, N), (3 * N, K)))
    pair = {
        "fprop": ((x, layout), (w, weights)),
        "dgrad": ((dy, layout), (w, weights)),
        "wgrad": ((dy, layout), (x, layout)),
    }
    quantizer = Quantizer(parse(spec))
    a, b = (
        quantize_groups(x, own.offsets, quantizer, gemm_ready=True).along(dim)
        for (x, own), dim in zip(pair[gemm], matmul.CONTRACTED[gemm], strict=True)
    )
    bias = torch.randint(-1000, 1000, (3, N), device=device) / 128 if gemm == "fprop" else None  # no bf16
    arguments: Any = gemm, a, b, torch.float32, bias
    product = multiply_groups(*arguments)
    assert product.shape == {"fprop": (25, N), "dgrad": (25, K), "wgrad": (3, N, K)}[gemm]
    for kind, out in memories(product).items():
        for accumulate in (False, True):
            held = in_place_of(out, 4 if kind == "at any address" else 0)
            wanted = held.clone().add_(product) if accumulate else held.clone().copy_(product)
            found = multiply_groups(*arguments, out=held, accumulate=accumulate)
            assert found is held, kind
            assert_same_bits(held, wanted)


def test_functions_of_groups(device: torch.device) -> None:
    """Each group's product is that of its rows alone; a matrix that is none has no groups to be multiplied with."""
    quantizer, offsets = Quantizer(parse("e4m3/1x128/pow2")), offsets_of(COUNTS, device)
    x, dy, w = (torch.randn(shape, device=device).bfloat16() for shape in ((25, K), (25, N), (3 * N, K)))
    of_w = offsets_of((N,) * 3, device)
    a, b, c = (quantize_groups(each, own, quantizer) for each, own in ((x, offsets), (dy, offsets), (w, of_w)))
    y, dx, dw = (each(*pair, out_dtype=FP32) for each, pair in ((fprop, (a, c)), (dgrad, (b, c)), (wgrad, (b, a))))
    for group, (begin, end) in enumerate(pairwise(offsets.tolist())):
        rows = slice(begin, end)
        own_x, own_dy, own_w = map(quantizer, (x[rows], dy[rows], w[group * N : group * N + N]))
        torch.testing.assert_close(y[rows], fprop(own_x, own_w, out_dtype=FP32))
        torch.testing.assert_close(dx[rows], dgrad(own_dy, own_w, out_dtype=FP32))
        torch.testing.assert_close(dw[group], wgrad(own_dy, own_x, out_dtype=FP32))
    assert_same_bits(a.dequantize()[:23], torch.cat([quantizer(part).dequantize() for part in x[:23].split(COUNTS)]))
    for pair in ((a, quantizer(w)), (quantizer(x), c)):
        with pytest.raises(ValueError, match="quantize both by quantize_groups"):
            fprop(*pair, out_dtype=FP32)
    with pytest.raises(ValueError, match="grouped fprop contracts 36 elements with 36, of 3 and 2 groups"):
        fprop(a, quantize_groups(w, of_w[:3], quantizer), out_dtype=FP32)
    with pytest.raises(ValueError, match=r"out is torch.float32 \(25, 36\)"):
        fprop(a, c, out_dtype=FP32, out=torch.empty_like(x, dtype=FP32))


@each_once
@IMPLEMENTATIONS
@pytest.mark.parametrize("activation", [Activation.of("swiglu"), Activation.of("srelu")], ids=["swiglu", "srelu"])
@pytest.mark.parametrize("spec", ["e4m3/1x32/e8m0", "e4m3/1x128/pow2", "e5m2/128x128/fp32"])
def test_gradient_blocks_of_an_activation(
    spec: str, activation: Activation, kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a cast of the gradient, where blocks straddle the halves of a gated activation's input, too."""
    if kernels:
        monkeypatch.setattr(experts, "grouped_activation_backward", activation_kernels.backward_groups)
    cast, block = RoleCasts([Quantizer(parse(spec))], ["grad_output"], ""), parse(spec).block
    assert experts.casts_in_kernel(cast)
    offsets, rows = offsets_of(COUNTS, device), sum(COUNTS)
    for columns in (block, block // 2, 3 * block // 2):
        h = torch.randn(rows, columns * (2 if activation.gated else 1), device=device).bfloat16()
        da, p = torch.randn(rows, columns, device=device).bfloat16(), torch.rand(rows, device=device)
        arguments: Any = cast, activation, da, h, p, offsets, None
        operands, dp, none = experts.dact_operands(*arguments, False)
        again, same, value = experts.dact_operands(*arguments, True)
        assert none is None and value is not None
        torch.testing.assert_close(dp, same)
        for found, other, wanted in zip(operands, again, cast.of_groups(value, offsets, None), strict=True):
            for each in (found, other):
                assert_same_bits(each.dequantize(torch.float32), wanted.dequantize(torch.float32))


def test_weights_of_no_rows_have_offsets() -> None:
    assert GroupLayout.uniform(3, 0, torch.device("cpu")).offsets.tolist() == [0] * 4


def test_groups_draw_random_bits_of_their_own(device: torch.device) -> None:
    x = torch.randn(16, 64, device=device).repeat(2, 1)
    made = quantize_groups(x, offsets_of((16, 16), device), Quantizer(parse("e2m1/1x16/two_level/stochastic")))
    first, second = made.along(ROWWISE).codes.view(torch.uint8).chunk(2)
    assert not torch.equal(first, second)
