"""PEFT's adapters over converted models of ``transformers``: they train, merge, and reload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging

from minifloat.convert import ConversionReport, convert
from minifloat.functional import count_gemms
from minifloat.recipe import named

IDS = torch.randint(3, 48, (2, 16), generator=torch.Generator().manual_seed(7))
RECIPES = ["current", "delayed", "block", "mxfp8", "nvfp4"]


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def llama(layers: int = 1) -> Any:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=48, pad_token_id=0, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
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
