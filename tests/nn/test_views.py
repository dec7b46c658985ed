"""No module's result is a view: an in-place operation on a view drops its hooks, such as those of FSDP2's backward."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import minifloat
from minifloat.nn.moe import LayerNormMoE, SharedGate
from tests.helpers.sample import each_once

H = 64
TOKENS = torch.arange(15).view(3, 5)
SPLITS = [7, 8]
STREAM: dict[str, Any] = {"return_layernorm_output": True, "return_bias": True}


def _residual(module: nn.Module, x: Tensor) -> Any:
    return module(x, residual=2 * x, return_residual=True)


def _weighted(module: nn.Module, x: Tensor) -> Any:
    return module(x, SPLITS, probabilities=torch.rand(15, requires_grad=True))


def _routed(module: nn.Module, x: Tensor) -> Any:
    routing = minifloat.functional.sort_by_expert(torch.arange(30).view(15, 2) % 2, 2)
    return module(x.reshape(15, H), routing, None, torch.rand(15, 2, requires_grad=True))


Case = Callable[[Any, Tensor], Any]  # of a recipe and X
CASES: dict[type[nn.Module], list[Case]] = {
    minifloat.Linear: [
        lambda recipe, x: minifloat.Linear(H, H, recipe=recipe)(x),
        lambda recipe, x: minifloat.Linear(H, H, bias=False, recipe=recipe)(x),
        lambda recipe, x: minifloat.Linear(H, H, recipe=recipe, parameters_split=["a", "b"], return_bias=True)(x),
        lambda recipe, x: minifloat.Linear(H, H, recipe=recipe, save_original_input=True)(x),
    ],
    minifloat.LayerNormLinear: [
        lambda recipe, x: minifloat.LayerNormLinear(H, H, recipe=recipe)(x),
        lambda recipe, x: _residual(minifloat.LayerNormLinear(H, H, recipe=recipe, **STREAM), x),
    ],
    SharedGate: [lambda recipe, x: SharedGate(H, None)(x)],
    minifloat.LayerNormMLP: [
        lambda recipe, x: minifloat.LayerNormMLP(H, H, recipe=recipe)(x),
        lambda recipe, x: minifloat.LayerNormMLP(H, H, recipe=recipe, checkpoint=True)(x),
        lambda recipe, x: _residual(minifloat.LayerNormMLP(H, H, recipe=recipe, **STREAM), x),
    ],
    minifloat.MultiheadAttention: [
        lambda recipe, x: minifloat.MultiheadAttention(H, 4, recipe=recipe)(x),
        lambda recipe, x: _residual(
            minifloat.MultiheadAttention(H, 4, input_layernorm=True, recipe=recipe, **STREAM), x
        ),
    ],
    minifloat.TransformerLayer: [
        lambda recipe, x: minifloat.TransformerLayer(H, H, 4, recipe=recipe)(x),
        lambda recipe, x: minifloat.TransformerLayer(H, H, 4, recipe=recipe, hidden_dropout=0.0)(x),
        lambda recipe, x: minifloat.TransformerLayer(H, H, 4, recipe=recipe, moe={"num_experts": 2})(x),
    ],
    minifloat.GroupedLinear: [
        lambda recipe, x: minifloat.GroupedLinear(2, H, H, recipe=recipe)(x, SPLITS),
        lambda recipe, x: minifloat.GroupedLinear(2, H, H, recipe=recipe, return_bias=True)(x, SPLITS),
        lambda recipe, x: minifloat.GroupedLinear(2, H, H, recipe=recipe, single_grouped_weight=True)(x, SPLITS),
    ],
    minifloat.GroupedMLP: [
        lambda recipe, x, call=call, bias=bias: call(minifloat.GroupedMLP(2, H, H, bias=bias, recipe=recipe), x)
        for call in (lambda module, x: module(x, SPLITS), _weighted, _routed)
        for bias in (False, True)
    ],
    minifloat.MoE: [
        lambda recipe, x: minifloat.MoE(H, H, 2, recipe=recipe)(x),
        lambda recipe, x: minifloat.MoE(H, H, 2, recipe=recipe, bias=True)(x),
        lambda recipe, x: minifloat.MoE(H, H, 2, recipe=recipe, shared_ffn_hidden_size=H)(x),
        lambda recipe, x: _with_a_hook(minifloat.MoE(H, H, 2, recipe=recipe))(x),
    ],
    LayerNormMoE: [
        lambda recipe, x: LayerNormMoE(H, H, 2, recipe=recipe, return_layernorm_output=True)(x),
        lambda recipe, x: LayerNormMoE(H, H, 2, recipe=recipe, checkpoint=True)(x),
    ],
    minifloat.TopKRouter: [lambda recipe, x, k=k: minifloat.TopKRouter(H, 3, k)(x) for k in (2, 3)],
    minifloat.LayerNorm: [lambda recipe, x, i=i: minifloat.LayerNorm(x.shape[i:])(x) for i in (-1, -2)],
    minifloat.RMSNorm: [lambda recipe, x, i=i: minifloat.RMSNorm(x.shape[i:])(x) for i in (-1, -2)],
    minifloat.VocabParallelEmbedding: [lambda recipe, x: minifloat.VocabParallelEmbedding(15, H)(TOKENS)],
    minifloat.EtpEmbedding: [lambda recipe, x: minifloat.EtpEmbedding(15, H)(TOKENS)],
    minifloat.RotaryPositionEmbedding: [
        lambda recipe, x, twice=twice: minifloat.RotaryPositionEmbedding(H, interleaved=twice)(5)
        for twice in (False, True)
    ],
    minifloat.DotProductAttention: [],  # a view, if the kernel wants it so: its backward reads it, and PyTorch watches
}


def _with_a_hook(module: minifloat.MoE) -> minifloat.MoE:
    module.experts.register_forward_hook(lambda module, args, y: None)
    return module


def _modules() -> set[type[nn.Module]]:
    """All classes of ``minifloat.nn`` that are called."""
    files = [
        importlib.import_module(f"minifloat.nn.{each.name}") for each in pkgutil.iter_modules(minifloat.nn.__path__)
    ]
    kinds = {kind for file in files for kind in vars(file).values() if inspect.isclass(kind)}
    own = {kind for kind in kinds if issubclass(kind, nn.Module) and kind.__module__.startswith("minifloat.nn.")}
    return {
        kind for kind in own if kind.forward not in (nn.Module.forward, nn.Linear.forward) and kind.__name__[0] != "_"
    }


@each_once
@pytest.mark.parametrize("recipe", [None, "current", "delayed", "mxfp8"])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_outputs_are_no_views(kind: type[nn.Module], recipe: str | None) -> None:
    for number, case in enumerate(CASES[kind]):
        attends = kind in (minifloat.MultiheadAttention, minifloat.TransformerLayer)
        for shape in ((3, 5, H), (15, H))[: 1 if attends else 2]:
            outputs = tree_leaves(case(recipe, torch.randn(shape, requires_grad=True) * 1))
            assert not [each for each in outputs if isinstance(each, Tensor) and each._is_view()], (number, shape)


def test_all_modules_are_there() -> None:
    assert set(CASES) == _modules()
