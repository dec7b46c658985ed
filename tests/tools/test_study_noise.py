"""The noise floor of a study, its text, what runs beside the plain recipes, and runs that are stopped and go on."""

from __future__ import annotations

import io
import json
import math
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
import torch
from torch import nn

from minifloat.tools.train import source_text, study, study_report
from minifloat.tools.train.checkpoint import Checkpoint
from minifloat.tools.train.data import Corpus
from minifloat.tools.train.model import ModelConfig
from minifloat.tools.train.study import Conditions, Job
from minifloat.tools.train.study_noise import chi_square, half_width, noise_of, seeds_for
from minifloat.tools.train.study_variants import Variant
from tests.helpers.micro_training import CPU, MICRO, invoke

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- The floor ----


@pytest.mark.parametrize(
    "freedom, probability, x",
    [(1, 0.95, 3.8415), (2, 0.025, 0.0506), (3, 0.975, 9.3484), (10, 0.5, 9.3418), (100, 0.975, 129.5612)],
)
def test_chi_square_is_that_of_the_tables(freedom: int, probability: float, x: float) -> None:
    assert chi_square(freedom, probability) == pytest.approx(x, abs=1e-4)


def test_the_floor_is_the_root_mean_square_with_an_interval_that_covers() -> None:
    """Of made-up studies of three seeds, whose noise is known, the interval has it in about 95 %."""
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        gaps = 0.01 * random.standard_normal(3)
        noise = noise_of({10: gaps.tolist()}, 3)
        assert noise.floor == pytest.approx(math.sqrt((gaps**2).mean()))
        low, high = noise.interval
        covered += low <= 0.01 <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_seeds_for_a_resolution_are_the_fewest() -> None:
    for spread, power in ((0.001, None), (0.003, 0.8), (0.0002, None), (0.0002, 0.8)):
        seeds = seeds_for(spread, 0.001, power)
        assert seeds is not None and half_width(spread, seeds, power) <= 0.001 < half_width(spread, seeds - 1, power)
    assert seeds_for(0.001, 0.001) == 7  # 2.447 / sqrt(7) = 0.925; 2.571 / sqrt(6) = 1.05
    assert seeds_for(1.0, 0.001) is None


# ---- Text ----


def test_each_content_is_there_once_and_whole_files_are_held_out(tmp_path: Path) -> None:
    texts = [f"def function_{i}():\n    return {i}\n".encode() for i in range(200)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.py").write_bytes(text)
        (tmp_path / "copies" / str(i % 7)).mkdir(parents=True, exist_ok=True)
        (tmp_path / "copies" / str(i % 7) / f"{i}.h").write_bytes(text)
    (tmp_path / "image.py").write_bytes(b"a\0b")
    (tmp_path / "data.bin").write_bytes(b"no source")
    corpus = source_text.gather([tmp_path])
    parts = [bytes(part.numpy()) for part in (corpus.train, corpus.validation)]
    for text in texts:
        assert sum(part.count(text) for part in parts) == 1
    assert b"\0" not in parts[0] and b"no source" not in parts[0] + parts[1] and 2 <= parts[1].count(b"def ") <= 20
    assert "200 files of 400, each content once" in corpus.source and "sha256" in corpus.source
    assert str(tmp_path) not in corpus.source and tmp_path.name in corpus.source  # it goes into reports
    source_text.write(corpus, tmp_path / "kept")
    kept = source_text.read(tmp_path / "kept")
    assert kept is not None and kept.fingerprint == corpus.fingerprint and kept.source == corpus.source
    assert torch.equal(kept.train, corpus.train) and torch.equal(kept.validation, corpus.validation)
    assert source_text.read(tmp_path) is None
    with pytest.raises(ValueError, match="too few to hold some out"):
        source_text.gather([tmp_path / "copies" / "none"])


def test_tokens_of_source_text(tmp_path: Path) -> None:
    """A tokenizer that saw the training text alone has made them; of all files or of some; and a run takes them."""
    for i in range(300):
        (tmp_path / f"{i}.py").write_text(f'def function_{i}():\n    return {i} + "\u00e9"\n')
    whole, some = (source_text.gather([tmp_path], 300, most, 3) for most in (None, 6000))
    sizes = [[len(part) for part in (each.train, each.validation)] for each in (whole, some)]
    assert 0.25 < sizes[0][1] / sum(sizes[0]) < 0.42 and 0.3 < sum(sizes[1]) / sum(sizes[0]) < 0.7
    assert whole.vocabulary == 300 and whole.train.dtype == torch.uint16 and int(whole.train.long().max()) == 299
    assert sum(sizes[0]) < 0.6 * sum(path.stat().st_size for path in tmp_path.iterdir())
    source_text.write(whole, tmp_path / "kept")
    kept = study.load_text([tmp_path / "kept"], MICRO.context)
    assert kept.fingerprint == whole.fingerprint and (kept.vocabulary, kept.unit) == (300, "token")
    conditions = replace(given(kept), steps=1)
    assert (
        study.execute(Job("current", 0), conditions, kept, CPU).run.parameters == MICRO.with_vocabulary(300).parameters
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--vocabulary", 300), "--vocabulary is for --machine-text"),
        (("--text-bytes", 300), "--text-bytes is for --machine-text"),
        (("--machine-text", "--vocabulary", 300), "text has bytes of 256; choose another --out, or its --vocabulary"),
        (("--recipes", "block+2d"), "2d is an option of mxfp8 and mxfp4 and w4a8"),
        (("--recipes", "mxfp4+4over6"), "4over6 is an option of nvfp4"),
        (("--recipes", "nvfp4+parameters+finish20"), "parameters that are codes stay codes in bf16"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: tuple[object, ...], message: str, corpus: Corpus, tmp_path: Path
) -> None:
    source_text.write(corpus, tmp_path / "text")
    text = () if "--machine-text" in options else (tmp_path / "text",)
    code, output = invoke("study", *text, *options, "--model", "micro", "--device", "cpu", "--out", tmp_path)
    assert code == 2 and message in " ".join(output.split()), output


# ---- Variants ----


@pytest.fixture
def corpus() -> Corpus:
    text = torch.frombuffer(bytearray(b"the quick brown fox jumps over the lazy dog\n" * 300), dtype=torch.uint8)
    return Corpus(text[:12000], text[12000:], "foxes")


def given(corpus: Corpus, **changed: object) -> Conditions:
    made = Conditions(
        "micro", 2, 2, 1e-2, corpus.fingerprint, study.device_kind(CPU), evaluations=1, evaluation_batches=1,
        accumulate=2, warmup=0.5, clip=0.5,
    )  # fmt: skip
    return replace(made, **changed)


NAMES = [
    "nvfp4+4over6", "nvfp4+no-rht+4over6", "nvfp4+no-sr+last-bf16", "nvfp4+no-2d", "current+parameters", "mxfp8+tail15",
    "w4a8", "mxfp4+2d+rht", "current+e4m3+split", "block+f32-scales", "mxfp8+codes", "nvfp4+forward",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_trains_in_its_formats(name: str, corpus: Corpus) -> None:
    job = Job(name, 0)
    result = study.execute(job, given(corpus), corpus, CPU)
    assert result.error is None and result.run.validation_loss < 7
    assert study_report.problems_of_runs({job: result}) == []
    other = study.execute(Job("bf16", 0), given(corpus), corpus, CPU)
    assert result.run.history[0].loss == pytest.approx(other.run.history[0].loss, rel=0.1)
    assert result.run.history[-1].loss != other.run.history[-1].loss


@pytest.mark.parametrize(("name", "layers", "quantized"), [("tail15", 8, 7), ("tail15", 2, 1), ("tail15", 12, 10),
                                                           ("last-bf16", 8, 6)])  # fmt: skip
def test_layers_of_a_tail(name: str, layers: int, quantized: int) -> None:
    assert Variant.parse(f"nvfp4+{name}").quantized_layers(replace(MICRO, layers=layers)) == quantized


@pytest.mark.parametrize(
    "name",
    ["bf16-reordered", "fp32", "mxfp4+2d+rht", "nvfp4+no-rht+4over6", "delayed+finish20"]
    + [f"{recipe}+parameters" for recipe in ("delayed", "current", "block")],
)
def test_captured_runs_are_the_same(name: str, corpus: Corpus, graph_device: torch.device) -> None:
    """Each step of the rise and of the fall of the learning rate, and the evaluations in between."""
    conditions = given(corpus, steps=5, evaluations=5, decay="linear", device=study.device_kind(graph_device))
    runs = [
        study.execute(Job(name, 0), conditions, corpus, graph_device, cuda_graph=each).run for each in (True, False)
    ]
    losses = [[(m.loss, m.gradient_norm, m.validation_loss) for m in run.history] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 5 and runs[0].gemms == runs[1].gemms


@pytest.mark.parametrize("name", ["current", "block"])
def test_weights_kept_as_codes_train_as_those_cast_each_step(
    name: str, corpus: Corpus, graph_device: torch.device
) -> None:
    conditions = given(corpus, steps=30, device=study.device_kind(graph_device))
    runs = [
        study.execute(Job(each, 0), conditions, corpus, graph_device, cuda_graph=True).run
        for each in (name, f"{name}+parameters")
    ]
    losses = [[(m.loss, m.gradient_norm, m.validation_loss) for m in run.history] for run in runs]
    assert losses[0] == losses[1]


class TensorRate(torch.optim.AdamW):
    """Stands for torchao's AdamWFp8, which refuses a learning rate that is no tensor."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, torch.tensor(lr), betas=betas, fused=True)

    def step(self, closure: Any = None) -> Any:
        assert all(isinstance(group["lr"], torch.Tensor) for group in self.param_groups)
        return super().step(closure)


def test_moments_of_torchao(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its optimizer gets groups, betas and each step's rate, also for masters; it is neither saved nor captured."""
    for name in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["torchao.optim"], "AdamWFp8", TensorRate, raising=False)
    for name in ("current", "current+parameters"):
        runs = [study.execute(Job(each, 0), given(corpus, steps=5), corpus, CPU) for each in (name, f"{name}+moments8")]
        losses = [[metrics.loss for metrics in each.run.history] for each in runs]
        assert losses[0] == losses[1]
    variant = Variant.parse("current+moments8")
    assert not variant.can_stop and not variant.can_be_captured


def test_a_finish_has_no_recipe(corpus: Corpus) -> None:
    """More or fewer quantized steps than the name says are a problem of the run."""
    result = study.execute(Job("nvfp4+finish20", 0), given(corpus, steps=10), corpus, CPU)
    assert study_report.problems_of_runs({result.job: result}) == []
    assert len(study_report.problems_of_runs({Job("nvfp4+finish10", 0): result})) == 3  # of fprop, dgrad and wgrad
    forward = study.execute(Job("nvfp4+forward+finish20", 0), given(corpus, steps=10), corpus, CPU)
    assert study_report.problems_of_runs({forward.job: forward}) == []
    plain = study.execute(Job("nvfp4", 0), given(corpus, steps=10), corpus, CPU)
    assert len(study_report.problems_of_runs({result.job: plain})) == 3
    found, wanted = ([metrics.loss for metrics in run.run.history] for run in (result, plain))
    assert found[:8] == wanted[:8] and found[8:] != wanted[8:]


def test_rates_fall_to_zero_and_early_evaluations_are_short(corpus: Corpus) -> None:
    conditions = given(corpus, steps=4, evaluations=4, evaluation_batches=16, decay="linear")
    config = conditions.config(Job("bf16", 0))
    assert [config.rate(step) for step in range(1, 6)] == pytest.approx([5e-3, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3, 0])
    seen: list[int] = []
    build = study.build
    with pytest.MonkeyPatch.context() as patch:

        def watched(job: Job, sizes: ModelConfig) -> nn.Module:
            model = build(job, sizes)
            model.register_forward_pre_hook(lambda model, args: None if model.training else seen.append(len(args[0])))
            return model

        patch.setattr(study, "build", watched)
        study.execute(Job("bf16", 0), conditions, corpus, CPU)
    assert seen == 3 * [2] * 2 + [2] * 9  # of 18 windows


def test_experts(corpus: Corpus) -> None:
    job = Job("current", 0)
    result = study.execute(job, given(corpus, experts=2), corpus, CPU)
    assert result.error is None and result.run.history[-1].imbalance is not None
    assert study_report.problems_of_runs({job: result}) == []


# ---- Stopping and going on ----


def test_runs_that_were_stopped_in_the_middle_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run after run of no time: each run goes one step further, and ends with the losses of one that never stopped."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    corpus = study.load_text([text], MICRO.context)
    kind = study.device_kind(CPU)
    conditions = Conditions("micro", 3, 2, 1e-2, corpus.fingerprint, kind, evaluations=3, evaluation_batches=1)
    job = Job("bf16", 0)
    task = {
        "job": vars(job), "conditions": vars(conditions), "paths": [str(text)], "folder": str(tmp_path),
        "device": "cpu", "threads": 1, "until": time.time(),
    }  # fmt: skip
    for step in (1, 2):
        with pytest.raises(SystemExit) as ended:
            study.work(task)
        assert ended.value.code == study.STOPPED and not job.file(tmp_path).exists()
        (saved,) = job.saved(tmp_path).iterdir()
        assert saved.name == f"step-{step:08}"
        assert "common" not in Checkpoint.read(saved).settings  # which older checkpoints do not name
    study.work(task)
    assert not job.saved(tmp_path).exists()
    whole = study.execute(job, conditions, corpus, CPU)
    stopped = study.read(job.file(tmp_path))
    assert [m.loss for m in stopped.run.history] == [m.loss for m in whole.run.history]
    assert stopped.validation() == whole.validation()


class InThisProcess:
    """Stands for `subprocess.Popen` of a run."""

    def __init__(self, command: list[str], stdout: IO[bytes], **_: Any) -> None:
        self.returncode: int = 0
        log = io.TextIOWrapper(stdout, write_through=True)
        try:
            with redirect_stdout(log):
                study.work(json.loads(command[-1]))
        except SystemExit as ended:
            self.returncode = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        log.detach()

    def poll(self) -> int:
        return self.returncode


IN_THIS_PROCESS = SimpleNamespace(Popen=InThisProcess, DEVNULL=None, STDOUT=None)  # for the study's module alone
TIME_IS_OVER = SimpleNamespace(time=lambda: math.inf, monotonic=time.monotonic, sleep=time.sleep)  # after any step


def test_runs_of_a_seed_have_their_first_steps_in_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "subprocess", IN_THIS_PROCESS)
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    options = ("study", text, "--model", "micro", "--steps", 5, "--batch-size", 2, "--accumulate", 1, "--seeds", 2,
               "--device", "cpu", "--out", out, "--evaluations", 5, "--evaluation-batches", 9,
               "--max-gap", 1)  # fmt: skip
    code, output = invoke(*options, "--recipes", "delayed", "--common", 0.6)
    assert code == 2 and "delayed keeps a state that bf16 has not" in output, output
    code, output = invoke(*options, "--recipes", "current", "--common", 1.0)
    assert code == 2 and "choose a share of the steps below 1" in output, output
    for recipe, common, most in (("current", 0.05, 4), ("current", 0.95, 4), ("nvfp4+finish20", 0.8, 3)):
        code, output = invoke(*options, "--recipes", recipe, "--common", common)
        assert code == 2 and f"can have 1 to {most} in common" in output, output
    code, output = invoke(*options, "--recipes", "current", "--common", 0.6)
    assert code == 0 and "noise floor by step: 4: " in output and ", 5: " in output, output
    (report,) = out.glob("*-study-micro.md")
    assert "- in common: the first 3 steps" in report.read_text()
    results = {job: study.read(job.file(out / "runs")) for job in study.jobs(["current"], (0, 1))}
    for seed in (0, 1):
        losses = [[m.loss for m in result.run.history] for job, result in results.items() if job.seed == seed]
        whole = study.execute(Job("bf16", seed), replace(results[Job("bf16", seed)].conditions, common=0),
                              study.load_text([text], MICRO.context), CPU)  # fmt: skip
        assert losses[0] == [m.loss for m in whole.run.history]
        assert len({tuple(each[:3]) for each in losses}) == 1
        assert len({each[4] for each in losses}) >= 3  # sums in reverse order may round alike
    assert study_report.problems_of_runs(results) == []
    other = study.read(Job("current", 1).file(out / "runs"))
    results[Job("current", 0)] = replace(other, job=Job("current", 0))
    assert study_report.problems_of_runs(results) == [
        "seed 0: current has other first steps than bf16; delete all runs of the seed"
    ]
    more = *options, "--recipes", "current,mxfp8", "--common", 0.6
    kept, away = Job("common", 1).saved(out / "runs"), tmp_path / "away"
    kept.rename(away)
    code, output = invoke(*more)
    assert code == 2 and "common-1-checkpoints is gone, from which current with seed 1 went on" in output, output
    code, output = invoke(*more, "--learning-rate", 1e-3)
    assert code == 2 and "learning_rate was" in output, output
    for file in (out / "runs").glob("*.json"):
        file.rename(tmp_path / file.name)
    code, output = invoke(*more, "--learning-rate", 1e-3)
    assert code == 2 and "common-0-checkpoints/step-00000003 is of another study: learning_rate was" in output, output
    for file in tmp_path.glob("*.json"):
        file.rename(out / "runs" / file.name)
    away.rename(kept)
    with monkeypatch.context() as patch:
        patch.setattr(study, "time", TIME_IS_OVER)
        code, output = invoke(*more)  # each run stops behind its first step
    assert code == 3 and "FAILED" not in output and "8 of 10 runs are finished" in output, output
    kept.rename(away)  # what has begun does not need it
    for file in (out / "runs").glob("*-1.json"):
        file.rename(tmp_path / file.name)
    code, output = invoke(*more)  # those of the seed that have not
    assert code == 2 and "common-1-checkpoints is gone, from which mxfp8 with seed 1 went on" in output, output
    for file in tmp_path.glob("*.json"):
        file.rename(out / "runs" / file.name)
    code, output = invoke(*more)
    assert code == 0 and "8 of 10 runs are finished" in output, output


def test_a_common_start_is_made_in_pieces_and_its_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    corpus = study.load_text([text], MICRO.context)
    conditions = Conditions("micro", 5, 2, 1e-2, corpus.fingerprint, study.device_kind(CPU), evaluations=5,
        evaluation_batches=1, experts=2, common=2)  # fmt: skip

    def work(job: Job, seconds: float = 0.0) -> None:
        study.work({
            "job": vars(job), "conditions": vars(conditions), "paths": [str(text)], "folder": str(tmp_path),
            "device": "cpu", "threads": 1, "until": time.time() + seconds,
        })  # fmt: skip

    common, job = Job("common", 0), Job("current", 0)
    with pytest.raises(ValueError, match="the first 2 steps of seed 0, in common, are not there"):
        work(job)
    for seconds, made in ((0.0, False), (600.0, True)):
        with pytest.raises(SystemExit) as ended:
            work(common, seconds)
        assert ended.value.code == study.STOPPED
        assert (study.common_start(0, conditions, tmp_path) is not None) is made
    with pytest.raises(SystemExit):
        work(job)  # in the first of its own steps
    assert [path.name for path in job.saved(tmp_path).iterdir()] == ["step-00000003"]
    work(job, 600.0)
    result = study.read(job.file(tmp_path))
    assert study_report.problems_of_runs({job: result}) == []
    begun = study.start_of(Job("block", 0), conditions, tmp_path)
    assert begun is not None and begun.step == 2 and begun.values["peak_bytes"] == 0

    execute = study.execute
    monkeypatch.setattr(study, "execute", lambda job, conditions, *rest: execute(job, conditions, *rest)
        if job.seed != 1 else study.Result(job, conditions, result.run, "NaN"))  # fmt: skip
    with pytest.raises(SystemExit, match="NaN; leave seed 1 out of --seeds"):
        work(Job("common", 1))
    assert not Job("common", 1).file(tmp_path).exists()
    monkeypatch.setattr(study, "subprocess", IN_THIS_PROCESS)
    options = ("study", text, "--model", "micro", "--steps", 5, "--batch-size", 2, "--accumulate", 1, "--seeds", 2,
        "--device", "cpu", "--out", tmp_path / "out", "--evaluations", 5, "--common", 0.4, "--recipes", "current",
        "--evaluation-batches", 1)  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(study, "time", TIME_IS_OVER)
        code, output = invoke(*options, "--seeds", "0,2")
    assert code == 3 and "FAILED" not in output and "8 of 8 runs are left" in output, output
    code, output = invoke(*options)
    assert code == 1 and output.count("FAILED") == 1 and "common with seed 1 ended with code 1" in output, output
    assert "the first 2 steps of seed 0 are made" in output and "4 of 8 runs are left" in output, output


def test_controls_alone_give_the_floor(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    options = ("study", text, "--recipes", "", "--model", "micro", "--steps", 2, "--batch-size", 2, "--accumulate", 2,
               "--seeds", 2, "--device", "cpu", "--workers", 2, "--out", tmp_path / "out", "--clip", 0.5,
               "--evaluation-batches", 32)  # fmt: skip
    for job in study.jobs([], (0, 1)):
        corpus = study.load_text([text], MICRO.context)
        conditions = conditions_of(corpus)
        job.file(tmp_path / "out" / "runs").parent.mkdir(parents=True, exist_ok=True)
        study.write(study.execute(job, conditions, corpus, CPU), job.file(tmp_path / "out" / "runs"))
    code, output = invoke(*options)
    assert code == 0 and "noise floor: after 2 steps" in output and "4 runs of 2 seeds" in output, output
    (report,) = (tmp_path / "out").glob("*-study-micro.md")
    assert "noise floor: after 2 steps" in report.read_text() and "-summary.png" in report.read_text()


def conditions_of(corpus: Corpus) -> Conditions:
    """What the command makes of its options."""
    from minifloat.tools.cli.study import threads_of_each

    return Conditions(
        "micro", 2, 2, 3e-3 * 128 / MICRO.dim, corpus.fingerprint, study.device_kind(CPU), accumulate=2, clip=0.5,
        threads=threads_of_each(2), decay="linear",
    )  # fmt: skip
