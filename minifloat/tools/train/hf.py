"""A model of the transformers library as what is trained: of a config.json, or of a folder with weights too.

Nothing is downloaded, and no code comes from the folder: its class is one of the library's, its weights safetensors.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minifloat import Recipe
from minifloat.convert import convert
from minifloat.tools.train.ranks import ALONE, Ranks
from minifloat.tools.train.state import own_random_numbers

LONGEST = 1024  # tokens in a sequence, where neither an option nor the model says less
MOST_LAYERS, MOST_MODULES, MOST_SIZE = 1000, 2**16, 2**24
LAYERS, EXPERTS = re.compile(r"(layers?|blocks|depth)$"), re.compile(r"experts$")
UNBOUNDED = re.compile("theta|base$")  # of rotary embeddings, often a whole number
UNTOLD = ("transformers_version", "architectures", "id2label", "label2id", "dtype", "torch_dtype", "use_cache")
"""Entries of a configuration that make no difference to training."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")
PROBED = 8  # tokens


@dataclass(frozen=True)
class HuggingFace:
    """Model that a config.json describes; `weights` is the folder that has them, None: new ones are drawn."""

    config: Any
    source: Path
    values: dict[str, Any]  # as in the file: the library's own change with its version
    weights: Path | None
    context: int
    vocabulary: int

    @staticmethod
    def read(path: Path, context: int | None = None) -> HuggingFace:
        """Raises ValueError where `path` is no configuration of a causal language model, or nothing of it converts."""
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ValueError("--hf needs transformers; get it with: pip install 'transformers>=5'") from error
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_bytes())
            _check_sizes(values)
            config = AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
            text = config.get_text_config()
            longest = int(getattr(text, "max_position_embeddings", LONGEST))
            vocabulary = int(text.vocab_size)
        except Exception as error:  # whatever the library raises for what it cannot read
            raise _no_model(file, error) from error
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(f"--hf: {path} is quantized already; give the model that it was made of")
        if context is not None and not 1 <= context <= longest:
            raise ValueError(f"--context is {context}; choose from 1 to {longest}, the most that {path} takes")
        weights = _folder_of_weights(path)
        config.use_cache = False
        read = HuggingFace(
            config, path, values, weights, min(longest, LONGEST) if context is None else context, vocabulary
        )
        try:
            with warnings.catch_warnings(action="ignore"):  # it is an error here
                report = convert(read.on_meta, "current")
        except Exception as error:
            raise _no_model(file, error) from error
        if not report.converted:
            why = "; ".join(dict.fromkeys(each.reason for each in report.left_alone)) or "it has no linears"
            raise ValueError(f"--hf: nothing of {path} is converted: {why}; give a larger model")
        return read

    def __str__(self) -> str:
        weights = "new weights" if self.weights is None else "its weights"
        return f"{type(self.config).__name__} of {self.source}, {weights}, context {self.context}"

    @cached_property
    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return self._build()

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.on_meta.parameters())

    @property
    def learning_rate(self) -> float:
        """Learning rate: by the width as for our own models, a tenth of that for weights that are trained already."""
        return 3e-3 * 128 / int(getattr(self.config, "hidden_size", 1024)) * (0.1 if self.weights else 1.0)

    def with_vocabulary(self, size: int) -> HuggingFace:
        """Raises ValueError where the text has more tokens than the model."""
        if size > self.vocabulary:
            raise ValueError(
                f"the text has a vocabulary of {size}, --hf {self.source} one of {self.vocabulary}; give the model's "
                "own --tokenizer"
            )
        return self

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError for several ranks, over which our own model is shared."""
        if ranks > 1:
            raise ValueError("--hf trains on one rank; leave --tp, --etp, --ep and --fsdp out")

    def settings(self) -> dict[str, Any]:
        """Reads what the file says of the model, as JSON has it."""
        return {"transformers": _told(self.values), "context": self.context}

    def make(self, recipe: Recipe | None, seed: int, ranks: Ranks = ALONE) -> nn.Module:
        """A new model that gives logits, whose linears compute in `recipe`.

        Raises ValueError where its weights cannot be loaded, or where it is not causal.
        """
        self.check_ranks(ranks.size)
        with own_random_numbers(seed, torch.device("cpu")):
            model = self._build() if self.weights is None else self._load(self.weights)
            self._check_causal(model)
        convert(model, "none" if recipe is None else recipe)
        model.register_forward_hook(lambda module, inputs, output: output.logits)
        return model

    def _check_causal(self, model: nn.Module) -> None:
        """Raises ValueError where a token changes the logits of earlier ones: these would be trained to copy it."""
        tokens = torch.arange(min(PROBED, self.context)).repeat(2, 1) % self.vocabulary
        tokens[1, -1] = (tokens[1, -1] + 1) % self.vocabulary
        training = model.training
        try:
            with torch.no_grad():
                first, second = model.eval()(tokens).logits[:, :-1]
        except Exception as error:
            raise ValueError(f"--hf: {self.source} gives no logits of tokens alone: {_short(error)}") from error
        model.train(training)
        if first.numel() and (first - second).abs().max() > 1e-3 * first.abs().max():
            raise ValueError(
                f"--hf: {self.source} is not causal: a token changes the logits of earlier ones, which are to predict "
                "it; give a decoder, or of an encoder such as BERT a config.json with is_decoder true"
            )

    def _build(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        made: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            self.config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
        return made

    def _load(self, folder: Path) -> nn.Module:
        from transformers import AutoModelForCausalLM

        try:
            answer: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), config=self.config, dtype=torch.float32, attn_implementation="sdpa",
                trust_remote_code=False, local_files_only=True, use_safetensors=True, output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )  # fmt: skip
        except Exception as error:
            raise _no_weights(_damaged(folder), _short(error)) from error
        loaded, told = answer
        for name, saved, needed in sorted(told["mismatched_keys"]):
            raise _no_weights(folder, f"{name} is {list(saved)} there, and {list(needed)} by config.json")
        if missing := sorted(told["missing_keys"]):
            raise _no_weights(folder, f"{len(missing)} are missing, the first is {missing[0]}")
        made: nn.Module = loaded
        return made


def _folder_of_weights(path: Path) -> Path | None:
    """The folder, where it has weights; raises ValueError where they are in files that are not read."""
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return path if path.is_dir() else None
    for other in sorted(each for pattern in OTHER_WEIGHTS for each in path.glob(pattern)):
        raise ValueError(
            f"--hf: {path} has weights in {other.name}, and only safetensors are read; load them where you trust them "
            f"and convert them with save_pretrained of transformers, or give {path / 'config.json'} for new weights"
        )
    return None


def _check_sizes(values: dict[str, Any]) -> None:
    """Raises ValueError for whole numbers that no model has, before the library makes so many layers of them."""
    most = {LAYERS: 1, EXPERTS: 1}
    for name, value in _integers(values):
        count = next((pattern for pattern in most if pattern.search(name)), None)
        bound = MOST_SIZE if count is None else MOST_LAYERS
        if abs(value) > bound and not UNBOUNDED.search(name):
            raise ValueError(f"{name} is {value}, the most is {bound:,}")
        if count is not None:
            most[count] = max(most[count], value)
    if most[LAYERS] * most[EXPERTS] > MOST_MODULES:
        raise ValueError(f"{most[LAYERS]} layers of {most[EXPERTS]} experts are more than {MOST_MODULES:,} in all")


def _integers(values: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The whole numbers, with the names that they or their lists have."""
    if isinstance(values, dict):
        for each, value in values.items():
            yield from _integers(value, each)
    elif isinstance(values, list):
        for value in values:
            yield from _integers(value, name)
    elif type(values) is int:
        yield name, values


def _told(values: Any) -> Any:
    """Without what makes no other training."""
    if not isinstance(values, dict):
        return values
    return {name: _told(value) for name, value in values.items() if name not in UNTOLD and name[:1] != "_"}


def _no_model(file: Path, error: Exception) -> ValueError:
    return ValueError(
        f"--hf: {file} describes no model: {_short(error)}; give the config.json of a causal language model, or its "
        "folder"
    )


def _no_weights(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"--hf: the weights in {path} cannot be loaded: {problem}; get the files again, or give the config.json alone "
        "for new weights"
    )


def _damaged(folder: Path) -> Path:
    """The first of its files that cannot be opened, else the folder."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception:
            return file
    return folder


def _short(error: Exception) -> str:
    """A library's message on one line, without its list of all models."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(" Model type should be one of")[0].rstrip(".")[:200]
