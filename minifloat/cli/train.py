"""`minifloat train`: a small language model in low precision, and its high-precision twin."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from minifloat import Linear
from minifloat.cli import choose_device, device_name, user_errors
from minifloat.cli.observe import Observer, observers, tensorboard_class
from minifloat.cli.out import claimed, output_optional
from minifloat.cli.ranks import PATIENCE, TIMEOUT, from_first, joined, launcher
from minifloat.cli.resume import check_runs, checkpoint_folder, choose_folder, choose_starts, resume_command
from minifloat.distributed.tensor_parallel import Overlap, set_check, set_overlap
from minifloat.recipe import NAMES, Recipe, named
from minifloat.train import data, report
from minifloat.train.checkpoint import TOKENIZER, Checkpoint, CheckpointError, Checkpoints, SaveError
from minifloat.train.interrupt import orphaned, signals_noted
from minifloat.train.loop import Interrupted, Run, TrainConfig
from minifloat.train.loop import train as train_model
from minifloat.train.model import MODELS, ModelConfig, Transformer
from minifloat.train.ranks import ALONE, Ranks

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
    save_every: int | None = None
    keep: int = 2
    starts: dict[str, Checkpoint] = field(default_factory=dict)  # by name; what each run continues from
    tensorboard: bool = False
    ranks: Ranks = ALONE
    check_ranks: bool = False
    tp_overlap: Overlap = "handles"

    def __post_init__(self) -> None:
        self.model.check_ranks(self.ranks.tp.size)
        self.ranks.check_batch(self.config.batch_size)
        for name in self.names:
            self.checkpoints(name)  # raises ValueError now for what would not work later

    def checkpoints(self, name: str) -> Checkpoints:
        """Where the run of that name saves; its settings are what a run that continues it must have too."""
        told = {"recipe": name, "model": asdict(self.model), "text": self.corpus.fingerprint, "unit": self.corpus.unit}
        files = {} if self.corpus.tokenizer is None else {TOKENIZER: self.corpus.tokenizer}
        folder, settings = checkpoint_folder(self.out, name), told | self.config.settings()
        return Checkpoints(folder, settings, self.save_every, self.keep, self.starts.get(name), files)


def train(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="text files or folders, or one packed token file (.npy, .bin); default: Python's standard library"
        ),
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
    out: Annotated[Path | None, typer.Option(help="results and checkpoints; default: runs/RECIPE-TIME")] = None,
    save_every: Annotated[int | None, typer.Option(help="steps between checkpoints; default: at the end only")] = None,
    keep: Annotated[int, typer.Option(help="how many checkpoints of a run stay")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="continue from the last checkpoints in --out")] = False,
    resume_from: Annotated[
        Path | None, typer.Option(help="continue from this checkpoint, or from the last ones of another --out")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json of the tokenizers library; else bytes")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="of a token file; default: the tokenizer's")] = None,
    token_dtype: Annotated[str, typer.Option(help="of a .bin token file: uint16 or uint32")] = "uint16",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write TensorBoard's files too")] = False,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="under torchrun: ranks shard the parameters (FSDP2) and share the batch")
    ] = False,
    tp: Annotated[int, typer.Option(help="ranks that share each layer: tensor parallelism, under torchrun")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option(help="with --tp: what is not split by columns is split by tokens")
    ] = True,
    check_ranks: Annotated[
        bool, typer.Option("--check-ranks", help="with --tp: compare sizes before each exchange; slow, for debugging")
    ] = False,
    timeout: Annotated[float, typer.Option(help="minutes after which a rank that hangs ends a step")] = TIMEOUT,
    tp_overlap: Annotated[
        Overlap, typer.Option(help="with --tp: what hides communication; symmetric_memory: GEMMs that communicate")
    ] = "handles",
    max_gap: Annotated[
        float | None,
        typer.Option(help=f"largest relative gap of the losses; default {MAX_GAP}, 4-bit {MAX_GAP_4BIT}; inf: any"),
    ] = None,
    max_gradient_gap: Annotated[float, typer.Option(help="the same of the first gradient norms")] = MAX_GRADIENT_GAP,
) -> None:
    """Train a small Llama-style language model on real text in low precision, of bytes or of a tokenizer's tokens.

    Writes metrics.jsonl, loss.png, report.md and checkpoints. Fails when a linear ran in other formats than its
    recipe's and, where there is a second recipe to compare with, when the losses are too far apart. Ctrl-C saves a
    checkpoint after the step in progress; on a CPU a run that was stopped has the losses of one that was not.
    """
    with ExitStack() as held:  # the streams and the folder, for the whole command
        held.enter_context(output_optional())
        with user_errors():
            names = (recipe,) if against is None else (recipe, against)
            sizes = check_names(names, model)
            rate = sizes.learning_rate if learning_rate is None else learning_rate
            config = TrainConfig(steps, batch_size, rate, seed)
            corpus = data.load(
                paths or (), least=sizes.context + 1, tokenizer=tokenizer, vocabulary=vocabulary,
                token_dtype=token_dtype,
            )  # fmt: skip
            sizes = replace(sizes, vocabulary=corpus.vocabulary)
            if tensorboard:
                tensorboard_class()  # now, not after the first step
            ranks, chosen = held.enter_context(joined(tp, fsdp, sequence_parallel, choose_device(device), timeout))
            folder = from_first(choose_folder(names, out, resume, resume_from), ranks)
            if ranks.first:
                held.enter_context(claimed(folder))
            # Looked at only now: a process that has just let go of the folder may have saved once more.
            starts = from_first(choose_starts(names, folder, resume, resume_from), ranks)
            check_runs(names, folder)
            job = Job(
                names, sizes, config, corpus, chosen, folder, save_every, keep, starts, tensorboard, ranks, check_ranks,
                tp_overlap,
            )  # fmt: skip
            told = [job.checkpoints(name).settings for name in names]
            if from_first(told, ranks) != told:
                raise ValueError("this rank has other text or options than the first; start all with the same ones")
        runs = run_or_stop(job)
        ranks.set_timeout(PATIENCE)
        limit = default_gap(recipe) if max_gap is None else max_gap
        with user_errors():
            passed = from_first(not ranks.first or conclude(job, runs, limit, max_gradient_gap), ranks)
        if not passed:
            raise typer.Exit(1)


def check_names(names: tuple[str, ...], model: str) -> ModelConfig:
    """The named model's sizes; raises ValueError for a recipe or a model that does not exist."""
    for name in names:
        check_recipe(name)
    if len(set(names)) < len(names):
        raise ValueError(f"--against {names[1]} compares {names[0]} with itself; choose another recipe")
    if model not in MODELS:
        raise ValueError(f"there is no model {model!r}; choose from {', '.join(MODELS)}")
    return MODELS[model]


def check_recipe(name: str) -> None:
    """Raises ValueError for a recipe that does not exist."""
    if name not in (*NAMES, BF16):
        raise ValueError(f"there is no recipe {name!r}; choose from {', '.join((*NAMES, BF16))}")


def recipe_of(name: str) -> Recipe | None:
    """The recipe of that name; none for bf16."""
    return None if name == BF16 else named(name)


def default_gap(name: str) -> float:
    """How far the validation loss of the recipe of that name may be from its twin's, relative."""
    recipe = recipe_of(name)
    formats = [] if recipe is None else [spec for pair in recipe.expected_gemms().values() for spec in pair]
    return MAX_GAP_4BIT if any("e2m1" in spec for spec in formats) else MAX_GAP


def run_or_stop(job: Job) -> list[Run]:
    """Trains; ends the command, and says how to go on, where a signal or a number that is not finite stops it."""
    alone = orphaned()
    with signals_noted() as signal_that_came:
        try:
            return execute(job, lambda: signal_that_came() or alone())
        except Interrupted as stopped:
            if job.ranks.first:
                again = launcher(job.ranks.size) + resume_command(sys.argv[1:], job.out)
                typer.echo(f"{stopped}\ncontinue with: {again}", err=True)
            raise typer.Exit(128 + (signal_that_came() or signal.SIGINT)) from stopped
        except (FloatingPointError, CheckpointError, OSError) as error:
            if job.ranks.first or not isinstance(error, (FloatingPointError, SaveError)):  # these are all ranks'
                typer.echo(f"FAILED: {error}", err=True)
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
        watched = observers(job.out, job.names, job.config.steps, job.corpus.unit, job.tensorboard)
        observer = seen.enter_context(watched) if job.ranks.first else unobserved
        for name in job.names:
            linear = partial(Linear, bias=False, recipe=recipe_of(name))
            model = Transformer(job.model, linear, seed=job.config.seed, ranks=job.ranks)
            set_overlap(model, job.tp_overlap)
            if job.check_ranks:
                set_check(model)
            runs.append(
                train_model(
                    name, model.shard(), job.model.context, job.corpus, job.config, job.device, observer(name),
                    checkpoints=job.checkpoints(name), stop=stop, ranks=job.ranks,
                )
            )  # fmt: skip
    return runs


def unobserved(name: str) -> Observer:
    """What a rank other than the first does with a step's metrics."""
    return lambda metrics: None


def conclude(job: Job, runs: list[Run], max_gap: float, max_gradient_gap: float) -> bool:
    """Checks the runs, writes loss.png and report.md and prints the outcome; true when all checks passed."""
    unit = job.corpus.unit
    entropy = data.unigram_entropy(job.corpus.train, job.corpus.validation, job.corpus.vocabulary)
    comparison = report.compare(*runs) if len(runs) == 2 else None
    problems = [problem for run in runs for problem in gemm_problems(job, run)]
    if comparison is not None:
        problems += report.check_loss(runs[0].name, comparison, max_gap, max_gradient_gap)
    text = report.render(runs, facts(job, runs), entropy, comparison, problems, unit)
    try:
        report.plot(runs, entropy, job.out / "loss.png", unit)
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
        "command": f"`{launcher(job.ranks.size)}minifloat {shlex.join(sys.argv[1:])}`",
        "model": f"{runs[0].parameters:,} parameters, {sizes}",
        "training": f"{config}",
        "text": job.corpus.source,
        "device": device_name(job.device),
        **({} if job.ranks.alone else {"ranks": _ranks(job.ranks)}),
        **{f"{name} continued from": f"step {start.step}, {start.path}" for name, start in job.starts.items()},
        "peak memory": ("of each run" if job.device.type == "cuda" else "of the process up to each run's end")
        + ("" if job.ranks.alone else ", on the first rank"),
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        "high precision": "the embedding, the norms, the attention product and the output head, in every recipe",
    }


def _ranks(ranks: Ranks) -> str:
    tokens = "split by tokens elsewhere" if ranks.sequence_parallel else "all tokens on each elsewhere"
    told = [f"{ranks.data.size}, which shard the parameters and share the batch"] if ranks.data.size > 1 else []
    told += [f"{ranks.tp.size}, which share each linear; {tokens}"] if ranks.tp.size > 1 else []
    return "; times ".join(told)
