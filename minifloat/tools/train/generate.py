"""Text from a trained model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minifloat.recipe import Recipe
from minifloat.tools.train.checkpoint import MODEL, TOKENIZER, Checkpoint
from minifloat.tools.train.model import ModelConfig, Transformer
from minifloat.tools.train.run import check_seed
from minifloat.tools.train.tokens import load_tokenizer, read_tokenizer, tokenizer_errors
from minifloat.tools.train.weights import load_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 10**6  # they come at once, at the end


class Codec:
    """Text to tokens and back, as the checkpoint's training had them: bytes, or a tokenizer's.

    `tokenizer` (a JSON file) is for checkpoints of packed token files, which have none of their own. Raises
    ValueError when there is none and when its vocabulary is larger than the model's.
    """

    def __init__(self, checkpoint: Checkpoint, tokenizer: Path | None = None) -> None:
        if tokenizer is not None:
            self._tokenizer: Tokenizer | None = load_tokenizer(tokenizer)
        else:
            own = checkpoint.content(TOKENIZER)
            self._tokenizer = None if own is None else read_tokenizer(own, checkpoint.path / TOKENIZER)
        vocabulary = trained_config(checkpoint).vocabulary
        if self._tokenizer is None and checkpoint.settings.get("unit") != "byte":
            raise ValueError(f"{checkpoint.path} was trained on tokens without a tokenizer; give --tokenizer")
        if self._tokenizer is not None and self._tokenizer.get_vocab_size() > vocabulary:
            size = self._tokenizer.get_vocab_size()
            raise ValueError(f"the tokenizer has {size} tokens, the model {vocabulary}; give its own --tokenizer")

    def encode(self, text: str) -> list[int]:
        """Raises ValueError for a text that is no UTF-8."""
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt: {text!r:.80} is not UTF-8; give text, in the terminal's UTF-8") from error
        if self._tokenizer is None:
            return list(content)
        with tokenizer_errors("the tokenizer cannot encode the prompt"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: list[int]) -> str:
        """Bytes that are no UTF-8 become the replacement character."""
        if self._tokenizer is None:
            return bytes(tokens).decode("utf-8", errors="replace")
        with tokenizer_errors("the tokenizer cannot decode what was generated"):
            text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text


def trained_config(checkpoint: Checkpoint) -> ModelConfig:
    """The sizes of the checkpoint's model; raises ValueError where its settings name none."""
    sizes = checkpoint.settings.get("model")
    if isinstance(sizes, dict) and "transformers" in sizes:
        raise ValueError(
            f"{checkpoint.path} is of a model of transformers (--hf); load {MODEL}.safetensors into that model, and "
            "use its generate"
        )
    try:
        config = ModelConfig(**checkpoint.settings["model"])
        if all(type(size) in (int, float) and size > 0 for size in config.settings().values()):
            return config
        problem = f"its sizes are {config}"
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise ValueError(f"{checkpoint.path} does not say which model it is of: {problem:.300}; use another checkpoint")


def trained_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Reads the dtype of activations; raises ValueError where the checkpoint's settings name none."""
    dtype = getattr(torch, str(checkpoint.settings.get("dtype")), None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise ValueError(f"{checkpoint.path} does not say in which dtype it was trained; use another checkpoint")


def load_model(checkpoint: Checkpoint, recipe: Recipe | None, device: torch.device) -> Transformer:
    """The checkpoint's model, whose linears compute in `recipe`; delayed scaling's buffers come along if it has them.

    Raises ValueError when the weights are of another model.
    """
    config, state = trained_config(checkpoint), checkpoint.model_state()
    _check_sizes(checkpoint, config, state)
    model = Transformer(config, recipe)
    load_weights(model, state, checkpoint.path)
    return model.to(device).eval()


def _check_sizes(checkpoint: Checkpoint, config: ModelConfig, state: Mapping[str, Tensor]) -> None:
    """Raises ValueError where the settings name a model that the files do not have, before its memory is asked for."""
    if config.layers > len(state):
        raise ValueError(
            f"{checkpoint.path} does not fit its own settings: of {config.layers} layers it has no weights"
        )
    with torch.device("meta"):
        expected = Transformer(config).state_dict()
    for name, tensor in expected.items():
        if name not in state or state[name].shape != tensor.shape:
            found = list(state[name].shape) if name in state else "missing"
            raise ValueError(
                f"{checkpoint.path} does not fit its own settings: {name} should be {list(tensor.shape)}, is {found}"
            )


def generate(
    model: nn.Module,
    prompt: list[int],
    count: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[int]:
    """Gives `count` tokens that follow `prompt`, each drawn from softmax(logits / temperature).

    The model sees at most the latest `context` tokens. `temperature` 0 takes the most likely token, `top_k` leaves only
    so many most likely ones. Equal seeds give equal tokens. `dtype` is that of the activations.

    Raises:
        ValueError: the prompt is empty, or a number is out of its range.
    """
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if not 0 <= temperature < math.inf:
        raise ValueError(
            f"--temperature: the temperature is {temperature}; choose 0 (the most likely token) or a larger number"
        )
    if not 0 <= count <= MOST_TOKENS:
        raise ValueError(f"--tokens is {count}; choose from 0 to {MOST_TOKENS:,}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k is {top_k}; choose at least 1")
    check_seed(seed)
    generator, device, seen = torch.Generator().manual_seed(seed), next(model.parameters()).device, list(prompt)

    def tokens() -> Iterator[int]:
        for _ in range(count):
            window = torch.tensor([seen[-context:]], device=device)
            with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                logits_V = model(window)[0, -1]
            seen.append(draw(logits_V.double().cpu(), temperature, top_k, generator))
            yield seen[-1]

    return tokens()  # what precedes has raised before the first one is drawn


def draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """One token, of float64 logits [V] on the CPU, so that the choice does not depend on the device's sampling."""
    if temperature == 0:
        return int(logits.argmax())
    best = logits.topk(min(top_k or len(logits), len(logits)))
    # Differences from the largest: a small temperature then overflows to -inf, never to inf.
    probabilities = ((best.values - best.values[0]) / temperature).softmax(0)
    return int(best.indices[torch.multinomial(probabilities, 1, generator=generator)])
