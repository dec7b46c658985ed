"""``MultiheadAttention`` against a float64 model, and against its own parts run by hand under every recipe."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from minifloat import MultiheadAttention, RotaryPositionEmbedding, apply_rotary_pos_emb, autocast
from minifloat.functional import count_gemms
from minifloat.quantizer import Quantizer
from minifloat.recipe import CustomRecipe, QuantizerRole, as_recipe
from tests.helpers import transformer_model as model
from tests.helpers.count_casts import CountCasts

RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
HIDDEN, HEADS, LENGTH, BATCH, KEYS = 24, 4, 7, 3, 5
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "attention_dropout": 0.0}
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ALL = torch.ones(1, 1, dtype=torch.bool)


def randomized(module: nn.Module) -> nn.Module:
    """Biases and the parameters of norms start as constants: other values show which is which."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return module


def angles(length: int, dim: int, interleaved: bool = False) -> Tensor:
    return RotaryPositionEmbedding(dim, rotary_base=10.0, interleaved=interleaved)(length)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in module.named_parameters()}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    error = float((actual.detach().double() - expected.detach()).abs().max())
    bound = tolerance * max(1.0, float(expected.detach().abs().max()))
    assert error <= bound, f"{what} is off by {error:.2e}, more than {bound:.2e}"


def assert_all_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def step(module: nn.Module, x: Tensor, recipe: str | None = None, **call: Any) -> dict[str, Tensor]:
    """Output and all gradients of one forward and backward."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    with autocast(enabled=recipe is not None, recipe=recipe or "current"):
        y = module(x, **call)
    torch.manual_seed(6)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    assert x.grad is not None
    found = {"output": y.detach(), "input": x.grad}
    return found | {name: grad.clone() for name, grad in gradients(module).items() if grad is not None}


# ---- without a recipe, against float64 ----

WINDOW = CAUSAL & ~CAUSAL.tril(-3)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Tensor]] = {
    # options of the module, of the call, and which keys each query sees
    "self": ({}, {}, CAUSAL),
    "one parameter": ({"fuse_qkv_params": True}, {}, CAUSAL),
    "gqa": ({"num_gqa_groups": 2}, {}, CAUSAL),
    "multi query": ({"num_gqa_groups": 1}, {}, CAUSAL),
    "no bias": ({"bias": False}, {}, CAUSAL),
    "wide heads": ({"kv_channels": 10, "num_gqa_groups": 2}, {}, CAUSAL),
    "no mask": ({"attn_mask_type": "no_mask"}, {}, ALL),
    "mask of the call": ({}, {"attn_mask_type": "no_mask"}, ALL),
    "window": ({"window_size": (2, 0)}, {}, WINDOW),
    "window of the call": ({}, {"window_size": (2, 0)}, WINDOW),
    "scale and softcap": ({"softmax_scale": 0.7, "softcap": 1.5}, {}, CAUSAL),
    "layer norm": ({"input_layernorm": True, "layernorm_epsilon": 0.1}, {}, CAUSAL),
    "rms norm": ({"input_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True}, {}, CAUSAL),
    "rms norm of heads": ({"qk_norm_type": "RMSNorm", "qk_norm_eps": 0.1, "num_gqa_groups": 2}, {}, CAUSAL),
    "layer norm of heads": ({"qk_norm_type": "LayerNorm"}, {}, CAUSAL),
    "rope": ({"num_gqa_groups": 2}, {"rotary_pos_emb": angles(LENGTH + 2, 6)}, CAUSAL),
    "part of the channels": ({}, {"rotary_pos_emb": angles(LENGTH, 4)}, CAUSAL),
    "interleaved": ({"rotary_pos_interleaved": True}, {"rotary_pos_emb": angles(LENGTH, 6, True)}, CAUSAL),
    "two ropes": ({}, {"rotary_pos_emb": (angles(LENGTH, 6), angles(LENGTH, 6) * 0.3)}, CAUSAL),
    "norm, then rope": (
        {"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True},
        {"rotary_pos_emb": angles(LENGTH, 6)},
        CAUSAL,
    ),
    "rope, then norm": ({"qk_norm_type": "LayerNorm"}, {"rotary_pos_emb": angles(LENGTH, 6)}, CAUSAL),
    "checkpointed attention": ({"num_gqa_groups": 2}, {"checkpoint_core_attention": True}, CAUSAL),
}


def reference(
    options: dict[str, Any], module: nn.Module, x: Tensor, kept: Tensor, call: dict[str, Any], encoder: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Y of the float64 model, and its leaves: the module's parameters, and X, the encoder's output and the bias."""
    leaves = model.parameters_of(module)
    given = {"input": x, "encoder": encoder, "bias": call.get("core_attention_bias")}
    inputs = {name: t.detach().double().requires_grad_() for name, t in given.items() if t is not None}
    turned = call.get("rotary_pos_emb")
    turned = (turned, turned) if isinstance(turned, Tensor) else turned
    y, _ = model.multihead_attention(
        leaves, options, inputs["input"], kept, inputs.get("encoder"), turned, inputs.get("bias")
    )
    return y, leaves | inputs


def compare(
    options: dict[str, Any],
    kept: Tensor,
    call: dict[str, Any] | None = None,
    encoder: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-5,
) -> None:
    """Output and all gradients of a module of these options against the float64 model."""
    call = call or {}
    options = SIZES | options
    module = randomized(MultiheadAttention(**options, params_dtype=dtype))
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=dtype, requires_grad=True)
    y = module(x, encoder_output=encoder, **call)
    assert y.dtype == dtype
    expected, leaves = reference(options, module, x, kept, call, encoder)
    assert_near(y, expected, tolerance, "output")
    dy = torch.randn_like(y)
    y.backward(dy)
    expected.backward(dy.double())
    actual = gradients(module) | {"input": x.grad}
    if encoder is not None:
        actual["encoder"] = encoder.grad
    if "core_attention_bias" in call:
        actual["bias"] = call["core_attention_bias"].grad
    assert actual.keys() == leaves.keys()
    for name, grad in actual.items():
        wanted = leaves[name].grad
        assert grad is not None and wanted is not None, name
        assert_near(grad, wanted, tolerance, f"gradient of {name}")


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_a_float64_model(case: str) -> None:
    options, call, kept = CASES[case]
    compare(options, kept, call)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_cross_attention(fused: bool, norm: bool) -> None:
    encoder = torch.randn(KEYS, BATCH, HIDDEN, requires_grad=True)
    options = {"attention_type": "cross", "attn_mask_type": "no_mask", "num_gqa_groups": 2, "input_layernorm": norm}
    call = {"rotary_pos_emb": (angles(LENGTH, 6), angles(KEYS, 6))}
    compare(options | {"fuse_qkv_params": fused}, ALL, call, encoder)


def test_padding_arbitrary_mask_and_bias() -> None:
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [3], [5]])
    kept = ~padding[:, None, None, :] & ~padding[:, None, :, None]
    compare({"attn_mask_type": "padding"}, kept, {"attention_mask": padding[:, None, None]})
    lengths = {"cu_seqlens_q": torch.tensor([0, LENGTH, LENGTH + 3, LENGTH + 8])}
    compare({"attn_mask_type": "padding_causal"}, kept & CAUSAL, lengths)
    masked = torch.rand(BATCH, HEADS, LENGTH, LENGTH) < 0.4
    compare({"attn_mask_type": "arbitrary"}, ~masked, {"attention_mask": masked})
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, requires_grad=True)
    compare({}, CAUSAL, {"core_attention_bias": bias, "checkpoint_core_attention": True})


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_one_parameter_or_three_are_the_same_bits(recipe: str | None) -> None:
    options = SIZES | {"num_gqa_groups": 2, "input_layernorm": True}
    whole = MultiheadAttention(**options, fuse_qkv_params=True)
    parts = MultiheadAttention(**options)
    rows = (HIDDEN, HIDDEN // 2, HIDDEN // 2)
    names = [(kind, [f"qkv.linear.{part}_{kind}" for part in ("query", "key", "value")]) for kind in ("weight", "bias")]
    state = whole.state_dict()
    for kind, split in names:
        state |= dict(zip(split, state.pop(f"qkv.linear.{kind}").split(rows), strict=True))
    parts.load_state_dict(state)
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    for _ in range(2):  # the second step of delayed scaling has other scales
        expected, found = step(whole, x, recipe), step(parts, x, recipe)
        for kind, split in names:
            found[f"qkv.linear.{kind}"] = torch.cat([found.pop(name) for name in split])
        assert_all_equal(found, expected)


def test_formats_are_layouts_of_the_same_numbers() -> None:
    options = SIZES | {"qk_norm_type": "RMSNorm", "num_gqa_groups": 2}
    layers = {fmt: MultiheadAttention(**options, qkv_format=fmt) for fmt in ("sbhd", "bshd", "thd")}
    for layer in layers.values():
        layer.load_state_dict(layers["sbhd"].state_dict())
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    turned = angles(LENGTH, 6)
    y = layers["sbhd"](x, rotary_pos_emb=turned)
    torch.testing.assert_close(layers["bshd"](x.transpose(0, 1), rotary_pos_emb=turned), y.transpose(0, 1))
    lengths = (LENGTH, 3, 5)
    packed = torch.cat([x[:n, i] for i, n in enumerate(lengths)]).requires_grad_()
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for given in ({"cu_seqlens_q": starts}, {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}):
        out = layers["thd"](packed, rotary_pos_emb=turned, **given)
        torch.testing.assert_close(out, torch.cat([y[:n, i] for i, n in enumerate(lengths)]))
    dy = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, packed, dy)
    for i, n in enumerate(lengths):  # each sequence alone
        alone = x[:n, i : i + 1].clone().requires_grad_()
        begin, end = int(starts[i]), int(starts[i + 1])
        layers["sbhd"](alone, rotary_pos_emb=turned).backward(dy[begin:end, None])
        assert alone.grad is not None
        torch.testing.assert_close(alone.grad[:, 0], grad[begin:end])


def test_returned_bias_and_norm_result() -> None:
    layer = randomized(
        MultiheadAttention(**SIZES, return_bias=True, return_layernorm_output=True, input_layernorm=True)
    )
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    y, bias, normalized = layer(x)
    assert torch.equal(bias, layer.proj.bias)
    assert torch.equal(normalized, layer.qkv.norm(x))
    expected, n = model.multihead_attention(
        model.parameters_of(layer), SIZES | {"input_layernorm": True}, x.double(), CAUSAL
    )
    assert_near(y + bias, expected, 2e-5, "output and bias")
    assert_near(normalized, n, 2e-5, "norm's result")
    without = MultiheadAttention(**SIZES, return_bias=True, bias=False)
    assert without(x)[1] is None


# ---- under recipes ----


def by_hand(layer: MultiheadAttention, x: Tensor, turned: Tensor) -> Tensor:
    """The parts one after the other."""
    q, k, v = layer.qkv.linear(layer.qkv.norm(x)).split((HIDDEN, HIDDEN // 2, HIDDEN // 2), -1)
    q = apply_rotary_pos_emb(q.unflatten(-1, (HEADS, 6)), turned)
    k = apply_rotary_pos_emb(k.unflatten(-1, (HEADS // 2, 6)), turned)
    return layer.proj(layer.core_attention(q, k, v.unflatten(-1, (HEADS // 2, 6))))


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    # By hand, delayed scaling gets what the norm gives after it was rounded to bf16.
    [(name, torch.float32) for name in RECIPES] + [(name, torch.bfloat16) for name in RECIPES if name != "delayed"],
)
def test_it_is_its_parts_one_after_the_other(recipe: str, dtype: torch.dtype) -> None:
    layer = MultiheadAttention(**SIZES, num_gqa_groups=2, input_layernorm=True, params_dtype=dtype)
    copied = copy.deepcopy(layer)
    turned = angles(LENGTH, 6)
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=dtype, requires_grad=True)
    for _ in range(3):
        found = step(layer, x, recipe, rotary_pos_emb=turned)
        copied.forward = lambda x: by_hand(copied, x, turned)
        assert_all_equal(found, step(copied, x, recipe))


@pytest.mark.parametrize("fused", [False, True])
def test_one_cast_of_the_input_serves_query_key_and_value(fused: bool) -> None:
    layer = MultiheadAttention(**SIZES, num_gqa_groups=2, fuse_qkv_params=fused, recipe="current")
    with CountCasts() as casts, count_gemms() as gemms:
        y = layer(torch.randn(LENGTH, BATCH, HIDDEN))
    rows = LENGTH * BATCH
    assert casts.shapes == Counter([(rows, HIDDEN), (2 * HIDDEN, HIDDEN), (rows, HIDDEN), (HIDDEN, HIDDEN)])
    with CountCasts() as casts, count_gemms() as backward:
        y.sum().backward()
    assert casts.shapes == Counter([(rows, 2 * HIDDEN), (rows, HIDDEN)])
    expected = as_recipe("current").expected_gemms()
    assert {(g.gemm, g.a, g.b): n for g, n in gemms.items()} == {("fprop", *expected["fprop"]): 2}
    # X needs no gradient: one dgrad, of proj.
    counted = {(g.gemm, g.a, g.b): n for g, n in backward.items()}
    assert counted == {("dgrad", *expected["dgrad"]): 1, ("wgrad", *expected["wgrad"]): 2}


def test_names_reach_recipes_and_errors() -> None:
    asked: list[QuantizerRole] = []

    def factory(role: QuantizerRole) -> Quantizer:
        asked.append(role)
        return Quantizer.identity()

    x = torch.randn(LENGTH, BATCH, HIDDEN)
    with autocast(recipe=CustomRecipe(factory)):
        MultiheadAttention(**SIZES, name="m", input_layernorm=True)(x)
        MultiheadAttention(**SIZES, name="c", attention_type="cross")(x, encoder_output=x)
        MultiheadAttention(**SIZES)(x)
    assert {role.name for role in asked} == {"m.qkv", "m.proj", "c.query", "c.key_value", "c.proj", "qkv", "proj"}
    with pytest.raises(ValueError, match=r"'c\.key_value'.*in_features=24"):
        MultiheadAttention(**SIZES, name="c", attention_type="cross")(x, encoder_output=x[..., 1:])
    with pytest.raises(ValueError, match=r"'m\.qkv'.*in_features=24"):
        MultiheadAttention(**SIZES, name="m")(x[..., 1:])
    with pytest.raises(ValueError, match="layer 3"):
        MultiheadAttention(**SIZES, layer_number=3)(x, attention_mask=CAUSAL)


def plain_twin(linear: Any) -> nn.Linear:
    twin = nn.Linear(linear.in_features, linear.out_features)
    with torch.no_grad():
        twin.weight.copy_(linear._weight_matrix())
        twin.bias.copy_(linear._bias_vector())
    return twin


@pytest.mark.parametrize("returns", [False, True])
def test_replaced_linears(returns: bool) -> None:
    """As adapters do: what replaced a linear takes X only, and gives Y only."""
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    for kind, encoder in (("self", None), ("cross", torch.randn(KEYS, BATCH, HIDDEN))):
        layer = MultiheadAttention(**SIZES, attention_type=kind, return_bias=returns, attn_mask_type="no_mask")
        randomized(layer)
        expected = layer(x, encoder_output=encoder)
        for name in ("qkv", "query", "key_value", "proj"):
            if hasattr(layer, name):
                setattr(layer, name, plain_twin(getattr(layer, name)))
        found = layer(x, encoder_output=encoder)
        if returns:  # what replaced proj adds its bias itself
            assert found[1] is None
            found, expected = found[0], expected[0] + expected[1]
        torch.testing.assert_close(found, expected)


def test_initial_values_and_gradient_accumulation() -> None:
    fill = {"init_method": lambda w: nn.init.constant_(w, 2.0), "output_layer_init_method": nn.init.ones_}
    layer = MultiheadAttention(**SIZES, **fill)
    assert all(bool((w == 2).all()) for w in (layer.qkv.query_weight, layer.qkv.key_weight, layer.qkv.value_weight))
    assert bool((layer.proj.weight == 1).all()) and not layer.proj.bias.any() and not layer.qkv.key_bias.any()
    del fill["output_layer_init_method"]
    cross = MultiheadAttention(**SIZES, **fill, attention_type="cross")
    weights = cross.query.weight, cross.key_value.key_weight, cross.key_value.value_weight, cross.proj.weight
    assert all(bool((w == 2).all()) for w in weights)
    with pytest.raises(ValueError, match="fuse_qkv_params=True"):
        MultiheadAttention(**SIZES, fuse_wgrad_accumulation=True)
    layer = MultiheadAttention(**SIZES, fuse_qkv_params=True, recipe="current")
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    expected = step(layer, x)
    fused = MultiheadAttention(**SIZES, fuse_qkv_params=True, fuse_wgrad_accumulation=True, recipe="current")
    fused.load_state_dict(layer.state_dict())
    for p in (fused.qkv.weight, fused.proj.weight):
        p.main_grad = torch.zeros_like(p)
    step(fused, x)
    for name in ("qkv", "proj"):
        weight = getattr(fused, name).weight
        assert weight.grad is None and torch.equal(weight.main_grad, expected[f"{name}.weight"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size=24 does not divide by 5 heads.*kv_channels"),
        ({"num_gqa_groups": 3}, "4 query heads do not divide into num_gqa_groups=3"),
        ({"return_layernorm_output": True}, "needs input_layernorm=True"),
        ({"recompute_norm": True}, "recompute_norm=True needs input_layernorm=True"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**(SIZES | options))


def test_bad_inputs() -> None:
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    layer, cross = MultiheadAttention(**SIZES), MultiheadAttention(**SIZES, attention_type="cross")
    with pytest.raises(ValueError, match=r"'self'.* takes no encoder_output"):
        layer(x, encoder_output=x)
    with pytest.raises(ValueError, match=r"'cross'.* needs encoder_output"):
        cross(x)
    with pytest.raises(ValueError, match="batch"):
        cross(x, encoder_output=x[:, 1:])
    with pytest.raises(ValueError, match="7 tokens but angles of 3"):
        layer(x, rotary_pos_emb=angles(3, 6))
    with pytest.raises(ValueError, match="cu_seqlens"):
        MultiheadAttention(**SIZES, qkv_format="thd")(x.flatten(0, 1))
    with pytest.raises(ValueError, match="sbhd of 4 heads"):
        layer(x[0])


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_parts_one_after_the_other_on_a_gpu(recipe: str | None) -> None:
    options = SIZES | {"hidden_size": 128, "num_gqa_groups": 2, "input_layernorm": True, "device": "cuda"}
    layer = MultiheadAttention(**options, params_dtype=torch.float32 if recipe == "delayed" else torch.bfloat16)
    copied = copy.deepcopy(layer)
    copied.qkv.norm.register_forward_hook(lambda *_: None)  # so that the parts are called one by one
    x = torch.randn(64, 4, 128, device="cuda", dtype=layer.proj.weight.dtype)
    turned = RotaryPositionEmbedding(32, device="cuda")(64)
    with sdpa_kernel(SDPBackend.MATH):  # the others' sums have no fixed order
        for _ in range(2):
            found = step(layer, x, recipe, rotary_pos_emb=turned)
            assert_all_equal(found, step(copied, x, recipe, rotary_pos_emb=turned))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "current"])
def test_packed_sequences_on_a_gpu_are_sequences_alone(recipe: str | None) -> None:
    """FlexAttention computes the packed form, SDPA each sequence alone."""
    options = SIZES | {"hidden_size": 128, "num_gqa_groups": 2, "device": "cuda", "params_dtype": torch.bfloat16}
    packed = MultiheadAttention(**options, qkv_format="thd")
    alone = MultiheadAttention(**options, qkv_format="bshd")
    alone.load_state_dict(packed.state_dict())
    lengths = (100, 1, 27)
    starts = torch.tensor([0, *lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(lengths), 128, device="cuda", dtype=torch.bfloat16)
    turned = RotaryPositionEmbedding(32, device="cuda")(100)
    found = step(packed, x, recipe, cu_seqlens_q=starts, rotary_pos_emb=turned)["output"]
    with autocast(enabled=recipe is not None, recipe="current"):
        expected = torch.cat([alone(part[None], rotary_pos_emb=turned)[0] for part in x.split(lengths)])
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < (0.02 if recipe is None else 0.1)
