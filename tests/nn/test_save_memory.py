"""Inputs of linears that backward makes again: not a bit differs, and what is kept is smaller by their codes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from minifloat import GroupedMLP, LayerNormLinear, LayerNormMLP, TransformerLayer
from minifloat.nn.linear_state import prepare
from minifloat.ops.matmul import count_gemms
from minifloat.recipe import Recipe
from tests.helpers.fused_cases import LINEAR_CASES, LinearCase, MLPCase
from tests.helpers.fused_model import assert_same, run
from tests.helpers.recipes import FUSED_RECIPES, NAMED, for_each
from tests.helpers.sample import each_once

CASE = MLPCase(activation="swiglu")
BOTH = {"recompute_norm": True, "recompute_activation": True}


def twins(recipe: Recipe, device: str = "cpu") -> tuple[LayerNormMLP, LayerNormMLP]:
    """One that keeps all, and one of the same weights that makes what norm and activation give again."""
    plain, saving = CASE.module(recipe=recipe), CASE.module(recipe=recipe, **BOTH)
    saving.load_state_dict(plain.state_dict())
    return plain.to(device), saving.to(device)


def assert_steps(plain: nn.Module, saving: nn.Module, device: str = "cpu") -> None:
    """Output, gradients, histories and random draws of three steps."""
    for scale in (1.0, 4.0, 0.5):
        x, dy = CASE.batch(scale, device)
        found = []
        for module in (plain, saving):
            with count_gemms() as gemms:
                found.append(run(module, x, dy, None) | {"random": torch.rand(3)})
            assert sum(gemms.values()) == 6  # no product is computed again
        assert_same(found[1], found[0])
        assert_same(dict(saving.state_dict()), dict(plain.state_dict()))


@for_each(FUSED_RECIPES)
def test_mlp(recipe: Recipe) -> None:
    assert_steps(*twins(recipe))


@pytest.mark.gpu
@for_each(NAMED)
def test_mlp_on_a_gpu(recipe: Recipe) -> None:
    assert_steps(*twins(recipe, "cuda"), "cuda")


def linears(
    case: LinearCase, recipe: Recipe, device: str = "cpu", **options: Any
) -> tuple[LayerNormLinear, LayerNormLinear]:
    plain = case.module(recipe=recipe, **options)
    saving = case.module(recipe=recipe, recompute_norm=True, **options)
    saving.load_state_dict(plain.state_dict())
    return plain.to(device), saving.to(device)


def assert_linears(plain: LayerNormLinear, saving: LayerNormLinear, case: LinearCase, device: str = "cpu") -> None:
    """Three steps, with a residual stream, and with the norm's result where that is returned."""
    for scale in (1.0, 4.0, 0.5):
        x, dy = case.batch(scale, device)
        residual, ds, dn = torch.randn_like(x), torch.randn_like(x), torch.randn_like(x)
        found: list[dict[str, Tensor]] = []
        for module in (plain, saving):
            torch.manual_seed(7)  # rounding may be stochastic
            leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
            y, *beside = module(leaf, residual=other, return_residual=True)
            torch.autograd.backward([y, *beside], [dy, *[dn] * (len(beside) - 1), ds])
            grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
            module.zero_grad()
            assert leaf.grad is not None and other.grad is not None
            found.append({"y": y, "x": leaf.grad, "residual": other.grad} | grads)
        assert_same(found[1], found[0])
        assert_same(dict(saving.state_dict()), dict(plain.state_dict()))


@each_once
@pytest.mark.parametrize("options", [{}, {"return_layernorm_output": True}], ids=["alone", "norm returned"])
@pytest.mark.parametrize("name", ["2d", "3d fp32", "one row fp16", "127 rows bf16 parameters", "empty"])
@for_each(FUSED_RECIPES)
def test_linear(recipe: Recipe, name: str, options: dict[str, Any]) -> None:
    assert_linears(*linears(LINEAR_CASES[name], recipe, **options), LINEAR_CASES[name])


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"return_layernorm_output": True}], ids=["alone", "norm returned"])
@pytest.mark.parametrize("width", [48, 4096, 5000, 20000])
@for_each(NAMED)
def test_linear_on_a_gpu(recipe: Recipe, width: int, options: dict[str, Any]) -> None:
    """What forward and backward norm has one order of sums, in whichever kernel, with a residual and without."""
    case = LinearCase((130,), width, 64, norm="RMSNorm" if width == 4096 else "LayerNorm")
    assert_linears(*linears(case, recipe, "cuda", **options), case, "cuda")


def kept(module: nn.Module, x: Tensor) -> int:
    """Bytes that a forward saves for backward, each memory once, without parameters and X."""
    others = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    memory: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in others:
            memory[storage.data_ptr()] = storage.nbytes()
        return saved

    alive = []  # lest memory that was freed serves again, and counts once
    with torch.autograd.graph.saved_tensors_hooks(lambda t: alive.append(t) or note(t), lambda t: t):
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        assert y.requires_grad
    return sum(memory.values())


@for_each({name: NAMED[name] for name in ("current", "block", "mxfp8")})
def test_bytes(recipe: Recipe) -> None:
    """The codes of N and A, and the scales that blocks have, are not there."""
    plain, saving = twins(recipe)
    x, _ = CASE.batch()
    x.requires_grad_()
    rows, columns = x.numel() // x.shape[-1], plain.fc1.in_features + plain.fc2.in_features
    assert kept(plain, x) - kept(saving, x) >= rows * columns


@each_once
@pytest.mark.parametrize("trained", [["fc2"], ["fc1"], ["norm"], []])
@for_each({name: NAMED[name] for name in ("delayed", "current")})
def test_frozen(recipe: Recipe, trained: list[str]) -> None:
    """Gradients that are wanted, with nothing but the input's or one part's."""
    plain, saving = twins(recipe)
    x, dy = CASE.batch()
    results = []
    for module in (plain, saving):
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.partition(".")[0] in trained)
        leaf = x.clone().requires_grad_(not trained)
        module(leaf).backward(dy)
        results.append([leaf.grad, *[p.grad for p in module.parameters()]])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    assert any(each is not None for each in results[0])


@for_each({"delayed": NAMED["delayed"]})
def test_the_scale_is_the_forwards(recipe: Recipe) -> None:
    """Another step may have moved the scale before this one's backward; a graph may be walked twice."""
    plain, saving = twins(recipe)
    x, _ = CASE.batch()
    results = []
    for module in (plain, saving):
        leaf = x.clone().requires_grad_()
        loss = module(leaf).square().sum()
        module(8 * leaf).sum().backward()  # the update moves the scale
        again = [torch.autograd.grad(loss, [leaf, *module.parameters()], retain_graph=i == 0) for i in range(2)]
        results.append([*again[0], *again[1]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def layer(recipe: Recipe, **options: Any) -> TransformerLayer:
    return TransformerLayer(
        32, 48, 2, hidden_dropout=0.0, attention_dropout=0.0, activation="swiglu", normalization="RMSNorm",
        recipe=recipe, **options,
    )  # fmt: skip


@each_once
@pytest.mark.parametrize("post_layernorm", [False, True])
@for_each(NAMED)
def test_transformer_layer(recipe: Recipe, post_layernorm: bool) -> None:
    options = {"apply_residual_connection_post_layernorm": post_layernorm}
    plain, saving = layer(recipe, **options), layer(recipe, save_memory=True, **options)
    saving.load_state_dict(plain.state_dict())
    x = torch.randn(6, 3, 32)
    for _ in range(2):
        results = []
        for module in (plain, saving):
            torch.manual_seed(0)
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *[p.grad for p in module.parameters()]])
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
        assert_same(dict(saving.state_dict()), dict(plain.state_dict()))
    leaf = x.clone().requires_grad_()
    assert kept(plain, leaf) > kept(saving, leaf)


def compiled(recipe: Recipe, transform: Callable[..., Any]) -> None:
    _, eager = twins(recipe)
    twin = copy.deepcopy(eager)
    prepare(twin, recipe)
    for rows in (17, 5):
        x, dy = replace(CASE, lead=(rows,)).batch(1.0)
        expected, found = run(eager, x, dy, None), run(transform(twin), x, dy, None)
        assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected)
        assert_same(dict(twin.state_dict()), dict(eager.state_dict()))


def handed_on(module: nn.Module, recipe: Recipe, *inputs: Tensor) -> int:
    """Bytes that the compiled forward gives to its backward."""
    sizes: list[int] = []

    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        made = [node.meta["val"] for node in outputs if node is not None and node.op != "placeholder"]
        sizes.append(sum(value.numel() * value.element_size() for value in made if isinstance(value, Tensor)))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    prepare(module, recipe)
    torch.compile(module, fullgraph=True, backend=backend)(*inputs).sum().backward()
    return sizes[0]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "current")) for n in NAMED])
def test_compilers_keep_no_codes(name: str) -> None:
    """What backward computes again is not found to have been computed, and kept."""
    plain, saving = twins(NAMED[name])
    x = CASE.batch()[0].requires_grad_()
    codes = (x.numel() // x.shape[-1]) * (plain.fc1.in_features + plain.fc2.in_features)
    saved = handed_on(plain, NAMED[name], x) - handed_on(saving, NAMED[name], x)
    assert saved >= (codes // 2 if name == "nvfp4" else codes)


def test_compilers_keep_no_codes_of_experts() -> None:
    """The same of a GroupedMLP."""
    sizes: list[int] = []
    for recompute in (False, True):
        recipe = NAMED["current"]
        mlp = GroupedMLP(2, 32, 64, dtype=torch.bfloat16, recipe=recipe, recompute_activation=recompute)
        x = torch.randn(17, 32, dtype=torch.bfloat16, requires_grad=True)
        sizes.append(handed_on(mlp, recipe, x, torch.tensor([5, 12])))
    assert sizes[0] - sizes[1] >= 17 * 64


@pytest.mark.slow
@for_each(NAMED)
def test_compiled(recipe: Recipe) -> None:
    torch._dynamo.reset()
    compiled(recipe, lambda module: torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager"))
