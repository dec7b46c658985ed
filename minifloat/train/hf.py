"""A model of the transformers library as what is trained: of a config.json, or of a folder with weights too.

Nothing is downloaded, and no code comes from the folder: its class is one of the library's, its weights safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minifloat import Recipe
from minifloat.convert import convert
from minifloat.train.model import MOST
from minifloat.train.ranks import ALONE, Ranks
from minifloat.train.state import own_random_numbers

LONGEST = 1024  # tokens in a sequence, where neither an option nor the model says less
BOUNDED = {
    "num_hidden_layers": "layers", "n_layer": "layers", "hidden_size": "dim", "n_embd": "dim",
    "intermediate_size": "hidden", "vocab_size": "vocabulary", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "max_position_embeddings": "context", "num_local_experts": "layers",
}  # fmt: skip
"""Sizes of a configuration, and whose bounds they have."""


@dataclass(frozen=True)
class HuggingFace:
    """What a config.json describes; `weights` is the folder that has them, None: new ones are drawn."""

    config: Any
    source: Path
    weights: Path | None
    context: int
    vocabulary: int

    @staticmethod
    def read(path: Path, context: int | None = None) -> HuggingFace:
        """Raises ValueError where `path` is no configuration of a causal language model, or nothing of it converts."""
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ValueError("--hf needs transformers; get it with: pip install transformers") from error
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_bytes())
            _check_sizes(values)
            config = AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
            longest = int(getattr(config, "max_position_embeddings", LONGEST))
            vocabulary = int(config.vocab_size)
        except Exception as error:  # whatever the library raises for what it cannot read
            raise ValueError(f"--hf: {file} describes no model: {error}; give a config.json or its folder") from error
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"--hf: {path} is quantized already; give the model that it was made of")
        if context is not None and not 1 <= context <= longest:
            raise ValueError(f"--context is {context}; choose from 1 to {longest}, the most that {path} takes")
        weights = path if path.is_dir() and any(path.glob("*.safetensors")) else None
        config.use_cache = False
        read = HuggingFace(config, path, weights, min(longest, LONGEST) if context is None else context, vocabulary)
        if not convert(read._meta, "current").converted:
            raise ValueError(f"--hf: nothing of {path} is converted, its linears are too small; give a larger model")
        return read

    def __str__(self) -> str:
        return f"{type(self.config).__name__} of {self.source}, context {self.context}"

    @cached_property
    def _meta(self) -> nn.Module:
        with torch.device("meta"):
            return self._build()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._meta.parameters())

    @property
    def learning_rate(self) -> float:
        """As of our own models by the width, and a tenth of that for weights that are trained already."""
        return 3e-3 * 128 / int(getattr(self.config, "hidden_size", 1024)) * (0.1 if self.weights else 1.0)

    def with_vocabulary(self, size: int) -> HuggingFace:
        """Raises ValueError where the text has more tokens than the model."""
        if size > self.vocabulary:
            raise ValueError(
                f"the text has a vocabulary of {size}, --hf {self.source} one of {self.vocabulary}; give the model's "
                "own --tokenizer"
            )
        return replace(self)

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError for several ranks, over which our own model is shared."""
        if ranks > 1:
            raise ValueError("--hf trains on one rank; leave --tp and --fsdp out")

    def settings(self) -> dict[str, Any]:
        """As JSON has them."""
        values = {name: value for name, value in self.config.to_dict().items() if name[0] != "_"}
        told: dict[str, Any] = json.loads(json.dumps(values, default=str))
        return {"transformers": told, "context": self.context}

    def make(self, recipe: Recipe | None, seed: int, ranks: Ranks = ALONE) -> nn.Module:
        """A new model that gives logits, whose linears compute in `recipe`."""
        if not ranks.alone:
            raise ValueError("--hf trains on one rank; leave --fsdp and --tp out")
        with own_random_numbers(seed, torch.device("cpu")):
            model = self._build() if self.weights is None else self._load(self.weights)
        convert(model, "none" if recipe is None else recipe)
        model.register_forward_hook(lambda module, inputs, output: output.logits)
        return model

    def _build(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        made: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            self.config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        return made

    def _load(self, folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
            str(folder), config=self.config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False,
            local_files_only=True, use_safetensors=True,
        )  # fmt: skip
        return loaded


def _check_sizes(values: dict[str, Any]) -> None:
    """Raises ValueError for sizes that no model has."""
    for name, bound in BOUNDED.items():
        value = values.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= MOST[bound]):
            raise ValueError(f"{name} is {value!r}, not a whole number from 1 to {MOST[bound]:,}")
