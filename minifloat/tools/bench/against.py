"""Two revisions compared: the same cases of the same benchmark run on each one's library, processes in turn A B A B.

The other revision is checked out into a temporary worktree, into which this benchmark is copied: what is compared is
the library, never the way of measuring it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import minifloat
from minifloat.tools.bench.registry import choose
from minifloat.tools.bench.run import Options, run
from minifloat.tools.bench.summary import as_dict

PASSES = 2  # processes of each revision
SIDES = ("new", "old")


@dataclass(frozen=True)
class Job:
    """Work of one process."""

    suites: tuple[str, ...]
    only: str
    device: str
    options: Options


class Change(NamedTuple):
    """One contender: median seconds of a call, and how many times as fast the new revision is (None: not timed)."""

    row: str
    contender: str
    old: float | None
    new: float | None
    ratio: float | None
    old_problem: str
    new_problem: str


@contextmanager
def worktree(revision: str, root: Path) -> Iterator[Path]:
    """A temporary checkout of ``revision`` of the repository ``root``, with the benchmark of this one.

    Raises:
        ValueError: git has no such revision.
    """
    with tempfile.TemporaryDirectory(prefix="minifloat-bench-") as folder:
        tree = Path(folder) / "tree"
        git(root, "worktree", "add", "--detach", str(tree), revision)
        try:
            here = Path(__file__).parent
            there = tree / here.relative_to(Path(minifloat.__file__).parents[1])
            shutil.rmtree(there, ignore_errors=True)
            shutil.copytree(here, there, ignore=shutil.ignore_patterns("__pycache__"))
            yield tree
        finally:
            git(root, "worktree", "remove", "--force", str(tree))


def repository() -> Path:
    """The root of the git repository that this package runs from.

    Raises:
        ValueError: it does not run from one.
    """
    package = Path(minifloat.__file__).parent
    root = Path(git(package, "rev-parse", "--show-toplevel"))
    if root / "minifloat" != package:
        raise ValueError(f"{package} is not at the top of a git repository; --against needs a checkout of minifloat")
    return root


def git(folder: Path, *arguments: str) -> str:
    """Runs git with these arguments and returns what it prints.

    Raises:
        ValueError: there is no git, or it fails.
    """
    try:
        found = subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"--against needs git: {error}") from error
    if found.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {found.stderr.strip()}")
    return found.stdout.strip()


def compare(job: Job, revision: str, root: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Runs the job on this tree and on ``revision`` in turn: for "new" and "old" the rows of each process.

    Raises:
        ValueError: there is no such revision, or a process broke down as a whole.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {side: [] for side in SIDES}
    with worktree(revision, root) as old:
        for _ in range(PASSES):
            for side, tree in zip(SIDES, (root, old), strict=True):
                found[side].append(_in_process(job, tree))
    return found


def _in_process(job: Job, tree: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = (sys.executable, "-m", "minifloat.tools.bench.against", json.dumps(asdict(job)), file.name)
        child = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if child.returncode:
            raise ValueError(f"the benchmark does not run on {tree}:\n{child.stderr[-2000:]}")
        content = json.load(file)
    if Path(content["package"]) != tree / "minifloat":
        raise ValueError(f"{tree} was to be measured, but {content['package']} was imported")
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def changes(found: dict[str, list[list[dict[str, Any]]]]) -> list[Change]:
    """Medians of each contender over the pairs of processes."""
    entries = {side: [_entries(rows) for rows in found[side]] for side in SIDES}
    keys = dict.fromkeys(key for each in (*entries["new"], *entries["old"]) for key in each)
    return [_change(key, *([each.get(key, {}) for each in entries[side]] for side in ("old", "new"))) for key in keys]


def _entries(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """A process's entries, by row and contender."""
    return {(f"{row['suite']}: {row['row']}", each["name"]): each for row in rows for each in row["contenders"]}


def _change(key: tuple[str, str], old: list[dict[str, Any]], new: list[dict[str, Any]]) -> Change:
    times = [[entry.get("median_seconds", {}).get("sustained") for entry in side] for side in (old, new)]
    pairs = [(a, b) for a, b in zip(*times, strict=True) if a is not None and b is not None]
    problems = (next((e["message"] for e in side if e.get("status") in ("wrong", "failed")), "") for side in (old, new))
    if not pairs:
        return Change(*key, None, None, None, *problems)
    median = statistics.median
    return Change(
        *key, median(a for a, _ in pairs), median(b for _, b in pairs), median(a / b for a, b in pairs), *problems
    )


def main(arguments: Sequence[str]) -> None:
    """One process: the job as JSON, and where its results go."""
    values = json.loads(arguments[0])
    job = Job(tuple(values["suites"]), values["only"], values["device"], Options(**values["options"]))
    results = run(choose(job.suites, job.only), torch.device(job.device), job.options)
    content = {"package": str(Path(minifloat.__file__).parent), "rows": [as_dict(result) for result in results]}
    Path(arguments[1]).write_text(json.dumps(content, allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1:])
