"""`minifloat train`: a small language model in low precision, and its high-precision twin."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import torch
import typer

from minifloat import Linear
from minifloat.cli import choose_device, device_name, user_errors
from minifloat.recipe import NAMES, Recipe, named
from minifloat.train import data, report
from minifloat.train.loop import Metrics, Run, TrainConfig
from minifloat.train.loop import train as train_model
from minifloat.train.model import MODELS, ModelConfig, Transformer

if TYPE_CHECKING:
    from rich.progress import Progress

BF16 = "bf16"  # the name of no recipe: the same model and the same bf16 activations, nothing quantized

# Relative, of the final validation losses of FP8; 4-bit elements learn visibly slower in a run this short.
MAX_GAP = 0.05
MAX_GAP_4BIT = 0.10
# Relative, of the first gradient norms: rounding moves them by up to 6 %, a scale off by two by 20 % and more.
MAX_GRADIENT_GAP = 0.12


@dataclass(frozen=True)
class Job:
    """One command: what is trained (`names`: the recipe and, where asked for, its twin), on what, and where it goes."""

    names: tuple[str, ...]
    model: ModelConfig
    config: TrainConfig
    corpus: data.Corpus
    device: torch.device
    out: Path


def train(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="text files or folders; default: Python's standard-library sources")
    ] = None,
    recipe: Annotated[str, typer.Option(help=f"one of {', '.join(NAMES)} or {BF16}")] = "current",
    against: Annotated[
        str | None, typer.Option(help="a second recipe, from the same start on the same batches, such as bf16")
    ] = None,
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "tiny",
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 120,
    batch_size: Annotated[int, typer.Option(help="sequences in a step")] = 16,
    learning_rate: Annotated[float | None, typer.Option(help="the peak; default: by the model's width")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seed: Annotated[int, typer.Option(help="of the initial weights and of the batches")] = 0,
    out: Annotated[Path | None, typer.Option(help="results; default: runs/RECIPE-TIME")] = None,
    max_gap: Annotated[
        float | None,
        typer.Option(help=f"largest relative gap of the losses; default {MAX_GAP}, 4-bit {MAX_GAP_4BIT}; inf: any"),
    ] = None,
    max_gradient_gap: Annotated[float, typer.Option(help="the same of the first gradient norms")] = MAX_GRADIENT_GAP,
) -> None:
    """Train a small Llama-style byte-level language model on real text in low precision.

    Writes metrics.jsonl, loss.png and report.md. Fails when a linear ran in other formats than its recipe's and, where
    there is a second recipe to compare with, when the losses are too far apart.
    """
    with user_errors():
        names = (recipe,) if against is None else (recipe, against)
        sizes = check_names(names, model)
        # The best rate of Adam falls with the width.
        config = TrainConfig(steps, batch_size, learning_rate or 3e-3 * 128 / sizes.dim, seed)
        corpus = data.load(paths or (), least=sizes.context + 1)
        folder = out or Path("runs") / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        job = Job(names, sizes, config, corpus, choose_device(device), folder)
    try:
        runs = execute(job)
    except FloatingPointError as error:
        typer.echo(f"FAILED: {error}", err=True)
        raise typer.Exit(1) from error
    limit = default_gap(recipe) if max_gap is None else max_gap
    if not conclude(job, runs, limit, max_gradient_gap):
        raise typer.Exit(1)


def check_names(names: tuple[str, ...], model: str) -> ModelConfig:
    """The named model's sizes; raises ValueError for a recipe or a model that does not exist."""
    for name in names:
        if name not in (*NAMES, BF16):
            raise ValueError(f"there is no recipe {name!r}; choose from {', '.join((*NAMES, BF16))}")
    if len(set(names)) < len(names):
        raise ValueError(f"--against {names[1]} compares {names[0]} with itself; choose another recipe")
    if model not in MODELS:
        raise ValueError(f"there is no model {model!r}; choose from {', '.join(MODELS)}")
    return MODELS[model]


def recipe_of(name: str) -> Recipe | None:
    """The recipe of that name; none for bf16."""
    return None if name == BF16 else named(name)


def default_gap(name: str) -> float:
    """How far the validation loss of the recipe of that name may be from its twin's, relative."""
    recipe = recipe_of(name)
    formats = [] if recipe is None else [spec for pair in recipe.expected_gemms().values() for spec in pair]
    return MAX_GAP_4BIT if any("e2m1" in spec for spec in formats) else MAX_GAP


def execute(job: Job) -> list[Run]:
    """Trains each of the job's models in turn, the recipe's first, and streams their metrics to metrics.jsonl."""
    job.out.mkdir(parents=True, exist_ok=True)
    runs = []
    with (job.out / "metrics.jsonl").open("w") as file, progress_bar() as progress:
        for name in job.names:
            linear = partial(Linear, bias=False, recipe=recipe_of(name))
            model = Transformer(job.model, linear, seed=job.config.seed)
            observe = observer(name, job.config.steps, file, progress)
            runs.append(train_model(name, model, job.model.context, job.corpus, job.config, job.device, observe))
    return runs


def observer(name: str, steps: int, file: IO[str], progress: Progress) -> Callable[[Metrics], None]:
    """What to do with a step's metrics: a line of JSON, a moved bar and, after an evaluation, a printed line."""
    task = progress.add_task(name, total=steps, status="")

    def observe(metrics: Metrics) -> None:
        file.write(json.dumps({"run": name, **asdict(metrics)}) + "\n")
        file.flush()
        progress.update(task, advance=1, status=f"loss {metrics.loss:.3f}  {metrics.tokens_per_second:,.0f} tokens/s")
        if metrics.validation_loss is not None:
            progress.console.print(f"{name}: step {metrics.step}, validation loss {metrics.validation_loss:.4f}")

    return observe


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """One bar for each run: its steps, loss, tokens (bytes) a second and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    status, name = TextColumn("{task.fields[status]}"), TextColumn("{task.description}")
    with Progress(name, BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn()) as progress:
        yield progress


def conclude(job: Job, runs: list[Run], max_gap: float, max_gradient_gap: float) -> bool:
    """Checks the runs, writes loss.png and report.md and prints the outcome; true when all checks passed."""
    entropy = data.unigram_entropy(job.corpus.train, job.corpus.validation)
    comparison = report.compare(*runs) if len(runs) == 2 else None
    problems = [problem for run in runs for problem in gemm_problems(job, run)]
    if comparison is not None:
        problems += report.check_loss(runs[0].name, comparison, max_gap, max_gradient_gap)
    report.plot(runs, entropy, job.out / "loss.png")
    text = report.render(runs, facts(job, runs), entropy, comparison, problems)
    (job.out / "report.md").write_text(text)
    for run in runs:
        typer.echo(
            f"{run.name}: validation loss {run.validation_loss:.4f} nats/byte (unigram entropy {entropy:.4f}), "
            f"{run.tokens_per_second:,.0f} tokens/s"
        )
    if comparison is not None:
        typer.echo(report.describe(runs, comparison))
    for problem in problems:
        typer.echo(f"FAILED: {problem}", err=True)
    typer.echo(f"report: {job.out / 'report.md'}")
    return not problems


def gemm_problems(job: Job, run: Run) -> list[str]:
    """What is wrong with the formats in which a run's linears computed."""
    recipe = recipe_of(run.name)
    if recipe is None:
        return []
    return report.check_gemms(run.name, run.gemms, recipe.expected_gemms(), job.model.linears * job.config.steps)


def facts(job: Job, runs: list[Run]) -> dict[str, str]:
    """What the report says about the conditions."""
    sizes, config = job.model, job.config
    return {
        "command": f"`minifloat {shlex.join(sys.argv[1:])}`",
        "model": f"{runs[0].parameters:,} parameters, {sizes}",
        "training": f"{config}",
        "text": job.corpus.source,
        "device": device_name(job.device),
        "peak memory": "of each run" if job.device.type == "cuda" else "of the process up to each run's end",
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        "high precision": "the embedding, the norms, the attention product and the output head, in every recipe",
    }
