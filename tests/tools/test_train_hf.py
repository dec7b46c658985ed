"""`minifloat train --hf`: models of transformers, from a configuration or with weights; nothing is downloaded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat import Linear, MXFP8BlockScaling
from minifloat.recipe import named
from minifloat.tools.train.checkpoint import locate
from minifloat.tools.train.hf import HuggingFace
from tests.helpers.micro_training import invoke, write_texts

transformers = pytest.importorskip("transformers")


def tiny_config(**changed: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 32, "tie_word_embeddings": True}
    return transformers.LlamaConfig(**(sizes | more | changed))


@pytest.fixture
def options(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "texts").mkdir()
    fixed = "--device cpu --batch-size 1"
    return ("train", write_texts(tmp_path / "texts"), *fixed.split())


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_configuration_is_trained_and_resumed(options: tuple[object, ...], tmp_path: Path, recipe: str) -> None:
    tiny_config().save_pretrained(tmp_path / "model")
    out, asked = tmp_path / "out", (*options, "--recipe", recipe, "--hf", tmp_path / "model" / "config.json")
    code, said = invoke(*asked, "--steps", 1, "--out", out)
    assert code == 0, said
    code, said = invoke(*asked, "--steps", 2, "--out", out, "--resume")
    assert code == 0, said
    text = (out / "report.md").read_text()
    assert "**passed**" in text and "LlamaConfig of" in text
    assert ("| current | wgrad | e5m2/tensor/fp32 | e4m3/tensor/fp32 |" in text) == (recipe == "current")
    state = locate(out).model_state()
    model = transformers.AutoModelForCausalLM.from_config(tiny_config())
    model.load_state_dict(state)
    code, said = invoke("generate", out, "--device", "cpu")
    assert code == 2 and "is of a model of transformers (--hf)" in said


def test_weights_are_where_it_starts(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(tiny_config())
    model.save_pretrained(tmp_path / "model")
    read = HuggingFace.read(tmp_path / "model", 16)
    assert read.weights == tmp_path / "model" and read.context == 16
    assert read.parameters == sum(parameter.numel() for parameter in model.parameters())
    made = read.make(None, seed=0)
    assert all(torch.equal(own, model.state_dict()[name]) for name, own in made.state_dict().items())
    tokens = torch.arange(16)[None]
    assert torch.equal(made(tokens), model(tokens).logits)
    # Key and value are too small for it, and engines merge the query with them.
    quantized = [module for module in read.make(named("mxfp8"), seed=0).modules() if isinstance(module, Linear)]
    assert len(quantized) == 4 * 3 and all(isinstance(module.recipe, MXFP8BlockScaling) for module in quantized)
    drawn = [HuggingFace.read(tmp_path / "model" / "config.json").make(None, seed) for seed in (1, 1, 2)]
    first, again, other = (each.state_dict()["model.embed_tokens.weight"] for each in drawn)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, the most is 1,000"),
        ({"decoder_layers": 1001}, "decoder_layers is 1001, the most"),
        ({"ffn_dim": 10**9}, "ffn_dim is 1000000000, the most"),
        ({"text_config": {"blocks": [{"num_layers": 10**6}]}}, "num_layers is 1000000, the most"),
        ({"num_hidden_layers": 900, "num_experts": 900}, "900 layers of 900 experts are more than 65,536"),
        ({"hidden_size": "256"}, "describes no model: .*'hidden_size' expected int"),
        ({"model_type": "nothing"}, "describes no model"),
        ({"model_type": "t5"}, "no model: [^\n]{,200}; give the config.json of a causal language model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized already"),
        (
            {"hidden_size": 16, "intermediate_size": 16},
            "nothing of .* is converted: a side below 256 is too small to gain; ",
        ),
        ({"model_type": "other", "auto_map": {"AutoConfig": "hostile.Config"}}, "describes no model"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """No code of the folder runs."""
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(tiny_config().to_json_string()) | change))
    with pytest.raises(ValueError, match=f"--hf: .*{message}"), warnings.catch_warnings(action="error"):
        HuggingFace.read(tmp_path)  # a warning would show a line of this package's source
    assert not (tmp_path / "ran").exists()


def test_what_is_not_causal_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 256}
    transformers.BertConfig(**sizes, num_hidden_layers=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not causal: a token changes the logits of earlier ones"):
        HuggingFace.read(tmp_path).make(None, seed=0)
    transformers.BertConfig(**sizes, num_hidden_layers=3, is_decoder=True).save_pretrained(tmp_path)
    assert HuggingFace.read(tmp_path).make(None, seed=0).training


@pytest.mark.parametrize("damage", ["cut", "other sizes", "missing"])
def test_weights_that_do_not_load_end_with_a_message(options: tuple[object, ...], tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    made = transformers.LlamaForCausalLM(tiny_config(tie_word_embeddings=False))
    whole, message = made.state_dict(), "model.safetensors cannot be loaded: "
    if damage == "missing":
        whole.pop("lm_head.weight")
        message = f"in {folder} cannot be loaded: 1 are missing, the first is lm_head.weight"
    made.save_pretrained(folder, state_dict=whole)
    if damage == "cut":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "other sizes":
        tiny_config(intermediate_size=512, tie_word_embeddings=False).save_pretrained(folder)
        message = "down_proj.weight is [256, 256] there, and [256, 512] by config.json"
    code, said = invoke(*options, "--recipe", "bf16", "--steps", 1, "--out", tmp_path / "out", "--hf", folder)
    assert code == 2 and "error: --hf: the weights in " in said and message in said, said


@pytest.mark.parametrize(
    "more, message",
    [
        (("--hf", "nowhere"), "--hf: nowhere describes no model"),
        (("--hf", "model", "--layers", 2), "has sizes of its own; leave --model, --layers, --hidden, --heads, --kv-"),
        (("--hf", "model", "--model", "tiny"), "has sizes of its own; leave --model"),
        (("--hf", "model", "--context", 64), "--context is 64; choose from 1 to 32"),
    ],
)
def test_mistakes_end_with_a_message(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...], message: str
) -> None:
    tiny_config().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    code, said = invoke(*options, *more)
    assert code == 2 and message in said, said
