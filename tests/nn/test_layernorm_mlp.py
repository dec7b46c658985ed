"""``LayerNormMLP`` part by part; and of both it and ``LayerNormLinear``: options, state, compilation, bad input.

Numbers are held to a model by hand (``helpers.fused_model``), bit for bit and in float64, and to the modules that it is
made of, run one after the other.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat import delayed
from minifloat.autocast import autocast
from minifloat.functional import fused_layers as mlp_functions
from minifloat.functional.norm_activation import activate
from minifloat.nn.fused_layers import LayerNormLinear, LayerNormMLP
from minifloat.nn.linear import Linear
from minifloat.nn.linear_state import prepare
from minifloat.nn.quantized_parameters import quantized_model_init
from minifloat.ops.matmul import count_gemms
from minifloat.recipe import DelayedScaling, Recipe, named
from minifloat.tensor import QuantizedTensor
from tests.helpers.fused_cases import LinearCase, MLPCase, assert_steps, unfused
from tests.helpers.fused_model import assert_same, run
from tests.helpers.recipes import NAMED, for_each
from tests.helpers.sample import each_once

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ACTIVATIONS = (
    "gelu", "qgelu", "relu", "srelu", "silu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu",
)  # fmt: skip


# ---- Numbers --------------------------------------------------------------------------------------------------------


@each_once
@for_each({name: NAMED[name] for name in ("delayed", "current")})
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, recipe: Recipe) -> None:
    assert_steps(MLPCase(activation=activation, norm="RMSNorm"), recipe)


# ---- The parts one after the other ----------------------------------------------------------------------------------


class Parts(nn.Module):
    """The parts of an MLP called by hand, with no fused module around them."""

    def __init__(self, mlp: LayerNormMLP) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2, self.activation = mlp.norm, mlp.fc1, mlp.fc2, mlp.activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(activate(self.fc1(self.norm(x)), self.activation))
        return y


def node(module: nn.Module, x: Tensor) -> str:
    """The autograd node that a module's output comes from."""
    return type(module(x.requires_grad_()).grad_fn).__name__


@pytest.mark.parametrize("part", ["norm", "fc1", "fc2"])
def test_hooks_and_replaced_parts_run(part: str) -> None:
    """A part that has a hook, keeps its input or was replaced is called as the module that it is."""
    case = MLPCase()
    x, module = case.batch()[0], case.module(recipe="current")
    y = module(x)
    assert node(module, x) == "LayerNormMLPFunctionBackward"
    calls: list[int] = []
    handle = getattr(module, part).register_full_backward_hook(lambda *_: calls.append(1))
    module(x).sum().backward()
    assert calls == [1] and torch.equal(module(x), y)
    handle.remove()
    assert node(module, x) == "LayerNormMLPFunctionBackward"
    setattr(module, part, nn.Sequential(getattr(module, part)))  # as a wrapper of another library
    assert node(module, x) != "LayerNormMLPFunctionBackward" and torch.equal(module(x), y)


def test_a_replaced_linear_knows_no_options() -> None:
    """What replaced fc2 adds its bias itself: there is none to return."""
    case = MLPCase(dtype=FP32)
    module, x = case.module(return_bias=True, return_layernorm_output=True), case.batch()[0]
    y, bias, n = module(x)
    linear = nn.Linear(module.fc2.in_features, module.fc2.out_features)
    linear.load_state_dict(module.fc2.state_dict())
    module.fc2 = linear  # type: ignore[assignment]
    found = module(x)
    torch.testing.assert_close(found[0], y + bias)
    assert found[1] is None and torch.equal(found[2], n)


def test_linears_of_different_recipes() -> None:
    """One linear may get another recipe afterwards, or none."""
    case = MLPCase(dtype=FP32)
    module, (x, dy) = case.module(recipe="mxfp8"), case.batch()
    module.fc2.recipe = named("current")
    assert node(module, x) == "LayerNormMLPFunctionBackward"
    assert_same(run(module, x, dy, None), run(Parts(module), x, dy, None))
    module.fc2.recipe = "none"
    with count_gemms() as gemms:
        assert_same(run(module, x, dy, None), run(Parts(module), x, dy, None))
    assert {(gemm.a == "identity") for gemm in gemms if gemm.gemm == "fprop"} == {False, True}


# ---- Options and state of both modules ------------------------------------------------------------------------------

BOTH = {"LayerNormLinear": LinearCase(), "LayerNormMLP": MLPCase(activation="swiglu")}
MODULES = pytest.mark.parametrize("case", BOTH.values(), ids=BOTH.keys())
FROZEN_PARTS = ["norm", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def linears(module: nn.Module) -> dict[str, Linear]:
    """Its linears by name."""
    return {name: part for name, part in module.named_children() if isinstance(part, Linear)}


def frozen_subsets() -> list[set[str]]:
    """Every set of an MLP's parts, x included."""
    parts = ["x", *FROZEN_PARTS]
    return [{part for bit, part in enumerate(parts) if number >> bit & 1} for number in range(2 ** len(parts))]


@for_each({name: NAMED[name] for name in ("delayed", "block")})
def test_frozen_parts_of_an_mlp(recipe: Recipe) -> None:
    """What is frozen gets no gradient; the rest gets that of a full step; GEMMs that no gradient needs do not run."""
    case = MLPCase((9,), 16, H=24)
    whole, (x, dy) = case.module(), case.batch()
    prepare(whole, recipe)
    expected = run(copy.deepcopy(whole), x, dy, recipe)
    for frozen in frozen_subsets():
        module = copy.deepcopy(whole)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name not in frozen and name.partition(".")[0] not in frozen)
        leaf = x.clone().requires_grad_("x" not in frozen)
        with autocast(recipe=recipe), count_gemms() as gemms:
            y = module(leaf)
        assert torch.equal(y, expected["y"])
        torch.manual_seed(1)
        if y.requires_grad:
            with count_gemms() as gemms:
                y.backward(dy)
            early = len({"x", "norm"} - frozen) > 0
            hidden = early or len({"fc1.weight", "fc1.bias"} - frozen) > 0
            wanted = {"dgrad": early + hidden, "wgrad": len({"fc1.weight", "fc2.weight"} - frozen)}
            ran = {kind: sum(n for gemm, n in gemms.items() if gemm.gemm == kind) for kind in ("dgrad", "wgrad")}
            assert ran == wanted, frozen
        for name, grad in {"x": leaf.grad, **{name: p.grad for name, p in module.named_parameters()}}.items():
            assert (grad is None) == (name in frozen or name.partition(".")[0] in frozen), (name, frozen)
            assert grad is None or torch.equal(grad, expected[name]), (name, frozen)


@pytest.mark.parametrize("unused", ["fc1", "output"])
def test_histories_of_what_has_no_backward(unused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear that no gradient passes through keeps its backward history: no rule runs for it."""
    case = MLPCase()
    recipe = DelayedScaling(amax_history_len=2)
    module, (x, _) = case.module(recipe=recipe, return_layernorm_output=True), case.batch()
    module.fc1.requires_grad_(unused != "fc1")
    module.norm.requires_grad_(unused != "fc1")
    y, n = module(x)
    assert n.requires_grad == (unused != "fc1")
    updated: list[int] = []
    monkeypatch.setattr(delayed, "update", lambda histories: updated.extend(len(each.scale) for each in histories))
    (y if unused == "fc1" else n).sum().backward()
    assert updated == ([2] if unused == "fc1" else [])  # of fc2, whose backward history has two slots


@each_once
@for_each(NAMED)
@MODULES
def test_microbatches_and_main_grad(case: Any, recipe: Recipe) -> None:
    """``main_grad``, overwritten by the first microbatch, is the sum of the gradients that autograd would get.

    Later microbatches cast no weight, and all else is as without ``main_grad``.
    """
    case = replace(case, dtype=FP32)
    plain, module = case.module(), case.module(fuse_wgrad_accumulation=True)
    module.load_state_dict(plain.state_dict())
    weights: dict[str, Any] = {f"{name}.weight": linear.weight for name, linear in linears(module).items()}
    for weight in weights.values():
        weight.main_grad = torch.full_like(weight, float("nan"))
    totals: dict[str, Tensor] = {}
    for index in range(3):
        x, dy = case.batch()
        expected = run(plain, x, dy, recipe, is_first_microbatch=index == 0)
        caches = [linear._weight_cache for linear in linears(module).values()]
        found = run(module, x, dy, recipe, is_first_microbatch=index == 0)
        kept = [linear._weight_cache for linear in linears(module).values()]
        assert all((a is b) == (index > 0) for a, b in zip(caches, kept, strict=True))
        for name, weight in weights.items():
            grad = expected.pop(name)
            totals[name] = totals[name] + grad if name in totals else grad
            assert torch.equal(weight.main_grad, totals[name]) and weight.grad_added_to_main_grad
        assert_same(found, expected)


@MODULES
def test_main_grad_is_missing(case: Any) -> None:
    module = case.module(fuse_wgrad_accumulation=True, recipe="current", name="block")
    with pytest.raises(ValueError, match=r"block.*main_grad"):
        module(case.batch()[0])


@each_once
@for_each(NAMED)
@MODULES
def test_delayed_weight_gradients(case: Any, recipe: Recipe) -> None:
    """``backward_dw`` computes what backward left, to the bit; frozen weights have nothing to do."""
    module, late = case.module(), case.module(delay_wgrad_compute=True)
    late.load_state_dict(module.state_dict())
    x, dy = case.batch()
    expected = run(module, x, dy, recipe)
    found = run(late, x, dy, recipe)
    weights = [f"{name}.weight" for name in linears(late)]
    assert not set(weights) & set(found)
    late.backward_dw()
    found |= {name: dict(late.named_parameters())[name].grad for name in weights}
    assert_same(found, expected)
    with pytest.raises(ValueError, match="no weight gradient is waiting"):
        late.backward_dw()
    if len(weights) == 2:
        late.fc1.weight.requires_grad_(False)
        run(late, x, dy, recipe)
        late.backward_dw()
        assert late.fc1.weight.grad is None and late.fc2.weight.grad is not None
    with pytest.raises(ValueError, match="delay_wgrad_compute=True"):
        module.backward_dw()


@for_each(NAMED)
def test_quantized_output_meets_the_next_linear(recipe: Recipe) -> None:
    """``fp8_output`` gives the operands that the next linear would make; backward goes through both."""
    case = LinearCase()
    module, following = case.module(), Linear(33, 8)
    following._config(recipe)
    other, after = copy.deepcopy(module), copy.deepcopy(following)
    x, _ = case.batch()
    results = []
    for first, second, quantized in ((module, following, True), (other, after, False)):
        leaf = x.clone().requires_grad_()
        with autocast(recipe=recipe):
            hidden = first(leaf, fp8_output=quantized)
            y = second(hidden)
        assert isinstance(hidden, QuantizedTensor) == quantized
        torch.manual_seed(1)
        y.sum().backward()
        results.append([y, leaf.grad, first.linear.weight.grad, first.norm.weight.grad])
    same = not isinstance(recipe, DelayedScaling)  # its output has a scale of its own
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) if same else a.isfinite().all()


@for_each({name: NAMED[name] for name in ("delayed", "current", "mxfp8")})
@MODULES
def test_quantized_input(case: Any, recipe: Recipe) -> None:
    module, (x, dy) = case.module(), case.batch()
    producer = Linear(48, 48)
    with autocast(recipe=recipe), torch.no_grad():
        hidden = producer(x, fp8_output=True)
    twin = copy.deepcopy(module)
    with autocast(recipe=recipe):
        y, expected = module(hidden), twin(hidden.dequantize())
    torch.manual_seed(1)
    y.backward(dy)
    torch.manual_seed(1)
    expected.backward(dy)
    assert torch.equal(y, expected)
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


@for_each({name: NAMED[name] for name in ("delayed", "block")})
def test_parameters_split(recipe: Recipe) -> None:
    case = LinearCase(N=40)
    whole = case.module()
    split = case.module(parameters_split={"query": 16, "key": 8, "value": 16})
    names = ("query", "key", "value")
    with torch.no_grad():
        split.norm.load_state_dict(whole.norm.state_dict())
        for kind in ("weight", "bias"):
            for name, part in zip(names, getattr(whole.linear, kind).split([16, 8, 16]), strict=True):
                getattr(split.linear, f"{name}_{kind}").copy_(part)
    x, dy = case.batch()
    expected, found = run(whole, x, dy, recipe), run(split, x, dy, recipe)
    for kind in ("weight", "bias"):
        parts = [found.pop(f"linear.{name}_{kind}") for name in names]
        found[f"linear.{kind}"] = torch.cat(parts)
    assert_same(found, expected)


def test_init_methods_and_dtype() -> None:
    mlp = LayerNormMLP(16, 24, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_, params_dtype=BF16)
    assert (mlp.fc1.weight == 1).all() and not mlp.fc2.weight.any() and not mlp.fc1.bias.any()
    assert {p.dtype for p in mlp.parameters()} == {BF16}
    mlp = LayerNormMLP(16, 24, init_method=nn.init.ones_, bias=False, activation="swiglu", normalization="RMSNorm")
    assert (mlp.fc2.weight == 1).all() and mlp.fc1.weight.shape == (48, 16) and mlp.fc2.weight.shape == (16, 24)
    assert mlp.fc1.bias is None and mlp.fc2.bias is None and mlp.norm.bias is None
    layer = LayerNormLinear(16, 24, init_method=nn.init.ones_, params_dtype=FP16, zero_centered_gamma=True)
    assert (layer.linear.weight == 1).all() and {p.dtype for p in layer.parameters()} == {FP16}
    assert not layer.norm.weight.any()


@each_once
@for_each(NAMED)
@MODULES
def test_quantized_weights(case: Any, recipe: Recipe) -> None:
    case = replace(case, dtype=FP32)
    with quantized_model_init(recipe=recipe):
        module = case.module()
    assert all(isinstance(linear.weight, QuantizedTensor) for linear in linears(module).values())
    x, dy = case.batch()
    if not isinstance(recipe, DelayedScaling):
        assert_same(run(module, x, dy, recipe), run(unfused(module), x, dy, recipe))
    for recipe_now in (recipe, None, named("mxfp8")):  # forward and backward inside and outside of autocast
        found = run(module, x, dy, recipe_now)
        assert all(value.isfinite().all() for value in found.values()) and len(found) == 2 + len([*module.parameters()])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerNormLinear(4, 6, normalization="BatchNorm"), "BatchNorm.*LayerNorm, RMSNorm"),
        (lambda: LayerNormMLP(4, 6, normalization="BatchNorm"), "BatchNorm"),
        (lambda: LayerNormMLP(4, 6, activation="tanh"), "tanh.*gelu"),
        (lambda: LayerNormMLP(4, 6, activation="gelu", activation_params={"limit": 1.0}), "gelu.*limit"),
        (lambda: LayerNormMLP(4, 6, activation="clamped_swiglu", activation_params={"top": 1.0}), "top"),
        (lambda: LayerNormMLP(4, 6, recipe="fp7"), "fp7"),
        (lambda: LayerNormLinear(4, 6, parameters_split={"q": 2, "k": 2}), "out_features=6"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("recipe", ["current", "delayed", None])
@MODULES
def test_bad_input(case: Any, recipe: str | None) -> None:
    module = case.module(recipe=recipe, name="block")
    with pytest.raises(ValueError, match=r"\(5, 47\).*48"):
        module(torch.randn(5, 47))
    with pytest.raises(ValueError, match="float64"):
        module(torch.randn(5, 48).double())
    with pytest.raises((TypeError, ValueError), match="int64"):
        module(torch.ones(5, 48, dtype=torch.int64))


# ---- torch.compile --------------------------------------------------------------------------------------------------


def test_h_is_freed_before_dh_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest tensors of a backward, H and dH, lie beside each other no longer than dH takes to be computed."""
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    act_value, grad_operands = mlp_functions.act_value, mlp_functions._grad_operands

    def noting(h: Tensor, *args: Any, **kwargs: Any) -> Any:
        made.append(weakref.ref(h))
        return act_value(h, *args, **kwargs)

    def looking(*args: Any) -> Any:
        alive.append(made[-1]() is not None)
        return grad_operands(*args)

    monkeypatch.setattr(mlp_functions, "act_value", noting)
    monkeypatch.setattr(mlp_functions, "_grad_operands", looking)
    layer = LayerNormMLP(32, 48, recipe="current", activation="swiglu")
    x = torch.randn(16, 32, requires_grad=True)
    loss = layer(x).square().sum()
    first = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [x, *layer.parameters()])
    assert alive == [True, False]  # a graph that is retained keeps it
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
