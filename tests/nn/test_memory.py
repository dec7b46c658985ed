"""What stays in memory between forward and backward: live storages, counted.

In a stack of four layers no recipe keeps more than bf16 does, parameters excluded, where there are at least as many
rows as a layer is wide. The codes of weights are kept too, whatever the number of rows: with few of them a quantized
layer keeps more, by the formulas of :func:`kept_by_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.nn.linear import Linear
from minifloat.nn.multihead_attention import MultiheadAttention
from minifloat.nn.transformer_layer import TransformerLayer
from minifloat.recipe import Recipe
from tests.helpers.memory import operand_bytes, saved_sizes
from tests.helpers.recipes import NAMED
from tests.helpers.sample import each_once, each_pair, each_twice

pytestmark = pytest.mark.usefixtures("one_thread")

BF16 = torch.bfloat16
LAYERS, ROWS, WIDTH = 4, 512, 128
RECIPES = NAMED | {
    f"{name} {override}": replace(NAMED[name], backward_override=override)  # type: ignore[type-var]
    for name, override in (("current", "dequantized"), ("mxfp8", "dequantized"), ("mxfp8", "high_precision"))
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Linear(WIDTH, WIDTH, params_dtype=BF16),
    "LayerNormLinear": lambda: LayerNormLinear(WIDTH, WIDTH, params_dtype=BF16),
    "LayerNormMLP": lambda: LayerNormMLP(WIDTH, 4 * WIDTH, params_dtype=BF16),
    "LayerNormMLP gated": lambda: LayerNormMLP(
        WIDTH, 2 * WIDTH, activation="swiglu", normalization="RMSNorm", params_dtype=BF16
    ),
    "LayerNormMLP checkpoint": lambda: LayerNormMLP(WIDTH, 2 * WIDTH, checkpoint=True, params_dtype=BF16),
    "MultiheadAttention": lambda: MultiheadAttention(WIDTH, 4, params_dtype=BF16),
    "MultiheadAttention norm": lambda: MultiheadAttention(WIDTH, 4, input_layernorm=True, params_dtype=BF16),
    "TransformerLayer": lambda: TransformerLayer(WIDTH, 4 * WIDTH, 4, params_dtype=BF16),
}


def leaf(module: str, rows: int = ROWS) -> Tensor:
    """Tokens; attention takes them as sequences of 128."""
    shape = (rows // 128, 128, WIDTH) if "Attention" in module or "Transformer" in module else (rows, WIDTH)
    return torch.randn(shape, dtype=BF16, requires_grad=True)


_bf16: dict[str, int] = {}


@each_twice
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("module", MODULES)
def test_never_more_than_bf16(module: str, recipe: Recipe) -> None:
    """Bytes of a stack of four under a recipe, and of the same stack under none.

    But for what no formula avoids: a checkpointed region under delayed scaling notes the three scales of each linear.
    """
    x = leaf(module)
    model = nn.Sequential(*(MODULES[module]() for _ in range(LAYERS)))
    if module not in _bf16:
        _bf16[module] = sum(saved_sizes(model, x, None, backward=False))
    scales = 12 * 2 * LAYERS if "checkpoint" in module and recipe is RECIPES["delayed"] else 0
    assert sum(saved_sizes(model, x, recipe, backward=False)) <= _bf16[module] + scales


# ---- formulas ----


def kept_by_linear(name: str, M: int, K: int, N: int) -> list[int]:
    """Bytes of a linear's operands, X [M, K] and W [N, K]; NVFP4 stores whole groups of 16 rotated rows."""
    M = M + -M % 16 if name == "nvfp4" else M
    return [size for sizes in operand_bytes(name, M, K, N) for size in sizes]


def kept_by_norm(M: int, K: int) -> list[int]:
    """X in bf16, mean and inverse deviation of each row in fp32."""
    return [2 * M * K, 4 * M, 4 * M]


FORMULAS = [name for name in RECIPES if " " not in name]


@each_twice
@pytest.mark.parametrize("M", [1, 48, 160])
@pytest.mark.parametrize("name", FORMULAS)
def test_layernorm_linear_keeps(name: str, M: int) -> None:
    """X and the operands, and no high-precision result of the norm."""
    module = LayerNormLinear(64, 96, params_dtype=BF16)
    x = torch.randn(M, 64, dtype=BF16, requires_grad=True)
    assert saved_sizes(module, x, RECIPES[name]) == sorted(kept_by_norm(M, 64) + kept_by_linear(name, M, 64, 96))


@each_pair
@pytest.mark.parametrize("M", [1, 48, 160])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("name", FORMULAS)
def test_layernorm_mlp_keeps(name: str, gated: bool, M: int) -> None:
    """X, the input of the activation, and the operands of both linears."""
    K, F = 64, 96
    module = LayerNormMLP(K, F, activation="swiglu" if gated else "gelu", params_dtype=BF16)
    x = torch.randn(M, K, dtype=BF16, requires_grad=True)
    H = (1 + gated) * F
    operands = kept_by_linear(name, M, K, H) + kept_by_linear(name, M, F, K)
    assert saved_sizes(module, x, RECIPES[name]) == sorted([*kept_by_norm(M, K), 2 * M * H, *operands])


@pytest.mark.parametrize("name", FORMULAS)
def test_checkpoint_keeps_the_input_alone(name: str) -> None:
    """X, and a copy of each linear's forward scales under delayed scaling; no operand."""
    module = LayerNormMLP(64, 96, checkpoint=True, params_dtype=BF16)
    x = torch.randn(160, 64, dtype=BF16, requires_grad=True)
    sizes = saved_sizes(module, x, RECIPES[name])
    assert max(sizes) == 2 * 160 * 64 and sum(sizes) <= 2 * 160 * 64 + 128


@each_once
@pytest.mark.parametrize("frozen", ["norm and x", "weights"])
@pytest.mark.parametrize("name", FORMULAS)
def test_frozen_parts_keep_less(name: str, frozen: str) -> None:
    """Operands and inputs that only a frozen part's gradient would read are not kept."""
    module = LayerNormLinear(64, 96, params_dtype=BF16)
    x = torch.randn(160, 64, dtype=BF16, requires_grad=frozen != "norm and x")
    (module.norm if frozen == "norm and x" else module.linear).requires_grad_(False)
    of_x, of_w = operand_bytes(name, 160, 64, 96)
    expected: Any = of_x if frozen == "norm and x" else kept_by_norm(160, 64) + of_w
    assert saved_sizes(module, x, RECIPES[name]) == sorted(expected)
