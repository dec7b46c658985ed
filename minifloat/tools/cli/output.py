"""Output of a command: its folder, the files of a training, and what the user sees of it, step by step."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from minifloat.tools.train.run import Metrics

Observer = Callable[["Metrics"], None]
LOCK = ".lock"
EVERY = 10.0  # seconds between lines where there is no bar
STATUS = "{task.completed}/{task.total} {task.fields[status]}"
ESTIMATED = 4  # steps after which the time left is told


class MetricsFile:
    """Lines of JSON, one a step. What an earlier command wrote of a run stays until this one has a step of it.

    Args:
        names: the runs of this command; lines of others go with the first step.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path, self._names, self._begun = path, names, set[str]()

    def write(self, name: str, metrics: Metrics) -> None:
        """Adds a step of that run; raises OSError, saying what to do, where the disk is full."""
        line = json.dumps({"run": name, **asdict(metrics)}) + "\n"
        try:
            if name not in self._begun:
                self._replace(name)
                self._begun.add(name)
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise OSError(f"{self._path} cannot be written: {error}; mend that, and continue with --resume") from error

    def _replace(self, name: str) -> None:
        """Leaves the lines of this command's other runs, all in one moment."""
        aside = self._path.with_name(f".{self._path.name}.partial")
        others = set(self._names) - {name}
        try:
            with aside.open("wb") as file:
                for line in self._path.open("rb") if self._path.exists() else ():
                    if _run_of(line) in others:
                        file.write(line.rstrip(b"\n") + b"\n")
            aside.replace(self._path)
        finally:
            aside.unlink(missing_ok=True)


def _run_of(line: bytes) -> object:
    """The name in a line of a metrics file; None in half of one."""
    try:
        run = json.loads(line)["run"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return run if isinstance(run, str) else None


@contextmanager
def observers(
    out: Path, left: Mapping[str, int], steps: int, unit: str, tensorboard: bool, peak: Callable[[], int | None]
) -> Iterator[Callable[[str], Observer]]:
    """Gives a function from a run's name to its observer. Writes metrics.jsonl, and TensorBoard's files if asked for.

    Both are written from a run's first step on, that of a resumed run too; until a run has one, what they have of it
    stays. Raises ValueError without TensorBoard.

    Args:
        left: the runs of this command, and how many of their `steps` are to be done.
        peak: the memory in use at most so far, in bytes.
    """
    with ExitStack() as stack:
        file = MetricsFile(out / "metrics.jsonl", tuple(left))
        progress = stack.enter_context(progress_bar())
        write = stack.enter_context(tensorboard_writers(out / "tensorboard")) if tensorboard else None
        clock = Clock(sum(left.values()))

        def observer(name: str) -> Observer:
            task = progress.add_task(name, total=steps, status="")
            write_events = write and write(name)

            def observe(metrics: Metrics) -> None:
                file.write(name, metrics)
                status = described(metrics, unit, peak())
                progress.update(task, advance=1, status=status)
                for line in clock.lines(name, metrics, steps, left, status, progress.console.is_terminal):
                    progress.console.print(line, soft_wrap=True, highlight=False)
                if write_events is not None:
                    write_events(metrics)

            return observe

        yield observer


def described(metrics: Metrics, unit: str, peak: int | None) -> str:
    """A step in a few words: loss, learning rate, gradient norm, speed and peak memory."""
    memory = "" if peak is None else f" {peak / 2**30:.2f} GiB"
    speed = f"{metrics.tokens_per_second:,.0f} {unit}s/s"
    rates = f"lr {metrics.learning_rate:.1e} norm {metrics.gradient_norm:.2f}"
    return f"loss {metrics.loss:.3f} {rates} {speed}{memory}"


class Clock:
    """The lines of a command in between: how long it takes, evaluations, and where no bar is, how far it is.

    Args:
        left: steps of all runs that are to be done.
    """

    def __init__(self, left: int) -> None:
        self._left, self._done = left, 0
        self._began = self._said = time.monotonic()

    def lines(
        self, name: str, metrics: Metrics, steps: int, left: Mapping[str, int], status: str, bar: bool
    ) -> Iterator[str]:
        """The lines to print after a step; those that an earlier command has done count for nothing."""
        if metrics.step <= steps - left[name]:
            return
        now, self._done = time.monotonic(), self._done + 1
        if self._done == 1:  # it may have compiled
            self._began = now
        rest = (now - self._began) / max(1, self._done - 1) * (self._left - self._done)
        if self._done == min(ESTIMATED, self._left):
            yield f"about {duration(rest)} to go, for {self._left:,} steps in all"
        if metrics.validation_loss is not None:
            yield f"{name}: step {metrics.step}, validation loss {metrics.validation_loss:.4f}"
        if not bar and now - self._said >= EVERY:
            yield f"{name}: step {metrics.step} of {steps}, {status}" + f", {duration(rest)} to go" * (self._done > 1)
            self._said = now


def duration(seconds: float) -> str:
    """Writes `1:05` or `2:03:04`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """One bar for each run, where there is a terminal: its steps, what :func:`described` says, and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    name, status = (TextColumn(text, table_column=Column(no_wrap=True)) for text in ("{task.description}", STATUS))
    console = Console()
    rest = TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
    with Progress(
        name, BarColumn(bar_width=10), status, rest, console=console, disable=not console.is_terminal
    ) as progress:
        yield progress


@contextmanager
def tensorboard_writers(folder: Path) -> Iterator[Callable[[str], Observer]]:
    """Gives a function from a run's name to what writes its metrics for TensorBoard, in a folder of that name."""
    summary_writer = tensorboard_class()
    with ExitStack() as stack:

        def writer(name: str) -> Observer:
            events: Any = None

            def write(metrics: Metrics) -> None:
                nonlocal events
                if events is None:
                    shutil.rmtree(folder / name, ignore_errors=True)  # of the same run before it was resumed
                    events = stack.enter_context(summary_writer(str(folder / name)))
                for key, value in asdict(metrics).items():
                    if key != "step" and value is not None:
                        events.add_scalar(key, value, metrics.step)

            return write

        yield writer


def tensorboard_class() -> Any:
    """PyTorch's SummaryWriter; raises ValueError where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("--tensorboard needs tensorboard; get it with: pip install tensorboard") from error
    return SummaryWriter


# ---- the folder and the streams of a command ----


def out_folder(text: str) -> Path:
    """The folder that `--out` names; raises BadParameter for no name, which would be the folder that one is in."""
    if not text.strip() or any(character < " " for character in text):
        raise typer.BadParameter(f"{text!r} is no name of a folder; choose another")
    return Path(text)


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Makes the folder `out` and keeps other processes from claiming it.

    The lock is the kernel's, so it ends with this process however that dies. Child programs do not inherit it. The
    file says which process has it. Raises ValueError when another one has, and when `out` cannot be made or written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written to ({error}); choose another --out") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            owner = file.read(64).strip() or "unknown"
            raise ValueError(
                f"another process trains in {out} (pid {owner}); wait for its end, or choose another --out"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


class _Droppable(io.FileIO):
    """A file descriptor; what it does not take is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:  # the reader has gone, or the disk is full
            return memoryview(data).nbytes


@contextmanager
def output_optional() -> Iterator[None]:
    """Inside, standard output and error may break (`| head -1`, a full disk): what they do not take is dropped.

    For commands whose results are files: a training does not end when its output is closed.
    """
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = map(_droppable, before)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _droppable(stream: Any) -> Any:
    """The stream with a file that drops, unless it is of no file descriptor, as in a notebook or a test."""
    if stream is None:  # it was closed before Python began
        return open(os.devnull, "w")
    try:
        stream.flush()
        file = _Droppable(stream.fileno(), "w", closefd=False)
    except OSError:  # io.UnsupportedOperation is one
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
    )
