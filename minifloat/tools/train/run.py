"""Settings of a training, metrics of its steps, and its results."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from minifloat.functional import Gemm

MOST = {"steps": 10**7, "batch_size": 2**24, "accumulate": 2**20, "evaluations": 10**7, "evaluation_batches": 2**20}
"""More would never end, or not fit: each step is a record in memory, in metrics.jsonl and in every checkpoint."""


NEWER = {"fp32_wgrad": False, "decay": "cosine", "finish": 0.0}
"""Settings that checkpoints name unless they are these, which was all there was once."""


def quantized_steps(steps: int, finish: float) -> int:
    """Number of the steps that are before a finish of that share of them."""
    return steps - round(finish * steps)


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that PyTorch's generators do not take."""
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"--seed: the seed is {seed}; choose one of 64 bits, from -2**63 to 2**63 - 1")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training."""

    steps: int
    batch_size: int = 16
    learning_rate: float = 3e-3
    seed: int = 0
    warmup: float = 0.1  # the fraction of the steps over which the learning rate rises
    weight_decay: float = 0.1
    clip: float = 1.0  # the largest gradient norm
    evaluations: int = 5
    evaluation_batches: int = 8
    dtype: torch.dtype = torch.bfloat16  # of the activations; parameters and optimizer state are fp32
    # A power of two changes no rounding but keeps gradients of a mean over many tokens from vanishing where a scale
    # does not follow them: delayed scaling starts at 1, and finds its scales one layer a step if they vanish.
    loss_scale: float = 2.0**16
    accumulate: int = 1  # micro-batches of `batch_size` sequences in a step
    fp32_wgrad: bool = False  # of linears; else dW is rounded to `dtype`, and copied to fp32
    decay: Literal["cosine", "linear"] = "cosine"  # of the learning rate: to a tenth, to zero
    early_every: int = 1  # evaluations before the last take one batch in so many
    finish: float = 0.0  # share of the steps, the last ones, that compute without a recipe

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            if not 1 <= (value := getattr(self, name)) <= most:
                choice = "at least 1" if value < 1 else f"at most {most:,}"
                raise ValueError(f"--{name.replace('_', '-')} is {value}; choose {choice}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"--learning-rate: the learning rate is {self.learning_rate}; choose a positive one, such as 3e-3"
            )
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"--warmup is {self.warmup}; choose a share of the steps, from 0 to 1")
        if not 0 <= self.finish < 1 or not self.quantized_steps:
            raise ValueError(
                f"--finish is {self.finish}; choose a share of the --steps {self.steps} that leaves one to the recipe, "
                "such as 0.2"
            )
        if not self.clip > 0:
            raise ValueError(f"--clip is {self.clip}; choose a gradient norm above 0, or inf")
        check_seed(self.seed)

    @property
    def sequences(self) -> int:
        """Number of sequences in a step."""
        return self.batch_size * self.accumulate

    @property
    def quantized_steps(self) -> int:
        """Number of steps before the finish."""
        return quantized_steps(self.steps, self.finish)

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 1): a linear rise, then the `decay`; a line would reach 0 after the last.

        It is that of a run of so many steps from the start, so a run that is extended goes on with the rates of the
        longer one: higher at once than those it had ended with.
        """
        warmup = max(1, round(self.warmup * self.steps))
        if step <= warmup:
            return self.learning_rate * step / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        if self.decay == "linear":
            return self.learning_rate * (self.steps + 1 - step) / (self.steps + 1 - warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def evaluates(self, step: int) -> bool:
        return step == self.steps or step % max(1, self.steps // self.evaluations) == 0

    def settings(self) -> dict[str, Any]:
        """The fields as JSON has them; newer ones where they are not the default, which older checkpoints do not name.

        `early_every` changes no step.
        """
        fields = asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}
        unnamed = {"early_every"} | {name for name, default in NEWER.items() if fields[name] == default}
        return {name: value for name, value in fields.items() if name not in unnamed}


@dataclass(frozen=True)
class Metrics:
    """One step: losses in nats a token (of bytes, a byte), time in seconds, rates in tokens a second."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    validation_loss: float | None = None
    imbalance: float | None = None  # the most choices of an expert over the mean, of all layers


@dataclass(frozen=True)
class Run:
    """A finished run. `gemms` counts the training steps, not the evaluations."""

    name: str
    history: tuple[Metrics, ...]
    gemms: Counter[Gemm]
    peak_bytes: int | None
    parameters: int
    linears: int = 0  # those of minifloat

    @property
    def validation_loss(self) -> float:
        loss = self.history[-1].validation_loss
        assert loss is not None, "the last step is always evaluated"
        return loss

    @property
    def tokens_per_second(self) -> float:
        """The median over the steps, which leaves out the first steps' compilation."""
        return statistics.median(metrics.tokens_per_second for metrics in self.history)


class NonFiniteError(FloatingPointError):
    """A loss or a gradient was not finite; the message names the step and the layer."""


class Interrupted(Exception):  # noqa: N818  # no error: it was asked for
    """A training stopped after `step`, as it was told to; `checkpoint` is where it can go on from, if it saves any."""

    def __init__(self, name: str, step: int, checkpoint: Path | None) -> None:
        saved = "nothing was saved" if checkpoint is None else f"saved in {checkpoint}"
        super().__init__(f"{name}: stopped after step {step}, {saved}")
        self.name, self.step, self.checkpoint = name, step, checkpoint
