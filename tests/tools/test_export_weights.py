"""``minifloat export-weights``: what `train --hf` left, and a folder of transformers, in an engine's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from minifloat.recipe import QuantizerRole, named
from minifloat.tools.train.checkpoint import locate
from tests.helpers.micro_training import invoke, write_texts

pytestmark = pytest.mark.usefixtures("one_thread", "quiet_transformers")
UP = "model.layers.1.mlp.up_proj.weight"


def check(file: Path, weight: torch.Tensor) -> None:
    operand = named("block").quantizer(QuantizerRole("linear", "weight", ""))(weight).any
    saved = load_file(file)
    assert torch.equal(saved[UP].view(torch.uint8), operand.codes)
    assert operand.scale_inv is not None and torch.equal(saved[f"{UP}_scale_inv"], operand.scale_inv)


def test_of_a_run_and_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    texts, out = write_texts(tmp_path / "texts"), tmp_path / "out"
    fixed = "--device", "cpu", "--batch-size", 1, "--steps", 1, "--recipe", "block", "--out", out
    code, said = invoke("train", texts, *fixed, "--hf", tmp_path / "model" / "config.json")
    assert code == 0, said
    layout = "--layout", "fp8-block"
    code, said = invoke("export-weights", out, *layout, "--out", tmp_path / "new")
    assert code == 0 and "bytes of weights to" in said, said
    check(tmp_path / "new/model.safetensors", locate(out).model_state()[UP])
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.num_hidden_layers == 2

    code, said = invoke("export-weights", tmp_path / "model", *layout, "--out", tmp_path / "two", "--recipe", "block")
    assert code == 0, said
    check(tmp_path / "two/model.safetensors", model.get_parameter(UP).detach())
    for wrong, message in (
        ((tmp_path / "model", *layout, "--out", tmp_path / "x"), "does not say what it was trained in: give --recipe"),
        ((out, "--layout", "fp9", "--out", tmp_path / "x"), "--layout fp9: choose from fp8-block, fp8-tensor"),
        ((out, "--layout", "mxfp8", "--out", tmp_path / "x"), "choose 'fp8-block' or 'fp8-block-compressed', or requ"),
        ((out, *layout, "--out", tmp_path / "new"), "has weights, which engines would load too"),
    ):
        code, said = invoke("export-weights", *wrong)
        assert code == 2 and message in " ".join(said.split()), said


def test_of_a_model_that_no_engine_knows(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    fixed = "--device", "cpu", "--model", "micro", "--batch-size", 1, "--steps", 1, "--recipe", "current"
    code, said = invoke("train", write_texts(tmp_path / "texts"), *fixed, "--out", tmp_path / "out")
    assert code == 0, said
    code, said = invoke("export-weights", tmp_path / "out", "--layout", "fp8-tensor", "--out", tmp_path / "new")
    assert code == 2 and "minifloat's own model, which no engine knows; train with --hf" in said
