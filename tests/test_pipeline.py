"""Casts that are replayed from a recording give what the operations give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minifloat.formats import COLUMNWISE, ROWWISE
from minifloat.operand import Quantized
from minifloat.quantizer import Quantizer, cast_all, find_amaxes
from minifloat.recipe import QuantizerRole, named

pytestmark = pytest.mark.gpu
RECIPES = ["current", "delayed", "block", "mxfp8", "nvfp4"]


def quantizers(recipe: str) -> list[Quantizer]:
    kinds = ("input", "weight", "grad_output")
    return [named(recipe).resolve(QuantizerRole("linear", kind, ""))[0] for kind in kinds]


def tensors(result: Quantized) -> list[Tensor]:
    held = [operand for operand in (result.along(ROWWISE), result.along(COLUMNWISE))]
    return [part for operand in held for part in (operand.codes, operand.scale_inv, operand.amax) if part is not None]


def by_operations(xs: list[Tensor], how: list[Quantizer], scales: list[Tensor]) -> list[Quantized]:
    """With gradients on, kernels are called through the dispatcher."""
    assert torch.is_grad_enabled()
    return cast_all(xs, how, None, scales=scales, gemm_ready=True)


@pytest.mark.parametrize("recipe", RECIPES)
def test_replays(recipe: str) -> None:
    how = quantizers(recipe)
    if recipe == "nvfp4":
        how = how[:2]  # the gradient's random bits differ from call to call
    from minifloat.kernels.launch import count_launches

    for round in range(4):
        for rows in (64, 48, 33):
            xs = [torch.randn(rows, 128, device="cuda").bfloat16() * (round + 1) for _ in how]
            scales = [torch.full((1,), 3.0 + round, device="cuda") for _ in how]
            expected = by_operations(xs, how, scales)
            with torch.no_grad(), count_launches() as launches:
                actual = cast_all(xs, how, None, scales=scales, gemm_ready=True)
            assert sum(launches.values()) >= 1
            for got, want in zip(actual, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True))
                assert [o.codes.stride() for o in got if o] == [o.codes.stride() for o in want if o]


def test_known_amaxes_and_misaligned_inputs() -> None:
    how = quantizers("current")[:2]
    wide = torch.randn(65, 128, device="cuda").bfloat16()
    for x in (wide[:64], wide.flatten()[3 : 3 + 64 * 128].view(64, 128), wide[:64].t()):
        xs = [x, torch.randn(32, 128, device="cuda").bfloat16()]
        known = [find_amaxes(xs[:1], how[:1])[0], None]
        for amaxes in (None, known):
            expected = cast_all(xs, how, amaxes, gemm_ready=True)
            for _ in range(3):
                with torch.no_grad():
                    actual = cast_all(xs, how, amaxes, gemm_ready=True)
                for got, want in zip(actual, expected, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True))


def test_empty_tensors() -> None:
    how = quantizers("current")
    xs = [torch.randn(rows, 32, device="cuda").bfloat16() for rows in (0, 4, 0)]
    for _ in range(3):
        with torch.no_grad():
            results = cast_all(xs, how, None, gemm_ready=True)
        assert [result.along(ROWWISE).codes.shape for result in results] == [(0, 32), (4, 32), (0, 32)]
