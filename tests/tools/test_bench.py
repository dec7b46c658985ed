"""The benchmark: its gates, its rounds, its conclusions, what it writes, and the comparison of two revisions."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import minifloat
from minifloat.tools.bench import against, gate, host, linear, registry, report, run, summary
from minifloat.tools.bench.measure import COPY, MODES, Rounds, Timer, sm_clock
from minifloat.tools.bench.registry import Call, Case, Contender, Outputs, Roofline, Row, UnavailableError
from minifloat.tools.cli import bench as command
from tests.helpers.micro_training import invoke

CPU = torch.device("cpu")
TINY = run.Options(rounds=3, tiny=True)
QUICK = replace(TINY, rounds=2, quick=True)


def contender(name: str, outputs: Callable[[], Outputs], bound: float = 0.1, **options: Any) -> Contender:
    """One whose right answer is ones."""
    return Contender(name, lambda: outputs, gate.against([torch.ones(8)]), bound, **options)


def ones(factor: float = 1.0) -> Outputs:
    return [torch.full((8,), factor)]


def raises(error: Exception) -> Call:
    raise error


def made_up(*contenders: Contender, **options: Any) -> Row:
    return Row("made up", "row", lambda device, tiny: Case(contenders, **options))


def one(row: Row, options: run.Options = TINY) -> run.Result:
    return run.run_row(row, Timer(CPU, tiny=True), options)


# ---- gates ----


@pytest.mark.parametrize("wrong", [1.2, math.nan, math.inf, 0.0])
def test_a_wrong_contender_has_no_speed(wrong: float) -> None:
    row = made_up(contender("right", ones), contender("wrong", partial(ones, wrong)), baselines=("right",))
    result = one(row)
    assert [entry.status for entry in result.entries] == ["ok", "wrong"]
    assert set(result.rounds.seconds["sustained"]) == {COPY, "right"}
    assert "WRONG (error" in result.problems[0] and "made up: row: wrong" in result.problems[0]
    assert summary.as_dict(result)["contenders"][1]["median_seconds"] == {}


def test_a_contender_that_breaks_down_or_is_missing_stays_in_the_report() -> None:
    row = made_up(
        replace(contender("broken", ones), setup=lambda: raises(RuntimeError("out of luck\nand more"))),
        replace(contender("missing", ones), setup=lambda: raises(UnavailableError("not installed"))),
        contender("compiled", ones, compiled=True),
        contender("fine", ones),
    )
    result = one(row, QUICK)
    assert [entry.status for entry in result.entries] == ["failed", "unavailable", "skipped", "ok"]
    assert result.entries[0].message == "RuntimeError: out of luck"
    assert result.problems == ["made up: row: broken: RuntimeError: out of luck"]
    console = Console(width=200, record=True, file=io.StringIO())
    report.show(result, console)
    text = console.export_text()
    for said in ("failed: RuntimeError: out of luck", "not here: not installed", "skipped: --quick", "fine"):
        assert said in text


def test_a_nan_error_never_passes() -> None:
    row = made_up(Contender("nan", lambda: ones, lambda _: math.nan, bound=math.inf))
    assert one(row).entries[0].status == "wrong"


def test_relative_error_is_the_largest_over_the_outputs() -> None:
    a, b = torch.randn(30, 7), torch.randn(5)
    assert gate.relative_error([a, b], [a, b]) == 0
    assert gate.relative_error([a, b * 1.5], [a, b]) == pytest.approx(0.5)
    assert gate.relative_error([a.t(), b], [a, b]) == math.inf
    assert gate.relative_error([a], [a, b]) == math.inf


def test_differing_counts_bits() -> None:
    x = torch.tensor([1.0, -0.0, math.nan, 4.0])
    assert gate.differing([x], [x.clone()]) == 0
    assert gate.differing([x], [torch.tensor([1.0, 0.0, math.nan, 4.0])]) == 0.25
    assert gate.differing([x.to(torch.uint8)], [x]) == math.inf
    assert gate.differing([x[:3]], [x]) == math.inf


# ---- rounds ----


def test_contenders_take_turns_within_each_round() -> None:
    seen: list[str] = []

    def noted(name: str) -> Outputs:
        seen.append(name)
        return ones()

    timer = Timer(CPU, tiny=True)
    timer._count = lambda call: 1  # type: ignore[method-assign]
    found = timer.run({"a": partial(noted, "a"), "b": partial(noted, "b")}, rounds=4)
    assert seen == ["a", "b"] * 8  # four rounds sustained, then four in bursts
    for mode in MODES:
        assert {name: len(times) for name, times in found.seconds[mode].items()} == {COPY: 4, "a": 4, "b": 4}
        assert found.clocks[mode] == [None] * 4


@pytest.mark.gpu
def test_sm_clock_of_a_gpu() -> None:
    clock = sm_clock(torch.device("cuda", 0))()
    assert clock is None or 100 < clock < 4000


# ---- conclusions ----


def known(goals: dict[registry.Measure, float] | None = None) -> run.Result:
    """Rounds in which the medians of times would give another ratio than the median of the ratios."""
    times = {COPY: [1.0, 1.0, 1.0], "slow": [4.0, 8.0, 12.0], "base": [2.0, 6.0, 4.0], "own": [1.0, 2.0, 4.0]}
    entries = [run.Entry(name, "ok") for name in ("slow", "base", "own")]
    entries[1].peak, entries[2].peak = 200, 300
    entries[2].roofline = Roofline(bytes=50.0, products="base")
    entries[2].goals = goals or {}
    case = Case((), ("slow", "base"), flops=4e12, memory_baseline="base")
    return run.Result("suite", "row", case, entries, Rounds({"sustained": times}, {"sustained": [None] * 3}), 100)


def test_ratios_are_medians_of_the_rounds_ratios_to_the_fastest_baseline() -> None:
    result = known()
    assert result.baseline == "base"
    assert summary.ratio(result, "own") == 2.0  # of 2, 3 and 1
    assert summary.ratio(result, "base") == 1.0
    assert summary.ratio(result, "nobody") is None
    assert summary.ratio(result, "own", "burst") is None


def test_speeds_and_goals() -> None:
    result = known({"ratio": 1.9, "roofline": 2.6, "memory": 1.5})
    own = result.entries[2]
    assert summary.rate(result, own) == (2.0, "TFLOP/s")
    result.case = replace(result.case, flops=0.0)
    assert summary.rate(result, own) == (25e-9, "GB/s")
    assert [(v.measure, v.met) for v in summary.verdicts(result, own)] == [
        ("ratio", True), ("roofline", False), ("memory", True)
    ]  # fmt: skip
    own.peak = None
    assert not summary.verdicts(result, own)[2].met  # what was not measured is not met


# ---- rows ----


def marked(row: Row) -> Any:
    """Rows that differ from others in their sizes only are for the larger set of tests."""
    large = (row.name != "8192 x 8192 x 8192" and row.suite == "linear") or row.name.endswith("transformer layers")
    large |= row.suite == "tokens" and not row.name.startswith("512 ")
    large |= row.suite == "shapes" and row.name != "1024 x 1024 x 1024"
    large |= row.suite in ("grouped", "experts") and not row.name.endswith("4096 x 7168, 32 groups")
    large |= row.name.startswith("MXFP8, ")
    return pytest.param(row, marks=[pytest.mark.slow] * large, id=registry.title(row))


@pytest.mark.parametrize("row", [marked(row) for row in registry.rows()])
def test_every_row_runs_on_a_cpu(row: Row) -> None:
    result = run.run_row(row, Timer(CPU, tiny=True), replace(QUICK, rounds=1))
    assert result.problems == []
    ours = [entry for entry in result.entries if entry.name.startswith("minifloat")]
    others = {"captured": "unavailable", "compiled": "skipped", "compiled reduce-overhead": "skipped"}
    assert ours and all(entry.status == others.get(entry.name.rpartition(", ")[2], "ok") for entry in ours)
    assert result.case.contenders == ()  # nothing holds on to the row's tensors
    json.dumps(summary.as_dict(result), allow_nan=False)


def test_a_linear_with_a_wrong_gradient_is_caught() -> None:
    case = linear.build(16384, 4096, 4096, {}, CPU, True)
    ours = next(each for each in case.contenders if each.name == "minifloat current")
    outputs = list(ours.setup()())
    assert ours.error(outputs) < ours.bound
    y, dx, dw = outputs
    for spoiled in ([y, dx * 1.25, dw], [y, dx, -dw], [y, dx.roll(1, 0), dw], [y * math.nan, dx, dw]):
        assert not ours.error(spoiled) <= ours.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suite", "only", "count"),
    [("linear", "8192 x 8192", 4), ("host", "compiled, forward +", 6), ("host", "compiled, calling", 6)],
)
def test_compiled_contenders(suite: str, only: str, count: int) -> None:
    result = one(registry.choose([suite], only)[0])
    compiled = [entry for entry in result.entries if entry.name.endswith("compiled") and "torchao" not in entry.name]
    assert len(compiled) == count and all(entry.status == "ok" for entry in compiled), result.problems
    assert set(result.rounds.seconds) == ({"sustained"} if suite == "host" else set(MODES))


@pytest.mark.parametrize(("only", "threads"), [("256, forward +", True), ("256, calling thread", False)])
def test_the_thread_of_a_backward(only: str, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every contender, the peers' too; after each call the setting is PyTorch's again, even if the call raises."""
    seen: list[bool] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda _: seen.append(torch.autograd.is_multithreading_enabled()))
            if len(seen) == 2:
                y.register_hook(lambda _: 1 / 0)
            return y

    def watched(w: Tensor, kind: object = None) -> tuple[nn.Module, list[Tensor]]:
        dtype = kind if isinstance(kind, torch.dtype) else torch.bfloat16
        layer = Watched(w.shape[1], w.shape[0], bias=False, dtype=dtype)
        return layer, [layer.weight]

    for name in ("torch_linear", "our_linear", "te_linear"):
        monkeypatch.setattr(host, name, watched)
    (row,) = registry.choose(["host"], only)
    for contender in row.build(CPU, True).contenders:
        call = contender.setup()
        seen.clear()
        for _ in range(2):
            call()
            assert torch.autograd.is_multithreading_enabled()
        with pytest.raises(ZeroDivisionError):
            call()
        assert torch.autograd.is_multithreading_enabled() and seen == [threads] * 3


# ---- reports ----


def test_the_command_writes_every_round(tmp_path: Path) -> None:
    options = ("host", "--only", "256, forward + backward", "--quick", "--rounds", "2", "--device", "cpu")
    code, output = invoke("bench", *options, "--out", tmp_path)
    assert code == 0, output
    assert output.count("CPU: shapes are divided, nothing here is a result") == 2
    (path,) = tmp_path.glob("*.json")
    assert path.name.endswith("-cpu-bench-host.json")
    assert path.with_name(f"{path.stem}-host.png").stat().st_size > 1000
    content = json.loads(path.read_text())
    assert content["rounds"] == 2 and content["tiny"] and content["versions"]["torch"] == torch.__version__
    (row,) = content["rows"]
    assert row["baseline"] == "torch bf16" and row["sm_clock_mhz"] == {"sustained": [None, None]}
    base, ours = row["contenders"][:2]
    rounds = base["round_seconds"]["sustained"], ours["round_seconds"]["sustained"]
    ratios = [a / b for a, b in zip(*rounds, strict=True)]
    assert ours["ratio"]["sustained"] == pytest.approx(sum(ratios) / 2)  # the median of two
    assert ours["status"] == "ok" and 0 < ours["error"] <= ours["bound"]
    assert invoke("bench", *options, "--out", tmp_path)[0] == 0
    assert path.with_name(f"{path.stem}-2.json").exists()


def test_the_command_fails_where_something_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = made_up(contender("right", ones), contender("wrong", partial(ones, math.nan)))
    monkeypatch.setattr(command, "choose", lambda suites, only: [row])
    code, output = invoke("bench", "--device", "cpu", "--rounds", "1", "--out", tmp_path)
    assert code == 1 and "FAILED: made up: row: wrong: WRONG (error inf" in output
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["rows"][0]["contenders"][1]["error"] == "inf"


# ---- revisions ----


def process(seconds: float | None, status: str = "ok", message: str = "") -> list[dict[str, Any]]:
    medians = {} if seconds is None else {"sustained": seconds}
    entry = {"name": "ours", "status": status, "message": message, "median_seconds": medians}
    return [{"suite": "suite", "row": "row", "contenders": [entry]}]


def test_changes_are_medians_over_pairs_of_processes() -> None:
    found = {"old": [process(2.0), process(9.0), process(4.0)], "new": [process(1.0), process(3.0), process(4.0)]}
    assert against.changes(found) == [against.Change("suite: row", "ours", 4.0, 3.0, 2.0, "", "")]
    found = {"old": [process(None, "failed", "no such option")], "new": [process(1.0)]}
    assert against.changes(found) == [against.Change("suite: row", "ours", None, None, None, "no such option", "")]
    found = {"old": [[]], "new": [process(None, "unavailable", "not installed")]}
    assert against.changes(found) == [against.Change("suite: row", "ours", None, None, None, "", "")]


WRONG = """
_right = multiply_eager


def multiply_eager(gemm, *a, **k):
    return _right(gemm, *a, **k) * (2 if gemm == "wgrad" else 1)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository of this package, whose first commit has a Linear that is wrong by a factor and no benchmark."""
    root = tmp_path / "repository"
    shutil.copytree(Path(minifloat.__file__).parent, root / "minifloat", ignore=shutil.ignore_patterns("__pycache__"))
    gemm, suite = root / "minifloat" / "functional" / "gemm.py", root / "minifloat" / "tools" / "bench" / "host.py"
    files = {path: path.read_text() for path in (gemm, suite)}
    git = ("git", "-C", str(root), "-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run((*git, "init", "--quiet"), check=True)
    for sources in ({gemm: files[gemm] + WRONG, suite: "raise NotImplementedError"}, files):
        for path, source in sources.items():
            path.write_text(source)
        subprocess.run((*git, "add", "."), check=True)
        subprocess.run((*git, "commit", "--quiet", "-m", "a revision"), check=True)
    return root


@pytest.mark.slow
def test_two_revisions_compared(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "PASSES", 1)
    job = against.Job(("host",), "256, forward + backward", "cpu", replace(QUICK, rounds=1))
    changes = {change.contender: change for change in against.changes(against.compare(job, "HEAD~1", repository))}
    assert changes["torch bf16"].ratio is not None
    assert changes["minifloat current"].ratio is None
    assert "WRONG" in changes["minifloat current"].old_problem and not changes["minifloat current"].new_problem
    console = Console(width=200, record=True, file=io.StringIO())
    report.show_changes(list(changes.values()), "HEAD~1", console)
    assert "HEAD~1: WRONG" in console.export_text()
    listed = subprocess.run(("git", "-C", str(repository), "worktree", "list"), capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1  # the temporary one is gone
