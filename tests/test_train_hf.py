"""`minifloat train --hf`: models of transformers, from a configuration or with weights; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat import Linear, MXFP8BlockScaling
from minifloat.recipe import named
from minifloat.train.checkpoint import locate
from minifloat.train.hf import HuggingFace
from tests.micro_training import invoke, write_texts

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


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("current", marks=pytest.mark.slow)])
def test_a_configuration_is_trained_and_resumed(options: tuple[object, ...], tmp_path: Path, recipe: str) -> None:
    tiny_config().save_pretrained(tmp_path / "model")
    out, asked = tmp_path / "out", (*options, "--recipe", recipe, "--hf", tmp_path / "model" / "config.json")
    code, said = invoke(*asked, "--steps", 1, "--out", out)
    assert code == 0, said
    code, said = invoke(*asked, "--steps", 2, "--out", out, "--resume")
    assert code == 0, said
    text = (out / "report.md").read_text()
    assert "**passed**" in text and "LlamaConfig of" in text
    assert ("| current | wgrad | e5m2 | e4m3 |" in text) == (recipe == "current")
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
    # Key and value are too small for it.
    quantized = [module for module in read.make(named("mxfp8"), seed=0).modules() if isinstance(module, Linear)]
    assert len(quantized) == 5 * 3 and all(isinstance(module.recipe, MXFP8BlockScaling) for module in quantized)
    drawn = [HuggingFace.read(tmp_path / "model" / "config.json").make(None, seed) for seed in (1, 1, 2)]
    first, again, other = (each.state_dict()["model.embed_tokens.weight"] for each in drawn)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, not a whole number"),
        ({"hidden_size": "256"}, "hidden_size is '256', not"),
        ({"model_type": "nothing"}, "describes no model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantized already"),
        ({"hidden_size": 16, "intermediate_size": 16}, "nothing of .* is converted"),
        ({"model_type": "other", "auto_map": {"AutoConfig": "hostile.Config"}}, "describes no model"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """No code of the folder runs."""
    (tmp_path / "hostile.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(tiny_config().to_json_string()) | change))
    with pytest.raises(ValueError, match=f"--hf: .*{message}"):
        HuggingFace.read(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (("--hf", "nowhere"), "--hf: nowhere describes no model"),
        (("--hf", "model", "--layers", 2), "has sizes of its own; leave --layers"),
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
