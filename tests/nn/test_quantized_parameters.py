"""Weights that are kept quantized: how they start, what is computed on them, who writes them, how they are saved."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minifloat import (
    CustomRecipe,
    DelayedScaling,
    GroupedLinear,
    Linear,
    Quantizer,
    Recipe,
    autocast,
    quantized_model_init,
)
from minifloat.formats import Format
from minifloat.functional import count_gemms
from minifloat.recipe import QuantizerRole, named
from minifloat.tensor import QuantizedTensor, quantize, quantize_all_
from tests.helpers.sample import each_once

pytestmark = pytest.mark.usefixtures("one_thread")

IN, OUT = 40, 24


def hybrid_weights(role: QuantizerRole) -> Quantizer:
    """Weights in blocks of 32 one way, NVFP4 the other."""
    four = Quantizer(Format("e2m1", 16, scale_rule="two_level"))
    eight = Quantizer(Format("e4m3", 32, scale_rule="e8m0"))
    if role.tensor_type in ("input", "weight"):
        return Quantizer.hybrid(rowwise_quantizer=eight, columnwise_quantizer=four)
    return four


DELAYED = DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    **{name: named(name) for name in ("current", "block", "mxfp8", "nvfp4", "rowwise", "mxfp4", "mxfp6", "w4a8")},
    "custom": CustomRecipe(hybrid_weights),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)


def quantized_linear(recipe: Recipe, seed: int = 0, own: bool = False, **options: Any) -> Linear:
    torch.manual_seed(seed)
    with quantized_model_init(recipe=recipe):
        return Linear(IN, OUT, recipe=recipe if own else None, **options)


def plain_linear(seed: int = 0, **options: Any) -> Linear:
    torch.manual_seed(seed)
    return Linear(IN, OUT, **options)


def scale_of(values: Tensor, margin: int = 0) -> Tensor:
    """Delayed scaling's scale of these very values."""
    return torch.full((1,), 448.0 * 2.0**-margin) / values.detach().abs().max().float()


def cast(values: Tensor, recipe: Recipe, scale: Tensor | None = None) -> QuantizedTensor:
    quantizer = Linear(values.shape[1], values.shape[0])._config(recipe).weight
    given = quantizer.row_format.scale_rule == "given"
    return quantize(values, quantizer, scale=(scale_of(values) if scale is None else scale) if given else None)


def qweight(layer: Linear) -> QuantizedTensor:
    assert isinstance(layer.weight, QuantizedTensor) and isinstance(layer.weight, nn.Parameter)
    return layer.weight


def values(weight: Tensor) -> Tensor:
    assert isinstance(weight, QuantizedTensor)
    return weight.detach().dequantize()


def batch(seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, IN, generator=generator), torch.randn(6, OUT, generator=generator)


def step(layer: Linear, around: Any, seed: int = 5, backward_around: Any = None) -> list[Tensor]:
    """Output and gradients."""
    layer.zero_grad()
    x, dy = batch(seed)
    x.requires_grad_()
    with around:
        y = layer(x)
    torch.manual_seed(1)
    with backward_around or nullcontext():
        y.backward(dy)
    assert x.grad is not None and layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad, *([] if layer.bias is None else [layer.bias.grad])]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert type(a) is Tensor and torch.equal(a, b), number


# ---- the start -------------------------------------------------------------------------------------------------------


@each_once
@each_recipe
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values(name: str, dtype: torch.dtype) -> None:
    """The cast of what the high-precision layer starts with, and the same random numbers afterwards."""
    layer = quantized_linear(RECIPES[name], dtype=dtype)
    after = torch.rand(1)
    twin = plain_linear(dtype=dtype)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(values(layer.weight), cast(twin.weight, RECIPES[name]).dequantize())
    assert torch.equal(layer.bias, twin.bias) and type(layer.bias) is nn.Parameter
    assert qweight(layer).dtype == dtype and layer.weight.requires_grad
    plan = layer._config(RECIPES[name])
    assert qweight(layer).quantizer.row_format == plan.weight.row_format
    assert qweight(layer).get_high_precision_init_val() is None


def test_preserved_initial_values() -> None:
    with quantized_model_init(recipe="current", preserve_high_precision_init_val=True):
        torch.manual_seed(0)
        layer = Linear(IN, OUT)
    kept = qweight(layer).get_high_precision_init_val()
    assert kept is not None and torch.equal(kept, plain_linear().weight) and kept.device.type == "cpu"
    qweight(layer).clear_high_precision_init_val()
    assert qweight(layer).get_high_precision_init_val() is None


def test_preserved_values_are_those_of_the_codes() -> None:
    """Drawn again, also where the first ones had no memory; gone when something else is written."""
    with quantized_model_init(recipe="current", preserve_high_precision_init_val=True):
        layer, late, other = Linear(IN, OUT), Linear(IN, OUT, device="meta"), Linear(IN, OUT)
    assert qweight(late).get_high_precision_init_val() is None
    late.to_empty(device="cpu")
    for each in (layer, late):
        torch.manual_seed(7)
        each.reset_parameters()
        kept = qweight(each).get_high_precision_init_val()
        assert kept is not None and torch.equal(kept, plain_linear(7).weight)
    other.load_state_dict(layer.state_dict())
    assert qweight(other).get_high_precision_init_val() is None


def test_which_modules() -> None:
    """Switched off inside another context, and not where the layer's recipe is none or leaves weights alone."""
    weights_stay = CustomRecipe(lambda role: Quantizer.identity())
    with quantized_model_init(recipe="mxfp8"):
        with quantized_model_init(enabled=False):
            off = Linear(IN, OUT)
        with quantized_model_init(recipe="none"):
            high = Linear(IN, OUT)
        none, norm, on = Linear(IN, OUT, recipe="none"), nn.LayerNorm(8), Linear(IN, OUT)
    with quantized_model_init(recipe=weights_stay):
        stays = Linear(IN, OUT)
    assert all(type(m.weight) is nn.Parameter for m in (off, high, none, norm, stays, Linear(IN, OUT)))
    assert isinstance(on.weight, QuantizedTensor)
    with pytest.raises(ValueError, match="fp7"), quantized_model_init(recipe="fp7"):
        pass
    with quantized_model_init(recipe="mxfp8"), pytest.raises(ValueError, match="float64"):
        Linear(IN, OUT, dtype=torch.float64)


# ---- what is computed ------------------------------------------------------------------------------------------------


@each_once
@each_recipe
@pytest.mark.parametrize("torch_autocast", [False, True])
def test_without_recipe(name: str, torch_autocast: bool) -> None:
    """``F.linear`` on the dequantized weight, to the bit, gradients too."""
    layer = quantized_linear(RECIPES[name])
    reference = nn.Linear(IN, OUT)
    with torch.no_grad():
        reference.weight.copy_(values(layer.weight))
        reference.bias.copy_(layer.bias)
    around = torch.autocast("cpu", torch.bfloat16) if torch_autocast else nullcontext()
    x, dy = batch()
    x.requires_grad_()
    with around:
        y = F.linear(x, reference.weight, reference.bias)
    y.backward(dy.to(y.dtype))
    expected = [y.detach(), x.grad, reference.weight.grad, reference.bias.grad]
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if torch_autocast else nullcontext():
        z = layer(x)
    z.backward(dy.to(z.dtype))
    assert_same([z.detach(), x.grad, layer.weight.grad, layer.bias.grad], expected)  # type: ignore[list-item]


@each_recipe
def test_under_its_recipe(name: str) -> None:
    """As a layer that casts its weight: the same operands, which are not cast again."""
    recipe = RECIPES[name]
    layer, twin = quantized_linear(recipe), plain_linear()
    if name == "delayed":
        twin._config(recipe)
        twin.forward_scaling.scale[1:2] = scale_of(twin.weight)
    assert_same(step(layer, autocast(recipe=recipe)), step(twin, autocast(recipe=recipe)))


@each_once
@each_recipe
@pytest.mark.parametrize("other", RECIPES)
def test_under_another_recipe(name: str, other: str) -> None:
    """The operand itself where the GEMMs can take it, else a cast of its value; the gradients are those of either."""
    layer, recipe = quantized_linear(RECIPES[name]), RECIPES[other]
    before = values(layer.weight).clone()
    with count_gemms() as gemms:
        found = step(layer, autocast(recipe=recipe))
    formats = {g.gemm: g.b for g in gemms}
    own, wanted = (layer._config(r).weight for r in (RECIPES[name], recipe))
    pairs = name == other or {name, other} in ({"delayed", "current"}, {"mxfp8", "mxfp6"})  # a code a byte
    pairs |= {name, other} < {"mxfp4", "w4a8", "block"} and (name, other) != ("block", "mxfp4")
    used = own if pairs else wanted
    assert formats["fprop"] == used.row_format.spec
    assert formats["dgrad"] == used.format(0).spec
    assert torch.equal(values(layer.weight), before)
    twin = plain_linear()
    with torch.no_grad():
        twin.weight.copy_(before)
        twin.bias.copy_(layer.bias)
    if pairs:
        twin.weight = nn.Parameter(cast(plain_linear().weight, RECIPES[name]))
    elif other == "delayed":
        twin._config(recipe)
    assert_same(found, step(twin, autocast(recipe=recipe)))


@each_once
@each_recipe
@pytest.mark.parametrize("forward", [True, False])
def test_forward_and_backward_inside_and_outside(name: str, forward: bool) -> None:
    """Where backward runs does not matter."""
    recipe = RECIPES[name]
    around: Callable[[], Any] = (lambda: autocast(recipe=recipe)) if forward else nullcontext
    results = [
        step(quantized_linear(recipe), around(), backward_around=inside)
        for inside in (None, autocast(recipe=recipe), autocast(recipe="current"), autocast(enabled=False))
    ]
    for found in results[1:]:
        assert_same(found, results[0])


@each_recipe
def test_frozen_and_evaluation(name: str) -> None:
    layer = quantized_linear(RECIPES[name])
    layer.requires_grad_(False)
    x = batch()[0].requires_grad_()
    with autocast(recipe=RECIPES[name]):
        y = layer(x)
    y.sum().backward()
    assert x.grad is not None and layer.weight.grad is None
    with torch.no_grad(), autocast(recipe=RECIPES[name]):
        evaluated = layer(x)  # delayed scaling has a scale for x by now
        assert torch.equal(evaluated, y) or name == "delayed"
    with torch.inference_mode(), autocast(recipe=RECIPES[name]):
        assert torch.equal(layer(x), evaluated)
    with torch.no_grad():
        assert torch.equal(layer(x), F.linear(x, values(layer.weight), layer.bias))


@each_recipe
def test_microbatches(name: str) -> None:
    """The kept weight is the parameter itself, and follows its writes."""
    recipe = RECIPES[name]
    layer = quantized_linear(recipe)
    x, _ = batch()
    for other in (recipe, RECIPES["mxfp8"]):
        with autocast(recipe=other):
            y = layer(x)
            assert torch.equal(layer(x, is_first_microbatch=True), y)
            assert torch.equal(layer(x, is_first_microbatch=False), y)
        with torch.no_grad():
            layer.weight.mul_(-0.5)
        with autocast(recipe=other):
            z = layer(x, is_first_microbatch=False)
            assert torch.equal(z, layer(x)) and not torch.equal(z, y)


@each_once
@each_recipe
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_split(name: str, bias: bool) -> None:
    """Each part is quantized by itself; the layer multiplies their values as one."""
    recipe = RECIPES[name]
    layer = quantized_linear(recipe, parameters_split={"query": 16, "rest": OUT - 16}, bias=bias)
    whole = plain_linear(bias=bias).weight
    assert torch.equal(values(layer.query_weight), cast(whole[:16], recipe).dequantize())
    x, dy = batch()
    for around in (nullcontext(), autocast(recipe=recipe)):
        layer.zero_grad()
        with around:
            y = layer(x)
        torch.manual_seed(1)
        y.backward(dy)
        twin = plain_linear(bias=bias)
        with torch.no_grad():
            twin.weight.copy_(torch.cat([values(layer.query_weight), values(layer.rest_weight)]))
        if name == "delayed":
            twin._config(recipe)
            twin.forward_scaling.scale.copy_(initial_scale(recipe, twin))
        with autocast(recipe=recipe) if around.__class__ is autocast else nullcontext():
            z = twin(x)
        torch.manual_seed(1)
        z.backward(dy)
        if name != "delayed" or around.__class__ is not autocast:
            assert torch.equal(y, z)
            assert twin.weight.grad is not None
            assert torch.equal(torch.cat([layer.query_weight.grad, layer.rest_weight.grad]), twin.weight.grad)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = values(layer.rest_weight).clone()
    optimizer.step()
    assert not torch.equal(values(layer.rest_weight), before)


def initial_scale(recipe: Recipe, layer: Linear) -> Tensor:
    scale = torch.ones(3)
    scale[1:2] = scale_of(layer.weight)
    return scale


# ---- writes ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


# ---- delayed scaling -------------------------------------------------------------------------------------------------


def test_delayed_scaling_by_hand() -> None:
    """The operand's amax is recorded where it is used, and a write casts with the scale that earlier amaxes gave."""
    layer = quantized_linear(DELAYED)
    history, scale = torch.zeros(4), scale_of(plain_linear().weight)
    optimizer = torch.optim.SGD([layer.weight], lr=1.0)
    held = plain_linear().weight.detach().clone()
    amax = held.abs().max()
    for number in range(6):
        assert torch.equal(layer.forward_scaling.scale[1:2], scale), number
        step(layer, autocast(recipe=DELAYED), seed=number)
        history = torch.cat([history[1:], amax.reshape(1)])
        history[0] = 0
        scale = torch.full((1,), 448.0) / amax
        assert torch.equal(layer.forward_scaling.amax_history[:, 1], history), number
        assert torch.equal(layer.forward_scaling.scale[1:2], scale), number
        with torch.no_grad():
            fresh = values(layer.weight) - layer.weight.grad  # type: ignore[operator]
        optimizer.step()
        amax = fresh.abs().max()
        held = (fresh * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale.reciprocal()
        assert torch.equal(values(layer.weight), held), number


COPIES: dict[str, Callable[[Linear], Linear]] = {
    "to": lambda layer: layer.to(torch.bfloat16).to(torch.float32),
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "to_empty": lambda layer: layer.to_empty(device="cpu").requires_grad_(),
    "load": lambda layer: loaded(quantized_linear(DELAYED, seed=9), layer.state_dict()),
    "file": lambda layer: loaded(quantized_linear(DELAYED, seed=9), through_file(layer.state_dict())),
    "assign": lambda layer: loaded(quantized_linear(DELAYED, seed=9), copy.deepcopy(layer.state_dict()), assign=True),
}


def loaded(layer: Linear, state: dict[str, Any], **options: Any) -> Linear:
    layer.load_state_dict(state, **options)
    return layer


def through_file(state: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("how", [how for how in COPIES if how != "to_empty"])
def test_the_scale_stays_the_layers(how: str) -> None:
    """After a copy, a move or a load the weight is cast with the delayed scale of the layer that it is in."""
    layer = quantized_linear(DELAYED)
    twin = copy.deepcopy(layer)
    for number in range(2):
        step(layer, autocast(recipe=DELAYED), seed=number)
        step(twin, autocast(recipe=DELAYED), seed=number)
    moved = COPIES[how](layer)
    with torch.no_grad():
        twin.bias.copy_(moved.bias)  # rounded by "to"
    assert torch.equal(values(moved.weight), values(twin.weight))
    for number in range(2, 5):
        assert_same(step(moved, autocast(recipe=DELAYED), number), step(twin, autocast(recipe=DELAYED), number))
        scale = qweight(moved).scale
        assert scale is not None and scale.data_ptr() == moved.forward_scaling.scale[1:2].data_ptr()
        for each in (moved, twin):
            with torch.no_grad():
                each.weight.mul_(1.5)
        assert torch.equal(values(moved.weight), values(twin.weight)), number


@pytest.mark.parametrize("how", [how for how in COPIES if how != "to_empty"])
def test_the_scale_is_right_before_the_next_forward(how: str) -> None:
    """An optimizer that steps at once after a load writes with the layer's scale."""
    layer = quantized_linear(DELAYED)
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        step(each, autocast(recipe=DELAYED))
        with torch.no_grad():
            each.forward_scaling.scale.mul_(0.5)
    moved = COPIES[how](layer)
    scale = qweight(moved).scale
    if how != "assign":  # assigned buffers come after the weight; the next forward binds it
        assert scale is not None and scale.data_ptr() == moved.forward_scaling.scale[1:2].data_ptr()
    for each in (moved, twin):
        with torch.no_grad():
            each.weight.mul_(1.5)
    assert torch.equal(values(moved.weight), values(twin.weight))


@each_once
@each_recipe
@pytest.mark.parametrize("strict", [True, False])
def test_loading_high_precision(name: str, strict: bool) -> None:
    """Values a thousand times as large are not clipped: they come with a scale of their own."""
    layer, source = quantized_linear(RECIPES[name]), plain_linear(seed=7)
    step(layer, autocast(recipe=RECIPES[name]))
    with torch.no_grad():
        source.weight.mul_(1000)
    layer.load_state_dict(source.state_dict(), strict=strict)
    assert torch.equal(values(layer.weight), cast(source.weight, RECIPES[name]).dequantize())
    assert torch.equal(layer.bias, source.bias)
    least = (
        0.8 if name in ("mxfp4", "w4a8") else 0.9
    )  # E2M1 has nothing between 4 and 6, and its scale is a power of two
    assert values(layer.weight).abs().max() > least * source.weight.abs().max()


def _large(layer: Linear, factor: float = 1000.0) -> dict[str, Tensor]:
    """The state of a layer whose weight is ``factor`` times as large."""
    with torch.no_grad():
        layer.load_state_dict({**layer.state_dict(), "weight": layer.weight.dequantize() * factor})
    return layer.state_dict()


@each_once
@each_recipe
@pytest.mark.parametrize("own", [False, True])
def test_loading_quantized_values_of_another_recipe(name: str, own: bool) -> None:
    """Delayed scaling casts them with the scale of these values, not with that of what was there."""
    state = _large(quantized_linear(RECIPES[name], seed=7))
    layer = quantized_linear(DELAYED, own=own)
    step(layer, autocast(recipe=DELAYED))
    layer.load_state_dict(state)
    source = values(state["weight"])
    expected = source if name == "delayed" else cast(source, DELAYED).dequantize()
    assert torch.equal(values(layer.weight), expected)
    assert values(layer.weight).abs().max() > 0.9 * source.abs().max() > 100
    with torch.no_grad():
        layer.weight.mul_(1.0)
    assert values(layer.weight).abs().max() > 0.9 * source.abs().max()


@pytest.mark.parametrize("stepped", [False, True])
def test_loading_codes_without_their_histories(stepped: bool) -> None:
    """The scale of the next write is that of the loaded values, and activations start anew."""
    state = _large(quantized_linear(DELAYED, seed=7))
    state = {key: value for key, value in state.items() if "scaling" not in key}
    layer = quantized_linear(DELAYED)
    if stepped:
        step(layer, autocast(recipe=DELAYED))
    layer.load_state_dict(state)
    assert layer.forward_scaling.scale.tolist()[::2] == [1.0, 1.0] and not layer.forward_scaling.amax_history.any()
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(values(state["weight"])))
    with torch.no_grad():
        layer.weight.mul_(1.0)
    torch.testing.assert_close(values(layer.weight), values(state["weight"]))


@pytest.mark.parametrize("quantized", [False, True])
def test_loading_parts_that_share_a_scale(quantized: bool) -> None:
    """The largest of them counts, whichever comes last."""
    split: dict[str, Any] = {"parameters_split": {"query": 16, "key": 8}}
    source = quantized_linear(named("current"), **split) if quantized else plain_linear(**split)
    with torch.no_grad():
        source.query_weight.mul_(1000.0)
    layer = quantized_linear(DELAYED, seed=3, **split)
    layer.load_state_dict(source.state_dict())
    for part in ("query_weight", "key_weight"):
        wanted, query = (w.dequantize() if quantized else w for w in (getattr(source, part), source.query_weight))
        largest = query.detach().abs().max()
        expected = cast(wanted, DELAYED, scale_of(largest.reshape(1, 1))).dequantize()
        assert torch.equal(values(getattr(layer, part)), expected), part


def test_loading_a_part_of_the_model_keeps_the_histories() -> None:
    """Those of a layer whose weight is not loaded."""
    layer = quantized_linear(DELAYED)
    step(layer, autocast(recipe=DELAYED))
    before = [buffer.clone() for buffer in layer.buffers()]
    layer.load_state_dict({"bias": torch.zeros(OUT)}, strict=False)
    assert_same(before, list(layer.buffers()))


def test_a_weight_of_another_shape_leaves_scales_and_histories() -> None:
    """PyTorch refuses it: the layer goes on with its own weight and thus needs the scale of that."""
    layer = quantized_linear(DELAYED)
    step(layer, autocast(recipe=DELAYED))
    before = [tensor.clone() for tensor in (*layer.buffers(), layer.weight.dequantize())]
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"weight": 100 * torch.randn(OUT + 1, IN)}, strict=False)
    layer.weight.detach().mul_(1.0)
    assert_same(before, [*layer.buffers(), layer.weight.dequantize()])


# ---- on meta ----


def _on_meta(kind: str) -> Linear:
    if kind == "plain":
        with torch.device("meta"):
            return Linear(IN, OUT, recipe=DELAYED)
    with torch.device("meta"), quantized_model_init(recipe=DELAYED):
        return Linear(IN, OUT, recipe=DELAYED)


@pytest.mark.parametrize("kind", ["plain", "quantized"])
@pytest.mark.parametrize("way", ["to_empty", "assign", "to_empty twice"])
def test_a_plain_checkpoint_on_meta(way: str, kind: str) -> None:
    """What a checkpoint lacks is reset, wherever its memory comes from."""
    source = plain_linear(seed=3) if kind == "plain" else quantized_linear(DELAYED, seed=3)
    state = {key: value for key, value in source.state_dict().items() if "scaling" not in key}
    layer = _on_meta(kind)
    if way != "assign":
        layer.to_empty(device="cpu")
        assert layer.forward_scaling.scale.tolist() == [1.0, 1.0, 1.0]
    if way == "to_empty twice":
        layer.to_empty(device="cpu")
    layer.load_state_dict(copy.deepcopy(state), assign=way == "assign")
    twin = Linear(IN, OUT, recipe=DELAYED) if kind == "plain" else quantized_linear(DELAYED, own=True)
    twin.load_state_dict(state)
    for number in range(2):
        assert_same(step(layer, nullcontext(), number), step(twin, nullcontext(), number))
        assert_same(list(layer.buffers()), list(twin.buffers()))
    assert layer.weight.isfinite().all() and all(buffer.isfinite().all() for buffer in layer.buffers())


def test_buffers_on_meta_are_refused() -> None:
    """Where a weight came in another way than by a checkpoint."""
    layer = _on_meta("plain")
    assert layer(torch.empty(3, IN, device="meta")).is_meta
    layer.weight, layer.bias = nn.Parameter(torch.ones(OUT, IN)), nn.Parameter(torch.ones(OUT))
    with pytest.raises(ValueError, match=r"buffers of delayed scaling are on meta.*to_empty"):
        layer(torch.randn(3, IN))


@pytest.mark.parametrize("other", ["current", "mxfp8"])
def test_a_delayed_weight_under_another_recipe(other: str) -> None:
    """It is computed on as it is, and its scale and history stay."""
    layer = quantized_linear(DELAYED)
    before = [buffer.clone() for buffer in layer.buffers()]
    step(layer, autocast(recipe=other))
    assert all(torch.equal(a, b) for a, b in zip(before, layer.buffers(), strict=True))
    with torch.no_grad():
        layer.weight.mul_(0.5)
    expected = (plain_linear().weight.detach() * scale_of(plain_linear().weight)).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(
        values(layer.weight), expected / scale_of(plain_linear().weight) * 0.5, rtol=0.07, atol=1e-4
    )


def test_a_current_weight_under_delayed_scaling() -> None:
    """The recipe has a scale and a history for the weight, which a weight that is not cast leaves alone."""
    layer = quantized_linear(RECIPES["current"])
    for number in range(2):
        step(layer, autocast(recipe=DELAYED), number)
    assert layer.forward_scaling.scale[1] == 1 and not layer.forward_scaling.amax_history[:, 1].any()
    assert layer.forward_scaling.scale[0] != 1
    assert qweight(layer).scale is None


def test_margin() -> None:
    recipe = DelayedScaling(margin=2)
    layer = quantized_linear(recipe)
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(plain_linear().weight, 2))
    source = plain_linear(seed=3)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(source.weight, 2))
    with autocast(recipe="current"):
        layer(batch()[0])
    layer.load_state_dict(plain_linear(seed=4).state_dict())
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(plain_linear(seed=4).weight, 2))


# ---- copies and checkpoints ------------------------------------------------------------------------------------------


@each_once
@each_recipe
@pytest.mark.parametrize("own", [False, True])
def test_meta(name: str, own: bool) -> None:
    """Made on the meta device, given memory, initialized: the values of a layer made on the CPU."""
    layer = quantized_linear(RECIPES[name], own=own, device="meta")
    assert isinstance(layer.weight, QuantizedTensor) and layer.weight.is_meta
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    twin = quantized_linear(RECIPES[name], own=own)
    assert torch.equal(values(layer.weight), values(twin.weight)) and torch.equal(layer.bias, twin.bias)
    around = nullcontext() if own else autocast(recipe=RECIPES[name])
    assert_same(step(layer, around), step(twin, nullcontext() if own else autocast(recipe=RECIPES[name])))
    for a, b in zip(layer.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


# ---- tied embeddings -------------------------------------------------------------------------------------------------


@each_once
@each_recipe
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw foreach"])
def test_tied_embedding(name: str, quantized: bool, optimizer: str) -> None:
    """One parameter looks up rows and is multiplied: both gradients add up in it, and it is written once."""
    recipe = RECIPES[name]
    with quantized_model_init(enabled=quantized, recipe=recipe):
        torch.manual_seed(0)
        head = Linear(IN, OUT, bias=False)
    embedding = nn.Embedding(OUT, IN)
    embedding.weight = head.weight
    tokens = torch.tensor([[1, 5, 5], [0, 23, 7]])
    rows = values(head.weight) if quantized else head.weight.detach()
    assert torch.equal(embedding(tokens), rows[tokens])
    with autocast(recipe=recipe):
        y = head(torch.tanh(embedding(tokens)))
    torch.manual_seed(1)
    y.square().sum().backward()

    twin = copy.deepcopy(head)
    twin.zero_grad()
    for buffer in twin.modules():
        if hasattr(buffer, "amax_history"):
            buffer.reset_parameters()  # type: ignore[operator]
    if name == "delayed" and quantized:
        twin.forward_scaling.scale[1:2] = qweight(quantized_linear(recipe, bias=False)).scale
    looked_up = rows.clone().requires_grad_()
    with autocast(recipe=recipe):
        z = twin(torch.tanh(F.embedding(tokens, looked_up)))
    torch.manual_seed(1)
    z.square().sum().backward()
    assert torch.equal(y, z)
    torch.testing.assert_close(head.weight.grad, twin.weight.grad + looked_up.grad)  # type: ignore[operator]
    before = values(head.weight).clone() if quantized else head.weight.detach().clone()
    OPTIMIZERS[optimizer]([*{*embedding.parameters(), *head.parameters()}]).step()
    assert embedding.weight is head.weight
    after = values(head.weight) if quantized else head.weight
    assert not torch.equal(after, before) and torch.equal(embedding(tokens), after[tokens])
    assert len(list(nn.ModuleList([embedding, head]).parameters())) == 1


# ---- writing between forward and backward ----------------------------------------------------------------------------


WRITES: dict[str, Callable[[Linear], object]] = {
    "mul_": lambda layer: layer.weight.mul_(0),
    "add_": lambda layer: layer.weight.add_(1),
    "copy_": lambda layer: layer.weight.copy_(torch.randn(OUT, IN)),
    "copy_quantized": lambda layer: layer.weight.copy_(copy.deepcopy(layer.weight)),
    "setitem": lambda layer: layer.weight.__setitem__(0, 1.0),
    "rows": lambda layer: layer.weight[:OUT].zero_(),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight], 0.5),
    "foreach_copy": lambda layer: torch._foreach_copy_([layer.weight], [torch.randn(OUT, IN)]),
    "quantize_": lambda layer: qweight(layer).quantize_(torch.randn(OUT, IN)),
    "quantize_all_": lambda layer: quantize_all_([qweight(layer)], [torch.randn(OUT, IN)]),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": torch.randn(OUT, IN)}, strict=False),
    "sgd": lambda layer: (setattr(layer.weight, "grad", torch.ones(OUT, IN)), sgd_step(layer)),
    "inference_mode": lambda layer: torch.inference_mode()(qweight(layer).mul_)(0),
}


def sgd_step(layer: Linear) -> None:
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


@each_once
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_forward_and_backward_is_noticed(name: str, write: str) -> None:
    """As ``nn.Linear`` does, rather than a dX of the wrong weight."""
    layer = quantized_linear(RECIPES[name], bias=False)
    x, dy = batch()
    y = layer(x.requires_grad_())
    with torch.no_grad():
        WRITES[write](layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)
    layer(x).backward(dy)
    assert x.grad is not None


# ---- writes of larger values under delayed scaling ----


def _assign(layer: Linear, new: Tensor) -> None:
    with pytest.warns(UserWarning, match="rounds what is assigned"):
        layer.weight.data = new


COPIES_OF_VALUES: dict[str, Callable[[Linear, Tensor], Any]] = {
    "copy_": lambda layer, new: layer.weight.copy_(new),
    "data": lambda layer, new: layer.weight.data.copy_(new),
    "assigned": _assign,
    "index": lambda layer, new: layer.weight.__setitem__(slice(None), new),
    "view": lambda layer, new: layer.weight.view(-1).copy_(new.view(-1)),
    "transposed": lambda layer, new: layer.weight.t().copy_(new.t()),
    "foreach": lambda layer, new: torch._foreach_copy_([layer.weight], [new]),
    "other codes": lambda layer, new: layer.weight.copy_(cast(new, RECIPES["mxfp8"])),
}


@torch.no_grad()
@pytest.mark.parametrize("way", COPIES_OF_VALUES)
def test_a_copy_of_larger_values_takes_their_scale(way: str) -> None:
    """They saturated, by 74 % of those of ``orthogonal_``; smaller ones leave the scale as it is."""
    layer, new = quantized_linear(DELAYED), 50 * torch.randn(OUT, IN)
    held = qweight(layer).scale
    COPIES_OF_VALUES[way](layer, new)
    if way == "other codes":
        new = values(cast(new, RECIPES["mxfp8"]))
    assert qweight(layer).scale is held and torch.equal(layer.forward_scaling.scale[1:2], scale_of(new))
    assert torch.equal(values(layer.weight), values(cast(new, DELAYED)))
    COPIES_OF_VALUES[way](layer, new / 3)
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(new))
    layer.weight.copy_(values(layer.weight) * 0 + 448 / scale_of(new))  # what codes stand for may be an ulp above
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(new))


@pytest.mark.gpu
@torch.no_grad()
def test_a_copy_does_not_wait_for_the_device() -> None:
    layer, new = quantized_linear(DELAYED, device="cuda"), 50 * torch.randn(OUT, IN, device="cuda")
    layer.weight.copy_(new)  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.weight.copy_(2 * new)
        layer.weight.normal_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(layer.forward_scaling.scale[1:2].cpu(), scale_of(2 * new.cpu()))


INITS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda w: nn.init.normal_(w, std=7.0),
    "uniform_": lambda w: nn.init.uniform_(w, -9.0, 0.5),
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=0.0, nonlinearity="selu"),
    "xavier_normal_": lambda w: nn.init.xavier_normal_(w, gain=20.0),
    "constant_": lambda w: nn.init.constant_(w, -7.0),
    "sparse_": lambda w: nn.init.sparse_(w, 0.5, std=3.0),
}


@pytest.mark.parametrize("name", INITS)
def test_initializations_do_not_saturate(name: str) -> None:
    layer, plain = quantized_linear(DELAYED), torch.empty(OUT, IN)
    for weight in (layer.weight, plain):
        torch.manual_seed(1)
        INITS[name](weight)
    error = (values(layer.weight) - plain).abs()
    assert bool((error <= 2**-4 * plain.abs() + 2**-9 * plain.abs().max()).all())
    assert torch.equal(layer.forward_scaling.scale[1:2], scale_of(plain))


def test_orthogonal_initialization() -> None:
    """It draws in ``new_empty``, and multiplies by the gain in place."""
    with quantized_model_init(recipe=DELAYED):
        layer = Linear(OUT, IN, bias=False, recipe=DELAYED)
    nn.init.orthogonal_(layer.weight, gain=3.0)
    w = values(layer.weight)  # type: ignore[arg-type]
    torch.testing.assert_close(w.t() @ w / 9, torch.eye(OUT), rtol=0.05, atol=0.05)


@torch.no_grad()
def test_arithmetic_keeps_the_delayed_scale() -> None:
    """That of optimizers, on whose scale ranks agree; and so does what they write by ``quantize_``."""
    layer = quantized_linear(DELAYED)
    before = layer.forward_scaling.scale.clone()
    layer.weight.add_(1.0).mul_(0.5).addcmul_(torch.ones(OUT, IN), torch.full((OUT, IN), 9.0))
    qweight(layer).quantize_(50 * torch.randn(OUT, IN))
    assert torch.equal(layer.forward_scaling.scale, before)


@torch.no_grad()
def test_rows_of_larger_values_are_refused_where_the_rest_would_change() -> None:
    layer = quantized_linear(DELAYED)
    before = [layer.forward_scaling.scale.clone(), values(layer.weight)]
    with pytest.raises(NotImplementedError, match=r"share its scale.*whole\[rows\] = values"):
        layer.weight[:8].copy_(torch.full((8, IN), 9.0))
    assert_same(before, [layer.forward_scaling.scale, values(layer.weight)])
    layer.weight.zero_()
    layer.weight[:8].copy_(torch.full((8, IN), 9.0))
    assert layer.weight[:8].dequantize().unique().item() == pytest.approx(9.0)


@torch.no_grad()
@pytest.mark.parametrize("make", ["new_zeros", "new_empty", "clone", "deepcopy"])
def test_tensors_made_of_a_weight_leave_its_scale(make: str) -> None:
    layer, new = quantized_linear(DELAYED), 50 * torch.randn(OUT, IN)
    weight, before = qweight(layer).detach(), layer.forward_scaling.scale.clone()
    made = (
        getattr(weight, make)(OUT, IN)
        if make.startswith("new")
        else {"clone": torch.clone}.get(make, copy.deepcopy)(weight)
    )
    made[:].copy_(new)
    assert torch.equal(made.dequantize(), values(cast(new, DELAYED))) and torch.equal(
        layer.forward_scaling.scale, before
    )


@torch.no_grad()
def test_parts_that_share_a_scale() -> None:
    """A part of larger values moves the scale; the codes of the other keep that with which they were cast."""
    with quantized_model_init(recipe=DELAYED):
        layer = Linear(IN, 2 * OUT, bias=False, recipe=DELAYED, parameters_split=("first", "second"))
    first, second, new = layer.first_weight, layer.second_weight, 50 * torch.randn(OUT, IN)
    before = values(second)  # type: ignore[arg-type]
    first.copy_(new)
    assert torch.equal(values(first), values(cast(new, DELAYED))) and torch.equal(values(second), before)  # type: ignore[arg-type]
    x = torch.randn(5, IN)
    y = layer(x)
    whole = torch.cat([values(first), before])  # type: ignore[arg-type]
    torch.testing.assert_close(y, x @ whole.t(), rtol=0.1, atol=40.0)


@pytest.mark.parametrize("values", [[1.0], None, torch.ones(16, 16, dtype=torch.int32)])
def test_data_that_is_no_tensor_of_values_is_refused(values: Any) -> None:
    with quantized_model_init(recipe="current"):
        weight = Linear(16, 16).weight
    before = weight.dequantize()  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"data is set to .*; a floating-point tensor is needed"):
        weight.data = values
    assert torch.equal(weight.dequantize(), before)  # type: ignore[operator]


@each_recipe
def test_assigning_data(name: str) -> None:
    """``weight.data = values``, ``+=`` and ``vector_to_parameters`` quantize into the memory of the codes."""
    layer = quantized_linear(RECIPES[name])
    weight, codes = qweight(layer), qweight(layer).operands.any.codes

    def rounded(v: Tensor) -> Tensor:
        return values(cast(v, RECIPES[name], weight.scale))

    new = 0.5 * values(weight).detach().flip(0)
    weight.data = new
    assert qweight(layer) is weight and weight.operands.any.codes is codes
    assert torch.equal(values(weight), rounded(new))
    weight.data += 0.01
    assert torch.equal(values(weight), rounded(rounded(new) + 0.01))
    nn.utils.vector_to_parameters(torch.cat([new.flatten(), torch.zeros(OUT)]), [weight, layer.bias])
    assert torch.equal(values(weight), rounded(new)) and not layer.bias.any()
    for wrong, match in ((torch.zeros(2, 3), r"shape \(2, 3\)"), (torch.zeros(OUT, IN, device="meta"), "meta")):
        with pytest.raises(ValueError, match=match):
            weight.data = wrong
    assert torch.equal(values(weight.data), rounded(new)) and not weight.data.requires_grad


def test_safetensors_name_the_way_out(tmp_path: Path) -> None:
    with quantized_model_init(recipe="nvfp4"):
        layers = [Linear(64, 32, name="up"), GroupedLinear(2, 64, 32)]
    for layer, name in zip(layers, ("Linear 'up'", r"GroupedLinear\(2, 64, 32\)"), strict=True):
        with pytest.raises(
            ValueError, match=rf"^{name}: its weight of shape \(32, 64\) in e2m1/.*t.dequantize\(\).*torch.save"
        ):
            save_file(layer.state_dict(), tmp_path / "refused")
        values = {k: t.dequantize() if isinstance(t, QuantizedTensor) else t for k, t in layer.state_dict().items()}
        save_file(values, tmp_path / "values")
        layer.load_state_dict(load_file(tmp_path / "values"))
        assert all(torch.equal(t.dequantize(), values[k]) for k, t in layer.state_dict().items() if "weight" in k)
