"""`minifloat inspect-report`: the picture and the page of what `minifloat.inspect` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from minifloat.tools import inspected
from minifloat.tools.cli import user_errors
from minifloat.tools.cli.output import tensorboard_class


def command(
    folder: Annotated[Path, typer.Argument(help="what has inspect.jsonl, and the files of other ranks")],
    tensorboard: Annotated[Path | None, typer.Option(help="a folder for scalars of TensorBoard too")] = None,
) -> None:
    """Draw what the casts of a run lose: inspect.png, and inspect.html with a table, worst first."""
    with user_errors():
        typer.echo(f"wrote {inspected.write_report(folder)}")
        if tensorboard is not None:
            with tensorboard_class()(str(tensorboard)) as writer:
                inspected.add_scalars(inspected.read_lines(folder), writer)
