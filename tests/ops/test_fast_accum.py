"""Which products accumulate fast, seen in what PyTorch's scaled products are called with (numerics 1)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from minifloat import LayerNormLinear, LayerNormMLP, Linear, autocast, backends
from minifloat.functional.quantize import linear_config
from minifloat.ops import matmul
from minifloat.ops.matmul import native
from minifloat.quantizer import Quantizer
from minifloat.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MMParams, Recipe, named
from tests.helpers.sample import each_pair

TOKENS, WIDTH, OUT = 32, 48, 80
SPLIT, FAST = MMParams(use_split_accumulator=True), MMParams(use_split_accumulator=False)
Accumulation = dict[str, bool]
DEFAULT: Accumulation = {"fprop": True, "dgrad": False, "wgrad": False}
SLOW: Accumulation = dict.fromkeys(DEFAULT, False)
RECIPES: dict[str, tuple[Recipe, Accumulation]] = {
    "delayed": (DelayedScaling(), DEFAULT),
    "current": (Float8CurrentScaling(), DEFAULT),
    "fprop split": (Float8CurrentScaling(fp8_gemm_fprop=SPLIT), SLOW),
    "dgrad fast": (Float8CurrentScaling(fp8_gemm_dgrad=FAST), DEFAULT | {"dgrad": True}),
    "wgrad fast": (Float8CurrentScaling(fp8_gemm_wgrad=FAST), DEFAULT | {"wgrad": True}),
    "backward alone": (
        Float8CurrentScaling(fp8_gemm_fprop=SPLIT, fp8_gemm_dgrad=FAST, fp8_gemm_wgrad=FAST),
        {"fprop": False, "dgrad": True, "wgrad": True},
    ),
}


Call = tuple[tuple[int, ...], bool]
"""The shape of a product, and whether it accumulated fast."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the native products were asked for: the one that a CPU has too, and PyTorch's of blocks."""
    found: list[Call] = []
    multiply = native.per_tensor

    def per_tensor(*args: Any) -> Tensor:
        result = multiply(*args)
        found.append((tuple(result.shape), args[6]))
        return result

    def block(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        out_dtype, fast = rest[7], rest[9:]  # after scales, recipes and swizzles of both, and the bias
        found.append(((a.shape[0], b.shape[1]), bool(fast) and fast[-1]))
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(native, "per_tensor", per_tensor)
    monkeypatch.setattr(torch, "_scaled_mm_v2", block)
    return found


@pytest.mark.parametrize("fast", [False, True])
def test_a_gpu_is_told(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is on a GPU, PyTorch's scaled product is called, with the choice that was made."""
    said: list[bool] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, use_fast_accum, **kwargs: said.append(use_fast_accum))
    one, codes = torch.ones(1), mock.Mock(is_cuda=True)
    native.per_tensor(codes, one, codes, one, torch.bfloat16, None, fast)
    assert said == [fast]


def calls_of(fast: Accumulation, inside: int, outside: int) -> tuple[Call, Call, Call]:
    """fprop, dgrad and wgrad of a linear of ``inside`` to ``outside`` features."""
    return (
        ((TOKENS, outside), fast["fprop"]),
        ((TOKENS, inside), fast["dgrad"]),
        ((outside, inside), fast["wgrad"]),
    )


def step(layer: nn.Module, recipe: Recipe, dtype: torch.dtype) -> None:
    with autocast(recipe=recipe):
        y = layer(torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True))
    y.backward(torch.randn(y.shape, dtype=dtype))


@each_pair
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_linear(name: str, bias: bool, dtype: torch.dtype, seen: list[Call]) -> None:
    """Each product as its recipe says, also where the bias is added after the product."""
    recipe, fast = RECIPES[name]
    step(Linear(WIDTH, OUT, bias=bias, params_dtype=dtype), recipe, dtype)
    assert seen == [*calls_of(fast, WIDTH, OUT)]


@pytest.mark.parametrize("name", RECIPES)
def test_layernorm_linear(name: str, seen: list[Call]) -> None:
    recipe, fast = RECIPES[name]
    step(LayerNormLinear(WIDTH, OUT), recipe, torch.float32)
    assert seen == [*calls_of(fast, WIDTH, OUT)]


@pytest.mark.parametrize("name", RECIPES)
def test_layernorm_mlp(name: str, seen: list[Call]) -> None:
    recipe, fast = RECIPES[name]
    step(LayerNormMLP(WIDTH, OUT), recipe, torch.float32)
    fprop_1, *backward_1 = calls_of(fast, WIDTH, OUT)
    assert seen == [fprop_1, *calls_of(fast, OUT, WIDTH), *backward_1]


def test_block_scaling(seen: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt's block scaling sums in fp32: never fast."""
    monkeypatch.setattr(backends, "backend", lambda a, b, device: "native")
    monkeypatch.setattr(matmul, "product", matmul.product.__wrapped__)  # none that was prepared before
    step(Linear(WIDTH, OUT, params_dtype=torch.bfloat16), named("block"), torch.bfloat16)
    assert [fast for _, fast in seen] == [False] * 3


OTHERS: dict[str, tuple[Recipe, Accumulation]] = {
    "block": (named("block"), SLOW),
    "mxfp8": (named("mxfp8"), DEFAULT),
    "nvfp4": (named("nvfp4"), DEFAULT),
    "custom": (CustomRecipe(lambda role: Quantizer.identity()), DEFAULT),
}


@pytest.mark.parametrize("name", [*RECIPES, *OTHERS])
def test_plan(name: str) -> None:
    """Of the recipes that no library multiplies on a CPU as well."""
    recipe, expected = (RECIPES | OTHERS)[name]
    plan = linear_config(recipe)
    assert {gemm: getattr(plan, f"fast_{gemm}") for gemm in DEFAULT} == expected
