"""`minifloat study`: how far each recipe's loss ends from bf16's, over several seeds and beside control pairs."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import torch
import typer

from minifloat.recipe import NAMES
from minifloat.tools.cli import choose_device, device_name, user_errors
from minifloat.tools.cli.output import claimed, out_folder, output_optional
from minifloat.tools.train import data, source_text, study_report
from minifloat.tools.train import study as runs
from minifloat.tools.train.checkpoint import latest
from minifloat.tools.train.model import MODELS
from minifloat.tools.train.report import has_4bit
from minifloat.tools.train.study import Conditions, Job
from minifloat.tools.train.study_noise import Noise, noise_of
from minifloat.tools.train.study_statistics import outcomes
from minifloat.tools.train.study_variants import OPTIONS, Variant
from minifloat.tools.train.tokens import SUFFIXES

RESOLUTION = 0.001
MAX_GAP = 0.005
MAX_GAP_4BIT = 0.015
MOST_SEEDS = 1000
MOST_WORKERS = 1024

FAILED, INCOMPLETE = 1, 3  # exit codes; 2 is a mistake in the options


@dataclass(frozen=True)
class Study:
    """One command: which runs, under which conditions, where, and how far each recipe may be off."""

    jobs: tuple[Job, ...]
    conditions: Conditions
    paths: tuple[Path, ...]
    devices: tuple[torch.device, ...]
    workers: int
    threads: int  # of each run
    minutes: float
    out: Path
    limits: dict[str, float]
    resolution: float

    @property
    def folder(self) -> Path:
        """Folder of the runs' results."""
        return self.out / "runs"


def study(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="text files or folders, read as bytes, or OUT/text of a study; default: Python's sources"),
    ] = None,
    machine_text: Annotated[
        bool, typer.Option("--machine-text", help="all source text of this machine, each content once; kept in --out")
    ] = False,
    text_bytes: Annotated[int | None, typer.Option(min=1, help="about how many of the --machine-text")] = None,
    vocabulary: Annotated[
        int, typer.Option(help="of a tokenizer that is trained on the --machine-text, such as 8192; 0: bytes")
    ] = 0,
    recipes: Annotated[
        str,
        typer.Option(
            help=f"some of {','.join(NAMES)}, with commas, each with +{', +'.join(OPTIONS)}; none: the controls"
        ),
    ] = ",".join(NAMES),
    seeds: Annotated[str, typer.Option(help="how many, or which, with commas: 3 is 0,1,2")] = "3",
    model: Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")] = "30m",
    steps: Annotated[int, typer.Option(help="optimizer steps of each run")] = 1000,
    batch_size: Annotated[int, typer.Option(help="sequences in a micro-batch")] = 32,
    accumulate: Annotated[int, typer.Option(help="micro-batches in a step")] = 2,
    experts: Annotated[int, typer.Option(help="a mixture of so many experts in place of each MLP")] = 0,
    learning_rate: Annotated[float | None, typer.Option(help="the peak; default: by the model's width")] = None,
    warmup: Annotated[float, typer.Option(help="share of the steps over which the learning rate rises")] = 0.1,
    clip: Annotated[float, typer.Option(help="the largest gradient norm")] = 1.0,
    evaluations: Annotated[int, typer.Option(help="how often a run's validation loss is taken")] = 10,
    evaluation_batches: Annotated[int, typer.Option(help="how many of the size of a step's, at the end")] = 80,
    common: Annotated[
        float, typer.Option(help="share of the steps, from the first, that a seed trains once, in bf16")
    ] = 0.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda (all GPUs, in turn) or cuda:N")] = "auto",
    workers: Annotated[int, typer.Option(help="runs side by side, each a process of its own")] = 1,
    minutes: Annotated[float, typer.Option(help="stop then, with checkpoints; the same command goes on")] = math.inf,
    out: Annotated[
        Path | None,
        typer.Option(parser=out_folder, metavar="PATH", help="results; default: runs/study-MODEL; finished runs stay"),
    ] = None,
    resolution: Annotated[float, typer.Option(help="gap that is to be told from noise, relative")] = RESOLUTION,
    max_gap: Annotated[float, typer.Option(help="limit of the interval's upper end, relative, FP8")] = MAX_GAP,
    max_gap_4bit: Annotated[float, typer.Option(help="the same of recipes with 4-bit elements")] = MAX_GAP_4BIT,
) -> None:
    """Compare the final losses of recipes with bf16's over several seeds, beside control pairs.

    Each seed of each recipe is paired with bf16 from the same weights on the same batches; bf16 with its sums in
    another order, and fp32, show how far apart runs end without any quantization: the noise floor, which is printed
    before any recipe is judged, with the seeds that --resolution takes. Writes DATE-study-MODEL.md, .json and plots. A
    study that was stopped goes on when it is started again: what is finished stays, what has begun goes on. Until then
    its report is of the recipes that have ended at every seed. Runs start in the order of --recipes, behind bf16 and
    the controls that --recipes do not name.

    Exit code 1: a recipe is off by more than its limit and more than the controls are, a linear ran in other formats
    than its recipe's, or a run broke down. 3: runs are left.
    """
    with ExitStack() as held:  # the streams and the folder, for the whole command
        held.enter_context(output_optional())
        with user_errors():
            plan = make_plan(
                paths or [], machine_text, text_bytes, vocabulary, recipes, seeds, model, steps, batch_size, accumulate,
                experts, learning_rate, warmup, clip, evaluations, evaluation_batches, device, workers, minutes, out,
                resolution, (max_gap, max_gap_4bit), common,
            )  # fmt: skip
            held.enter_context(claimed(plan.out))
            plan.folder.mkdir(exist_ok=True)
            left = [job for job in plan.jobs if job not in runs.finished(plan.jobs, plan.conditions, plan.folder)]
            starts = common_jobs(plan, left)
            if any("moments8" in job.name for job in left) and importlib.util.find_spec("torchao") is None:
                raise ValueError("--recipes: moments8 needs torchao; pip install torchao, or leave it out")
        crashed = run(plan, left, starts)
        results = runs.finished(plan.jobs, plan.conditions, plan.folder)
        noise = floor_of(plan, results)
        for line in [] if noise is None else noise.describe(plan.resolution):
            typer.echo(line)
        left = [job for job in plan.jobs if job not in results]
        ended = ended_at_every_seed(plan, left)
        passed = not ended.jobs or conclude(ended, results, noise, left)
        if left:
            typer.echo(f"{len(left)} of {len(plan.jobs)} runs are left: {', '.join(map(str, left))}")
            typer.echo("start the same command again to go on")
        if crashed or not passed:
            raise typer.Exit(FAILED)
        if left:
            raise typer.Exit(INCOMPLETE)


def make_plan(
    paths: Sequence[Path], machine_text: bool, text_bytes: int | None, vocabulary: int, recipes: str, seeds: str,
    model: str, steps: int, batch_size: int, accumulate: int, experts: int, learning_rate: float | None, warmup: float,
    clip: float, evaluations: int, evaluation_batches: int, device: str, workers: int, minutes: float, out: Path | None,
    resolution: float, limits: tuple[float, float], common: float = 0.0,
) -> Study:  # fmt: skip
    """The study that the options ask for; raises ValueError for what is impossible."""
    names = [name.strip() for name in recipes.split(",") if recipes.strip()]
    compared = [name for name in names if name not in runs.CONTROLS]
    for name in compared:
        Variant.parse(name)  # refuses what is none
    if len(set(names)) < len(names):
        raise ValueError(f"--recipes {recipes} names a recipe twice; name each once")
    if model not in MODELS:
        raise ValueError(f"--model: there is no model {model!r}; choose from {', '.join(MODELS)}")
    check_numbers(workers, minutes, resolution, limits, common)
    if late := [name for name in compared if common and not Variant.parse(name).can_follow_bf16]:
        raise ValueError(f"--common: {late[0]} keeps a state that bf16 has not; leave it out of --recipes")
    sizes = replace(MODELS[model], experts=experts)
    folder = out or Path("runs") / f"study-{model}"
    if packed := [path for path in paths if path.suffix in SUFFIXES]:
        raise ValueError(f"{packed[0]} is a packed token file, but a study reads text as bytes; give text files")
    if machine_text:
        paths = [kept_text(folder, paths, vocabulary, text_bytes)]
    elif vocabulary or text_bytes:
        option = "--vocabulary" if vocabulary else "--text-bytes"
        raise ValueError(f"{option} is for --machine-text; add that, or leave it out")
    corpus = runs.load_text(paths, sizes.context)
    devices = all_devices(choose_device(device))
    rate = sizes.learning_rate if learning_rate is None else learning_rate
    kind, threads = runs.device_kind(devices[0]), threads_of_each(workers)
    conditions = Conditions(
        model, steps, batch_size, rate, corpus.fingerprint, kind, evaluations=evaluations,
        evaluation_batches=evaluation_batches, threads=threads if devices[0].type == "cpu" else None,
        accumulate=accumulate, warmup=warmup, clip=clip, experts=experts, decay="linear", common=round(common * steps),
    )  # fmt: skip
    jobs = runs.jobs(names, chosen_seeds(seeds))
    for job in jobs:
        most = conditions.config(job).quantized_steps - 1  # which refuses impossible numbers
        if common and not 1 <= conditions.common <= most:
            raise ValueError(
                f"--common {common} of {steps} steps is {conditions.common}; {job.name} can have 1 to {most} in common"
            )
    each = {name: limits[has_4bit(Variant.parse(name).recipe)] for name in compared}
    return Study(tuple(jobs), conditions, tuple(paths), devices, workers, threads, minutes, folder, each, resolution)


def kept_text(out: Path, paths: Sequence[Path], vocabulary: int, most: int | None) -> Path:
    """The folder where a study keeps the source text of the machine, made unless it is there."""
    if paths:
        raise ValueError(f"--machine-text is all source text that there is; leave {paths[0]} out, or the option")
    folder = out / "text"
    if (kept := source_text.read(folder)) is None:
        source_text.write(source_text.gather(source_text.roots(), vocabulary, most), folder)
    elif kept.vocabulary != (vocabulary or 256):
        raise ValueError(f"{folder} has {kept.unit}s of {kept.vocabulary}; choose another --out, or its --vocabulary")
    return folder


def check_numbers(workers: int, minutes: float, resolution: float, limits: tuple[float, float], common: float) -> None:
    """Raises ValueError for numbers with which nothing would run, or nothing pass."""
    if not 1 <= workers <= MOST_WORKERS:
        choice = "at least 1" if workers < 1 else f"at most {MOST_WORKERS}"
        raise ValueError(f"--workers is {workers}; choose {choice}")
    if not 0 < resolution < 1:
        raise ValueError(f"--resolution is {resolution}; choose a share of the loss, such as 0.001")
    if not 0 <= common < 1:
        raise ValueError(f"--common is {common}; choose a share of the steps below 1, such as 0.4")
    for option, value in (("--minutes", minutes), ("--max-gap", limits[0]), ("--max-gap-4bit", limits[1])):
        if not value >= 0:
            raise ValueError(f"{option} is {value}; choose 0 or more")


def chosen_seeds(text: str) -> list[int]:
    """ "3" is 0, 1, 2; "4,7" is 4 and 7. Raises ValueError for fewer than two, which have no interval."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--seeds is {text!r}; give a number of seeds, as 3, or the seeds, as 0,1,2") from error
    if "," not in text and numbers[0] > MOST_SEEDS:
        raise ValueError(f"--seeds {text} asks for {text} seeds, the most are {MOST_SEEDS}; give seeds with commas")
    seeds = numbers if "," in text else list(range(numbers[0]))
    if len(set(seeds)) < max(2, len(seeds)):
        raise ValueError(
            f"--seeds {text} gives {len(set(seeds))} different seeds; an interval needs at least 2, so give more"
        )
    return seeds


def threads_of_each(workers: int) -> int:
    """Number of threads of a run where so many share the CPU."""
    return max(1, (os.cpu_count() or 1) // workers)


def all_devices(device: torch.device) -> tuple[torch.device, ...]:
    """The devices that workers take in turn: all GPUs unless one was named."""
    if device.type != "cuda" or device.index is not None:
        return (device,)
    return tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))


def common_jobs(plan: Study, left: Sequence[Job]) -> list[Job]:
    """The common starts that are to be made; raises ValueError for one that is lost, but from which runs have begun."""
    if not plan.conditions.common:
        return []
    new = [job for job in left if latest(job.saved(plan.folder)) is None]
    begun = {job.seed: job for job in plan.jobs if job not in new}
    jobs = [Job(runs.COMMON, seed) for seed in dict.fromkeys(job.seed for job in new)]
    jobs = [job for job in jobs if runs.common_start(job.seed, plan.conditions, plan.folder) is None]
    for job in jobs:
        if job.seed in begun:
            raise ValueError(
                f"{job.saved(plan.folder)} is gone, from which {begun[job.seed]} went on; copy it here, or delete all "
                "runs of that seed"
            )
    return jobs


def run(plan: Study, left: Sequence[Job], common: Sequence[Job]) -> list[Job]:
    """Runs what is left, within the time, behind `common`; returns what ended without a result."""
    for stale in plan.folder.glob("*.tmp"):  # of a process that was killed while it wrote
        stale.unlink()
    for job in set(plan.jobs) - set(left):
        shutil.rmtree(job.saved(plan.folder), ignore_errors=True)  # of a process that was killed before it did so
    began, crashed = time.monotonic(), []
    typer.echo(
        f"{len(plan.jobs) - len(left)} of {len(plan.jobs)} runs are finished in {plan.folder}; {plan.workers} at a "
        f"time on {', '.join(map(str, plan.devices))}"
    )

    def begin(job: Job, worker: int) -> subprocess.Popen[bytes]:
        device = plan.devices[worker % len(plan.devices)]
        seconds = began + 60 * plan.minutes - time.monotonic()
        return runs.start(job, plan.conditions, plan.paths, plan.folder, device, plan.threads, seconds)

    def ended(job: Job, code: int, seconds: float) -> None:
        clock = f"{time.monotonic() - began:5.0f} s"
        if code == 0:
            result = runs.read(job.file(plan.folder))
            typer.echo(f"{clock}: {job}: {result.error or f'{result.run.validation_loss:.4f}'} ({seconds:.0f} s)")
        elif code == runs.STOPPED:
            typer.echo(f"{clock}: {job.log(plan.folder).read_text().splitlines()[-1]}")
        else:
            crashed.append(job)
            log = job.log(plan.folder)
            tail = log.read_text(errors="replace").splitlines()[-3:]
            typer.echo(f"{clock}: FAILED: {job} ended with code {code}, see {log}: {' / '.join(tail)}", err=True)

    deadline = began + 60 * plan.minutes
    runs.run_jobs(common, begin, plan.workers, deadline, ended)
    missing = {job.seed for job in common if runs.common_start(job.seed, plan.conditions, plan.folder) is None}
    runs.run_jobs([job for job in left if job.seed not in missing], begin, plan.workers, deadline, ended)
    return crashed


def floor_of(plan: Study, results: study_report.Results) -> Noise | None:
    """The spread of the controls that have ended with their bf16; None if none have."""
    sound = study_report.whole(results)
    seeds = [job.seed for job in plan.jobs if job.name == runs.BASELINE and job in sound]
    pairs = {
        job: each for job, each in sound.items() if job.name in (runs.BASELINE, *runs.CONTROLS) and job.seed in seeds
    }
    by_step: dict[int, list[float]] = {}
    for each in study_report.gaps_by_step(pairs).values():
        for step, gaps in each.items():
            if step > plan.conditions.common:
                by_step.setdefault(step, []).extend(gaps)
    return noise_of(by_step, len({job.seed for job in pairs if job.name != runs.BASELINE})) if by_step else None


def ended_at_every_seed(plan: Study, left: Sequence[Job]) -> Study:
    """The part of a study that a report can be of; without bf16 there is none."""
    names = {job.name for job in left}
    jobs = () if runs.BASELINE in names else tuple(job for job in plan.jobs if job.name not in names)
    return replace(plan, jobs=jobs, limits={name: plan.limits[name] for name in plan.limits if name not in names})


def conclude(plan: Study, results: study_report.Results, noise: Noise | None, left: Sequence[Job] = ()) -> bool:
    """Checks finished runs, writes the report, prints the outcome; true when all checks passed.

    Of what broke down in any of its runs no final losses are compared; without bf16's none are.
    """
    results = {job: results[job] for job in plan.jobs}
    problems = study_report.problems_of_runs(results)
    whole = study_report.whole(results)
    losses = study_report.final_losses(whole)
    found = []
    if runs.BASELINE in losses:
        controls = [name for name in runs.CONTROLS if name in losses]
        limits = {name: limit for name, limit in plan.limits.items() if name in losses}
        found = outcomes(losses, runs.BASELINE, controls, limits)
    problems += [outcome.problem for outcome in found if outcome.problem is not None]
    name = f"{date.today().isoformat()}-study-{plan.conditions.model}"
    images = f"{name}-loss.png", f"{name}-gap.png", f"{name}-summary.png"
    corpus = runs.load_text(plan.paths, plan.conditions.sizes.context)
    entropy = data.unigram_entropy(corpus.train, corpus.validation, corpus.vocabulary)
    study_report.plot_losses(whole, entropy, corpus.unit, plan.out / images[0])
    study_report.plot_gaps(whole, found, plan.out / images[1])
    study_report.plot_summary(found, noise, plan.resolution, plan.out / images[2])
    about = facts(plan, corpus)
    if runs.BASELINE in losses:
        mean, spread = fmean(losses[runs.BASELINE]), stdev(losses[runs.BASELINE])
        about["bf16 by seed"] = f"{mean:.4f} on average, standard deviation {spread / mean:.3%} of that"
        typer.echo(f"bf16 by seed: {about['bf16 by seed']}")
    for i, line in enumerate([] if noise is None else noise.describe(plan.resolution)):
        about["noise floor" if not i else f"noise floor ({i})"] = line
    alone = plan.workers <= len(plan.devices)
    text = study_report.render(results, found, about, corpus.unit, images, problems, left, alone)
    (plan.out / f"{name}.md").write_text(text)
    values = study_report.as_json(results, found, about, problems, left)
    (plan.out / f"{name}.json").write_text(json.dumps(values) + "\n")
    for row in study_report.gemm_rows(results):
        typer.echo("GEMMs: " + "  ".join(row))
    for outcome in found:
        row = study_report.outcome_row(outcome)
        typer.echo(f"{row[0]}: mean of the absolute gap {row[1]} ({row[2]}), signed {row[3]} ({row[4]}): {row[-1]}")
    typer.echo(f"report: {plan.out / name}.md")
    return _print_problems(problems)


def _print_problems(problems: Sequence[str]) -> bool:
    for problem in problems:
        typer.echo(f"FAILED: {problem}", err=True)
    return not problems


def facts(plan: Study, corpus: data.Corpus) -> dict[str, str]:
    """Facts about the conditions, for the report."""
    conditions = plan.conditions
    config, sizes = conditions.config(plan.jobs[0]), conditions.sizes.with_vocabulary(corpus.vocabulary)
    tokens = config.steps * config.sequences * sizes.context
    common = f"the first {conditions.common} steps, one bf16 run a seed: gaps are what the later steps cost"
    return {
        "command": f"`minifloat {shlex.join(sys.argv[1:])}`",
        "model": f"{conditions.model}, {sizes.parameters:,} parameters, {sizes}",
        "training": f"{config}",
        **({"in common": common} if conditions.common else {}),
        "tokens": f"{tokens:,} {corpus.unit}s a run, {tokens / len(corpus.train):.2f} times the training text",
        "text": f"{corpus.source} ({conditions.text})",
        "devices": "; ".join(_device(device, plan.threads) for device in plan.devices),
        "versions": f"torch {torch.__version__}, Python {sys.version.split()[0]}",
        "high precision": "the embedding, the norms, the attention product and the output head, in every recipe",
    }


def _device(device: torch.device, threads: int) -> str:
    return device_name(device) if device.type == "cuda" else f"{runs.device_kind(device)}, {threads} threads a run"
