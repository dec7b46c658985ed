"""Hugging Face models built from small configs: they convert, train, and are themselves again afterwards."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import minifloat
from minifloat import recipe as recipes
from minifloat.convert import ConversionReport, DefaultFilter, convert, revert
from minifloat.functional import Gemm, count_gemms

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

SIZES = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.randint(3, 48, (2, 16), generator=torch.Generator().manual_seed(7))


def llama(**options: object) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, **SIZES, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout, **SIZES))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=16, num_local_experts=4, **SIZES,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


ATTENTION = {f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkvo"}
MLP = {f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up", "down")}
EXPERTS = {f"model.layers.{i}.mlp.experts.{part}_proj" for i in range(2) for part in ("gate_up", "down")}
CONV1D = {
    f"transformer.h.{i}.{part}" for i in range(2) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
}
CASES = [
    pytest.param(llama, "current", ATTENTION | MLP, id="llama current"),
    pytest.param(gpt2, "mxfp8", CONV1D, id="gpt2 mxfp8"),
    pytest.param(gpt2, "delayed", CONV1D, id="gpt2 delayed"),
    pytest.param(mixtral, "delayed", ATTENTION | EXPERTS, id="mixtral delayed"),
    pytest.param(mixtral, "nvfp4", ATTENTION | EXPERTS, id="mixtral nvfp4"),
    pytest.param(llama, "block", ATTENTION | MLP, id="llama block", marks=pytest.mark.slow),
]  # fmt: skip


def train(model: nn.Module, steps: int) -> tuple[list[float], Counter[Gemm]]:
    """Losses of that many steps on one batch, and all GEMMs of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with count_gemms() as gemms:
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, gemms


def names(layers: tuple[object, ...]) -> set[str]:
    return {name for layer in layers for name in layer.names}  # type: ignore[attr-defined]


def small_too(model: nn.Module, recipe: str | None) -> ConversionReport:
    """Converts by the default rule, with layers as small as these."""
    return convert(model, recipe, DefaultFilter(model, smallest=16))


@pytest.mark.parametrize(("make", "recipe", "expected"), CASES)
def test_converts_trains_and_reverts(make: Callable[[], nn.Module], recipe: str, expected: set[str]) -> None:
    """20 steps, each GEMM of a converted layer quantized; then the model is one that was never converted."""
    model = make()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = small_too(model, recipe)
    assert names(report.converted) == expected
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    losses, gemms = train(model, 20)
    assert losses[-1] < 0.5 * losses[0]
    wanted = recipes.named(recipe).expected_gemms()
    counted = {(gemm.gemm, gemm.a, gemm.b): n for gemm, n in gemms.items()}
    assert counted == {(gemm, *formats): len(expected) for gemm, formats in wanted.items()}

    revert(model)
    assert list(model.state_dict()) == keys
    assert not any(isinstance(module, minifloat.Linear) for module in model.modules())
    twin = make()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(IDS).logits, twin(IDS).logits)
    assert train(model, 2)[0] == train(twin, 2)[0]


def test_report_names_what_is_left_alone() -> None:
    """A tied head, an untied one and routers are each named, with the reason."""
    model = gpt2()
    head = small_too(model, "current").left_alone
    assert [(layer.names, layer.reason) for layer in head] == [
        (("lm_head",), "its weight is also that of transformer.wte (Embedding)")
    ]
    model = mixtral()
    report = small_too(model, "current")
    reasons = {layer.names[0]: (layer.kind, layer.reason) for layer in report.left_alone}
    assert reasons.pop("lm_head") == ("Linear", "after the last block of the model")
    for i in range(2):
        kind, reason = reasons.pop(f"model.layers.{i}.mlp.gate")
        assert kind == "MixtralTopKRouter" and reason == "not a linear; holds weight [4, 32]"
    assert not reasons
    assert "model.layers.*.mlp.gate" in str(report) and "MixtralTopKRouter" in str(report)


def test_what_engines_merge_is_one() -> None:
    """A small k leaves q and v alone, and a small down_proj all experts; rules that divide them are in the report."""
    model, ends = llama(), ("q_proj", "k_proj", "v_proj")
    report = convert(model, "current", DefaultFilter(model, smallest=32))  # 16 rows of k and v
    assert names(report.converted) == MLP | {name for name in ATTENTION if "o_proj" in name} and not report.warnings
    reasons = {layer.names[0]: layer.reason for layer in report.left_alone}
    small = "a side below 32 is too small to gain"
    assert reasons["model.layers.0.self_attn.k_proj"] == small
    assert reasons["model.layers.0.self_attn.q_proj"] == f"engines merge it with k_proj: {small}"
    report = convert(
        model, "current", DefaultFilter(model, smallest=16), rules=[("*.k_proj", "mxfp8"), ("*.up*", "none")]
    )
    attention, mlp = report.warnings
    assert all(f"model.layers.*.self_attn.{end}" in attention for end in ends) and "gate_proj" in mlp
    experts = mixtral()
    for block in experts.model.layers:
        block.mlp.experts.register_parameter("down_proj", nn.Parameter(torch.zeros(4, 32, 20)))
        block.mlp.experts.register_parameter("gate_up_proj", nn.Parameter(torch.zeros(4, 40, 32)))
    report = convert(experts, "current", DefaultFilter(experts, smallest=24))
    assert not names(report.converted) & EXPERTS


def test_conv1d_equals_a_hand_built_linear() -> None:
    """A converted Conv1D computes what a Linear of its transposed weight does, gradients included, bit for bit."""
    conv = transformers.pytorch_utils.Conv1D(40, 24)
    hand = minifloat.Linear(24, 40, recipe="current")
    with torch.no_grad():
        hand.weight.copy_(conv.weight.t())
        hand.bias.copy_(conv.bias.normal_())
    model = nn.ModuleDict({"conv": conv})
    convert(model, "current", rules=[("conv", "current")])
    x, dy = torch.randn(2, 7, 24), torch.randn(2, 7, 40)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    outputs = conv(inputs[0]), hand(inputs[1])
    for y in outputs:
        y.backward(dy)
    assert torch.equal(*outputs) and torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]
    assert torch.equal(conv.weight.grad, hand.weight.grad.t()) and torch.equal(conv.bias.grad, hand.bias.grad)
    assert conv.weight.grad.stride() == conv.weight.stride()
    assert "in_features=24, out_features=40" in repr(conv) and "Float8CurrentScaling" in repr(conv)
    assert torch.equal(conv(x, is_first_microbatch=True), conv(x, is_first_microbatch=False))


def test_conv1d_is_reset_as_one() -> None:
    conv = transformers.pytorch_utils.Conv1D(64, 64)
    convert(conv, "delayed", rules=[("*", "delayed")])
    conv.forward_scaling.scale.fill_(3)
    conv.reset_parameters()
    assert not conv.bias.any() and 0.015 < conv.weight.std() < 0.025
    assert torch.equal(conv.forward_scaling.scale, torch.ones_like(conv.forward_scaling.scale))
    revert(conv)
    assert type(conv) is transformers.pytorch_utils.Conv1D and repr(conv) == "Conv1D(nf=64, nx=64)"
    assert not hasattr(conv, "in_features") and set(conv.state_dict()) == {"weight", "bias"}


def test_saved_and_loaded_by_the_hub_format(tmp_path: object) -> None:
    model = llama()
    small_too(model, "current")
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    small_too(loaded, "current")
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    revert(model), revert(loaded)
    assert torch.equal(model(IDS).logits, loaded(IDS).logits)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_compiled_in_one_graph(recipe: str) -> None:
    torch._dynamo.reset()
    parts = [transformers.pytorch_utils.Conv1D(24, 16), nn.GELU(), transformers.pytorch_utils.Conv1D(16, 24)]
    model = nn.Sequential(*parts)
    convert(model, recipe, lambda module, name: True)
    twin, x = copy.deepcopy(model), torch.randn(5, 16)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    for each in (model, compiled):
        for _ in range(2):
            each(x).square().sum().backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(model(x), compiled(x))


def test_offloading_of_accelerate(tmp_path: Path) -> None:
    """``cpu_offload`` moves codes; what asks for values names the way out; histories of no checkpoint are new."""
    accelerate = pytest.importorskip("accelerate")

    def made(recipe: str, kept: bool) -> nn.Module:
        model = llama().eval()
        convert(model, recipe, lambda module, name: "_proj" in name, quantize_weights=kept)
        return model

    def empty(recipe: str, kept: bool) -> nn.Module:
        with accelerate.init_empty_weights():
            return made(recipe, kept)

    model = made("mxfp8", True)
    expected = model(IDS).logits
    offloaded = accelerate.cpu_offload(model, execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(offloaded(IDS).logits, expected)
    with pytest.raises(ValueError, match=r"q_proj': its weight .*where cpu_offload works.*revert\(model\) first"):
        accelerate.disk_offload(made("mxfp8", True), tmp_path / "disk", execution_device="cpu")
    plain = llama().eval()
    plain.save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"load it before convert\(..., quantize_weights=True\)"):
        accelerate.load_checkpoint_and_dispatch(empty("mxfp8", True), tmp_path, {"": "cpu"})
    loaded = accelerate.load_checkpoint_and_dispatch(empty("delayed", False), tmp_path, {"": "cpu"})
    convert(plain, "delayed", lambda module, name: "_proj" in name)
    assert torch.equal(loaded(IDS).logits, plain(IDS).logits)
