"""Numbers of ``LayerNormLinear`` and ``LayerNormMLP``; options of the first.

Numbers are held to a model by hand (``helpers.fused_model``), bit for bit and in float64, and to the modules that it is
made of, run one after the other.
"""

from __future__ import annotations

import copy
from itertools import chain, product
from typing import Any

import pytest
import torch
from torch import nn

from minifloat.autocast import autocast
from minifloat.recipe import DelayedScaling, Recipe, named
from tests.helpers.fused_cases import (
    BOTH_CASES,
    LinearCase,
    MLPCase,
    assert_as_parts,
    assert_special_rows,
    assert_steps,
    unfused,
)
from tests.helpers.fused_model import assert_same, run
from tests.helpers.recipes import FUSED_RECIPES, NAMED, STATELESS_FUSED, for_each
from tests.helpers.sample import each_once, each_twice

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BATCHES = pytest.mark.parametrize("cases", BOTH_CASES.values(), ids=BOTH_CASES.keys())


# ---- Numbers --------------------------------------------------------------------------------------------------------


@each_twice
@for_each(FUSED_RECIPES)
@BATCHES
def test_step(cases: tuple[Any, ...], recipe: Recipe) -> None:
    """Output, gradients and delayed scaling's state: the bits of the model by hand, within float64's bounds."""
    for case in cases:
        assert_steps(case, recipe)


@for_each(NAMED)
def test_returned_norm(recipe: Recipe) -> None:
    """With the norm's result returned, its gradient joins that of the product; under delayed scaling it is rounded."""
    for case in (LinearCase(norm="RMSNorm"), MLPCase(activation="swiglu")):
        assert_steps(case, recipe, return_layernorm_output=True)


@each_once
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@for_each(NAMED)
def test_special_rows(recipe: Recipe, value: float) -> None:
    for case in (LinearCase(centered=True), MLPCase()):
        assert_special_rows(case, recipe, value)


@pytest.mark.gpu
@for_each(FUSED_RECIPES)
@pytest.mark.parametrize("size", ["2d", "3d fp32"])
def test_step_on_a_gpu(size: str, recipe: Recipe) -> None:
    for case in BOTH_CASES[size]:
        assert_steps(case, recipe, "cuda")


# ---- The parts one after the other ----------------------------------------------------------------------------------


@each_twice
@for_each(STATELESS_FUSED)
@BATCHES
def test_equals_its_parts(cases: tuple[Any, ...], recipe: Recipe) -> None:
    linear, mlp = cases
    assert_as_parts(linear.module(return_layernorm_output=linear.N == 33), linear, recipe)
    assert_as_parts(mlp.module(return_layernorm_output=mlp.K == 48), mlp, recipe)


@pytest.mark.gpu
@for_each(STATELESS_FUSED)
def test_equals_its_parts_on_a_gpu(recipe: Recipe) -> None:
    for case in chain(*BOTH_CASES.values()):
        assert_as_parts(case.module().cuda(), case, recipe, "cuda")


@for_each(NAMED)
def test_runs_fused(recipe: Recipe) -> None:
    """One autograd node for all, unless a part has a hook or was replaced; then the hook or the other part runs."""
    module, (x, _) = LinearCase().module(recipe=recipe), LinearCase().batch()
    x.requires_grad_()
    assert type(module(x).grad_fn).__name__ == "LayerNormLinearFunctionBackward"
    calls: list[int] = []
    module.linear.register_forward_pre_hook(lambda *_: calls.append(1))
    assert type(module(x).grad_fn).__name__ == "LinearFunctionBackward" and calls == [1]
    module, seen = LinearCase().module(recipe=recipe), LinearCase().batch()[0].requires_grad_()
    module.norm = nn.Identity()  # type: ignore[assignment]
    assert torch.equal(module(seen), module.linear(seen)) or isinstance(recipe, DelayedScaling)


@pytest.mark.parametrize("part", ["norm", "linear"])
def test_a_replaced_forward_runs(part: str) -> None:
    """As libraries that move weights do: they set the ``forward`` of a part, and remove it again."""
    module, x = LinearCase().module(recipe="current"), LinearCase().batch()[0].requires_grad_()
    y, owner = module(x), getattr(module, part)
    forward, calls = owner.forward, []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    owner.forward = replaced
    assert torch.equal(module(x), y) and calls == [1]
    del owner.forward
    assert type(module(x).grad_fn).__name__ == "LayerNormLinearFunctionBackward" and calls == [1]


@pytest.mark.parametrize("recipe", [None, "none"])
def test_high_precision(recipe: str | None) -> None:
    module = LinearCase(dtype=FP32).module(recipe=recipe, return_layernorm_output=True)
    x, dy = LinearCase(dtype=FP32).batch()
    n = nn.functional.layer_norm(x, (48,), module.norm.weight, module.norm.bias, module.norm.norm.eps)
    surrounding = None if recipe is None else named("current")
    found = run(module, x, dy, surrounding)
    torch.testing.assert_close(found["n"], n)
    torch.testing.assert_close(found["y"], nn.functional.linear(n, module.linear.weight, module.linear.bias))
    torch.testing.assert_close(found["linear.weight"], dy.t() @ n)


# ---- Options --------------------------------------------------------------------------------------------------------


@for_each(NAMED)
def test_return_bias(recipe: Recipe) -> None:
    """Y without the bias, and the bias; then the norm's result, if that is asked for."""
    case = LinearCase()
    module = case.module(return_bias=True, return_layernorm_output=True, recipe=recipe)
    x, _ = case.batch()
    y, bias, n = module(x)
    plain = copy.deepcopy(module)
    plain.return_bias = plain.linear.return_bias = plain.return_layernorm_output = False
    plain.linear.reset_parameters()
    with torch.no_grad():
        plain.linear.weight.copy_(module.linear.weight)
        plain.linear.bias.zero_()
    assert bias is module.linear.bias
    assert torch.equal(n, module.norm(x))
    assert isinstance(recipe, DelayedScaling) or torch.equal(y, plain(x))


@each_once
@for_each(NAMED)
@pytest.mark.parametrize("uses", ["n", "y"])
def test_gradient_of_one_output(recipe: Recipe, uses: str) -> None:
    """Where only one of Y and N is used, the other has no gradient: what the parts give, delayed state included."""
    case = LinearCase()
    module = case.module(return_layernorm_output=True)
    other = unfused(module)
    x, dy = case.batch()
    for each in (module, other):
        each.linear._config(recipe)
        each.leaf = x.clone().requires_grad_()
        with autocast(recipe=recipe):
            y, n = each(each.leaf)
        torch.manual_seed(1)
        (n if uses == "n" else y).backward(torch.ones_like(n) if uses == "n" else dy)
    assert torch.equal(module.leaf.grad, other.leaf.grad)
    for (name, mine), (_, theirs) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name  # type: ignore[arg-type]
    assert_same(dict(module.state_dict()), dict(other.state_dict()))


FROZEN = [set(names) for names in product(*((name, "") for name in ("x", "norm", "weight", "bias")))]


@each_once
@for_each({name: NAMED[name] for name in ("delayed", "block", "nvfp4")})
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "-".join(sorted(names - {""})) or "nothing")
def test_frozen(recipe: Recipe, frozen: set[str]) -> None:
    """What is frozen gets no gradient; the rest gets that of a full step, but for what is drawn at random."""
    case = LinearCase()
    module = case.module()
    whole, (x, dy) = copy.deepcopy(module), case.batch()
    expected = run(whole, x, dy, recipe)
    for name, parameter in module.named_parameters():
        kind = "norm" if name.startswith("norm") else name.removeprefix("linear.")
        parameter.requires_grad_(kind not in frozen)
    x.requires_grad_("x" not in frozen)
    with autocast(recipe=recipe):
        y = module(x)
        if y.requires_grad:
            torch.manual_seed(1)
            y.backward(dy)
    assert torch.equal(y, expected["y"])
    found = {"x": x.grad} | {name: p.grad for name, p in module.named_parameters()}
    for name, grad in found.items():
        kind = "norm" if name.startswith("norm") else name.removeprefix("linear.")
        assert (grad is None) == (kind in frozen), name
        assert grad is None or torch.equal(grad, expected[name]), name
