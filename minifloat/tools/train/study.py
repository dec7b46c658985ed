"""The runs of a loss study: recipes and controls, several seeds each, one child process a run.

All runs of a seed start from the same weights and see the same batches. Beside each recipe and plain bf16 there are two
controls, which show how far apart two runs end that no quantization separates:

- ``bf16-reordered``: bf16 with every sum of the linears taken in the reverse order, see :class:`ReversedLinear` and
  :func:`reverse_batch`. In exact arithmetic it is the same model.
- ``fp32``: the activations and all products in fp32, without TF32.

Runs of a seed may have their first steps in common: a ``common`` run in bf16, from whose checkpoint they all go on. It
stays, for recipes that are added later.

A run's result is one file, written aside and renamed, so a study that was killed goes on with what is not there yet; a
long run saves checkpoints and goes on from its last one. On a GPU all steps from the second on are replays of a CUDA
graph, but for ``moments8``.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifloat import Linear
from minifloat.functional import Gemm
from minifloat.tools.train import data, source_text
from minifloat.tools.train.checkpoint import Checkpoint, latest
from minifloat.tools.train.checkpoint_writer import Checkpoints
from minifloat.tools.train.loop import Interrupted, Metrics, Run, TrainConfig, train
from minifloat.tools.train.model import MODELS, ModelConfig
from minifloat.tools.train.step import make_optimizer
from minifloat.tools.train.study_variants import Variant

BASELINE = "bf16"
REORDERED = "bf16-reordered"
FP32 = "fp32"
CONTROLS = (REORDERED, FP32)
COMMON = "common"  # the first steps of all runs of a seed

SAVE_EVERY = 500  # steps; a run that is stopped in time saves too
EARLY_EVERY = 8  # evaluation batches: evaluations before the last one are for the curves
STOPPED = 4  # exit code of a run whose time was over before it ended


@dataclass(frozen=True)
class Conditions:
    """Conditions that all runs of a study share. Results of other conditions are never compared with each other."""

    model: str
    steps: int
    batch_size: int
    learning_rate: float
    text: str  # `Corpus.fingerprint`
    device: str  # as `device_kind` names it
    torch: str = torch.__version__
    evaluations: int = 10
    evaluation_batches: int = 32  # more than `minifloat train` takes: the gaps are small
    threads: int | None = None  # of a run on a CPU, whose sums are in another order with another number
    accumulate: int = 1
    warmup: float = 0.1
    clip: float = 1.0
    experts: int = 0
    common: int = 0  # steps, the first ones, that all runs of a seed have in common
    decay: Literal["cosine", "linear"] = "cosine"  # which results of older studies do not name

    def config(self, job: Job) -> TrainConfig:
        """Settings of a job's training. Raises ValueError for impossible numbers."""
        return TrainConfig(
            self.steps, self.batch_size, self.learning_rate, job.seed, evaluations=self.evaluations,
            evaluation_batches=self.evaluation_batches, dtype=torch.float32 if job.name == FP32 else torch.bfloat16,
            accumulate=self.accumulate, warmup=self.warmup, clip=self.clip, decay=self.decay, early_every=EARLY_EVERY,
            finish=0.0 if job.variant is None else job.variant.finish,
        )  # fmt: skip

    @property
    def sizes(self) -> ModelConfig:
        """Sizes of the model, before the vocabulary is known."""
        return replace(MODELS[self.model], experts=self.experts)


@dataclass(frozen=True)
class Job:
    """One run: a recipe, ``bf16`` or a control, and the seed of its initial weights and batches."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name} with seed {self.seed}"

    @property
    def variant(self) -> Variant | None:
        """The recipe, and what is done beside it; None of bf16 and the controls."""
        return None if self.name in (BASELINE, *CONTROLS, COMMON) else Variant.parse(self.name)

    def file(self, folder: Path) -> Path:
        """File of the job's result."""
        return folder / f"{self.name}-{self.seed}.json"

    def log(self, folder: Path) -> Path:
        """File of what the job's process prints."""
        return folder / f"{self.name}-{self.seed}.log"

    def saved(self, folder: Path) -> Path:
        """Folder of the job's checkpoints, while it runs."""
        return folder / f"{self.name}-{self.seed}-checkpoints"


@dataclass(frozen=True)
class Result:
    """Result of a job; ``error`` says why it stopped early, with a history that ends there."""

    job: Job
    conditions: Conditions
    run: Run
    error: str | None = None

    def validation(self) -> dict[int, float]:
        """The validation loss in nats a token, by step."""
        return {m.step: m.validation_loss for m in self.run.history if m.validation_loss is not None}

    @property
    def broke_at(self) -> int | None:
        """The step at which it stopped early."""
        return None if self.error is None else len(self.run.history) + 1


def jobs(recipes: Sequence[str], seeds: Sequence[int]) -> list[Job]:
    """All jobs of a study, in their order; controls come first where ``recipes`` do not name them."""
    first = [name for name in (BASELINE, *CONTROLS) if name not in recipes]
    return [Job(name, seed) for name in (*first, *recipes) for seed in seeds]


def device_kind(device: torch.device) -> str:
    """The device without its number, such as "cuda: NVIDIA H200"; equal for all that a study may use side by side."""
    return f"{device.type}: {torch.cuda.get_device_name(device) if device.type == 'cuda' else platform.machine()}"


# ---- One run ----


class ReversedLinear(Linear):
    """A linear whose input and output features are in reverse order while it multiplies, in both passes.

    So fprop sums over the input features, and dgrad over the output features, from the last to the first.
    """

    def forward(self, *inputs: Any, **_: Any) -> Tensor:
        bias = None if self.bias is None else self.bias.flip(0)
        return F.linear(inputs[0].flip(-1), self.weight.flip(0, 1), bias).flip(-1)


def reverse_batch(model: nn.Module) -> None:
    """Lets the model see the rows of its batch in reverse order, while its inputs and outputs keep theirs.

    So wgrad and the embedding's gradient sum over the rows from the last to the first.
    """
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].flip(0),))
    model.register_forward_hook(lambda _, inputs, logits_BTV: logits_BTV.flip(0))


def build(job: Job, sizes: ModelConfig) -> nn.Module:
    """The model that a job trains; its initial weights depend on the seed alone."""
    if job.variant is not None:
        return job.variant.model(sizes, job.seed)
    model = sizes.make(None, job.seed)
    if job.name != REORDERED:
        return model
    for module in model.modules():
        if isinstance(module, Linear):
            module.__class__ = ReversedLinear
    reverse_batch(model)
    return model


def execute(
    job: Job,
    conditions: Conditions,
    corpus: data.Corpus,
    device: torch.device,
    observe: Callable[[Metrics], None] = lambda _: None,
    checkpoints: Checkpoints | None = None,
    stop: Callable[[], object] = lambda: False,
    cuda_graph: bool = False,
) -> Result:
    """Trains a job's model in this process. A loss that is not finite ends the run and is its result.

    Raises Interrupted where ``stop`` answers true after a step; the checkpoints then have the state.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 is a control
    history: list[Metrics] = []

    def keep(metrics: Metrics) -> None:
        history.append(metrics)
        observe(metrics)

    sizes = conditions.sizes.with_vocabulary(corpus.vocabulary)
    model, config = build(job, sizes), conditions.config(job)
    try:
        optimizer = make_optimizer if job.variant is None else job.variant.optimizer
        run = train(job.name, model, sizes.context, corpus, config, device, keep, checkpoints=checkpoints, stop=stop,
            optimizer=optimizer, cuda_graph=cuda_graph)  # fmt: skip
    except FloatingPointError as error:
        return Result(job, conditions, Run(job.name, tuple(history), Counter(), None, 0), str(error))
    return Result(job, conditions, run)


def write(result: Result, path: Path) -> None:
    """Writes a result as JSON beside ``path`` and renames it: at no time is there half a file of that name."""
    run = result.run
    values = {
        "job": asdict(result.job), "conditions": asdict(result.conditions), "error": result.error,
        "parameters": run.parameters, "peak_bytes": run.peak_bytes,
        "gemms": [[*gemm, count] for gemm, count in sorted(run.gemms.items())],
        "history": [asdict(metrics) for metrics in run.history],
    }  # fmt: skip
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with aside.open("w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def read(path: Path) -> Result:
    """The result in a file that :func:`write` wrote. Raises ValueError, naming the file, for any other content."""
    try:
        values = json.loads(path.read_bytes())
        job = Job(**values["job"])
        history = tuple(Metrics(**metrics) for metrics in values["history"])
        gemms = Counter({Gemm(*key): count for *key, count in values["gemms"]})
        run = Run(job.name, history, gemms, values["peak_bytes"], values["parameters"])
        return Result(job, Conditions(**values["conditions"]), run, values["error"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no result of a study ({type(error).__name__}: {error}); delete it, and the same command runs "
            "it again"
        ) from error


def finished(wanted: Sequence[Job], conditions: Conditions, folder: Path) -> dict[Job, Result]:
    """The results that a folder has already. Raises ValueError for one of other conditions."""
    results = {job: read(job.file(folder)) for job in wanted if job.file(folder).exists()}
    for job, result in results.items():
        check_same(job.file(folder), asdict(result.conditions), conditions)
    return results


def check_same(path: Path, theirs: Mapping[str, Any], conditions: Conditions) -> None:
    """Raises ValueError, naming what differs, if ``path`` was made under other conditions."""
    ours = asdict(conditions)
    if differing := [name for name in ours if theirs.get(name) != ours[name]]:
        changes = "; ".join(f"{name} was {theirs.get(name)}, is {ours[name]}" for name in differing)
        raise ValueError(f"{path} is of another study: {changes}; choose another --out, or the same options")


# ---- Many runs, each in a process of its own ----


def start(
    job: Job, conditions: Conditions, paths: Sequence[Path], folder: Path, device: torch.device, threads: int,
    seconds: float,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Starts a job's process, which writes its result to ``folder``, or what checkpoint it can after ``seconds``."""
    task = {
        "job": asdict(job), "conditions": asdict(conditions), "paths": [str(path) for path in paths],
        "folder": str(folder), "device": str(device), "threads": threads, "until": time.time() + seconds,
    }  # fmt: skip
    with job.log(folder).open("wb") as log:
        command = [sys.executable, "-m", "minifloat.tools.train.study", json.dumps(task)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def run_jobs(
    waiting: Sequence[Job],
    begin: Callable[[Job, int], subprocess.Popen[bytes]],
    workers: int,
    deadline: float,
    ended: Callable[[Job, int, float], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs jobs, ``workers`` at a time, until all have ended; none starts after ``deadline`` (of ``clock``, seconds).

    ``begin`` gets a job and the number of its worker; ``ended`` its exit code and seconds.
    """
    queue = deque(waiting)
    running: dict[int, tuple[Job, subprocess.Popen[bytes], float]] = {}
    try:
        while running or (queue and clock() < deadline):
            for worker in set(range(workers)) - set(running):
                if queue and clock() < deadline:
                    job = queue.popleft()
                    running[worker] = job, begin(job, worker), clock()
            time.sleep(0.05)
            for worker, (job, process, began) in list(running.items()):
                if process.poll() is not None:
                    del running[worker]
                    ended(job, process.returncode, clock() - began)
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.wait()


def load_text(paths: Sequence[Path], context: int) -> data.Corpus:
    """The text of a study: files and folders, or a folder that ``source_text.write`` made."""
    kept = source_text.read(paths[0]) if len(paths) == 1 else None
    return kept or data.load(paths, least=context + 1)


def told(job: Job, conditions: Conditions) -> dict[str, Any]:
    """Settings of a job's checkpoints, which only a run with the same ones goes on from."""
    settings = asdict(job) | asdict(conditions)
    return settings if conditions.common else {name: settings[name] for name in settings if name != "common"}


def common_start(seed: int, conditions: Conditions, folder: Path) -> Checkpoint | None:
    """The state after the steps that runs of a seed have in common; None if they have not all been made.

    Raises ValueError for a state that was trained under other conditions.
    """
    reached = latest(Job(COMMON, seed).saved(folder))
    if reached is not None:
        check_same(reached.path, reached.settings, conditions)
    return reached if reached is not None and reached.step == conditions.common else None


def start_of(job: Job, conditions: Conditions, folder: Path) -> Checkpoint | None:
    """The state from which a job goes on: its own, or that of its seed's common steps."""
    begun = latest(job.saved(folder))
    if begun is not None or not conditions.common or job.name == COMMON:
        return begun
    common = common_start(job.seed, conditions, folder)
    if common is None:
        raise ValueError(f"the first {conditions.common} steps of seed {job.seed}, in common, are not there")
    own = {"peak_bytes": 0}  # not the memory of bf16
    return replace(common, settings=told(job, conditions), values={**common.values, **own})


def work(task: dict[str, Any]) -> None:
    """Runs in a job's process; ``task`` is what :func:`start` hands it."""
    torch.set_num_threads(task["threads"])
    job, conditions, folder = Job(**task["job"]), Conditions(**task["conditions"]), Path(task["folder"])
    device, parent = torch.device(task["device"]), os.getppid()
    corpus = load_text([Path(path) for path in task["paths"]], conditions.sizes.context)
    if corpus.fingerprint != conditions.text:
        raise ValueError(f"the text has changed: it was {conditions.text}, it is {corpus.fingerprint}")

    reached = 0

    def observe(metrics: Metrics) -> None:
        nonlocal reached
        reached = metrics.step
        if os.getppid() != parent:
            sys.exit("the study that started this run is gone")
        if metrics.validation_loss is not None:
            print(f"step {metrics.step}: validation loss {metrics.validation_loss:.6f}", flush=True)

    def stop() -> bool:
        return time.time() >= task["until"] or (job.name == COMMON and reached >= conditions.common)

    checkpoints = None
    if job.variant is None or job.variant.can_stop:
        begun = start_of(job, conditions, folder)
        checkpoints = Checkpoints(job.saved(folder), told(job, conditions), SAVE_EVERY, 1, begun)
    try:
        result = execute(job, conditions, corpus, device, observe, checkpoints, stop,
            device.type == "cuda" and (job.variant is None or job.variant.can_be_captured))  # fmt: skip
    except Interrupted as stopped:
        made = job.name == COMMON and reached == conditions.common
        print(f"the first {reached} steps of seed {job.seed} are made" if made else stopped, flush=True)
        sys.exit(STOPPED)
    if job.name == COMMON:
        sys.exit(f"{result.error}; leave seed {job.seed} out of --seeds, or lower --learning-rate")
    write(result, job.file(folder))
    shutil.rmtree(job.saved(folder), ignore_errors=True)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
