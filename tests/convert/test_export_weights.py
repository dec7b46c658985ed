"""Weights for inference engines: the bits that forward multiplies by, as the public loaders read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.swa_utils import AveragedModel

import minifloat
from minifloat import GroupedLinear, Linear, Operand, quantized_model_init
from minifloat.convert import convert, export_weights, quantized_weights, revert
from minifloat.convert.experts import ExpertLinear
from minifloat.convert.layouts import LAYOUTS, WeightLayout
from minifloat.formats import ROWWISE
from minifloat.nn.linear_state import LinearState
from minifloat.recipe import MXFP8BlockScaling, NVFP4BlockScaling, QuantizerRole, Recipe, named

compressors = pytest.importorskip("compressed_tensors.compressors")
pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 128, "head_dim": 32,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
IDS = torch.randint(3, 48, (2, 16), generator=torch.Generator().manual_seed(7))


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def tied() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


def qwen3() -> Any:  # one block without experts
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": [0]}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **own))


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **EXPERTS))


def gpt_oss() -> Any:
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, **EXPERTS))


def trained(make: Callable[[], Any], recipe: Any, dtype: torch.dtype = torch.float32, only: str = "_proj") -> Any:
    """A converted model after two steps, with weights large enough for logits that are no rounding errors."""
    torch.manual_seed(5)
    model = make().to(dtype)
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    convert(model, recipe, lambda module, name: only in name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def values_of(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """The state dict, with what the codes of converted layers stand for."""
    found = {name: tensor for name, tensor in model.state_dict().items() if "_scaling." not in name}
    quantizer = recipe.quantizer(QuantizerRole("linear", "weight", ""))
    for name, layer in model.named_modules():
        if isinstance(layer, ExpertLinear):
            each = torch.stack([quantizer(own).dequantize() for own in layer._weight_matrix().detach()])
            path = f"{name.rpartition('.')[0]}.{layer.parameter}"
            found[path] = each.transpose(1, 2) if layer.transposed else each
        elif isinstance(layer, LinearState):
            found[f"{name}.weight"] = quantizer(layer.weight.detach()).dequantize()  # type: ignore[arg-type]
    return found


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(told.values()), told
    return model


# ---- bits ----

CASES: list[tuple[WeightLayout, Any]] = [
    ("fp8-block", "block"), ("fp8-block", minifloat.Float8BlockScaling(use_f32_scales=True)),
    ("fp8-block-compressed", "block"), ("fp8-tensor", "current"), ("fp8-tensor", "delayed"),
    ("fp8-channel", "rowwise"), ("mxfp8", "mxfp8"), ("mxfp8", MXFP8BlockScaling(enable_2d_quantization=True)),
    ("nvfp4", "nvfp4"), ("nvfp4", NVFP4BlockScaling(disable_2d_quantization=True)),
]  # fmt: skip


def used(layer: Any) -> Operand:
    """The weight that a forward multiplies by, which it keeps for other microbatches; or the parameter's own."""
    layer(torch.randn(5, layer.in_features), is_first_microbatch=True)
    kept = layer._weight_cache
    operands = layer.weight.operands if kept is None else kept.operands
    found: Operand = operands.along(ROWWISE)
    return found


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("layout, recipe", CASES)
def test_bits_of_the_forward(layout: WeightLayout, recipe: Any, kept: bool) -> None:
    """Codes and scales of rows that fill no block, zeros among them, after a step of delayed scaling."""
    cols, rows = (100, 60) if layout == "fp8-block" else (160, 200)

    def init(weight: Tensor) -> None:
        nn.init.normal_(weight)[3:5] = 0
        weight[7] *= 50

    with quantized_model_init(enabled=kept, recipe=recipe):
        layer = Linear(cols, rows, recipe=recipe, init_method=init)
    layer(torch.randn(9, cols)).sum().backward()
    layer.eval()
    operand, found = used(layer), dict(quantized_weights(nn.Sequential(layer), layout))
    codes, scales = (found["0.weight" + ending] for ending in LAYOUTS[layout].endings)
    assert torch.equal(codes.view(torch.uint8), operand.codes.view(torch.uint8))
    assert operand.scale_inv is not None and torch.equal(found["0.bias"], layer.bias)
    wanted = operand.scale_inv.view(torch.uint8) if scales.element_size() == 1 else operand.scale_inv
    if operand.format.tile and not layout.startswith("fp8"):
        wanted = torch.stack([wanted[row // operand.format.block] for row in range(rows)])
    assert torch.equal(scales.view(wanted.dtype).flatten(), wanted.flatten())
    if layout == "fp8-tensor":
        assert ("0.input_scale" in found) == (recipe == "delayed")
    if recipe == "delayed":
        assert torch.equal(found["0.input_scale"], 1 / layer.forward_scaling.scale[:1])


def test_zeros_and_mixed_recipes() -> None:
    """The second level of zeros is 1; activations have scales in the files if all layers have some."""
    zeros = Linear(64, 32, recipe="nvfp4", init_method=nn.init.zeros_)
    found = dict(quantized_weights(zeros, "nvfp4"))
    assert found["weight_global_scale"] == 1 and not found["weight_packed"].any()
    mixed = nn.Sequential(Linear(32, 32, recipe="delayed"), Linear(32, 32, recipe="current"))
    assert not any("input_scale" in name for name in dict(quantized_weights(mixed, "fp8-tensor")))


@pytest.mark.parametrize("kept, single", [(False, False), (True, False), (False, True)])
def test_experts_of_this_library(kept: bool, single: bool) -> None:
    with quantized_model_init(enabled=kept, recipe="mxfp8"):
        layer = GroupedLinear(3, 64, 40, recipe="mxfp8", bias=False, single_grouped_weight=single)
    found = dict(quantized_weights(nn.Sequential(layer), "mxfp8"))
    quantizer = named("mxfp8").quantizer(QuantizerRole("linear", "weight", ""))
    assert list(found) == [f"0.{i}.weight{ending}" for i in range(3) for ending in ("", "_scale")]
    for i in range(3):
        weight = layer.weight[i] if single else layer._weight(f"{i}.weight")
        operand = weight.operands.rowwise if kept else quantizer(weight.detach()).rowwise
        assert torch.equal(found[f"0.{i}.weight"].view(torch.uint8), operand.codes)
        assert torch.equal(found[f"0.{i}.weight_scale"], operand.scale_inv)


@pytest.mark.parametrize(
    "make, recipe, layout", [(qwen3, "block", "fp8-block"), (qwen3, "mxfp8", "mxfp8"), (gpt_oss, "w4a8", "mxfp4")]
)
def test_quantized_experts_of_transformers(make: Any, recipe: str, layout: WeightLayout) -> None:
    """Experts whose weights are kept quantized give the bytes that those in high precision are cast to."""
    torch.manual_seed(5)
    models = make(), make()
    models[1].load_state_dict(models[0].state_dict())
    for model, kept in zip(models, (False, True), strict=True):
        convert(model, recipe, lambda module, name: ".experts." in name, quantize_weights=kept)
    first, second = (dict(quantized_weights(model, layout)) for model in models)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), name


# ---- loaders ----


@pytest.mark.parametrize(
    "make, layout, recipe",
    [
        (llama, "fp8-block", "block"), (llama, "fp8-tensor", "current"), (llama, "fp8-tensor", "delayed"),
        (llama, "fp8-channel", "rowwise"), (llama, "fp8-block-compressed", "block"), (llama, "mxfp8", "mxfp8"),
        (tied, "fp8-channel", "rowwise"),
        (llama, "nvfp4", "nvfp4"), (qwen3, "fp8-block", "block"), (qwen3, "fp8-tensor", "current"),
        (qwen3, "fp8-channel", "rowwise"), (mixtral, "fp8-block", "block"), (gpt_oss, "mxfp4", "w4a8"),
    ],
)  # fmt: skip
def test_transformers_alone(make: Any, layout: WeightLayout, recipe: str, tmp_path: Path) -> None:
    """Its parameters are the values of our codes, to the bit; its logits those of a model of these values.

    It decodes MXFP8 and NVFP4 to bf16, and by a reciprocal of the second level; what quantizes activations as we do
    has our logits.
    """
    dtype = torch.bfloat16 if layout in ("mxfp8", "nvfp4") else torch.float32
    model = trained(make, recipe, dtype, ".experts." if make is gpt_oss else "_proj")
    export_weights(model, tmp_path, layout, requantize=layout == "nvfp4")
    loaded = load(tmp_path, dtype)
    found = logits(loaded)  # compressed-tensors decodes in the first forward
    if recipe in ("current", "delayed", "rowwise") and make in (llama, tied):
        assert difference(found, logits(model)) < 5e-3  # sums in another order move few activations to another code
    if recipe == "delayed" or layout == "nvfp4":
        return
    wanted = values_of(model, named(recipe))
    own = loaded.state_dict()
    for name, values in wanted.items():
        assert torch.equal(own[name], values), name
    twin = make().to(dtype)
    twin.load_state_dict(wanted)
    if layout in ("fp8-block", "mxfp4"):  # decoded, activations are not quantized
        assert torch.equal(found, logits(twin))


@pytest.mark.parametrize(
    "family, own", [("MiniMaxM2", {"rotary_dim": 16}), ("Llama4", {}), ("Laguna", {"num_experts": 4})]
)
def test_names_of_families(family: str, own: dict[str, Any], tmp_path: Path) -> None:
    """Names and shapes are those of ``save_pretrained``, and what is loaded are the values of our codes, to the bit."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    model = kind(kind.config_class(**{**SIZES, **EXPERTS, "moe_intermediate_size": 128, **own}))
    convert(model, "block", lambda module, name: "_proj" in name)
    model.save_pretrained(tmp_path / "plain")
    export_weights(model, tmp_path / "codes", "fp8-block")
    plain, codes = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "codes"))
    found = {name: tensor.shape for name, tensor in codes.items() if not name.endswith("_scale_inv")}
    assert found == {name: tensor.shape for name, tensor in plain.items()} and len(codes) > len(found)
    own_values = load(tmp_path / "codes").state_dict()
    for name, values in values_of(model, named("block")).items():
        assert torch.equal(own_values[name], values), name


def test_read_back(tmp_path: Path) -> None:
    """Experts that Transformers keeps in one tensor and reads no scales of: nothing is written."""
    model = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**SIZES, **EXPERTS))
    convert(model, "block", lambda module, name: "_proj" in name)
    with pytest.raises(
        ValueError, match=r"would not load these files .*input_linear.* leave what it names in high prec"
    ):
        export_weights(model, tmp_path, "fp8-block")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["mxfp8", "nvfp4", "fp8-block-compressed"])
def test_compressors_of_experts(layout: WeightLayout) -> None:
    """Experts in their own names, which ``compressed-tensors`` decodes; Transformers reads only FP8 ones of those."""
    recipe = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}.get(layout, "block")
    model = trained(qwen3, recipe, only=".experts.")
    found, spec = dict(quantized_weights(model, layout)), LAYOUTS[layout]
    described = compressed_config(spec.config([], [], False))
    compressor = compressors.BaseCompressor.get_value_from_registry(described.format)
    values = values_of(model, named(recipe))["model.layers.1.mlp.experts.gate_up_proj"]
    for i, part in ((0, "gate_proj"), (3, "up_proj")):
        path = f"model.layers.1.mlp.experts.{i}.{part}."
        state = {name.removeprefix(path): t for name, t in found.items() if name.startswith(path)}
        decoded = compressor.decompress(state, described.config_groups["group_0"])["weight"].float()
        own = values[i].chunk(2)[part == "up_proj"]
        torch.testing.assert_close(decoded, own, rtol=2**-8, atol=0)
        if layout != "nvfp4":
            assert torch.equal(decoded, own)


def compressed_config(values: dict[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig.model_validate(values)


@pytest.mark.parametrize("make, alone", [(llama, "0*v_proj"), (llama, "1*up_proj"), (qwen3, "*experts.down_proj")])
def test_merged_linears_are_quantized_as_one(make: Callable[[], Any], alone: str) -> None:
    """What engines make one linear, or the experts of one block, is quantized as a whole."""
    model = make()
    with_rule = [(f"model.layers.{alone}", "none")]
    assert convert(model, "current", lambda module, name: "_proj" in name, with_rule).warnings
    with pytest.raises(ValueError, match=rf"engines merge \S+ with \S*{alone.lstrip('01*').split('.')[0]}\S*, which"):
        quantized_weights(model, "fp8-tensor")


def test_second_levels_of_mla() -> None:
    """Of DeepSeek's attention engines merge q_a and kv_a."""
    own = {"num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    config = transformers.DeepseekV3Config(**SIZES | own | {"qk_nope_head_dim": 16, "first_k_dense_replace": 2})
    model = transformers.DeepseekV3ForCausalLM(config)
    convert(model, "nvfp4", lambda module, name: name.endswith(("q_a_proj", "kv_a_proj_with_mqa")))
    with pytest.raises(ValueError, match=r"q_a_proj, .*kv_a_proj_with_mqa one linear .* requantize=True"):
        quantized_weights(model, "nvfp4")


def test_fused_linears_of_nvfp4(tmp_path: Path) -> None:
    """Engines give q, k and v one second level: refused where amaxes differ, and cast again on request."""
    model = trained(llama, "nvfp4")
    with pytest.raises(ValueError, match=r"self_attn.q_proj, .*k_proj, .*v_proj one linear .* requantize=True"):
        quantized_weights(model, "nvfp4")
    found = dict(quantized_weights(model, "nvfp4", requantize=True))
    block = "model.layers.0."
    for names in (["self_attn.q", "self_attn.k", "self_attn.v"], ["mlp.gate", "mlp.up"]):
        weights = [model.get_parameter(f"{block}{name}_proj.weight") for name in names]
        level = 2688 / max(weight.detach().abs().max() for weight in weights)
        for name in names:
            assert torch.equal(found[f"{block}{name}_proj.weight_global_scale"], level.view(1)), name
    for projection in ("self_attn.o_proj", "mlp.down_proj"):  # as trained
        operand = used(model.get_submodule(block + projection))
        assert torch.equal(found[f"{block}{projection}.weight_packed"], operand.codes)


# ---- files ----


def test_shards_and_what_stays(tmp_path: Path) -> None:
    """Files of a limited size say what the stream does; linears in high precision are named."""
    model = trained(qwen3, "current", only="self_attn")
    files = export_weights(model, tmp_path / "new", "fp8-tensor", shard_bytes=200_000)
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    streamed = dict(quantized_weights(model, "fp8-tensor"))
    assert read.keys() == streamed.keys()
    assert all(torch.equal(t.view(torch.uint8), streamed[name].view(torch.uint8)) for name, t in read.items())
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text())
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert max(sizes) <= 200_000 < min(a + b for a, b in pairwise(sizes))
    assert len(files) > 2 and index["metadata"]["total_size"] == sum(t.nbytes for t in read.values())
    assert all(name in load_file(tmp_path / "new" / file) for name, file in index["weight_map"].items())
    told = json.loads((tmp_path / "new/config.json").read_text())
    assert told["architectures"] == ["Qwen3MoeForCausalLM"]
    ignored = told["quantization_config"]["ignore"]
    for name in ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.gate"):
        assert name in ignored
    assert "re:model[.]layers[.]1[.]mlp[.]experts[.].*" in ignored and not any("self_attn" in each for each in ignored)
    assert read["model.layers.1.mlp.experts.2.up_proj.weight"].dtype == torch.float32
    assert difference(logits(load(tmp_path / "new")), logits(model)) < 5e-3
    with pytest.raises(ValueError, match="has weights, which engines would load too"):
        export_weights(model, tmp_path / "new", "fp8-tensor")


@pytest.mark.parametrize("wrong", ["generation_config", "tensors"])
def test_all_files_or_none(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written, the disk that is full, leaves a folder as it was, so that a second try is not refused."""
    model = trained(llama, "current")
    (tmp_path / "tokenizer.json").write_text("{}")
    with monkeypatch.context() as patch:
        if wrong == "tensors":
            patch.setattr("safetensors.torch.save_file", fails_the_second_time(save_file))
        else:
            patch.setattr(model.generation_config, "temperature", 0.7)  # without do_sample, as Llama 2's
        with pytest.raises((ValueError, OSError), match="temperature" if wrong != "tensors" else "no space left"):
            export_weights(model, tmp_path, "fp8-tensor", shard_bytes=200_000)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    export_weights(model, tmp_path, "fp8-tensor", shard_bytes=200_000)
    assert difference(logits(load(tmp_path)), logits(model)) < 5e-3


def fails_the_second_time(function: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[Any] = []

    def wrapped(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no space left")
        return function(*args)

    return wrapped


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_wrapped_models(tmp_path: Path) -> None:
    """Files of what is wrapped by compilers, averages and data parallelism; FSDP1's flat shards are refused."""
    model = llama()
    convert(model, "current", lambda module, name: "_proj" in name)
    wanted = dict(quantized_weights(model, "fp8-tensor"))
    parallel = nn.parallel.DistributedDataParallel(torch.compile(model))  # type: ignore[arg-type]
    for i, wrapped in enumerate((torch.compile(model), parallel, nn.DataParallel(model), AveragedModel(model))):
        export_weights(wrapped, tmp_path / str(i), "fp8-tensor")  # type: ignore[arg-type]
        found = load_file(tmp_path / str(i) / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(t.view(torch.uint8), wanted[name].view(torch.uint8)) for name, t in found.items())
        assert json.loads((tmp_path / str(i) / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    model.model.layers[0] = FullyShardedDataParallel(model.model.layers[0], device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"model.layers.0 is wrapped in FullyShardedDataParallel"):
        quantized_weights(model, "fp8-tensor")


def test_refused_by_name(tmp_path: Path) -> None:
    layer = Linear(48, 40, recipe="mxfp8", name="the layer")
    with pytest.raises(
        ValueError, match=r"the layer.*e4m3/1x32/e8m0, and 'fp8-channel' holds .*choose 'mxfp8', or req"
    ):
        export_weights(layer, tmp_path, "fp8-channel")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="48 columns, and 'mxfp8' has whole blocks of 32"):
        quantized_weights(layer, "mxfp8")
    again = dict(quantized_weights(layer, "fp8-channel", requantize=True))
    assert again["weight_scale"].shape == (40, 1)
    for sizes in ((576, 128), (128, 192)):  # a side of DeepSeek-V3's, and one that Transformers misreads in silence
        with pytest.raises(ValueError, match=r"a side has (576|192); choose 'fp8-block-compressed'"):
            quantized_weights(Linear(*sizes, recipe="block"), "fp8-block")
        assert dict(quantized_weights(Linear(*sizes, recipe="block"), "fp8-block-compressed"))
    with pytest.raises(ValueError, match="no layer is quantized"):
        quantized_weights(Linear(48, 40), "mxfp8")
    with minifloat.autocast(recipe="current"):
        assert "weight_scale" in dict(quantized_weights(Linear(48, 40), "fp8-tensor"))
    with pytest.raises(ValueError, match="'mxfp4' holds no others"):
        quantized_weights(Linear(64, 64, recipe="mxfp4"), "mxfp4")
    with pytest.raises(ValueError, match=r"gate_proj.weight and .*up_proj.weight of 48 rows would share tiles of 128"):
        quantized_weights(trained(narrow, "block", only=".experts."), "fp8-block")
    with pytest.raises(ValueError, match=r"gate_proj.weight and .*up_proj.weight of 48 rows would share tiles of 128"):
        quantized_weights(trained(narrow, "rowwise", only=".experts."), "fp8-block", requantize=True)
    shared = nn.ModuleList([Linear(64, 64, recipe="current"), nn.Embedding(64, 64)])
    shared[1].weight = shared[0].weight
    with pytest.raises(ValueError, match=r"0.weight and 1.weight are one parameter"):
        quantized_weights(shared, "fp8-tensor")


def narrow() -> Any:
    own = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **own))


def test_quantized_weights_save_like_others(tmp_path: Path) -> None:
    """``save_pretrained`` and ``save_file`` of codes name the way out, which gives the bytes that the model has."""
    torch.manual_seed(5)
    model = llama()
    convert(model, "current", lambda module, name: "_proj" in name, quantize_weights=True)
    for save in (
        lambda: model.save_pretrained(tmp_path / "no"),
        lambda: save_file(model.state_dict(), tmp_path / "no"),
    ):
        with pytest.raises(ValueError, match=r"_proj': .*export_weights .from minifloat.convert. for engines"):
            save()
    export_weights(model, tmp_path / "yes", "fp8-tensor")
    assert difference(logits(load(tmp_path / "yes")), logits(model)) < 5e-3
    weight = model.model.layers[0].mlp.up_proj.weight
    saved = load_file(tmp_path / "yes/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(saved.view(torch.uint8), weight.operands.rowwise.codes)
    revert(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, weight.dequantize())
