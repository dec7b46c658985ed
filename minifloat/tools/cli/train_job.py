"""Job of a `minifloat train`: the runs, their checks and the report."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from minifloat.nn.inspect import inspect, own_file
from minifloat.recipe import DelayedScaling, Recipe, named
from minifloat.tools import inspected
from minifloat.tools.cli import device_name, user_errors
from minifloat.tools.cli.names import BF16, FINISH_4BIT, MAX_GAP, MAX_GAP_4BIT
from minifloat.tools.cli.output import Observer, observers
from minifloat.tools.cli.ranks import PATIENCE, launcher
from minifloat.tools.cli.resume import Start, checkpoint_folder, resume_command
from minifloat.tools.train import data, report
from minifloat.tools.train.captured import check_capture
from minifloat.tools.train.checkpoint import TOKENIZER
from minifloat.tools.train.checkpoint_writer import Checkpoints, SaveError
from minifloat.tools.train.hf import HuggingFace
from minifloat.tools.train.interrupt import signals_noted
from minifloat.tools.train.loop import Interrupted, Metrics, Run, TrainConfig, peak_of_process
from minifloat.tools.train.loop import train as train_model
from minifloat.tools.train.model import MODELS, ModelConfig
from minifloat.tools.train.ranks import ALONE, Ranks


@dataclass(frozen=True)
class Job:
    """One command: what is trained (`names`: the recipe and, where asked for, its twin), on what, and where it goes."""

    names: tuple[str, ...]
    model: ModelConfig | HuggingFace
    config: TrainConfig
    corpus: data.Corpus
    device: torch.device
    out: Path
    save_every: int | None = None
    keep: int = 2
    start: Start = field(default_factory=Start)
    tensorboard: bool = False
    ranks: Ranks = ALONE
    cuda_graph: bool = False
    inspect: int | None = None  # steps from one that is inspected to the next

    def __post_init__(self) -> None:
        if self.inspect is not None and self.cuda_graph:
            raise ValueError("--inspect sees the casts of eager steps, and --cuda-graph replays them; leave one out")
        if self.inspect is not None and not any(map(recipe_of, self.names)):
            raise ValueError(f"--inspect sees casts, and {BF16} has none; choose another --recipe, or leave it out")
        if self.cuda_graph:
            check_capture(self.device, self.ranks)
        if self.config.fp32_wgrad and not self.ranks.alone:
            raise ValueError(f"--fp32-wgrad is for one process, and this is one of {self.ranks.size}; leave it out")
        self.model.check_ranks(self.ranks.tp.size)
        self.ranks.check_batch(self.config.batch_size, self.model.context)
        for name in self.names:
            self.checkpoints(name)  # raises ValueError now for what would not work later
        for start in self.start.continued.values():
            if start.step > self.config.steps:
                raise ValueError(
                    f"{start.path} is of step {start.step}, beyond --steps {self.config.steps}; choose at least "
                    f"{start.step}, or start another run from its weights with --resume-from and another --seed"
                )

    def checkpoints(self, name: str) -> Checkpoints:
        """Checkpoints of the run of that name."""
        files = {} if self.corpus.tokenizer is None else {TOKENIZER: self.corpus.tokenizer}
        settings = settings_of(name, self.model, self.config, self.corpus)
        start = self.start.continued.get(name)
        return Checkpoints(checkpoint_folder(self.out, name), settings, self.save_every, self.keep, start, files)


def settings_of(
    name: str, model: ModelConfig | HuggingFace, config: TrainConfig, corpus: data.Corpus
) -> dict[str, Any]:
    """Settings that a run which continues the one of that name must share."""
    text = {"text": corpus.fingerprint, "unit": corpus.unit}
    return {"recipe": name, "model": model.settings(), **text, **config.settings()}


def check_experts(ep: int | None, sizes: ModelConfig | HuggingFace, names: tuple[str, ...]) -> None:
    """Raises ValueError for experts that `ep` ranks cannot share out."""
    if ep is None:
        return
    experts = sizes.experts if isinstance(sizes, ModelConfig) else 0
    if not experts:
        raise ValueError(f"--ep {ep} shares out experts, and the model has none; give --experts, or leave --ep out")
    if experts % ep:
        raise ValueError(f"--experts {experts} cannot be shared out over --ep {ep} ranks alike; choose a divisor")
    delayed = next((name for name in names if ep > 1 and isinstance(recipe_of(name), DelayedScaling)), None)
    if delayed is not None:
        raise ValueError(
            f"--ep {ep} and the recipe {delayed}: delayed scaling has other histories on each rank, which checkpoints "
            "of this command lack; choose --recipe current or a recipe of blocks, or --etp in place of --ep"
        )


def check_limits(max_gap: float | None, max_gradient_gap: float) -> None:
    """Raises ValueError for limits that nothing, or not even a twin, would meet."""
    for option, limit in (("--max-gap", max_gap), ("--max-gradient-gap", max_gradient_gap)):
        if limit is not None and not limit >= 0:
            raise ValueError(f"{option} is {limit}; choose 0 or more, such as {MAX_GAP}, or inf for any")


def recipe_of(name: str) -> Recipe | None:
    """The recipe of that name; none for bf16."""
    return None if name == BF16 else named(name)


def default_gap(name: str) -> float:
    """Largest accepted gap of the recipe's validation loss from its twin's, relative."""
    return MAX_GAP_4BIT if is_4bit(name) else MAX_GAP


def default_finish(names: tuple[str, ...]) -> float:
    """Share of the steps, the last ones, without a recipe: it closes a third or more of the gap of a 4-bit one."""
    return FINISH_4BIT if any(map(is_4bit, names)) else 0.0


def is_4bit(name: str) -> bool:
    """Whether a product of the recipe has 4-bit elements."""
    recipe = recipe_of(name)
    return recipe is not None and report.has_4bit(recipe)


def run_or_stop(job: Job) -> list[Run]:
    """Trains; ends the command, and says how to go on, where a signal or a number that is not finite stops it."""
    with signals_noted() as signal_that_came:
        try:
            return execute(job, signal_that_came)
        except Interrupted as stopped:
            if job.ranks.first:
                again = launcher(job.ranks.size) + resume_command(sys.argv[1:], job.out.absolute())
                typer.echo(f"{stopped}\ncontinue with: {again}", err=True)
            raise typer.Exit(128 + (signal_that_came() or signal.SIGINT)) from stopped
        except (FloatingPointError, ValueError, OSError) as error:
            if job.ranks.first or not isinstance(error, (FloatingPointError, SaveError)):  # these are all ranks'
                typer.echo(f"FAILED: {error}", err=True)
            raise typer.Exit(1) from error
        except torch.OutOfMemoryError as error:
            way_out = "choose a smaller --batch-size (with --accumulate, for as many sequences a step) or --context"
            typer.echo(f"FAILED: the memory of {job.device} is too small; {way_out}: {error}", err=True)
            raise typer.Exit(1) from error
        except RuntimeError as error:
            if job.ranks.alone or "timed out" not in str(error).lower():
                raise
            typer.echo(f"FAILED: another rank was silent for {job.ranks.timeout} (see --timeout): {error}", err=True)
            raise typer.Exit(1) from error


def execute(job: Job, stop: Callable[[], object] = lambda: False) -> list[Run]:
    """Trains each of the job's models in turn, the recipe's first, until `stop` answers true."""
    runs = []
    with ExitStack() as seen:
        done = {name: at.step for name, at in job.start.continued.items()}
        left = {name: job.config.steps - done.get(name, 0) for name in job.names}
        peak = partial(peak_of_process, job.device)
        watched = observers(job.out, left, job.config.steps, job.corpus.unit, job.tensorboard, peak)
        observer = seen.enter_context(watched) if job.ranks.first else unobserved
        for name in job.names:
            job.ranks.set_timeout(PATIENCE)  # until its first step is done, which compiles
            with user_errors():
                model = job.model.make(recipe_of(name), job.config.seed, job.ranks)
            with inspecting(job, name, model, observer(name)) as observe:
                run = train_model(
                    name, model, job.model.context, job.corpus, job.config, job.device, observe,
                    checkpoints=job.checkpoints(name), weights=job.start.weights.get(name), stop=stop, ranks=job.ranks,
                    cuda_graph=job.cuda_graph,
                )  # fmt: skip
            runs.append(run)
    return runs


@contextmanager
def inspecting(job: Job, name: str, model: nn.Module, observe: Observer) -> Iterator[Observer]:
    """Adds `--inspect` to an observer: what a step's casts lost goes to a file, and is drawn at the run's end.

    Each rank has a file, of what it cast. The lines of steps before those that this command does stay. Of a step with
    several micro-batches the first is inspected.
    """
    if job.inspect is None or recipe_of(name) is None:
        yield observe
        return
    folder, parts = job.out / "inspect" / name, job.config.accumulate
    step = job.start.continued[name].step if name in job.start.continued else 0
    if job.ranks.first:
        inspected.keep(folder, step)
    with inspect(model, job.inspect * parts) as seen:
        seen.step = step * parts - 1

        def write(last: int) -> None:
            lines = [line | {"step": line["step"] // parts + 1} for line in seen.lines(forget=True)]
            if lines := [line for line in lines if line["step"] <= last]:
                with own_file(folder).open("a") as file:
                    file.write("".join(json.dumps(line) + "\n" for line in lines))

        def observe_too(metrics: Metrics) -> None:
            nonlocal step
            observe(metrics)
            step = max(step, metrics.step)
            write(step)

        try:
            yield observe_too
        finally:
            write(step + 1)  # one that has failed
            if job.ranks.first and inspected.files(folder):
                typer.echo(f"inspection: {inspected.write_report(folder)}")


def unobserved(name: str) -> Observer:
    """Makes what ignores a step's metrics, on ranks other than the first."""
    return lambda metrics: None


def conclude(job: Job, runs: list[Run], max_gap: float, max_gradient_gap: float) -> bool:
    """Checks the runs, writes loss.png and report.md and prints the outcome; true when all checks passed."""
    unit = job.corpus.unit
    entropy = data.unigram_entropy(job.corpus.train, job.corpus.validation, job.corpus.vocabulary)
    comparison = report.compare(*runs) if len(runs) == 2 else None
    problems = [problem for run in runs for problem in gemm_problems(job, run)]
    if comparison is not None:
        problems += report.check_loss(runs[0].name, comparison, max_gap, max_gradient_gap)
    title = f"{' and '.join(job.names)}, {model_name(job.model)}, {date.today().isoformat()}"
    text = report.render(runs, facts(job, runs), entropy, comparison, problems, unit)
    try:
        report.figure(runs, entropy, title, unit).savefig(job.out / "loss.png", dpi=120)
        (job.out / "report.md").write_text(text)
    except OSError as error:
        raise OSError(
            f"the report cannot be written to {job.out}: {error}; the training is saved: the same command with "
            "--resume writes it once that is mended"
        ) from error
    for run in runs:
        typer.echo(
            f"{run.name}: validation loss {run.validation_loss:.4f} nats/{unit} (unigram entropy {entropy:.4f}), "
            f"{run.tokens_per_second:,.0f} {unit}s/s"
        )
    if comparison is not None:
        typer.echo(report.describe(runs, comparison, unit))
    for problem in problems:
        typer.echo(f"FAILED: {problem}", err=True)
    typer.echo(f"report: {job.out / 'report.md'}")
    for run in runs:
        typer.echo(f"model: {checkpoint_folder(job.out, run.name)}")
    return not problems


def model_name(model: ModelConfig | HuggingFace) -> str:
    """A model of `--model` by its name, others by their sizes."""
    if isinstance(model, HuggingFace):
        return f"{model}"
    named = (name for name, sizes in MODELS.items() if sizes.with_vocabulary(model.vocabulary) == model)
    return next(named, f"{model.layers} layers of {model.dim}")


def gemm_problems(job: Job, run: Run) -> list[str]:
    """Lists what is wrong with the formats in which a run's linears computed."""
    recipe = recipe_of(run.name)
    if recipe is None:
        return []
    config, a_step = job.config, run.linears * job.config.accumulate
    each = a_step * config.quantized_steps
    if run.name in job.start.continued:  # a run that is extended had a finish before
        unquantized = sum(n for gemm, n in run.gemms.items() if (gemm.gemm, gemm.a) == ("fprop", "identity"))
        each = min(each, a_step * config.steps - unquantized)
    return report.check_gemms(run.name, run.gemms, recipe.expected_gemms(), each, partly=config.finish > 0)


def facts(job: Job, runs: list[Run]) -> dict[str, str]:
    """Facts about the conditions, for the report."""
    sizes, config = job.model, job.config
    return {
        "command": f"`{launcher(job.ranks.size)}minifloat {shlex.join(sys.argv[1:])}`",
        "model": f"{runs[0].parameters:,} parameters, {sizes}",
        "training": f"{config}",
        "text": job.corpus.source,
        "device": device_name(job.device),
        **({} if job.ranks.alone else {"ranks": _ranks(job.ranks)}),
        **{f"{name} continued from": f"step {at.step}, {at.path}" for name, at in job.start.continued.items()},
        **{f"{name} started from the weights of": f"{at.path}" for name, at in job.start.weights.items()},
        "peak memory": ("of each run" if job.device.type == "cuda" else "of the process up to each run's end")
        + ("" if job.ranks.alone else ", on the first rank"),
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        "high precision": "the embedding, the norms, the attention product and the output head, in every recipe",
    }


def _ranks(ranks: Ranks) -> str:
    tokens = "split by tokens elsewhere" if ranks.sequence_parallel else "all tokens on each elsewhere"
    told = []
    if ranks.mesh is not None:
        shared = {"the rows of each weight": ranks.etp.size, "experts": ranks.ep.size}
        parts = [f"{size} at a time {what}" for what, size in shared.items() if size > 1]
        told = [", and ".join([f"{ranks.data.size}, which share the batch", *parts])]
    elif ranks.data.size > 1:
        told = [f"{ranks.data.size}, which shard the parameters and share the batch"]
    told += [f"{ranks.tp.size}, which share each linear; {tokens}"] if ranks.tp.size > 1 else []
    return "; times ".join(told)
