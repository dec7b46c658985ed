"""What the user sees of a training, and what stays of it, step by step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from minifloat.train.loop import Metrics

if TYPE_CHECKING:
    from rich.progress import Progress

Observer = Callable[[Metrics], None]


@contextmanager
def observers(out: Path, steps: int, unit: str, tensorboard: bool) -> Iterator[Callable[[str], Observer]]:
    """Gives a function from a run's name to its observer. Writes metrics.jsonl, and TensorBoard's files if asked for.

    Both are written from a run's first step on, that of a resumed run too. Raises ValueError without TensorBoard.
    """
    with ExitStack() as stack:
        file = stack.enter_context((out / "metrics.jsonl").open("w"))
        progress = stack.enter_context(progress_bar())
        write = stack.enter_context(tensorboard_writers(out / "tensorboard")) if tensorboard else None
        yield lambda name: observer(name, steps, unit, file, progress, write and write(name))


def observer(
    name: str, steps: int, unit: str, file: IO[str], progress: Progress, write: Observer | None = None
) -> Observer:
    """What to do with a step's metrics: a line of JSON, a moved bar and, after an evaluation, a printed line."""
    task = progress.add_task(name, total=steps, status="")

    def observe(metrics: Metrics) -> None:
        file.write(json.dumps({"run": name, **asdict(metrics)}) + "\n")
        file.flush()
        speed = f"{metrics.tokens_per_second:,.0f} {unit}s/s"
        progress.update(task, advance=1, status=f"loss {metrics.loss:.3f}  {speed}")
        if metrics.validation_loss is not None:
            progress.console.print(f"{name}: step {metrics.step}, validation loss {metrics.validation_loss:.4f}")
        if write is not None:
            write(metrics)

    return observe


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """One bar for each run: its steps, loss, tokens a second and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    status, name = TextColumn("{task.fields[status]}"), TextColumn("{task.description}")
    with Progress(name, BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn()) as progress:
        yield progress


@contextmanager
def tensorboard_writers(folder: Path) -> Iterator[Callable[[str], Observer]]:
    """Gives a function from a run's name to what writes its metrics for TensorBoard, in a folder of that name."""
    summary_writer = tensorboard_class()
    with ExitStack() as stack:

        def writer(name: str) -> Observer:
            shutil.rmtree(folder / name, ignore_errors=True)  # of the same run before it was resumed
            events = stack.enter_context(summary_writer(str(folder / name)))

            def write(metrics: Metrics) -> None:
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
        raise ValueError("--tensorboard needs tensorboard; get it with: pip install minifloat[tensorboard]") from error
    return SummaryWriter
