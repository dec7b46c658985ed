"""``LayerNormLinear``: its numbers, its options, its state, and its answers to bad input.

Numbers are held to a model by hand (``helpers.fused_model``), bit for bit and in float64, and to the modules that it is
made of, run one after the other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minifloat.autocast import autocast
from minifloat.nn.layernorm_linear import LayerNormLinear
from minifloat.recipe import CustomRecipe, DelayedScaling, NVFP4BlockScaling, Recipe, named
from tests.helpers.fused_model import Model, assert_same, fill, run
from tests.nn.test_linear import delayed_weight, mxfp8_then_nvfp4

pytestmark = pytest.mark.usefixtures("one_thread")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMED: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=3),
    "current": named("current"),
    "block": named("block"),
    "mxfp8": named("mxfp8"),
    "nvfp4": named("nvfp4"),
}
RECIPES: dict[str, Recipe] = NAMED | {
    "delayed most recent": DelayedScaling(amax_history_len=2, margin=1, amax_compute_algo="most_recent"),
    "nvfp4 nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "mxfp8 dequantized": replace(named("mxfp8"), backward_override="dequantized"),  # type: ignore[type-var]
    "current high precision": replace(named("current"), backward_override="high_precision"),  # type: ignore[type-var]
    "nvfp4 high precision": replace(named("nvfp4"), backward_override="high_precision"),  # type: ignore[type-var]
    "hybrid": CustomRecipe(mxfp8_then_nvfp4),
    "hybrid delayed weight": CustomRecipe(delayed_weight),
}
STATELESS = {name: recipe for name, recipe in RECIPES.items() if "delayed" not in name}


def for_each(recipes: dict[str, Recipe]) -> pytest.MarkDecorator:
    """Parametrises a test over recipes."""
    return pytest.mark.parametrize("recipe", recipes.values(), ids=recipes.keys())


@dataclass(frozen=True)
class Case:
    """Sizes, dtypes and options of a layer and its input."""

    lead: tuple[int, ...] = (17,)
    K: int = 48
    N: int = 33
    dtype: torch.dtype = BF16
    params: torch.dtype = FP32
    norm: str = "LayerNorm"
    centered: bool = False
    bias: bool = True
    torch_autocast: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        return BF16 if self.torch_autocast else self.dtype

    def module(self, **kwargs: Any) -> LayerNormLinear:
        module = LayerNormLinear(
            self.K, self.N, bias=self.bias, normalization=self.norm, zero_centered_gamma=self.centered,
            params_dtype=self.params, **kwargs,
        )  # fmt: skip
        fill(module)
        return module

    def batch(self, scale: float = 1.0, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        x, dy = torch.randn(*self.lead, self.K) * scale, torch.randn(*self.lead, self.N) * scale
        return x.to(device, self.dtype), dy.to(device, self.compute_dtype)


CASES = {
    "2d": Case(),
    "3d fp32": Case((3, 43), 80, 48, FP32, norm="RMSNorm", centered=True),
    "4d autocast": Case((2, 3, 5), 33, 80, FP32, params=BF16, torch_autocast=True, centered=True),
    "one row fp16": Case((1,), 80, 33, FP16, norm="RMSNorm", bias=False),
    "vector": Case((), 48, 7),
    "127 rows bf16 parameters": Case((127,), 128, 64, BF16, BF16, "RMSNorm"),
    "empty": Case((0,)),
}
BATCHES = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def steps_of(recipe: Recipe) -> tuple[float, ...]:
    """Sizes of the batches of a test: delayed scaling needs some to have scales of its own."""
    return (1.0, 4.0, 0.25) if isinstance(recipe, DelayedScaling) or "delayed" in repr(recipe) else (1.0,)


def assert_state(module: nn.Module, model: Model) -> None:
    """Delayed scaling's histories and scales are those of the model."""
    found = {key: value for key, value in module.state_dict().items() if "_scaling." in key}
    assert_same(found, model.state())


def assert_step(module: Any, case: Any, recipe: Recipe, model: Model, scale: float, device: Any = "cpu") -> None:
    """A step gives the model's bits, and they are float64's."""
    x, dy = case.batch(scale, device)
    dn = torch.randn_like(x, dtype=case.compute_dtype) if module.return_layernorm_output else None
    expected = model.step(x, dy, case.compute_dtype, dn)
    names = {name for name, _ in module.named_parameters()} | {"x", "y", "n"}
    found = run(module, x, dy, recipe, case.torch_autocast, dn)
    assert_same(found, {name: value for name, value in expected.items() if name in names})
    assert found["y"].dtype == case.compute_dtype and found["x"].dtype == case.dtype
    assert all(parameter.grad.dtype == parameter.dtype for parameter in module.parameters())
    assert_state(module, model)
    model.checks.run()


# ---- Numbers --------------------------------------------------------------------------------------------------------


@for_each(RECIPES)
@BATCHES
def test_step(case: Case, recipe: Recipe) -> None:
    """Output, gradients and delayed scaling's state: the bits of the model by hand, within float64's bounds."""
    module = case.module()
    model = Model(module, recipe)
    for scale in steps_of(recipe):
        assert_step(module, case, recipe, model, scale)


@for_each(NAMED)
def test_returned_norm(recipe: Recipe) -> None:
    """With the norm's result returned, its gradient joins that of the product; under delayed scaling it is rounded."""
    case = Case(norm="RMSNorm")
    module = case.module(return_layernorm_output=True)
    model = Model(module, recipe)
    for scale in steps_of(recipe):
        assert_step(module, case, recipe, model, scale)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@for_each(NAMED)
def test_special_rows(recipe: Recipe, value: float) -> None:
    """Rows of zeros, and inputs that hold NaN or infinity, give what the model by hand gives."""
    case = Case(centered=True)
    module = case.module()
    model = Model(module, recipe)
    x, dy = case.batch()
    x[3], x[5, 7], dy[4] = 0.0, value, 0.0
    assert_same(run(module, x, dy, recipe), model.step(x, dy, BF16))
    assert_state(module, model)


@pytest.mark.gpu
@for_each(RECIPES)
@pytest.mark.parametrize("case", [CASES["2d"], CASES["3d fp32"]], ids=["2d", "3d"])
def test_step_on_a_gpu(case: Case, recipe: Recipe) -> None:
    """As :func:`test_step`, on CUDA."""
    module = case.module().cuda()
    model = Model(module, recipe)
    for scale in steps_of(recipe):
        assert_step(module, case, recipe, model, scale, "cuda")


# ---- The parts one after the other ----------------------------------------------------------------------------------


def apart(module: Any) -> Any:
    """A copy that runs its parts one after the other, since one has a hook."""
    other = copy.deepcopy(module)
    other.norm.register_forward_hook(lambda *_: None)
    return other


def assert_as_parts(module: Any, case: Any, recipe: Recipe | None, device: Any = "cpu", **kwargs: Any) -> None:
    """The fused form gives the bits of its parts."""
    x, dy = case.batch(1.0, device)
    dn = torch.randn_like(x, dtype=case.compute_dtype) if module.return_layernorm_output else None
    expected = run(apart(module), x, dy, recipe, case.torch_autocast, dn, **kwargs)
    assert_same(run(module, x, dy, recipe, case.torch_autocast, dn, **kwargs), expected)


@for_each(STATELESS)
@BATCHES
def test_equals_its_parts(case: Case, recipe: Recipe) -> None:
    assert_as_parts(case.module(return_layernorm_output=case.N == 33), case, recipe)


@for_each({name: STATELESS[name] for name in ("current", "mxfp8")})
def test_parts_are_ordinary_modules(recipe: Recipe) -> None:
    """The parts called by hand, with no fused module around them."""
    case = Case((3, 5))
    module = case.module()
    x, dy = case.batch()
    expected = run(nn.Sequential(module.norm, module.linear), x, dy, recipe)
    names = {"0.weight": "norm.weight", "0.bias": "norm.bias", "1.weight": "linear.weight", "1.bias": "linear.bias"}
    assert_same(run(module, x, dy, recipe), {names.get(name, name): value for name, value in expected.items()})


@pytest.mark.gpu
@for_each(STATELESS)
def test_equals_its_parts_on_a_gpu(recipe: Recipe) -> None:
    for case in CASES.values():
        assert_as_parts(case.module().cuda(), case, recipe, "cuda")


@for_each(NAMED)
def test_runs_fused(recipe: Recipe) -> None:
    """One autograd node for all, unless a part has a hook or was replaced; then the hook or the other part runs."""
    module, (x, _) = Case().module(recipe=recipe), Case().batch()
    x.requires_grad_()
    assert type(module(x).grad_fn).__name__ == "LayerNormLinearFunctionBackward"
    calls: list[int] = []
    module.linear.register_forward_pre_hook(lambda *_: calls.append(1))
    assert type(module(x).grad_fn).__name__ == "LinearFunctionBackward" and calls == [1]
    module, seen = Case().module(recipe=recipe), Case().batch()[0].requires_grad_()
    module.norm = nn.Identity()  # type: ignore[assignment]
    assert torch.equal(module(seen), module.linear(seen)) or isinstance(recipe, DelayedScaling)


@pytest.mark.parametrize("part", ["norm", "linear"])
def test_a_replaced_forward_runs(part: str) -> None:
    """As libraries that move weights do: they set the ``forward`` of a part, and remove it again."""
    module, x = Case().module(recipe="current"), Case().batch()[0].requires_grad_()
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
    """Without a recipe it is norm and linear of PyTorch."""
    module = Case(dtype=FP32).module(recipe=recipe, return_layernorm_output=True)
    x, dy = Case(dtype=FP32).batch()
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
    case = Case()
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


@for_each(NAMED)
@pytest.mark.parametrize("uses", ["n", "y"])
def test_gradient_of_one_output(recipe: Recipe, uses: str) -> None:
    """Where only one of Y and N is used, the other has no gradient: what the parts give, delayed state included."""
    case = Case()
    module = case.module(return_layernorm_output=True)
    other = apart(module)
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


@for_each({name: NAMED[name] for name in ("delayed", "block", "nvfp4")})
@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "-".join(sorted(names - {""})) or "nothing")
def test_frozen(recipe: Recipe, frozen: set[str]) -> None:
    """What is frozen gets no gradient; the rest gets that of a full step, but for what is drawn at random."""
    case = Case()
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
