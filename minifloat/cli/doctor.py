"""`minifloat doctor`: what this machine runs native, by our kernels or emulated, and why."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated

import torch
import typer

import minifloat
from minifloat.capability import table
from minifloat.cli import choose_device, device_name, user_errors

PACKAGES = ("torch", "triton", "typer", "rich", "matplotlib")


def doctor(device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto") -> None:
    """Show what runs native, by our kernels or emulated on this machine, and why; with all versions."""
    from rich.console import Console
    from rich.table import Table

    with user_errors():
        chosen = choose_device(device)
    console = Console()
    for name, version in versions().items():
        console.print(f"{name:<12}{version}", highlight=False)
    console.print(f"\non {device_name(chosen)}", highlight=False)
    grid = Table("operation", "formats", "backend", "why")
    for row in table(chosen):
        grid.add_row(row.operation, row.formats, row.backend, row.reason)
    console.print(grid)


def versions() -> dict[str, str]:
    """The versions of all that decides the numbers and the speed; "not installed" where it is not."""
    found = {"minifloat": minifloat.__version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # with the build that it is of
    found["cuda"] = torch.version.cuda or "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        found[f"cuda:{index}"] = device_name(torch.device("cuda", index))
    return found
