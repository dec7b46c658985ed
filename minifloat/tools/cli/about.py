"""`minifloat --version`, and what the command is about."""

from __future__ import annotations

from typing import Annotated

import typer

from minifloat.tools.cli import print_version


def about(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="show the version and end")
    ] = False,
) -> None:
    """Train PyTorch transformers in 8-bit and 4-bit floating point."""
