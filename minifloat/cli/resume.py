"""Where a `minifloat train` continues from, and where its results go."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from minifloat.train.checkpoint import PLAIN, Checkpoint, latest

RUNS = Path("runs")


def checkpoint_folder(out: Path, name: str) -> Path:
    """Where the run of that recipe has its checkpoints."""
    return out / "checkpoints" / name


def recipe_name(checkpoint: Checkpoint) -> str:
    """The recipe of a checkpoint of `minifloat train`; raises ValueError for one of a study's run."""
    if "recipe" not in checkpoint.settings:
        raise ValueError(f"{checkpoint.path} is no checkpoint of `minifloat train`; a study's are for the study only")
    name: str = checkpoint.settings["recipe"]
    return name


def check_runs(names: Sequence[str], out: Path) -> None:
    """Raises ValueError when `out` has checkpoints of other runs, whose other results would be overwritten."""
    saved = sorted(path.name for path in (out / "checkpoints").glob("*") if path.is_dir())
    if others := [name for name in saved if name not in names]:
        raise ValueError(
            f"{out} has the results of {' and '.join(saved)}, and this command would overwrite those of "
            f"{' and '.join(others)}; choose another --out, or name the same runs with --recipe and --against"
        )


def choose_folder(names: Sequence[str], out: Path | None, resume: bool, resume_from: Path | None) -> Path:
    """The folder for the results. Raises ValueError when there is nothing to continue from."""
    if resume_from is not None:
        if resume:
            raise ValueError("--resume continues from --out, --resume-from from its own path; give one of them")
        return out or (_new_folder(names[0]) if _is_checkpoint(resume_from) else resume_from)
    return out or (_last_folder(names[0]) if resume else _new_folder(names[0]))


def choose_starts(names: Sequence[str], folder: Path, resume: bool, resume_from: Path | None) -> dict[str, Checkpoint]:
    """What each of the named runs, whose results go to `folder`, continues from; nothing if it starts anew.

    Raises ValueError when there is nothing to continue from, or nothing that is undamaged.
    """
    if resume_from is not None and _is_checkpoint(resume_from):
        return _with_siblings(names, Checkpoint.read(resume_from).verify())
    if resume or resume_from is not None:
        return _newest(names, resume_from or folder)
    return {}


def resume_command(arguments: Sequence[str], out: Path) -> str:
    """The command line that continues: these arguments, but from `out`."""
    kept, skipped = [], False
    for argument in arguments:
        option, _, value = argument.partition("=")
        if not skipped and option not in ("--out", "--resume", "--resume-from"):
            kept.append(argument)
        skipped = not skipped and option in ("--out", "--resume-from") and not value
    return f"minifloat {shlex.join([*kept, '--out', str(out), '--resume'])}"


def _is_checkpoint(path: Path) -> bool:
    """Or nothing at all; else it is an `--out`."""
    return (path / PLAIN).exists() or not (path / "checkpoints").is_dir()


def _new_folder(name: str) -> Path:
    return RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _last_folder(name: str) -> Path:
    folders = sorted(path.parent for path in RUNS.glob(f"{name}-*/checkpoints"))
    if not folders:
        raise ValueError(f"no folder {RUNS / name}-* has checkpoints to continue from; name one with --out")
    return folders[-1]


def _newest(names: Sequence[str], out: Path) -> dict[str, Checkpoint]:
    found = {name: latest(checkpoint_folder(out, name)) for name in names}
    starts = {name: checkpoint for name, checkpoint in found.items() if checkpoint is not None}
    if not starts:
        raise ValueError(
            f"{out} has no complete checkpoint of {' or '.join(names)} to continue from; check --out and --recipe, or "
            "start anew without --resume"
        )
    return starts


def _with_siblings(names: Sequence[str], given: Checkpoint) -> dict[str, Checkpoint]:
    """The given checkpoint for its own run, and for the others the newest beside it."""
    recipe = recipe_name(given)
    if recipe not in names:
        raise ValueError(f"{given.path} is of --recipe {recipe}, this command has {' and '.join(names)}")
    others = {name: latest(given.path.parent.parent / name) for name in names if name != recipe}
    return {recipe: given} | {name: checkpoint for name, checkpoint in others.items() if checkpoint is not None}
