"""Starting point of a `minifloat train`, and the folder of its results."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from minifloat.tools.cli import program
from minifloat.tools.cli.names import BF16
from minifloat.tools.train.checkpoint import DAMAGED, PLAIN, Checkpoint, latest
from minifloat.tools.train.run import quantized_steps

RUNS = Path("runs")


def checkpoint_folder(out: Path, name: str) -> Path:
    """Folder of the checkpoints of the run of that recipe."""
    return out / "checkpoints" / name


def recipe_name(checkpoint: Checkpoint) -> str:
    """The recipe of a checkpoint of `minifloat train`; raises ValueError for one of a study's run."""
    if not isinstance(checkpoint.settings.get("recipe"), str):
        raise ValueError(f"{checkpoint.path} is no checkpoint of `minifloat train`; a study's are for the study only")
    name: str = checkpoint.settings["recipe"]
    return name


def last_recipe(checkpoint: Checkpoint) -> str:
    """The recipe of a checkpoint's last steps: bf16 in its finish."""
    name, settings = recipe_name(checkpoint), checkpoint.settings
    steps = settings.get("steps", checkpoint.step)
    return BF16 if checkpoint.step > quantized_steps(steps, settings.get("finish", 0.0)) else name


def check_runs(names: Sequence[str], out: Path) -> None:
    """Raises ValueError when `out` has checkpoints of other runs, whose other results would be overwritten."""
    saved = sorted(path.name for path in (out / "checkpoints").glob("*") if path.is_dir())
    if others := [name for name in saved if name not in names]:
        raise ValueError(
            f"{out} has the results of {' and '.join(saved)}, and this command would overwrite those of "
            f"{' and '.join(others)}; choose another --out, or name the same runs with --recipe and --against"
        )


def check_new(names: Iterable[str], out: Path) -> None:
    """Raises ValueError when a run that begins anew has checkpoints in `out`, good or damaged."""
    for folder in (checkpoint_folder(out, name) for name in names):
        found = sorted(path.name for path in folder.glob("*") if path.name.startswith(("step-", DAMAGED)))
        if found:
            raise ValueError(
                f"{folder / found[-1]} is of an earlier training; continue from it with --resume, move it elsewhere, "
                "or choose another --out"
            )


@dataclass(frozen=True)
class Start:
    """Starting points of a command's runs, by name; one that is in neither begins anew."""

    continued: Mapping[str, Checkpoint] = field(default_factory=dict)
    weights: Mapping[str, Checkpoint] = field(default_factory=dict)
    difference: str = ""  # of the options, for which weights alone are taken


def choose_folder(names: Sequence[str], out: Path | None, resume: bool, resume_from: Path | None) -> Path:
    """Chooses the folder of the results; raises ValueError where there cannot be anything to continue from."""
    if resume_from is not None and resume:
        raise ValueError("--resume continues from --out, --resume-from from its own path; give one of them")
    if resume_from is not None and not (resume_from / PLAIN).is_file() and not (resume_from / "checkpoints").is_dir():
        raise ValueError(
            f"--resume-from: {resume_from} is no checkpoint of minifloat: it has no readable {PLAIN}; give the folder "
            "of one, or the --out of a run"
        )
    if not resume:
        return out or RUNS / f"{names[0]}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = out or _last_folder(names[0])
    if not (folder / "checkpoints").is_dir():
        raise _nothing_in(folder, names)
    return folder


def choose(settings: Mapping[str, Mapping[str, Any]], out: Path, resume: bool, resume_from: Path | None) -> Start:
    """Chooses what the runs begin from, whose settings these are by name.

    With `resume` they go on. With `resume_from` they do if their settings are those of the checkpoints there; else
    they are other runs, which all start from the weights of one.

    Raises ValueError when there is nothing to begin from, when its model has other sizes, and when `out` has other runs
    or those that begin anew.
    """
    check_runs(tuple(settings), out)
    if resume:
        found = {name: latest(checkpoint_folder(out, name)) for name in settings}
        if not any(found.values()):
            raise _nothing_in(out, tuple(settings))
        return Start({name: checkpoint for name, checkpoint in found.items() if checkpoint is not None})
    start = Start() if resume_from is None else _start_from(settings, resume_from)
    check_new([name for name in settings if name not in start.continued], out)
    return start


def _start_from(settings: Mapping[str, Mapping[str, Any]], resume_from: Path) -> Start:
    """Finds what the runs begin from at `resume_from`."""
    there = _saved_at(resume_from)
    own = {name: there[name] for name in settings if name in there}
    different = [other for name, at in own.items() if (other := at.difference(settings[name])) is not None]
    if own and not different:
        return Start(own)
    source = next(iter((own or there).values()))
    if not own and len(there) > 1:
        raise ValueError(f"{resume_from} has several runs; choose {' or '.join(str(at.path) for at in there.values())}")
    for each in settings.values():
        _check_sizes(source, each)
    other = different[0] if different else f"--recipe {recipe_name(source)}, this command has {' and '.join(settings)}"
    return Start(weights=dict.fromkeys(settings, source), difference=other)


def resume_command(arguments: Sequence[str], out: Path) -> str:
    """The command line that continues: these arguments, but from `out`; the program is as it was started."""
    kept, skipped = [], False
    for argument in arguments:
        option, _, value = argument.partition("=")
        if not skipped and option not in ("--out", "--resume", "--resume-from"):
            kept.append(argument)
        skipped = not skipped and option in ("--out", "--resume-from") and not value
    return f"{program()} {shlex.join([*kept, '--out', str(out), '--resume'])}"


def _last_folder(name: str) -> Path:
    folders = sorted(path.parent for path in RUNS.glob(f"{name}-*/checkpoints"))
    if not folders:
        raise ValueError(f"no folder {RUNS / name}-* has checkpoints to continue from; name one with --out")
    return folders[-1]


def newest_out() -> Path:
    """The `--out` in `runs` that has the newest checkpoint; raises ValueError where there is none."""
    found = list(RUNS.glob(f"*/checkpoints/*/*/{PLAIN}"))
    if not found:
        raise ValueError(f"no run in {RUNS} has a checkpoint; name a CHECKPOINT, or make one with minifloat train")
    return max(found, key=lambda file: file.stat().st_mtime_ns).parents[3]


def _nothing_in(out: Path, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"{out} has no complete checkpoint of {' or '.join(names)} to continue from; check --out and --recipe, or "
        "start anew without --resume"
    )


def _saved_at(path: Path) -> dict[str, Checkpoint]:
    """The checkpoint at `path` and the newest of the runs beside it; or the newest of all runs of an `--out`."""
    if (path / PLAIN).exists() or not (path / "checkpoints").is_dir():
        given = Checkpoint.read(path).verify()
        found, runs = {recipe_name(given): given}, path.parent.parent
    else:
        found, runs = {}, path / "checkpoints"
    for run in sorted(runs.glob("*")):
        if run.name not in found and run.is_dir() and (newest := latest(run)) is not None:
            found[run.name] = newest
    if not found:
        raise ValueError(f"{path} has no complete checkpoint to start from; check the path")
    return found


def _check_sizes(source: Checkpoint, settings: Mapping[str, Any]) -> None:
    """Raises ValueError where the weights are of another model; the context may be another."""
    saved, given = source.settings.get("model"), settings["model"]
    if not isinstance(saved, Mapping) or {**saved, "context": None} != {**given, "context": None}:
        raise ValueError(
            f"{source.path} has the weights of a model with --model {source.settings.get('model')}, this command has "
            f"{settings['model']}; give the same sizes, and text of the same vocabulary"
        )
