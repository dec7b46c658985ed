"""`minifloat doctor`: what this machine runs native, by our kernels or emulated, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from minifloat.tools.cli import choose_device, user_errors
from minifloat.tools.cli.machine import show


def doctor(device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto") -> None:
    """Show what runs native, by our kernels or emulated on this machine, and why; with all versions."""
    with user_errors():
        chosen = choose_device(device)
    show(chosen)
