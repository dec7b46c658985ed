"""PEFT's adapters over converted models of ``transformers``: they train, merge, and reload."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from minifloat.convert import ConversionReport, convert, export_weights, revert
from minifloat.functional import count_gemms
from minifloat.recipe import named
from minifloat.tensor import QuantizedTensor, quantize

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")

IDS = torch.randint(3, 48, (2, 16), generator=torch.Generator().manual_seed(7))
RECIPES = ["current", "delayed", "block", "mxfp8", "nvfp4"]


def llama(hidden: int = 32) -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=48, pad_token_id=0, hidden_size=hidden, intermediate_size=hidden * 3 // 2, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def convert_blocks(model: nn.Module, recipe: str, **options: Any) -> ConversionReport:
    """The projections of all blocks, small as they are."""
    return convert(model, recipe, filter_fn=lambda module, name: name.endswith("_proj"), **options)


def add_lora(model: Any, **options: Any) -> Any:
    torch.manual_seed(6)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options))


def train(model: Any, steps: int = 3) -> list[float]:
    """Losses on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model.eval()(input_ids=IDS).logits
    return found


def merged_by_hand(adapted: Any, recipe: str, buffers: dict[str, Tensor]) -> Any:
    """The model that training started from, its weights with the adapters' products added, converted."""
    model = llama()
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.weight.data += adapted.get_submodule(name).get_delta_weight("default").detach()
    convert_blocks(model, recipe)
    model.load_state_dict(buffers, strict=False)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_trains_merges_and_reloads(recipe: str, tmp_path: Path) -> None:
    base = llama()
    assert len(convert_blocks(base, recipe).converted) == 7
    before = {name: p.clone() for name, p in base.named_parameters()}
    model = add_lora(base)
    with count_gemms() as gemms:
        losses = train(model)
    assert losses[-1] < losses[0] - 0.1
    wanted = named(recipe).expected_gemms()
    counted = {(g.gemm, g.a, g.b) for g in gemms if "identity" not in (g.a, g.b)}
    assert counted == {(gemm, *formats) for gemm, formats in wanted.items() if gemm != "wgrad"}  # it is frozen

    frozen = {n.replace(".base_layer", ""): p for n, p in model.get_base_model().named_parameters() if "lora_" not in n}
    assert before.keys() == frozen.keys() and all(torch.equal(p, before[name]) for name, p in frozen.items())
    y = logits(model)
    model.save_pretrained(tmp_path)
    twin = llama()
    convert_blocks(twin, recipe)
    # An adapter's files hold none of the base model's buffers, so that delayed scaling would start anew.
    buffers = {name.replace(".base_layer", ""): b for name, b in model.get_base_model().named_buffers()}
    twin.load_state_dict(buffers, strict=False)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(twin, tmp_path)), y)

    expected = logits(merged_by_hand(model.get_base_model(), recipe, buffers))
    assert not torch.equal(expected, y)
    model.merge_adapter()
    assert torch.equal(logits(model), expected)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), y, atol=0.05 * y.abs().max().item(), rtol=0)
    merged = logits(model.merge_and_unload(safe_merge=True))
    torch.testing.assert_close(merged, expected, atol=0.05 * y.abs().max().item(), rtol=0)
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in model.modules())


def test_dora() -> None:
    """Adapters that read the base layer's weight, for its norm."""
    base = llama()
    convert_blocks(base, "current")
    model = add_lora(base, use_dora=True)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.05
    y = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), y, atol=0.1 * y.abs().max().item(), rtol=0)


BYTES = {"current": 1.0, "delayed": 1.0, "block": 1.0, "mxfp8": 2 + 2 / 32, "nvfp4": 0.5 + 1 / 256}  # of an element


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of memory, that which several share counted once."""
    held = [each for t in tensors for each in (t._buffers().values() if isinstance(t, QuantizedTensor) else [t])]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
    return sum(storages.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_over_a_quantized_base(recipe: str) -> None:
    """It learns as over a frozen base that is cast in each forward, and the base takes the bytes of its codes."""
    models, losses, ys = [], [], []
    for quantize_weights in (True, False):
        base = llama(hidden=64)
        convert_blocks(base, recipe, quantize_weights=quantize_weights)
        model = add_lora(base)
        codes = {n: p.dequantize() for n, p in base.named_parameters() if isinstance(p, QuantizedTensor)}
        assert len(codes) == 7 * quantize_weights
        losses.append(train(model))
        assert all(torch.equal(base.get_parameter(n).dequantize(), values) for n, values in codes.items())
        ys.append(logits(model))
        models.append(model)
    assert losses[0][-1] < losses[0][0] - 0.1
    if recipe == "delayed":  # a weight that is kept is cast with its own scale from the start
        torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=0.02, rtol=0)
    else:
        assert losses[0] == losses[1] and torch.equal(*ys)

    frozen = {name: p for name, p in models[0].named_parameters() if "_proj.base_layer" in name}
    elements = sum(p.numel() for p in frozen.values())
    assert nbytes(frozen.values()) == pytest.approx(elements * BYTES[recipe], rel=0.01)
    histories = nbytes(models[1].get_base_model().model.layers.buffers())
    assert nbytes(models[0].get_base_model().model.layers.buffers()) == histories

    layer = models[0].get_base_model().model.layers[0].mlp.up_proj
    values = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default").detach()
    revert(models[0])
    merged = models[0].merge_and_unload(safe_merge=recipe == "block")
    weight = merged.model.layers[0].mlp.up_proj.weight
    assert type(weight) is nn.Parameter and torch.equal(weight, values)
    convert_blocks(merged, recipe, quantize_weights=True)
    weight = merged.model.layers[0].mlp.up_proj.weight
    assert recipe == "delayed" or torch.equal(weight.dequantize(), quantize(values, weight.quantizer).dequantize())


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("safe", [False, True])
def test_a_merge_asks_for_the_precision_of_the_result(safe: bool, options: dict[str, Any]) -> None:
    """Before anything changes; after ``revert`` nothing is rounded, and nobody is warned."""
    model = llama()
    convert_blocks(model, "nvfp4", quantize_weights=True)
    model = add_lora(model, **options)
    train(model, 1)
    y = logits(model)
    refused = (
        r"Linear 'model.layers.0.self_attn.q_proj': its weight of shape \(32, 32\) in .* is frozen.*revert\(model\)"
    )
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match=refused):
            merge(safe_merge=safe)
        assert torch.equal(logits(model), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revert(model)
        y = logits(model)
        torch.testing.assert_close(logits(model.merge_and_unload(safe_merge=safe)), y)


def test_prepared_for_kbit_training() -> None:
    """PEFT makes all of a bf16 base fp32; weights that are kept quantized change the logical dtype and keep codes."""
    base = llama().bfloat16()
    convert_blocks(base, "block", quantize_weights=True)
    codes = {n: p.operands.any.codes.clone() for n, p in base.named_parameters() if isinstance(p, QuantizedTensor)}
    model = add_lora(peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))
    named_weights = {n.replace(".base_layer", ""): p for n, p in model.get_base_model().named_parameters()}
    assert {p.dtype for p in named_weights.values()} == {torch.float32} and len(codes) == 7
    for name, before in codes.items():
        weight = named_weights[name]
        assert isinstance(weight, QuantizedTensor) and torch.equal(weight.operands.any.codes, before)
        assert weight.dequantize().dtype == torch.float32
    losses = train(model)
    assert losses[-1] < losses[0]


def training_arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    quiet = {"report_to": [], "disable_tqdm": True, "log_level": "error", "dataloader_pin_memory": False}
    return transformers.TrainingArguments(str(folder), use_cpu=True, **quiet, **options)


def test_trainer_trains_and_resumes_adapters(tmp_path: Path) -> None:
    """The Trainer of ``transformers``, with checkpointed activations and accumulation; resuming gives the same run."""

    def trainer() -> tuple[Any, transformers.Trainer]:
        base = llama()
        convert_blocks(base, "mxfp8", quantize_weights=True)
        model = add_lora(base)
        options = training_arguments(
            tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=3, save_steps=2,
            learning_rate=2e-2, gradient_checkpointing=True, logging_steps=1,
        )  # fmt: skip
        data = [{"input_ids": ids, "labels": ids} for ids in IDS]
        return model, transformers.Trainer(model, options, train_dataset=data)

    model, first = trainer()
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.05
    twin, second = trainer()
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [entry["loss"] for entry in second.state.log_history if "loss" in entry] == losses
    assert torch.equal(logits(twin), logits(model))


def test_saving_and_reloading_a_quantized_model(tmp_path: Path) -> None:
    """Codes by ``torch.save``, or values by ``save_pretrained`` after ``revert``, into which adapters merge, too."""

    def made() -> Any:
        base = llama()
        convert_blocks(base, "mxfp8", quantize_weights=True)
        return base

    model = made()
    train(model)
    y = logits(model)
    torch.save(model.state_dict(), tmp_path / "codes.pt")
    twin = made()
    twin.load_state_dict(torch.load(tmp_path / "codes.pt", weights_only=True))
    assert torch.equal(logits(twin), y)

    for save in (model.save_pretrained, transformers.Trainer(model, training_arguments(tmp_path)).save_model):
        with pytest.raises(ValueError, match=r"Linear '.*q_proj': its weight .*revert\(model\) first"):
            save(tmp_path / "refused")
    revert(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    convert_blocks(loaded, "mxfp8", quantize_weights=True)
    assert torch.equal(logits(loaded), y)

    adapted = add_lora(made())
    train(adapted)
    revert(adapted)
    y = logits(adapted)
    merged = adapted.merge_and_unload(safe_merge=True)
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear
    torch.testing.assert_close(logits(merged), y)


@pytest.mark.parametrize(
    "adapters",
    [
        peft.LoraConfig(target_modules=["q_proj"]), peft.LoHaConfig(target_modules=["q_proj"]),
        peft.OFTConfig(target_modules=["q_proj"]), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
    ids=lambda adapters: type(adapters).__name__,
)  # fmt: skip
def test_engines_get_no_adapters(adapters: Any, tmp_path: Path) -> None:
    """Weights beside adapters are not those of the model, whatever kind they are and wherever they are put."""
    model = llama()
    convert_blocks(model, "current")
    with pytest.raises(ValueError, match=r"has adapters \(.*merge_and_unload"):
        export_weights(peft.get_peft_model(model, adapters), tmp_path, "fp8-tensor")
    if not isinstance(adapters, peft.PromptTuningConfig):  # which is no part of the model below
        with pytest.raises(ValueError, match=r"has adapters \(model.layers.0.self_attn.q_proj is a "):
            export_weights(model, tmp_path, "fp8-tensor")
