"""What happens to a training from outside: signals, a launcher that dies, ranks that hang, output that nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minifloat.comm.group import Group
from minifloat.tools.cli import ranks as cli_ranks
from minifloat.tools.cli.ranks import PATIENCE, decided_by_first
from minifloat.tools.train import loop
from minifloat.tools.train.interrupt import GRACE, PRESSED_GRACE, signals_noted
from minifloat.tools.train.ranks import ALONE, Ranks
from tests.helpers.micro_training import invoke, write_texts
from tests.helpers.train_on_ranks import command, launched

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Acted(Exception):  # noqa: N818  # no error: the signal acts as always
    """The handler that stood before has run."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """All three signals raise :class:`Acted`, however this process was started (a shell's `&` ignores SIGINT)."""

    def act(number: int, _: Any) -> None:
        raise Acted(signal.Signals(number).name)

    before = {number: signal.signal(number, act) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("by_torchrun", [False, True])
@pytest.mark.parametrize("number", NUMBERS)
def test_an_equal_signal_within_the_grace_time_is_the_same(
    handlers: None, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, by_torchrun: bool
) -> None:
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    clock, grace = Clock(), PRESSED_GRACE if number == signal.SIGINT and not by_torchrun else GRACE
    with pytest.raises(Acted, match=number.name), signals_noted(clock) as came:
        assert came() == 0
        signal.raise_signal(number)
        clock.now += grace - 0.01
        signal.raise_signal(number)
        assert came() == number
        clock.now += 0.02
        signal.raise_signal(number)
    with pytest.raises(Acted):  # what stood before stands again
        signal.raise_signal(number)


@pytest.mark.parametrize("first, second", [(signal.SIGTERM, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)])
def test_another_signal_acts_as_always(handlers: None, first: signal.Signals, second: signal.Signals) -> None:
    with pytest.raises(Acted, match=second.name), signals_noted() as came:
        signal.raise_signal(first)
        assert came() == first
        signal.raise_signal(second)


# ---- the command ----


@pytest.fixture
def options(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "texts").mkdir()
    fixed = "--model micro --device cpu --batch-size 2 --recipe bf16"
    return ("train", write_texts(tmp_path / "texts"), *fixed.split())


def before_step(number: int, act: Callable[[], object]) -> None:
    """Runs `act` once, before that training step of this process."""
    step, left = loop.train_step, [number]

    def stepped(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            act()
        return step(*arguments)

    loop.train_step = stepped


def kill_launcher_in_the_third_step() -> None:
    def kill() -> None:
        launcher = os.getppid()
        os.kill(launcher, signal.SIGKILL)
        wait_until(lambda: os.getppid() != launcher)  # or a busy machine ends the last steps before the launcher

    before_step(3, kill)


def test_a_rank_whose_launcher_is_gone_saves_and_stops(options: tuple[object, ...], tmp_path: Path) -> None:
    asked = (*options, "--steps", 5, "--out", tmp_path / "out")
    with launched(tmp_path, 1, *asked, hook=kill_launcher_in_the_third_step) as (_, rank):
        wait_until(lambda: not runs(rank))
    assert "bf16: stopped after step 3, saved in" in (tmp_path / "rank-0.err").read_text()


def tell_before_joining(file: Path) -> None:
    join = dist.init_process_group

    def told(*arguments: Any, **options: Any) -> None:
        file.touch()
        join(*arguments, **options)

    dist.init_process_group = told


def test_a_rank_whose_launcher_dies_does_not_wait_for_others(options: tuple[object, ...], tmp_path: Path) -> None:
    joins = tmp_path / "joins"
    with launched(tmp_path, 2, *options, "--tp", 2, hook=partial(tell_before_joining, joins)) as (launcher, rank):
        wait_until(joins.exists)
        launcher.kill()
        wait_until(lambda: not runs(rank), 10)


def hang_in_the_third_step() -> None:
    if os.environ["RANK"] == "1":
        before_step(3, lambda: time.sleep(100))


def test_a_rank_that_hangs_is_noticed(options: tuple[object, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = (*options, "--steps", 5, "--fsdp", "--timeout", 0.1, "--out", out)
    with command(tmp_path / "ranks", 2, *asked, hook=hang_in_the_third_step) as started:
        started.processes[0].join(60)
        assert started.processes[0].exitcode == 1
    assert "FAILED: another rank was silent for 0:00:06 (see --timeout)" in started.said()[1]
    assert (out / "metrics.jsonl").read_text().count("\n") == 2


def test_each_run_may_compile_before_its_steps_must_be_quick(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(Ranks, "set_timeout", lambda self, timeout: asked.append(timeout))
    two = ("--against", "current", "--max-gap", "inf", "--max-gradient-gap", "inf", "--steps", 2)
    assert invoke(*options, *two, "--out", tmp_path / "out")[0] == 0
    assert asked == [PATIENCE, None, PATIENCE, None, PATIENCE]  # None: the one of `--timeout`, of several ranks


@pytest.mark.parametrize(
    "error, message",
    [
        (ValueError("a shape that no layer takes"), "FAILED: a shape that no layer takes"),
        (torch.OutOfMemoryError("2 GiB"), "FAILED: the memory of cpu is too small; choose a smaller --batch-size"),
    ],
)
def test_what_a_model_refuses_ends_without_a_traceback(
    options: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(loop, "train_step", fail)
    code, output = invoke(*options, "--steps", 2, "--out", tmp_path / "out")
    assert code == 1 and message in output and "Traceback" not in output


class Told(Exception):  # noqa: N818  # what the test looks for
    """A rank other than the first has decided by itself."""


def test_the_first_rank_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others learn of its answer, or of its error."""
    said: list[Any] = []
    monkeypatch.setattr(cli_ranks, "from_first", lambda value, ranks: said.append(value) or said[0])

    def refuse() -> int:
        raise ValueError("no such folder")

    def other() -> int:
        raise Told

    first, second = ALONE, Ranks(Group("", 2, 1))
    assert decided_by_first(lambda: 7, first) == decided_by_first(other, second) == 7
    said.clear()
    for decide, rank in ((refuse, first), (other, second)):
        with pytest.raises(ValueError, match="no such folder"):
            decided_by_first(decide, rank)


# ---- torchrun ----

# Ranks of a model whose heads two can share; they train until they are told to stop.
COMMAND = (
    "from minifloat.tools.cli import main; from tests.helpers import train_on_ranks as t; "
    "t.MODELS['micro'] = t.SIZES; main()"
)


def torchrun(*arguments: object) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    return subprocess.Popen(
        [*started, "-c", COMMAND, *map(str, arguments)], start_new_session=True, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_until(true: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def runs(process: int) -> bool:
    """It has not ended, though its parent may not have asked how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_ranks_that_start_end_with_torchrun(options: tuple[object, ...], tmp_path: Path) -> None:
    job = torchrun(*options, "--tp", 2, "--steps", 100_000, "--out", tmp_path / "out")
    wait_until(lambda: len(children_of(job.pid)) == 2)
    ranks = children_of(job.pid)
    try:
        job.kill()
        wait_until(lambda: job.poll() is not None and not any(map(runs, ranks)))
    finally:
        for process in filter(runs, (*ranks, job.pid)):
            os.kill(process, signal.SIGKILL)
        job.wait()
