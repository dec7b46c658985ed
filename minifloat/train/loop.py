"""Trains one model and records what happened."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat.functional import Gemm, count_gemms
from minifloat.train.data import Corpus, batches, fixed_batches

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TrainConfig:
    """How long and how a model is trained."""

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

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluations", "evaluation_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; choose at least 1")
        if not self.learning_rate > 0:
            raise ValueError(f"the learning rate is {self.learning_rate}; choose a positive one, such as 3e-3")

    def rate(self, step: int) -> float:
        """The learning rate of a step (from 1): a linear rise, then a cosine down to a tenth."""
        warmup = max(1, round(self.warmup * self.steps))
        if step <= warmup:
            return self.learning_rate * step / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def evaluates(self, step: int) -> bool:
        return step == self.steps or step % max(1, self.steps // self.evaluations) == 0


@dataclass(frozen=True)
class Metrics:
    """One step: losses in nats a byte, time in seconds, rates in bytes a second."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    validation_loss: float | None = None


@dataclass(frozen=True)
class Run:
    """A finished run. `gemms` counts the training steps, not the evaluations."""

    name: str
    history: tuple[Metrics, ...]
    gemms: Counter[Gemm]
    peak_bytes: int | None
    parameters: int

    @property
    def validation_loss(self) -> float:
        loss = self.history[-1].validation_loss
        assert loss is not None, "the last step is always evaluated"
        return loss

    @property
    def tokens_per_second(self) -> float:
        """The median over the steps, which leaves out the first steps' compilation."""
        return statistics.median(metrics.tokens_per_second for metrics in self.history)


def train(
    name: str,
    model: nn.Module,
    context: int,
    corpus: Corpus,
    config: TrainConfig,
    device: torch.device,
    observe: Callable[[Metrics], None] = lambda _: None,
) -> Run:
    """Trains `model` (moved to `device`) and hands each step's metrics to `observe`.

    Runs of equal `corpus`, `config` and `context` see the same batches. Raises FloatingPointError, naming the step,
    when the loss or the gradient is not finite.
    """
    model.to(device).train()
    optimizer = make_optimizer(model, config)
    stream = batches(corpus.train, config.batch_size, context, config.seed)
    held_out = fixed_batches(corpus.validation, config.batch_size, context, config.evaluation_batches)
    gemms: Counter[Gemm] = Counter()
    history = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(1, config.steps + 1):
        start = time.perf_counter()
        rate = config.rate(step)
        with count_gemms() as counts:
            loss, norm = train_step(model, optimizer, next(stream), rate, config, device)
        gemms.update(counts)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(
                f"{name}: step {step} has loss {loss} and gradient norm {norm}; the run stops here"
            )
        seconds = time.perf_counter() - start
        validation = evaluate(model, held_out, config, device) if config.evaluates(step) else None
        tokens = config.batch_size * context / seconds
        history.append(Metrics(step, loss, norm, rate, seconds, tokens, validation))
        observe(history[-1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Run(name, tuple(history), gemms, peak_memory(device), parameters)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rate: float,
    config: TrainConfig,
    device: torch.device,
) -> tuple[float, float]:
    """One update at learning rate `rate`; returns the loss and the gradient norm before clipping.

    Reading the two numbers waits for the device, which is also what makes the step's time true.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = batch_loss(model, batch, config, device)
    (loss * config.loss_scale).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, 1 / config.loss_scale)
    norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value, norm_value = torch.stack((loss.detach(), norm)).tolist()
    return value, norm_value


def batch_loss(model: nn.Module, batch: Batch, config: TrainConfig, device: torch.device) -> Tensor:
    """The mean cross entropy in nats a byte, fp32 scalar."""
    inputs_BT, targets_BT = (part.to(device, non_blocking=True) for part in batch)
    with torch.autocast(device.type, dtype=config.dtype, enabled=config.dtype != torch.float32):
        logits_BTV = model(inputs_BT)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_out: list[Batch], config: TrainConfig, device: torch.device) -> float:
    """The mean loss over the held-out batches, weighted by their sizes; the model is back in training mode after it."""
    model.eval()
    losses = torch.stack([batch_loss(model, batch, config, device) for batch in held_out])
    sizes = torch.tensor([float(inputs.shape[0]) for inputs, _ in held_out], device=device)
    model.train()
    return float((losses * sizes).sum() / sizes.sum())


def peak_memory(device: torch.device) -> int | None:
    """Bytes: on CUDA the run's largest allocation, on a CPU the largest resident size of the process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
