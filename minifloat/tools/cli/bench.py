"""`minifloat bench`: how fast we are beside plain torch, torchao and Transformer Engine, in one run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from minifloat.tools.bench import against as revisions
from minifloat.tools.bench.registry import SUITES, Row, choose
from minifloat.tools.bench.run import Options, run
from minifloat.tools.cli import choose_device, device_name, user_errors
from minifloat.tools.cli.doctor import versions
from minifloat.tools.cli.output import out_folder

if TYPE_CHECKING:
    from rich.console import Console

ROUNDS, QUICK_ROUNDS = 20, 5
MOST_ROUNDS = 10_000
WIDTH = 200  # of the tables where they do not go to a terminal


def bench(
    suites: Annotated[list[str] | None, typer.Argument(help=f"some of {', '.join(SUITES)}; default: all")] = None,
    rounds: Annotated[
        int | None, typer.Option(help=f"of all contenders in turn; default {ROUNDS}, with --quick {QUICK_ROUNDS}")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="sustained only, nothing that is compiled")] = False,
    only: Annotated[str, typer.Option(help="rows whose 'suite: name' contains this")] = "",
    against: Annotated[str | None, typer.Option(help="compare this tree with a git revision, in turn")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=out_folder,
            metavar="PATH",
            help="where DATE-NAME.json and plots go; default: benchmarks/results, CPU: runs/bench",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="of the files; default: GPU-bench-SUITES")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
) -> None:
    """Measure speed beside plain torch, torchao and Transformer Engine, each result checked before it is timed.

    Exit code 1: a contender is wrong or broke down. 2: a mistake in the options. On a CPU shapes are divided, so that
    everything can be tried; what comes out is no result.
    """
    from rich.console import Console

    from minifloat.tools.bench import report

    with user_errors():
        chosen = choose_device(device)
        rows = choose(suites or (), only)
        count = rounds if rounds is not None else QUICK_ROUNDS if quick else ROUNDS
        if not 1 <= count <= MOST_ROUNDS:
            choice = "at least 1" if count < 1 else f"at most {MOST_ROUNDS:,}"
            raise ValueError(f"--rounds is {count}; choose {choice}")
    options = Options(count, quick, tiny=chosen.type == "cpu")
    folder = out or Path("runs/bench" if options.tiny else "benchmarks/results")
    measured = dict.fromkeys(row.suite for row in rows) if suites or only else ("all",)
    stem = name or "-".join((_short(chosen), "bench", *measured))
    about = facts(chosen, options)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if options.tiny:
        console.print(report.NOT_RESULTS, style="bold yellow")
    if against is None:
        path, passed = measure(rows, chosen, options, about, folder, stem, console)
    else:
        job = revisions.Job(tuple(suites or ()), only, str(chosen), options)
        path, passed = compare(job, against, about, folder, stem, console)
    if options.tiny:
        console.print(report.NOT_RESULTS, style="bold yellow")
    console.print(f"all rounds: {path}", highlight=False, soft_wrap=True)
    if not passed:
        raise typer.Exit(1)


def measure(
    rows: Sequence[Row], device: torch.device, options: Options, about: dict[str, Any], out: Path, stem: str,
    console: Console,
) -> tuple[Path, bool]:  # fmt: skip
    """Runs the rows and reports; the file, and whether all contenders passed."""
    from minifloat.tools.bench import report

    results = run(rows, device, options, lambda result: report.show(result, console))
    report.conclude(results, console)
    return report.write(results, about, out, stem), not any(result.problems for result in results)


def compare(
    job: revisions.Job, revision: str, about: dict[str, Any], out: Path, stem: str, console: Console
) -> tuple[Path, bool]:
    """Runs the job on this tree and on the revision and reports; the file, and whether this tree passed."""
    from minifloat.tools.bench import report

    each = replace(job.options, rounds=max(job.options.rounds // revisions.PASSES, 1))
    with user_errors():
        found = revisions.compare(replace(job, options=each), revision, revisions.repository())
    changes = revisions.changes(found)
    report.show_changes(changes, revision, console)
    more = {"against": revision, "changes": [change._asdict() for change in changes], "processes": found}
    path = report.write((), about, out, f"{stem}-against-{slug(revision)}", more)
    return path, not any(change.new_problem for change in changes)


def facts(device: torch.device, options: Options) -> dict[str, Any]:
    """Facts about the conditions, for the JSON."""
    return {
        "command": f"minifloat {shlex.join(sys.argv[1:])}",
        "date": date.today().isoformat(),
        "device": device_name(device),
        "commit": commit(),
        "versions": versions(),
        "rounds": options.rounds,
        "quick": options.quick,
        "tiny": options.tiny,
    }


def commit() -> str:
    """The commit that this package runs from, "-dirty" if it was changed; "unknown" outside a repository."""
    try:
        return revisions.git(Path(__file__).parent, "describe", "--always", "--dirty")
    except ValueError:
        return "unknown"


def slug(text: str) -> str:
    """Makes the text part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()


def _short(device: torch.device) -> str:
    """A GPU's name in a word, such as "h200"."""
    return "cpu" if device.type == "cpu" else slug(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))
