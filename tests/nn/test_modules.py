"""What holds of every module: of copies, files and memory that comes later, of checkpoints, no tokens, no gradients."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import autocast, quantized_model_init
from minifloat.recipe import DelayedScaling, Recipe, named
from minifloat.tensor import QuantizedTensor
from tests.helpers.sample import each_once, each_pair, each_twice

pytestmark = pytest.mark.usefixtures("one_thread")

H, TOKENS = 32, (6, 2)
LAYER = partial(minifloat.TransformerLayer, H, 48, 4, hidden_dropout=0.2, attention_dropout=0.2)
MLP = partial(minifloat.LayerNormMLP, H, 48)
MODULES: dict[str, Callable[..., nn.Module]] = {
    "Linear": partial(minifloat.Linear, H, 24),
    "split": partial(minifloat.Linear, H, 24, parameters_split={"query": 16, "key": 8}),
    "LayerNormLinear": partial(minifloat.LayerNormLinear, H, 24),
    "LayerNormMLP": partial(MLP, activation="swiglu"),
    "all results": partial(MLP, return_layernorm_output=True, return_bias=True),
    "MultiheadAttention": partial(minifloat.MultiheadAttention, H, 4, input_layernorm=True, attention_dropout=0.2),
    "TransformerLayer": partial(LAYER, qk_norm_type="LayerNorm", normalization="RMSNorm", num_gqa_groups=2),
    "decoder": partial(LAYER, layer_type="decoder"),
    "layer of experts": partial(LAYER, moe={"num_experts": 3, "top_k": 2}),
    "GroupedLinear": partial(minifloat.GroupedLinear, 3, H, 24),
    "single parameters": partial(
        minifloat.GroupedLinear, 3, H, 24, single_grouped_weight=True, single_grouped_bias=True
    ),
    "GroupedMLP": partial(minifloat.GroupedMLP, 3, H, 48),
    "MoE": partial(minifloat.MoE, H, 48, 3, 2, shared_ffn_hidden_size=16),
    "TopKRouter": partial(minifloat.TopKRouter, H, 4, 2),
    "RMSNorm": partial(minifloat.RMSNorm, H),
}
WITHOUT_RECIPE = ("TopKRouter", "RMSNorm")
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=3),
    **{name: named(name) for name in ("current", "block", "mxfp8", "nvfp4")},
}
each_module = pytest.mark.parametrize("name", MODULES)
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def make(name: str, recipe: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    own = {} if name in WITHOUT_RECIPE or recipe == "none" else {"recipe": RECIPES[recipe]}
    return MODULES[name](**own, **options)


def call(module: Any, x: Tensor, through: Callable[..., Any] | None = None) -> list[Tensor]:
    """Its floating-point results, but for biases; ``through``: what calls it."""
    run = partial(through or (lambda of, *given, **named: of(*given, **named)), module)
    if isinstance(module, minifloat.GroupedLinear | minifloat.GroupedMLP):
        rows = x.reshape(-1, H)
        y = run(rows, [len(rows) - len(rows) // 3, 0, len(rows) // 3])
    else:
        decodes = getattr(module, "inter_attention", None) is not None
        y = run(x, encoder_output=x) if decodes else run(x)
    results = y if isinstance(y, tuple) else (y,)
    return [each for each in results if each.is_floating_point() and not isinstance(each, nn.Parameter)]


def step(module: nn.Module, number: int = 0, through: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Results, gradients and buffers of a step, whose tokens and random numbers are those of its number."""
    torch.manual_seed(number)
    x = (torch.randn(*TOKENS, H) * 3**number).requires_grad_()
    module.zero_grad()
    results = call(module, x, through)
    sum((each * torch.randn_like(each)).sum() for each in results).backward()  # type: ignore[union-attr]
    found = {f"result {i}": each.detach() for i, each in enumerate(results)} | {"x": x.grad}
    found |= {name: p.grad for name, p in module.named_parameters()} | {n: b.clone() for n, b in module.named_buffers()}
    return {name: each for name, each in found.items() if each is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def values(parameter: Tensor) -> Tensor:
    return parameter.detach().dequantize() if isinstance(parameter, QuantizedTensor) else parameter.detach()


@each_pair
@pytest.mark.parametrize("quantized", [False, True], ids=["", "quantized"])
@each_recipe
@each_module
def test_copies_and_files(name: str, recipe: str, quantized: bool) -> None:
    """Copies, pickles and what loads the state go on as the module does, and by themselves."""
    quantized = quantized and name not in (*WITHOUT_RECIPE, "single parameters")
    with quantized_model_init(enabled=quantized, recipe=RECIPES[recipe] or "current"):
        module, loaded, assigned = make(name, recipe), make(name, recipe), make(name, recipe, device="meta")
    for number in range(2):
        step(module, number)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    for other, assign in ((loaded, False), (assigned, True)):
        file.seek(0)
        other.load_state_dict(torch.load(file), assign=assign)
    others = [loaded, assigned, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for other in others:
        assert_same(step(other, 2), step(copy.deepcopy(module), 2))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
    for key, value in module.state_dict().items():
        assert torch.equal(values(value), values(before[key])), key


@each_once
@each_recipe
@each_module
def test_memory_later(name: str, recipe: str) -> None:
    """Made without memory, then given some and reset part by part: what was made with memory, or numbers as large."""
    twin, module = make(name, recipe), make(name, recipe, device="meta")
    assert all(each.is_meta for each in (*module.parameters(), *module.buffers()))
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()  # type: ignore[operator]
    for found, expected in zip(module.parameters(), twin.parameters(), strict=True):
        largest = expected.abs().max()
        constant = (expected == expected.flatten()[0]).all()
        assert torch.equal(found, expected) if constant else 0.5 < found.abs().max() / largest < 2
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), twin.buffers(), strict=True))
    assert all(each.isfinite().all() for each in step(module).values())


SAVING: dict[str, dict[str, Any]] = {
    "LayerNormMLP": {"checkpoint": True},
    "all results": {"checkpoint": True},
    "TransformerLayer": {"checkpoint_mlp": True},
}


@each_twice
@each_recipe
@each_module
def test_checkpoints_are_exact(name: str, recipe: str) -> None:
    """Around the module, inside of it by its own option, and both: results, gradients, histories and random draws."""
    plain = make(name, recipe)
    ways: list[tuple[nn.Module, Any]] = [(copy.deepcopy(plain), minifloat.checkpoint)]
    if name in SAVING:
        ways += [(make(name, recipe, **SAVING[name]), through) for through in (None, minifloat.checkpoint)]
    if isinstance(plain, minifloat.TransformerLayer):
        ways += [(copy.deepcopy(plain), lambda of, *x, **more: of(*x, **more, checkpoint_core_attention=True))]
    for number in range(3):
        expected = step(plain, number) | {"next": torch.rand(3)}
        for module, through in ways:
            assert_same(step(module, number, through) | {"next": torch.rand(3)}, expected)


@each_once
@each_recipe
@each_module
def test_no_tokens(name: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of none come none, gradients of 0, and the next step is an ordinary one."""
    module = make(name, recipe)
    monkeypatch.setitem(globals(), "TOKENS", (0, 2))
    found = step(module)
    for key, parameter in module.named_parameters():
        assert parameter.grad is None or not found[key].any(), key
    monkeypatch.undo()
    assert all(each.isfinite().all() for each in step(module).values())


@each_once
@each_recipe
@each_module
def test_without_gradients(name: str, recipe: str) -> None:
    """Results are those of training, what ``dropout`` does apart, and nothing is recorded."""
    module = make(name, recipe).eval()
    step(module)
    before, x = {key: value.clone() for key, value in module.state_dict().items()}, torch.randn(*TOKENS, H)
    expected = call(copy.deepcopy(module), x)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), autocast(enabled=False):
            found = call(module, x)
        assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
