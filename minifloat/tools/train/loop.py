"""Trains one model and records what happened."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from minifloat.comm.dtensor_ddp import local_rows
from minifloat.functional import count_gemms
from minifloat.nn.linear_state import LinearState
from minifloat.tools.train.captured import CapturedStep, check_capture
from minifloat.tools.train.checkpoint import Checkpoint
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError, Saver, saving
from minifloat.tools.train.data import Batches, Corpus, fixed_batches
from minifloat.tools.train.nonfinite import FINITE, find_non_finite
from minifloat.tools.train.ranks import ALONE, Ranks
from minifloat.tools.train.run import Interrupted, Metrics, NonFiniteError, Run, TrainConfig
from minifloat.tools.train.state import TrainState, own_random_numbers, seed_generators
from minifloat.tools.train.step import (
    Batch,
    batch_loss,
    compute_unquantized,
    imbalance_of,
    keep_wgrads_unrounded,
    make_optimizer,
    micro_batches,
    train_step,
)

__all__ = ["Interrupted", "Metrics", "NonFiniteError", "Run", "TrainConfig", "evaluate", "train", "train_step"]


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
    cuda_graph: bool = False,
    optimizer: Callable[[nn.Module, TrainConfig], torch.optim.Optimizer] = make_optimizer,
) -> Run:
    """Trains `model` (moved to `device`) and hands each step's metrics to `observe`.

    Runs of equal `corpus`, `config` and `context` see the same batches, and all their random numbers come from
    `config.seed`. A run that continues from `checkpoints.start` hands the earlier steps' metrics to `observe` too; one
    that does not starts from `weights`, those of another run, if there are any. A model that is shared by `ranks` is
    trained by all of them alike; its checkpoints fit any number of them. They are written while the training goes on.
    `optimizer` makes what steps the model; only `make_optimizer`'s state goes into checkpoints.
    With `cuda_graph` each step from the second on is one replay of a CUDA graph, with the same results to the bit; the
    steps of `config.finish`, which have no recipe, are captured anew.

    Raises:
        NonFiniteError: the loss or the gradient of a step is not finite; names the step and the layer. Parameters and
            optimizer stay as they were before the step, and are saved where `checkpoints` says. Or a validation loss
            is not finite; the step before it is then not saved.
        Interrupted: `stop` answered true after a step; the state is saved.
        ValueError: `cuda_graph`, and the device is no GPU, there are other ranks, or the model cannot be captured.
        CheckpointError: `checkpoints.start` is damaged or does not fit.
        SaveError: a checkpoint could not be written; said after a later step.
    """
    if cuda_graph:
        check_capture(device, ranks)
    model.to(device).train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with own_random_numbers(config.seed, device):
        stream = Batches(corpus.train, config.sequences, context, config.seed)
        held_out = fixed_batches(
            corpus.validation, config.batch_size, context, config.evaluation_batches * config.accumulate
        )
        state = TrainState(model, optimizer(model, config), stream, device, ranks)
        if checkpoints is not None and checkpoints.start is not None:
            state.load(checkpoints.start)
        elif weights is not None:
            state.load_weights(weights)
        for metrics in state.history:
            observe(metrics)
        if config.fp32_wgrad:
            keep_wgrads_unrounded(model)
        first = state.step + 1
        captured: CapturedStep | None = None
        with saving(checkpoints, ranks) as saver:
            while state.step < config.steps:
                if state.step == max(first - 1, config.quantized_steps):
                    compute_unquantized(model)
                    captured = None
                if cuda_graph and captured is None:
                    captured = CapturedStep(model, state.optimizer, config, device)
                metrics = advance(name, state, config, held_out, context, saver, captured)
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
    captured: CapturedStep | None = None,
) -> Metrics:
    """One step, evaluated where its turn has come, added to the history; raises NonFiniteError."""
    start = time.perf_counter()
    step, rate = state.step + 1, config.rate(state.step + 1)
    state.mark()
    batch = next(state.stream)
    if (seed := state.ranks.seed(config.seed, step)) is not None:
        seed_generators(seed, state.device)
    if captured is not None:
        loss, norm, imbalance, counts = captured(batch, rate)
    else:
        with count_gemms() as counts:
            loss, norm = train_step(state.model, state.optimizer, batch, rate, config, state.device, state.ranks)
        share = imbalance_of(state.model)
        imbalance = None if share is None else float(share)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteError(
            f"{name}: step {step} has loss {loss} and gradient norm {norm}: {explain(state, batch, config)}; "
            f"{keep_last_good(state, saver)}"
        )
    seconds = time.perf_counter() - start
    validation = None
    if config.evaluates(step):
        part = held_out[:: 1 if step == config.steps else config.early_every]
        validation = evaluate(state.model, part, config, state.device, state.ranks)
    if validation is not None and not math.isfinite(validation):
        state.model.eval()
        where = locate(state, held_out[0], config)
        raise NonFiniteError(f"{name}: after step {step} the validation loss is {validation}: {where}")
    state.gemms.update(counts)
    rates = seconds, config.sequences * context / seconds
    state.history.append(Metrics(step, loss, norm, rate, *rates, validation, imbalance))
    return state.history[-1]


def explain(state: TrainState, batch: Batch, config: TrainConfig) -> str:
    """Says what was not finite first in the step that has just failed; the state is then as before that step."""
    state.rewind()
    where = locate(state, batch, config, config.loss_scale)
    state.rewind()
    return where


def locate(state: TrainState, batch: Batch, config: TrainConfig, scale: float = 1.0) -> str:
    """Finds where the computation of `scale` times the loss of `batch`, or its backward, is not finite first."""
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
    bad = not all(bool(local_rows(parameter).isfinite().all()) for parameter in state.model.parameters())
    if state.ranks.any(bad, state.device):
        return "nothing is saved, because parameters are not finite either"
    try:
        saved = state.save(saver, peak_memory(state))
        saver.wait()
    except SaveError as error:
        return f"the state after step {state.step} is not saved: {error}"
    return f"the state after step {state.step} is saved in {saved}"


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
    """Bytes, those of the run's earlier processes too."""
    own = peak_of_process(state.device)
    return None if own is None else max(state.peak_bytes, own)


def peak_of_process(device: torch.device) -> int | None:
    """Bytes: on CUDA the run's largest allocation, on a CPU the largest resident size of this process so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
