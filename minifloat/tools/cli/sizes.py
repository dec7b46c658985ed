"""The model that a command's options ask for, and whether this machine can hold it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minifloat.tools.cli.names import MODEL, choice
from minifloat.tools.train.hf import HuggingFace
from minifloat.tools.train.model import MODELS, ModelConfig
from minifloat.tools.train.ranks import Ranks
from minifloat.tools.train.run import TrainConfig

STATE_BYTES = 16  # of a parameter: weight, gradient and two moments of the optimizer, fp32
GIB = 2**30


@dataclass(frozen=True)
class OwnSizes:
    """The options that change a named model's sizes; None: as they are."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    mlp_hidden: int | None = None
    context: int | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_bias_rate: float | None = None

    def of(self, base: ModelConfig) -> ModelConfig:
        """The sizes of `base` with these; the MLP and the key/value heads keep their ratios unless they are given.

        Raises ValueError for what cannot be.
        """
        for name, value in (("--top-k", self.top_k), ("--expert-bias-rate", self.expert_bias_rate)):
            if value is not None and not (base.experts if self.experts is None else self.experts):
                raise ValueError(f"{name} is {value}, and there are no experts; give --experts, or leave it out")
        heads = base.heads if self.heads is None else self.heads
        kv_heads = math.gcd(heads, max(1, heads * base.kv_heads // base.heads)) if heads > 0 else heads
        dim = base.dim if self.hidden is None else self.hidden
        given: dict[str, Any] = {
            "dim": dim, "layers": self.layers, "heads": heads, "context": self.context,
            "experts": self.experts, "top_k": self.top_k, "expert_bias_rate": self.expert_bias_rate,
            "kv_heads": kv_heads if self.kv_heads is None else self.kv_heads,
            "hidden": dim * base.hidden // base.dim if self.mlp_hidden is None else self.mlp_hidden,
        }  # fmt: skip
        return replace(base, **{name: value for name, value in given.items() if value is not None})


def sizes_of(model: str | None, own: OwnSizes, hf: Path | None = None) -> ModelConfig | HuggingFace:
    """The sizes of the named model, with one's own, or a model of transformers.

    Raises ValueError for what cannot be.
    """
    if hf is not None:
        if own != OwnSizes(context=own.context) or model is not None:
            raise ValueError(
                f"--hf {hf} has sizes of its own; leave --model, --layers, --hidden, --heads, --kv-heads, "
                "--mlp-hidden, --experts, --top-k and --expert-bias-rate out"
            )
        return HuggingFace.read(hf, own.context)
    model = MODEL if model is None else model
    if model not in MODELS:
        raise ValueError(
            f"--model: there is no model {model!r}; {choice(model, tuple(MODELS))}, or give sizes of your own with "
            "--layers, --hidden, --heads and --context"
        )
    return own.of(MODELS[model])


def check_memory(sizes: ModelConfig | HuggingFace, config: TrainConfig, device: torch.device, ranks: Ranks) -> None:
    """Raises ValueError where the least that a training needs is more than there is, before anything is made."""
    there = memory_of(device)
    shared, shards = (ranks.size, ranks.shards) if device.type == "cuda" else (1, 1)  # a CPU's memory is all ranks'
    state = STATE_BYTES * sizes.parameters // shards
    if state > there:
        raise ValueError(
            f"{sizes.parameters:,} parameters take {state / GIB:,.1f} GiB with gradients and optimizer, {device} has "
            f"{there / GIB:,.1f}; choose a smaller --model, fewer --layers, or a smaller --hidden or --vocabulary"
        )
    tokens = config.batch_size * sizes.context
    logits = 4 * tokens * sizes.vocabulary // shared
    if state + logits > there or 16 * config.sequences * sizes.context > memory_of(torch.device("cpu")):
        raise ValueError(
            f"{config.accumulate} times {tokens:,} tokens in a step do not fit: their logits alone take "
            f"{logits / GIB:,.1f} GiB, {device} has {there / GIB:,.1f}; choose a smaller --batch-size, --context or "
            "--accumulate"
        )


def memory_of(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
