"""Trains one model and records what happened."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import MoE, router_losses
from minifloat.comm.dtensor import own_rows
from minifloat.functional import count_gemms
from minifloat.nn.linear_state import LinearState
from minifloat.tools.train.checkpoint import Checkpoint
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError, Saver, saving
from minifloat.tools.train.data import Batches, Corpus, fixed_batches
from minifloat.tools.train.nonfinite import FINITE, find_non_finite
from minifloat.tools.train.ranks import ALONE, Ranks
from minifloat.tools.train.run import Interrupted, Metrics, NonFiniteError, Run, TrainConfig
from minifloat.tools.train.state import TrainState, own_random_numbers, seed_generators

__all__ = ["Interrupted", "Metrics", "NonFiniteError", "Run", "TrainConfig", "evaluate", "train", "train_step"]

Batch = tuple[Tensor, Tensor]


def train(
    name: str,
    model: nn.Module,
    context: int,
    corpus: Corpus,
    config: TrainConfig,
    device: torch.device,
    observe: Callable[[Metrics], None] = lambda _: None,
    *,
    checkpoints: Checkpoints | None = None,
    weights: Checkpoint | None = None,
    stop: Callable[[], object] = lambda: False,
    ranks: Ranks = ALONE,
) -> Run:
    """Trains `model` (moved to `device`) and hands each step's metrics to `observe`.

    Runs of equal `corpus`, `config` and `context` see the same batches, and all their random numbers come from
    `config.seed`. A run that continues from `checkpoints.start` hands the earlier steps' metrics to `observe` too; one
    that does not starts from `weights`, those of another run, if there are any. A model that is shared by `ranks` is
    trained by all of them alike; its checkpoints fit any number of them. They are written while the training goes on.

    Raises:
        NonFiniteError: the loss or the gradient of a step is not finite; names the step and the layer. Parameters and
            optimizer stay as they were before the step, and are saved where `checkpoints` says. Or a validation loss
            is not finite; the step before it is then not saved.
        Interrupted: `stop` answered true after a step; the state is saved.
        CheckpointError: `checkpoints.start` is damaged or does not fit.
        SaveError: a checkpoint could not be written; said after a later step.
    """
    model.to(device).train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with own_random_numbers(config.seed, device):
        stream = Batches(corpus.train, config.sequences, context, config.seed)
        held_out = fixed_batches(
            corpus.validation, config.batch_size, context, config.evaluation_batches * config.accumulate
        )
        state = TrainState(model, make_optimizer(model, config), stream, device, ranks)
        if checkpoints is not None and checkpoints.start is not None:
            state.load(checkpoints.start)
        elif weights is not None:
            state.load_weights(weights)
        for metrics in state.history:
            observe(metrics)
        first = state.step + 1
        with saving(checkpoints, ranks) as saver:
            while state.step < config.steps:
                metrics = advance(name, state, config, held_out, context, saver)
                if metrics.step == first:  # which compiles and allocates: it alone takes long
                    ranks.set_timeout(ranks.timeout)
                observe(metrics)
                told = state.step < config.steps and bool(stop()), saver is not None and saver.failed
                stopped, failed = ranks.any_of(told, device)
                saved = None
                if saver is not None and failed:
                    saver.wait()  # raises
                if saver is not None and (stopped or saver.checkpoints.due(state.step, config.steps)):
                    saved = state.save(saver, peak_memory(state))
                if stopped:
                    if saver is not None:
                        saver.wait()
                    raise Interrupted(name, state.step, saved)
    parameters = sum(ranks.numel(parameter) for parameter in model.parameters())
    linears = sum(isinstance(module, LinearState) for module in model.modules())
    return Run(name, tuple(state.history), state.gemms, peak_memory(state), parameters, linears)


def advance(
    name: str,
    state: TrainState,
    config: TrainConfig,
    held_out: list[Batch],
    context: int,
    saver: Saver | None,
) -> Metrics:
    """One step, evaluated where its turn has come, added to the history; raises NonFiniteError."""
    start = time.perf_counter()
    step, rate = state.step + 1, config.rate(state.step + 1)
    state.mark()
    batch = next(state.stream)
    if (seed := state.ranks.seed(config.seed, step)) is not None:
        seed_generators(seed, state.device)
    with count_gemms() as counts:
        loss, norm = train_step(state.model, state.optimizer, batch, rate, config, state.device, state.ranks)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteError(
            f"{name}: step {step} has loss {loss} and gradient norm {norm}: {explain(state, batch, config)}; "
            f"{keep_last_good(state, saver)}"
        )
    imbalance = imbalance_of(state.model)
    seconds = time.perf_counter() - start
    validation = evaluate(state.model, held_out, config, state.device, state.ranks) if config.evaluates(step) else None
    if validation is not None and not math.isfinite(validation):
        state.model.eval()
        where = locate(state, held_out[0], config)
        raise NonFiniteError(f"{name}: after step {step} the validation loss is {validation}: {where}")
    state.gemms.update(counts)
    rates = seconds, config.sequences * context / seconds
    state.history.append(Metrics(step, loss, norm, rate, *rates, validation, imbalance))
    return state.history[-1]


def explain(state: TrainState, batch: Batch, config: TrainConfig) -> str:
    """What was not finite first in the step that has just failed; the state is then as before that step."""
    state.rewind()
    where = locate(state, batch, config, config.loss_scale)
    state.rewind()
    return where


def locate(state: TrainState, batch: Batch, config: TrainConfig, scale: float = 1.0) -> str:
    """Where the computation of `scale` times the loss of `batch`, or its backward, is not finite first."""
    if not state.ranks.alone:  # one rank would find it before the others, which would wait for it
        return "somewhere; a run on one rank says in which layer"
    found = FINITE
    for part in micro_batches(batch, config):
        found = find_non_finite(state.model, lambda: batch_loss(state.model, part, config, state.device) * scale)  # noqa: B023
        if found != FINITE:
            break
    return found


def keep_last_good(state: TrainState, saver: Saver | None) -> str:
    """Saves the state if it is any good and says where."""
    if saver is None or state.step == 0:
        return "the run stops here"
    bad = not all(bool(own_rows(parameter).isfinite().all()) for parameter in state.model.parameters())
    if state.ranks.any(bad, state.device):
        return "nothing is saved, because parameters are not finite either"
    try:
        saved = state.save(saver, peak_memory(state))
        saver.wait()
    except SaveError as error:
        return f"the state after step {state.step} is not saved: {error}"
    return f"the state after step {state.step} is saved in {saved}"


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
    ranks: Ranks = ALONE,
) -> tuple[float, float]:
    """One update at learning rate `rate`; returns the loss and the gradient norm before clipping.

    Gradients are those of the mean over the micro-batches, one of which is in memory at a time.
    Parameters and optimizer do not change when one of the two is not finite. Reading them waits for the device, which
    is also what makes the step's time true: the optimizer's part shows in the next step's.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    losses = []
    for part in micro_batches(batch, config):
        loss = batch_loss(model, part, config, device, ranks)
        # Autograd's own thread for a GPU would cost the host up to half of its time (docs/layers.md), and a process
        # has one GPU. Hooks, recomputations and callbacks run in this thread too; kernels stay on their streams.
        with torch.autograd.set_multithreading_enabled(False):
            ((loss + router_losses(model)) * (config.loss_scale / config.accumulate)).backward()
        losses.append(loss.detach())
    gradients = [own_rows(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, 1 / config.loss_scale)
    norm = ranks.clip(model, config.clip)
    value, norm_value = torch.stack((ranks.mean(torch.stack(losses).mean()), norm)).tolist()
    if math.isfinite(value) and math.isfinite(norm_value):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value, norm_value


@torch.no_grad()
def imbalance_of(model: nn.Module) -> float | None:
    """The most choices of an expert over the mean, in the latest forward; the largest of all layers of this rank."""
    layers = [each.expert_counts for each in model.modules() if isinstance(each, MoE)]
    shares = [each.max() * each.numel() / each.sum().clamp(min=1) for each in layers if each is not None]
    return float(torch.stack(shares).max()) if shares else None


def micro_batches(batch: Batch, config: TrainConfig) -> list[Batch]:
    """The parts of a step's batch whose gradients are summed."""
    inputs, targets = (part.chunk(config.accumulate) for part in batch)
    return list(zip(inputs, targets, strict=True))


def batch_loss(
    model: nn.Module, batch: Batch, config: TrainConfig, device: torch.device, ranks: Ranks = ALONE
) -> Tensor:
    """The mean cross entropy in nats a token, fp32 scalar, over the tokens that this rank has.

    It is weighted so that :meth:`Ranks.mean` is that over the batch.
    """
    inputs_BT, targets_BT = (ranks.share(part).to(device, non_blocking=True) for part in batch)
    with torch.autocast(device.type, dtype=config.dtype, enabled=config.dtype != torch.float32):
        logits = model(inputs_BT)
    loss = F.cross_entropy(logits.flatten(0, -2).float(), ranks.own(targets_BT).flatten())
    return loss * ranks.weight(batch[0])


@torch.no_grad()
def evaluate(
    model: nn.Module, held_out: list[Batch], config: TrainConfig, device: torch.device, ranks: Ranks = ALONE
) -> float:
    """The mean loss over the held-out batches, weighted by their sizes; the model is back in training mode after it."""
    model.eval()
    losses = ranks.mean(torch.stack([batch_loss(model, batch, config, device, ranks) for batch in held_out]))
    sizes = torch.tensor([float(inputs.shape[0]) for inputs, _ in held_out], device=device)
    model.train()
    return float((losses * sizes).sum() / sizes.sum())


def peak_memory(state: TrainState) -> int | None:
    """Bytes: on CUDA the run's largest allocation, on a CPU the largest resident size of its processes so far."""
    if state.device.type == "cuda":
        return max(state.peak_bytes, torch.cuda.max_memory_allocated(state.device))
    if state.device.type != "cpu" or sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes
    return max(state.peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
