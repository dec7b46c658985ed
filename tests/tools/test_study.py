"""The loss study: its statistics, its controls, its runs in child processes, and what it makes of their results."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from minifloat.functional import Gemm
from minifloat.recipe import NAMES, named
from minifloat.tools.cli import study as command
from minifloat.tools.cli.output import claimed
from minifloat.tools.train import data, study, study_report
from minifloat.tools.train.loop import Metrics, Run
from minifloat.tools.train.model import ModelConfig
from minifloat.tools.train.study import Conditions, Job, Result
from minifloat.tools.train.study_statistics import Outcome, outcomes, p_value, student_t
from tests.helpers.children import children
from tests.helpers.micro_training import CPU, MICRO, invoke

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Text with a structure that a micro model learns in a few steps."""
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\ndef double(number):\n    return 2 * number\n" * 400)
    return file


def conditions(steps: int = 4, text_name: str = "text") -> Conditions:
    return Conditions("micro", steps, 4, 1e-2, text_name, study.device_kind(CPU), evaluations=2, evaluation_batches=2,
        decay="linear")  # fmt: skip


# ---- Statistics ----


@pytest.mark.parametrize(
    "freedom, t", [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622), (10, 2.2281), (30, 2.0423)]
)
def test_student_t_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=5e-5)


def test_p_value_by_hand() -> None:
    controls = [(0.1, -0.2, 0.3), (-0.2, 0.1, 0.1)]
    assert p_value((0.5, 0.6, -0.7), controls) == 1 / 27  # the farthest at every seed
    assert p_value((-0.01, 0.01, 0.01), controls) == 1.0  # the nearest at every seed
    # The farthest at two seeds and the nearest at the third, where either control would give more: 3 of 27.
    assert p_value((0.5, 0.6, 0.01), controls) == 3 / 27
    assert p_value((0.2,), [(0.2,), (-0.2,)]) == 1.0  # ties count as "at least"


def test_gaps_are_relative_to_bf16_of_the_same_seed() -> None:
    losses = {"bf16": [2.0, 1.0, 4.0], "fp32": [2.0, 1.001, 4.0], "current": [2.01, 1.0, 3.98]}
    control, recipe = outcomes(losses, "bf16", ["fp32"], {"current": 0.02})
    assert (control.name, control.limit, control.verdict) == ("fp32", None, "control")
    assert recipe.gaps == pytest.approx((0.005, 0.0, -0.005))
    assert recipe.absolute.mean == pytest.approx(0.01 / 3) and recipe.signed.mean == pytest.approx(0.0)
    assert recipe.absolute.half == pytest.approx(4.302653 * 0.005 * math.sqrt(1 / 3) / math.sqrt(3), rel=1e-6)
    assert recipe.smallest_p == 1 / 8


def test_verdicts() -> None:
    """Within the limit; over it but as the controls; over both; and seeds too few to tell excuse nothing."""
    near = Outcome("r", (0.001, 0.0011, 0.0009), 0.005, 1 / 27, 1 / 27)
    assert near.within and near.passed and near.problem is None and near.verdict == "passed: within the limit"
    spread = Outcome("r", (0.001, 0.004, 0.009), 0.005, 2 / 27, 1 / 27, 0.005)
    assert spread.absolute.mean < 0.005 and not spread.within  # the mean is: the interval decides
    assert spread.passed and spread.verdict == "passed: not distinguishable from the controls"
    far = replace(spread, p_value=1 / 27)
    assert not far.passed and far.verdict == "FAILED" and "0.467%" in str(far.problem) and "p 0.037" in str(far.problem)
    above = replace(spread, controls_upper=0.0046)
    assert not above.passed and "p 0.074, upper end of their intervals 0.460%" in str(above.problem)
    few = Outcome("r", (0.02, 0.03), 0.005, 1.0, 1 / 9, 1.0)
    assert not few.passed and "too few seeds" in str(few.problem)
    better = Outcome("r", (-0.02, -0.0201, -0.0199), 0.005, 1 / 27, 1 / 27)
    assert not better.passed  # better than bf16 by more than the limit is as suspicious


# ---- Controls ----


def gradients(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def test_a_reversed_linear_is_the_same_linear_with_other_rounding() -> None:
    plain, backward = nn.Linear(384, 130), study.ReversedLinear(384, 130)
    backward.load_state_dict(plain.state_dict())
    x, dy = torch.randn(7, 384), torch.randn(7, 130)
    for a, b in zip(gradients(plain.double(), x.double(), dy.double()),
                    gradients(backward.double(), x.double(), dy.double()), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    plain, backward = plain.float(), backward.float()
    plain.zero_grad(), backward.zero_grad()
    (y, dx, *_), (y2, dx2, *_) = gradients(plain, x, dy), gradients(backward, x, dy)
    assert not torch.equal(y, y2) and not torch.equal(dx, dx2)


def test_the_reordered_model_is_the_same_model_with_other_rounding() -> None:
    """Same initial weights; logits and gradients equal but for rounding, in wgrad's sums over the batch too."""
    plain, other = (study.build(Job(name, 3), MICRO) for name in (study.BASELINE, study.REORDERED))
    x = torch.randint(256, (4, MICRO.context))
    dy = torch.randn(4, MICRO.context, 256)
    for model in (plain, other):
        model(x).backward(dy)
    torch.testing.assert_close(plain(x), other(x), rtol=1e-4, atol=1e-4)
    named_gradients = dict(other.named_parameters())
    for name, parameter in plain.named_parameters():
        twin = named_gradients[name]
        assert torch.equal(parameter, twin), name
        assert parameter.grad is not None and twin.grad is not None
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-3, atol=1e-3)
    head, reordered_head = plain.get_parameter("head.weight").grad, other.get_parameter("head.weight").grad
    assert head is not None and reordered_head is not None and not torch.equal(head, reordered_head)


def test_all_runs_of_a_seed_start_equal_and_see_the_same_batches(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = data.load([text], least=MICRO.context + 1)
    firsts: dict[str, list[torch.Tensor]] = {}
    build = study.build

    def watched(job: Job, sizes: ModelConfig) -> nn.Module:
        made = build(job, sizes)
        weights = torch.cat([parameter.flatten() for parameter in made.parameters()])
        firsts[job.name] = [weights.detach().clone()]
        made.register_forward_pre_hook(lambda _, args: firsts[job.name].append(args[0]), prepend=True)
        return made

    monkeypatch.setattr(study, "build", watched)
    results = [study.execute(job, conditions(2), corpus, CPU) for job in study.jobs(["current"], [1])]
    assert all(result.error is None and len(result.run.history) == 2 for result in results)
    assert {len(seen) for seen in firsts.values()} == {len(firsts["bf16"])} and len(firsts["bf16"]) > 3
    for seen in firsts.values():
        assert all(torch.equal(a, b) for a, b in zip(seen, firsts["bf16"], strict=True))
    found = {tuple((each.loss, each.gradient_norm) for each in result.run.history) for result in results}
    assert len(found) == 4  # and yet no two compute the same


# ---- Results as files ----


def made(job: Job, final: float, gemms: Counter[Gemm] | None = None, given: Conditions | None = None) -> Result:
    """A made-up result of four steps that ends at the validation loss ``final``."""
    given = given or conditions()
    losses = [6.0, 5.0, 4.0, final]
    history = tuple(
        Metrics(i + 1, loss, 1.0, 1e-3, 0.1, 100.0, loss if i % 2 else None) for i, loss in enumerate(losses)
    )
    return Result(job, given, Run(job.name, history, expected(job) if gemms is None else gemms, 2**20, 1000))


def expected(job: Job) -> Counter[Gemm]:
    """The GEMMs that a run of four steps should execute."""
    count = 4 * MICRO.linears
    if job.name not in NAMES:
        return Counter({Gemm("fprop", "identity", "identity", "torch"): count})
    pairs = named(job.name).expected_gemms()
    return Counter({Gemm(gemm, a, b, "reference"): count for gemm, (a, b) in pairs.items()})


def test_gaps_of_the_training_loss_are_those_of_the_last_tenth() -> None:
    losses = {"bf16": [4.0] * 18 + [2.0, 3.0], "current": [9.0] * 18 + [2.5, 2.6]}
    results = {}
    for name, each in losses.items():
        result = made(Job(name, 5), 1.0, given=conditions(20))
        history = tuple(Metrics(i + 1, loss, 1.0, 1e-3, 0.1, 100.0) for i, loss in enumerate(each))
        results[result.job] = replace(result, run=replace(result.run, history=history))
    assert study_report.training_gaps(results) == {"current": [pytest.approx(2.55 / 2.5 - 1)]}
    for given in (conditions(5), replace(conditions(20), common=19)):  # the last step alone
        alone = {job: replace(result, conditions=given) for job, result in results.items()}
        assert study_report.training_gaps(alone) == {"current": [pytest.approx(2.6 / 3.0 - 1)]}


def test_the_cost_of_a_run_is_that_of_its_own_steps() -> None:
    """Tokens/s of steps in common are bf16's."""
    result = made(Job("current", 5), 1.0, given=replace(conditions(), common=3))
    *common, last = result.run.history
    run = replace(result.run, history=(*common, replace(last, tokens_per_second=70.0)))
    assert study_report._cost([replace(result, run=run)], alone=True) == ["70", "1 MiB"]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job("mxfp8", 7)
    for result in (made(job, 2.0), replace(made(job, 2.0), error="step 3 has loss nan")):
        study.write(result, job.file(tmp_path))
        assert study.read(job.file(tmp_path)) == result
    assert [path.name for path in tmp_path.iterdir()] == ["mxfp8-7.json"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Job("bf16", 0).file(tmp_path)
    old = made(Job("bf16", 0), 2.0)
    study.write(old, path)

    def broken(values: object, file: object) -> None:
        file.write('{"job"')  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", broken)
    with pytest.raises(KeyboardInterrupt):
        study.write(made(Job("bf16", 0), 3.0), path)
    assert study.read(path) == old


def test_results_of_other_conditions_are_refused(tmp_path: Path) -> None:
    wanted = study.jobs(["current"], [0, 1])
    study.write(made(wanted[0], 2.0), wanted[0].file(tmp_path))
    assert list(study.finished(wanted, conditions(), tmp_path)) == [wanted[0]]
    with pytest.raises(ValueError, match=r"bf16-0.json is of another study: steps was 4, is 5; choose another --out"):
        study.finished(wanted, conditions(5), tmp_path)


def test_a_loss_that_is_not_finite_is_a_result(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = data.load([text], least=MICRO.context + 1)
    build = study.build

    def poisoned(job: Job, sizes: ModelConfig) -> nn.Module:
        made_model = build(job, sizes)
        nn.init.constant_(made_model.get_parameter("head.weight"), math.nan)
        return made_model

    monkeypatch.setattr(study, "build", poisoned)
    result = study.execute(Job("current", 0), conditions(), corpus, CPU)
    assert result.error is not None and "step 1" in result.error and result.run.history == ()


# ---- Processes ----


def sleeper(seconds: float, code: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-S", "-c", f"import time; time.sleep({seconds}); raise SystemExit({code})"]
    )


def test_jobs_run_side_by_side_and_every_end_is_told() -> None:
    started: list[tuple[Job, int]] = []
    codes: dict[Job, int] = {}
    alive: list[subprocess.Popen[bytes]] = []
    most = 0

    def begin(job: Job, worker: int) -> subprocess.Popen[bytes]:
        nonlocal most
        started.append((job, worker))
        alive.append(sleeper(0.1, job.seed % 2))
        most = max(most, sum(process.poll() is None for process in alive))
        return alive[-1]

    wanted = [Job("x", seed) for seed in range(7)]
    study.run_jobs(wanted, begin, 3, math.inf, lambda job, code, _: codes.update({job: code}))
    assert [job for job, _ in started] == wanted and {worker for _, worker in started} == {0, 1, 2} and most <= 3
    assert codes == {job: job.seed % 2 for job in wanted}


def test_no_job_starts_after_the_deadline_and_the_running_ones_end() -> None:
    now, ended = [0.0], []

    def begin(job: Job, _: int) -> subprocess.Popen[bytes]:
        now[0] += 1  # the only time that passes
        return sleeper(0.1)

    wanted = [Job("x", seed) for seed in range(4)]
    study.run_jobs(wanted, begin, 3, 1.5, lambda job, *_: ended.append(job), lambda: now[0])
    assert sorted(job.seed for job in ended) == [0, 1] and now == [2.0]
    study.run_jobs(wanted, begin, 3, 1.5, lambda job, *_: ended.append(job), lambda: now[0])
    assert len(ended) == 2


def test_running_jobs_do_not_outlive_an_interrupted_study() -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def begin(job: Job, worker: int) -> subprocess.Popen[bytes]:
        if worker == 1:
            raise KeyboardInterrupt
        processes.append(sleeper(60))
        return processes[-1]

    with pytest.raises(KeyboardInterrupt):
        study.run_jobs([Job("x", 0), Job("x", 1)], begin, 2, math.inf, lambda *_: None)
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


# ---- The command ----


def micro_options(text: Path, out: Path, steps: int = 4) -> list[object]:
    sizes = ("--model", "micro", "--batch-size", 4, "--accumulate", 1, "--evaluation-batches", 32)
    fixed = (*sizes, "--seeds", 2, "--recipes", "current", "--device", "cpu")
    return ["study", text, "--out", out, "--steps", steps, "--workers", 2, *fixed]


def finish_in_this_process(
    text: Path, folder: Path, names: set[str], steps: int = 4, seeds: tuple[int, ...] = (0, 1)
) -> None:
    """Puts the results of some runs where the command with `micro_options` looks for them."""
    corpus = data.load([text], least=MICRO.context + 1)
    rate, kind = 3e-3 * 128 / MICRO.dim, study.device_kind(CPU)
    given = Conditions(
        "micro", steps, 4, rate, corpus.fingerprint, kind, threads=command.threads_of_each(2), decay="linear"
    )
    folder.mkdir(parents=True, exist_ok=True)
    for job in study.jobs(["current"], seeds):
        if job.name in names:
            study.write(study.execute(job, given, corpus, CPU), job.file(folder))


def study_in_a_group_of_its_own(arguments: list[object]) -> None:
    """What a child process does until it is killed, with the processes that it starts."""
    os.setsid()
    sys.argv = ["study", *map(str, arguments)]
    typer.run(command.study)


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on(text: Path, tmp_path: Path) -> None:
    """SIGKILL of the whole process group while a run trains: what is finished stays, the rest is run, the report is."""
    out = tmp_path / "out"
    finish_in_this_process(text, out / "runs", {"bf16", "bf16-reordered", "fp32"})
    finish_in_this_process(text, out / "runs", {"current"}, seeds=(1,))
    early = {path.name: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    process = children().Process(target=study_in_a_group_of_its_own, args=(micro_options(text, out)[1:],))
    process.start()
    log = Job("current", 0).log(out / "runs")
    while process.is_alive() and not (log.exists() and "step" in log.read_text()):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    for path in (out / "runs").glob("*.json"):
        study.read(path)
    (out / "runs" / "current-0.json.123.tmp").write_text('{"job"')  # as of a process that was killed while it wrote
    status, output = invoke(*micro_options(text, out), "--max-gap", "inf")
    assert status == 0, output
    assert not list((out / "runs").glob("*.tmp"))
    assert early == {name: (out / "runs" / name).stat().st_mtime_ns for name in early}
    assert "runs are finished" in output and "GEMMs: current  wgrad" in output and "within the limit" in output
    (report,) = out.glob("????-??-??-study-micro.md")
    written = report.read_text()
    linears = 2 * 4 * MICRO.linears  # seeds, steps
    gemms = f"| current | wgrad | e5m2/tensor/fp32 | e4m3/tensor/fp32 | native | {linears} |"
    images = f"{report.stem}-loss.png", f"{report.stem}-gap.png"
    tokens = f"{4 * 4 * MICRO.context:,} bytes a run, "
    for part in ("**passed**", "t = 12.706", "| bf16-reordered |", tokens, "bf16 by seed: ", gemms, *images):
        assert part in written, part
    values = json.loads(report.with_suffix(".json").read_text())
    assert values["passed"] and len(values["runs"]) == 8 and len(values["runs"][0]["training"]) == 4
    for kind in ("loss", "gap", "summary"):
        assert report.with_name(f"{report.stem}-{kind}.png").read_bytes()[:4] == b"\x89PNG"


def test_a_study_that_is_not_finished_has_a_report_of_what_is(text: Path, tmp_path: Path) -> None:
    """A recipe is in it once all its seeds are."""
    out = tmp_path / "out"
    finish_in_this_process(text, out / "runs", {"bf16", "bf16-reordered", "fp32"})
    finish_in_this_process(text, out / "runs", {"current"}, seeds=(1,))
    code, output = invoke(*micro_options(text, out), "--minutes", 0)
    assert code == command.INCOMPLETE and "1 of 8 runs are left: current with seed 0" in output
    (report,) = out.glob("*-study-micro.md")
    written = report.read_text()
    assert "**passed** so far: 1 runs are left" in written and "| fp32 |" in written and "| current |" not in written
    assert "noise floor: after 4 steps" in written and "tokens/s |" not in written and "of the 3^2 ways" in written
    values = json.loads(report.with_suffix(".json").read_text())
    assert values["left"] == ["current with seed 0"] and set(values["training_gaps"]) == {"bf16-reordered", "fp32"}
    for name, gaps in values["training_gaps"].items():
        assert f"| {name} | {math.fsum(gaps) / 2:+.3%} |" in written and f"{gaps[0]:+.3%}, {gaps[1]:+.3%} |" in written


def test_a_run_whose_study_is_gone_stops(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([100, 100, 100, 1])
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(SystemExit, match="is gone"):
        study.work(task_of(Job("bf16", 0), 8, text, tmp_path))
    assert not Job("bf16", 0).file(tmp_path).exists() and next(parents, None) is None


def task_of(job: Job, steps: int, text: Path, folder: Path) -> dict[str, Any]:
    """What `study.start` hands to a process."""
    given = conditions(steps, data.load([text], least=1).fingerprint)
    return {"job": vars(job), "conditions": vars(given), "paths": [str(text)], "folder": str(folder), "device": "cpu",
            "threads": 1, "until": math.inf}  # fmt: skip


def test_the_threads_of_a_cpu_are_conditions(text: Path, tmp_path: Path) -> None:
    """They are the order of its sums."""
    finish_in_this_process(text, tmp_path / "runs", {"bf16"})
    changed = json.loads(Job("bf16", 0).file(tmp_path / "runs").read_text())
    changed["conditions"]["threads"] = 77
    Job("bf16", 0).file(tmp_path / "runs").write_text(json.dumps(changed))
    code, output = invoke(*micro_options(text, tmp_path))
    assert code == 2 and f"threads was 77, is {command.threads_of_each(2)}" in output


def test_a_folder_of_another_process_is_refused(text: Path, tmp_path: Path) -> None:
    with claimed(tmp_path / "out"):
        code, output = invoke(*micro_options(text, tmp_path / "out"))
    assert code == 2 and "another process trains in" in output and len(list((tmp_path / "out").iterdir())) == 1


def test_limits_are_by_the_bits_and_options_change_them(text: Path, tmp_path: Path) -> None:
    def limits(**changed: object) -> dict[str, float]:
        options = {"paths": [text], "machine_text": False, "text_bytes": None, "vocabulary": 0, "accumulate": 1,
                   "experts": 0, "warmup": 0.1, "clip": 1.0,
                   "resolution": 0.001, "recipes": ",".join(NAMES), "seeds": "2", "model": "micro", "steps": 1,
                   "batch_size": 1, "learning_rate": None, "evaluations": 1, "evaluation_batches": 1, "device": "cpu",
                   "workers": 1, "minutes": math.inf, "out": tmp_path,
                   "limits": (command.MAX_GAP, command.MAX_GAP_4BIT)}  # fmt: skip
        return command.make_plan(**(options | changed)).limits  # type: ignore[arg-type]

    assert limits() == {name: 0.015 if name in ("nvfp4", "mxfp4", "w4a8") else 0.005 for name in NAMES}
    assert limits(limits=(0.1, 0.2))["nvfp4"] == 0.2


# ---- What it makes of results ----


def conclude(tmp_path: Path, text: Path, finals: dict[str, list[float]], **changed: Result) -> tuple[bool, str, str]:
    """Passed or not, what was printed, and the report, of made-up final losses by run name and seed."""
    recipes = [name for name in finals if name in NAMES]
    wanted = study.jobs(recipes, range(len(finals["bf16"])))
    results = {job: made(job, finals[job.name][job.seed]) for job in wanted}
    results |= {result.job: result for result in changed.values()}
    plan = command.Study(
        tuple(wanted),
        conditions(),
        (text,),
        (CPU,),
        1,
        1,
        math.inf,
        tmp_path,
        dict.fromkeys(recipes, 0.005),
        0.001,
    )
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer, "echo", lambda line, err=False: lines.append(line))
        passed = command.conclude(plan, results, command.floor_of(plan, results))
    reports = [path.read_text() for path in tmp_path.glob("*-study-micro.md")]
    return passed, "\n".join(lines), reports[0] if reports else ""


FINALS = {"bf16": [2.0, 2.0, 2.0], "bf16-reordered": [2.001, 2.0, 1.999], "fp32": [2.0, 1.998, 2.002]}


def test_a_gap_within_the_limit_passes(text: Path, tmp_path: Path) -> None:
    passed, output, report = conclude(tmp_path, text, FINALS | {"mxfp8": [2.004, 2.005, 2.006]})
    assert passed and "mxfp8: mean of the absolute gap 0.250%" in output and "passed: within the limit" in output
    interval_of_both = "0.250% | 0.126% to 0.374% | +0.250% | +0.126% to +0.374%"  # 0.05 % * 4.303 / sqrt(3) each way
    assert f"| mxfp8 | {interval_of_both} | +0.200%, +0.250%, +0.300% | 0.50% | 0.037 |" in report
    assert "t = 4.303" in report


def test_a_gap_that_is_too_large_fails(text: Path, tmp_path: Path) -> None:
    passed, output, report = conclude(
        tmp_path, text, FINALS | {"current": [2.001, 2.002, 2.0], "mxfp8": [2.02, 2.03, 2.02]}
    )
    assert not passed and "**FAILED**" in report and "| FAILED |" in report
    assert "FAILED: mxfp8: the mean absolute gap to bf16 is 1.167%" in output and "FAILED: current" not in output


@pytest.mark.parametrize(
    "job, wrong, message",
    [
        (Job("mxfp8", 1), Counter(), "seed 1: mxfp8: 0 wgrad GEMMs ran as e4m3/1x32/e8m0"),
        (Job("mxfp8", 0), expected(Job("current", 0)), "seed 0: mxfp8: 32 fprop GEMMs ran as e4m3/tensor/fp32"),
        (Job("bf16", 2), expected(Job("current", 0)), "seed 2: bf16 ran quantized GEMMs"),
        (Job("fp32", 2), expected(Job("nvfp4", 0)), "seed 2: fp32 ran quantized GEMMs"),
    ],
)
def test_wrong_gemms_fail(text: Path, tmp_path: Path, job: Job, wrong: Counter[Gemm], message: str) -> None:
    passed, output, report = conclude(tmp_path, text, FINALS | {"mxfp8": [2.0, 2.0, 2.0]}, wrong=made(job, 2.0, wrong))
    assert not passed and message in output and message in report


def test_a_recipe_that_broke_down_fails_and_has_a_row(text: Path, tmp_path: Path) -> None:
    finals = FINALS | {"current": [2.001, 2.002, 2.0], "mxfp8": [2.0, 2.0, 2.0]}
    passed, output, report = conclude(tmp_path, text, finals, broken=broken(Job("mxfp8", 1)))
    assert not passed and "FAILED: seed 1: mxfp8: step 3 has loss nan" in output
    assert "**FAILED**" in report and "step 3 has loss nan" in report
    assert (
        "| current | 0.050% |" in report and "| mxfp8 |  |  |  |  |  |  |  | broke down at step 3 (seed 1) |" in report
    )
    values = json.loads(next(tmp_path.glob("*-study-micro.json")).read_text())
    assert not values["passed"] and values["broken"] == {"mxfp8": "broke down at step 3 (seed 1)"}


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_a_baseline_or_control_that_broke_down_fails_with_a_report(text: Path, tmp_path: Path, name: str) -> None:
    """The report of an earlier study that passed does not stay; only bf16 leaves nothing to compare with."""
    finals = FINALS | {"current": [2.001, 2.002, 2.0]}
    assert conclude(tmp_path, text, finals)[0]
    passed, output, report = conclude(tmp_path, text, finals, broken=broken(Job(name, 0)))
    assert not passed and f"FAILED: seed 0: {name}: step 3 has loss nan" in output
    assert "**FAILED**" in report and "**passed**" not in report and f"| {name} |  |" in report
    assert ("| current | 0.050% |" in report) == (name == "fp32")
    assert not json.loads(next(tmp_path.glob("*-study-micro.json")).read_text())["passed"]


def broken(job: Job) -> Result:
    """A made-up result whose third step was not finite."""
    result = made(job, 2.0)
    run = replace(result.run, history=result.run.history[:2], gemms=Counter())
    return replace(result, run=run, error=f"{job.name}: step 3 has loss nan")


# ---- The larger set ----


@pytest.mark.slow
def test_a_scale_off_by_two_fails_the_study(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same runs, once as they should be and once with a wrong scale: only the second is told from the controls."""
    from minifloat.ops import matmul

    corpus, steps = data.load([text], least=MICRO.context + 1), 30
    given = conditions(steps)
    losses = {name: [study.execute(Job(name, seed), given, corpus, CPU).run.validation_loss for seed in range(3)]
              for name in ("bf16", *study.CONTROLS, "current")}  # fmt: skip
    multiply = matmul.Product.run

    def broken(self: matmul.Product, *args: Any) -> torch.Tensor:
        arguments = list(args)
        if self.gemm in ("fprop", "dgrad"):  # the weight's scale
            arguments[5] = arguments[5] * 2.0
        return multiply(self, *arguments)

    monkeypatch.setattr(matmul.Product, "run", broken)
    losses["broken"] = [
        study.execute(Job("current", seed), given, corpus, CPU).run.validation_loss for seed in range(3)
    ]
    found = {o.name: o for o in outcomes(losses, "bf16", study.CONTROLS, {"current": 0.1, "broken": 0.1})}
    assert found["current"].passed, found
    assert not found["broken"].passed, found
