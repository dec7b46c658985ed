"""``TransformerLayer`` against a float64 model, against its parts run by hand, and in all that training does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from minifloat import (
    Linear,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
)
from minifloat.functional import count_gemms
from minifloat.functional.norm_activation import activate
from minifloat.quantizer import Quantizer
from minifloat.recipe import CustomRecipe, QuantizerRole, as_recipe
from tests.helpers import transformer_model as model
from tests.helpers.fused_model import norm_on_stream
from tests.helpers.sample import each_once

RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")
HIDDEN, FFN, HEADS, LENGTH, BATCH, KEYS = 32, 48, 4, 6, 3, 5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "ffn_hidden_size": FFN,
    "num_attention_heads": HEADS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {
    "num_gqa_groups": 2,
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "bias": False,
    "attn_input_format": "bshd",
}
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
ALL = torch.ones(1, 1, dtype=torch.bool)


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch.compiler.reset()


def randomized(layer: TransformerLayer) -> TransformerLayer:
    """Biases and the parameters of norms start as constants: other values show which is which."""
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return layer


def tokens(dtype: torch.dtype = torch.float32, length: int = LENGTH) -> Tensor:
    return torch.randn(length, BATCH, HIDDEN, dtype=dtype)


def assert_all_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def step(run: nn.Module | Callable[..., Tensor], layer: nn.Module, x: Tensor, recipe: Any = None, **call: Any) -> Any:
    """Output and all gradients of one forward and backward of ``layer`` through ``run``, from one seed."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    with autocast(enabled=recipe is not None, recipe=recipe or "current"):
        y = run(x, **call)
    torch.manual_seed(6)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    assert x.grad is not None
    found = {"output": y.detach(), "input": x.grad}
    return found | {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def float64_step(options: dict[str, Any], layer: nn.Module, x: Tensor, **call: Any) -> dict[str, Tensor]:
    """The same by the float64 model."""
    leaves = model.parameters_of(layer)
    x = x.detach().double().requires_grad_()
    y = model.transformer_layer(leaves, options, x, CAUSAL, **call)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).double())
    assert x.grad is not None
    found = {"output": y.detach(), "input": x.grad}
    return found | {name: p.grad for name, p in leaves.items() if p.grad is not None}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each error over that of the value; over 1 where that is less, as of biases that have no effect."""
    assert actual.keys() == expected.keys()
    return {name: float((actual[name].double() - e).norm() / max(1.0, float(e.norm()))) for name, e in expected.items()}


# ---- without a recipe, against float64 ----

CASES: dict[str, dict[str, Any]] = {
    "encoder": {},
    "rms norm, gqa, swiglu": LLAMA | {"attn_input_format": "sbhd"},
    "zero-centered": {"zero_centered_gamma": True, "layernorm_epsilon": 0.1},
    "wide heads": {"kv_channels": 12, "fuse_qkv_params": True},
    "norms of heads": {"qk_norm_type": "RMSNorm", "qk_norm_eps": 0.1},
    "scale and softcap": {"softmax_scale": 0.5, "softcap": 2.0},
    "parallel": {"parallel_attention_mlp": True, "activation": "relu"},
    "post": {"apply_residual_connection_post_layernorm": True},
    "parallel, post": {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
    "checkpointed": {"checkpoint_mlp": True},
    "decoder": {"layer_type": "decoder", "num_gqa_groups": 2},
    "decoder, post": {"layer_type": "decoder", "apply_residual_connection_post_layernorm": True},
    "normed late": {"output_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
    "normed late, post": {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
    "normed late, decoder": {"output_layernorm": True, "layer_type": "decoder", "save_memory": True},
}


def case(name: str, **more: Any) -> tuple[dict[str, Any], TransformerLayer, dict[str, Tensor], dict[str, Tensor]]:
    """Options, the layer, and what a call of it and of the float64 model take."""
    options = SIZES | CASES[name]
    layer = randomized(TransformerLayer(**options, **more))
    if options.get("layer_type") != "decoder":
        return options, layer, {}, {}
    encoder = tokens(length=KEYS)
    given = encoder.to(more.get("params_dtype", torch.float32))
    return options, layer, {"encoder_output": given}, {"encoder": encoder.double(), "kept_encoder": ALL}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_a_float64_model(name: str) -> None:
    options, layer, call, reference = case(name)
    x = tokens()
    found = errors(step(layer, layer, x, **call), float64_step(options, layer, x, **reference))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
def test_drop_path_drops_whole_samples(layout: str) -> None:
    """What it leaves grows by 1 / (1 - rate); attention and MLP are dropped each by itself, in training alone."""
    layer = randomized(TransformerLayer(**SIZES, attn_input_format=layout, drop_path_rate=0.75))
    x = torch.randn(LENGTH, 64, HIDDEN)
    x = (x if layout == "sbhd" else x.transpose(0, 1)).requires_grad_()
    with torch.no_grad():
        layer.layernorm_mlp.fc2.weight.zero_()
        layer.layernorm_mlp.fc2.bias.fill_(1.0)
    added = layer.eval()(x) - x - 1.0  # by attention
    y = layer.train()(x)
    y.sum().backward()
    batch = 1 if layout == "sbhd" else 0
    seen = set()
    for out, own, attended, grad in zip(*(t.unbind(batch) for t in (y, x, added, x.grad)), strict=True):
        fits = [(a, b) for a in (0, 4) for b in (0, 4) if torch.allclose(out, own + a * attended + b, atol=1e-4)]
        assert len(fits) == 1
        assert fits[0][0] or torch.equal(grad, torch.ones_like(grad))
        seen |= set(fits)
    assert len(seen) == 4


def test_torch_autocast_keeps_the_residual_stream_in_fp32() -> None:
    options, layer, _, _ = case("encoder")
    x = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        actual = step(layer, layer, x)
    assert all(t.dtype == torch.float32 for t in actual.values())
    found = errors(actual, float64_step(options, layer, x))
    assert max(found.values()) < 0.05, found


def test_rope_and_layouts() -> None:
    turned = RotaryPositionEmbedding(HIDDEN // HEADS, rotary_base=10.0)(LENGTH)
    layers = {fmt: TransformerLayer(**SIZES, attn_input_format=fmt) for fmt in ("sbhd", "bshd", "thd")}
    for layer in layers.values():
        layer.load_state_dict(layers["sbhd"].state_dict())
    x = tokens()
    y = layers["sbhd"](x, rotary_pos_emb=turned)
    expected = model.transformer_layer(
        model.parameters_of(layers["sbhd"]), SIZES, x.double(), CAUSAL, angles=(turned, turned)
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layers["bshd"](x.transpose(0, 1), rotary_pos_emb=turned), y.transpose(0, 1))
    lengths = (LENGTH, 2, 3)
    packed = torch.cat([x[:n, i] for i, n in enumerate(lengths)])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    out = layers["thd"](packed, rotary_pos_emb=turned, cu_seqlens_q=starts)
    torch.testing.assert_close(out, torch.cat([y[:n, i] for i, n in enumerate(lengths)]))


def test_packed_and_padded_decoder() -> None:
    """Targets and encoder outputs of other lengths, packed one behind the other or padded to the longest."""
    options = SIZES | {"layer_type": "decoder"}
    masks = {"self_attn_mask_type": "padding_causal", "enc_dec_attn_mask_type": "padding"}
    padded = TransformerLayer(**options, **masks)
    packed = TransformerLayer(**options, attn_input_format="thd")
    packed.load_state_dict(padded.state_dict())
    alone = TransformerLayer(**options)
    alone.load_state_dict(padded.state_dict())
    x, encoder = tokens(), tokens(length=KEYS)
    lengths, of_encoder = (LENGTH, 2, 3), (2, KEYS, 4)
    starts, starts_kv = (torch.tensor([0, *n]).cumsum(0) for n in (lengths, of_encoder))
    call = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts_kv}
    expected = [
        alone(x[:n, i : i + 1], encoder_output=encoder[:m, i : i + 1])[:, 0]
        for i, (n, m) in enumerate(zip(lengths, of_encoder, strict=True))
    ]
    y = padded(x, encoder_output=encoder, **call)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(y[:n, i], expected[i])
    rows = (torch.cat([t[:n, i] for i, n in enumerate(ns)]) for t, ns in ((x, lengths), (encoder, of_encoder)))
    torch.testing.assert_close(packed(next(rows), encoder_output=next(rows), **call), torch.cat(expected))


def test_windows_and_masks_reach_their_attention() -> None:
    layer = TransformerLayer(
        **SIZES, layer_type="decoder", window_size=(1, 0), enc_dec_window_size=(2, 3), bottom_right_diagonal=False,
        enc_dec_bottom_right_diagonal=True, self_attn_mask_type="no_mask", enc_dec_attn_mask_type="arbitrary",
    )  # fmt: skip
    assert layer.inter_attention is not None
    own, other = layer.self_attention.core_attention, layer.inter_attention.core_attention
    assert (own.window_size, own.bottom_right_diagonal, own.attn_mask_type) == ((1, 0), False, "no_mask")
    assert (other.window_size, other.bottom_right_diagonal, other.attn_mask_type) == ((2, 3), True, "arbitrary")
    options = SIZES | {"layer_type": "decoder", "self_attn_mask_type": "arbitrary"}
    layer = TransformerLayer(**options, enc_dec_attn_mask_type="arbitrary")
    x, encoder = tokens(), tokens(length=KEYS)
    mask, cross_mask = torch.rand(LENGTH, LENGTH) < 0.4, torch.rand(LENGTH, KEYS) < 0.4
    y = layer(x, mask, encoder_output=encoder, enc_dec_attn_mask=cross_mask)
    expected = model.transformer_layer(
        model.parameters_of(layer), options, x.double(), ~mask, encoder.double(), ~cross_mask
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


# ---- under recipes ----


def by_hand(layer: TransformerLayer, x: Tensor) -> Tensor:
    """A decoder's or encoder's parts one after the other, for X [s, b, hidden] and itself as encoder's output."""

    def attend(of: MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (-1, HIDDEN // HEADS)) for t in (q, k, v))
        return of.proj(of.core_attention(*heads))

    own, encoder = layer.self_attention, x
    x, n = norm_on_stream(own.qkv.norm, x)
    h = x + attend(own, *own.qkv.linear(n).chunk(3, -1))
    other, mlp = layer.inter_attention, layer.layernorm_mlp
    if other is not None:
        h, n = norm_on_stream(other.query.norm, h)
        h = h + attend(other, other.query.linear(n), *other.key_value(encoder).chunk(2, -1))
    h, n = norm_on_stream(mlp.norm, h)
    return h + mlp.fc2(activate(mlp.fc1(n), mlp.activation))


@each_once
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    # By hand, delayed scaling gets results of norms and activations after they were rounded to bf16.
    [(name, torch.float32) for name in RECIPES] + [(name, torch.bfloat16) for name in RECIPES if name != "delayed"],
)
def test_it_is_its_parts_one_after_the_other(recipe: str, dtype: torch.dtype, layer_type: str) -> None:
    layer = TransformerLayer(**SIZES, layer_type=layer_type, params_dtype=dtype)
    copied = copy.deepcopy(layer)

    def run(x: Tensor) -> Tensor:
        return layer(x, encoder_output=x) if layer_type == "decoder" else layer(x)

    x = tokens(dtype)
    for _ in range(2):
        assert_all_equal(step(run, layer, x, recipe), step(lambda x: by_hand(copied, x), copied, x, recipe))
    assert_all_equal(dict(layer.named_buffers()), dict(copied.named_buffers()))


@each_once
@pytest.mark.parametrize(("layer_type", "linears"), [("encoder", 4), ("decoder", 7)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gemms_of_a_step(recipe: str, layer_type: str, linears: int) -> None:
    layer = TransformerLayer(**SIZES, layer_type=layer_type, recipe=recipe)
    x, encoder = tokens().requires_grad_(), tokens(length=KEYS).requires_grad_()
    with count_gemms() as forward:
        y = layer(x, encoder_output=encoder if layer_type == "decoder" else None)
    with count_gemms() as backward:
        y.sum().backward()
    expected = as_recipe(recipe).expected_gemms()
    assert {(g.gemm, g.a, g.b): n for g, n in forward.items()} == {("fprop", *expected["fprop"]): linears}
    kinds = {(kind, *expected[kind]): linears for kind in ("dgrad", "wgrad")}
    assert {(g.gemm, g.a, g.b): n for g, n in backward.items()} == kinds


def test_a_part_may_have_a_recipe_of_its_own() -> None:
    layer = TransformerLayer(**SIZES)
    layer.self_attention.proj.recipe = "none"
    layer.layernorm_mlp.fc1.recipe = as_recipe("mxfp8")
    with count_gemms() as gemms:
        step(layer, layer, tokens(), "current")
    fprops = {(g.a, g.b): n for g, n in gemms.items() if g.gemm == "fprop"}
    mxfp8, current = (as_recipe(name).expected_gemms()["fprop"] for name in ("mxfp8", "current"))
    assert fprops == {current: 2, mxfp8: 1, ("identity", "identity"): 1}

    def choose(role: QuantizerRole) -> Quantizer:
        if role.name.endswith("proj") or ".layernorm_mlp." in role.name:
            return Quantizer.identity()
        return as_recipe("current").quantizer(role)

    named = TransformerLayer(**SIZES, layer_type="decoder", name="layers.0")
    with autocast(recipe=CustomRecipe(choose)), count_gemms() as gemms:
        named(tokens(), encoder_output=tokens())
    assert {(g.a, g.b): n for g, n in gemms.items()} == {current: 3, ("identity", "identity"): 4}


@pytest.mark.parametrize(("options", "prefix"), [({}, ""), ({"layer_number": 3}, "layer3."), ({"name": "a"}, "a.")])
def test_default_names(options: dict[str, Any], prefix: str) -> None:
    layer = TransformerLayer(**SIZES, layer_type="decoder", **options)
    attentions = "self_attention.qkv", "self_attention.proj", "inter_attention.query", "inter_attention.key_value"
    names = *attentions, "inter_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2"
    assert [m.name for m in layer.modules() if isinstance(m, Linear)] == [prefix + name for name in names]


def plain_twin(linear: Any) -> nn.Linear:
    twin = nn.Linear(linear.in_features, linear.out_features)
    with torch.no_grad():
        twin.weight.copy_(linear._weight_matrix())
        twin.bias.copy_(linear._bias_vector())
    return twin


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("post_norm", [False, True])
def test_replaced_parts(parallel: bool, post_norm: bool) -> None:
    """A linear, or the MLP where only Y is asked of it, may be any module that takes X and gives Y."""
    options = {"parallel_attention_mlp": parallel, "apply_residual_connection_post_layernorm": post_norm}
    layer = randomized(TransformerLayer(**SIZES, **options))
    x = tokens()
    expected = layer(x)
    attention: Any = layer.self_attention
    attention.qkv.linear, attention.proj = plain_twin(attention.qkv.linear), plain_twin(attention.proj)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x, is_first_microbatch=None), expected)
    if not post_norm:
        layer.layernorm_mlp = nn.Sequential(layer.layernorm_mlp)  # type: ignore[assignment]
        torch.testing.assert_close(layer(x), expected)


def test_weight_gradients_may_go_to_main_grad() -> None:
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation=True needs fuse_qkv_params=True"):
        TransformerLayer(**SIZES, fuse_wgrad_accumulation=True)
    plain = TransformerLayer(**SIZES, fuse_qkv_params=True)
    layer = TransformerLayer(**SIZES, fuse_qkv_params=True, fuse_wgrad_accumulation=True)
    layer.load_state_dict(plain.state_dict())
    x = tokens()
    expected = step(plain, plain, x, "mxfp8")
    weights = {name: p for name, p in layer.named_parameters() if p.dim() == 2}
    assert len(weights) == 4
    for p in weights.values():
        p.main_grad = torch.ones_like(p)
    found = step(layer, layer, x, "mxfp8")
    assert found.keys() == expected.keys() - weights.keys()
    assert_all_equal({n: p.main_grad for n, p in weights.items()}, {n: 1 + expected[n] for n in weights})


# ---- the life of a module ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_type": "decoder", "parallel_attention_mlp": True}, "for layer_type='encoder' only"),
        ({"num_attention_heads": 5}, "hidden_size=32 does not divide by 5 heads"),
        ({"num_gqa_groups": 3}, "4 query heads do not divide into num_gqa_groups=3"),
        ({"drop_path_rate": 0.1, "attn_input_format": "thd"}, "drop_path_rate=0.1 .*'thd'.* use 'sbhd' or 'bshd'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerLayer(**(SIZES | options))


def test_bad_inputs() -> None:
    encoder, decoder = TransformerLayer(**SIZES, name="l0"), TransformerLayer(**SIZES, layer_type="decoder", name="l1")
    x = tokens()
    with pytest.raises(ValueError, match=r"'encoder'.* takes no encoder_output"):
        encoder(x, encoder_output=x)
    with pytest.raises(ValueError, match=r"'decoder'.* needs encoder_output"):
        decoder(x)
    with pytest.raises(ValueError, match="must end in"):
        encoder(x[..., 1:])
    with autocast(recipe="current"), pytest.raises(ValueError, match=r"'l0\.self_attention\.qkv'.*in_features=32"):
        encoder(x[..., 1:])
    with pytest.raises(ValueError, match=r"'l1\.inter_attention\.key_value'.*in_features=32"):
        decoder(x, encoder_output=x[..., 1:])
    with pytest.raises(TypeError, match="seq_length"):
        TransformerLayer(**SIZES, seq_length=4)


# ---- compiled ----


def test_every_linear_is_told_which_microbatch_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, part by part, and behind a hook."""
    layer, x = TransformerLayer(**SIZES, layer_type="decoder"), tokens()
    given: list[bool | None] = []
    ready = Linear._weight_operands
    monkeypatch.setattr(Linear, "_weight_operands", lambda self, *call: given.append(call[-1]) or ready(self, *call))
    for part in (None, layer.self_attention, layer.layernorm_mlp.norm):
        if part is not None:
            part.register_forward_pre_hook(lambda *_: None)
        with autocast(recipe="current"):
            layer(x, encoder_output=x, is_first_microbatch=False)
    assert given == [False] * 3 * 7


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(recipe: str) -> None:
    """Near the unquantized layer, and in fp32 to the bit what the parts give one by one: sums are rounded alike."""
    options = SIZES | LLAMA | {"hidden_size": 128, "ffn_hidden_size": 192}
    layer = TransformerLayer(**options, device="cuda")
    parts = copy.deepcopy(layer)
    for norm in (parts.self_attention.qkv.norm, parts.layernorm_mlp.norm):
        norm.register_forward_hook(lambda *_: None)  # so that the parts are called one by one
    x = torch.randn(4, 32, 128, device="cuda")
    turned = RotaryPositionEmbedding(32, device="cuda")(32)
    with sdpa_kernel(SDPBackend.MATH):  # the others' sums have no fixed order
        for _ in range(3):
            actual = step(layer, layer, x, recipe, rotary_pos_emb=turned)
            assert_all_equal(actual, step(parts, parts, x, recipe, rotary_pos_emb=turned))
        expected = step(layer, layer, x, rotary_pos_emb=turned)
    found = errors(actual, {name: t.double() for name, t in expected.items()})
    assert max(found.values()) < (0.5 if recipe == "nvfp4" else 0.12), found
