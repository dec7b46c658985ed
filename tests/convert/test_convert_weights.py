"""``convert(quantize_weights=True)``: weights of converted layers as quantized parameters, cast once; and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from minifloat import Linear, QuantizerRole, autocast
from minifloat.convert import convert, dequantize_weights, revert
from minifloat.functional import count_gemms
from minifloat.nn import quantized_model_init
from minifloat.quantizer import Quantizer
from minifloat.recipe import CustomRecipe, named
from minifloat.tensor import QuantizedTensor, quantize
from tests.helpers.convert_model import INSIDE, Model, assert_same_step, everything, small_too, step
from tests.helpers.count_casts import CountCasts

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]


def quantized(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}


WEIGHTS = {f"{name}.weight" for name in INSIDE}


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_a_model_built_in_quantized_model_init(recipe: str) -> None:
    """Outputs and gradients of a step, and of one after an optimizer's, bit for bit; biases stay as they are."""
    model = Model()
    with quantized_model_init(recipe=recipe):
        hand = Model(Linear)
    for module in hand.modules():
        if isinstance(module, Linear):
            module.recipe = named(recipe)
    hand.load_state_dict(model.state_dict(), strict=False)
    report = small_too(model, recipe, quantize_weights=True)
    assert quantized(model) == quantized(hand) == WEIGHTS
    assert all(layer.quantized_weight for layer in report.converted) and "quantized weight" in str(report)
    for _ in range(2):
        assert_same_step(model, hand)
        for each in (model, hand):
            torch.optim.SGD(each.parameters(), lr=0.5).step()


def test_inside_of_quantized_model_init() -> None:
    """There convert quantizes weights by default, in the format that it says, unless it is told not to."""
    for told, expected in ((None, WEIGHTS), (True, WEIGHTS), (False, set())):
        model = Model()
        values = model.blocks[1].up.weight.detach().clone()
        with quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True):
            report = small_too(model, "current", quantize_weights=told)
        assert quantized(model) == expected and not report.warnings
        if expected:
            weight = model.blocks[1].up.weight
            assert torch.equal(weight.dequantize(), quantize(values, named_weight("mxfp8")).dequantize())
            assert torch.equal(weight.get_high_precision_init_val(), values)
    with quantized_model_init(False):
        assert not any(layer.quantized_weight for layer in small_too(Model(), "current").converted)


def named_weight(recipe: str) -> Quantizer:
    return Linear(32, 32)._config(named(recipe)).weight


def test_of_a_linear_of_the_models_own() -> None:
    """One that keeps its recipe too, with split weights; "none" stays in high precision."""
    model = nn.ModuleDict(
        {
            "own": Linear(32, 32, recipe="current"),
            "split": Linear(32, 48, parameters_split={"a": 16, "b": 32}),
            "none": Linear(32, 32, recipe="none"),
        }
    )
    before = {name: p for name, p in model.named_parameters()}
    convert(model, "current", quantize_weights=True)
    assert quantized(model) == {"own.weight", "split.a_weight", "split.b_weight"}
    revert(model)
    assert not quantized(model) and model["split"].recipe is None
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, before[name], atol=0.01, rtol=0.07)


@pytest.mark.parametrize("recipe", RECIPES)
def test_revert_gives_high_precision_back(recipe: str) -> None:
    """The values that the codes stood for; those from before the cast, where quantized_model_init preserves them."""
    model = Model().bfloat16()
    model.blocks[0].gate.weight.requires_grad_(False)
    keys, shown = list(model.state_dict()), repr(model)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    small_too(model, recipe, quantize_weights=True)
    codes = {name: p.dequantize().detach() for name, p in model.named_parameters() if name in WEIGHTS}
    revert(model)
    assert not quantized(model) and list(model.state_dict()) == keys and repr(model) == shown
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["blocks.0.gate.weight"]
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16 and torch.equal(p, codes.get(name, values[name]))
        assert name not in codes or not torch.equal(p, values[name])

    with torch.no_grad():
        [p.copy_(values[name]) for name, p in model.named_parameters()]
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        small_too(model, recipe)
    assert quantized(model) == WEIGHTS
    revert(model)
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())


def test_convert_again() -> None:
    """It reverts first, so that weights are in high precision unless they are to be quantized again."""
    model = Model()
    small_too(model, "mxfp8", quantize_weights=True)
    codes = {name: p.dequantize() for name, p in model.named_parameters() if name in WEIGHTS}
    small_too(model, "mxfp8", quantize_weights=True)
    for name, p in model.named_parameters():
        assert name not in WEIGHTS or torch.equal(p.dequantize(), codes[name])
    small_too(model, "mxfp8")
    assert not quantized(model)


def test_tied_weights_stay_one_parameter() -> None:
    """A parameter of several modules is never replaced, whichever of them are converted."""
    model = Model(tied=True)
    model.blocks[0].gate.weight = model.blocks[0].up.weight
    report = convert(model, "current", everything, quantize_weights=True)
    assert model.head.weight is model.tokens.weight and model.blocks[0].gate.weight is model.blocks[0].up.weight
    assert quantized(model) == (WEIGHTS | {"project.weight"}) - {"blocks.0.gate.weight", "blocks.0.up.weight"}
    assert sum("one parameter" in warning for warning in report.warnings) == 3
    y, _ = step(model)
    assert y.isfinite().all()


def test_what_cannot_be_replaced_is_refused() -> None:
    """Before anything is changed."""

    def refuses(model: nn.Module, match: str, recipe: str | None = "current", **options: Any) -> None:
        kinds, parameters = [type(m) for m in model.modules()], list(model.parameters())
        with pytest.raises(ValueError, match=match):
            convert(model, recipe, everything, quantize_weights=True, **options)
        assert kinds == [type(m) for m in model.modules()]
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))

    trained = Model()
    step(trained)
    refuses(trained, r"project\.weight has a gradient")
    trained.zero_grad()
    trained.blocks[0].up.weight.register_hook(lambda gradient: gradient)
    refuses(trained, r"blocks\.0\.up\.weight has hooks")
    refuses(Model(), "quantized_model_init", None)
    refuses(Model(), "'head', which takes its recipe from autocast", "mxfp8", rules=[("head", None)])
    wrapped = nn.Linear(16, 16)
    wrapped.__class__ = type("Wrapped", (DistributedDataParallel,), {"__init__": nn.Module.__init__})
    with pytest.raises(TypeError, match="quantize_weights is 'frozen'"):
        convert(Model(), "current", everything, quantize_weights="frozen")  # type: ignore[arg-type]
    outer = nn.Sequential(nn.Linear(32, 32), wrapped)
    refuses(outer, "DistributedDataParallel")


def test_a_factory_that_fails_loses_no_values() -> None:
    def factory(role: QuantizerRole) -> Quantizer:
        if role.name == "blocks.1.up":
            raise RuntimeError("no")
        return Quantizer(named("current").quantizer(role).row_format)

    model = Model()
    parameters = list(model.parameters())
    with quantized_model_init(recipe=CustomRecipe(factory)), pytest.raises(RuntimeError, match="no"):
        small_too(model, "mxfp8")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)) and type(model.head) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_quantized_weights_are_never_cast_again(recipe: str) -> None:
    """A step through frozen weights: inputs and gradients are cast, weights are not; there is no wgrad."""
    layer = nn.Linear(64, 48, bias=False)
    layer.requires_grad_(False)
    twin = copy.deepcopy(layer)
    convert(layer, recipe, everything, quantize_weights=True)
    convert(twin, recipe, everything)
    assert not layer.weight.requires_grad
    values = torch.randn(32, 64)
    found, counts = [], []
    for each in (layer, twin):
        saved: list[Tensor] = []

        def keep(t: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(t)
            return t

        x = values.clone().requires_grad_()
        torch.manual_seed(1)
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with hooks, count_gemms() as gemms, CountCasts() as casts:
            y = each(x)
            y.backward(torch.ones_like(y))
        assert {gemm.gemm for gemm in gemms} == {"fprop", "dgrad"}
        assert all(t.shape[0] != 32 for t in saved), [t.shape for t in saved]  # X is not kept
        found.append((y.detach(), x.grad))
        counts.append(casts.formats.total())
    assert counts[0] == counts[1] - len(named_weight(recipe).casts)
    if recipe != "delayed":  # whose scale of a weight follows what was cast before
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


class Adapted(nn.Module):
    """A frozen linear and an adapter of low rank."""

    def __init__(self, recipe: str | None, format_of_weights: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base, self.a, self.b = nn.Linear(64, 48), nn.Linear(64, 4, bias=False), nn.Linear(4, 48, bias=False)
        with quantized_model_init(recipe=format_of_weights):
            convert(self.base.requires_grad_(False), recipe, everything)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return y


def test_recipes_that_take_turns_leave_nothing_behind() -> None:
    """Another recipe than that of the codes casts their values anew; the layer keeps no copy, nor a longer state."""
    model = Adapted(None, "mxfp8")
    weight, state = model.base.weight, list(model.state_dict())
    values = nn.Linear(64, 48)
    values.load_state_dict({"weight": weight.dequantize(), "bias": model.base.bias})
    convert(values.requires_grad_(False), None, everything)
    x = torch.randn(8, 64)
    for recipe in ("mxfp8", "nvfp4", "current", "mxfp8", "nvfp4", "block"):
        with autocast(recipe=recipe), torch.no_grad():
            torch.manual_seed(1)
            y = model.base(x)
            torch.manual_seed(1)
            assert torch.equal(y, values(x))
    assert model.base.weight is weight and list(model.state_dict()) == state
    assert model.base._weight_cache is None and not model.base._configs.custom


@pytest.mark.parametrize("recipe", ["current", "delayed", "nvfp4"])
def test_a_moving_average_is_in_high_precision(recipe: str) -> None:
    with quantized_model_init(recipe=recipe):
        model = nn.Sequential(*[Linear(32, 32, bias=False, recipe=recipe) for _ in range(3)])
    model[2].weight = model[0].weight
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    dequantize_weights(average)
    assert type(average.module[0].weight) is nn.Parameter and average.module[2].weight is average.module[0].weight
    start = [p.detach().clone() for p in average.parameters()]
    assert all(torch.equal(p, q.dequantize()) for p, q in zip(start, model.parameters(), strict=True))
    average.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.dequantize().roll(1, 0))
    for _ in range(100):
        average.update_parameters(model)
    for p, q, before in zip(average.parameters(), model.parameters(), start, strict=True):
        wanted = before.lerp(q.dequantize(), 1 - 0.99**100)
        torch.testing.assert_close(p.detach(), wanted, rtol=1e-5, atol=1e-6)
    average(torch.randn(16, 32))


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},  # by copy_ on a CPU, by lerp_ elsewhere
    "avg_fn": {"avg_fn": lambda average, p, n: 0.99 * average + 0.01 * p},
    "ema": {"avg_fn": get_ema_avg_fn(0.99)},
    "multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.99)},
    "multi_avg_fn": {"multi_avg_fn": lambda averages, ps, n: torch._foreach_add_(averages, ps, alpha=0.01)},
}


@pytest.mark.parametrize("way", AVERAGES)
def test_a_moving_average_of_codes_is_refused(way: str) -> None:
    """However it is written: of what ``copy_`` writes nothing is left, and it said nothing."""
    with quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(nn.LayerNorm(32), Linear(32, 32, recipe="mxfp8"))
    average = AveragedModel(model, **AVERAGES[way])
    with pytest.raises(ValueError, match=r"Linear\(32, 32\): its weight .*dequantize_weights"):
        average.update_parameters(model)
    assert average.n_averaged == 0
    dequantize_weights(average)
    for _ in range(2):
        average.update_parameters(model)
    plain = AveragedModel(nn.Linear(4, 4), **AVERAGES[way])
    plain.update_parameters(nn.Linear(4, 4))


@torch.no_grad()
def test_lerp_of_codes_is_refused() -> None:
    with quantized_model_init(recipe="mxfp8"):
        layer = Linear(32, 32, recipe="mxfp8")
    for lerp in (lambda w, x: w.lerp_(x, 0.1), lambda w, x: torch._foreach_lerp_([w], [x], 0.1)):
        with pytest.raises(ValueError, match=r"Linear\(32, 32\): its weight .*dequantize_weights"):
            lerp(layer.weight, torch.ones(32, 32))
