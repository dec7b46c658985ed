"""Experts of transformers that are kept as one tensor each: converted, trained, and themselves again afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat.convert import DefaultFilter, convert, load_mxfp4, revert, save_mxfp4
from minifloat.convert.experts import attached
from minifloat.functional import count_gemms
from minifloat.recipe import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.helpers.experts import IDS, NAMES, E, F, H, Loop, block, experts_only, gpt_oss, inputs, mixtral, qwen3, train
from tests.helpers.sample import each_once, each_twice, first_by_default

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

MODELS = pytest.mark.parametrize("make", [mixtral, qwen3, gpt_oss])
NVFP4 = NVFP4BlockScaling(disable_stochastic_rounding=True)  # whose draws would be in another order
PLAIN = minifloat.CustomRecipe(lambda role: minifloat.Quantizer.identity())
RECIPES = pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8", NVFP4])


def gradients(module: nn.Module, x: Tensor, *tensors: Tensor) -> dict[str, Tensor]:
    """Those of parameters and inputs, which are then forgotten."""
    held = dict(module.named_parameters()) | {"x": x} | {str(i): t for i, t in enumerate(tensors)}
    found = {name: t.grad for name, t in held.items() if t.grad is not None}
    for t in held.values():
        t.grad = None
    return found


@each_twice
@MODELS
@RECIPES
def test_as_a_loop_over_linears(make: Callable[[], Any], recipe: Any) -> None:
    """Outputs and all gradients, bit for bit; the second step has delayed scales of the first."""
    experts = block(make)
    loop = Loop(experts, recipe)
    experts_only(nn.ModuleDict({"experts": experts}), recipe, rules=[("experts.*", recipe)])
    for _ in range(2):
        x, index, weights = inputs()
        own_x, own_weights = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
        y, expected, dy = experts(x, index, weights), loop(own_x, index, own_weights), torch.randn(23, H)
        assert torch.equal(y, expected)
        y.backward(dy), expected.backward(dy)
        assert x.grad is not None and own_x.grad is not None
        torch.testing.assert_close(x.grad, own_x.grad)  # the sum over a token's experts is in another order
        torch.testing.assert_close(weights.grad, own_weights.grad)  # likewise that over the columns
        for name, parameter in experts.named_parameters():
            assert torch.equal(parameter.grad, loop.stacked(name, experts.is_transposed)), name
            assert parameter.grad.stride() == parameter.stride()
        assert not experts.gate_up_proj.grad[E - 1].any() and experts.gate_up_proj.grad[0].any()
        experts.zero_grad(), loop.zero_grad()


@MODELS
def test_without_a_recipe(make: Callable[[], Any]) -> None:
    """Without a recipe in force the forward is transformers' own; with one in high precision it is close."""
    experts = block(make)
    twin = copy.deepcopy(experts)
    model = nn.ModuleDict({"experts": experts})
    assert len(convert(model, None, lambda module, name: True).converted) == 2
    x, index, weights = inputs()
    expected = twin(x, index, weights)
    expected.sum().backward()
    of_twin = gradients(twin, x, weights)
    assert torch.equal(experts(x, index, weights), expected)
    assert not torch.equal(expected, run_in_autocast(experts, x, index, weights))

    convert(model, PLAIN, lambda module, name: True)
    y = experts(x, index, weights)
    y.sum().backward()
    torch.testing.assert_close(y, expected)
    found = gradients(experts, x, weights)
    assert found.keys() == of_twin.keys()
    for name in found:
        torch.testing.assert_close(found[name], of_twin[name], rtol=1e-4, atol=1e-4)


def test_experts_of_other_ranks() -> None:
    """transformers' expert parallelism gives E for them; a number that no rank can mean is refused."""
    experts = block(mixtral)
    twin, (x, index, weights) = copy.deepcopy(experts), inputs()
    convert(nn.ModuleDict({"experts": experts}), PLAIN, lambda module, name: True)
    index[::2, 0] = E
    weights = torch.where(index == E, 0, weights)
    torch.testing.assert_close(experts(x, index, weights), twin(x, index, weights))
    index[3, 1] = E + 1
    with pytest.raises(ValueError, match=r"gate_up_proj.*1 of the indices \(23, 2\).*first 5 at \[3, 1\]; give 0 to 3"):
        experts(x, index, weights)


def run_in_autocast(experts: nn.Module, *args: Tensor) -> Tensor:
    with minifloat.autocast(recipe="current"), torch.no_grad():
        y: Tensor = experts(*args)
    return y


@each_once
@MODELS
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_converts_trains_and_reverts(make: Callable[[], Any], recipe: str) -> None:
    """Parameters stay the same objects, an optimizer lowers the loss, and revert gives the classes back."""
    model = make()
    keys, parameters = list(model.state_dict()), list(model.named_parameters())
    kinds, attributes = [type(module) for module in model.modules()], set(vars(model.model.layers[0].mlp.experts))
    report = convert(model, recipe, DefaultFilter(model, smallest=16))
    assert set(NAMES) < {name for layer in report.converted for name in layer.names}
    shapes = {layer.names[0]: (layer.num_experts, layer.shape) for layer in report.converted}
    assert shapes[NAMES[0]] == (E, (2 * F, H)) and shapes[NAMES[1]] == (E, (H, F))
    now = list(model.named_parameters())
    assert [name for name, _ in now] == [name for name, _ in parameters]
    assert all(a is b for (_, a), (_, b) in zip(now, parameters, strict=True))
    extra = set(model.state_dict()) - set(keys)
    assert (
        (not extra and list(model.state_dict()) == keys) if recipe == "current" else all("scaling" in k for k in extra)
    )
    routers = [layer for layer in report.left_alone if layer.kind.endswith("TopKRouter")]
    assert len(routers) == 2 and all(layer.reason.startswith("not a linear") for layer in routers)

    losses = train(model, 20)
    assert losses[-1] < 0.6 * losses[0]

    revert(model)
    assert [type(module) for module in model.modules()] == kinds and list(model.state_dict()) == keys
    assert set(vars(model.model.layers[0].mlp.experts)) == attributes
    twin = make()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(IDS).logits, twin(IDS).logits)
    assert train(model, 2) == train(twin, 2)


# ---- what is converted ----


def test_rules_and_filters() -> None:
    """Rules and filters know each projection by its name; what is not converted stays in high precision."""
    model = mixtral()
    seen: dict[str, tuple[int, int]] = {}

    def wanted(module: Any, name: str) -> bool:
        seen[name] = module.out_features, module.in_features
        return "experts.gate_up" in name

    rules = [("*.0.mlp.experts.down_proj", "mxfp8"), ("*.1.mlp.experts.gate_up_proj", "none"), ("*.gate_down", "none")]
    report = convert(model, "current", wanted, rules)
    assert seen[NAMES[0]] == (2 * F, H) and NAMES[1] not in seen and seen[NAMES[3]] == (H, F)
    recipes = {layer.names[0]: type(layer.recipe) for layer in report.converted}
    assert recipes == {NAMES[0]: Float8CurrentScaling, NAMES[1]: MXFP8BlockScaling}
    left = {layer.names[0]: (layer.kind, layer.shape, layer.num_experts, layer.reason) for layer in report.left_alone}
    assert left[NAMES[2]] == ("MixtralExperts", (2 * F, H), E, "rule '*.1.mlp.experts.gate_up_proj'")
    assert left[NAMES[3]] == ("MixtralExperts", (H, F), E, "filter_fn")
    assert [type(layer.mlp.experts).__name__ for layer in model.model.layers] == [
        "GroupedMixtralExperts",
        "MixtralExperts",
    ]
    assert len(report.warnings) == 2 and "gate_down" in report.warnings[0] and "engines merge" in report.warnings[1]

    report = convert(model, "current", lambda module, name: name == NAMES[3])
    experts = model.model.layers[1].mlp.experts
    assert type(model.model.layers[0].mlp.experts).__name__ == "MixtralExperts"
    assert [layer.names[0] for layer in report.converted] == [NAMES[3]]
    with minifloat.autocast(recipe="mxfp8"), count_gemms() as gemms, torch.no_grad():
        experts(*inputs())
    assert {(gemm.a, gemm.b) for gemm in gemms} == {("identity", "identity"), ("e4m3/tensor/fp32", "e4m3/tensor/fp32")}


def test_default_filter() -> None:
    """By default small sides, and experts outside of the blocks, are left alone."""
    with pytest.warns(UserWarning, match="nothing was converted"):
        report = convert(qwen3(), None)
    reasons = {layer.names[0]: layer.reason for layer in report.left_alone if layer.num_experts}
    assert reasons == dict.fromkeys(NAMES, "a side below 256 is too small to gain")
    model = mixtral()
    with pytest.warns(UserWarning, match="nothing was converted"):
        report = convert(model, None, DefaultFilter(model, smallest=40))
    assert not report.converted and report.fraction == 0
    report = convert(model, "current", DefaultFilter(model, smallest=16), rules=[("*self_attn*", "none")])
    assert [layer.names[0] for layer in report.converted] == NAMES
    held = 2 * E * 3 * F * H / sum(parameter.numel() for parameter in model.parameters())
    assert report.fraction == held and f"{100 * held:.1f} %" in str(report)
    assert "model.layers.*.mlp.experts.down_proj     2 times  4 x 32 x 48  Float8CurrentScaling" in str(report)
    kept = convert(model, "mxfp8", lambda module, name: name == NAMES[3], quantize_weights=True)
    assert kept.converted[0].quantized_weight and kept.fraction == held / 6  # one of two blocks' down_proj, a third


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: delattr(e, "is_transposed"), "do not say how they compute, as those of transformers 5 do"),
        (lambda e: setattr(e, "has_gate", False), "no gate"),
        (lambda e: setattr(e, "has_post_expert_norm", True), "a norm of their own"),
        (lambda e: setattr(e, "_is_expert_parallel", True), "split over ranks"),
        (lambda e: setattr(e, "has_bias", True), "expected are gate_up_proj, down_proj, gate_up_proj_bias"),
        (lambda e: setattr(e, "num_experts", 3), "do not fit together: 3 experts"),
        (lambda e: setattr(e, "is_transposed", True), "do not fit together"),
        (lambda e: e.double(), "torch.float64"),
        (lambda e: setattr(e, "forward", e.forward), "forward was replaced on the object"),
        (lambda e: nn.utils.parametrize.register_parametrization(e, "down_proj", nn.Identity()), "parametrize"),
        (lambda e: setattr(e, "__class__", type("Own", (type(e),), {"forward": lambda *a: a[1]})), "Own has a forward"),
    ],
)
def test_experts_that_stay(change: Callable[[Any], object], reason: str) -> None:
    model = mixtral()
    experts = model.model.layers[1].mlp.experts
    change(experts)
    kind = type(experts)
    report = experts_only(model, "current")
    assert [layer.names[0] for layer in report.converted] == NAMES[:2] and type(experts) is kind
    (found,) = [layer for layer in report.left_alone if layer.names == ("model.layers.1.mlp.experts",)]
    assert found.reason.startswith("experts that cannot be converted: ") and reason in found.reason
    assert found.kind == kind.__name__ and "gate_up_proj [4, 96, 32]" in found.reason


@each_once
@MODELS
@RECIPES
def test_quantized_weights(make: Callable[[], Any], recipe: Any) -> None:
    """Each expert gets a parameter of its own, whose operands are those of a cast in each forward; and back."""
    model = make()
    twin, keys = copy.deepcopy(model), [(name, p.shape) for name, p in model.named_parameters()]
    with minifloat.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        report = experts_only(model, recipe)
    experts_only(twin, recipe)
    assert not report.warnings and all(layer.quantized_weight for layer in report.converted)
    experts, others = (each.model.layers[0].mlp.experts for each in (model, twin))
    if recipe == "delayed":  # whose scale is that of the values at first
        for mine, theirs in zip((experts.gate_up_linear, experts.down_linear), attached(others), strict=True):
            theirs.forward_scaling.scale.copy_(mine.forward_scaling.scale)
    x, index, weights = inputs()
    found = []
    for each in (experts, others):
        y = each(x, index, weights)
        y.square().sum().backward()
        found.append((y.detach(), gradients(each, x, weights)))
    (y, mine), (expected, theirs) = found
    assert torch.equal(y, expected) and torch.equal(mine["x"], theirs["x"])
    for name, child in (("gate_up_proj", "gate_up_linear"), ("down_proj", "down_linear")):
        stacked = torch.stack([mine[f"{child}.{i}.weight"] for i in range(E)])
        assert torch.equal(stacked.mT if experts.is_transposed else stacked, theirs[name])
    experts_only(model, recipe)
    assert dict(model.named_modules()).keys() == dict(twin.named_modules()).keys()
    revert(model), revert(twin)
    assert [(name, p.shape) for name, p in model.named_parameters()] == keys
    assert all(map(torch.equal, model.state_dict().values(), twin.state_dict().values()))


@MODELS
def test_checkpoints_of_quantized_weights(make: Callable[[], Any]) -> None:
    """Weights of transformers load, codes load where experts are one parameter; without a recipe values compute."""
    model, other, plain = make(), make(), make()
    experts_only(model, "mxfp8", quantize_weights=True)
    model.load_state_dict(plain.state_dict())
    experts_only(other, "mxfp8")
    other.load_state_dict(plain.state_dict())
    assert torch.equal(model(IDS).logits, other(IDS).logits)
    plain.load_state_dict(other.state_dict())
    experts_only(plain, "mxfp8")
    plain.load_state_dict(model.state_dict())  # values of codes, which are cast to them again
    assert torch.equal(plain(IDS).logits, model(IDS).logits)
    for layer in model.modules():
        if isinstance(layer, minifloat.GroupedLinear):
            layer.recipe = "none"
    revert(plain)
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)


def test_bytes_of_gpt_oss() -> None:
    model = gpt_oss()
    experts_only(model, "w4a8", quantize_weights=True)
    linear = model.model.layers[0].mlp.experts.gate_up_linear
    blocks, scales = torch.randint(256, (E, 2 * F, 1, 16), dtype=torch.uint8), torch.randint(120, 130, (E, 2 * F, 1))
    load_mxfp4(linear, blocks, scales.to(torch.uint8))
    assert all(map(torch.equal, save_mxfp4(linear), (blocks, scales)))
    values = linear.get_parameter("1.weight").dequantize()
    revert(model)
    assert torch.equal(model.model.layers[0].mlp.experts.gate_up_proj[1], values.t())


# ---- the state of a conversion ----


def test_checkpoints() -> None:
    """Histories are saved and loaded; those that a checkpoint lacks beside the weights start anew."""
    model, other = mixtral(), mixtral()
    unquantized = model.state_dict()
    experts_only(model, "delayed")
    train(model, 2)
    convert(other, None, lambda module, name: ".experts." in name)  # no histories yet
    other.load_state_dict(model.state_dict())
    with minifloat.autocast(recipe="delayed"), torch.no_grad():
        logits = other.eval()(IDS).logits
    assert torch.equal(logits, model.eval()(IDS).logits)
    history = model.model.layers[1].mlp.experts.gate_up_linear.forward_scaling
    assert history.amax_history.any()
    model.load_state_dict(unquantized)
    assert not history.amax_history.any() and torch.equal(history.scale, torch.ones_like(history.scale))


@each_once
@MODELS
@pytest.mark.parametrize(
    ("recipe", "options"), [("current", {}), ("delayed", {"context_fn": minifloat.checkpoint_context_fn})]
)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
def test_gradient_checkpointing(make: Callable[[], Any], recipe: str, options: dict[str, Any]) -> None:
    """The same gradients, bit for bit, and amaxes that are recorded once."""
    model = make()
    experts_only(model, recipe)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})
    for _ in range(2):
        for each in (model, twin):
            each.train()
            each(input_ids=IDS, labels=IDS).loss.backward()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b)


@MODELS
def test_bf16(make: Callable[[], Any]) -> None:
    """In bf16, and in fp32 under torch.autocast, outputs have the dtype of the input."""
    experts = block(make)
    convert(nn.ModuleDict({"experts": experts}), None, rules=[("*", "current")])
    x, index, weights = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, index, weights)
    y.sum().backward()
    assert y.dtype == torch.float32 and all(parameter.grad is not None for parameter in experts.parameters())
    y = experts.bfloat16()(x.bfloat16(), index, weights.bfloat16())
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and experts.down_proj.grad.dtype == torch.bfloat16


@first_by_default
@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_compiled_in_one_graph(make: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    experts = block(make)
    convert(nn.ModuleDict({"experts": experts}), None, rules=[("*", "current")])
    twin = copy.deepcopy(experts)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x, index, weights = inputs()
    for each in (experts, compiled):
        each(x, index, weights).square().sum().backward()
    for a, b in zip(experts.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
